//! What a store answers, as bytes: for the fuzz target `s3`, with what has to hold whatever the bytes are.

use super::{Azure, BucketDialect, Dialect, Gcs, Oss, Refusal, S3, answer, date, field, index, web};
use crate::keys::{decode_form, encode_path, encode_query, is_name, is_path, show};
use crate::retry::Fault;
use crate::{Kind, PAGE_ENTRIES, Version};
use http::{HeaderMap, StatusCode};
use std::sync::LazyLock;
use volume::Parameters;

/// As credentials whose key id a store repeats.
const SECRET: &str = "AKIAEXAMPLE";

static DIALECTS: LazyLock<[Box<dyn BucketDialect>; 4]> = LazyLock::new(|| {
    let parameters = Parameters { region: Some("r".into()), ..Parameters::default() };
    let s3 = S3::new("b", &parameters).expect("a bucket");
    let oss = Oss::new("b", None, &parameters).expect("a bucket");
    let gcs = Gcs::new("b", &parameters).expect("a bucket");
    let azure = Azure::new("b", None, Some("account"), &parameters).expect("a container");
    [Box::new(s3), Box::new(oss), Box::new(gcs), Box::new(azure)]
});

/// The body of a listing, of whichever store.
pub fn listing(body: &[u8]) {
    for dialect in &*DIALECTS {
        listing_of(&**dialect, body);
        // Of an object, where it comes as a body.
        if let Ok(Some(object)) = dialect.seen(&HeaderMap::new(), body) {
            assert!(object.size <= volume::FILE_BYTES_MAX);
            assert!(dialect.content(b"k", &object.version).is_some());
        }
    }
}

fn listing_of(dialect: &dyn BucketDialect, body: &[u8]) {
    for dir in [&b""[..], b"d/"] {
        let Ok(answer) = dialect.listed(body) else { return };
        let page = answer.into_page(dir);
        let directories = page.entries.iter().filter(|entry| entry.kind == Kind::Directory).count();
        assert!(directories <= PAGE_ENTRIES && page.entries.len() - directories <= PAGE_ENTRIES);
        for entry in &page.entries {
            assert!(is_name(&entry.name));
            let path = [dir, &entry.name].concat();
            assert!(is_path(&path), "what is shown can be asked for");
            if let Kind::File { size, version } = &entry.kind {
                assert!(*size <= volume::FILE_BYTES_MAX);
                can_be_asked_for(version);
                assert!(
                    dialect.content(&path, version).is_some() && dialect.reading(version, &(0..1)).is_some()
                );
            }
        }
        for text in &page.unnameable {
            // A control character is written as an escape, and a byte that is no UTF-8 as a character of three.
            assert!(text.len() < 8 << 10 && !text.contains(char::is_control));
        }
    }
}

/// What a web server says about a directory, in whichever form.
pub fn index(body: &[u8]) {
    let (web, path) = (web::Web::new("https://h").expect("a host"), b"/d/");
    let manifest = index::manifest(body, "https://h/d/").map(|tree| tree.items());
    let dav = index::multistatus(body, path).map(|all| all.below);
    for items in [index::json(body), index::html(body, path), dav, manifest] {
        let Ok(items) = items else { continue };
        assert!(items.named.len() + items.unnameable.len() <= index::ITEMS_MAX);
        for (name, item) in &items.named {
            assert!(is_name(name));
            if let index::Item::File(index::Told::All { size, version, modified_ns }) = item {
                assert!(*size <= volume::FILE_BYTES_MAX && *modified_ns >= 0);
                let asks = web.reading(version, &(0..1)).expect("what is shown can be asked for");
                // As it comes back.
                let etag = asks.get(http::header::IF_MATCH).map(|etag| (http::header::ETAG, etag.clone()));
                let answer = HeaderMap::from_iter(etag);
                assert!(
                    !version.as_str().starts_with('"')
                        || web.version(&answer, version).as_ref() == Some(version)
                );
            }
        }
    }
}

/// The body of an error.
pub fn error(body: &[u8]) {
    let headers = HeaderMap::new();
    for status in [200, 301, 400, 401, 403, 404, 408, 409, 412, 416, 429, 500, 501, 503, 599] {
        let status = StatusCode::from_u16(status).expect("these are");
        for dialect in &*DIALECTS {
            let url = &dialect.place().base;
            let refusal = Refusal {
                what: "s3://b/k",
                url,
                status,
                headers: &headers,
                body: Some(body),
                is_write: false,
            };
            let text = match dialect.refused(&refusal, &[SECRET.to_owned()]) {
                Fault::Fail(error) => error.to_string(),
                Fault::Retry { detail, .. } => detail,
            };
            assert!(text.len() < 4 << 10 && !text.contains(SECRET));
        }
    }
}

/// A header's value, or a field of a listing.
pub fn value(text: &str) {
    if let Some(version) = field::unquoted(text) {
        can_be_asked_for(&version);
    }
    if field::size(text).is_some() {
        assert!(text.trim().bytes().all(|byte| byte.is_ascii_digit()));
    }
    let _ = (answer::content_range(text), answer::retry_after(text));
    for time in [date::parse_iso(text), date::parse_http(text)].into_iter().flatten() {
        assert!(time >= 0 && time % 1_000_000_000 == 0, "whole seconds, not before 1970");
    }
}

/// A key.
pub fn key(key: &[u8]) {
    assert_eq!(decode_form(&encode_query(key)), key);
    let url = encode_path(key);
    assert!(url.bytes().all(|byte| byte.is_ascii_graphic()) && decode_form(&url) == key);
    assert!(!show(key).contains(char::is_control));
    if let Ok(text) = std::str::from_utf8(key) {
        let _ = decode_form(text);
    }
}

/// It comes back from the header that it is sent in: if not, its object is never found to be of this version.
fn can_be_asked_for(version: &Version) {
    assert_eq!(field::unquoted(&field::quoted(version)).as_ref(), Some(version));
}
