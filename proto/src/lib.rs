//! The generated types and services of the gRPC interfaces: `csi::v1` (what Kubernetes calls) and `agent::v1` (what
//! operators call). Generated code only (`make proto`), apart from a `Debug` for the requests that carry secrets.

#![allow(clippy::all, unreachable_pub, rustdoc::all)]

pub mod agent {
    pub mod v1 {
        include!("generated/millpond.agent.v1.rs");
    }
}
pub mod csi {
    pub mod v1 {
        include!("generated/csi.v1.rs");
    }
}

/// Prost derives a `Debug` that prints every field. For requests with secrets it is left out (see `proto/generate`), and
/// this one shows what may be logged.
macro_rules! debug_without_secrets {
    ($package:ident: $($message:ident { $($field:ident),* }),* $(,)?) => { $(
        impl std::fmt::Debug for $package::v1::$message {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.debug_struct(stringify!($message))$(.field(stringify!($field), &self.$field))*.finish_non_exhaustive()
            }
        }
    )* };
}

debug_without_secrets! {
    csi:
    CreateVolumeRequest { name, parameters },
    DeleteVolumeRequest { volume_id },
    ControllerPublishVolumeRequest { volume_id, node_id },
    ControllerUnpublishVolumeRequest { volume_id, node_id },
    ValidateVolumeCapabilitiesRequest { volume_id },
    ControllerModifyVolumeRequest { volume_id },
    CreateSnapshotRequest { source_volume_id, name },
    DeleteSnapshotRequest { snapshot_id },
    ListSnapshotsRequest { snapshot_id, source_volume_id },
    GetSnapshotRequest { snapshot_id },
    ControllerExpandVolumeRequest { volume_id },
    NodeStageVolumeRequest { volume_id, staging_target_path },
    NodePublishVolumeRequest { volume_id, target_path, volume_context },
    NodeExpandVolumeRequest { volume_id, volume_path },
}

debug_without_secrets! {
    agent:
    UploadStagingRequest { volume_id },
}

#[cfg(test)]
mod tests {
    use crate::csi::v1::*;

    #[test]
    fn requests_do_not_print_their_secrets() {
        let secrets = [("secretAccessKey".to_owned(), "hunter2".to_owned())];
        let publish = NodePublishVolumeRequest { secrets: secrets.clone().into(), ..Default::default() };
        let create = CreateVolumeRequest { secrets: secrets.clone().into(), ..Default::default() };
        let upload = crate::agent::v1::UploadStagingRequest { secrets: secrets.into(), ..Default::default() };
        let text = format!("{publish:?} {create:?} {upload:?}");
        assert!(!text.contains("hunter2"), "{text}");
    }
}
