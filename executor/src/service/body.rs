//! The body of a request, read within a time.

use std::time::Duration;

use axum::body::Bytes;
use axum::extract::{FromRequest, Request};
use axum::http::StatusCode;

use super::failure::Failure;

/// How long a body may take: its longest one in this time is a connection of 1 Mbit/s.
const BODY_DEADLINE: Duration = Duration::from_secs(60);

/// All bytes of a body that came in time and within the limit of its route.
pub(super) struct WholeBody(pub(super) Bytes);

impl<S: Send + Sync> FromRequest<S> for WholeBody {
    type Rejection = Failure;

    async fn from_request(request: Request, state: &S) -> Result<Self, Failure> {
        match tokio::time::timeout(BODY_DEADLINE, Bytes::from_request(request, state)).await {
            Ok(Ok(bytes)) => Ok(Self(bytes)),
            Ok(Err(rejection)) => Err(Failure::malformed(rejection.status(), rejection.body_text())),
            Err(_) => {
                let message = format!("the body did not come within {} s", BODY_DEADLINE.as_secs());
                Err(Failure::malformed(StatusCode::REQUEST_TIMEOUT, message))
            }
        }
    }
}
