//! Multipart uploads: the happy path, and each refusal.

use super::super::{Algorithm, Config, Memory};
use super::client::{Client, config, memory, served};
use super::directory;
use bytes::Bytes;

fn crc(algorithm: Algorithm, body: &'static str) -> String {
    algorithm.of(&Bytes::from(body).into()).value
}

/// An upload of "k" with the parts 1 and 2, "head" and "tail".
async fn two(client: &Client) -> (String, String, String) {
    let id = client.create("k", &[]).await;
    let first = client.part(("k", &id), 1, &[], "head").await.ok().etag();
    let second = client.part(("k", &id), 2, &[], "tail").await.ok().etag();
    (id, first, second)
}

#[tokio::test]
async fn an_object_of_parts_is_read_as_one() {
    let (directory, _dir) = directory("parts");
    let (_memory, of_memory) = memory().await;
    let (_directory, of_directory) = served(config(directory)).await;
    for client in [of_memory, of_directory] {
        let headers = [("x-amz-meta-mode", "0600"), ("content-type", "text/a")];
        let id = client.create("d/k", &headers).await;
        let second = client.part(("d/k", &id), 7, &[], "tail").await.ok().etag();
        let replaced = client.part(("d/k", &id), 2, &[], "xxxx").await.ok().etag();
        let first = client.part(("d/k", &id), 2, &[], "head").await.ok().etag();
        assert_ne!(replaced, first);
        assert_eq!(client.head("d/k", &[]).await.status, 404, "not before it is complete");
        let done = client.complete(("d/k", &id), &[(2, &first), (7, &second)], &[]).await.ok();
        let reply = client.get("d/k", &[]).await.ok();
        assert_eq!(reply.text(), "headtail");
        assert_eq!(reply.etag(), done.one("ETag"));
        assert!(reply.etag().ends_with("-2\""), "{}", reply.etag());
        assert_eq!(reply.header("x-amz-meta-mode"), Some("0600"));
        assert_eq!(reply.header("content-type"), Some("text/a"));
        assert_eq!(client.get("d/k", &[("range", "bytes=2-5")]).await.ok().text(), "adta");
        let listing = client.send("GET", "/bucket?list-type=2", &[], "").await.unwrap().ok();
        assert_eq!(listing.one("ETag"), reply.etag());
    }
}

#[tokio::test]
async fn an_ended_upload_is_unknown() {
    let (_server, client) = memory().await;
    let (id, first, second) = two(&client).await;
    let parts = [(1, &*first), (2, &*second)];
    client.complete(("k", &id), &parts, &[]).await.ok();
    assert!(client.complete(("k", &id), &parts, &[]).await.is(404, "NoSuchUpload"));
    assert!(client.part(("k", &id), 1, &[], "x").await.is(404, "NoSuchUpload"));
    let id = client.create("k", &[]).await;
    assert_eq!(client.delete(&format!("k?uploadId={id}"), &[]).await.status, 204);
    assert!(client.delete(&format!("k?uploadId={id}"), &[]).await.is(404, "NoSuchUpload"));
    assert!(client.get(&format!("k?uploadId={id}"), &[]).await.is(404, "NoSuchUpload"));
    assert_eq!(client.get("k", &[]).await.ok().text(), "headtail", "an abort is none of the object");
}

#[tokio::test]
async fn an_upload_belongs_to_its_key() {
    let (_server, client) = memory().await;
    let id = client.create("k", &[]).await;
    assert!(client.part(("other", &id), 1, &[], "x").await.is(404, "NoSuchUpload"));
}

#[tokio::test]
async fn a_part_that_was_not_uploaded_is_invalid() {
    let (_server, client) = memory().await;
    let (id, first, second) = two(&client).await;
    for parts in [&[(1, &*first), (3, &*second)][..], &[(1, &*first), (2, &*first)]] {
        assert!(client.complete(("k", &id), parts, &[]).await.is(400, "InvalidPart"));
    }
}

#[tokio::test]
async fn parts_out_of_order_are_refused() {
    let (_server, client) = memory().await;
    let (id, first, second) = two(&client).await;
    for parts in [&[(2, &*second), (1, &*first)][..], &[(1, &*first), (1, &*first)]] {
        assert!(client.complete(("k", &id), parts, &[]).await.is(400, "InvalidPartOrder"));
    }
}

#[tokio::test]
async fn a_completion_without_parts_is_malformed() {
    let (_server, client) = memory().await;
    let (id, ..) = two(&client).await;
    assert!(client.complete(("k", &id), &[], &[]).await.is(400, "MalformedXML"));
}

#[tokio::test]
async fn a_short_part_before_the_last_is_too_small() {
    let (_server, client) = memory().await;
    let id = client.create("k", &[]).await;
    let first = client.part(("k", &id), 1, &[], "123").await.ok().etag();
    let second = client.part(("k", &id), 2, &[], "1").await.ok().etag();
    let parts = [(1, &*first), (2, &*second)];
    assert!(client.complete(("k", &id), &parts, &[]).await.is(400, "EntityTooSmall"));
    client.complete(("k", &id), &parts[1..], &[]).await.ok();
}

#[tokio::test]
async fn part_numbers_have_bounds() {
    let (_server, client) = memory().await;
    let id = client.create("k", &[]).await;
    for number in [0, 10_001, -1] {
        assert!(client.part(("k", &id), number, &[], "x").await.is(400, "InvalidArgument"));
    }
    client.part(("k", &id), 10_000, &[], "x").await.ok();
}

#[tokio::test]
async fn a_part_with_a_wrong_checksum_is_not_held() {
    let (_server, client) = memory().await;
    let id = client.create("k", &[]).await;
    let wrong = [("x-amz-checksum-crc32c", "AAAAAA==")];
    assert!(client.part(("k", &id), 1, &wrong, "part").await.is(400, "BadDigest"));
    let parts = client.get(&format!("k?uploadId={id}"), &[]).await.ok();
    assert_eq!(parts.all("PartNumber"), Vec::<String>::new());
}

#[tokio::test]
async fn parts_with_checksums_make_an_object_with_one() {
    let (_server, client) = memory().await;
    for (algorithm, name) in [(Algorithm::Crc32c, "CRC32C"), (Algorithm::Crc64nvme, "CRC64NVME")] {
        let header = algorithm.header();
        let kind = ("x-amz-checksum-type", "FULL_OBJECT");
        let id = client.create("k", &[("x-amz-checksum-algorithm", name), kind]).await;
        assert!(client.part(("k", &id), 1, &[], "head").await.is(400, "InvalidRequest"), "it brings none");
        let mut etags = Vec::new();
        for (number, body) in [(1, "head"), (2, "tail")] {
            let value = crc(algorithm, body);
            let part = client.part(("k", &id), number, &[(header, &value)], body).await.ok();
            assert_eq!(part.header(header), Some(&*value));
            etags.push(part.etag());
        }
        let parts = [(1, &*etags[0]), (2, &*etags[1])];
        let wrong = crc(algorithm, "tailhead");
        let refused = client.complete(("k", &id), &parts, &[(header, &wrong)]).await;
        assert!(refused.is(400, "BadDigest"));
        let whole = crc(algorithm, "headtail");
        let done = client.complete(("k", &id), &parts, &[(header, &whole), kind]).await.ok();
        assert_eq!(done.one(&format!("Checksum{name}")), whole);
        let head = client.head("k", &[("x-amz-checksum-mode", "ENABLED")]).await.ok();
        assert_eq!(head.header(header), Some(&*whole));
    }
}

#[tokio::test]
async fn parts_without_checksums_make_an_object_without_one() {
    let (_server, client) = memory().await;
    let id = client.create("k", &[]).await;
    let value = crc(Algorithm::Crc32c, "head");
    let first = client.part(("k", &id), 1, &[("x-amz-checksum-crc32c", &value)], "head").await.ok().etag();
    let second = client.part(("k", &id), 2, &[], "tail").await.ok().etag();
    client.complete(("k", &id), &[(1, &first), (2, &second)], &[]).await.ok();
    let head = client.head("k", &[("x-amz-checksum-mode", "ENABLED")]).await.ok();
    assert_eq!(head.header("x-amz-checksum-crc32c"), None);
}

#[tokio::test]
async fn a_part_may_be_copied_from_a_range() {
    let (_server, client) = memory().await;
    let etag = client.put("from", &[], "0123456789").await.ok().etag();
    let id = client.create("k", &[]).await;
    let target = format!("k?partNumber=1&uploadId={id}");
    let range = ("x-amz-copy-source-range", "bytes=2-6");
    let copied = client.copy("from", &target, &[range, ("x-amz-copy-source-if-match", &etag)]).await.ok();
    let other = ("x-amz-copy-source-if-match", "\"other\"");
    assert!(client.copy("from", &target, &[range, other]).await.is(412, "PreconditionFailed"));
    let beyond = ("x-amz-copy-source-range", "bytes=2-10");
    assert!(client.copy("from", &target, &[beyond]).await.is(400, "InvalidArgument"));
    client.complete(("k", &id), &[(1, &copied.one("ETag"))], &[]).await.ok();
    assert_eq!(client.get("k", &[]).await.ok().text(), "23456");
}

#[tokio::test]
async fn uploads_are_listed_page_by_page() {
    let (_server, client) = served(Config { page_max: 2, ..config(Memory::default()) }).await;
    let mut opened = Vec::new();
    for key in ["a/1", "a/1", "a/2", "b", "a/1"] {
        opened.push((key.to_owned(), client.create(key, &[]).await));
    }
    opened.sort();
    let (mut found, mut after) = (Vec::new(), String::new());
    loop {
        let target = format!("/bucket?uploads&prefix=a/{after}");
        let page = client.send("GET", &target, &[], "").await.unwrap().ok();
        assert!(page.all("Initiated").iter().all(|time| time.ends_with('Z')));
        found.extend(page.all("Key").into_iter().zip(page.all("UploadId")));
        if page.one("IsTruncated") == "false" {
            break;
        }
        let (key, id) = (page.one("NextKeyMarker"), page.one("NextUploadIdMarker"));
        after = format!("&key-marker={key}&upload-id-marker={id}");
    }
    assert_eq!(found, opened[..4]);
    let page = client.send("GET", "/bucket?uploads&key-marker=a/1", &[], "").await.unwrap().ok();
    assert_eq!(page.all("Key"), ["a/2", "b"], "a key alone skips all its uploads");
}

#[tokio::test]
async fn parts_are_listed_page_by_page() {
    let (_server, client) = memory().await;
    let (id, first, second) = two(&client).await;
    let page = client.get(&format!("k?uploadId={id}&max-parts=1"), &[]).await.ok();
    assert_eq!((page.all("ETag"), page.one("IsTruncated")), (vec![first], "true".into()));
    let next = page.one("NextPartNumberMarker");
    let page = client.get(&format!("k?uploadId={id}&part-number-marker={next}"), &[]).await.ok();
    assert_eq!((page.all("ETag"), page.one("Size")), (vec![second], "4".into()));
}
