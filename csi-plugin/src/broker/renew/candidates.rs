//! What the kernel's mount table says of targets.

use mounts::{Connection, MountEntry, MountSource, Ours, stack_at};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// A FUSE mount of ours at a target, which may have no agent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::broker) struct Candidate {
    pub(super) path: PathBuf,
    pub(in crate::broker) connection: Connection,
    pub(super) source: MountSource,
}

/// Of the visible mount at a target.
pub(super) fn is_fuse(top: Option<&MountEntry>) -> bool {
    top.is_some_and(|top| matches!(top.ours(), Some(Ours::Fuse(_))))
}

pub(super) fn is_guard(top: Option<&MountEntry>, volume: &str) -> bool {
    let guard = Some(Ours::Guard { volume: volume.to_owned() });
    top.is_some_and(|top| top.ours() == guard)
}

/// The topmost mounts of ours at targets. A target has a guard; a bind of a part of it, for a subPath, has none.
pub(in crate::broker) fn candidates(table: &[MountEntry], kubelet_dirs: &[PathBuf]) -> Vec<Candidate> {
    let below = |path: &Path| kubelet_dirs.iter().any(|dir| path.starts_with(dir));
    let guards =
        table.iter().filter(|e| matches!(e.ours(), Some(Ours::Guard { .. })) && below(&e.mount_point));
    let paths: BTreeSet<&PathBuf> = guards.map(|e| &e.mount_point).collect();
    let top = |path: &PathBuf| {
        let stack = stack_at(table, path);
        let top = stack.last()?;
        match top.ours()? {
            Ours::Fuse(source) => {
                Some(Candidate { path: path.clone(), connection: top.connection(), source })
            }
            Ours::Guard { .. } => None,
        }
    };
    paths.into_iter().filter_map(top).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use mounts::parse_mountinfo;

    #[test]
    fn only_living_places_of_ours_are_looked_at() {
        let table = parse_mountinfo(
            b"10 1 0:1 / /kubelet/a rw - tmpfs millpond-guard:v ro\n\
              11 10 0:2 / /kubelet/a ro - fuse.millpond millpond:v:d ro\n\
              12 1 0:2 /sub /kubelet/a-subpath ro - fuse.millpond millpond:v:d ro\n\
              13 1 0:3 / /kubelet/vanished rw - tmpfs millpond-guard:w ro\n\
              14 1 0:4 / /elsewhere/a rw - tmpfs millpond-guard:v ro\n\
              15 14 0:5 / /elsewhere/a ro - fuse.millpond millpond:v:d ro\n\
              16 1 0:6 / /kubelet/b rw - tmpfs millpond-guard:x ro\n\
              17 16 0:7 / /kubelet/b ro - fuse.millpond millpond:x:d ro\n\
              18 17 0:8 / /kubelet/b ro - fuse.s3fs s3fs ro\n",
        );
        let found = candidates(&table, &["/kubelet".into()]);
        let source = MountSource { volume: "v".into(), digest: "d".into() };
        let a =
            Candidate { path: "/kubelet/a".into(), connection: Connection { major: 0, minor: 2 }, source };
        assert_eq!(found, [a]);
    }
}
