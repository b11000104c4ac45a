//! One cache directory: its files, its threads, and whether its disk can be trusted to write.
//!
//! ```text
//!            write failed                     probe written
//!  writable ──────────────► degraded ────────────────────────► writable
//!                            ▲    │ probe failed: wait twice as long (1 s … 60 s)
//!                            └────┘
//!        a call takes longer than the limit           that call came back, and a probe too
//!  any ────────────────────────────────────► hanging ─────────────────────────────────────► writable or degraded
//! ```
//!
//! While a disk hangs nothing is asked of it: what it has is fetched from the source, past it. One that has failed of late
//! ([`Suspicion`]) is written and read, but no reader is sent to it that we do not see.

use super::journal::Journal;
use super::layout;
use super::pool::{Pool, call_returned, lock_of_ours};
use super::suspicion::Suspicion;
use super::{FileKey, Observer, Tier};
use rustix::fs::{AtFlags, Mode, OFlags};
use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::watch;
use volume::ScopeId;

pub(crate) const PROBE: &str = "probe";
const PROBE_BYTES: usize = 4096;
const PROBE_PAUSE: Duration = Duration::from_secs(1);
const PROBE_PAUSE_MAX: Duration = Duration::from_secs(60);
/// A disk that has not hung for this long is asked again as soon as it answers.
const HANG_FORGOTTEN: Duration = Duration::from_secs(600);
/// Each costs a thread if the disk hangs. Two, so that a checksum or a create does not leave the disk idle.
const THREADS: usize = 2;

pub(crate) struct Root {
    pub number: u8,
    pub tier: usize,
    pub path: PathBuf,
    pub limits: RootLimits,
    pub pool: Pool,
    pub journal: Mutex<Journal>,
    /// Held while files are evicted from this root.
    pub evicting: Mutex<()>,
    /// Empty: the directory could not be opened at start.
    dir: OnceLock<OwnedFd>,
    /// How long one call may take.
    pub timeout: Duration,
    hanging: watch::Sender<bool>,
    /// A probe finds out whether the disk answers again.
    probing: AtomicBool,
    /// Held while the root reports whether its disk works.
    pub announcing: Mutex<()>,
    /// A thread keeps house here.
    pub keeping: AtomicBool,
    /// As last seen.
    space: Mutex<Option<Space>>,
    scopes: Mutex<HashMap<ScopeId, Arc<OwnedFd>>>,
    writable: AtomicBool,
    /// The last write failed because the disk was full.
    full: AtomicBool,
    /// The file system is below its floor.
    pub low_space: AtomicBool,
    /// The largest file that may be placed here, bytes: the file system has its own limit, and does not tell it.
    file_bytes_max: AtomicU64,
    health: Mutex<Health>,
    /// The state that the last event reported.
    announced: AtomicBool,
    observer: Arc<dyn Observer>,
}

/// The share of a tier that falls to one of its paths.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RootLimits {
    pub quota_bytes: u64,
    pub quota_inodes: u64,
    pub high_percent: u8,
    pub low_percent: u8,
    pub min_free_bytes_percent: u8,
    pub min_free_inodes_percent: u8,
}

impl RootLimits {
    pub(crate) fn of(tier: &Tier) -> Self {
        let paths = tier.paths.len().max(1) as u64;
        Self {
            quota_bytes: tier.quota_bytes / paths,
            quota_inodes: tier.quota_inodes / paths,
            high_percent: tier.high_percent,
            low_percent: tier.low_percent,
            min_free_bytes_percent: tier.min_free_bytes_percent,
            min_free_inodes_percent: tier.min_free_inodes_percent,
        }
    }
}

#[derive(Default)]
struct Health {
    pause: Duration,
    probe_at: Option<Instant>,
    checked_at: Option<Instant>,
    hung_at: Option<Instant>,
    hang_pause: Duration,
    suspicion: Suspicion,
}

/// What the file system says: bytes and inodes that an unprivileged process may still take.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Space {
    pub total_bytes: u64,
    pub free_bytes: u64,
    pub total_inodes: u64,
    pub free_inodes: u64,
}

impl Space {
    pub(crate) fn of(dir: impl AsFd) -> Option<Self> {
        let s = rustix::fs::fstatvfs(dir).ok()?;
        call_returned();
        Some(Self {
            total_bytes: s.f_blocks * s.f_frsize,
            free_bytes: s.f_bavail * s.f_frsize,
            total_inodes: s.f_files,
            free_inodes: s.f_favail,
        })
    }
}

impl Root {
    pub(crate) fn new(
        number: u8,
        tier: usize,
        path: PathBuf,
        limits: RootLimits,
        timeout: Duration,
        observer: Arc<dyn Observer>,
    ) -> io::Result<Self> {
        Ok(Self {
            number,
            tier,
            path,
            limits,
            pool: Pool::start(&format!("cache-disk-{number}"), THREADS)?,
            journal: Mutex::default(),
            evicting: Mutex::default(),
            writable: AtomicBool::new(false),
            dir: OnceLock::new(),
            timeout,
            hanging: watch::Sender::new(false),
            probing: AtomicBool::new(false),
            announcing: Mutex::default(),
            keeping: AtomicBool::new(false),
            space: Mutex::default(),
            scopes: Mutex::default(),
            full: AtomicBool::new(false),
            low_space: AtomicBool::new(false),
            file_bytes_max: AtomicU64::new(u64::MAX),
            health: Mutex::default(),
            announced: AtomicBool::new(true),
            observer,
        })
    }

    /// The directory is ours: it may be used.
    pub(crate) fn opened(&self, dir: OwnedFd, space: Option<Space>) {
        self.writable.store(self.dir.set(dir).is_ok(), Ordering::Relaxed);
        *self.space.lock().unwrap_or_else(PoisonError::into_inner) = space;
    }

    pub(crate) fn is_writable(&self) -> bool {
        self.writable.load(Ordering::Relaxed) && !self.hangs()
    }
    /// Nothing is to be asked of this disk now.
    pub(crate) fn hangs(&self) -> bool {
        *self.hanging.borrow()
    }
    /// It answers, and has not failed of late: the kernel may read its files for others.
    pub(crate) fn is_trusted(&self) -> bool {
        let health = self.health.lock().unwrap_or_else(PoisonError::into_inner);
        !self.hangs() && !health.suspicion.holds(Instant::now())
    }
    pub(crate) fn is_full(&self) -> bool {
        self.full.load(Ordering::Relaxed)
    }
    pub(crate) fn file_bytes_max(&self) -> u64 {
        self.file_bytes_max.load(Ordering::Relaxed)
    }
    /// Its file system has refused a file of this size.
    pub(crate) fn has_no_files_of(&self, bytes: u64) {
        self.file_bytes_max.fetch_min(bytes.saturating_sub(1), Ordering::Relaxed);
    }
    pub(crate) fn dir(&self) -> io::Result<BorrowedFd<'_>> {
        self.dir.get().map(|d| d.as_fd()).ok_or_else(|| io::Error::from(io::ErrorKind::NotConnected))
    }

    /// Does something on the disk's own threads. None: it was not done, or the disk hangs and it is unknown whether it
    /// ever will be.
    pub(crate) async fn run<T: Send + 'static>(&self, job: impl FnOnce() -> T + Send + 'static) -> Option<T> {
        let mut hanging = self.hanging.subscribe();
        tokio::select! {
            done = self.pool.run(job) => done,
            _ = hanging.wait_for(|hangs| *hangs) => None,
        }
    }

    pub(crate) fn unlock(&self) {
        if let Some(dir) = self.dir.get() {
            let _ = rustix::fs::flock(dir, rustix::fs::FlockOperation::Unlock);
        }
    }

    /// Opens, and if need be creates, the directory of a scope.
    pub(crate) fn scope_dir(&self, scope: &ScopeId) -> io::Result<Arc<OwnedFd>> {
        let mut scopes = lock_of_ours(&self.scopes);
        if let Some(dir) = scopes.get(scope) {
            return Ok(dir.clone());
        }
        let root = self.dir()?;
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let open = || rustix::fs::openat(root, scope.as_str(), flags, Mode::empty());
        let dir = match open() {
            Err(rustix::io::Errno::NOENT) => {
                make_dir(root, scope.as_str())?;
                open()?
            }
            other => other?,
        };
        call_returned();
        let dir = Arc::new(dir);
        scopes.insert(scope.clone(), dir.clone());
        Ok(dir)
    }

    /// Closes the directories of scopes without a reader; they are opened again when a file of theirs is evicted.
    pub(crate) fn close_scopes(&self, unused: impl Fn(&ScopeId) -> bool) {
        let mut scopes = lock_of_ours(&self.scopes);
        scopes.retain(|scope, _| !unused(scope));
    }

    /// Removes the empty directories of a scope without volumes, unless a volume has `held` it meanwhile: a volume that
    /// holds a scope says so before it asks for its directory, and asks for it under this lock. What the disk does not
    /// let go of is found again at the next start. Blocking.
    pub(crate) fn remove_scope(&self, scope: &ScopeId, held: &AtomicBool) {
        let Ok(root) = self.dir() else { return };
        let mut scopes = lock_of_ours(&self.scopes);
        if held.load(Ordering::SeqCst) || !self.is_writable() {
            return;
        }
        scopes.remove(scope);
        let _ = remove_empty(root, scope.as_str());
        call_returned();
    }

    pub(crate) fn create_data(&self, key: &FileKey, id: u64) -> io::Result<OwnedFd> {
        self.create(&key.scope, &layout::file_name(id), OFlags::RDWR | OFlags::CREATE)
    }

    pub(crate) fn open_data(&self, key: &FileKey, id: u64) -> io::Result<OwnedFd> {
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        Ok(rustix::fs::openat(&*self.scope_dir(&key.scope)?, layout::file_name(id), flags, Mode::empty())?)
    }

    pub(crate) fn read_sidecar(&self, key: &FileKey, id: u64) -> io::Result<Vec<u8>> {
        use std::io::Read;
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let name = format!("{}.idx", layout::file_name(id));
        let fd = rustix::fs::openat(&*self.scope_dir(&key.scope)?, name, flags, Mode::empty())?;
        let mut bytes = Vec::new();
        std::fs::File::from(fd).read_to_end(&mut bytes)?;
        Ok(bytes)
    }

    pub(crate) fn write_sidecar(&self, key: &FileKey, id: u64, bytes: &[u8]) -> io::Result<()> {
        let name = layout::file_name(id);
        let temporary = format!("{name}.tmp");
        let fd = self.create(&key.scope, &temporary, OFlags::WRONLY | OFlags::CREATE | OFlags::TRUNC)?;
        let dir = self.scope_dir(&key.scope)?;
        let result = (|| {
            let mut rest = bytes;
            while !rest.is_empty() {
                rest = &rest[rustix::io::write(&fd, rest)?..];
                call_returned();
            }
            rustix::fs::renameat(&*dir, &temporary, &*dir, format!("{name}.idx"))
        })();
        if result.is_err() {
            let _ = rustix::fs::unlinkat(&*dir, &temporary, AtFlags::empty());
        }
        Ok(result?)
    }

    /// Gone already is as good as removed.
    pub(crate) fn remove(&self, key: &FileKey, id: u64, sidecar: bool) -> io::Result<()> {
        let dir = self.scope_dir(&key.scope)?;
        let name = layout::file_name(id);
        let unlink = |name: &str| match rustix::fs::unlinkat(&*dir, name, AtFlags::empty()) {
            Ok(()) | Err(rustix::io::Errno::NOENT) => Ok(()),
            Err(e) => Err(io::Error::from(e)),
        };
        unlink(&name)?;
        call_returned();
        if sidecar { unlink(&format!("{name}.idx")) } else { Ok(()) }
    }

    fn create(&self, scope: &ScopeId, name: &str, flags: OFlags) -> io::Result<OwnedFd> {
        let dir = self.scope_dir(scope)?;
        let flags = flags | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let open = || rustix::fs::openat(&*dir, name, flags, Mode::RUSR | Mode::WUSR);
        match open() {
            Err(rustix::io::Errno::NOENT) => match make_dir(dir.as_fd(), &name[..2]) {
                // Removed as unused since this root opened it: make it again.
                Err(e) if e.kind() == io::ErrorKind::NotFound => {
                    self.close_scopes(|closed| closed == scope);
                    let dir = self.scope_dir(scope)?;
                    make_dir(dir.as_fd(), &name[..2])?;
                    Ok(rustix::fs::openat(&*dir, name, flags, Mode::RUSR | Mode::WUSR)?)
                }
                made => {
                    made?;
                    Ok(open()?)
                }
            },
            other => Ok(other?),
        }
    }

    /// None when the file system does not say, or counts no inodes (btrfs): then nothing is concluded from it.
    /// Blocking.
    pub(crate) fn look_at_space(&self) -> Option<Space> {
        let found = self.dir.get().and_then(Space::of);
        *self.space.lock().unwrap_or_else(PoisonError::into_inner) = found;
        found
    }

    /// As last seen.
    pub(crate) fn space(&self) -> Option<Space> {
        *self.space.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A read or a write failed: count it, suspect the disk, and if it was a write stop writing here until a probe
    /// succeeds.
    pub(crate) fn failed(&self, operation: &'static str, error: &io::Error, writing: bool) {
        self.observer.disk_error(self.number, operation, error);
        tracing::warn!(root = %self.path.display(), operation, %error, "cache disk error");
        let mut health = self.health.lock().unwrap_or_else(PoisonError::into_inner);
        health.suspicion.failed(error, Instant::now());
        if !writing {
            return;
        }
        if matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded) {
            self.full.store(true, Ordering::Relaxed);
        }
        if self.writable.swap(false, Ordering::Relaxed) {
            health.pause = PROBE_PAUSE;
            health.probe_at = Some(Instant::now() + PROBE_PAUSE);
            self.observer.degraded(self.number, true);
            tracing::warn!(root = %self.path.display(), from = "writable", event = operation, to = "degraded");
        }
    }

    /// Room was made on a full disk: no need to wait.
    pub(crate) fn probe_soon(&self) {
        let mut health = self.health.lock().unwrap_or_else(PoisonError::into_inner);
        if health.probe_at.is_some() {
            health.probe_at = Some(Instant::now());
        }
    }

    /// Writes again if it is time to try and the disk lets us. Blocking.
    pub(crate) fn probe(&self, now: Instant) {
        {
            let health = self.health.lock().unwrap_or_else(PoisonError::into_inner);
            if self.is_writable() || self.hangs() || health.probe_at.is_none_or(|at| now < at) {
                return;
            }
        }
        let result = self.try_write();
        self.probed(result, "degraded", now);
    }

    fn probed(&self, result: io::Result<()>, from: &'static str, now: Instant) {
        let mut health = self.health.lock().unwrap_or_else(PoisonError::into_inner);
        match result {
            Ok(()) => {
                self.full.store(false, Ordering::Relaxed);
                self.writable.store(true, Ordering::Relaxed);
                health.probe_at = None;
                self.observer.degraded(self.number, false);
                tracing::info!(root = %self.path.display(), from, event = "probe", to = "writable");
            }
            Err(error) => {
                self.observer.disk_error(self.number, "probe", &error);
                health.suspicion.failed(&error, now);
                health.pause = (health.pause * 2).clamp(PROBE_PAUSE, PROBE_PAUSE_MAX);
                health.probe_at = Some(now + health.pause);
            }
        }
    }

    /// Is a call under way that has taken longer than the limit? True: since this moment the disk hangs. What waited
    /// for its turn was dropped; what the disk holds on to is the caller's to answer otherwise.
    pub(crate) fn begins_to_hang(&self, now: Instant) -> bool {
        if self.hangs() || self.pool.longest_call().is_none_or(|longest| longest < self.timeout) {
            return false;
        }
        {
            let mut health = self.health.lock().unwrap_or_else(PoisonError::into_inner);
            let again = health.hung_at.is_some_and(|at| now.duration_since(at) < HANG_FORGOTTEN);
            health.hang_pause = if again { health.hang_pause * 2 } else { PROBE_PAUSE };
            health.hang_pause = health.hang_pause.clamp(PROBE_PAUSE, PROBE_PAUSE_MAX);
            health.hung_at = Some(now);
        }
        // Before the waiters wake: they look again.
        self.hanging.send_replace(true);
        if self.writable.swap(false, Ordering::Relaxed) {
            self.observer.degraded(self.number, true);
        }
        self.observer.disk_error(self.number, "hang", &io::ErrorKind::TimedOut.into());
        tracing::error!(
            root = %self.path.display(), limit = ?self.timeout, event = "hang", to = "hanging",
            "a cache disk does not answer: reads go past it until it does. Look at the disk"
        );
        self.pool.suspend();
        true
    }

    /// Has every call come back? Then find out whether the disk works again. Makes no call itself.
    pub(crate) fn try_again(self: &Arc<Self>, now: Instant) {
        if !self.hangs() || self.dir.get().is_none() || self.probing.load(Ordering::Acquire) {
            return;
        }
        {
            let health = self.health.lock().unwrap_or_else(PoisonError::into_inner);
            let soon = health.hung_at.is_some_and(|at| now.duration_since(at) < health.hang_pause);
            if soon || self.pool.longest_call().is_some_and(|longest| longest >= self.timeout) {
                return;
            }
        }
        self.probing.store(true, Ordering::Release);
        let root = self.clone();
        self.pool.submit_probe(move || {
            let result = root.try_write();
            // It has answered, if only with an error: from here on it is a disk like others.
            root.pool.resume();
            root.hanging.send_replace(false);
            root.probed(result, "hanging", Instant::now());
            root.probing.store(false, Ordering::Release);
        });
    }

    fn try_write(&self) -> io::Result<()> {
        let dir = self.dir()?;
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::TRUNC | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let fd = rustix::fs::openat(dir, PROBE, flags, Mode::RUSR | Mode::WUSR)?;
        call_returned();
        if rustix::io::write(&fd, &[0; PROBE_BYTES])? < PROBE_BYTES {
            return Err(io::ErrorKind::StorageFull.into());
        }
        call_returned();
        // A disk that takes bytes and does not give them back is no better: look at the disk, not at memory.
        rustix::fs::fdatasync(&fd)?;
        call_returned();
        read_probe(&fd)
    }

    /// Reads a little from the disk itself. Passed-through files are read by the kernel, so that no process of ours sees
    /// when the disk under them fails. Blocking.
    pub(crate) fn check_reads(&self) {
        {
            let mut health = self.health.lock().unwrap_or_else(PoisonError::into_inner);
            let soon = health.checked_at.is_some_and(|at| at.elapsed() < PROBE_PAUSE);
            if soon || !self.is_writable() {
                return; // a busy keeper comes by often; while degraded `probe` is looking
            }
            health.checked_at = Some(Instant::now());
        }
        let read = || -> io::Result<()> {
            let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
            match rustix::fs::openat(self.dir()?, PROBE, flags, Mode::empty()) {
                Ok(fd) => read_probe(&fd),
                Err(rustix::io::Errno::NOENT) => self.try_write(),
                Err(e) => Err(e.into()),
            }
        };
        if let Err(error) = read() {
            self.failed("check", &error, true);
        }
    }

    /// Whether the disk works, if that has changed since it was last asked here.
    pub(crate) fn news(&self) -> Option<bool> {
        let works = (self.is_writable() || self.is_full()) && self.is_trusted();
        (self.announced.swap(works, Ordering::Relaxed) != works).then_some(works)
    }
}

fn read_probe(fd: &OwnedFd) -> io::Result<()> {
    rustix::fs::fadvise(fd, 0, None, rustix::fs::Advice::DontNeed)?;
    match rustix::io::pread(fd, &mut [0; PROBE_BYTES], 0)? {
        0 => Err(io::ErrorKind::UnexpectedEof.into()),
        _ => Ok(()),
    }
}

/// The directory of a scope, with its shelves, if there is no file in it.
pub(crate) fn remove_empty(root: BorrowedFd<'_>, scope: &str) -> io::Result<()> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let dir = match rustix::fs::openat(root, scope, flags, Mode::empty()) {
        Err(rustix::io::Errno::NOENT) => return Ok(()),
        other => other?,
    };
    for entry in rustix::fs::Dir::read_from(&dir)? {
        let entry = entry?;
        if !matches!(entry.file_name().to_bytes(), b"." | b"..") {
            rustix::fs::unlinkat(&dir, entry.file_name(), AtFlags::REMOVEDIR)?;
            call_returned();
        }
    }
    Ok(rustix::fs::unlinkat(root, scope, AtFlags::REMOVEDIR)?)
}

fn make_dir(dir: BorrowedFd<'_>, name: &str) -> io::Result<()> {
    match rustix::fs::mkdirat(dir, name, Mode::RWXU) {
        Ok(()) | Err(rustix::io::Errno::EXIST) => Ok(()),
        Err(e) => Err(e.into()),
    }
}
