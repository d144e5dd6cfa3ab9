//! Errors in OpenAI's form.

use axum::Json;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use crate::coordinator::RequestError;

/// Letters of a client's own words that an answer repeats.
const REPEATED_LETTERS: usize = 80;

/// The beginning of what a client sent, enough to find it.
pub(super) fn shortened(text: &str) -> String {
    match text.char_indices().nth(REPEATED_LETTERS) {
        Some((end, _)) => format!("{}..", &text[..end]),
        None => text.to_owned(),
    }
}

/// An error answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Failure {
    status: StatusCode,
    message: String,
    /// The parameter at fault.
    param: Option<String>,
}

impl Failure {
    /// The request is at fault.
    pub(super) fn bad_request(param: &str, message: impl Into<String>) -> Self {
        Self {
            status: StatusCode::BAD_REQUEST,
            message: message.into(),
            param: Some(param.to_owned()),
        }
    }

    /// The request as a whole is at fault.
    pub(super) fn malformed(status: StatusCode, message: impl Into<String>) -> Self {
        Self {
            status,
            message: message.into(),
            param: None,
        }
    }

    /// The form that also stands inside a stream.
    pub(super) fn body(&self) -> Value {
        let kind = match self.status.as_u16() {
            400..500 => "invalid_request_error",
            503 => "service_unavailable",
            _ => "internal_error",
        };
        json!({
            "error": { "message": self.message, "type": kind, "param": self.param, "code": self.status.as_u16() }
        })
    }
}

impl From<RequestError> for Failure {
    fn from(error: RequestError) -> Self {
        let status = if error.is_bad_request() {
            StatusCode::BAD_REQUEST
        } else {
            StatusCode::SERVICE_UNAVAILABLE
        };
        Self::malformed(status, error.to_string())
    }
}

impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        (self.status, Json(self.body())).into_response()
    }
}
