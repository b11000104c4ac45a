//! What the two ends of a connection agree on, agent and broker or agent and worker: the messages, the SEQPACKET socket
//! that carries them, how long each end waits for the other ([`budget`]) and when it counts as hung ([`Watchdog`]).
//!
//! One message is one packet: a bounded body and up to [`MAX_FDS`] file descriptors. No I/O other than on that socket
//! happens here; what follows from a message, or from a peer that hangs, each end decides by itself.

mod backing_ids;
pub mod broker;
pub mod budget;
mod errors;
#[cfg(test)]
#[allow(dead_code, reason = "each crate uses some of it")]
#[path = "../../testkit/src/golden.rs"]
mod golden;
#[cfg(not(feature = "next-version"))]
mod later;
#[cfg(feature = "next-version")]
#[path = "next_version.rs"]
mod later;
mod mount;
mod packet;
#[cfg(test)]
mod samples;
mod watchdog;
pub mod worker;
pub mod writable;

pub use backing_ids::BACKING_IDS_MAX;
pub use errors::{Refusal, RefusalKind};
pub use later::Later;
pub use mount::{Access, Claim, MountSpec, Pod, SourceAt, Subjects};
pub use packet::{MAX_FDS, MAX_MESSAGE, Packet, PacketError, PeerIdentity};
pub use volume::Cause;
pub use watchdog::Watchdog;
