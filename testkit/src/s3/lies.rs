//! What stores that say they are like AWS get wrong.

use serde::{Deserialize, Serialize};

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct Lies {
    /// Of PutObject and CopyObject.
    pub ignores_if_match_on_put: bool,
    /// Of every write.
    pub ignores_if_none_match: bool,
    /// As MinIO does; also of the ETags in a batch.
    pub ignores_if_match_on_delete: bool,
    /// As Ceph does: both conditions of CompleteMultipartUpload.
    pub ignores_conditions_on_complete: bool,
    /// `x-amz-checksum-*` is neither checked nor told.
    pub no_checksums: bool,
}
