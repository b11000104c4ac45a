//! What a test asks of the server itself, on paths that no bucket can have.

use super::incoming::short;
use super::shared::Shared;
use crate::faults::Script;
use hyper::body::Incoming;
use hyper::{Method, Request, StatusCode};

/// Status and text.
pub(super) async fn control(request: Request<Incoming>, shared: &Shared) -> (StatusCode, String) {
    let (parts, body) = request.into_parts();
    match (&parts.method, parts.uri.path()) {
        (&Method::GET, "/_stats") => {
            let stats = shared.stats();
            (StatusCode::OK, serde_json::to_string(&stats).expect("numbers and names are JSON"))
        }
        (&Method::POST, "/_reset") => {
            shared.counters.reset();
            (StatusCode::OK, String::new())
        }
        (&Method::POST, "/_release") => {
            shared.faults.release();
            (StatusCode::OK, String::new())
        }
        (&Method::POST, "/_rescan") => {
            let buckets: Vec<_> = {
                let buckets = shared.buckets.read().unwrap_or_else(|poisoned| poisoned.into_inner());
                buckets.values().cloned().collect()
            };
            match buckets.iter().try_for_each(|bucket| bucket.rescan()) {
                Ok(()) => (StatusCode::OK, String::new()),
                Err(e) => (StatusCode::INTERNAL_SERVER_ERROR, format!("{e}\n")),
            }
        }
        (&Method::POST, "/_faults") => {
            match short(body).await.map(|text| serde_json::from_slice::<Script>(&text)) {
                Ok(Ok(script)) => {
                    shared.faults.set(script);
                    (StatusCode::OK, String::new())
                }
                Ok(Err(e)) => (StatusCode::BAD_REQUEST, format!("not a fault script: {e}\n")),
                Err(e) => (StatusCode::BAD_REQUEST, format!("{e}\n")),
            }
        }
        _ => (StatusCode::NOT_FOUND, "GET /_stats, POST /_reset, /_release, /_rescan, /_faults\n".into()),
    }
}
