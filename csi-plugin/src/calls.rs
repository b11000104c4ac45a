//! Calls on their way from the runtime to threads that may block, and their failures on the way back.

use crate::status::Failure;
use link::failpoint;
use std::sync::Arc;
use tonic::{Response, Status};

/// Runs one call. A caller that hangs up does not interrupt the work: it ends in its own time and frees its turn.
pub(crate) async fn blocking<I, T>(
    service: &Arc<I>,
    what: &'static str,
    work: impl FnOnce(&I) -> Result<T, Failure> + Send + 'static,
) -> Result<Response<T>, Status>
where
    I: Send + Sync + 'static,
    T: Send + 'static,
{
    let service = service.clone();
    let done = tokio::task::spawn_blocking(move || {
        failpoint::pass("broker.called");
        work(&service)
    })
    .await;
    let result = done.unwrap_or_else(|e| Err(Failure::Internal(format!("the operation broke off: {e}"))));
    match result {
        Ok(answer) => Ok(Response::new(answer)),
        Err(failure) => {
            tracing::warn!(%failure, "{what} failed");
            Err(failure.into())
        }
    }
}
