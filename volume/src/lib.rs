//! What a volume is, typed once: its id, where its bytes live, its parameters and its credentials.
//!
//! Everything that arrives as text (StorageClass parameters, CSI secrets, a URL on a command line) becomes one of
//! these types at the edge or is refused with a message that says what to do. Nothing here does I/O.

mod allow;
mod allowed;
mod cause;
mod credentials;
mod endpoint;
#[cfg(test)]
#[allow(dead_code, reason = "each crate uses some of it")]
#[path = "../../testkit/src/golden.rs"]
mod golden;
mod headers;
mod id;
#[cfg(not(feature = "next-version"))]
mod later;
#[cfg(feature = "next-version")]
#[path = "next_version.rs"]
mod later;
mod on_delete;
mod parameters;
mod permissions;
mod request_timeout;
mod source;
mod template;
mod units;
mod wire;

pub use allow::{AllowList, NotAllowed};
pub use cause::Cause;
pub use credentials::{
    Credentials, CredentialsError, CredentialsKind, HadoopFiles, HdfsIdentity, ScopeId, ScopeKey,
};
pub use endpoint::{BadPattern, EndpointPattern};
pub use id::{BadVolumeId, VolumeId};
pub use later::Later;
pub use on_delete::OnDelete;
pub use parameters::{
    Access, Addressing, AttributesFrom, Freshness, ParameterError, Parameters, Profile, TEMPLATED_PARAMETERS,
    WriteMode,
};
pub use permissions::Permissions;
pub use request_timeout::{FUSE_SYSCTL, RequestTimeout, within};
pub use source::{SourceError, SourceUrl, name_node};
pub use template::{TemplateError, TemplateValues, claim_chooses, expand, uses_annotations};
pub use units::{parse_bytes, parse_duration};
pub use wire::{NotUnderstood, WireSpec};

/// The largest file that the kernel can show (MAX_LFS_FILESIZE: offsets are signed), bytes. What a source claims beyond
/// it is not shown.
pub const FILE_BYTES_MAX: u64 = i64::MAX as u64;

/// One volume as the controller recorded it and the node serves it. Carries no secret. [`WireSpec`] is its text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VolumeSpec {
    pub id: VolumeId,
    /// Source with the expanded `path` already appended.
    pub source: SourceUrl,
    pub parameters: Parameters,
}

impl VolumeSpec {
    /// What the cache may share: same bytes behind the same credentials.
    /// Endpoint and region belong to the identity, because `s3://data` is another bucket on another endpoint.
    /// So does the addressing style: it decides which host is asked.
    pub fn scope(&self, credentials: &Credentials, key: &ScopeKey) -> ScopeId {
        ScopeId::of(key, &self.source, &self.parameters, credentials)
    }

    /// Is `scope` what these credentials open, by this version's name or by that of the version before?
    pub fn is_in(&self, scope: &ScopeId, credentials: &Credentials, key: &ScopeKey) -> bool {
        *scope == self.scope(credentials, key)
            || *scope == ScopeId::without_key(&self.source, &self.parameters, credentials)
    }

    /// Where requests go; None: where the store's own are, for this region.
    pub fn endpoint(&self) -> Option<url::Url> {
        self.parameters.endpoint.clone().or_else(|| self.source.endpoint())
    }

    /// See [`WireSpec::digest`].
    pub fn digest(&self) -> String {
        WireSpec::from(self).digest()
    }
}
