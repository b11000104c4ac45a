//! Hands a request to `s3s`: now, later, or not at all, as the fault script says.

use super::service::Shareable;
use crate::faults::Decision;
use bytes::Bytes;
use futures::{FutureExt, StreamExt, stream};
use http::{Response, StatusCode};
use s3s::dto::StreamingBlob;
use s3s::service::S3Service;
use s3s::{Body, HttpRequest};
use std::future::Future;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;
use tokio::sync::oneshot;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

/// Requests that are executed although their connection may be gone. They end with the server.
#[derive(Clone, Default)]
pub(super) struct Late(Arc<Mutex<JoinSet<()>>>);

impl Late {
    fn spawn(&self, work: impl Future<Output = ()> + Send + 'static) {
        self.lock().spawn(work);
    }

    pub(super) fn count(&self) -> usize {
        self.lock().len()
    }

    /// Those that are not done.
    fn lock(&self) -> MutexGuard<'_, JoinSet<()>> {
        let mut late = self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        while late.try_join_next().is_some() {}
        late
    }
}

const DECLARATION: &str = "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n ";
const ERROR: &str = "<Error><Code>InternalError</Code><Message>scripted</Message></Error>";
/// AWS sends white space now and then, so that nobody takes a long wait for a dead connection.
const TICK: Duration = Duration::from_millis(20);

/// None: the connection is to be reset, whatever has been or will be executed.
pub(super) async fn execute(
    s3: &S3Service,
    request: HttpRequest,
    op: &str,
    decision: &Decision,
    late: &Late,
) -> io::Result<Option<Response<Body>>> {
    let may_tick = matches!(op, "CompleteMultipartUpload" | "CopyObject" | "UploadPartCopy");
    if let Some(time) = decision.late_effect {
        let s3 = s3.clone();
        late.spawn(async move {
            sleep(time).await;
            let _ = s3.call(request).await;
        });
        return Ok(None);
    }
    if decision.complete_error && may_tick {
        let error = sleep(2 * TICK).map(|()| ERROR.to_owned());
        return Ok(Some(early(late, error)));
    }
    if let Some(time) = decision.slow_complete.filter(|_| may_tick) {
        let s3 = s3.clone();
        let work = async move {
            sleep(time).await;
            let bytes = s3.call(request).await.ok().and_then(|answer| answer.into_body().take_bytes());
            let text = String::from_utf8_lossy(&bytes.unwrap_or_default()).into_owned();
            // It was declared before.
            text.split_once("?>").map_or(text.clone(), |(_, document)| document.to_owned())
        };
        return Ok(Some(early(late, work)));
    }
    let answer = s3.call(request).await.map_err(|e| io::Error::other(format!("{e:?}")))?;
    Ok(Some(answer).filter(|_| !decision.lost_answer))
}

/// Status 200 at once, white space while `work` lasts, then the document that it gives.
fn early(late: &Late, work: impl Future<Output = String> + Send + 'static) -> Response<Body> {
    let (done, document) = oneshot::channel();
    late.spawn(async move {
        let _ = done.send(work.await);
    });
    let ticks = stream::unfold(Some(document), |waiting| async move {
        let mut document = waiting?;
        match timeout(TICK, &mut document).await {
            Err(_) => Some((Ok(Bytes::from_static(b" ")), Some(document))),
            Ok(text) => Some((text.map(Bytes::from).map_err(io::Error::other), None)),
        }
    });
    let declaration = stream::iter([Ok(Bytes::from_static(DECLARATION.as_bytes()))]);
    let body = StreamingBlob::wrap(Shareable::new(declaration.chain(ticks).boxed()));
    let mut response = Response::new(Body::from(body));
    *response.status_mut() = StatusCode::OK;
    let xml = http::HeaderValue::from_static("application/xml");
    response.headers_mut().insert(http::header::CONTENT_TYPE, xml);
    response
}
