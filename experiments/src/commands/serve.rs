//! `serve`: a layout as a service.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};

use anyhow::Context as _;
use clap::Args;
use infercluster_executor::coordinator::{Coordinator, WorkerStatus};
use infercluster_executor::service::{Service, ServiceOptions};
use serde::Serialize;

use crate::Outcome;
use crate::running::RunFlags;
use crate::screen::Screen;

/// Serves a model over HTTP until it is interrupted; starts a worker process for every device of the layout.
///
/// Answers /v1/completions (streams too), /v1/models, /healthz, /readyz and /metrics; programs of this machine also
/// reach /admin/layout, /admin/migrate, /admin/migration and /admin/measurements. A text as prompt needs a
/// tokenizer.json in the model folder; token ids need nothing.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    infercluster serve --model-dir tiny --layout uneven.json --port 8000\n  \
    infercluster serve --model-dir tiny --port 0 --json")]
pub(crate) struct Serve {
    #[command(flatten)]
    run: RunFlags,
    /// Port; 0 takes a free one, which the first line of the output names.
    #[arg(long, default_value_t = 8000)]
    port: u16,
    /// Address to listen on; nothing but this machine reaches the default.
    #[arg(long, default_value_t = IpAddr::V4(Ipv4Addr::LOCALHOST))]
    host: IpAddr,
}

/// What is running.
#[derive(Debug, Serialize)]
struct Started {
    url: String,
    workers: Vec<WorkerStatus>,
}

/// Runs the command until a signal ends it.
pub(crate) fn run(arguments: &Serve, screen: &Screen) -> anyhow::Result<Outcome> {
    let options = arguments.run.options()?;
    let address = SocketAddr::new(arguments.host, arguments.port);
    // A port that is taken is named now, and not after a large model was loaded.
    drop(TcpListener::bind(address).with_context(|| format!("listening on {address}"))?);
    let service = ServiceOptions {
        address,
        model_name: options.model.name.clone(),
        max_context: options.model.max_positions,
        vocab: options.model.vocab,
        model_dir: arguments.run.model_dir.clone(),
    };
    let coordinator = Coordinator::start(options)?;
    let workers = coordinator.status_blocking()?.workers;
    let service = Service::start(coordinator, &service)?;
    let started = Started {
        url: format!("http://{}", service.address()),
        workers,
    };
    if screen.is_json() {
        // One line, so that a script can read it while the service runs.
        screen.out(serde_json::to_string(&started)?)?;
    } else {
        screen.out(format!(
            "listening on {} with {} workers",
            started.url,
            started.workers.len()
        ))?;
    }
    service.run_until_signal()?;
    Ok(Outcome::Done)
}
