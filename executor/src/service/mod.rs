//! The HTTP front: OpenAI's completions over a coordinator, health, metrics, administration.
//!
//! Decoding is greedy; what this service cannot do is refused by name, never ignored. A client that goes away
//! cancels its request. Listens on loopback unless told otherwise.

mod admin;
mod body;
mod completions;
mod detokenize;
mod failure;
mod listen;
mod metrics;
mod parameters;

use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use axum::Json;
use axum::Router;
use axum::extract::{DefaultBodyLimit, Query, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use serde::Deserialize;
use serde_json::{Value, json};
use tokenizers::Tokenizer;
use tokio::sync::oneshot;

use crate::clock;
use crate::coordinator::Coordinator;
use failure::Failure;
use listen::Patience;

/// Longest body that is read: a million tokens as text.
const BODY_LIMIT: usize = 8 << 20;

/// Why a service does not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServiceError {
    /// The address cannot be listened on.
    #[error("listening on {address}: {source}")]
    Listen {
        /// Which address.
        address: SocketAddr,
        /// What the system says.
        source: io::Error,
    },
    /// The tokenizer cannot be read.
    #[error("{}: {reason}", file.display())]
    Tokenizer {
        /// Which file.
        file: PathBuf,
        /// What its reader says.
        reason: String,
    },
    /// The runtime of the HTTP threads does not start.
    #[error("starting the HTTP threads: {source}")]
    Threads {
        /// What the system says.
        source: io::Error,
    },
}

/// What all handlers share.
struct Shared {
    coordinator: Coordinator,
    model_name: String,
    max_context: u32,
    vocab: u32,
    tokenizer: Option<Arc<Tokenizer>>,
    started: u64,
}

/// What a service needs beside its coordinator.
#[derive(Debug, Clone)]
pub struct ServiceOptions {
    /// Where it listens; port 0 takes a free one.
    pub address: SocketAddr,
    /// The name that clients use.
    pub model_name: String,
    /// The longest context that is accepted.
    pub max_context: u32,
    /// Size of the vocabulary.
    pub vocab: u32,
    /// Where `tokenizer.json` may be.
    pub model_dir: PathBuf,
}

/// A running service; dropping it ends it and its workers.
#[derive(Debug)]
pub struct Service {
    address: SocketAddr,
    shutdown: Option<oneshot::Sender<()>>,
    runtime: Option<tokio::runtime::Runtime>,
    server: Option<tokio::task::JoinHandle<()>>,
}

impl Service {
    /// Starts to listen.
    pub fn start(coordinator: Coordinator, options: &ServiceOptions) -> Result<Self, ServiceError> {
        let shared = Arc::new(Shared {
            coordinator,
            model_name: options.model_name.clone(),
            max_context: options.max_context,
            vocab: options.vocab,
            tokenizer: load_tokenizer(&options.model_dir)?.map(Arc::new),
            started: clock::unix_seconds(),
        });
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .thread_name("http")
            .enable_all()
            .build()
            .map_err(|source| ServiceError::Threads { source })?;
        let listen = |source| ServiceError::Listen {
            address: options.address,
            source,
        };
        let listener = runtime
            .block_on(tokio::net::TcpListener::bind(options.address))
            .map_err(listen)?;
        let address = listener.local_addr().map_err(listen)?;
        let (shutdown, ending) = oneshot::channel();
        let server = runtime.spawn(async move {
            tokio::select! {
                () = listen::serve(listener, routes(shared), Patience::of_this_process()) => {}
                _ = ending => {}
            }
        });
        Ok(Self {
            address,
            shutdown: Some(shutdown),
            runtime: Some(runtime),
            server: Some(server),
        })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Blocks until the process is asked to end (interrupt or termination), then ends the service.
    pub fn run_until_signal(mut self) -> io::Result<()> {
        if let Some(runtime) = &self.runtime {
            runtime.block_on(ending_signal())?;
        }
        self.stop();
        Ok(())
    }

    fn stop(&mut self) {
        if let Some(shutdown) = self.shutdown.take() {
            // A server that ended already has no use for it.
            let _ = shutdown.send(());
        }
        let Some(runtime) = self.runtime.take() else {
            return;
        };
        if let Some(server) = self.server.take() {
            // The server's end drops the coordinator, or the runtime's end does.
            let _ = runtime.block_on(server);
        }
        runtime.shutdown_timeout(std::time::Duration::from_secs(5));
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        self.stop();
    }
}

async fn ending_signal() -> io::Result<()> {
    use tokio::signal::unix::{SignalKind, signal};
    let mut termination = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    tokio::select! {
        _ = termination.recv() => {}
        _ = interrupt.recv() => {}
    }
    Ok(())
}

/// The tokenizer of a model folder, where there is one.
pub fn load_tokenizer(model_dir: &Path) -> Result<Option<Tokenizer>, ServiceError> {
    let file = model_dir.join("tokenizer.json");
    if !file.is_file() {
        return Ok(None);
    }
    Tokenizer::from_file(&file)
        .map(Some)
        .map_err(|error| ServiceError::Tokenizer {
            file,
            reason: error.to_string(),
        })
}

fn routes(shared: Arc<Shared>) -> Router {
    let admin = Router::new()
        .route("/admin/measurements", post(measurements))
        .route("/admin/layout", get(admin::layout))
        .route("/admin/migrate", post(admin::migrate))
        .route("/admin/migration", get(admin::migration))
        .layer(axum::middleware::from_fn(admin::only_this_machine));
    Router::new()
        .merge(admin)
        .route("/v1/completions", post(completions::complete))
        .route("/v1/models", get(models))
        .route("/healthz", get(healthz))
        .route("/readyz", get(readyz))
        .route("/metrics", get(metrics_page))
        .method_not_allowed_fallback(|| async {
            Failure::malformed(
                StatusCode::METHOD_NOT_ALLOWED,
                "this path has another method, which the header `allow` names",
            )
        })
        .fallback(|| async { Failure::malformed(StatusCode::NOT_FOUND, "there is nothing at this path") })
        .layer(DefaultBodyLimit::max(BODY_LIMIT))
        .with_state(shared)
}

async fn models(State(shared): State<Arc<Shared>>) -> Json<Value> {
    Json(json!({
        "object": "list",
        "data": [{
            "id": shared.model_name, "object": "model", "created": shared.started, "owned_by": "infercluster",
            "max_model_len": shared.max_context, "vocab_size": shared.vocab,
        }],
    }))
}

/// The coordinator answers.
async fn healthz(State(shared): State<Arc<Shared>>) -> Result<&'static str, Failure> {
    shared.coordinator.status().await?;
    Ok("ok\n")
}

/// Requests are answered.
async fn readyz(State(shared): State<Arc<Shared>>) -> Result<&'static str, Failure> {
    let status = shared.coordinator.status().await?;
    if status.is_ready() {
        return Ok("ready\n");
    }
    let failure = status.replicas.into_iter().find_map(|replica| replica.failure);
    let message = failure.unwrap_or_else(|| "no replica runs".to_owned());
    Err(Failure::malformed(StatusCode::SERVICE_UNAVAILABLE, message))
}

async fn metrics_page(State(shared): State<Arc<Shared>>) -> Result<Response, Failure> {
    let status = shared.coordinator.status().await?;
    let text = metrics::page(&shared.model_name, &status);
    Ok(([(header::CONTENT_TYPE, "text/plain; version=0.0.4")], text).into_response())
}

/// What `/admin/measurements` is asked for.
#[derive(Debug, Deserialize)]
struct MeasurementsQuery {
    /// Also the latest steps one by one.
    #[serde(default)]
    steps: bool,
}

/// Where time went since the last call; starts a new window.
async fn measurements(
    State(shared): State<Arc<Shared>>,
    Query(query): Query<MeasurementsQuery>,
) -> Result<Json<Value>, Failure> {
    let measured = shared.coordinator.measurements().await?;
    let mut answer = json!({
        "elapsed_s": measured.elapsed.as_secs_f64(),
        "busy_fraction": measured.busy_fraction(),
        "speeds": measured.speed_checks(),
    });
    if query.steps {
        answer["steps"] = json!(measured.steps);
    }
    Ok(Json(answer))
}
