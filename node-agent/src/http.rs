//! The metrics page and the health check, over plain HTTP.

use crate::metrics::Metrics;
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode, header};
use hyper_util::rt::TokioIo;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;

/// Serves until the task is dropped.
pub(crate) async fn serve(
    listener: TcpListener,
    metrics: Arc<Metrics>,
    refresh: Arc<dyn Fn() + Send + Sync>,
) {
    loop {
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::warn!(%error, "metrics connection could not be accepted");
                tokio::time::sleep(Duration::from_millis(200)).await;
                continue;
            }
        };
        let (metrics, refresh) = (metrics.clone(), refresh.clone());
        tokio::spawn(async move {
            let answer = service_fn(move |request| {
                let (metrics, refresh) = (metrics.clone(), refresh.clone());
                async move { Ok::<_, Infallible>(answer(&request, &metrics, refresh.as_ref())) }
            });
            let connection = hyper::server::conn::http1::Builder::new()
                .timer(hyper_util::rt::TokioTimer::new())
                .header_read_timeout(Duration::from_secs(5))
                .serve_connection(TokioIo::new(stream), answer);
            let _ = tokio::time::timeout(Duration::from_secs(30), connection).await; // a client that dawdles
        });
    }
}

fn answer(
    request: &Request<Incoming>,
    metrics: &Metrics,
    refresh: &(dyn Fn() + Send + Sync),
) -> Response<String> {
    let (status, kind, body) = match (request.method(), request.uri().path()) {
        (&Method::GET, "/metrics") => {
            refresh();
            (StatusCode::OK, "application/openmetrics-text; version=1.0.0; charset=utf-8", metrics.page())
        }
        (&Method::GET, "/healthz") => (StatusCode::OK, "text/plain", "ok\n".to_owned()),
        _ => (StatusCode::NOT_FOUND, "text/plain", "try /metrics or /healthz\n".to_owned()),
    };
    let mut response = Response::new(body);
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONTENT_TYPE, header::HeaderValue::from_static(kind));
    response
}
