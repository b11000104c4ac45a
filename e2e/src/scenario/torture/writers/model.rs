//! What a directory must look like, kept in memory.

use std::collections::{BTreeMap, BTreeSet};

/// A file, which may have lost its name while it is open.
pub(super) type Id = u64;

#[derive(Clone, Debug, Default)]
pub(super) struct Content {
    pub(super) bytes: Vec<u8>,
    pub(super) mode: u32,
}

#[derive(Debug, Default)]
pub(super) struct Model {
    pub(super) files: BTreeMap<Id, Content>,
    /// Of files, below the writer's directory.
    pub(super) names: BTreeMap<String, Id>,
    /// "" is the writer's own.
    pub(super) dirs: BTreeSet<String>,
    next: Id,
}

impl Model {
    pub(super) fn add(&mut self, name: &str, mode: u32) -> Id {
        self.next += 1;
        self.files.insert(self.next, Content { bytes: Vec::new(), mode });
        self.names.insert(name.to_owned(), self.next);
        self.next
    }

    /// Names in this directory, of files and directories.
    pub(super) fn in_dir(&self, dir: &str) -> BTreeSet<String> {
        let all = self.names.keys().chain(self.dirs.iter().filter(|dir| !dir.is_empty()));
        let of = all.filter_map(|path| {
            let (parent, name) = path.rsplit_once('/').unwrap_or(("", path));
            (parent == dir).then(|| name.to_owned())
        });
        of.collect()
    }
}

impl Content {
    pub(super) fn write(&mut self, offset: usize, bytes: &[u8]) {
        let end = offset + bytes.len();
        if self.bytes.len() < end {
            self.bytes.resize(end, 0);
        }
        self.bytes[offset..end].copy_from_slice(bytes);
    }
}

/// None: they are the same.
pub(super) fn difference(found: &[u8], expected: &[u8]) -> Option<String> {
    if found == expected {
        return None;
    }
    let at = found.iter().zip(expected).position(|(a, b)| a != b);
    let at = at.unwrap_or_else(|| found.len().min(expected.len()));
    let some = |bytes: &[u8]| format!("{:02x?}", &bytes[at.min(bytes.len())..(at + 8).min(bytes.len())]);
    Some(format!(
        "{} bytes instead of {}, other from {at} on: {} instead of {}",
        found.len(),
        expected.len(),
        some(found),
        some(expected)
    ))
}
