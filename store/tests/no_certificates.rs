//! A machine without CA certificates. Alone in its file: it changes the environment of its process.
#![allow(clippy::unwrap_used)] // Helpers of tests are tests too; clippy only knows #[test] functions.

mod common;

use common::*;
use std::sync::Arc;
use store::{Access, Limits, NoObserver, StoreError};
use testkit::s3::{ACCESS_KEY, SECRET_KEY, Server};

#[tokio::test]
async fn without_certificates_http_works_and_https_says_what_to_install() {
    let empty = tempfile::tempdir().unwrap();
    // SAFETY: no other thread of this process reads the environment: this is its only test, and its runtime has one thread.
    unsafe {
        std::env::set_var("SSL_CERT_FILE", empty.path().join("no-bundle.pem"));
        std::env::set_var("SSL_CERT_DIR", empty.path());
    }
    let server = Server::memory(BUCKET).await.unwrap();
    let meta = server.put(BUCKET, "o", "content").unwrap();
    let limits = Arc::new(Limits::new(quick()));
    let keys = keys(ACCESS_KEY, SECRET_KEY);
    let mut spec = spec(&server, "s3://bucket");
    let plain =
        store::open(&spec, Access::fixed(&spec, keys.clone()), limits.clone(), Arc::new(NoObserver)).unwrap();
    assert_eq!(read(&*plain, b"o", &version(&meta), 0..7).await.unwrap(), b"content");

    spec.parameters.endpoint = Some("https://127.0.0.1:1".parse().unwrap());
    let error = store::open(&spec, Access::fixed(&spec, keys.clone()), limits, Arc::new(NoObserver))
        .map(drop)
        .unwrap_err();
    let text = error.to_string();
    assert!(matches!(error, StoreError::Invalid { .. }), "{error:?}");
    assert!(
        text.contains("install the package ca-certificates") && text.contains("https://127.0.0.1:1"),
        "{text}"
    );
}
