//! `worker`: one device of a service.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use anyhow::{Context as _, anyhow};
use clap::Args;
use infercluster_executor::wire::handshake::TOKEN_VARIABLE;
use infercluster_executor::worker::{self, WorkerOptions};
use infercluster_spec::GpuId;

use crate::Outcome;
use crate::failure::WithFix as _;

/// Runs one worker; `serve`, `generate` and `replay` start theirs of themselves.
///
/// The secret of the run stands in the environment variable INFERCLUSTER_TOKEN, as 64 hexadecimal digits. The
/// worker ends with its coordinator.
#[derive(Debug, Args)]
#[command(after_help = "Example: infercluster worker --connect 127.0.0.1:7411 --gpu 1")]
pub(crate) struct Worker {
    /// The coordinator's control port.
    #[arg(long)]
    connect: SocketAddr,
    /// The device, by its number in the layout.
    #[arg(long)]
    gpu: u32,
    /// Address at which the other workers reach this one.
    #[arg(long, default_value_t = IpAddr::V4(Ipv4Addr::LOCALHOST))]
    bind: IpAddr,
    /// Keep the thread that computes on the core of the device's number, counted among those that are free to use.
    #[arg(long)]
    pin: bool,
}

/// Runs the command until the coordinator says stop.
pub(crate) fn run(arguments: &Worker) -> anyhow::Result<Outcome> {
    let token = std::env::var(TOKEN_VARIABLE)
        .map_err(|_| anyhow!("{TOKEN_VARIABLE} is not in the environment"))
        .fix("give the worker the token of its coordinator")?;
    let token = token.parse().context(TOKEN_VARIABLE)?;
    let mut options = WorkerOptions::local(arguments.connect, GpuId(arguments.gpu), token);
    options.bind = arguments.bind;
    options.pin = arguments.pin;
    worker::run(&options)?;
    Ok(Outcome::Done)
}
