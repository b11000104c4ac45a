//! A staged file as people are shown it.

use super::names::{FILES, data_name};
use super::record::Record;
use std::time::SystemTime;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StagedState {
    Waiting,
    /// Somebody else has changed it in the store.
    Conflict,
    /// It was removed here, and the store has it still.
    Unlinked,
}

/// A file of which something waits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct StagedFile {
    /// Below the volume's source. Of one that was removed, the name that the store still has.
    pub(crate) path: Vec<u8>,
    pub(crate) ino: u64,
    /// Bytes.
    pub(crate) size: u64,
    pub(crate) state: StagedState,
    /// Its bytes are here. Otherwise the store has them.
    pub(crate) is_here: bool,
    /// So many of them are not, but in the object that is in the store under the name that it has there.
    pub(crate) missing: u64,
    pub(crate) since: SystemTime,
    /// How often programs have it open.
    pub(crate) opens: u32,
}

impl StagedFile {
    /// None: nothing of it waits.
    pub(super) fn of(
        ino: u64,
        record: &Record,
        (size, missing): (u64, u64),
        since: SystemTime,
        opens: u32,
    ) -> Option<Self> {
        if !record.waits() {
            return None;
        }
        let state = match &record.path {
            None => StagedState::Unlinked,
            Some(_) if record.conflict => StagedState::Conflict,
            Some(_) => StagedState::Waiting,
        };
        let former = record.former.first().map(|former| &former.path);
        let path = record.path.as_ref().or(former)?.clone();
        Some(Self { path, ino, size, state, is_here: record.local, missing, since, opens })
    }

    /// Where its bytes lie, below the area's directory.
    pub(crate) fn data(&self) -> Option<String> {
        self.is_here.then(|| format!("{FILES}/{}", data_name(self.ino)))
    }

    /// Is it one of these files, or in one of these directories? Of none it always is.
    pub(crate) fn is_of(&self, paths: &[Vec<u8>]) -> bool {
        paths.is_empty() || paths.iter().any(|path| lies_at_or_below(&self.path, path))
    }
}

pub(crate) fn lies_at_or_below(path: &[u8], top: &[u8]) -> bool {
    let rest = path.strip_prefix(top);
    rest.is_some_and(|rest| top.is_empty() || rest.is_empty() || rest.starts_with(b"/"))
}

pub(super) fn in_order(mut files: Vec<StagedFile>) -> Vec<StagedFile> {
    files.sort_by(|one, other| (&one.path, one.ino).cmp(&(&other.path, other.ino)));
    files
}
