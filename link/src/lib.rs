//! The messages between agent and broker and between agent and worker, and the SEQPACKET socket that carries them.
//!
//! One message is one packet: a bounded body and up to [`MAX_FDS`] file descriptors. No I/O other than on that socket
//! happens here, and no policy.

mod backing_ids;
pub mod broker;
pub mod budget;
mod errors;
#[cfg(test)]
#[allow(dead_code, reason = "each crate uses some of it")]
#[path = "../../testkit/src/golden.rs"]
mod golden;
mod mount;
mod packet;
#[cfg(test)]
mod samples;
pub mod version;
mod watchdog;
pub mod worker;

pub use backing_ids::BACKING_IDS_MAX;
pub use errors::{Refusal, RefusalKind};
pub use mount::{Access, Claim, MountSpec, Pod, SourceAt, Subjects};
pub use packet::{MAX_FDS, MAX_MESSAGE, Packet, PacketError, PeerIdentity};
pub use volume::Cause;
pub use watchdog::Watchdog;
