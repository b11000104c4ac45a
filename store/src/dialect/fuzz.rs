//! What a store answers, as bytes: for the fuzz target `s3`, with what has to hold whatever the bytes are.

use super::{Dialect, Oss, Refusal, S3, answer, date, field, listing};
use crate::keys::{decode_form, encode_path, encode_query, is_name, is_path, show};
use crate::retry::Fault;
use crate::{Kind, PAGE_ENTRIES, Version};
use http::{HeaderMap, StatusCode};
use volume::Parameters;

/// As credentials whose key id a store repeats.
const SECRET: &str = "AKIAEXAMPLE";

/// The body of a listing.
pub fn listing(body: &[u8]) {
    for dir in [&b""[..], b"d/"] {
        let Ok(answer) = listing::parse(body) else { return };
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
            }
        }
        for text in &page.unnameable {
            // A control character is written as an escape, and a byte that is no UTF-8 as a character of three.
            assert!(text.len() < 8 << 10 && !text.contains(char::is_control));
        }
    }
}

/// The body of an error.
pub fn error(body: &[u8]) {
    let parameters = Parameters { region: Some("r".into()), ..Parameters::default() };
    let s3: Box<dyn Dialect> = Box::new(S3::new("b", &parameters).expect("a bucket"));
    let oss: Box<dyn Dialect> = Box::new(Oss::new("b", None, &parameters).expect("a bucket"));
    let headers = HeaderMap::new();
    for status in [200, 301, 400, 403, 404, 408, 412, 416, 429, 500, 501, 503, 599] {
        let status = StatusCode::from_u16(status).expect("these are");
        let refusal = Refusal { what: "s3://b/k", status, headers: &headers, body: Some(body) };
        for dialect in [&s3, &oss] {
            let text = match dialect.refused(&refusal, &[SECRET]) {
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
