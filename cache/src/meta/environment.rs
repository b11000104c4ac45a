//! Opening the store's directory for writing: what is found there is kept, or set aside if there is any doubt.
//!
//! ```text
//!  marker            data.mdb       →
//!  –                 –              start empty
//!  –                 there          set aside: its content is unknown
//!  far format        any            set aside; of a neighbouring version: as one of this build's
//!  distrusted        any            set aside: its last owner found damage
//!  clean             there          keep: it was written out when it was closed
//!  open, this boot   there          keep: its owner was killed, the kernel still has every page
//!  open, other boot  there          set aside: nothing was synced, power may have torn it
//!  any of "keep"     nearly full    delete: it never shrinks, and soon could take no name any more
//! ```
//!
//! Commits are not synced (a listing of a million names would take minutes), so the marker carries the boot id.

use super::clock::{ALWAYS_MS, Clock};
use super::record::{self, CLOCK, FORMAT, Known, NameKey};
use super::types::{Attributes, DISK_FULL, Kind, MetaError, Opened, Options, ROOT};
use super::view::{DATABASES, Tables, View, from_heed, is_no_room};
use heed::types::Bytes;
use heed::{EnvFlags, EnvOpenOptions, MdbError};
use rustix::fs::{FallocateFlags, FlockOperation};
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

pub(super) const DATA: &str = "data.mdb";
pub(super) const LOCK: &str = "lock.mdb";
pub(super) const MARKER: &str = "marker";
/// Ten milliseconds apart.
const LOCK_ATTEMPTS: u32 = 20;
const MARKER_BYTES: usize = 128;
pub(super) const SET_ASIDE: &str = "data.mdb.set-aside";
/// Less is not worth a system call.
const RESERVE_MIN: u64 = 256 << 10;
/// A slot of LMDB's reader table, bytes; the header takes two to four of them.
const READER_BYTES: u64 = 64;
/// Maps are whole pages; 64 KiB is the largest page of any machine that we run on.
const LARGEST_PAGE: usize = 64 << 10;

/// The store's directory, held by this process alone.
#[derive(Debug)]
pub(super) struct Home {
    dir: PathBuf,
    /// Carries the flock for as long as this lives.
    handle: File,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    Open,
    Clean,
    Distrusted,
}

/// What stands in a marker.
#[derive(Debug)]
pub(super) struct Marker {
    pub(super) state: State,
    format: String,
    this_boot: bool,
}

impl Marker {
    /// None: it is no marker.
    pub(super) fn read(path: &Path) -> Result<Option<Self>, MetaError> {
        let bytes = fs::read(path).map_err(io("cannot read the marker of the metadata store"))?;
        let text = String::from_utf8_lossy(&bytes[..bytes.len().min(MARKER_BYTES)]).into_owned();
        let words: Vec<&str> = text.split_whitespace().collect();
        let ["millpond-meta", format, state, boot] = words[..] else { return Ok(None) };
        let known = [State::Open, State::Clean, State::Distrusted];
        let Some(state) = known.into_iter().find(|s| s.word() == state) else { return Ok(None) };
        Ok(Some(Self { state, format: format.to_owned(), this_boot: boot == boot_id()? }))
    }

    /// Why the store cannot be gone on with.
    pub(super) fn objection(&self) -> Option<String> {
        let format = &self.format;
        if !format.parse().is_ok_and(record::is_known) {
            return Some(format!(
                "its format is {format}, this build has {FORMAT} and knows one more and one less"
            ));
        }
        match self.state {
            State::Clean => None,
            State::Open if self.this_boot => None,
            State::Open => Some("the machine stopped while it was in use".into()),
            State::Distrusted => Some("damage was found in it".into()),
        }
    }
}

impl State {
    fn word(self) -> &'static str {
        match self {
            Self::Open => "open",
            Self::Clean => "clean",
            Self::Distrusted => "distrusted",
        }
    }
}

impl Home {
    pub(super) fn take(dir: &Path) -> Result<Self, MetaError> {
        fs::create_dir_all(dir).map_err(io("cannot create the directory of the metadata store"))?;
        Self::take_within(dir, LOCK_ATTEMPTS)
    }

    /// Of a store that is there.
    pub(super) fn take_now(dir: &Path) -> Result<Self, MetaError> {
        Self::take_within(dir, 0)
    }

    fn take_within(dir: &Path, mut patience: u32) -> Result<Self, MetaError> {
        let handle = File::open(dir).map_err(io("cannot open the directory of the metadata store"))?;
        loop {
            match rustix::fs::flock(&handle, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => return Ok(Self { dir: dir.to_owned(), handle }),
                // A child that its killed owner had forked, and that has not reached its exec yet, holds it for that
                // long.
                Err(rustix::io::Errno::WOULDBLOCK) if patience > 0 => {
                    patience -= 1;
                    std::thread::sleep(Duration::from_millis(10));
                }
                Err(rustix::io::Errno::WOULDBLOCK) => return Err(MetaError::InUse(dir.to_owned())),
                Err(e) => return Err(io("cannot lock the directory of the metadata store")(e.into())),
            }
        }
    }

    /// Opens what is there, or sets it aside and starts empty.
    pub(super) fn open(&self, options: &Options, clock: &Clock) -> Result<(View, Opened), MetaError> {
        let mut opened = match self.judge()? {
            None if self.dir.join(DATA).exists() => Opened::Kept,
            None => Opened::Fresh,
            Some(why) => self.set_aside(why)?,
        };
        if opened == Opened::Kept
            && options.start_anew
            && let Some(why) = self.nearly_full(options)?
        {
            opened = self.start_anew(why)?;
        }
        // Before the first write: from here on only this boot can vouch for the file.
        self.mark(State::Open)?;
        let view = match self.environment(options, clock) {
            // Every file whose marker was good and whose content is not: start empty, once.
            Err(MetaError::Damaged(why) | MetaError::Format { found: why, .. }) if opened == Opened::Kept => {
                opened = self.set_aside(why)?;
                self.environment(options, clock)?
            }
            other => other?,
        };
        Ok((view, opened))
    }

    /// Why what is there cannot be trusted.
    fn judge(&self) -> Result<Option<String>, MetaError> {
        if !self.dir.join(DATA).exists() {
            return Ok(None);
        }
        match Marker::read(&self.dir.join(MARKER)) {
            Ok(Some(marker)) => Ok(marker.objection()),
            Ok(None) => Ok(Some("its marker cannot be read".into())),
            Err(MetaError::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
                Ok(Some("it has no marker".into()))
            }
            Err(error) => Err(error),
        }
    }

    /// Another process may take the directory.
    pub(super) fn unlock(&self) {
        // Closing is not enough: a child forked a moment ago has a copy of the handle until it executes its program.
        // Failure leaves what closing leaves.
        let _ = rustix::fs::flock(&self.handle, FlockOperation::Unlock);
    }

    /// Rewrites the marker in place, at once: on a full disk that needs no room, and a process that is killed leaves
    /// the old one or the new one. One that says the same already (of an agent that was killed, or is drained) is left,
    /// and one that differs in the format alone is not synced: that takes time, and applications may be waiting.
    pub(super) fn mark(&self, state: State) -> Result<(), MetaError> {
        let about = format!(" {} {}", state.word(), boot_id()?);
        let text = format!("millpond-meta {FORMAT}{about}");
        let path = self.dir.join(MARKER);
        let found = fs::read(&path).unwrap_or_default();
        let found = found.trim_ascii_end();
        if found == text.as_bytes() {
            return Ok(());
        }
        let same_but_format = found.ends_with(about.as_bytes());
        // Always as long as it ever was, so that nothing of an older one shows behind it.
        let text = format!("{text:<width$}\n", width = MARKER_BYTES - 1);
        let write = || {
            let mut file =
                OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(path)?;
            file.write_all(text.as_bytes())?;
            file.set_len(MARKER_BYTES as u64)?;
            if same_but_format {
                return Ok(());
            }
            file.sync_all()?;
            self.handle.sync_all()
        };
        write().map_err(|e| match e {
            e if is_no_room(&e) => MetaError::Full(DISK_FULL),
            e => io("cannot write the marker of the metadata store")(e),
        })
    }

    /// Renames rather than deletes: a person may want to look, and a process that has it mapped keeps its pages. Only
    /// the last one set aside is kept.
    fn set_aside(&self, why: String) -> Result<Opened, MetaError> {
        let fail = io("cannot set the metadata store aside");
        fs::rename(self.dir.join(DATA), self.dir.join(SET_ASIDE)).map_err(fail)?;
        match fs::remove_file(self.dir.join(LOCK)) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(fail(e)),
            _ => {}
        }
        tracing::warn!(dir = %self.dir.display(), why, "metadata store set aside, starting empty");
        Ok(Opened::SetAside { why })
    }

    fn nearly_full(&self, options: &Options) -> Result<Option<String>, MetaError> {
        let file = fs::metadata(self.dir.join(DATA)).map_err(io("cannot look at the metadata store"))?;
        let limit = options.map_bytes as u64;
        let full = file.len() > limit / 10 * 9;
        Ok(full.then(|| format!("it held {} of at most {limit} bytes", file.len())))
    }

    /// Not set aside: there is nothing wrong with it, and it is large.
    fn start_anew(&self, why: String) -> Result<Opened, MetaError> {
        for file in [DATA, LOCK] {
            match fs::remove_file(self.dir.join(file)) {
                Err(e) if e.kind() != io::ErrorKind::NotFound => {
                    return Err(io("cannot delete the full metadata store")(e));
                }
                _ => {}
            }
        }
        tracing::warn!(dir = %self.dir.display(), why, "metadata store was nearly full: deleted, starting empty");
        Ok(Opened::StartedAnew { why })
    }

    /// Takes blocks of the disk behind the `used` bytes of the store, without making it longer, and returns up to
    /// where. A quarter of what is free at most: the reserve is no reason for a full disk.
    pub(super) fn reserve(&self, used: u64, bytes: u64) -> u64 {
        let free = rustix::fs::statvfs(&self.dir).map_or(0, |s| s.f_bavail.saturating_mul(s.f_frsize));
        let bytes = bytes.min(free / 4);
        let taken = bytes >= RESERVE_MIN
            && File::options().write(true).open(self.dir.join(DATA)).is_ok_and(|file| {
                rustix::fs::fallocate(&file, FallocateFlags::KEEP_SIZE, used, bytes).is_ok()
            });
        if taken { used + bytes } else { 0 }
    }

    /// What is only of use while the store is open goes back to the disk: the reserve behind the data, and the table of
    /// readers, of whom there are none. Failure leaves it there, for the next owner.
    pub(super) fn give_back(&self) {
        let trim = || -> io::Result<()> {
            let data = File::options().write(true).open(self.dir.join(DATA))?;
            // Frees what lies behind the end, where it is.
            data.set_len(data.metadata()?.len())?;
            fs::remove_file(self.dir.join(LOCK))
        };
        if let Err(error) = trim()
            && error.kind() != io::ErrorKind::NotFound
        {
            tracing::debug!(dir = %self.dir.display(), %error, "the reserve of a metadata store stays");
        }
    }

    fn environment(&self, options: &Options, clock: &Clock) -> Result<View, MetaError> {
        let dir = &self.dir;
        self.reserve_lock_file(options)?;
        let mut lmdb = EnvOpenOptions::new().read_txn_without_tls();
        lmdb.max_dbs(DATABASES)
            .max_readers(options.readers_max)
            .map_size(options.map_bytes.next_multiple_of(LARGEST_PAGE));
        // Never WRITE_MAP: a full disk would be SIGBUS instead of an error. Never NO_MEM_INIT: what the heap held
        // before would go to the disk.
        // SAFETY: without syncs a power cut may tear the file; the marker carries the boot id, and a file that another
        // boot left open is set aside. A killed process tears nothing: the kernel has what it wrote, in order.
        unsafe { lmdb.flags(EnvFlags::NO_SYNC | EnvFlags::NO_META_SYNC) };
        // SAFETY: as in `View::open`; the flock makes this process the only writer.
        let env = unsafe { lmdb.open(dir) }.map_err(|e| opening(e, dir))?;
        env.clear_stale_readers().map_err(|e| from_heed(e, dir))?;
        let mut txn = env.write_txn().map_err(|e| from_heed(e, dir))?;
        let mut table =
            |name| env.create_database::<Bytes, Bytes>(&mut txn, Some(name)).map_err(|e| from_heed(e, dir));
        let tables = Tables {
            names: table("names")?,
            inodes: table("inodes")?,
            directories: table("directories")?,
            about: table("about")?,
        };
        let recorded = tables.about.get(&txn, CLOCK).map_err(|e| from_heed(e, dir))?;
        let base = clock.base(recorded);
        if recorded != Some(&base.encode()) {
            tables.about.put(&mut txn, CLOCK, &base.encode()).map_err(|e| from_heed(e, dir))?;
        }
        match tables.about.get(&txn, b"format").map_err(|e| from_heed(e, dir))? {
            None => {
                tables
                    .about
                    .put(&mut txn, b"format", &FORMAT.to_le_bytes())
                    .map_err(|e| from_heed(e, dir))?;
                let (key, value) = root_record(clock.now_ms(base.ms))?;
                tables.names.put(&mut txn, key.as_bytes(), &value).map_err(|e| from_heed(e, dir))?;
                tables
                    .inodes
                    .put(&mut txn, &ROOT.to_be_bytes(), key.as_bytes())
                    .map_err(|e| from_heed(e, dir))?;
            }
            Some(bytes) if bytes == FORMAT.to_le_bytes() => {}
            // Of a neighbour. The build that writes into it next need not know that one.
            Some(bytes) if record::stored(bytes).is_some_and(record::is_known) => {
                tables.about.put(&mut txn, b"format", &FORMAT.to_le_bytes()).map_err(|e| from_heed(e, dir))?
            }
            Some(other) => {
                return Err(MetaError::Format { found: format!("{other:?}"), expected: FORMAT });
            }
        }
        txn.commit().map_err(|e| from_heed(e, dir))?;
        Ok(View { env, tables, base_ms: base.ms, limit: None })
    }

    /// LMDB makes `lock.mdb` sparse and this process writes it through a map: on a full disk that is SIGBUS. So its
    /// blocks are taken now, and a full disk is an error here.
    fn reserve_lock_file(&self, options: &Options) -> Result<(), MetaError> {
        let fail = io("cannot create the lock file of the metadata store");
        let bytes = (u64::from(options.readers_max) + 4) * READER_BYTES;
        let bytes = bytes.next_multiple_of(LARGEST_PAGE as u64);
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(self.dir.join(LOCK))
            .map_err(fail)?;
        match rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, bytes) {
            Ok(()) => Ok(()),
            Err(rustix::io::Errno::NOSPC | rustix::io::Errno::DQUOT) => Err(MetaError::Full(DISK_FULL)),
            // A file system without fallocate: as good as LMDB alone.
            Err(rustix::io::Errno::OPNOTSUPP) => Ok(()),
            Err(e) => Err(fail(e.into())),
        }
    }
}

impl Drop for Home {
    fn drop(&mut self) {
        self.unlock();
    }
}

/// The root is a name like any other, so that its attributes need no special case: parent 0, no name.
fn root_record(now_ms: u64) -> Result<(NameKey, Vec<u8>), MetaError> {
    let key = NameKey::new(0, b"").ok_or(MetaError::BadName)?;
    let known = Known {
        attributes: Some(Attributes {
            ino: ROOT,
            kind: Kind::Directory,
            size: 0,
            mtime_ns: i64::try_from(now_ms).unwrap_or(0).saturating_mul(1_000_000),
            version: 1,
            epoch: 0,
            since_epoch: 0,
            token: String::new(),
            cached: None,
            target: Vec::new(),
            permissions: None,
        }),
        absent: false,
        first: 0,
        last: u32::MAX,
        seen_ms: ALWAYS_MS,
    };
    let mut value = Vec::new();
    known.encode(&mut value)?;
    Ok((key, value))
}

/// What LMDB says of a file that is not its own, or was cut short.
fn opening(e: heed::Error, dir: &Path) -> MetaError {
    match e {
        heed::Error::Mdb(e @ (MdbError::Invalid | MdbError::VersionMismatch | MdbError::Incompatible)) => {
            MetaError::Damaged(e.to_string())
        }
        // It reads its two first pages: a shorter file is ENOENT to it.
        heed::Error::Io(e) if e.kind() == io::ErrorKind::NotFound => MetaError::Damaged("cut short".into()),
        other => from_heed(other, dir),
    }
}

fn io(what: &'static str) -> impl Fn(io::Error) -> MetaError + Copy {
    move |source| MetaError::Io { what, source }
}

/// This run of the kernel, as it names itself.
pub fn boot_id() -> Result<String, MetaError> {
    fs::read_to_string("/proc/sys/kernel/random/boot_id")
        .map(|s| s.trim().to_owned())
        .map_err(io("cannot read this machine's boot id"))
}
