//! A kernel for tests: a mount table in memory, devices that are pipes, and failures on demand.

use crate::{
    Attributes, Connection, Control, Detached, FUSE_TYPE, Kernel, KernelError, MountEntry, MountOptions,
    MountSource, Ours, Replaced, Replacement, Target, probe, sample_init, stack_at,
};
use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Everything a test may look at or change.
#[derive(Debug, Default)]
pub struct FakeState {
    pub table: Vec<MountEntry>,
    /// Device numbers of aborted connections.
    pub aborted: BTreeSet<u32>,
    /// And of those whose last holder is gone.
    pub dead: BTreeSet<u32>,
    /// And of those that were unmounted. What a container has elsewhere lives on.
    pub unmounted: BTreeSet<u32>,
    /// And of those that are not read-only.
    pub writable: BTreeSet<u32>,
    /// Devices, by the inode of their pipe, and the connections that they serve.
    devices: BTreeMap<u64, u32>,
    /// What mounts that are nowhere yet are marked with.
    detached: BTreeMap<u32, String>,
    pub init_replies: Vec<Vec<u8>>,
    pub read_ahead_kb: BTreeMap<u32, u32>,
    pub backing_open: BTreeSet<u32>,
    pub dying: BTreeSet<u32>,
    pub sysctl: BTreeMap<&'static str, String>,
    pub waiting: u64,
    /// Connections at which requests wait that no process has read.
    pub requested: BTreeSet<u32>,
    /// Of the last mount.
    pub options: Option<MountOptions>,
    /// Mounts of ours in other mount namespaces, by device number.
    pub elsewhere: Vec<u32>,
    /// Those of them that cannot be replaced.
    pub stuck: BTreeSet<u32>,
    /// What probes find; None: served.
    pub probe: Option<FakeProbe>,
    /// Name of the call that fails next, once.
    pub fail: Option<&'static str>,
    /// Name of the call during which a third party ends this connection.
    pub ends_in: Option<(&'static str, u32)>,
    /// How often all mount namespaces were looked at.
    pub scans: usize,
    last: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FakeProbe {
    Dead,
    TimesOut,
}

#[derive(Debug, Default)]
pub struct Fake {
    state: Mutex<FakeState>,
}

impl Fake {
    pub fn state(&self) -> MutexGuard<'_, FakeState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The INIT request with which each of its connections begins.
    pub fn init() -> Vec<u8> {
        sample_init()
    }

    /// A mount that an earlier broker left.
    pub fn leave_mount(&self, at: &Path, source: &MountSource) -> Connection {
        self.state().push(at, source)
    }

    fn enter(&self, call: &'static str) -> Result<MutexGuard<'_, FakeState>, KernelError> {
        let mut state = self.state();
        if state.fail == Some(call) {
            state.fail = None;
            return Err(KernelError::call(call, "(scripted)", std::io::Error::from_raw_os_error(libc::EIO)));
        }
        if let Some((_, minor)) = state.ends_in.take_if(|(during, _)| *during == call) {
            state.aborted.insert(minor);
        }
        Ok(state)
    }
}

impl FakeState {
    /// Every process that holds a connection is killed at once.
    pub fn kill_all_holders(&mut self) {
        let fuse = self.table.iter().filter(|e| e.fs_type == FUSE_TYPE);
        self.dead.extend(fuse.map(|e| e.minor));
    }

    /// A third party unmounts what is on top at this path; its guard stays.
    pub fn unmount_top(&mut self, at: &Path) {
        let Some(top) = stack_at(&self.table, at).last().map(|e| e.id) else { return };
        let minors = self.table.iter().filter(|e| e.id == top).map(|e| e.minor);
        self.unmounted.extend(minors);
        self.table.retain(|e| e.id != top);
    }

    /// The device number that was given out last.
    pub fn newest(&self) -> u32 {
        self.last
    }

    fn has_ended(&self, minor: u32) -> bool {
        let is_unheld = self.unmounted.contains(&minor) && !self.elsewhere.contains(&minor);
        self.aborted.contains(&minor) || self.dead.contains(&minor) || is_unheld
    }

    fn push(&mut self, at: &Path, source: &MountSource) -> Connection {
        let below = stack_at(&self.table, at).last().map_or(1, |e| e.id);
        let guard = self.add(at, below, "tmpfs", source.guard_text());
        let minor = self.add(at, 1000 + u64::from(guard), FUSE_TYPE, source.fuse_text());
        Connection { major: 0, minor }
    }

    fn add(&mut self, at: &Path, parent: u64, fs_type: &str, source: String) -> u32 {
        let minor = self.next();
        self.put(at, parent, minor, fs_type, source);
        minor
    }

    fn put(&mut self, at: &Path, parent: u64, minor: u32, fs_type: &str, source: String) {
        self.table.push(MountEntry {
            id: 1000 + u64::from(minor),
            parent,
            major: 0,
            minor,
            root: "/".into(),
            mount_point: at.to_owned(),
            fs_type: fs_type.to_owned(),
            source,
            attributes: Attributes::default(),
        });
    }

    fn note_access(&mut self, connection: Connection, options: MountOptions) {
        if options.writable {
            self.writable.insert(connection.minor);
        }
    }

    fn next(&mut self) -> u32 {
        self.last += 1;
        self.last
    }
}

impl Kernel for Fake {
    fn open_device(&self) -> Result<OwnedFd, KernelError> {
        drop(self.enter("open_device")?);
        descriptor()
    }

    fn mount(
        &self,
        target: &Target,
        device: BorrowedFd<'_>,
        source: &MountSource,
        options: MountOptions,
    ) -> Result<Connection, KernelError> {
        let mut state = self.enter("mount")?;
        state.options = Some(options);
        let connection = state.push(target.path(), source);
        state.note_access(connection, options);
        state.devices.insert(inode(device), connection.minor);
        Ok(connection)
    }

    fn mount_detached(
        &self,
        device: BorrowedFd<'_>,
        source: &MountSource,
        options: MountOptions,
    ) -> Result<Detached, KernelError> {
        let mut state = self.enter("mount_detached")?;
        state.options = Some(options);
        let connection = Connection { major: 0, minor: state.next() };
        state.note_access(connection, options);
        state.detached.insert(connection.minor, source.fuse_text());
        state.devices.insert(inode(device), connection.minor);
        Ok(Detached { connection, mount: descriptor()? })
    }

    fn put(&self, mount: &Detached, target: &Target, dead: Connection) -> Result<(), KernelError> {
        let mut state = self.enter("put")?;
        let old = state.table.iter_mut().find(|e| e.mount_point == target.path() && e.connection() == dead);
        let old = old.ok_or_else(|| KernelError::Vanished(target.path().to_owned()))?;
        old.minor = mount.connection.minor;
        Ok(())
    }

    fn put_on_guard(&self, mount: &Detached, target: &Target, volume: &str) -> Result<(), KernelError> {
        let mut state = self.enter("put_on_guard")?;
        let gone = || KernelError::Vanished(target.path().to_owned());
        let top = stack_at(&state.table, target.path()).last().copied().cloned().ok_or_else(gone)?;
        if top.ours() != Some(Ours::Guard { volume: volume.to_owned() }) {
            return Err(gone());
        }
        let minor = mount.connection.minor;
        let source = state.detached.remove(&minor).unwrap_or_default();
        state.put(target.path(), top.id, minor, FUSE_TYPE, source);
        Ok(())
    }

    fn replace(&self, replacement: &Replacement) -> Result<Replaced, KernelError> {
        let mut state = self.enter("replace")?;
        let stuck = state.stuck.clone();
        let mut done = Replaced::default();
        for minor in &mut state.elsewhere {
            if !replacement.dead.iter().any(|dead| dead.minor == *minor) {
                continue;
            }
            if stuck.contains(minor) {
                done.left.push(format!("{minor} is stuck"));
            } else {
                *minor = replacement.new.minor;
                done.mounts += 1;
            }
        }
        Ok(done)
    }

    fn unmount(&self, target: &Target) -> Result<u32, KernelError> {
        let mut state = self.enter("unmount")?;
        let (gone, left): (Vec<_>, Vec<_>) = std::mem::take(&mut state.table)
            .into_iter()
            .partition(|e| e.mount_point == target.path() && e.ours().is_some());
        state.table = left;
        state.unmounted.extend(gone.iter().map(|e| e.minor));
        Ok(gone.len() as u32)
    }

    fn stack(&self, target: &Target) -> Result<Vec<MountEntry>, KernelError> {
        Ok(stack_at(&self.enter("table")?.table, target.path()).into_iter().cloned().collect())
    }

    fn table(&self) -> Result<Vec<MountEntry>, KernelError> {
        Ok(self.enter("table")?.table.clone())
    }

    fn read_init(&self, _device: BorrowedFd<'_>, limit: Duration) -> Result<Vec<u8>, KernelError> {
        match self.enter("read_init") {
            Ok(_) => Ok(sample_init()),
            Err(_) => Err(KernelError::NoInit(limit)),
        }
    }

    fn write_init_reply(&self, _device: BorrowedFd<'_>, reply: &[u8]) -> Result<(), KernelError> {
        self.enter("write_init_reply")?.init_replies.push(reply.to_vec());
        Ok(())
    }

    fn set_read_ahead_kb(&self, connection: Connection, kb: u32) -> Result<(), KernelError> {
        self.enter("set_read_ahead_kb")?.read_ahead_kb.insert(connection.minor, kb);
        Ok(())
    }

    fn backing_open(&self, _device: BorrowedFd<'_>, _file: BorrowedFd<'_>) -> Result<u32, KernelError> {
        let mut state = self.enter("backing_open")?;
        state.last += 1;
        // As of a connection that has opened many: the kernel counts up.
        let id = 1_000_000_000 + state.last;
        state.backing_open.insert(id);
        Ok(id)
    }

    fn backing_close(&self, _device: BorrowedFd<'_>, id: u32) -> Result<(), KernelError> {
        self.enter("backing_close")?.backing_open.remove(&id);
        Ok(())
    }

    fn control(&self, connection: Connection, device: BorrowedFd<'_>) -> Result<Control, KernelError> {
        drop(self.enter("control")?);
        let number = self.state().devices.get(&inode(device)).copied();
        match self.has_ended(device) {
            true => Err(KernelError::Ended),
            false if number.is_some_and(|number| number != connection.minor) => {
                Err(KernelError::OtherConnection)
            }
            false => Ok(Control::pretended(connection)),
        }
    }

    fn waiting(&self, _control: &Control) -> Result<u64, KernelError> {
        Ok(self.enter("waiting")?.waiting)
    }

    fn has_ended(&self, device: BorrowedFd<'_>) -> bool {
        let state = self.state();
        state.devices.get(&inode(device)).is_some_and(|minor| state.has_ended(*minor))
    }

    fn have_ended(&self, devices: &[BorrowedFd<'_>]) -> Vec<bool> {
        devices.iter().map(|device| self.has_ended(*device)).collect()
    }

    fn have_requests(&self, devices: &[BorrowedFd<'_>]) -> Vec<bool> {
        let state = self.state();
        let minor = |device: &BorrowedFd<'_>| state.devices.get(&inode(*device));
        devices.iter().map(|device| minor(device).is_some_and(|it| state.requested.contains(it))).collect()
    }

    fn remains(&self, connection: Connection) -> bool {
        self.state().elsewhere.contains(&connection.minor)
    }

    fn mounted_anywhere(&self, of: &[(Connection, &str)]) -> Result<Vec<bool>, KernelError> {
        let mut state = self.enter("mounted_anywhere")?;
        state.scans += 1;
        let is =
            |minor: u32| state.elsewhere.contains(&minor) || state.table.iter().any(|e| e.minor == minor);
        Ok(of.iter().map(|(connection, _)| is(connection.minor)).collect())
    }

    fn abort(&self, control: &Control) -> Result<(), KernelError> {
        self.enter("abort")?.aborted.insert(control.connection().minor);
        Ok(())
    }

    fn abort_at(&self, target: &Target, connection: Connection) -> Result<(), KernelError> {
        let mut state = self.enter("abort_at")?;
        match stack_at(&state.table, target.path()).last() {
            Some(top) if top.connection() == connection => {
                state.aborted.insert(connection.minor);
                Ok(())
            }
            _ => Err(KernelError::Vanished(target.path().to_owned())),
        }
    }

    fn fuse_sysctl(&self, name: &str) -> std::io::Result<String> {
        let absent = || std::io::Error::from(std::io::ErrorKind::NotFound);
        self.state().sysctl.get(name).cloned().ok_or_else(absent)
    }

    fn dying(&self, tid: u32) -> bool {
        self.state().dying.contains(&tid)
    }

    fn probe(
        &self,
        target: &Target,
        _what: probe::What,
        limit: Duration,
    ) -> Result<probe::Outcome, KernelError> {
        let target = target.path().to_owned();
        let state = self.enter("probe")?;
        let top = stack_at(&state.table, &target).last().map_or(0, |e| e.minor);
        match state.probe {
            None if state.dead.contains(&top) || state.aborted.contains(&top) => Ok(probe::Outcome::Dead),
            None => Ok(probe::Outcome::Primed),
            Some(FakeProbe::Dead) => Ok(probe::Outcome::Dead),
            Some(FakeProbe::TimesOut) => Err(KernelError::ProbeTimedOut { target, limit }),
        }
    }
}

/// The same for every duplicate of a descriptor.
fn inode(device: BorrowedFd<'_>) -> u64 {
    rustix::fs::fstat(device).map_or(0, |stat| stat.st_ino)
}

/// One that no server reads from.
fn descriptor() -> Result<OwnedFd, KernelError> {
    let (read, _write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)
        .map_err(|e| KernelError::call("pipe", "", e))?;
    Ok(read)
}
