//! The kernel's mount table as text (`proc_pid_mountinfo(5)`), parsed: all we know of our mounts after a restart.

use crate::{Attributes, Connection, Ours};
use std::collections::HashMap;
use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MountEntry {
    pub id: u64,
    pub parent: u64,
    pub major: u32,
    pub minor: u32,
    /// Which directory or file of the file system is mounted: `/` is all of it.
    pub root: PathBuf,
    pub mount_point: PathBuf,
    pub fs_type: String,
    pub source: String,
    pub attributes: Attributes,
}

impl MountEntry {
    pub fn ours(&self) -> Option<Ours> {
        Ours::recognise(&self.fs_type, &self.source)
    }

    pub fn connection(&self) -> Connection {
        Connection { major: self.major, minor: self.minor }
    }
}

/// Lines that cannot be understood are left out: a mount of ours never looks like that.
pub fn parse_mountinfo(text: &[u8]) -> Vec<MountEntry> {
    text.split(|b| *b == b'\n').filter_map(parse_line).collect()
}

/// `id parent major:minor root mount_point options [optional…] - fs_type source super_options`
fn parse_line(line: &[u8]) -> Option<MountEntry> {
    let mut fields = line.split(|b| *b == b' ').filter(|f| !f.is_empty());
    let text = |field: &[u8]| std::str::from_utf8(field).ok().map(str::to_owned);
    let id = text(fields.next()?)?.parse().ok()?;
    let parent = text(fields.next()?)?.parse().ok()?;
    let device = text(fields.next()?)?;
    let (major, minor) = device.split_once(':')?;
    let root = unescape(fields.next()?);
    let mount_point = unescape(fields.next()?);
    let options = fields.next()?;
    let mut separator = false;
    let optional = fields.by_ref().take_while(|field| {
        separator = *field == b"-";
        !separator
    });
    let attributes = Attributes::parse(options, optional);
    if !separator {
        return None;
    }
    let fs_type = String::from_utf8_lossy(&unescape(fields.next()?)).into_owned();
    let source = String::from_utf8_lossy(&unescape(fields.next().unwrap_or_default())).into_owned();
    Some(MountEntry {
        id,
        parent,
        major: major.parse().ok()?,
        minor: minor.parse().ok()?,
        root: PathBuf::from(OsString::from_vec(root)),
        mount_point: PathBuf::from(OsString::from_vec(mount_point)),
        fs_type,
        source,
        attributes,
    })
}

/// The kernel writes space, tab, newline, backslash and `#` as a backslash and three octal digits.
pub fn unescape(field: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((&byte, tail)) = rest.split_first() {
        let octal = |d: u8| (b'0'..=b'7').contains(&d).then(|| u32::from(d - b'0'));
        let escaped = match tail {
            [a, b, c, ..] if byte == b'\\' => match (octal(*a), octal(*b), octal(*c)) {
                (Some(a), Some(b), Some(c)) => u8::try_from(a << 6 | b << 3 | c).ok(),
                _ => None,
            },
            _ => None,
        };
        match escaped {
            Some(value) => {
                out.push(value);
                rest = &tail[3..];
            }
            None => {
                out.push(byte);
                rest = tail;
            }
        }
    }
    out
}

/// The mounts stacked at exactly this path, however many slashes it is written with, the visible one last. Stacked mounts
/// are children of one another; the order of lines says nothing reliable.
pub fn stack_at<'t>(table: &'t [MountEntry], path: &Path) -> Vec<&'t MountEntry> {
    // As bytes, in the kernel's form: paths are compared by component, which takes long where thousands are.
    let path: PathBuf = path.components().collect();
    let is_here = |e: &&MountEntry| e.mount_point.as_os_str() == path.as_os_str();
    let mut here: Vec<&MountEntry> = table.iter().filter(is_here).collect();
    let mut stack = Vec::with_capacity(here.len());
    // Counted, so that a thousand mounts at one place are no matter of minutes: anybody who may mount may stack them.
    let mut left: HashMap<u64, usize> = HashMap::new();
    here.iter().for_each(|e| *left.entry(e.id).or_default() += 1);
    while !here.is_empty() {
        // The lowest of those left is the one whose parent is not among them.
        let lowest = here.iter().position(|e| left.get(&e.parent).is_none_or(|n| *n == 0)).unwrap_or(0);
        let lowest = here.remove(lowest);
        left.entry(lowest.id).and_modify(|n| *n -= 1);
        stack.push(lowest);
    }
    stack
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::os::unix::ffi::OsStrExt;

    fn escape(raw: &[u8]) -> Vec<u8> {
        let mut out = Vec::new();
        for byte in raw {
            match byte {
                b' ' | b'\t' | b'\n' | b'\\' | b'#' => out.extend(format!("\\{byte:03o}").bytes()),
                other => out.push(*other),
            }
        }
        out
    }

    #[test]
    fn real_lines_parse() {
        let text = b"36 35 98:0 /mnt1 /mnt2 ro,noatime master:1 - ext3 /dev/root rw,errors=continue\n\
                     40 36 0:57 / /a\\040b rw shared:2 master:1 - fuse.millpond millpond:v:d ro,user_id=0\n\
                     garbage\n\
                     41 36 0:58 / /none rw - tmpfs  rw\n";
        let table = parse_mountinfo(text);
        assert_eq!(table.len(), 3);
        assert!(table[0].attributes.is_read_only() && !table[1].attributes.is_read_only());
        assert_eq!((table[0].root.as_path(), table[1].root.as_path()), (Path::new("/mnt1"), Path::new("/")));
        assert_eq!(table[1].mount_point, Path::new("/a b"));
        assert_eq!((table[1].major, table[1].minor), (0, 57));
        assert!(matches!(table[1].ours(), Some(Ours::Fuse(s)) if s.volume == "v" && s.digest == "d"));
    }

    #[test]
    fn stacks_are_ordered_by_parentage() {
        let entry = |id, parent, at: &str| MountEntry {
            id,
            parent,
            major: 0,
            minor: 1,
            root: "/".into(),
            mount_point: at.into(),
            fs_type: "tmpfs".into(),
            source: "x".into(),
            attributes: Attributes::default(),
        };
        let table = [entry(30, 20, "/t"), entry(20, 10, "/t"), entry(10, 1, "/t"), entry(5, 1, "/other")];
        let ids: Vec<u64> = stack_at(&table, Path::new("/t")).iter().map(|e| e.id).collect();
        assert_eq!(ids, [10, 20, 30]);
        assert_eq!(stack_at(&table, Path::new("//t/./")).len(), 3, "as somebody else writes it");
        let circle = [entry(1, 2, "/t"), entry(2, 1, "/t"), entry(1, 1, "/t")];
        assert_eq!(stack_at(&circle, Path::new("/t")).len(), 3);
        // Each upon the one that comes behind it.
        let many: Vec<_> = (1..4000).rev().map(|id| entry(id, id - 1, "/t")).collect();
        let ids: Vec<u64> = stack_at(&many, Path::new("/t")).iter().map(|e| e.id).collect();
        assert!(ids.iter().copied().eq(1..4000));
    }

    proptest! {
        #[test]
        fn any_mount_point_survives_the_kernels_escaping(path in prop::collection::vec(1u8.., 1..40)) {
            let mut line = b"1 2 0:3 / ".to_vec();
            line.extend(escape(&path));
            line.extend(b" rw - tmpfs s rw");
            let table = parse_mountinfo(&line);
            prop_assert_eq!(table.len(), 1);
            prop_assert_eq!(table[0].mount_point.as_os_str().as_bytes(), &path[..]);
        }

        #[test]
        fn garbage_never_panics(text in prop::collection::vec(any::<u8>(), 0..400)) {
            parse_mountinfo(&text);
        }
    }
}
