//! `/admin`: the layout in force, and changes of it. Answered only to this machine, where whoever can connect may
//! also end the process, and not to pages in a browser on it, which anybody may have written.

use std::net::SocketAddr;
use std::sync::Arc;

use axum::Json;
use axum::extract::{ConnectInfo, Request, State};
use axum::http::{StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use infercluster_spec::json::{self, Document, DocumentError};
use infercluster_spec::{Layout, MigrationPlan};
use serde_json::{Value, json};

use super::Shared;
use super::body::WholeBody;
use super::failure::Failure;
use crate::coordinator::{MigrationError, PlanError};

/// Lets only programs of this machine through.
pub(super) async fn only_this_machine(
    ConnectInfo(peer): ConnectInfo<SocketAddr>,
    request: Request,
    next: Next,
) -> Response {
    let message = if !peer.ip().to_canonical().is_loopback() {
        "administration is answered on the loopback address only"
    } else if request.headers().contains_key(header::ORIGIN) {
        "administration is not answered to pages in a browser"
    } else {
        return next.run(request).await;
    };
    Failure::malformed(StatusCode::FORBIDDEN, message).into_response()
}

/// The layout in force, as a document.
pub(super) async fn layout(State(shared): State<Arc<Shared>>) -> Result<Response, Failure> {
    let (_, layout) = shared.coordinator.layout().await?;
    let headers = [(header::CONTENT_TYPE, "application/json")];
    Ok((headers, json::write(&layout)).into_response())
}

/// The migration under way, else the last one, else null.
pub(super) async fn migration(State(shared): State<Arc<Shared>>) -> Result<Json<Value>, Failure> {
    Ok(Json(json!(shared.coordinator.migration().await?)))
}

/// Goes to a layout, or along a plan that starts at the layout in force; answers a report a phase once it is over.
/// A client that goes away does not stop what has begun.
pub(super) async fn migrate(
    State(shared): State<Arc<Shared>>,
    WholeBody(body): WholeBody,
) -> Result<Json<Value>, Failure> {
    let body = str::from_utf8(&body).map_err(|error| {
        Failure::malformed(StatusCode::BAD_REQUEST, format!("the body is no text: {error}"))
    })?;
    let reports = match way(body)? {
        Way::To(layout) => vec![shared.coordinator.migrate(*layout).await?],
        Way::Along(plan) => shared.coordinator.migrate_along(*plan).await?,
    };
    Ok(Json(json!({ "migrations": reports })))
}

/// What a body asks for.
enum Way {
    To(Box<Layout>),
    Along(Box<MigrationPlan>),
}

fn way(body: &str) -> Result<Way, Failure> {
    match json::read::<Layout>("body", body) {
        Ok(layout) => Ok(Way::To(Box::new(layout))),
        Err(DocumentError::Schema { ref found, .. }) if found.trim_matches('"') == MigrationPlan::SCHEMA => {
            let plan = json::read("body", body).map_err(|error| bad_body(&error))?;
            Ok(Way::Along(Box::new(plan)))
        }
        Err(error) => Err(bad_body(&error)),
    }
}

fn bad_body(error: &DocumentError) -> Failure {
    Failure::malformed(StatusCode::BAD_REQUEST, error.to_string())
}

impl From<MigrationError> for Failure {
    fn from(error: MigrationError) -> Self {
        let status = match error {
            MigrationError::Layout(_)
            | MigrationError::Replicas { .. }
            | MigrationError::Fixed { .. }
            | MigrationError::NoWorker { .. }
            | MigrationError::Coverage => StatusCode::BAD_REQUEST,
            MigrationError::Plan(PlanError::Start) => StatusCode::CONFLICT,
            MigrationError::Plan(_) => StatusCode::BAD_REQUEST,
            MigrationError::Busy
            | MigrationError::Unchanged
            | MigrationError::Pool { .. }
            | MigrationError::Aborted { .. } => StatusCode::CONFLICT,
            MigrationError::Failed { .. } | MigrationError::Lost { .. } | MigrationError::Stopped => {
                StatusCode::SERVICE_UNAVAILABLE
            }
        };
        Self::malformed(status, error.to_string())
    }
}
