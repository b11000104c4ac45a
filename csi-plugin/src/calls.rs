//! Calls on their way from the runtime to threads that may block, and their failures on the way back.

use crate::status::Failure;
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
    // A panic is the end of the process, so it has never begun.
    let not_begun = || Failure::Unavailable("csi-plugin is stopping: its successor takes the call".into());
    let result = done.unwrap_or_else(|_| Err(not_begun()));
    match result {
        Ok(answer) => Ok(Response::new(answer)),
        Err(failure) => {
            match &failure {
                Failure::UnderWay(how_far) => tracing::info!(how_far, "{what} goes on"),
                failure => tracing::warn!(%failure, "{what} failed"),
            }
            Err(failure.into())
        }
    }
}
