//! Objects that are encrypted with a customer's key: does a request bring the one that opens them?

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use http::HeaderMap;
use md5::Md5;
use sha2::{Digest, Sha256};

/// What is wrong with what a request brought, or did not.
#[derive(Clone, Copy, Debug)]
pub(super) enum Wrong {
    Missing,
    Other,
    NotNeeded,
    /// The digest is of another key.
    Digest,
}

/// A protocol's headers.
pub(super) struct Names {
    pub(super) key: &'static str,
    pub(super) algorithm: &'static str,
    pub(super) digest: &'static str,
    pub(super) digested: fn(&[u8]) -> Vec<u8>,
}

pub(super) fn md5(bytes: &[u8]) -> Vec<u8> {
    Md5::digest(bytes).to_vec()
}

pub(super) fn sha256(bytes: &[u8]) -> Vec<u8> {
    Sha256::digest(bytes).to_vec()
}

/// `held`: what the objects are encrypted with, base64; None: nothing.
pub(super) fn open(headers: &HeaderMap, names: &Names, held: Option<&str>) -> Result<(), Wrong> {
    let header = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
    let held = match (header(names.key), held) {
        (None, None) => return Ok(()),
        (None, Some(_)) => return Err(Wrong::Missing),
        (Some(_), None) => return Err(Wrong::NotNeeded),
        (Some(brought), Some(held)) if brought != held => return Err(Wrong::Other),
        (Some(_), Some(held)) => BASE64_STANDARD.decode(held).expect("a key of the testkit's"),
    };
    let digest = BASE64_STANDARD.encode((names.digested)(&held));
    match header(names.algorithm) == Some("AES256") && header(names.digest) == Some(&digest) {
        true => Ok(()),
        false => Err(Wrong::Digest),
    }
}
