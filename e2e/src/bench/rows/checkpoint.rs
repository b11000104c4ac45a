//! One large file that is written in order, as a checkpoint is: what its writer waits for, when the store has it, and what it
//! takes to read it again. Beside it the same in a directory of the staging area's disk, and what curl sends to the same store.

use super::written;
use crate::bench::curl::parts;
use crate::bench::pages::{self, PAGE};
use crate::bench::stage::Stage;
use crate::bench::subject::Subject;
use crate::bench::who::Who;
use crate::bench::workload::{CHECKPOINTS, Checkpoint, MEGABYTES_PER_S, Mode, RTT_MS};
use crate::bench::{work, writes};
use crate::node::Node;
use anyhow::{Context, Result};
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Instant;

const NAME: &str = "checkpoint";

fn rows_of(one: &Checkpoint) -> impl Iterator<Item = &'static str> + Clone + use<> {
    std::iter::once(one.written).chain(one.stored).chain(one.read)
}

pub(in crate::bench) fn play(stage: &mut Stage) -> Result<()> {
    if !stage.wants_any(CHECKPOINTS.iter().flat_map(rows_of)) {
        return Ok(());
    }
    stage.write_to_memory()?;
    let link = stage.link(RTT_MS, MEGABYTES_PER_S)?;
    for round in 0..stage.size().rounds {
        for one in CHECKPOINTS.iter().filter(|one| stage.wants_any(rows_of(one))).copied().collect::<Vec<_>>()
        {
            let endpoint = if one.is_far { link.endpoint() } else { stage.server().endpoint() };
            native(stage, &one, round)?;
            uploads(stage, &one, round, &endpoint)?;
            for who in stage.mounted(rows_of(&one), round).into_iter().filter(|who| one.mode.is_of(*who)) {
                let result = mounted(stage, &one, who, round, &endpoint);
                stage.forgive(who, one.written, result)?;
            }
        }
    }
    stage.write_no_more();
    Ok(())
}

fn rate(bytes: u64, seconds: f64) -> f64 {
    bytes as f64 / 1e6 / seconds
}

fn native(stage: &mut Stage, one: &Checkpoint, round: usize) -> Result<()> {
    let scratch = stage.scratch()?;
    let (bytes, path) = (stage.size().checkpoint_bytes, scratch.join(NAME));
    let subject = Subject::bare(Who::Native, &scratch);
    let write = || Ok(rate(bytes, writes::in_order(&path, bytes, round as u64)?));
    match one.stored {
        Some(stored) => {
            stage.sample_rows(&subject, [one.written, stored], round, |_| write().map(|rate| [rate; 2]))?;
        }
        None => stage.sample(&subject, one.written, round, write)?,
    }
    read_again(stage, one, &subject, &path, round)?;
    Ok(std::fs::remove_dir_all(&scratch)?)
}

/// The file of this round, of which nothing is in the page cache.
fn read_again(
    stage: &mut Stage,
    one: &Checkpoint,
    subject: &Subject,
    path: &Path,
    round: usize,
) -> Result<()> {
    let Some(row) = one.read.filter(|row| stage.plays(row, subject.who, round)) else { return Ok(()) };
    let bytes = stage.size().checkpoint_bytes;
    if !path.exists() {
        writes::in_order(path, bytes, round as u64)?;
    }
    work::drop_page_cache()?;
    stage.sample(subject, row, round, || Ok(rate(bytes, work::sequential(path)?)))?;
    pages::check(File::open(path)?, 0..bytes / PAGE, &|_| round as u64).context("what is read again")
}

/// Eight files of the page cache, which make up as many bytes, by a curl each.
fn uploads(stage: &mut Stage, one: &Checkpoint, round: usize, endpoint: &str) -> Result<()> {
    let row = one.stored.or((one.mode == Mode::Through).then_some(one.written));
    let Some(row) = row.filter(|row| stage.plays(row, Who::EightUploads, round)) else { return Ok(()) };
    let Some(curl) = stage.curl(endpoint)? else { return Ok(()) };
    let (scratch, prefix, bytes) = (stage.scratch()?, stage.empty(), stage.size().checkpoint_bytes);
    let mut files: Vec<PathBuf> = Vec::new();
    for (number, part) in parts(bytes, 8).iter().enumerate() {
        let path = scratch.join(number.to_string());
        let mut file = File::create(&path)?;
        let block = testkit::content::bytes(number as u64, 0..1 << 20);
        let mut left = part.end - part.start;
        while left > 0 {
            let now = left.min(block.len() as u64);
            file.write_all(&block[..now as usize])?;
            left -= now;
        }
        files.push(path);
    }
    rustix::fs::sync();
    let subject = Subject::bare(Who::EightUploads, &scratch);
    stage.sample(&subject, row, round, || {
        let begun = Instant::now();
        curl.upload(&prefix, &files)?;
        Ok(rate(bytes, begun.elapsed().as_secs_f64()))
    })?;
    let names = (0..files.len()).map(|number| format!("{prefix}/{number}"));
    names.into_iter().try_for_each(|key| stage.server().remove(&key))?;
    Ok(std::fs::remove_dir_all(&scratch)?)
}

fn mounted(stage: &mut Stage, one: &Checkpoint, who: Who, round: usize, endpoint: &str) -> Result<()> {
    let (prefix, bytes, pass) = (stage.empty(), stage.size().checkpoint_bytes, round as u64);
    let subject = written::mount(stage, who, &prefix, endpoint, one.mode)?;
    let path = subject.root.join(NAME);
    let write = |node: &Node| {
        let begun = Instant::now();
        let written = rate(bytes, writes::in_order(&path, bytes, pass)?);
        subject.wait_stored(node)?;
        Ok([written, rate(bytes, begun.elapsed().as_secs_f64())])
    };
    match one.stored.filter(|_| who == Who::Millpond) {
        Some(stored) => stage.sample_rows(&subject, [one.written, stored], round, write)?,
        None => {
            stage.sample_of_node(&subject, one.written, round, |node| write(node).map(|[first, _]| first))?
        }
    }
    read_again(stage, one, &subject, &path, round)?;
    written::check(stage.server(), &format!("{prefix}/{NAME}"), 0..bytes / PAGE, &|_| pass)?;
    std::fs::remove_file(&path)?;
    written::gone(stage.server(), &format!("{prefix}/{NAME}"))?;
    stage.end(subject)
}
