//! Every privileged thing that Millpond asks of the kernel: mounting, the FUSE device's ioctls, connection control.
//!
//! The trait [`Kernel`] is the seam: [`Linux`] does it, [`Fake`] pretends to for tests. There is no policy here (who
//! may mount what, when to give up) and no code in this crate opens, stats or lists anything inside a FUSE mount:
//! that is left to disposable processes ([`Helper`]).

mod attributes;
mod backing;
mod connection;
mod control;
mod detached;
mod device;
mod dying;
mod fake;
pub mod fusectl;
mod helper;
mod linux;
mod memory_tier;
mod mountinfo;
mod place;
pub mod probe;
mod replace;
mod source;
pub mod sysfs;
mod target;

pub use attributes::Attributes;
pub use connection::Connection;
pub use control::Control;
pub use detached::Detached;
pub(crate) use device::sample_init;
pub use fake::{Fake, FakeProbe, FakeState};
pub use helper::Helper;
pub use linux::{Linux, LinuxPaths};
pub use memory_tier::MemoryTier;
pub use mountinfo::{MountEntry, parse_mountinfo, stack_at, unescape};
pub use replace::{Replaced, Replacement};
pub use source::{FUSE_TYPE, MountSource, Ours};
pub use target::{Target, TargetError};

/// Call this first in `main`: in a [`Helper`] it does the work and never returns.
pub fn run_if_asked() {
    probe::run_if_asked();
    replace::run_if_asked();
}

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::time::Duration;

/// What may differ from mount to mount; everything else is always the same.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MountOptions {
    pub no_exec: bool,
    pub no_atime: bool,
    /// Not `MS_RDONLY`, neither the mount nor its superblock. The guard below is read-only all the same.
    pub writable: bool,
}

/// What the broker needs of the kernel. Calls block; none of them waits for a FUSE worker except [`Kernel::probe`] and
/// [`Kernel::replace`],
/// which wait in other processes and for a limited time.
pub trait Kernel: Send + Sync + std::fmt::Debug + 'static {
    /// A fresh FUSE device, close-on-exec.
    fn open_device(&self) -> Result<OwnedFd, KernelError>;

    /// Puts the guard and the FUSE mount at `target`, an existing empty directory where nothing of ours is mounted.
    /// After an error nothing is left mounted.
    fn mount(
        &self,
        target: &Target,
        device: BorrowedFd<'_>,
        source: &MountSource,
        options: MountOptions,
    ) -> Result<Connection, KernelError>;

    /// Makes a FUSE mount that is nowhere yet.
    fn mount_detached(
        &self,
        device: BorrowedFd<'_>,
        source: &MountSource,
        options: MountOptions,
    ) -> Result<Detached, KernelError>;

    /// Puts it at `target` in the place of the mount of the connection `dead`; the guard below stays.
    fn put(&self, mount: &Detached, target: &Target, dead: Connection) -> Result<(), KernelError>;

    /// Puts it at `target` on the guard of `volume`, on which nothing lies.
    fn put_on_guard(&self, mount: &Detached, target: &Target, volume: &str) -> Result<(), KernelError>;

    /// Gives the mount at a target to every mount namespace that still has a dead one of it.
    fn replace(&self, replacement: &Replacement) -> Result<Replaced, KernelError>;

    /// Takes FUSE mount and guard away, and whatever earlier runs stacked there, until nothing of ours is left.
    /// Returns how many mounts went; none is a success.
    fn unmount(&self, target: &Target) -> Result<u32, KernelError>;

    /// The mounts at a target, the visible one last. Where there is none the kernel says so at once: reading its table
    /// takes the longer the more volumes the node has.
    fn stack(&self, target: &Target) -> Result<Vec<MountEntry>, KernelError>;

    /// The mount table of this process' mount namespace, as a whole.
    fn table(&self) -> Result<Vec<MountEntry>, KernelError>;

    /// The kernel's INIT request, header included.
    fn read_init(&self, device: BorrowedFd<'_>, limit: Duration) -> Result<Vec<u8>, KernelError>;
    fn write_init_reply(&self, device: BorrowedFd<'_>, reply: &[u8]) -> Result<(), KernelError>;

    fn set_read_ahead_kb(&self, connection: Connection, kb: u32) -> Result<(), KernelError>;

    /// Registers a passthrough backing file: a read-only descriptor of a regular file below a cache root.
    fn backing_open(&self, device: BorrowedFd<'_>, file: BorrowedFd<'_>) -> Result<u32, KernelError>;
    fn backing_close(&self, device: BorrowedFd<'_>, id: u32) -> Result<(), KernelError>;

    /// The control of the connection of this device, which lives. `connection` is its number, as the mount table has
    /// shown it to the broker since the device was mounted.
    fn control(&self, connection: Connection, device: BorrowedFd<'_>) -> Result<Control, KernelError>;
    /// Unanswered requests.
    fn waiting(&self, control: &Control) -> Result<u64, KernelError>;
    /// Has the connection of this device ended?
    fn has_ended(&self, device: BorrowedFd<'_>) -> bool;
    /// The same of many devices, in their order, with one call.
    fn have_ended(&self, devices: &[BorrowedFd<'_>]) -> Vec<bool>;
    /// Does a request wait there that no process has read? Of many devices, in their order, with one call.
    fn have_requests(&self, devices: &[BorrowedFd<'_>]) -> Vec<bool>;
    /// Is there something of it left? The last mount or open file, in whatever namespace, takes the superblock along.
    fn remains(&self, connection: Connection) -> bool;
    /// Of each volume and number: does any mount namespace have such a mount? A container's, or a part of it for a
    /// subPath. All namespaces are looked at once, however many are asked for.
    fn mounted_anywhere(&self, of: &[(Connection, &str)]) -> Result<Vec<bool>, KernelError>;
    /// Ends the connection: every waiting and later request fails with ENOTCONN or ECONNABORTED. One that has ended
    /// already is a success.
    fn abort(&self, control: &Control) -> Result<(), KernelError>;
    /// The same of the topmost mount at `target`, if that is this connection's, for want of anything that is held of
    /// it.
    fn abort_at(&self, target: &Target, connection: Connection) -> Result<(), KernelError>;

    /// A setting of `fs.fuse`, as text.
    fn fuse_sysctl(&self, name: &str) -> io::Result<String>;

    /// Is this thread being killed? A thread that cannot be looked at is not.
    fn dying(&self, tid: u32) -> bool;

    /// Lets a disposable process look at the mount.
    fn probe(
        &self,
        target: &Target,
        what: probe::What,
        limit: Duration,
    ) -> Result<probe::Outcome, KernelError>;
}

#[derive(Debug, thiserror::Error)]
pub enum KernelError {
    #[error("cannot {what} {subject}: {source}")]
    Call { what: &'static str, subject: String, source: io::Error },
    #[error("the kernel sent no INIT within {0:?}")]
    NoInit(Duration),
    #[error("the kernel's first message is not an INIT request ({0} bytes)")]
    BadInit(usize),
    #[error("not a cache file: {0}")]
    NotACacheFile(&'static str),
    #[error(
        "{} has no entry for connection {minor}: mount the fusectl file system there on the host (mount -t fusectl fusectl /sys/fs/fuse/connections)",
        dir.display()
    )]
    NoFusectl { dir: PathBuf, minor: u32 },
    #[error("the connection has ended")]
    Ended,
    #[error("the mount is another connection's than the device")]
    OtherConnection,
    #[error("{} is covered by a mount that is not ours ({kind} {source_text:?}): unmount it first", target.display())]
    Foreign { target: PathBuf, kind: String, source_text: String },
    #[error("the mount at {} disappeared while it was being set up", .0.display())]
    Vanished(PathBuf),
    #[error("{} did not answer the probe within {limit:?}", target.display())]
    ProbeTimedOut { target: PathBuf, limit: Duration },
    #[error("the probe of {} failed: {reason}", target.display())]
    ProbeFailed { target: PathBuf, reason: String },
    #[error(transparent)]
    Target(#[from] TargetError),
}

impl KernelError {
    pub(crate) fn call(what: &'static str, subject: impl Into<String>, source: impl Into<io::Error>) -> Self {
        Self::Call { what, subject: subject.into(), source: source.into() }
    }
}
