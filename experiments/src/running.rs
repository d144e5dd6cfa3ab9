//! What every command that runs workers takes: a model folder, a layout, speeds, batching.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use anyhow::{anyhow, bail};
use clap::Args;
use infercluster_executor::coordinator::{CoordinatorOptions, Launch, Limits};
use infercluster_executor::generate::eos_ids;
use infercluster_executor::launch::WorkerCommand;
use infercluster_executor::speed::{Speed, SpeedCheck};
use infercluster_spec::layout::Reduction;
use infercluster_spec::validate::validate_layout;
use infercluster_spec::{Bytes, EngineOptions, GpuId, Layout, Model};

use crate::failure::WithFix as _;
use crate::{io, models};

/// Flags of commands that run workers.
#[derive(Debug, Clone, Args)]
pub(crate) struct RunFlags {
    /// Folder with config.json and safetensors.
    #[arg(long)]
    pub(crate) model_dir: PathBuf,
    /// What runs where; one worker with everything where absent.
    #[arg(long)]
    pub(crate) layout: Option<PathBuf>,
    /// Emulated speed of each worker in device order, such as 1.0:0.4.
    #[arg(long)]
    pub(crate) speed: Option<Speeds>,
    /// Most new tokens of one step: long prompts are computed in chunks of it.
    #[arg(long)]
    pub(crate) chunk: Option<u32>,
    /// Tokens of a KV block, where it is not the layout's.
    #[arg(long)]
    pub(crate) block_size: Option<u32>,
    /// Most sequences of one step.
    #[arg(long)]
    pub(crate) max_sequences: Option<u32>,
    /// Memory that each worker may use, such as "2 GiB".
    #[arg(long)]
    pub(crate) memory: Option<Bytes>,
    /// Keep each worker's computing thread on a core of its own, where this machine has as many.
    #[arg(long)]
    pub(crate) pin: bool,
}

/// The slowest device that is emulated: a slower one would look like one that hangs.
const LEAST_SPEED: f64 = 0.001;

/// Speed factors in device order, written `1.0:0.4`.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Speeds(Vec<Speed>);

impl FromStr for Speeds {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let speed = |part: &str| {
            let factor: f64 = part
                .trim()
                .parse()
                .map_err(|_| format!("`{part}` is no number"))?;
            if factor > 0.0 && factor < LEAST_SPEED {
                return Err(format!(
                    "speed {factor} is below {LEAST_SPEED}: a step would take minutes"
                ));
            }
            Speed::try_from(factor).map_err(|error| error.to_string())
        };
        text.split(':').map(speed).collect::<Result<_, _>>().map(Self)
    }
}

impl RunFlags {
    /// Reads and checks everything that the flags name.
    pub(crate) fn options(&self) -> anyhow::Result<CoordinatorOptions> {
        let model = model_of(&self.model_dir)?;
        let mut layout = match &self.layout {
            Some(path) => io::read_document(path)?,
            None => Layout::single(&model, Reduction::Invariant),
        };
        if let Some(block_size) = self.block_size {
            layout.kv.block_size = block_size;
        }
        validate_layout(&layout, &model, None)?;
        let speeds = match &self.speed {
            Some(speeds) => speeds.by_device(&layout)?,
            None => BTreeMap::new(),
        };
        let mut options = options(&self.model_dir, &model, &layout)?;
        options.engine = self.engine();
        options.speeds = speeds;
        options.memory = self.memory;
        if self.pin {
            options.launch = pinned()?;
        }
        Ok(options)
    }

    fn engine(&self) -> EngineOptions {
        let default = EngineOptions::default();
        EngineOptions {
            token_budget: self.chunk.unwrap_or(default.token_budget),
            max_sequences: self.max_sequences.unwrap_or(default.max_sequences),
            ..default
        }
    }
}

impl Speeds {
    /// Both factors, where there are two.
    pub(crate) fn pair(&self) -> anyhow::Result<[Speed; 2]> {
        match self.0.as_slice() {
            &[first, second] => Ok([first, second]),
            other => bail!(
                "--speed has {} factors, two are needed, such as 1.0:0.4",
                other.len()
            ),
        }
    }

    /// Each device with its factor.
    fn by_device(&self, layout: &Layout) -> anyhow::Result<BTreeMap<GpuId, Speed>> {
        let (given, devices) = (self.0.len(), layout.gpus.len());
        if given != devices {
            let refused = Err(anyhow!(
                "--speed has {given} factors, the layout has {devices} devices"
            ));
            return refused.fix("give one factor for each device, such as 1.0:0.4 for two");
        }
        Ok(layout.gpus.iter().copied().zip(self.0.iter().copied()).collect())
    }
}

/// Reads the model of a folder.
pub(crate) fn model_of(folder: &Path) -> anyhow::Result<Model> {
    if !folder.is_dir() {
        let refused = Err(anyhow!("{} is no folder", folder.display()));
        return refused.fix(
            "name a folder with config.json and safetensors, or make one: infercluster model make -o DIR",
        );
    }
    Ok(models::read(folder)?.model)
}

/// Options of a coordinator that starts workers as processes of this program.
pub(crate) fn options(folder: &Path, model: &Model, layout: &Layout) -> anyhow::Result<CoordinatorOptions> {
    Ok(CoordinatorOptions {
        model: model.clone(),
        layout: layout.clone(),
        model_dir: folder.to_owned(),
        engine: EngineOptions::default(),
        kv_blocks: None,
        memory: None,
        speeds: BTreeMap::new(),
        eos: eos_ids(folder)?,
        launch: Launch::Processes(WorkerCommand::this_program()?),
        limits: Limits::default(),
    })
}

/// Workers as processes of this program, each on a core of its own.
pub(crate) fn pinned() -> anyhow::Result<Launch> {
    Ok(Launch::Processes(WorkerCommand::this_program()?.pinned()))
}

/// Demands that emulated devices had their speeds: figures of a run that missed them mean nothing.
pub(crate) fn demand_speeds(checks: &[SpeedCheck]) -> anyhow::Result<()> {
    let Some(missed) = checks.iter().find(|check| !check.is_valid()) else {
        return Ok(());
    };
    let achieved = missed.achieved.unwrap_or_default();
    bail!(
        "{} was to run at speed {} but ran at {achieved:.3}: the run is invalid, other work took its core",
        missed.gpu,
        missed.asked
    );
}

/// Achieved speeds of one or more runs in one line, where any is emulated.
pub(crate) fn speed_line(checks: &[SpeedCheck]) -> Option<String> {
    if checks.iter().all(|check| check.asked == 1.0) {
        return None;
    }
    let mut devices: BTreeMap<GpuId, (f64, Vec<f64>)> = BTreeMap::new();
    for check in checks {
        let (_, achieved) = devices
            .entry(check.gpu)
            .or_insert_with(|| (check.asked, Vec::new()));
        achieved.extend(check.achieved);
    }
    let part = |(gpu, (asked, mut achieved)): (GpuId, (f64, Vec<f64>))| {
        achieved.sort_by(f64::total_cmp);
        match (achieved.first(), achieved.last()) {
            (Some(least), Some(most)) if least < most => {
                format!("{gpu} {least:.3} to {most:.3} (asked {asked})")
            }
            (Some(only), _) => format!("{gpu} {only:.3} (asked {asked})"),
            _ => format!("{gpu} idle (asked {asked})"),
        }
    };
    let parts: Vec<String> = devices.into_iter().map(part).collect();
    Some(format!("emulated speeds: {}", parts.join(", ")))
}
