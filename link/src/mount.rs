//! What is mounted, and for whom: made once, where a publish is understood, and carried as it is by everything that
//! brings the mount up, records it, hands it over or makes it anew.

use serde::{Deserialize, Serialize};
use volume::{NotUnderstood, VolumeSpec, WireSpec};

/// One mount, but for its secret and its descriptors. A process that passes it on keeps all of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct MountSpec {
    /// Passed on as it is: what a later version has put there is the agent's to understand.
    #[serde(rename = "spec")]
    pub volume: WireSpec,
    /// Further sources, each shown in a directory of its own. A build that finds one refuses the mount
    /// ([`Self::understand`]) unless it can show it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub sources: Vec<SourceAt>,
    #[serde(default, skip_serializing_if = "Access::is_read_only")]
    pub access: Access,
    /// May the agent use credentials of its own environment where the volume has none? No, unless the sender says so.
    #[serde(default)]
    pub environment: bool,
    /// The target path, for people: shown in status, logs and metrics.
    #[serde(default)]
    pub target: String,
    #[serde(flatten)]
    pub subjects: Subjects,
}

/// A source that is not at the root of its mount.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SourceAt {
    /// Relative to the root of the mount.
    pub path: String,
    /// As [`volume::SourceUrl`] shows it.
    pub source: String,
}

/// What applications may do. A value that a build does not know is refused with its message.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Access {
    #[default]
    ReadOnly,
    /// What the volume lets be done, and this mount of it was asked for.
    ReadWrite,
}

impl Access {
    pub fn is_writable(self) -> bool {
        match self {
            Self::ReadOnly => false,
            Self::ReadWrite => true,
        }
    }

    // serde's skip_serializing_if passes a reference.
    #[allow(clippy::trivially_copy_pass_by_ref)]
    fn is_read_only(&self) -> bool {
        !self.is_writable()
    }
}

/// To whom a mount belongs, and so its Events. Static and inline volumes have no claim that we know of.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Subjects {
    #[serde(default)]
    pub pod: Option<Pod>,
    #[serde(default)]
    pub claim: Option<Claim>,
}

/// The pod that mounts, where kubelet names it (`podInfoOnMount`).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Pod {
    pub name: String,
    pub namespace: String,
    pub uid: String,
}

/// The claim of a provisioned volume.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Claim {
    pub name: String,
    pub namespace: String,
    pub uid: Option<String>,
}

impl MountSpec {
    /// A read-only mount of one source, for no pod.
    pub fn new(volume: impl Into<WireSpec>, target: impl Into<String>) -> Self {
        Self {
            volume: volume.into(),
            sources: Vec::new(),
            access: Access::ReadOnly,
            environment: false,
            target: target.into(),
            subjects: Subjects::default(),
        }
    }

    /// Of its pod.
    pub fn namespace(&self) -> Option<&str> {
        self.subjects.pod.as_ref().map(|pod| pod.namespace.as_str())
    }

    /// What it takes to serve it; an error concerns this mount alone.
    pub fn understand(&self) -> Result<VolumeSpec, NotUnderstood> {
        match self.sources.is_empty() {
            true => self.volume.understand(),
            false => Err(NotUnderstood::Parameters {
                id: self.volume.id.clone(),
                names: vec!["\"sources\"".to_owned()],
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(more: &str) -> Result<MountSpec, serde_json::Error> {
        serde_json::from_str(&format!(r#"{{"spec":{{"id":"v","source":"s3://bucket/"}}{more}}}"#))
    }

    #[test]
    fn what_is_not_said_is_read_only_of_one_source_and_without_the_agents_credentials() {
        let plain = parse("").unwrap();
        assert_eq!((plain.access, plain.environment, plain.namespace()), (Access::ReadOnly, false, None));
        assert!(plain.understand().is_ok());
        let text = serde_json::to_string(&plain).unwrap();
        assert!(!text.contains("access") && !text.contains("sources"), "{text}");
    }

    #[test]
    fn a_mount_that_this_build_cannot_serve_as_it_was_meant_is_refused() {
        let more = parse(r#","sources":[{"path":"b","source":"s3://other/"}]"#).unwrap();
        let why = more.understand().unwrap_err().to_string();
        assert!(why.contains("sources") && why.contains("upgrade the node agent"), "{why}");
        assert!(parse(r#","access":"later""#).is_err());
    }

    #[test]
    fn a_mount_that_may_be_written_to_says_so() {
        let written = parse(r#","access":"readWrite""#).unwrap();
        assert!(written.access.is_writable() && !Access::default().is_writable());
        assert!(serde_json::to_string(&written).unwrap().contains(r#""access":"readWrite""#));
    }
}
