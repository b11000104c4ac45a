//! A directory of the node as a source. Nothing below it can lead out of it.
//!
//! Every path is resolved by openat2(2) with RESOLVE_BENEATH, RESOLVE_NO_SYMLINKS and RESOLVE_NO_MAGICLINKS: symbolic
//! links are shown, never followed by us. That holds for the way to the directory itself too, or a user who may write
//! next to it could point it elsewhere.

mod write;

use crate::access::{Access, Question};
use crate::dispatch::{Lane, NoSlot};
use crate::keys::{is_path, show};
use crate::limits::Limits;
use crate::observe::{Observer, Outcome};
use crate::retry::{Fault, Meter};
use crate::shares::Turn;
use crate::sink::Sink;
use crate::traffic::{Place, Slot};
use crate::{ByteStream, Entry, Kind, PAGE_ENTRIES, Page, Source, StoreError, Version};
use async_trait::async_trait;
use bytes::Bytes;
use futures::StreamExt;
use rustix::fs::{AtFlags, FileType, Mode, OFlags, RawDir, ResolveFlags, SeekFrom, Stat};
use rustix::io::Errno;
use std::ffi::OsStr;
use std::mem::MaybeUninit;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::task::{JoinError, JoinHandle};
use tokio::time::Instant;
use volume::Permissions;

#[derive(Clone)]
pub(crate) struct Directory {
    tree: Arc<Tree>,
    access: Arc<Access>,
    place: Arc<Place>,
    observer: Arc<dyn Observer>,
}

/// The part that makes system calls; used on blocking threads only.
struct Tree {
    path: PathBuf,
    /// Opened at first use and kept: a directory that is moved away stays the volume's.
    root: OnceLock<OwnedFd>,
}

impl std::fmt::Debug for Directory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Directory({})", self.tree.path.display())
    }
}

impl Directory {
    pub(crate) fn new(
        path: PathBuf,
        access: Arc<Access>,
        readers: &str,
        limits: &Limits,
        observer: Arc<dyn Observer>,
    ) -> Self {
        let place = Arc::new(limits.place(&format!("file://{}", path.display()), readers, PART));
        let tree = Arc::new(Tree { path, root: OnceLock::new() });
        Self { tree, access, place, observer }
    }

    async fn run<T: Send + 'static>(
        &self,
        op: &'static str,
        question: Question,
        work: impl FnOnce(&Tree) -> Result<T, StoreError> + Send + 'static,
    ) -> Result<T, StoreError> {
        let (meter, work) = self.start(Lane::Metadata, op, &question, work).await?;
        report(meter, ended(&self.tree, question.in_time(work).await))
    }

    /// The same of work that moves bytes: it may take as long as it gets on.
    async fn run_on<T: Send + 'static>(
        &self,
        op: &'static str,
        work: impl FnOnce(&Tree, &Progress) -> Result<T, StoreError> + Send + 'static,
    ) -> Result<T, StoreError> {
        let (question, progress) = (self.access.question(), Arc::new(Progress::default()));
        let seen = progress.clone();
        let started = self.start(Lane::Upload, op, &question, move |tree| work(tree, &seen));
        let (meter, mut work) = started.await?;
        let mut waited = question.in_time(&mut work).await;
        let mut before = 0;
        while waited.is_none() {
            let now = progress.steps();
            if now == before {
                break;
            }
            before = now;
            waited = tokio::time::timeout(question.limit(), &mut work).await.ok();
        }
        report(meter, ended(&self.tree, waited))
    }

    /// As soon as there is a slot for it.
    async fn start<T: Send + 'static>(
        &self,
        lane: Lane,
        op: &'static str,
        question: &Question,
        work: impl FnOnce(&Tree) -> Result<T, StoreError> + Send + 'static,
    ) -> Result<(Meter, Working<T>), StoreError> {
        let slot = enter(&self.tree, &self.place, lane, question).await?;
        let meter = Meter::start(&self.observer, op);
        let tree = self.tree.clone();
        Ok((meter, spawn(slot, move || work(&tree))))
    }
}

/// On a blocking thread.
type Working<T> = JoinHandle<Result<T, StoreError>>;

/// How far work on a blocking thread has come, for whoever waits for it.
#[derive(Default)]
struct Progress(AtomicU64);

impl Progress {
    fn step(&self) {
        self.0.fetch_add(1, Relaxed);
    }

    fn steps(&self) -> u64 {
        self.0.load(Relaxed)
    }
}

/// One directory takes at most a quarter of the slots: a thread that hangs in a network file system cannot be called
/// back, and its slot is as lost as it is.
const PART: usize = 4;

async fn enter(tree: &Tree, place: &Place, lane: Lane, question: &Question) -> Result<Slot, StoreError> {
    let begun = Instant::now();
    let entered = question.enter(place, lane, Turn::First).await;
    let slot = entered.map_err(|why| match why {
        NoSlot::Busy => StoreError::Busy { what: tree.what(b""), waited: begun.elapsed() },
        NoSlot::Away | NoSlot::Spent => tree.unavailable("", HANGS.into()),
    })?;
    slot.cannot_be_displaced();
    Ok(slot)
}

const HANGS: &str = "the file system does not answer (a network file system that hangs?)";

/// The slot goes with the work: a disk that hangs keeps it, so that hanging calls cannot fill the blocking pool.
fn spawn<T: Send + 'static>(
    slot: Slot,
    work: impl FnOnce() -> Result<T, StoreError> + Send + 'static,
) -> Working<T> {
    tokio::task::spawn_blocking(move || {
        let _slot = slot;
        work()
    })
}

async fn blocking<T: Send + 'static>(
    tree: &Tree,
    question: &Question,
    slot: Slot,
    work: impl FnOnce() -> Result<T, StoreError> + Send + 'static,
) -> Result<T, StoreError> {
    ended(tree, question.in_time(spawn(slot, work)).await)
}

/// What came of work on a blocking thread; None: it was not waited for any longer.
fn ended<T>(tree: &Tree, waited: Option<Result<Result<T, StoreError>, JoinError>>) -> Result<T, StoreError> {
    match waited {
        Some(Ok(result)) => result,
        Some(Err(e)) => Err(tree.unavailable("", format!("the reading thread failed: {e}"))),
        None => Err(tree.unavailable("", HANGS.into())),
    }
}

fn report<T>(meter: Meter, result: Result<T, StoreError>) -> Result<T, StoreError> {
    match &result {
        Ok(_) => meter.end(Outcome::Ok),
        Err(e) => meter.end_with(&Fault::Fail(e.clone())),
    }
    result
}

#[async_trait]
impl Source for Directory {
    fn is_queued(&self) -> bool {
        self.place.is_queued(Lane::Metadata)
    }

    fn others_move(&self) -> bool {
        self.place.others_move()
    }

    async fn list(&self, dir: &[u8], token: Option<&str>) -> Result<Page, StoreError> {
        let (dir, token) = (dir.to_vec(), token.map(str::to_owned));
        self.run("list", self.access.question(), move |tree| tree.list(&dir, token.as_deref())).await
    }

    async fn head(&self, path: &[u8]) -> Result<Option<Entry>, StoreError> {
        let path = path.to_vec();
        self.run("head", self.access.question(), move |tree| tree.head(&path)).await
    }

    async fn get(&self, path: &[u8], version: &Version, range: Range<u64>) -> Result<ByteStream, StoreError> {
        let question = self.access.question();
        let (tree, place) = (self.tree.clone(), self.place.clone());
        let (name, wanted) = (path.to_vec(), version.clone());
        let meter = Meter::start(&self.observer, "get");
        let open = async || {
            let slot = enter(&tree, &place, Lane::Data, &question).await?;
            let (at, name, wanted) = (tree.clone(), name.clone(), wanted.clone());
            blocking(&tree, &question, slot, move || at.open_file(&name, &wanted)).await
        };
        let opened = match open().await {
            // Once is enough: from the first look on nothing can change without being seen.
            Ok(opened) if !opened.settles_in.is_zero() => {
                drop(opened.file);
                tokio::time::sleep(opened.settles_in).await;
                open().await
            }
            opened => opened,
        };
        let file = match opened {
            Ok(opened) => Arc::new(opened.file),
            Err(e) => return report(meter, Err(e)),
        };
        let (path, version) = (path.to_vec(), version.clone());
        let reader = Reader { tree, place, file, path, version, question };
        let state = (Some((reader, meter)), range);
        let stream = futures::stream::unfold(state, |(reader, rest)| async move {
            let (reader, mut meter) = reader?;
            if rest.is_empty() {
                meter.end(Outcome::Ok);
                return None;
            }
            match reader.piece(rest.clone()).await {
                Ok(piece) => {
                    meter.bytes += piece.len() as u64;
                    let rest = rest.start + piece.len() as u64..rest.end;
                    Some((Ok(piece), (Some((reader, meter)), rest)))
                }
                Err(e) => Some((report(meter, Err(e)), (None, rest))),
            }
        });
        Ok(stream.boxed())
    }

    fn sink(&self) -> Option<Arc<dyn Sink>> {
        Some(Arc::new(write::DirectorySink(self.clone())))
    }

    async fn check(&self, limit: Duration) -> Result<(), StoreError> {
        self.run("list", self.access.probe(limit), |tree| tree.list(b"", None).map(|_| ())).await
    }
}

/// Of file systems that count seconds (or two of them: FAT).
const COARSE_STEP_NS: i64 = 2_000_000_000;
/// Of all others: the kernel's tick, which is ten milliseconds at most, with room for a file system's own rounding.
const FINE_STEP_NS: i64 = 50_000_000;

struct Opened {
    file: OwnedFd,
    /// It changed so lately that a change from now on might leave the same version: its bytes are not to be trusted
    /// yet.
    settles_in: Duration,
}

/// A file being streamed.
struct Reader {
    tree: Arc<Tree>,
    place: Arc<Place>,
    file: Arc<OwnedFd>,
    path: Vec<u8>,
    version: Version,
    question: Question,
}

/// Large enough that the hop to a blocking thread costs little against the copy.
const PIECE_BYTES: u64 = 1 << 20;

impl Reader {
    async fn piece(&self, rest: Range<u64>) -> Result<Bytes, StoreError> {
        let slot = enter(&self.tree, &self.place, Lane::Data, &self.question).await?;
        let (tree, file, path) = (self.tree.clone(), self.file.clone(), self.path.clone());
        let wanted = self.version.clone();
        let length = (rest.end - rest.start).min(PIECE_BYTES) as usize;
        let work = move || {
            let mut buffer = Vec::with_capacity(length);
            rustix::io::retry_on_intr(|| {
                rustix::io::pread(&*file, rustix::buffer::spare_capacity(&mut buffer), rest.start)
            })
            .map_err(|e| tree.error(&path, e))?;
            // The allocator may have been generous.
            buffer.truncate(length);
            // After the read: bytes of a file that was rewritten meanwhile are of no version.
            let now = rustix::fs::fstat(&*file).map_err(|e| tree.error(&path, e))?;
            if version(&now) != wanted || buffer.is_empty() {
                return Err(StoreError::Stale { what: tree.what(&path) });
            }
            Ok(Bytes::from(buffer))
        };
        blocking(&self.tree, &self.question, slot, work).await
    }
}

const RESOLVE: ResolveFlags =
    ResolveFlags::BENEATH.union(ResolveFlags::NO_SYMLINKS).union(ResolveFlags::NO_MAGICLINKS);

impl Tree {
    fn what(&self, path: &[u8]) -> String {
        let path = self.path.join(OsStr::from_bytes(path));
        format!("file://{}", show(path.as_os_str().as_bytes()))
    }

    fn unavailable(&self, path: impl AsRef<[u8]>, cause: String) -> StoreError {
        let what = self.what(path.as_ref());
        let (waited, queued) = (Duration::ZERO, Duration::ZERO);
        StoreError::Unavailable { what, waited, queued, attempts: 1, cause }
    }

    fn error(&self, path: &[u8], error: Errno) -> StoreError {
        let what = self.what(path);
        match error {
            Errno::NOENT | Errno::NOTDIR | Errno::NAMETOOLONG => StoreError::not_found(&what),
            // A symbolic link on the way, or a way out: to us there is nothing there.
            Errno::LOOP | Errno::XDEV => StoreError::NotFound {
                what,
                advice: ": a symbolic link lies on the way, which Millpond shows but does not follow; name the real path",
            },
            Errno::ACCESS | Errno::PERM => StoreError::Denied {
                what,
                why: "the agent's user may not read it: change its mode or owner".into(),
            },
            Errno::NOSYS => StoreError::Invalid {
                what,
                why: "this kernel or sandbox has no openat2(2), which keeps readers below the directory"
                    .into(),
            },
            other => self.unavailable(path, other.to_string()),
        }
    }

    fn root(&self) -> Result<&OwnedFd, StoreError> {
        if let Some(root) = self.root.get() {
            return Ok(root);
        }
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        // Not BENEATH: this path is absolute.
        let resolve = ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
        let root = rustix::fs::openat2(rustix::fs::CWD, &self.path, flags, Mode::empty(), resolve)
            .map_err(|e| self.error(b"", e))?;
        Ok(self.root.get_or_init(|| root))
    }

    fn open(&self, path: &[u8], flags: OFlags) -> Result<OwnedFd, StoreError> {
        let root = self.root()?;
        let name = if path.is_empty() { OsStr::new(".") } else { OsStr::from_bytes(path) };
        rustix::io::retry_on_intr(|| {
            rustix::fs::openat2(root, name, flags | OFlags::CLOEXEC, Mode::empty(), RESOLVE)
        })
        .map_err(|e| self.error(path, e))
    }

    /// A regular file in the wanted version. NONBLOCK, lest a FIFO put in its place hold us up.
    fn open_file(&self, path: &[u8], wanted: &Version) -> Result<Opened, StoreError> {
        if !is_segments(path) {
            return Err(StoreError::not_found(&self.what(path)));
        }
        let file = self.open(path, OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY)?;
        let found = rustix::fs::fstat(&file).map_err(|e| self.error(path, e))?;
        match FileType::from_raw_mode(found.st_mode) {
            FileType::RegularFile if version(&found) == *wanted => {
                let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
                let settles_in = settles_in(changed_ns(&found), now.as_nanos() as i64);
                Ok(Opened { file, settles_in })
            }
            _ => Err(StoreError::Stale { what: self.what(path) }),
        }
    }

    fn head(&self, path: &[u8]) -> Result<Option<Entry>, StoreError> {
        if !is_segments(path) {
            return Ok(None);
        }
        let name = path.rsplit(|byte| *byte == b'/').next().unwrap_or(path);
        // With PATH and NOFOLLOW a link as the last component is opened itself (openat2(2), RESOLVE_NO_SYMLINKS).
        let file = match self.open(path, OFlags::PATH | OFlags::NOFOLLOW) {
            Err(StoreError::NotFound { .. }) => return Ok(None),
            opened => opened?,
        };
        let found = rustix::fs::fstat(&file).map_err(|e| self.error(path, e))?;
        self.entry(file.as_fd(), OsStr::new(""), name, &found).map_err(|e| self.error(path, e))
    }

    /// `name` in `dir` described; None for sockets, FIFOs and devices. An empty `link` means `dir` itself.
    fn entry(&self, dir: impl AsFd, link: &OsStr, name: &[u8], found: &Stat) -> Result<Option<Entry>, Errno> {
        let kind = match FileType::from_raw_mode(found.st_mode) {
            FileType::RegularFile => {
                Kind::File { size: u64::try_from(found.st_size).unwrap_or(0), version: version(found) }
            }
            FileType::Directory => Kind::Directory,
            FileType::Symlink => {
                Kind::Symlink { target: rustix::fs::readlinkat(dir, link, Vec::new())?.into_bytes() }
            }
            _ => return Ok(None),
        };
        let permissions = match kind {
            Kind::Symlink { .. } => None, // says nothing of who may do what
            _ => Some(Permissions::of(found.st_mode, Some(found.st_uid), Some(found.st_gid))),
        };
        let modified_ns = modified_ns(found);
        Ok(Some(Entry { name: name.to_vec(), kind, modified_ns, permissions }))
    }

    /// The token is the directory cookie of getdents64(2), which stays valid across opens: it is what NFS servers
    /// hand to their clients.
    fn list(&self, path: &[u8], token: Option<&str>) -> Result<Page, StoreError> {
        if !path.is_empty() && !is_segments(path) {
            return Err(StoreError::not_found(&self.what(path)));
        }
        let dir = self.open(path, OFlags::RDONLY | OFlags::DIRECTORY)?;
        let fail = |e| self.error(path, e);
        if let Some(token) = token {
            let cookie =
                token.parse().map_err(|_| StoreError::malformed(&self.what(path), "a foreign page token"))?;
            rustix::fs::seek(&dir, SeekFrom::Start(cookie)).map_err(fail)?;
        }
        let mut page = Page::default();
        let mut buffer = [MaybeUninit::uninit(); 32 << 10];
        let mut names = RawDir::new(&dir, &mut buffer);
        while let Some(found) = names.next() {
            let found = found.map_err(fail)?;
            let name = found.file_name().to_bytes();
            if matches!(name, b"." | b"..") || write::is_temporary(name) {
                continue;
            }
            let entry = rustix::fs::statat(&dir, found.file_name(), AtFlags::SYMLINK_NOFOLLOW)
                .and_then(|stat| self.entry(&dir, OsStr::from_bytes(name), name, &stat));
            match entry {
                Ok(Some(entry)) => page.entries.push(entry),
                Ok(None) => {
                    page.unnameable.push(format!("{} (neither file, directory nor link)", show(name)))
                }
                // Removed, or a link replaced, between the two calls.
                Err(Errno::NOENT | Errno::INVAL) => {}
                Err(e) => return Err(fail(e)),
            }
            if page.entries.len() + page.unnameable.len() == PAGE_ENTRIES {
                page.next = Some(found.next_entry_cookie().to_string());
                break;
            }
        }
        Ok(page)
    }
}

/// Like [`is_path`], but on a file system bytes need not be UTF-8.
fn is_segments(path: &[u8]) -> bool {
    let text: Vec<u8> = path.iter().map(|byte| if byte.is_ascii() { *byte } else { b'x' }).collect();
    is_path(&text)
}

/// The change time is in it because no user can set it: a file whose old modification time was put back has changed.
fn version(found: &Stat) -> Version {
    Version(format!("{}-{}-{}", found.st_size, modified_ns(found), changed_ns(found)))
}

/// How long until a change of a file that last changed then would be seen by its change time. A file system knows time
/// in steps, and two changes within one leave the same. `now_ns` is this machine's clock, `changed_ns` may be a
/// server's: what lies in the future is waited for no longer than one step.
fn settles_in(changed_ns: i64, now_ns: i64) -> Duration {
    let step_ns = if changed_ns % 1_000_000_000 == 0 { COARSE_STEP_NS } else { FINE_STEP_NS };
    let since = now_ns.saturating_sub(changed_ns);
    Duration::from_nanos((step_ns - since.clamp(0, step_ns)) as u64)
}

fn changed_ns(found: &Stat) -> i64 {
    // Both fields are of other widths on other platforms.
    #[allow(clippy::unnecessary_cast)]
    (found.st_ctime as i64).saturating_mul(1_000_000_000).saturating_add(found.st_ctime_nsec as i64)
}

fn modified_ns(found: &Stat) -> i64 {
    // Both fields are of other widths on other platforms.
    #[allow(clippy::unnecessary_cast)]
    (found.st_mtime as i64).saturating_mul(1_000_000_000).saturating_add(found.st_mtime_nsec as i64)
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: i64 = 1_000_000_000;

    #[test]
    fn a_file_is_read_when_another_change_of_it_would_be_seen() {
        let ms = Duration::from_millis;
        let fine = 1_700_000_000 * S + 4_000_000;
        assert_eq!(settles_in(fine, fine + S), ms(0));
        assert_eq!(settles_in(fine, fine + FINE_STEP_NS), ms(0));
        assert_eq!(settles_in(fine, fine + 10_000_000), ms(40));
        assert_eq!(settles_in(fine, fine), ms(50));
        // A server whose clock is ahead, or a clock that was set back: either is possible, and no reader waits for
        // ever.
        assert_eq!(settles_in(fine, fine - 3600 * S), ms(50));
        let coarse = 1_700_000_000 * S;
        assert_eq!(settles_in(coarse, coarse + S / 2), ms(1500));
        assert_eq!(settles_in(coarse, coarse + 2 * S), ms(0));
        assert_eq!(settles_in(i64::MAX, i64::MIN), ms(50));
    }

    /// Whoever waits looks at the steps when he is polled, and the test polls after a step alone: no machine is too slow for that.
    #[test]
    fn what_gets_on_is_waited_for_and_what_hangs_is_not() {
        let mut builder = tokio::runtime::Builder::new_current_thread();
        builder.enable_all().max_blocking_threads(1).build().unwrap().block_on(waits_for_what_gets_on());
    }

    async fn waits_for_what_gets_on() {
        let at = tempfile::tempdir().unwrap();
        let store_timeout = Duration::from_millis(100);
        let spec = volume::VolumeSpec {
            id: volume::VolumeId::parse("v").unwrap(),
            source: volume::SourceUrl::Dir { path: at.path().to_owned() },
            parameters: volume::Parameters { store_timeout, ..volume::Parameters::default() },
        };
        let access = Access::fixed(&spec, volume::Credentials::anonymous());
        let limits = Limits::new(crate::LimitsConfig::default());
        let directory =
            Directory::new(at.path().to_owned(), access, "readers", &limits, Arc::new(crate::NoObserver));
        let (grants, granted) = std::sync::mpsc::channel::<()>();
        let (makes, made) = std::sync::mpsc::channel::<()>();
        let moves = directory.run_on("put", move |_, progress| {
            while granted.recv().is_ok() {
                progress.step();
                let _ = makes.send(());
            }
            Ok(7)
        });
        tokio::pin!(moves);
        for step in 0..5 {
            assert!(futures::poll!(&mut moves).is_pending(), "after step {step}");
            grants.send(()).unwrap();
            made.recv_timeout(Duration::from_secs(60)).unwrap();
            tokio::time::sleep(2 * store_timeout).await;
        }
        drop(grants);
        // The one thread does this after it.
        tokio::task::spawn_blocking(|| ()).await.unwrap();
        assert_eq!(moves.await.unwrap(), 7, "ten times as long as it may take to answer");
        let (goes_on, ends) = std::sync::mpsc::channel::<()>();
        let hangs = directory.run_on("put", move |_, progress| {
            progress.step();
            let _ = ends.recv();
            Ok(7)
        });
        assert!(matches!(hangs.await, Err(StoreError::Unavailable { .. })));
        drop(goes_on);
    }
}
