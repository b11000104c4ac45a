//! What the manifests call things.

pub const SYSTEM: &str = "millpond-system";
pub const DRIVER: &str = "csi.millpond.io";
/// DaemonSets and the Deployment.
pub const NODE: &str = "millpond-node";
pub const AGENT: &str = "millpond-agent";
pub const CONTROLLER: &str = "millpond-controller";
pub const RECORDS: &str = "millpondvolumes.millpond.io";
/// The annotation by which a claim names its data set.
pub const SOURCE: &str = "millpond.io/source";
pub const SECRET: &str = "millpond.io/secret";
/// As the mount table shows a volume.
pub const FILE_SYSTEM: &str = "fuse.millpond";
/// While this file exists the agent starts no worker (set in the suite's overlay).
pub const SUSPEND: &str = "/run/millpond/agent/suspend-respawn";
pub const CACHE: &str = "/var/lib/millpond/cache";
/// The agent writes here of which version it is.
pub const STATE_VERSION: &str = "/var/lib/millpond/state/version";
/// Where kubelet has its pods.
pub const KUBELET: &str = "/var/lib/kubelet";
pub const CSI_SOCKET: &str = "/var/lib/kubelet/plugins/csi.millpond.io/csi.sock";

/// The suite's own.
pub const TENANT: &str = "millpond-e2e";
pub const OTHER_TENANT: &str = "millpond-e2e-other";
/// The programs as the next version would be (`scripts/versions`).
pub const NEXT_IMAGE: &str = "ghcr.io/millpond/millpond:next";
pub const POD_IMAGE: &str = "millpond.io/e2e/pod:1";
/// A class with a fixed source and a class-wide secret.
pub const CLASS: &str = "millpond-e2e";
pub const S3_SECRET: &str = "s3";
