//! Conditional writes: what they refuse, that of many at once one wins, and the servers that ignore them.

use super::super::{Lies, Memory};
use super::client::{Client, config, memory, served};
use super::directory;
use futures::future::join_all;

/// Sixteen at once; how many were done, and every other one was refused.
async fn winners(client: &Client, key: &str, condition: (&str, &str)) -> usize {
    let bodies: Vec<_> = (0..16).map(|n| format!("body {n}")).collect();
    let headers = [condition];
    let puts = bodies.iter().map(|body| client.put(key, &headers, body));
    let replies = join_all(puts).await;
    let (won, lost): (Vec<_>, Vec<_>) = replies.iter().partition(|reply| reply.status == 200);
    assert!(lost.iter().all(|reply| reply.is(412, "PreconditionFailed")));
    won.len()
}

#[tokio::test(flavor = "multi_thread")]
async fn of_sixteen_puts_of_a_new_key_one_wins() {
    let (_server, client) = memory().await;
    assert_eq!(winners(&client, "k", ("if-none-match", "*")).await, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn of_sixteen_puts_over_one_version_one_wins() {
    let (_server, client) = memory().await;
    let etag = client.put("k", &[], "first").await.ok().etag();
    assert_eq!(winners(&client, "k", ("if-match", &etag)).await, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn of_sixteen_puts_into_a_directory_one_wins() {
    let (directory, _dir) = directory("winners");
    let (_server, client) = served(config(directory)).await;
    assert_eq!(winners(&client, "d/k", ("if-none-match", "*")).await, 1);
    let etag = client.head("d/k", &[]).await.ok().etag();
    assert_eq!(winners(&client, "d/k", ("if-match", &etag)).await, 1);
}

#[tokio::test]
async fn if_match_of_a_missing_key_finds_no_key() {
    let (_server, client) = memory().await;
    assert!(client.put("k", &[("if-match", "\"x\"")], "b").await.is(404, "NoSuchKey"));
    assert!(client.delete("k", &[("if-match", "\"x\"")]).await.is(404, "NoSuchKey"));
}

#[tokio::test]
async fn if_none_match_with_an_etag_is_not_implemented() {
    let (_server, client) = memory().await;
    assert!(client.put("k", &[("if-none-match", "\"x\"")], "b").await.is(501, "NotImplemented"));
}

#[tokio::test]
async fn a_delete_of_another_version_is_refused() {
    let (_server, client) = memory().await;
    let old = client.put("k", &[], "same").await.ok().etag();
    let new = client.put("k", &[], "same").await.ok().etag();
    assert_ne!(old, new, "each put is a version");
    assert!(client.delete("k", &[("if-match", &old)]).await.is(412, "PreconditionFailed"));
    assert_eq!(client.delete("k", &[("if-match", &new)]).await.status, 204);
    assert_eq!(client.delete("k", &[]).await.status, 204, "there need not be one");
}

#[tokio::test]
async fn a_copy_obeys_the_conditions_of_both_its_ends() {
    let (_server, client) = memory().await;
    let etag = client.put("from", &[], "b").await.ok().etag();
    client.copy("from", "to", &[("x-amz-copy-source-if-match", &etag), ("if-none-match", "*")]).await.ok();
    let other = [("x-amz-copy-source-if-match", "\"other\"")];
    assert!(client.copy("from", "to", &other).await.is(412, "PreconditionFailed"));
    assert!(client.copy("from", "to", &[("if-none-match", "*")]).await.is(412, "PreconditionFailed"));
}

#[tokio::test]
async fn a_refused_completion_leaves_the_upload_open() {
    let (server, client) = memory().await;
    client.put("k", &[], "there").await.ok();
    let id = client.create("k", &[]).await;
    let etag = client.part(("k", &id), 1, &[], "part").await.ok().etag();
    let refused = client.complete(("k", &id), &[(1, &etag)], &[("if-none-match", "*")]).await;
    assert!(refused.is(412, "PreconditionFailed"));
    assert_eq!(server.stats().uploads_open, 1);
    client.complete(("k", &id), &[(1, &etag)], &[]).await.ok();
}

#[tokio::test]
async fn a_lying_server_ignores_conditions() {
    let lies = Lies {
        ignores_if_match_on_put: true,
        ignores_if_none_match: true,
        ignores_if_match_on_delete: true,
        ignores_conditions_on_complete: true,
        ..Lies::default()
    };
    let (_server, client) = served(super::Config { lies, ..config(Memory::default()) }).await;
    let wrong = ("if-match", "\"wrong\"");
    client.put("k", &[wrong], "1").await.ok();
    client.put("k", &[("if-none-match", "*")], "2").await.ok();
    let id = client.create("k", &[]).await;
    let etag = client.part(("k", &id), 1, &[], "3").await.ok().etag();
    client.complete(("k", &id), &[(1, &etag)], &[wrong]).await.ok();
    assert_eq!(client.get("k", &[]).await.ok().text(), "3");
    assert_eq!(client.delete("k", &[wrong]).await.status, 204);
    assert_eq!(client.get("k", &[]).await.status, 404);
}

#[tokio::test]
async fn a_lie_about_completions_is_none_about_puts() {
    let lies = Lies { ignores_conditions_on_complete: true, ..Lies::default() };
    let (_server, client) = served(super::Config { lies, ..config(Memory::default()) }).await;
    client.put("k", &[], "1").await.ok();
    assert!(client.put("k", &[("if-none-match", "*")], "2").await.is(412, "PreconditionFailed"));
}
