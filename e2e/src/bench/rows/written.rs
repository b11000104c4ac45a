//! What rows that write have in common: a mount that is ready to be written to, and a store that has what was written.

use crate::bench::pages::{self, PAGE};
use crate::bench::stage::Stage;
use crate::bench::subject::Subject;
use crate::bench::who::Who;
use crate::bench::workload::Mode;
use crate::clock::wait_until;
use crate::node::Server;
use anyhow::{Context, Result, bail, ensure};
use std::fs::{self, File};
use std::io::Write;
use std::ops::Range;
use std::time::{Duration, Instant};

/// Peers send some seconds after a file was closed.
const PATIENCE: Duration = Duration::from_secs(120);

/// One file has gone through it: what a mount does before its first write is not measured.
pub(super) fn mount(
    stage: &mut Stage,
    who: Who,
    prefix: &str,
    endpoint: &str,
    mode: Mode,
) -> Result<Subject> {
    let subject = stage.mount_writable(who, prefix, endpoint, mode)?;
    let path = subject.root.join("ready");
    let mut file = File::create(&path)?;
    file.write_all(b"ready")?;
    file.sync_all()?;
    drop(file);
    let key = format!("{prefix}/ready");
    let is_there = wait_until(PATIENCE, || stage.server().read(&key).is_ok_and(|found| found.is_some()));
    ensure!(is_there, "a file does not reach the store within {PATIENCE:?}");
    if who.is_peer() {
        // rclone has not heard of the end of its upload yet, and would forget what was removed by then.
        std::thread::sleep(Duration::from_secs(1));
    }
    fs::remove_file(&path)?;
    gone(stage.server(), &key)?;
    Ok(subject)
}

/// Has the store these pages as they were written? A row that measured something else is none.
pub(super) fn check(
    server: &Server,
    key: &str,
    numbers: Range<u64>,
    pass_of: &dyn Fn(u64) -> u64,
) -> Result<()> {
    let end = Instant::now() + PATIENCE;
    let wanted = (numbers.end - numbers.start) * PAGE;
    loop {
        let found = match server.read(key)? {
            None => Err(anyhow::anyhow!("there is no such object")),
            Some((size, _)) if size != wanted => Err(anyhow::anyhow!("it has {size} bytes and not {wanted}")),
            Some((_, bytes)) => pages::check(bytes, numbers.clone(), pass_of),
        };
        match found {
            Ok(()) => return Ok(()),
            Err(error) if Instant::now() >= end => {
                return Err(error).with_context(|| format!("object {key}"));
            }
            Err(_) => std::thread::sleep(Duration::from_millis(200)),
        }
    }
}

/// Its bytes are not in the server's memory any more.
pub(super) fn gone(server: &Server, key: &str) -> Result<()> {
    if !wait_until(PATIENCE, || server.read(key).is_ok_and(|found| found.is_none())) {
        bail!("{key} is still in the store {PATIENCE:?} after it was removed");
    }
    Ok(())
}
