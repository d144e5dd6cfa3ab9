//! The command tree.

use clap::{Parser, Subcommand};

use crate::commands::{
    bench, calibrate, cluster, doctor, fuzz, generate, layout, migrate, model, plan, profile, quickstart,
    replay, report, serve, simulate, trace, worker,
};

/// Plans, simulates and runs LLM inference on accelerators that are not alike.
///
/// Results go to stdout (tables, or JSON with --json), talk to stderr. Inputs are files or - for standard
/// input. Exit codes: 0 done; 1 done, but the goal is not met; 2 bad input or failure.
/// RUST_LOG (error, warn, info, debug, trace) sets how much the program tells about itself.
#[derive(Debug, Parser)]
#[command(
    name = "infercluster",
    version,
    max_term_width = 110,
    subcommand_required = true
)]
#[command(arg_required_else_help = true, propagate_version = true)]
pub struct Cli {
    /// Print results as JSON with sorted keys.
    #[arg(long, global = true)]
    pub(crate) json: bool,
    /// A catalogue file (TOML) with types of hardware that are added to the built-in ones, or override figures.
    #[arg(long, global = true, value_name = "FILE")]
    pub(crate) hardware: Option<std::path::PathBuf>,
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// Every command that this build has.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    Quickstart(quickstart::Quickstart),
    Cluster(cluster::ClusterCommand),
    Model(model::ModelCommand),
    Trace(trace::TraceCommand),
    Layout(layout::LayoutCommand),
    Plan(plan::Plan),
    Simulate(simulate::Simulate),
    Migrate(migrate::MigrateCommand),
    Calibrate(calibrate::Calibrate),
    Profile(profile::ProfileCommand),
    Generate(generate::Generate),
    Serve(serve::Serve),
    Replay(replay::Replay),
    Report(report::ReportCommand),
    Bench(bench::BenchCommand),
    Worker(worker::Worker),
    Doctor(doctor::Doctor),
    Fuzz(fuzz::Fuzz),
}
