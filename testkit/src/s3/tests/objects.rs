//! What is kept with an object, what is refused, and what each key may.

use super::super::{Algorithm, Config, Key, Lies, Memory, Rights};
use super::client::{config, memory, served};
use super::directory;
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use bytes::Bytes;
use std::time::Duration;

fn sum(algorithm: Algorithm, body: &'static str) -> String {
    algorithm.of(&Bytes::from(body).into()).value
}

fn md5(body: &str) -> String {
    BASE64_STANDARD.encode(super::super::encryption::md5(body.as_bytes()))
}

#[tokio::test]
async fn metadata_and_content_type_stay_with_the_object() {
    let (directory, _dir) = directory("metadata");
    let (_memory, of_memory) = memory().await;
    let (_directory, of_directory) = served(config(directory)).await;
    for client in [of_memory, of_directory] {
        let headers = [("x-amz-meta-mode", "0644"), ("content-type", "text/x-mine")];
        client.put("d/k", &headers, "body").await.ok();
        for reply in [client.head("d/k", &[]).await.ok(), client.get("d/k", &[]).await.ok()] {
            assert_eq!(reply.header("x-amz-meta-mode"), Some("0644"));
            assert_eq!(reply.header("content-type"), Some("text/x-mine"));
        }
        client.put("d/k", &[], "body").await.ok();
        assert_eq!(client.head("d/k", &[]).await.ok().header("x-amz-meta-mode"), None, "another object");
    }
}

#[tokio::test]
async fn a_file_changed_behind_the_server_has_lost_its_metadata() {
    let (directory, dir) = directory("behind");
    let (_server, client) = served(config(directory)).await;
    client.put("k", &[("x-amz-meta-a", "1")], "body").await.ok();
    std::fs::write(dir.0.join("k"), "another body").unwrap();
    let reply = client.get("k", &[]).await.ok();
    assert_eq!((reply.text(), reply.header("x-amz-meta-a")), ("another body", None));
}

#[tokio::test]
async fn metadata_have_a_bound() {
    let (_server, client) = memory().await;
    let long = "x".repeat(2048);
    assert!(client.put("k", &[("x-amz-meta-a", &long)], "").await.is(400, "MetadataTooLarge"));
}

#[tokio::test]
async fn an_empty_body_is_an_object() {
    let (_server, client) = memory().await;
    client.put("k", &[("x-amz-checksum-crc32", "AAAAAA==")], "").await.ok();
    let reply = client.get("k", &[]).await.ok();
    assert_eq!((reply.header("content-length"), reply.text()), (Some("0"), ""));
}

#[tokio::test]
async fn a_checksum_is_checked_echoed_and_told_where_it_is_asked_for() {
    let (_server, client) = memory().await;
    let asks = [("x-amz-checksum-mode", "ENABLED")];
    for algorithm in [Algorithm::Crc32, Algorithm::Crc32c, Algorithm::Crc64nvme] {
        let (header, value) = (algorithm.header(), sum(algorithm, "body"));
        let put = client.put("k", &[(header, &value)], "body").await.ok();
        assert_eq!(put.header(header), Some(&*value));
        assert_eq!(client.head("k", &asks).await.ok().header(header), Some(&*value));
        assert_eq!(client.get("k", &asks).await.ok().header(header), Some(&*value));
        assert_eq!(client.head("k", &[]).await.ok().header(header), None);
        let of_a_part = client.get("k", &[asks[0], ("range", "bytes=0-1")]).await.ok();
        assert_eq!(of_a_part.header(header), None, "that would be one of other bytes");
        let refused = client.put("k", &[(header, &value)], "other").await;
        assert!(refused.is(400, "BadDigest"));
        assert_eq!(client.get("k", &[]).await.ok().text(), "body", "a refused put changes nothing");
    }
}

#[tokio::test]
async fn the_known_checksum_of_nine_digits_is_taken() {
    let (_server, client) = memory().await;
    let crc32c = BASE64_STANDARD.encode(0xe306_9283_u32.to_be_bytes());
    client.put("k", &[("x-amz-checksum-crc32c", &crc32c)], "123456789").await.ok();
    let crc64nvme = BASE64_STANDARD.encode(0xae8b_1486_0a79_9888_u64.to_be_bytes());
    client.put("k", &[("x-amz-checksum-crc64nvme", &crc64nvme)], "123456789").await.ok();
}

#[tokio::test]
async fn a_wrong_md5_is_a_bad_digest() {
    let (_server, client) = memory().await;
    client.put("k", &[("content-md5", &md5("body"))], "body").await.ok();
    assert!(client.put("k", &[("content-md5", &md5("other"))], "body").await.is(400, "BadDigest"));
    assert!(client.put("k", &[("content-md5", "no md5")], "body").await.is(400, "InvalidDigest"));
}

#[tokio::test]
async fn a_lying_server_knows_no_checksums() {
    let lies = Lies { no_checksums: true, ..Lies::default() };
    let (_server, client) = served(Config { lies, checksums: true, ..config(Memory::default()) }).await;
    let put = client.put("k", &[("x-amz-checksum-crc32c", "AAAAAA==")], "body").await.ok();
    let head = client.head("k", &[("x-amz-checksum-mode", "ENABLED")]).await.ok();
    let told = put.headers.keys().chain(head.headers.keys());
    assert!(!told.into_iter().any(|name| name.as_str().starts_with("x-amz-checksum-")));
}

#[tokio::test]
async fn a_copy_keeps_the_metadata_or_replaces_them() {
    let (_server, client) = memory().await;
    client.put("from", &[("x-amz-meta-a", "1"), ("content-type", "text/a")], "body").await.ok();
    let copied = client.copy("from", "to", &[("x-amz-meta-a", "ignored")]).await.ok();
    let reply = client.get("to", &[]).await.ok();
    assert_eq!(copied.one("ETag"), reply.etag());
    assert_eq!((reply.text(), reply.header("x-amz-meta-a")), ("body", Some("1")));
    let replace = [("x-amz-metadata-directive", "REPLACE"), ("x-amz-meta-b", "2")];
    client.copy("from", "from", &replace).await.ok();
    let reply = client.get("from", &[]).await.ok();
    assert_eq!((reply.header("x-amz-meta-a"), reply.header("x-amz-meta-b")), (None, Some("2")));
}

#[tokio::test]
async fn a_copy_onto_itself_without_a_change_is_refused() {
    let (_server, client) = memory().await;
    client.put("k", &[], "body").await.ok();
    assert!(client.copy("k", "k", &[]).await.is(400, "InvalidRequest"));
    assert!(client.copy("missing", "k", &[]).await.is(404, "NoSuchKey"));
}

#[tokio::test]
async fn a_source_too_large_for_one_copy_is_refused() {
    let (server, client) = memory().await;
    server.claim("bucket", "huge", (5 << 30) + 1).unwrap();
    assert!(client.copy("huge", "to", &[]).await.is(400, "InvalidRequest"));
}

#[tokio::test]
async fn markers_are_objects_of_memory_and_directories_of_a_directory() {
    let (directory, dir) = directory("markers");
    let (_memory, of_memory) = memory().await;
    let (_directory, of_directory) = served(config(directory)).await;
    for client in [of_memory, of_directory] {
        client.put("a/", &[("x-amz-meta-mode", "0755")], "").await.ok();
        client.put("a/b", &[], "1").await.ok();
        assert_eq!(client.head("a/", &[]).await.ok().header("x-amz-meta-mode"), Some("0755"));
        assert_eq!(client.get("a/", &[]).await.ok().text(), "");
        let listing = client.send("GET", "/bucket?list-type=2&prefix=a/", &[], "").await.unwrap().ok();
        assert_eq!(listing.all("Key"), ["a/", "a/b"]);
        client.delete("a/", &[]).await.ok();
        assert_eq!(client.head("a/", &[]).await.status, 404);
        assert_eq!(client.get("a/b", &[]).await.ok().text(), "1", "what is below stays");
        assert!(client.put("a/", &[("if-match", "\"x\"")], "").await.is(404, "NoSuchKey"));
    }
    assert!(dir.0.join("a").is_dir());
}

#[tokio::test]
async fn a_key_may_follow_the_directory_that_it_was() {
    let (directory, _dir) = directory("follows");
    let (_server, client) = served(config(directory)).await;
    client.put("a/b/c", &[], "1").await.ok();
    assert!(client.put("a", &[], "2").await.is(409, "XMinioObjectExistsAsDirectory"));
    client.delete("a/b/c", &[]).await.ok();
    client.put("a", &[], "2").await.ok();
    assert_eq!(client.get("a", &[]).await.ok().text(), "2");
    assert!(client.put("a/b", &[], "3").await.is(409, "XMinioObjectExistsAsDirectory"));
}

#[tokio::test]
async fn puts_of_equal_bytes_into_a_directory_are_versions() {
    let (directory, _dir) = directory("versions");
    let (_server, client) = served(config(directory)).await;
    let mut etags = Vec::new();
    for _ in 0..20 {
        etags.push(client.put("k", &[], "same").await.ok().etag());
        assert_eq!(Some(&client.head("k", &[]).await.ok().etag()), etags.last());
    }
    etags.sort();
    etags.dedup();
    assert_eq!(etags.len(), 20);
    let listing = client.send("GET", "/bucket?list-type=2", &[], "").await.unwrap().ok();
    assert_eq!(listing.all("Key"), ["k"], "nothing is left of how it was written");
}

#[tokio::test]
async fn a_synthetic_bucket_takes_no_writes() {
    let (_server, client) = served(config(super::Synthetic::default())).await;
    assert!(client.put("k", &[], "body").await.is(501, "NotImplemented"));
    assert!(client.delete("k", &[]).await.is(501, "NotImplemented"));
}

#[tokio::test]
async fn times_are_told_by_the_servers_clock() {
    let clock_ahead = Duration::from_secs(86_400);
    let (_server, client) = served(Config { clock_ahead, ..config(Memory::default()) }).await;
    client.put("k", &[], "body").await.ok();
    let head = client.head("k", &[]).await.ok();
    let time = |name| httpdate::parse_http_date(head.header(name).unwrap()).unwrap();
    let apart = time("date").duration_since(time("last-modified")).unwrap();
    assert!(apart < Duration::from_secs(60), "{apart:?}");
}

#[tokio::test]
async fn rights_end_before_writes_or_before_deletes() {
    let keys = vec![Key::new("reader", "s", Rights::NoWrite), Key::new("writer", "s", Rights::NoDelete)];
    let (server, client) = served(Config { keys, ..config(Memory::default()) }).await;
    server.put("bucket", "k", "body").unwrap();
    let (reader, writer) = (client.signing("reader", "s"), client.signing("writer", "s"));
    for client in [&reader, &writer] {
        assert_eq!(client.get("k", &[]).await.ok().text(), "body");
        client.send("GET", "/bucket?list-type=2", &[], "").await.unwrap().ok();
        client.send("GET", "/bucket?uploads", &[], "").await.unwrap().ok();
        assert!(client.delete("k", &[]).await.is(403, "AccessDenied"));
    }
    assert!(reader.put("k", &[], "other").await.is(403, "AccessDenied"));
    let create = reader.send("POST", "/bucket/k?uploads", &[], "").await.unwrap();
    assert!(create.is(403, "AccessDenied"));
    writer.put("k", &[], "other").await.ok();
    assert!(client.signing("writer", "wrong").put("k", &[], "x").await.is(403, "SignatureDoesNotMatch"));
}

#[tokio::test]
async fn a_put_beyond_the_quota_finds_the_storage_full() {
    let (_server, client) = served(Config { bytes_max: Some(10), ..config(Memory::default()) }).await;
    client.put("a", &[], "1234").await.ok();
    client.put("b", &[], "123456").await.ok();
    assert!(client.put("c", &[], "1").await.is(507, "XMinioStorageFull"));
    client.put("b", &[], "654321").await.ok();
    client.delete("a", &[]).await.ok();
    let id = client.create("c", &[]).await;
    let etag = client.part(("c", &id), 1, &[], "1234").await.ok().etag();
    assert!(client.part(("c", &id), 2, &[], "1").await.is(507, "XMinioStorageFull"));
    client.complete(("c", &id), &[(1, &etag)], &[]).await.ok();
    assert_eq!(client.get("c", &[]).await.ok().text(), "1234");
}

#[tokio::test]
async fn bytes_put_are_those_of_data() {
    let (server, client) = memory().await;
    client.put("k", &[], "12345").await.ok();
    let id = client.create("k", &[]).await;
    let etag = client.part(("k", &id), 1, &[], "123").await.ok().etag();
    assert_eq!(server.stats().uploads_open, 1);
    client.complete(("k", &id), &[(1, &etag)], &[]).await.ok();
    let stats = server.stats();
    assert_eq!((stats.bytes_put, stats.uploads_open), (8, 0));
    assert_eq!((stats.of("PutObject"), stats.of("UploadPart")), (1, 1));
    assert_eq!((stats.of("CreateMultipartUpload"), stats.of("CompleteMultipartUpload")), (1, 1));
}
