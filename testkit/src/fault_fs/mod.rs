//! A pass-through FUSE file system over a directory that fails on request: what a cache must survive underneath.
//!
//! Faults are set while it runs, by [`Mounted::set`] or as JSON lines over a unix socket:
//!
//! ```text
//! {"eio":["read","write","open","fsync","metadata","stat"],"every":3,"budget":67108864,"readonly":true,"hang":1}
//! {"hangs":["read","write","open","fsync","metadata","stat"]}
//! ```
//!
//! Each line replaces all faults (`{}` mends the disk) and is answered by one line: the [`Status`], or `error: …`.

mod fs;
mod nodes;

use anyhow::{Context, Result};
use fuser::{INodeNo, MountOption, Notifier, SessionACL};
use serde::{Deserialize, Serialize};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DiskFaults {
    /// These calls fail with EIO.
    pub eio: Vec<Call>,
    /// Of the calls in `eio` only every n-th fails; None: every one.
    pub every: Option<u64>,
    /// Bytes of file data that the disk holds; None: what the directory's disk holds. Beyond it: ENOSPC.
    pub budget: Option<u64>,
    /// Everything that would change something fails with EROFS.
    pub readonly: bool,
    /// So many reads are not answered before the faults are replaced. Files opened meanwhile are read past the page
    /// cache: a process that waits for such a read cannot be killed.
    pub hang: u64,
    /// These calls are not answered before the faults are replaced or the disk is unmounted: a disk that hangs for ever.
    /// A process that waits in one cannot be killed; but reads of files that were open before go through the page cache.
    pub hangs: Vec<Call>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Call {
    Read,
    /// Also truncation and allocation.
    Write,
    /// Also creation.
    Open,
    Fsync,
    /// mkdir, rename, unlink, rmdir, link, symlink.
    Metadata,
    /// Looking: look-ups of names, attributes, listings, free space.
    Stat,
}

impl Call {
    pub const ALL: [Self; 6] = [Self::Read, Self::Write, Self::Open, Self::Fsync, Self::Metadata, Self::Stat];
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Status {
    /// Bytes of file data on the disk.
    pub used: u64,
    /// Calls that were made to fail since the faults were set.
    pub failed: u64,
    /// Calls that wait for other faults now.
    pub hanging: u64,
}

/// Shared between the file system's threads and the test that sets faults.
#[derive(Clone, Debug, Default)]
struct Control(Arc<Mutex<State>>);

#[derive(Debug, Default)]
struct State {
    faults: DiskFaults,
    candidates: u64,
    /// Reads that hang, or have hung, since the faults were set; and how often those were set.
    hung: u64,
    generation: u64,
    status: Status,
}

impl Control {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Mends the disk, so that no process hangs in it that has to see it unmounted.
    fn release(&self) {
        let mut state = self.lock();
        state.faults = DiskFaults::default();
        state.generation += 1;
    }
}

/// Calls that are served, or hang, at once. More than a cache and the workers of a test have threads for their disk: one
/// that hangs holds up no other unless a fault says so.
const THREADS: usize = 64;

/// A mounted file system; unmounted on drop.
pub struct Mounted {
    control: Control,
    nodes: Arc<nodes::Nodes>,
    notifier: Notifier,
    session: Option<fuser::BackgroundSession>,
    socket: Option<PathBuf>,
}

impl Mounted {
    /// Shows `dir` at `mountpoint`. Needs root.
    pub fn mount(dir: &Path, mountpoint: &Path) -> Result<Self> {
        let nodes = Arc::new(nodes::Nodes::open(dir).with_context(|| format!("open {}", dir.display()))?);
        let control = Control::default();
        control.lock().status.used = bytes_below(dir)?;
        let mut config = fuser::Config::default();
        config.mount_options = vec![MountOption::FSName("fault-fs".into()), MountOption::DefaultPermissions];
        config.acl = SessionACL::All;
        config.n_threads = Some(THREADS);
        let fs = fs::FaultFs::new(nodes.clone(), control.clone());
        let session = fuser::spawn_mount(fs, mountpoint, &config)
            .with_context(|| format!("mount {}", mountpoint.display()))?;
        let notifier = session.notifier();
        Ok(Self { control, nodes, notifier, session: Some(session), socket: None })
    }

    /// Replaces all faults. The kernel's page cache is dropped, so that reads notice too.
    pub fn set(&self, faults: DiskFaults) {
        set(&self.control, &self.nodes, &self.notifier, faults);
    }

    pub fn status(&self) -> Status {
        self.control.lock().status
    }

    /// Takes faults as JSON lines at this socket, on a thread of its own.
    pub fn listen(&mut self, socket: &Path) -> Result<()> {
        let listener =
            UnixListener::bind(socket).with_context(|| format!("listen at {}", socket.display()))?;
        self.socket = Some(socket.to_owned());
        let (control, nodes, notifier) = (self.control.clone(), self.nodes.clone(), self.notifier.clone());
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let _ = converse(stream, &control, &nodes, &notifier);
            }
        });
        Ok(())
    }

    pub fn unmount(mut self) -> Result<()> {
        self.control.release();
        if let Some(session) = self.session.take() {
            session.umount_and_join().context("unmount")?;
        }
        Ok(())
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        self.control.release();
        if let Some(socket) = &self.socket {
            let _ = std::fs::remove_file(socket);
        }
    }
}

fn set(control: &Control, nodes: &nodes::Nodes, notifier: &Notifier, faults: DiskFaults) {
    let drop_pages = || {
        // Not under the lock: the kernel may have to write dirty pages to us first.
        for id in nodes.ids() {
            let _ = notifier.inval_inode(INodeNo(id), 0, 0);
        }
    };
    let hangs = faults.hang > 0 || !faults.hangs.is_empty();
    if hangs {
        // Before it hangs: the kernel would wait for pages that are locked while we do not answer, and the test that
        // sets the faults with it.
        control.release();
        drop_pages();
    }
    {
        let mut state = control.lock();
        state.faults = faults;
        state.candidates = 0;
        state.hung = 0;
        state.generation += 1;
        state.status.failed = 0;
    }
    if !hangs {
        drop_pages();
    }
}

fn converse(
    stream: UnixStream,
    control: &Control,
    nodes: &nodes::Nodes,
    notifier: &Notifier,
) -> std::io::Result<()> {
    let mut answers = stream.try_clone()?;
    for line in BufReader::new(stream).lines() {
        match serde_json::from_str(&line?) {
            Ok(faults) => {
                set(control, nodes, notifier, faults);
                let status = control.lock().status;
                writeln!(answers, "{}", serde_json::to_string(&status)?)?;
            }
            Err(e) => writeln!(answers, "error: {e}")?,
        }
    }
    Ok(())
}

fn bytes_below(dir: &Path) -> std::io::Result<u64> {
    use std::os::unix::fs::MetadataExt;
    let mut bytes = 0;
    for entry in std::fs::read_dir(dir)? {
        let entry = entry?;
        let found = entry.metadata()?;
        if found.is_dir() {
            bytes += bytes_below(&entry.path())?;
        } else if found.is_file() {
            bytes += found.blocks() * 512;
        }
    }
    Ok(bytes)
}
