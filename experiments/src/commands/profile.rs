//! `profile`: what the operators of a model take on this host.

use std::path::PathBuf;

use anyhow::bail;
use clap::Args;
use infercluster_executor::speed::Speed;
use infercluster_spec::Profile;

use crate::Outcome;
use crate::profiling::{self, CPU_TYPE};
use crate::screen::{Columns, Screen};
use crate::{io, models, running};

/// Measures the operators that shards of a model meet, on one core of this host.
///
/// Nothing else should run meanwhile. The rows are what `calibrate` fits.
#[derive(Debug, Args)]
#[command(after_help = "Example: infercluster profile --model-dir tiny --speed 0.4 -o slow.profile.json")]
pub(crate) struct ProfileCommand {
    /// Folder with the model's config.json, or a model file; weights are not needed.
    #[arg(long)]
    model_dir: PathBuf,
    /// Emulated speed, above 0 and at most 1.
    #[arg(long, default_value = "1.0", value_parser = speed)]
    speed: Speed,
    /// Most tokens of one step that are measured.
    #[arg(long, default_value_t = 64)]
    tokens: usize,
    /// Device type of the cluster that the rows are of.
    #[arg(long, default_value = CPU_TYPE)]
    device_type: String,
    /// Where to write the profile.
    #[arg(short, long)]
    output: Option<PathBuf>,
}

fn speed(text: &str) -> Result<Speed, String> {
    let factor: f64 = text.parse().map_err(|_| format!("`{text}` is no number"))?;
    Speed::try_from(factor).map_err(|error| error.to_string())
}

/// Runs the command.
pub(crate) fn run(arguments: &ProfileCommand, screen: &Screen) -> anyhow::Result<Outcome> {
    if !(1..=4096).contains(&arguments.tokens) {
        bail!(
            "--tokens is {}, between 1 and 4096 are accepted",
            arguments.tokens
        );
    }
    let model = models::read(&arguments.model_dir)?.model;
    let bar = screen.progress(1, "measuring operators");
    let profiled = profiling::profile(&model, arguments.tokens, arguments.speed, &arguments.device_type);
    bar.finish_and_clear();
    let profiled = profiled?;
    running::demand_speeds(&[profiled.check])?;
    if let Some(output) = &arguments.output {
        io::write_document(output, &profiled.profile)?;
    }
    screen.document(&profiled.profile, people)?;
    Ok(Outcome::Done)
}

fn people(profile: &Profile) -> String {
    let mut table = Columns::new([
        "operator",
        "dtype",
        ">median us",
        ">p10 us",
        ">p90 us",
        ">GFLOP/s",
    ]);
    for row in &profile.measurements {
        let micros = |seconds: f64| format!("{:.1}", 1e6 * seconds);
        let flops = row.operator.flops().as_f64();
        let rate = if flops > 0.0 {
            format!("{:.1}", flops / row.median_s / 1e9)
        } else {
            "-".to_owned()
        };
        table.row([
            format!("{:?}", row.operator),
            row.dtype.to_string(),
            micros(row.median_s),
            micros(row.p10_s),
            micros(row.p90_s),
            rate,
        ]);
    }
    format!(
        "{}: {}\n{table}",
        profile.device_type, profile.provenance.device_name
    )
}
