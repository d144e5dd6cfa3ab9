//! The client of a service's `/admin`: what `migrate apply` calls.

use std::time::Duration;

use infercluster_spec::Layout;
use infercluster_spec::json::{self, Document, DocumentError};
use serde::Deserialize;

use crate::coordinator::MigrationReport;

/// How long connecting may take.
const CONNECT_DEADLINE: Duration = Duration::from_secs(10);
/// How long a migration may take.
const MIGRATION_DEADLINE: Duration = Duration::from_secs(3600);

/// Why a service did not do what was asked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AdminError {
    /// The service cannot be reached, or what it says cannot be read.
    #[error("{url}: {source}")]
    Http {
        /// Where.
        url: String,
        /// Why.
        source: Box<ureq::Error>,
    },
    /// The service says no.
    #[error("{url} answers {status}: {message}")]
    Refused {
        /// Where.
        url: String,
        /// Its status.
        status: u16,
        /// Why, in its words.
        message: String,
    },
    /// A layout that cannot be read.
    #[error(transparent)]
    Document(#[from] DocumentError),
}

/// Has a service go to a layout, or along a plan, and waits for the end; a report a phase.
pub fn migrate<T: Document>(url: &str, to: &T) -> Result<Vec<MigrationReport>, AdminError> {
    #[derive(Deserialize)]
    struct Answer {
        migrations: Vec<MigrationReport>,
    }
    let url = address(url, "migrate");
    let sent = agent()
        .post(&url)
        .content_type("application/json")
        .send(json::write(to));
    let text = answer(&url, sent)?;
    Ok(json::read_plain::<Answer>(&url, &text)?.migrations)
}

/// The layout that a service has in force.
pub fn layout(url: &str) -> Result<Layout, AdminError> {
    let url = address(url, "layout");
    let text = answer(&url, agent().get(&url).call())?;
    Ok(json::read(&url, &text)?)
}

/// The migration that is under way in a service, else its last one.
pub fn migration(url: &str) -> Result<Option<MigrationReport>, AdminError> {
    let url = address(url, "migration");
    let text = answer(&url, agent().get(&url).call())?;
    Ok(json::read_plain(&url, &text)?)
}

fn address(url: &str, what: &str) -> String {
    format!("{}/admin/{what}", url.trim_end_matches('/'))
}

fn agent() -> ureq::Agent {
    ureq::Agent::config_builder()
        .http_status_as_error(false)
        .timeout_connect(Some(CONNECT_DEADLINE))
        .timeout_global(Some(MIGRATION_DEADLINE))
        .build()
        .new_agent()
}

fn answer(
    url: &str,
    sent: Result<ureq::http::Response<ureq::Body>, ureq::Error>,
) -> Result<String, AdminError> {
    let http = |source| AdminError::Http {
        url: url.to_owned(),
        source: Box::new(source),
    };
    let mut answer = sent.map_err(http)?;
    let text = answer.body_mut().read_to_string().map_err(http)?;
    if answer.status().is_success() {
        return Ok(text);
    }
    let value: serde_json::Value = serde_json::from_str(&text).unwrap_or_default();
    Err(AdminError::Refused {
        url: url.to_owned(),
        status: answer.status().as_u16(),
        message: value["error"]["message"].as_str().unwrap_or(&text).to_owned(),
    })
}
