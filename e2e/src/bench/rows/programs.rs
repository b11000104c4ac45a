//! What people do with programs of others: git, tar, and checkpoints of torch and safetensors.

use super::written;
use crate::bench::stage::Stage;
use crate::bench::subject::Subject;
use crate::bench::tools::{self, Material};
use crate::bench::who::Who;
use crate::bench::workload::{CHECKPOINT_LIBRARIES, Mode, TOOLS};
use anyhow::{Context, Result};
use std::fs;

pub(in crate::bench) fn play(stage: &mut Stage) -> Result<()> {
    let modes = [Mode::Back, Mode::Through];
    let wanted: Vec<Mode> = modes.into_iter().filter(|mode| stage.wants_any(rows_of(*mode))).collect();
    if wanted.is_empty() {
        return Ok(());
    }
    let home = stage.node().places().root().join("material");
    let material = Material::make(&home, stage.size().saved_files)?;
    stage.write_to_memory()?;
    for round in 0..stage.size().rounds {
        for mode in wanted.iter().copied() {
            let scratch = stage.scratch()?;
            let subject = Subject::bare(Who::Native, &scratch);
            all(stage, &subject, mode, &material, round)?;
            fs::remove_dir_all(&scratch)?;
            for who in stage.mounted(rows_of(mode), round).into_iter().filter(|who| mode.is_of(*who)) {
                let result = mounted(stage, who, mode, &material, round);
                stage.forgive(who, "programs of others", result)?;
            }
        }
    }
    stage.write_no_more();
    Ok(fs::remove_dir_all(&home)?)
}

fn rows_of(mode: Mode) -> Vec<&'static str> {
    let tools = TOOLS.iter().filter(|of| of.0 == mode).flat_map(|of| of.1);
    let libraries = CHECKPOINT_LIBRARIES.iter().filter(|of| of.0 == mode).flat_map(|of| of.2);
    tools.chain(libraries).collect()
}

fn mounted(stage: &mut Stage, who: Who, mode: Mode, material: &Material, round: usize) -> Result<()> {
    let (prefix, endpoint) = (stage.empty(), stage.server().endpoint());
    let subject = written::mount(stage, who, &prefix, &endpoint, mode)?;
    all(stage, &subject, mode, material, round)?;
    stage.end(subject)
}

fn all(stage: &mut Stage, subject: &Subject, mode: Mode, material: &Material, round: usize) -> Result<()> {
    for (_, rows) in TOOLS.iter().filter(|of| of.0 == mode) {
        let dir = subject.root.join("tools");
        fs::create_dir(&dir)?;
        let result = stage.sample_rows(subject, *rows, round, |node| {
            let times = tools::work(&dir, material)?;
            subject.wait_stored(node)?;
            Ok([times.clone, times.commit, times.gc, times.unpack, times.pack])
        });
        stage.forgive(subject.who, "git and tar", result)?;
        if !subject.who.is_peer() {
            fs::remove_dir_all(&dir)?; // a peer's goes with its mount
        }
    }
    for (_, library, rows) in CHECKPOINT_LIBRARIES.iter().filter(|of| of.0 == mode) {
        if !stage.wants_any(*rows) {
            continue;
        }
        let (dir, bytes) = (subject.root.join(library), stage.size().checkpoint_bytes / 8);
        fs::create_dir(&dir)?;
        // Otherwise a run without it would be one with a sample less that nobody misses.
        let Some(_) = tools::checkpoint(&dir, library, 1 << 20)? else {
            stage.leave_out(format!("{library}: Debian's python3 cannot import it"));
            continue;
        };
        let result = stage.sample_rows(subject, *rows, round, |node| {
            let times = tools::checkpoint(&dir, library, bytes)?.context("it was there a moment ago")?;
            subject.wait_stored(node)?;
            Ok(times)
        });
        stage.forgive(subject.who, library, result)?;
        if !subject.who.is_peer() {
            fs::remove_dir_all(&dir)?;
        }
    }
    Ok(())
}
