//! What requests of controller and node have in common, parsed into types.

use crate::status::Failure;
use mounts::MountOptions;
use proto::csi::v1::VolumeCapability;
use proto::csi::v1::volume_capability::{AccessType, access_mode::Mode};
use std::collections::BTreeMap;

/// Keys that Kubernetes' own components add to parameters and volume attributes.
const FOREIGN_PREFIXES: &[&str] = &["csi.storage.k8s.io/", "storage.kubernetes.io/"];
/// Keys of ours in a volume context: written by the controller, never by a user.
pub(crate) const INTERNAL_PREFIX: &str = "internal.millpond.io/";
/// Whose credentials the volume may use. Missing: also the agent's own.
pub(crate) const CREDENTIALS: &str = "internal.millpond.io/credentials";
/// The volume's secret, or none.
pub(crate) const OWN_CREDENTIALS: &str = "own";
pub(crate) const PVC_NAME: &str = "internal.millpond.io/pvc-name";
pub(crate) const PVC_NAMESPACE: &str = "internal.millpond.io/pvc-namespace";
pub(crate) const PVC_UID: &str = "internal.millpond.io/pvc-uid";

/// `mountOptions` that are honoured. (`rw` is, in that it makes nothing writable that would not be without.)
const MOUNT_FLAGS: &[&str] = &["ro", "rw", "noatime", "noexec"];

/// How a volume shall be used, as far as it matters here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Access {
    /// SINGLE_NODE_SINGLE_WRITER: one target only.
    pub single_target: bool,
    /// It may be written to, if its volume can be.
    pub writes: bool,
    /// Owner group of all files (`fsGroup`).
    pub mount_group: Option<u32>,
    pub options: MountOptions,
}

pub fn access(capability: Option<&VolumeCapability>) -> Result<Access, Failure> {
    let capability = capability.ok_or_else(|| Failure::missing("volume_capability"))?;
    let mode = capability.access_mode.as_ref().map_or(Mode::Unknown, |m| m.mode());
    if mode == Mode::Unknown {
        return Err(Failure::Invalid("the volume capability has no access mode".into()));
    }
    let mount = match &capability.access_type {
        Some(AccessType::Mount(mount)) => mount,
        Some(AccessType::Block(_)) => {
            return Err(Failure::Invalid(
                "block volumes are not offered: set volumeMode to Filesystem".into(),
            ));
        }
        None => return Err(Failure::Invalid("the volume capability has no access type".into())),
    };
    if let Some(flag) = mount.mount_flags.iter().find(|f| !MOUNT_FLAGS.contains(&f.as_str())) {
        return Err(Failure::Invalid(format!(
            "mount option {flag:?} is not supported: leave it out (accepted: {})",
            MOUNT_FLAGS.join(", ")
        )));
    }
    let has = |flag: &str| mount.mount_flags.iter().any(|f| f == flag);
    let options =
        MountOptions { no_exec: has("noexec"), no_atime: has("noatime"), ..MountOptions::default() };
    let mount_group = match mount.volume_mount_group.as_str() {
        "" => None,
        text => Some(text.parse().map_err(|_| {
            Failure::Invalid(format!("volume_mount_group {text:?} is not a numeric group id"))
        })?),
    };
    Ok(Access {
        single_target: mode == Mode::SingleNodeSingleWriter,
        writes: is_writing(mode) && !has("ro"),
        mount_group,
        options,
    })
}

fn is_writing(mode: Mode) -> bool {
    match mode {
        Mode::SingleNodeWriter
        | Mode::SingleNodeSingleWriter
        | Mode::SingleNodeMultiWriter
        | Mode::MultiNodeSingleWriter
        | Mode::MultiNodeMultiWriter => true,
        Mode::Unknown | Mode::SingleNodeReaderOnly | Mode::MultiNodeReaderOnly => false,
    }
}

/// The pairs that are ours to understand.
pub(crate) fn own_keys<'m>(
    pairs: impl IntoIterator<Item = (&'m String, &'m String)>,
) -> BTreeMap<&'m str, &'m str> {
    pairs
        .into_iter()
        .map(|(k, v)| (k.as_str(), v.as_str()))
        .filter(|(key, _)| !FOREIGN_PREFIXES.iter().any(|prefix| key.starts_with(prefix)))
        .collect()
}

/// RPCs that exist in the standard and not here. Written as `async_trait` expands it, because an attribute does not
/// see through a macro.
macro_rules! not_offered {
    ($($method:ident: $request:ident -> $response:ident),* $(,)?) => { $(
        fn $method<'life0, 'async_trait>(
            &'life0 self,
            _: tonic::Request<$request>,
        ) -> std::pin::Pin<Box<
            dyn Future<Output = Result<tonic::Response<$response>, tonic::Status>> + Send + 'async_trait,
        >>
        where
            'life0: 'async_trait,
            Self: 'async_trait,
        {
            Box::pin(async { Err($crate::status::Failure::Unsupported(stringify!($response)).into()) })
        }
    )* };
}
pub(crate) use not_offered;
