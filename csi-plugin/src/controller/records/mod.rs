//! Volume records: name, id and context of every volume that was created. No secret is ever among them.

mod directory;
mod kubernetes;

pub use directory::Directory;
pub use kubernetes::Kubernetes;

use crate::cluster::ClusterError;
use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;
use volume::VolumeId;

/// Raised when an older driver could misread a record.
const FORMAT: u32 = 1;

/// A volume that was created: one file of a directory, or one cluster-scoped object `MillpondVolume`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, CustomResource, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[kube(
    group = "millpond.io",
    version = "v1alpha1",
    kind = "MillpondVolume",
    plural = "millpondvolumes",
    shortname = "mpv",
    category = "millpond",
    doc = "A volume that Millpond's controller has created. Written and deleted by the controller only.",
    printcolumn = r#"{"name":"Source","type":"string","description":"Where the bytes come from","jsonPath":".spec.context.source"}"#,
    printcolumn = r#"{"name":"Deletion","type":"string","description":"Of the directory, with the volume","jsonPath":".spec.deletion"}"#,
    printcolumn = r#"{"name":"Age","type":"date","jsonPath":".metadata.creationTimestamp"}"#
)]
pub struct Record {
    /// Version of this format.
    #[schemars(with = "i32")]
    pub format: u32,
    /// The CSI volume id.
    #[schemars(with = "String")]
    pub id: VolumeId,
    /// The name in CreateVolume, from which the id was made.
    pub name: String,
    /// The size that the claim asked for; a volume of ours has none.
    pub capacity_bytes: i64,
    /// What the node gets: checked parameters, templates filled in.
    pub context: BTreeMap<String, String>,
    /// Digest of the parameters before templates were filled in. Missing: written by an older controller.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub request: Option<String>,
    /// Of the volume's directory in its bucket, when the volume is deleted. Missing: it stays.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deletion: Option<Deletion>,
}

/// How far a directory is that goes with its volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub enum Deletion {
    /// When its volume is deleted.
    Planned,
    /// Part of it may be gone: nobody gets it any more.
    Begun,
    /// All of it is gone, and nothing more is deleted: what another replica has under way ends.
    Ended,
}

impl Record {
    pub fn new(name: &str, capacity_bytes: i64, context: BTreeMap<String, String>, request: String) -> Self {
        let (id, request) = (id_of(name), Some(request));
        Self { format: FORMAT, id, name: name.to_owned(), capacity_bytes, context, request, deletion: None }
    }

    /// Its directory is being deleted, or has been.
    pub(crate) fn is_going(&self) -> bool {
        matches!(self.deletion, Some(Deletion::Begun | Deletion::Ended))
    }
}

/// A name that may serve as an id is the id; any other is named by its digest.
pub(crate) fn id_of(name: &str) -> VolumeId {
    VolumeId::parse(name)
        .unwrap_or_else(|_| VolumeId::parse(&digest(name)).expect("34 hexadecimal characters are an id"))
}

fn digest(text: &str) -> String {
    use sha2::Digest;
    format!("n-{}", hex::encode(&sha2::Sha256::digest(text.as_bytes())[..16]))
}

#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    #[error("volume record {}: {source}", path.display())]
    Io { path: PathBuf, source: io::Error },
    #[error("volume record {} cannot be read ({why}): restore it or move it away", path.display())]
    Malformed { path: PathBuf, why: String },
    #[error(
        "MillpondVolume {name} has format {found} instead of {FORMAT}: it was written by a newer controller"
    )]
    Format { name: String, found: u32 },
    #[error(
        "MillpondVolume {name} was not kept as it was written: the CRD of an older release is installed; apply this one's (deploy/manifests/base/crd.yaml)"
    )]
    Pruned { name: String },
    #[error(transparent)]
    Cluster(#[from] ClusterError),
}

/// Where records live. Calls block, for a limited time.
pub trait Records: Send + Sync + std::fmt::Debug + 'static {
    fn get(&self, id: &VolumeId) -> Result<Option<Record>, RecordError>;
    /// Records a new volume; false if its id is taken, and then nothing changes. Durable when it returns.
    fn insert(&self, record: &Record) -> Result<bool, RecordError>;
    /// The record is handed out once more: a replica that wants to remove it as unclaimed finds that it has changed. False:
    /// it is gone already, or begins to go.
    fn hand_out_again(&self, record: &Record) -> Result<bool, RecordError>;
    /// [`Deletion::Begun`], then [`Deletion::Ended`]: from now on nobody is handed out this record. False: it is gone already.
    fn advance_deletion(&self, record: &Record, to: Deletion) -> Result<bool, RecordError>;
    /// Is there another controller with the same records?
    fn are_shared(&self) -> bool;
    /// A missing record is a success.
    fn remove(&self, id: &VolumeId) -> Result<(), RecordError>;
    /// Up to `max` records in the order of their ids, after the given one; and whether there are more.
    fn list(&self, after: Option<&VolumeId>, max: usize) -> Result<(Vec<Record>, bool), RecordError>;
}
