//! What builds before the first release wrote: the source as an enum, and each parameter by its Rust type. Read only.

use crate::{Addressing, Freshness, Parameters, Profile, SourceUrl};
use serde::{Deserialize, Deserializer};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;
use url::Url;

#[derive(Deserialize)]
#[serde(untagged)]
enum SourceForm {
    Text(String),
    First(FirstSource),
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
enum FirstSource {
    S3 { bucket: String, prefix: String },
    Dir { path: PathBuf },
}

pub(super) fn source<'de, D: Deserializer<'de>>(from: D) -> Result<String, D::Error> {
    let first = match SourceForm::deserialize(from)? {
        SourceForm::Text(text) => return Ok(text),
        SourceForm::First(first) => first,
    };
    let source = match first {
        FirstSource::S3 { bucket, prefix } => SourceUrl::S3 { bucket, prefix },
        FirstSource::Dir { path } => SourceUrl::Dir { path },
    };
    Ok(source.to_string())
}

#[derive(Deserialize)]
#[serde(untagged)]
enum ParametersForm {
    Text(BTreeMap<String, String>),
    First(Box<FirstParameters>),
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct FirstParameters {
    endpoint: Option<Url>,
    region: Option<String>,
    addressing: FirstAddressing,
    allow_http: bool,
    freshness: FirstFreshness,
    profile: FirstProfile,
    readahead: Option<u64>,
    cache_limit: Option<u64>,
    uid: u32,
    gid: u32,
    file_mode: u32,
    dir_mode: u32,
    heal_timeout: Duration,
    store_timeout: Duration,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
enum FirstAddressing {
    Path,
    Virtual,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
enum FirstFreshness {
    Static,
    Ttl(Duration),
    Strict,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
enum FirstProfile {
    Auto,
    Large,
    Small,
}

#[allow(clippy::needless_update, reason = "parameters to come: what they did not know has its default")]
pub(super) fn parameters<'de, D: Deserializer<'de>>(from: D) -> Result<BTreeMap<String, String>, D::Error> {
    let first = match ParametersForm::deserialize(from)? {
        ParametersForm::Text(pairs) => return Ok(pairs),
        ParametersForm::First(first) => *first,
    };
    let parameters = Parameters {
        endpoint: first.endpoint,
        region: first.region,
        addressing: match first.addressing {
            FirstAddressing::Path => Addressing::Path,
            FirstAddressing::Virtual => Addressing::Virtual,
        },
        allow_http: first.allow_http,
        freshness: match first.freshness {
            FirstFreshness::Static => Freshness::Static,
            FirstFreshness::Ttl(ttl) => Freshness::Ttl(ttl),
            FirstFreshness::Strict => Freshness::Strict,
        },
        profile: match first.profile {
            FirstProfile::Auto => Profile::Auto,
            FirstProfile::Large => Profile::Large,
            FirstProfile::Small => Profile::Small,
        },
        readahead: first.readahead,
        cache_limit: first.cache_limit,
        uid: first.uid,
        gid: first.gid,
        file_mode: first.file_mode,
        dir_mode: first.dir_mode,
        heal_timeout: first.heal_timeout,
        store_timeout: first.store_timeout,
        ..Parameters::default()
    };
    Ok(parameters.chosen().into_iter().map(|(name, value)| (name.to_owned(), value)).collect())
}
