//! HDFS knows its users and groups by name, a pod by number.

use hdfs::Status;
use std::collections::BTreeMap;
use volume::Permissions;

/// Who HDFS's users and groups are in pods, as this node's operator says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HadoopIds {
    pub users: BTreeMap<String, u32>,
    pub groups: BTreeMap<String, u32>,
}

impl HadoopIds {
    pub(super) fn permissions(&self, status: &Status) -> Permissions {
        let (uid, gid) = (of(&self.users, &status.owner), of(&self.groups, &status.group));
        Permissions::of(status.mode.into(), uid, gid)
    }
}

/// A name that is a number is that number, unless the operator says otherwise.
fn of(all: &BTreeMap<String, u32>, name: &str) -> Option<u32> {
    let number = || name.parse().ok().filter(|_| name.bytes().all(|byte| byte.is_ascii_digit()));
    all.get(name).copied().or_else(number)
}

#[cfg(test)]
mod tests {
    use super::*;
    use hdfs::Version;

    #[test]
    fn names_are_the_operators_numbers_and_numbers_are_themselves() {
        let all = |pairs: &[(&str, u32)]| pairs.iter().map(|(name, id)| ((*name).to_owned(), *id)).collect();
        let ids = HadoopIds { users: all(&[("alice", 1000), ("7", 8)]), groups: all(&[("ml", 3000)]) };
        let shown = |owner: &str, group: &str| {
            let version = Version { modified_ms: 0, length: 0 };
            let (owner, group) = (owner.to_owned(), group.to_owned());
            ids.permissions(&Status { is_directory: false, version, mode: 0o1750, owner, group })
        };
        let permissions = |uid, gid| Permissions { mode: 0o750, uid, gid };
        assert_eq!(shown("alice", "ml"), permissions(Some(1000), Some(3000)));
        assert_eq!(shown("7", "7"), permissions(Some(8), Some(7)));
        assert_eq!(shown("ml", "alice"), permissions(None, None));
        for name in ["", "+1", "-1", "4294967295", "99999999999", "٣"] {
            assert_eq!(shown(name, name), permissions(None, None), "{name}");
        }
    }
}
