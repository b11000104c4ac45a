//! Faults of writes: what is executed, how often, and what the client sees of it.

use super::super::{Config, Memory, Server};
use super::client::{Client, config, eventually, memory, served};
use crate::faults::{Fault, Rule, Script};
use std::time::{Duration, Instant};

fn script(server: &Server, rule: Rule) {
    server.faults().set(Script { seed: 1, rules: vec![rule] });
}

/// An upload of "k" with one part, "body".
async fn one_part(client: &Client) -> (String, String) {
    let id = client.create("k", &[]).await;
    let etag = client.part(("k", &id), 1, &[], "body").await.ok().etag();
    (id, etag)
}

#[tokio::test]
async fn a_lost_answer_is_of_a_request_executed_once() {
    let (server, client) = memory().await;
    script(&server, Rule::always(Fault::LostAnswer).op("PutObject").times(1));
    assert!(client.send("PUT", "/bucket/k", &[("if-none-match", "*")], "1").await.is_err());
    assert_eq!(client.get("k", &[]).await.ok().text(), "1");
    let again = client.put("k", &[("if-none-match", "*")], "1").await;
    assert!(again.is(412, "PreconditionFailed"));
    assert_eq!(server.stats().of("PutObject"), 2);
}

#[tokio::test]
async fn a_lost_completion_has_ended_its_upload() {
    let (server, client) = memory().await;
    let (id, etag) = one_part(&client).await;
    script(&server, Rule::always(Fault::LostAnswer).op("CompleteMultipartUpload").times(1));
    let body = format!(
        "<CompleteMultipartUpload><Part><PartNumber>1</PartNumber><ETag>{etag}</ETag></Part></CompleteMultipartUpload>"
    );
    assert!(client.send("POST", &format!("/bucket/k?uploadId={id}"), &[], body).await.is_err());
    assert!(client.complete(("k", &id), &[(1, &etag)], &[]).await.is(404, "NoSuchUpload"));
    assert_eq!(client.get("k", &[]).await.ok().text(), "body");
}

#[tokio::test]
async fn a_late_effect_comes_after_the_connection_is_gone() {
    let (server, client) = memory().await;
    client.put("k", &[], "old").await.ok();
    script(&server, Rule::always(Fault::LateEffect { ms: 1500 }).op("PutObject").times(1));
    let begun = Instant::now();
    assert!(client.send("PUT", "/bucket/k", &[], "late").await.is_err());
    let is_early = begun.elapsed() < Duration::from_millis(1500);
    let text = client.get("k", &[]).await.ok().text().to_owned();
    assert!(text == "old" || begun.elapsed() >= Duration::from_millis(1500), "{text} too early");
    assert!(is_early, "the reset waited for the effect");
    eventually(async || client.get("k", &[]).await.ok().text() == "late").await;
}

#[tokio::test]
async fn a_late_delete_takes_what_was_put_meanwhile() {
    let (server, client) = memory().await;
    client.put("k", &[], "old").await.ok();
    script(&server, Rule::always(Fault::LateEffect { ms: 1500 }).op("DeleteObject"));
    assert!(client.send("DELETE", "/bucket/k", &[], "").await.is_err());
    client.put("k", &[], "new").await.ok();
    eventually(async || client.get("k", &[]).await.status == 404).await;
}

#[tokio::test]
async fn a_reset_upload_is_not_executed() {
    let (server, client) = memory().await;
    script(&server, Rule::always(Fault::ResetUpload).op("PutObject"));
    let body = vec![7; 8 << 20];
    assert!(client.send("PUT", "/bucket/k", &[], body.clone()).await.is_err());
    assert!(client.send("PUT", "/bucket/empty", &[], "").await.is_err());
    let received = server.stats().bytes_put;
    assert!(received < body.len() as u64, "{received} bytes arrived");
    assert_eq!(client.head("k", &[]).await.status, 404);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stalled_upload_goes_on_when_released() {
    let (server, client) = memory().await;
    script(&server, Rule::always(Fault::StallUpload { ms: None }).op("PutObject"));
    // More than the sockets hold, so that the client is still writing.
    let body = vec![7; 32 << 20];
    let put = tokio::spawn({
        let (client, body) = (client.clone(), body.clone());
        async move { client.send("PUT", "/bucket/k", &[], body).await }
    });
    eventually(async || server.stats().bytes_put >= 16 << 20).await;
    assert!(server.stats().bytes_put < 32 << 20, "it read all of it");
    assert_eq!(client.head("k", &[]).await.status, 404);
    // Repeated, because the server has counted the bytes just before it stalls.
    eventually(async || {
        server.faults().release();
        put.is_finished()
    })
    .await;
    put.await.unwrap().unwrap().ok();
    assert_eq!(client.get("k", &[]).await.ok().body, body);
}

#[tokio::test]
async fn a_scripted_status_executes_nothing() {
    let (server, client) = memory().await;
    let status = Fault::Status { code: 503, retry_after_s: Some(1) };
    script(&server, Rule::always(status).op("PutObject").times(1));
    let body = vec![7; 8 << 20];
    let refused = client.send("PUT", "/bucket/k", &[], body).await.unwrap();
    assert!(refused.is(503, "SlowDown"));
    assert_eq!(refused.header("retry-after"), Some("1"));
    assert_eq!(client.head("k", &[]).await.status, 404);
}

#[tokio::test]
async fn an_error_in_a_completions_body_leaves_the_upload_open() {
    let (server, client) = memory().await;
    let (id, etag) = one_part(&client).await;
    script(&server, Rule::always(Fault::CompleteError).op("CompleteMultipartUpload").times(1));
    let failed = client.complete(("k", &id), &[(1, &etag)], &[]).await;
    assert_eq!((failed.status, failed.one("Code").as_str()), (200, "InternalError"));
    assert!(failed.text().starts_with("<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n "), "{failed:?}");
    assert_eq!(client.head("k", &[]).await.status, 404);
    client.complete(("k", &id), &[(1, &etag)], &[]).await.ok();
}

#[tokio::test]
async fn a_slow_completion_ticks_and_then_tells_the_result() {
    let (server, client) = memory().await;
    let (id, etag) = one_part(&client).await;
    script(&server, Rule::always(Fault::SlowComplete { ms: 100 }).op("CompleteMultipartUpload"));
    let done = client.complete(("k", &id), &[(1, &etag)], &[]).await.ok();
    assert!(done.text().starts_with("<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n "), "{done:?}");
    assert_eq!(done.one("ETag"), client.head("k", &[]).await.ok().etag());
    let refused = client.complete(("k", &id), &[(1, &etag)], &[]).await;
    assert_eq!((refused.status, refused.one("Code").as_str()), (200, "NoSuchUpload"));
}

#[tokio::test]
async fn each_part_of_an_upload_is_a_request_of_its_own() {
    let (server, client) = served(Config { part_min: 1, ..config(Memory::default()) }).await;
    let id = client.create("k", &[]).await;
    let status = Fault::Status { code: 500, retry_after_s: None };
    let failures = async |numbers: &[i32]| {
        script(&server, Rule::with_probability(status.clone(), 0.5).op("UploadPart"));
        let mut failed = Vec::new();
        for number in numbers {
            if client.part(("k", &id), *number, &[], "x").await.status == 500 {
                failed.push(*number);
            }
        }
        failed.sort_unstable();
        failed
    };
    let forward: Vec<_> = (1..=20).collect();
    let backward: Vec<_> = (1..=20).rev().collect();
    let failed = failures(&forward).await;
    assert!((2..=18).contains(&failed.len()), "{failed:?}");
    assert_eq!(failed, failures(&backward).await);
}

#[tokio::test]
async fn a_stopped_server_has_no_late_effects() {
    let (directory, dir) = super::directory("stopped");
    let (server, client) = served(config(directory)).await;
    script(&server, Rule::always(Fault::LateEffect { ms: 200 }).op("PutObject"));
    assert!(client.send("PUT", "/bucket/k", &[], "late").await.is_err());
    drop(server);
    tokio::time::sleep(Duration::from_millis(400)).await;
    assert!(!dir.0.join("k").exists());
}
