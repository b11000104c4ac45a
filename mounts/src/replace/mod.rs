//! Puts a living mount in the place of dead ones of the same volume, in every mount namespace that has them.
//!
//! A container has a mount namespace of its own, and what is mounted outside it later does not reach it. So each one
//! is entered: by a helper process (one that changes its mount namespace has another root for all it does), one for
//! each, so that one in which a path hangs holds up no other.
//!
//! ```text
//!  namespaces: any with a dead mount? ──► helper: enter, look ─► leave, clone the living mount ─► enter, put in place
//!    (/proc/*/ns/mnt, mountinfo)                                   (the same directory of it)       (same attributes)
//! ```

mod helper;
mod namespaces;

pub(crate) use helper::run_if_asked;

use crate::helper::{Heard, Helper};
use crate::{Connection, KernelError, MountEntry, Ours};
use std::cell::RefCell;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::{Duration, Instant};

/// How long a helper may take for one namespace.
const HELPER_LIMIT: Duration = Duration::from_secs(10);

/// What shall be replaced by what.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Replacement {
    /// Where the living mount is, in our own mount namespace.
    pub target: PathBuf,
    pub new: Connection,
    /// Device numbers are used again: only mounts of this volume that are found dead are touched.
    pub dead: Vec<Connection>,
    pub volume: String,
}

/// What came of it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Replaced {
    pub mounts: usize,
    /// Dead mounts that stay, and why.
    pub left: Vec<String>,
}

impl Replacement {
    fn concerns(&self, entry: &MountEntry) -> bool {
        self.dead.contains(&entry.connection())
            && entry.connection() != self.new
            && matches!(entry.ours(), Some(Ours::Fuse(source)) if source.volume == self.volume)
    }
}

pub(crate) fn everywhere(helper: &Helper, replacement: &Replacement) -> Result<Replaced, KernelError> {
    let mut all = Replaced::default();
    for namespace in namespaces::with(|entry| replacement.concerns(entry))? {
        let name = format!("mount namespace {} (process {})", namespace.id, namespace.pid);
        match in_one(helper, namespace, replacement) {
            Ok(replaced) => {
                all.mounts += replaced.mounts;
                all.left.extend(replaced.left.into_iter().map(|why| format!("{name}: {why}")));
            }
            Err(error) => all.left.push(format!("{name}: {error}")),
        }
    }
    Ok(all)
}

/// Does any mount namespace have a mount of each volume by that number?
pub(crate) fn are_anywhere(of: &[(Connection, &str)]) -> Result<Vec<bool>, KernelError> {
    let found = RefCell::new(vec![false; of.len()]);
    namespaces::with(|entry| {
        if let Some(Ours::Fuse(source)) = entry.ours() {
            let is_it = |(connection, volume): &(Connection, &str)| {
                entry.connection() == *connection && source.volume == *volume
            };
            found.borrow_mut().iter_mut().zip(of).for_each(|(found, wanted)| *found |= is_it(wanted));
        }
        false // all of them are looked at, and none of them kept
    })?;
    Ok(found.into_inner())
}

fn in_one(
    helper: &Helper,
    namespace: namespaces::Namespace,
    replacement: &Replacement,
) -> std::io::Result<Replaced> {
    let mut child = helper.start(helper::role(replacement), Stdio::from(namespace.handle))?;
    let deadline = Instant::now() + HELPER_LIMIT;
    loop {
        match child.listen(deadline)? {
            Heard::Something => {}
            Heard::End => break,
            Heard::Nothing => {
                return Err(std::io::Error::other(format!("no answer within {HELPER_LIMIT:?}")));
            }
        }
    }
    helper::understand(&child.said())
}
