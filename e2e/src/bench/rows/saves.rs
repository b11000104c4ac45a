//! What editors, builds and databases do: a file saved by a rename, many small files, pages of a file overwritten at random.

use super::written;
use crate::bench::pages::PAGE;
use crate::bench::stage::Stage;
use crate::bench::subject::Subject;
use crate::bench::who::Who;
use crate::bench::workload::{MEGABYTES_PER_S, Mode, OVERWRITES, RTT_MS, SAVES, SMALL_OUT};
use crate::bench::writes::{self, Until};
use crate::node::Node;
use anyhow::Result;
use std::collections::HashSet;
use std::fs;
use std::time::Duration;

pub(in crate::bench) fn play(stage: &mut Stage) -> Result<()> {
    let modes = [Mode::Back, Mode::Through];
    if !modes.iter().any(|mode| stage.wants_any(rows_of(*mode))) {
        return Ok(());
    }
    stage.write_to_memory()?;
    let link = stage.link(RTT_MS, MEGABYTES_PER_S)?;
    for round in 0..stage.size().rounds {
        for mode in modes.into_iter().filter(|mode| stage.wants_any(rows_of(*mode))).collect::<Vec<_>>() {
            let scratch = stage.scratch()?;
            let subject = Subject::bare(Who::Native, &scratch);
            all(stage, &subject, mode, None, round)?;
            far(stage, &subject, mode, None, round)?;
            fs::remove_dir_all(&scratch)?;
            for who in stage.mounted(rows_of(mode), round).into_iter().filter(|who| mode.is_of(*who)) {
                let result = mounted(stage, who, mode, round);
                stage.forgive(who, "small files out", result)?;
                let result = mounted_far(stage, who, mode, &link.endpoint(), round);
                stage.forgive(who, "saves over a link", result)?;
            }
        }
    }
    stage.write_no_more();
    Ok(())
}

fn rows_of(mode: Mode) -> Vec<&'static str> {
    let saves = SAVES.iter().filter(|row| row.1 == mode).map(|row| row.0);
    let small = SMALL_OUT.iter().filter(|row| row.1 == mode).map(|row| row.0);
    saves.chain(small).chain(OVERWRITES.iter().filter(|row| row.1 == mode).map(|row| row.0)).collect()
}

fn mounted(stage: &mut Stage, who: Who, mode: Mode, round: usize) -> Result<()> {
    let (prefix, endpoint) = (stage.empty(), stage.server().endpoint());
    let subject = written::mount(stage, who, &prefix, &endpoint, mode)?;
    all(stage, &subject, mode, Some(&prefix), round)?;
    stage.end(subject)
}

fn mounted_far(stage: &mut Stage, who: Who, mode: Mode, endpoint: &str, round: usize) -> Result<()> {
    if !SAVES.iter().any(|(row, of, is_far)| *is_far && *of == mode && stage.plays(row, who, round)) {
        return Ok(());
    }
    let prefix = stage.empty();
    let subject = written::mount(stage, who, &prefix, endpoint, mode)?;
    far(stage, &subject, mode, Some(&prefix), round)?;
    stage.end(subject)
}

/// The rows of a store that is far away.
fn far(stage: &mut Stage, subject: &Subject, mode: Mode, prefix: Option<&str>, round: usize) -> Result<()> {
    for (row, of, is_far) in SAVES {
        if is_far && of == mode && stage.plays(row, subject.who, round) {
            save(stage, subject, row, prefix, round)?;
        }
    }
    Ok(())
}

/// `prefix`: where the store has what is written; None: nowhere.
fn all(stage: &mut Stage, subject: &Subject, mode: Mode, prefix: Option<&str>, round: usize) -> Result<()> {
    for (row, of, is_far) in SAVES {
        if !is_far && of == mode && stage.plays(row, subject.who, round) {
            save(stage, subject, row, prefix, round)?;
        }
    }
    for (row, of, threads, is_synced) in SMALL_OUT {
        if of == mode && stage.plays(row, subject.who, round) {
            let how = (threads, is_synced);
            let result = small(stage, subject, row, how, prefix, round);
            stage.forgive(subject.who, row, result)?;
        }
    }
    for (row, of, is_synced) in OVERWRITES {
        if of == mode && stage.plays(row, subject.who, round) {
            let result = overwrite(stage, subject, row, is_synced, prefix, round);
            stage.forgive(subject.who, row, result)?;
        }
    }
    Ok(())
}

fn save(
    stage: &mut Stage,
    subject: &Subject,
    row: &'static str,
    prefix: Option<&str>,
    round: usize,
) -> Result<()> {
    let limit = Duration::from_millis(stage.size().random_ms);
    let mut last = 0;
    stage.sample_of_node(subject, row, round, |node| {
        let (rate, pass) = writes::saves(&subject.root, limit)?;
        last = pass;
        subject.wait_stored(node)?;
        Ok(rate)
    })?;
    if let Some(prefix) = prefix {
        written::check(stage.server(), &format!("{prefix}/saved"), 0..2, &|_| last)?;
    }
    Ok(fs::remove_file(subject.root.join("saved"))?)
}

fn small(
    stage: &mut Stage,
    subject: &Subject,
    row: &'static str,
    (threads, is_synced): (usize, bool),
    prefix: Option<&str>,
    round: usize,
) -> Result<()> {
    let (files, pass) = (stage.size().saved_files as u64, round as u64);
    let name = format!("small-{threads}-{is_synced}");
    let dir = subject.root.join(&name);
    fs::create_dir(&dir)?;
    stage.sample_of_node(subject, row, round, |node| {
        let rate = writes::small(&dir, files, threads, is_synced, pass)?;
        subject.wait_stored(node)?;
        Ok(rate)
    })?;
    if let Some(prefix) = prefix {
        for number in 0..files {
            let key = format!("{prefix}/{name}/{}", writes::small_name(number));
            written::check(stage.server(), &key, number..number + 1, &|_| pass)?;
        }
    }
    Ok(fs::remove_dir_all(&dir)?)
}

fn overwrite(
    stage: &mut Stage,
    subject: &Subject,
    row: &'static str,
    is_synced: bool,
    prefix: Option<&str>,
    round: usize,
) -> Result<()> {
    let size = stage.size();
    let name = format!("overwritten-{is_synced}");
    let path = subject.root.join(&name);
    let (before, after, seed) = (1, 2, round as u64);
    writes::in_order(&path, size.overwritten_bytes, before)?;
    subject.wait_stored(stage.node())?;
    let until = match is_synced {
        true => Until::Passed(Duration::from_millis(size.random_ms)),
        false => Until::Count(size.overwrites),
    };
    let mut count = 0;
    stage.sample_of_node(subject, row, round, |node: &Node| {
        let (rate, done) = writes::overwrite(&path, until, seed, after)?;
        count = done;
        subject.wait_stored(node)?;
        Ok(rate)
    })?;
    let pages = size.overwritten_bytes / PAGE;
    let changed: HashSet<u64> = writes::overwritten(pages, seed).take(count as usize).collect();
    let pass_of = |page: u64| if changed.contains(&page) { after } else { before };
    if let Some(prefix) = prefix {
        written::check(stage.server(), &format!("{prefix}/{name}"), 0..pages, &pass_of)?;
    }
    Ok(fs::remove_file(&path)?)
}
