//! A short program that writes, always the same.

use anyhow::{Context, Result, ensure};
use std::fs::{self, OpenOptions};
use std::io::Write;
use std::path::Path;

/// Bytes of a file that goes to the store in parts.
pub const LARGE: usize = 17 << 20;

/// One of each operation, in a volume with one object, `old`.
pub fn program(top: &Path) -> Result<()> {
    let new = |name: &str| OpenOptions::new().read(true).write(true).create_new(true).open(top.join(name));
    fs::create_dir(top.join("d")).context("mkdir")?;
    let mut a = new("d/a").context("create")?;
    a.write_all(b"hello").context("write")?;
    a.sync_all().context("fsync")?;
    let mut end = OpenOptions::new().append(true).open(top.join("d/a")).context("open")?;
    for record in [" one", " two", " three"] {
        end.write_all(record.as_bytes()).context("append")?;
    }
    drop(end);
    ensure!(fs::read(top.join("d/a"))? == b"hello one two three", "{:?}", fs::read(top.join("d/a")));
    new("d/b").context("create")?.write_all(b"instead").context("write")?;
    fs::rename(top.join("d/b"), top.join("d/a")).context("rename over")?;
    a.set_len(4).context("truncate what was replaced")?;
    drop(new("d/c").context("create")?);
    fs::remove_file(top.join("d/c")).context("unlink")?;
    new("d/e").context("create")?.write_all(b"e").context("write")?;
    fs::rename(top.join("d/e"), top.join("f")).context("rename to a new name")?;
    fs::rename(top.join("old"), top.join("d/new")).context("rename of what only the store has")?;
    fs::create_dir(top.join("g")).context("mkdir")?;
    fs::remove_dir(top.join("g")).context("rmdir")?;
    fs::create_dir(top.join("t")).context("mkdir")?;
    new("t/x").context("create")?.write_all(b"x").context("write")?;
    fs::rename(top.join("t"), top.join("m")).context("rename of a directory")?;
    ensure!(fs::read(top.join("m/x"))? == b"x");
    let mut large = new("large").context("create")?;
    large.write_all(&vec![7; LARGE]).context("write")?;
    large.sync_all().context("fsync")?;
    Ok(())
}
