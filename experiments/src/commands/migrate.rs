//! `migrate plan` and `migrate apply`: from one layout to another.

use std::collections::BTreeMap;
use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};
use infercluster_executor::admin;
use infercluster_executor::coordinator::MigrationReport;
use infercluster_planner::migrate::{MigrationOptions, WeightSource, plan_migration};
use infercluster_spec::migration::{Transfer, TransferItem, TransferSource};
use infercluster_spec::{Bytes, GpuId, Layout, MigrationPlan, Tokens};

use crate::Outcome;
use crate::screen::{Columns, Screen, facts};
use crate::{clusters, io, models};

/// Plans the way from one layout to another, or takes it.
#[derive(Debug, Args)]
pub(crate) struct MigrateCommand {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    Plan(Plan),
    Apply(Apply),
}

/// Has a running service change its layout while it answers, and waits for the end.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    infercluster migrate apply --url http://127.0.0.1:8000 --to uneven.json\n  \
    infercluster migrate apply --url http://127.0.0.1:8000 --plan plan.json")]
struct Apply {
    /// The service, on this machine.
    #[arg(long)]
    url: String,
    /// The layout that shall run.
    #[arg(long, required_unless_present = "plan", conflicts_with = "plan")]
    to: Option<PathBuf>,
    /// A plan that starts at the layout that runs; its phases are taken one after another.
    #[arg(long)]
    plan: Option<PathBuf>,
}

/// Plans what moves where, in phases that each end in a valid layout.
#[derive(Debug, Args)]
#[command(
    after_help = "Example: infercluster migrate plan --from even.json --to uneven.json --model tiny \
    --live-tokens 2048 -o plan.json"
)]
struct Plan {
    /// The layout that runs.
    #[arg(long)]
    from: PathBuf,
    /// The layout that shall run.
    #[arg(long)]
    to: PathBuf,
    /// The model: a folder, a config.json or a model file.
    #[arg(long)]
    model: PathBuf,
    /// A cluster whose device memories limit each phase; no limit where absent.
    #[arg(long)]
    cluster: Option<PathBuf>,
    /// Tokens whose KV is live while it migrates.
    #[arg(long, default_value_t = 0)]
    live_tokens: u64,
    /// Where devices get weights that they lack.
    #[arg(long, value_enum, default_value_t = SourceChoice::Disk)]
    weights_from: SourceChoice,
    /// Where to write the plan.
    #[arg(short, long)]
    output: Option<PathBuf>,
}

/// Weight sources by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum SourceChoice {
    /// The checkpoint on the device's own host.
    Disk,
    /// Devices that hold them.
    Holders,
}

/// Runs the command.
pub(crate) fn run(command: MigrateCommand, screen: &Screen) -> anyhow::Result<Outcome> {
    match command.action {
        Action::Plan(arguments) => plan(&arguments, screen),
        Action::Apply(arguments) => apply(&arguments, screen),
    }
}

fn apply(arguments: &Apply, screen: &Screen) -> anyhow::Result<Outcome> {
    let reports = match (&arguments.to, &arguments.plan) {
        (Some(path), _) => admin::migrate(&arguments.url, &io::read_document::<Layout>(path)?)?,
        (None, Some(path)) => admin::migrate(&arguments.url, &io::read_document::<MigrationPlan>(path)?)?,
        (None, None) => anyhow::bail!("one of --to and --plan is needed"),
    };
    screen.answer(&reports, |reports| {
        reports.iter().map(applied).collect::<Vec<_>>().join("\n")
    })?;
    Ok(Outcome::Done)
}

fn applied(report: &MigrationReport) -> String {
    let milliseconds = |seconds: f64| format!("{:.1} ms", 1e3 * seconds);
    let took = |seconds: Option<f64>| seconds.map_or_else(|| "-".to_owned(), milliseconds);
    let steps = format!("{} steps of the old layout meanwhile", report.steps_meanwhile);
    facts([
        (
            "in force",
            format!("{} from {}", report.epoch, report.first_step.unwrap_or_default()),
        ),
        ("prepared in", took(report.prepare_s)),
        (
            "copied in",
            format!("{}, {} rounds, {steps}", took(report.copy_s), report.rounds),
        ),
        (
            "KV",
            format!(
                "{} live at the commit, {} moved, {} kept",
                report.kv_bytes_at_commit, report.kv_bytes_moved, report.kv_bytes_kept
            ),
        ),
        ("record", took(report.record_s)),
        (
            "pause",
            format!(
                "{} streams: p50 {}, worst {}",
                report.pause_s.samples,
                milliseconds(report.pause_s.p50),
                milliseconds(report.pause_s.max)
            ),
        ),
        (
            "ITL p50",
            format!(
                "{} before, {} meanwhile, {} after",
                milliseconds(report.itl_before_s.p50),
                milliseconds(report.itl_meanwhile_s.p50),
                milliseconds(report.itl_after_s.p50)
            ),
        ),
    ])
}

fn plan(arguments: &Plan, screen: &Screen) -> anyhow::Result<Outcome> {
    let (from, to) = (
        io::read_document(&arguments.from)?,
        io::read_document(&arguments.to)?,
    );
    let model = models::read(&arguments.model)?.model;
    let live_tokens = Tokens(arguments.live_tokens);
    let mut options = match &arguments.cluster {
        Some(path) => MigrationOptions::of_cluster(&clusters::read(path)?.cluster, live_tokens),
        None => MigrationOptions {
            live_tokens,
            ..MigrationOptions::default()
        },
    };
    options.weight_source = match arguments.weights_from {
        SourceChoice::Disk => WeightSource::Disk,
        SourceChoice::Holders => WeightSource::Holders,
    };
    let plan = plan_migration(&from, &to, &model, &options)?;
    if let Some(output) = &arguments.output {
        io::write_document(output, &plan)?;
    }
    screen.document(&plan, |plan| people(plan, live_tokens))?;
    Ok(Outcome::Done)
}

fn people(plan: &MigrationPlan, live_tokens: Tokens) -> String {
    let mut text = String::new();
    for (index, phase) in plan.phases.iter().enumerate() {
        let mut table = Columns::new([
            "to",
            ">weights from disk",
            ">weights from devices",
            ">KV of one token",
            ">memory peak",
        ]);
        let mut devices: BTreeMap<GpuId, [Bytes; 3]> = BTreeMap::new();
        for transfer in &phase.transfers {
            devices.entry(transfer.to).or_default()[column(transfer)] += transfer.bytes;
        }
        for (gpu, [disk, weights, kv]) in devices {
            let peak = phase
                .memory_peak
                .get(&gpu)
                .map_or_else(|| "-".to_owned(), Bytes::to_string);
            table.row([
                gpu.to_string(),
                disk.to_string(),
                weights.to_string(),
                kv.to_string(),
                peak,
            ]);
        }
        let kv: Bytes = phase
            .transfers
            .iter()
            .filter(|transfer| column(transfer) == 2)
            .map(|transfer| transfer.bytes)
            .sum();
        let kv = kv.checked_mul(live_tokens.0).map_or_else(
            || "more than can be counted".to_owned(),
            |bytes| bytes.to_string(),
        );
        text.push_str(&format!(
            "phase {} of {}: {} transfers, KV of {} live tokens: {kv}\n{table}",
            index + 1,
            plan.phases.len(),
            phase.transfers.len(),
            live_tokens.0
        ));
    }
    text
}

/// Which column a transfer belongs to.
fn column(transfer: &Transfer) -> usize {
    match (transfer.item, transfer.from) {
        (TransferItem::Kv { .. }, _) => 2,
        (TransferItem::Weights { .. }, TransferSource::Gpu(_)) => 1,
        (TransferItem::Weights { .. }, TransferSource::Disk) => 0,
    }
}
