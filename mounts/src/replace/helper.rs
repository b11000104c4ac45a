//! The helper process: works in one mount namespace besides its own, which comes as its standard input.
//!
//! It works by descriptors. A path is looked up once, without following links, and what is found counts only if the
//! kernel says that it is the mount of the table: a container may change its paths at any moment.

use super::{Replaced, Replacement};
use crate::connection::is_death;
use crate::place::{Descriptors, shown, swap};
use crate::{Connection, MountEntry, parse_mountinfo};
use rustix::fs::{CWD, Mode, OFlags, ResolveFlags};
use rustix::mount::OpenTreeFlags;
use rustix::thread::{LinkNameSpaceType, UnshareFlags};
use std::ffi::OsString;
use std::fmt::Display;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

const TARGET: &str = "MILLPOND_REPLACE_TARGET";
const NEW: &str = "MILLPOND_REPLACE_NEW";
const DEAD: &str = "MILLPOND_REPLACE_DEAD";
const VOLUME: &str = "MILLPOND_REPLACE_VOLUME";

const REPLACED: &str = "replaced";
const LEFT: &str = "left ";
const DONE: &str = "done";

pub(super) fn role(replacement: &Replacement) -> [(&'static str, OsString); 4] {
    let number = |c: &Connection| format!("{}:{}", c.major, c.minor);
    let dead: Vec<String> = replacement.dead.iter().map(number).collect();
    [
        (TARGET, replacement.target.clone().into()),
        (NEW, number(&replacement.new).into()),
        (DEAD, dead.join(",").into()),
        (VOLUME, replacement.volume.clone().into()),
    ]
}

fn asked() -> Option<Replacement> {
    let text = |name| std::env::var(name).ok();
    let number = |text: &str| {
        let (major, minor) = text.split_once(':')?;
        Some(Connection { major: major.parse().ok()?, minor: minor.parse().ok()? })
    };
    Some(Replacement {
        target: std::env::var_os(TARGET)?.into(),
        new: number(&text(NEW)?)?,
        dead: text(DEAD)?.split(',').map(number).collect::<Option<_>>()?,
        volume: text(VOLUME)?,
    })
}

/// In a helper this does the work and never returns.
pub(crate) fn run_if_asked() {
    let Some(replacement) = asked() else { return };
    let lines = match replace(&replacement) {
        Ok(lines) => lines,
        Err(why) => vec![format!("{LEFT}{why}")],
    };
    let mut out = io::stdout().lock();
    // A broker that has gone leaves the rest to the next one.
    for line in lines.iter().map(String::as_str).chain([DONE]) {
        let _ = writeln!(out, "\n{line}");
    }
    std::process::exit(0);
}

/// What a helper said.
pub(super) fn understand(said: &str) -> io::Result<Replaced> {
    if !said.lines().any(|line| line == DONE) {
        return Err(io::Error::other("the helper process ended without an answer"));
    }
    Ok(Replaced {
        mounts: said.lines().filter(|line| *line == REPLACED).count(),
        left: said.lines().filter_map(|line| line.strip_prefix(LEFT)).map(str::to_owned).collect(),
    })
}

/// A namespace to work in and the one that the living mount is in.
struct Both<'n> {
    there: BorrowedFd<'n>,
    here: File,
    /// `/proc/thread-self` of our own namespace, which stays reachable from the other.
    proc: OwnedFd,
}

impl Both<'_> {
    /// The working directory becomes that of our descriptors: `unmount` and remounts take nothing but paths.
    fn enter(&self, namespace: BorrowedFd<'_>) -> rustix::io::Result<()> {
        rustix::thread::move_into_link_name_space(namespace, Some(LinkNameSpaceType::Mount))?;
        let descriptors = rustix::fs::openat(&self.proc, "fd", PATH_ONLY | OFlags::DIRECTORY, Mode::empty())?;
        rustix::process::fchdir(&descriptors)
    }

    fn table(&self) -> io::Result<Vec<MountEntry>> {
        let file =
            rustix::fs::openat(&self.proc, "mountinfo", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
        let mut text = Vec::new();
        File::from(file).read_to_end(&mut text)?;
        Ok(parse_mountinfo(&text))
    }
}

const PATH_ONLY: OFlags = OFlags::PATH.union(OFlags::CLOEXEC).union(OFlags::NOFOLLOW);
const NO_LINKS: ResolveFlags = ResolveFlags::NO_SYMLINKS.union(ResolveFlags::NO_MAGICLINKS);
/// The working directory.
const DESCRIPTORS: Descriptors = Descriptors("");

fn replace(replacement: &Replacement) -> Result<Vec<String>, String> {
    let own = |what: &str, e: &dyn Display| format!("{what}: {e}");
    // Needed: the kernel lets no thread into another mount namespace that shares root and working directory with
    // another thread. SAFETY: this thread gets its own; nothing else changes for it or for others.
    unsafe { rustix::thread::unshare_unsafe(UnshareFlags::FS) }.map_err(|e| own("unshare", &e))?;
    let here = OFlags::PATH | OFlags::CLOEXEC | OFlags::DIRECTORY;
    let proc = rustix::fs::open("/proc/thread-self", here, Mode::empty())
        .map_err(|e| own("/proc/thread-self", &e))?;
    let stdin = io::stdin();
    let here = File::open("/proc/thread-self/ns/mnt").map_err(|e| own("our own namespace", &e))?;
    let both = Both { there: stdin.as_fd(), here, proc };
    let living = open(CWD, &replacement.target, NO_LINKS).map_err(|e| own("the new mount", &e))?;
    if shown(&living).map_err(|e| own("the new mount", &e))?.device != replacement.new {
        return Err("the new mount is gone".into());
    }
    both.enter(both.there).map_err(|e| own("entering", &e))?;
    let table = both.table().map_err(|e| own("the mount table", &e))?;
    let dead: Vec<&MountEntry> = table.iter().filter(|entry| replacement.concerns(entry)).collect();
    // A mount can be cloned only from within its namespace.
    both.enter(both.here.as_fd()).map_err(|e| own("returning", &e))?;
    let clones: Vec<_> = dead.iter().map(|entry| clone(living.as_fd(), &entry.root)).collect();
    both.enter(both.there).map_err(|e| own("entering again", &e))?;

    let mut lines = Vec::new();
    for (entry, clone) in dead.into_iter().zip(clones) {
        let result = clone
            .map_err(|e| format!("{} in the new mount: {e}", entry.root.display()))
            .and_then(|clone| put(&clone, entry, &table));
        match result {
            Ok(true) => lines.push(REPLACED.to_owned()),
            Ok(false) => {}
            Err(why) => lines.push(format!("{LEFT}{}: {why}", entry.mount_point.display())),
        }
    }
    Ok(lines)
}

fn open(at: impl AsFd, path: &Path, resolve: ResolveFlags) -> rustix::io::Result<OwnedFd> {
    rustix::fs::openat2(at, path, PATH_ONLY, Mode::empty(), resolve)
}

/// The same directory or file of the new mount that `root` is of the dead one. May wait for a worker.
fn clone(living: BorrowedFd<'_>, root: &Path) -> rustix::io::Result<OwnedFd> {
    let below = root.strip_prefix("/").unwrap_or(root);
    let below = if below == Path::new("") { Path::new(".") } else { below };
    let part = open(living, below, NO_LINKS | ResolveFlags::BENEATH | ResolveFlags::NO_XDEV)?;
    let flags =
        OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC | OpenTreeFlags::AT_EMPTY_PATH;
    rustix::mount::open_tree(&part, "", flags)
}

/// False: it is not dead.
fn put(clone: &OwnedFd, entry: &MountEntry, table: &[MountEntry]) -> Result<bool, String> {
    let call = |what: &'static str| move |e: rustix::io::Errno| format!("{what}: {e}");
    let old = open(CWD, &entry.mount_point, NO_LINKS).map_err(call("open"))?;
    if shown(&old).map_err(call("look"))?.mount_id != entry.id {
        return Err("something else is mounted over it".into());
    }
    // In the end the kernel says which mount is dead.
    match rustix::fs::fstatfs(&old) {
        Err(e) if is_death(e.raw_os_error()) => {}
        Ok(_) => return Ok(false),
        Err(e) => return Err(format!("statfs: {e}")),
    }
    if table.iter().any(|other| other.parent == entry.id) {
        return Err("other mounts lie on it".into());
    }
    entry
        .attributes
        .forbid_writes(clone.as_fd())
        .map_err(|e| format!("make the new mount read-only: {e}"))?;
    let parent = entry.parent;
    let place = || {
        let place = open(CWD, &entry.mount_point, NO_LINKS)?;
        match shown(&place)?.mount_id == parent {
            true => Ok(place),
            false => Err(rustix::io::Errno::STALE),
        }
    };
    swap(clone.as_fd(), old, DESCRIPTORS, place).map_err(call("put the new mount in its place"))?;
    entry
        .attributes
        .apply(&DESCRIPTORS.path(clone.as_fd()))
        .map_err(call("set the flags of the new mount"))?;
    Ok(true)
}
