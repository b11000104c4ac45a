//! A volume as text: how it travels between processes, is recorded, and is distinguished from other volumes.
//!
//! ```text
//! {"id":"pvc-1","source":"s3://bucket/a/","parameters":{"uid":"1000"},"hints":{"later":"x"}}
//! ```
//!
//! Builds of different versions read what each other wrote, so that a volume outlives an upgrade, and the way back:
//!
//! - **Defaults are left out.** Names and values are those of a StorageClass, each value in one spelling
//!   ([`Parameters::chosen`]). A parameter that a later version adds is not mentioned by volumes that do not use it.
//!   So a default never changes: what was left out means what it meant when it was left out.
//! - **`parameters` must be understood** by the agent that serves the volume: a name, a value or a scheme that it does not know
//!   is refused, for this volume alone. **`hints` may be ignored**: without them the volume is served as the version
//!   before them did ([`HINTS`] says which they are).
//! - **A process that passes a volume on keeps all of it.** The broker understands nothing here but `healTimeout`; an
//!   agent keeps the text beside what it understood of it. What only a later version knows comes back to it unchanged.
//! - **Identity** is a digest of source, parameters and hints: see [`WireSpec::digest`].
//!
//! `tests/golden` holds volumes as each version wrote them, with their digests; every later build must agree.

mod first;

use crate::ParameterError;
use crate::later::{self, Later};
use crate::parameters::is_known;
use crate::{Parameters, SourceError, SourceUrl, TemplateValues, VolumeId, VolumeSpec};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::time::Duration;

/// Parameters that a build which does not know them may ignore.
pub(crate) const HINTS: &[&str] = &[
    "staleIfError", // a build before it waits for the store, as it always has
    // A build before them brings every volume's files as its agent's configuration says.
    "part",
    "parallelParts",
];

/// They have done their work when a volume is described: its source is the whole one, and allowed. What becomes of it in the
/// end is the controller's to know.
const NOT_ON_THE_WIRE: [&str; 4] = ["source", "path", "allowedSources", "onDelete"];

/// A volume, in words that a build passes on whether it knows them or not. Carries no secret.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct WireSpec {
    pub id: VolumeId,
    /// As [`SourceUrl`] shows it; of a scheme that this build may not know.
    #[serde(deserialize_with = "first::source")]
    pub source: String,
    /// What differs from its default and must be understood.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty", deserialize_with = "first::parameters")]
    pub parameters: BTreeMap<String, String>,
    /// What differs from its default and may be ignored.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub hints: BTreeMap<String, String>,
}

/// Why this build cannot serve a volume that another one has described.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum NotUnderstood {
    #[error(
        "volume {id} needs {}, which this version does not know: upgrade the node agent, or publish the volume anew without",
        names.join(", ")
    )]
    Parameters { id: VolumeId, names: Vec<String> },
    #[error("volume {id} says {name:?} twice: its sender is broken")]
    Twice { id: VolumeId, name: String },
    #[error(
        "volume {id} was described by another version: {source}; upgrade the node agent if a later one knows it"
    )]
    Value { id: VolumeId, source: Box<ParameterError> },
    #[error(
        "volume {id} was described by another version: {source}; upgrade the node agent if a later one knows it"
    )]
    Source { id: VolumeId, source: SourceError },
}

impl From<&VolumeSpec> for WireSpec {
    fn from(spec: &VolumeSpec) -> Self {
        let named = |(name, value): (&str, String)| (name.to_owned(), value);
        let (hints, parameters): (Vec<_>, Vec<_>) =
            spec.parameters.chosen().into_iter().partition(|(name, _)| is_hint(name));
        Self {
            id: spec.id.clone(),
            source: spec.parameters.shown(&spec.source),
            parameters: parameters.into_iter().map(named).collect(),
            hints: hints.into_iter().map(named).collect(),
        }
    }
}

impl From<VolumeSpec> for WireSpec {
    fn from(spec: VolumeSpec) -> Self {
        Self::from(&spec)
    }
}

impl WireSpec {
    /// What it takes to serve the volume; an error concerns this volume alone.
    pub fn understand(&self) -> Result<VolumeSpec, NotUnderstood> {
        let id = || self.id.clone();
        let mut later = Later::default();
        let source = SourceUrl::parse_shown(&later.source(&self.source))
            .map_err(|source| NotUnderstood::Source { id: id(), source })?;
        let is_expected = |name: &str| is_known(name) && !NOT_ON_THE_WIRE.contains(&name);
        let unknown = self.parameters.keys().filter(|name| !is_expected(name));
        let names: Vec<String> = unknown.map(|name| format!("{:?}", shortened(name))).collect();
        if !names.is_empty() {
            return Err(NotUnderstood::Parameters { id: id(), names });
        }
        if let Some(name) = self.hints.keys().find(|name| self.parameters.contains_key(*name)) {
            return Err(NotUnderstood::Twice { id: id(), name: shortened(name) });
        }
        let top = later.shown(source.top());
        let top = ("source", top.as_str());
        fn pairs(all: &BTreeMap<String, String>) -> impl Iterator<Item = (&str, &str)> {
            all.iter().map(|(name, value)| (name.as_str(), value.as_str()))
        }
        let parse = |pairs: &[(&str, &str)]| {
            let parsed = Parameters::parse(pairs.iter().copied(), &TemplateValues::default());
            parsed.map(|(_, parameters)| parameters)
        };
        let must: Vec<_> = std::iter::once(top).chain(pairs(&self.parameters)).collect();
        // A value that this build does not know is ignored like a name that it does not know.
        // Beside the parameters, for some sources are none without.
        let is_usable = |hint: &(&str, &str)| {
            let with = must.iter().copied().chain([*hint]).collect::<Vec<_>>();
            is_expected(hint.0) && parse(&with).is_ok()
        };
        let all: Vec<_> = must.iter().copied().chain(pairs(&self.hints).filter(is_usable)).collect();
        let parameters = parse(&all)
            .or_else(|_| parse(&must))
            .map_err(|source| NotUnderstood::Value { id: id(), source: Box::new(source) })?;
        Ok(VolumeSpec { id: self.id.clone(), source, parameters })
    }

    /// For those that do not serve it: how long readers wait for a worker that does.
    pub fn heal_timeout(&self) -> Duration {
        let text = self.parameters.get("healTimeout");
        text.and_then(|text| Parameters::heal_timeout_of(text)).unwrap_or(Parameters::default().heal_timeout)
    }

    /// Identity of what is mounted, secrets and volume id excluded: equal digests mean that a repeated publish asks
    /// for the same thing.
    ///
    /// `v1-` and 32 hex digits of the SHA-256 of these fields, each behind its length (u64, little endian): the words
    /// "millpond volume 1", the source, then name and value of each parameter and hint, in byte order. Lengths, so that
    /// no value can look like another name; parameters and hints in one order, so that one may become the other. A
    /// build that must compute it differently begins it differently, and builds do not compare what begins otherwise.
    pub fn digest(&self) -> String {
        use sha2::Digest;
        let mut digest = sha2::Sha256::new();
        let mut field = |bytes: &[u8]| {
            digest.update((bytes.len() as u64).to_le_bytes());
            digest.update(bytes);
        };
        field(b"millpond volume 1");
        field(self.source.as_bytes());
        let mut all: Vec<_> = self.parameters.iter().chain(&self.hints).collect();
        all.sort();
        for (name, value) in all {
            field(name.as_bytes());
            field(value.as_bytes());
        }
        format!("v1-{}", hex::encode(&digest.finalize()[..16]))
    }
}

fn is_hint(name: &str) -> bool {
    HINTS.contains(&name) || later::HINTS.contains(&name)
}

fn shortened(text: &str) -> String {
    text.chars().take(80).collect()
}

#[cfg(test)]
mod tests;
