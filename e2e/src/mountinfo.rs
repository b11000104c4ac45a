//! The mount table, read the way the kernel writes it.

use std::io;
use std::path::{Path, PathBuf};

/// One line of `/proc/<pid>/mountinfo` (proc_pid_mountinfo(5)).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mount {
    pub id: u64,
    /// `major:minor` of the superblock.
    pub device: String,
    pub point: PathBuf,
    pub kind: String,
    pub options: String,
}

pub fn read(pid: &str) -> io::Result<Vec<Mount>> {
    Ok(parse(&std::fs::read_to_string(format!("/proc/{pid}/mountinfo"))?))
}

/// Mounts at or below `dir` as this process sees them, in the order in which they were made.
pub fn below(dir: &Path) -> io::Result<Vec<Mount>> {
    Ok(read("self")?.into_iter().filter(|m| m.point.starts_with(dir)).collect())
}

fn parse(text: &str) -> Vec<Mount> {
    let line = |line: &str| {
        let (left, right) = line.split_once(" - ")?;
        let left: Vec<_> = left.split(' ').collect();
        Some(Mount {
            id: left.first()?.parse().ok()?,
            device: (*left.get(2)?).to_owned(),
            point: unescape(left.get(4)?).into(),
            kind: right.split(' ').next()?.to_owned(),
            options: (*left.get(5)?).to_owned(),
        })
    };
    text.lines().filter_map(line).collect()
}

/// Space, tab, newline and backslash are written as `\040` and so on.
fn unescape(text: &str) -> String {
    let mut out = Vec::new();
    let mut rest = text.as_bytes();
    while let Some((&byte, tail)) = rest.split_first() {
        let octal = (byte == b'\\').then(|| tail.get(..3)).flatten();
        match octal.and_then(|o| u8::from_str_radix(std::str::from_utf8(o).ok()?, 8).ok()) {
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
    String::from_utf8_lossy(&out).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_with_and_without_optional_fields_parse() {
        let text = "36 35 98:0 /mnt1 /mnt\\0402 rw,noatime master:1 - ext3 /dev/root rw,errors=continue\n\
                    37 35 0:51 / /t ro,nosuid - fuse.millpond millpond ro\n";
        let mounts = parse(text);
        assert_eq!((mounts[0].point.as_path(), mounts[0].kind.as_str()), (Path::new("/mnt 2"), "ext3"));
        assert_eq!((mounts[1].device.as_str(), mounts[1].options.as_str()), ("0:51", "ro,nosuid"));
        assert!(!read("self").unwrap().is_empty());
    }
}
