//! DeleteObjects.

use super::super::{Key, Memory, Rights};
use super::client::{Client, Reply, config, memory, served};
use super::{Algorithm, Bytes, Config};

async fn delete(client: &Client, objects: &str) -> Reply {
    let body = Bytes::from(format!("<Delete>{objects}</Delete>"));
    let crc = Algorithm::Crc32c.of(&body.clone().into());
    client.send("POST", "/bucket?delete", &[(crc.algorithm.header(), &crc.value)], body).await.unwrap()
}

fn object(key: &str) -> String {
    format!("<Object><Key>{key}</Key></Object>")
}

#[tokio::test]
async fn a_batch_deletes_what_is_there_and_tells_each_key() {
    let (_server, client) = memory().await;
    for key in ["a", "b", "c"] {
        client.put(key, &[], "1").await.ok();
    }
    let deleted = delete(&client, &["a", "b", "missing"].map(object).concat()).await.ok();
    assert_eq!(deleted.all("Key"), ["a", "b", "missing"]);
    let listing = client.send("GET", "/bucket?list-type=2", &[], "").await.unwrap().ok();
    assert_eq!(listing.all("Key"), ["c"]);
}

#[tokio::test]
async fn a_quiet_batch_tells_errors_only() {
    let (_server, client) = memory().await;
    client.put("a", &[], "1").await.ok();
    let etag = client.put("b", &[], "1").await.ok().etag();
    let objects = format!(
        "<Object><Key>a</Key><ETag>\"wrong\"</ETag></Object><Object><Key>b</Key><ETag>{etag}</ETag></Object>\
         <Quiet>true</Quiet>"
    );
    let deleted = delete(&client, &objects).await.ok();
    assert_eq!(
        (deleted.all("Key"), deleted.one("Code")),
        (vec!["a".to_owned()], "PreconditionFailed".into())
    );
    assert_eq!(client.head("b", &[]).await.status, 404);
}

#[tokio::test]
async fn a_batch_without_or_with_a_wrong_digest_is_refused() {
    let (_server, client) = memory().await;
    client.put("a", &[], "1").await.ok();
    let body = format!("<Delete>{}</Delete>", object("a"));
    let without = client.send("POST", "/bucket?delete", &[], body.clone()).await.unwrap();
    assert!(without.is(400, "InvalidRequest"));
    let wrong = [("x-amz-checksum-crc32", "AAAAAA==")];
    assert!(client.send("POST", "/bucket?delete", &wrong, body).await.unwrap().is(400, "BadDigest"));
    client.get("a", &[]).await.ok();
}

#[tokio::test]
async fn a_batch_has_at_most_a_thousand_keys() {
    let (_server, client) = memory().await;
    let objects: String = (0..1001).map(|n| object(&n.to_string())).collect();
    assert!(delete(&client, &objects).await.is(400, "MalformedXML"));
}

#[tokio::test]
async fn without_the_right_each_key_is_denied() {
    let keys = vec![Key::new("writer", "s", Rights::NoDelete)];
    let (server, client) = served(Config { keys, ..config(Memory::default()) }).await;
    server.put("bucket", "a", "1").unwrap();
    let denied = delete(&client.signing("writer", "s"), &["a", "b"].map(object).concat()).await.ok();
    assert_eq!(denied.all("Code"), ["AccessDenied", "AccessDenied"]);
    client.get("a", &[]).await.ok();
}
