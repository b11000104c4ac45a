//! What the journal keeps of a staged file.

use link::writable::Owner;
use serde::{Deserialize, Serialize};
use store::Version;

/// What the store has of it, under which name.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Object {
    /// Below the volume's source.
    pub(super) path: Vec<u8>,
    pub(super) version: String,
    pub(super) size: u64,
}

impl Object {
    pub(super) fn version(&self) -> Version {
        Version(self.version.clone())
    }
}

/// What the store has, or may have, under a name that the file does not have any more.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Former {
    pub(super) path: Vec<u8>,
    /// None: nothing, unless one of `writes` has come to pass.
    pub(super) version: Option<String>,
    /// The write of this area's that made it, for versions may be of the bytes alone; or a name that was drawn since, where it is
    /// only known that it was there by then.
    pub(super) made_by: Option<String>,
    /// Asked of the store, and not seen how they ended.
    pub(super) writes: Vec<String>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Record {
    /// Below the volume's source; None: it was unlinked.
    pub(super) path: Option<Vec<u8>>,
    /// Its bytes lie in its file here. Otherwise in `base`.
    pub(super) local: bool,
    /// Of its file here all that `base` has (or, without one, what was written first) is on the disk, and no loss of power takes it.
    pub(super) durable: bool,
    /// The object with its bytes, as it was before they were changed here or got another name.
    pub(super) base: Option<Object>,
    /// What is at `path` in the store and is to be replaced; None: nothing.
    pub(super) target: Option<String>,
    /// As [`Former::made_by`].
    pub(super) made_by: Option<String>,
    /// The store has all of it.
    pub(super) clean: bool,
    /// Its bytes are those of `base`, whatever else of it has changed.
    pub(super) same: bool,
    /// Objects that are to go once it is where it belongs: its former names.
    pub(super) former: Vec<Former>,
    /// Of the writes that the store was asked for since it was sent last: each may have come to pass.
    pub(super) writes: Vec<String>,
    /// The store was asked for the last of them, and what came of it is not known.
    pub(super) unsettled: bool,
    /// The store has something else at `path`, which nobody here has seen before.
    pub(super) conflict: bool,
    /// Permissions (07777).
    pub(super) mode: u32,
    pub(super) uid: u32,
    pub(super) gid: u32,
    pub(super) atime_ns: i64,
    pub(super) mtime_ns: i64,
    pub(super) ctime_ns: i64,
}

impl Record {
    /// There is something that the store is to be told: bytes, a name, an owner, a time or that it is gone.
    pub(super) fn waits(&self) -> bool {
        !self.clean && (self.path.is_some() || !self.former.is_empty())
    }

    /// What the store has, or may have, under its present name.
    pub(super) fn object(&self) -> Option<Former> {
        let is_there = self.target.is_some() || !self.writes.is_empty();
        let path = self.path.clone().filter(|_| is_there)?;
        let (version, made_by) = (self.target.clone(), self.made_by.clone());
        Some(Former { path, version, made_by, writes: self.writes.clone() })
    }

    /// It has no name any more.
    pub(super) fn unlinked(mut self) -> Self {
        self.former.extend(self.object());
        (self.path, self.target, self.made_by) = (None, None, None);
        (self.writes, self.unsettled, self.conflict, self.clean) = (Vec::new(), false, false, false);
        self
    }

    /// What another file has left behind goes with what this one has.
    pub(super) fn take_former(&mut self, theirs: Vec<Former>) {
        for other in theirs {
            match self.former.iter_mut().find(|former| former.path == other.path) {
                Some(own) => {
                    if own.version.is_none() {
                        (own.version, own.made_by) = (other.version, other.made_by);
                    }
                    own.writes.extend(other.writes);
                }
                None => self.former.push(other),
            }
        }
    }

    /// It gets this name.
    pub(super) fn moved(&mut self, to: Vec<u8>) {
        self.former.extend(self.object());
        // Back to a name that it had before: what the store still has there is to be replaced.
        let back = self.former.iter().position(|former| former.path == to).map(|at| self.former.remove(at));
        (self.target, self.made_by, self.writes) =
            back.map(|back| (back.version, back.made_by, back.writes)).unwrap_or_default();
        self.unsettled = !self.writes.is_empty();
        (self.path, self.clean, self.conflict) = (Some(to), false, false);
    }

    pub(super) fn owner(&self) -> Owner {
        Owner { mode: self.mode, uid: self.uid, gid: self.gid }
    }
}

/// A place that a request has at the end of a file, given before its bytes were there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Append {
    pub(super) ino: u64,
    pub(super) offset: u64,
    pub(super) end: u64,
    /// The file was cut off after it: nothing is written there again.
    pub(super) is_over: bool,
}

/// A write that was given up and may come to pass all the same.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Late {
    /// Where it writes.
    pub(super) path: Vec<u8>,
    /// Since 1970.
    pub(super) given_up_ns: i64,
    /// The store was told since that nothing is to be at `path`.
    pub(super) is_removed: bool,
}

/// An upload in parts that may be open at the store.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Multipart {
    /// Where its object is to be.
    pub(super) path: Vec<u8>,
    /// The store's name for it.
    pub(super) id: String,
    /// Since 1970.
    pub(super) begun_ns: i64,
}

/// A directory that has another name here. What the store has under this one is to go.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Moved {
    pub(super) to: Vec<u8>,
    pub(super) ino: u64,
}

/// Of the volume's own directory, which is no object.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) struct Root {
    pub(super) mode: u32,
    pub(super) uid: u32,
    pub(super) gid: u32,
    pub(super) time_ns: i64,
}
