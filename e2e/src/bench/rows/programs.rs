//! What people do with programs of others: git, tar, and checkpoints of torch and safetensors.

use super::written;
use crate::bench::stage::Stage;
use crate::bench::subject::Subject;
use crate::bench::tools::{self, Material};
use crate::bench::who::Who;
use crate::bench::workload::{CHECKPOINT_LIBRARIES, MEGABYTES_PER_S, Mode, RTT_MS, TOOLS};
use anyhow::{Context, Result};
use std::fs;

/// How a mount is written to, and whether its store is far away.
type Setting = (Mode, bool);

const SETTINGS: [Setting; 4] =
    [(Mode::Back, false), (Mode::Through, false), (Mode::Back, true), (Mode::Through, true)];

pub(in crate::bench) fn play(stage: &mut Stage) -> Result<()> {
    let wanted: Vec<Setting> = SETTINGS.into_iter().filter(|of| stage.wants_any(rows_of(*of))).collect();
    if wanted.is_empty() {
        return Ok(());
    }
    let home = stage.node().places().root().join("material");
    let material = Material::make(&home, stage.size().saved_files)?;
    stage.write_to_memory()?;
    let link = stage.link(RTT_MS, MEGABYTES_PER_S)?;
    for round in 0..stage.size().rounds {
        for setting in wanted.iter().copied() {
            let scratch = stage.scratch()?;
            let subject = Subject::bare(Who::Native, &scratch);
            all(stage, &subject, setting, &material, round)?;
            fs::remove_dir_all(&scratch)?;
            let endpoint = if setting.1 { link.endpoint() } else { stage.server().endpoint() };
            for who in stage.mounted(rows_of(setting), round).into_iter().filter(|who| setting.0.is_of(*who))
            {
                let result = mounted(stage, who, setting, &endpoint, &material, round);
                stage.forgive(who, "programs of others", result)?;
            }
        }
    }
    stage.write_no_more();
    Ok(fs::remove_dir_all(&home)?)
}

fn rows_of(setting: Setting) -> Vec<&'static str> {
    let tools = TOOLS.iter().filter(|of| (of.0, of.1) == setting).flat_map(|of| of.2);
    let libraries = CHECKPOINT_LIBRARIES.iter().filter(|of| (of.0, false) == setting).flat_map(|of| of.2);
    tools.chain(libraries).collect()
}

fn mounted(
    stage: &mut Stage,
    who: Who,
    setting: Setting,
    endpoint: &str,
    material: &Material,
    round: usize,
) -> Result<()> {
    let prefix = stage.empty();
    let subject = written::mount(stage, who, &prefix, endpoint, setting.0)?;
    all(stage, &subject, setting, material, round)?;
    stage.end(subject)
}

fn all(
    stage: &mut Stage,
    subject: &Subject,
    setting: Setting,
    material: &Material,
    round: usize,
) -> Result<()> {
    for (.., rows) in TOOLS.iter().filter(|of| (of.0, of.1) == setting) {
        if !stage.wants_any(*rows) {
            continue;
        }
        let dir = subject.root.join("tools");
        fs::create_dir(&dir)?;
        let result = stage.sample_rows(subject, *rows, round, |node| {
            let times = tools::work(&dir, material)?;
            subject.wait_stored(node)?;
            Ok([times.clone, times.commit, times.gc, times.unpack, times.pack])
        });
        stage.forgive(subject.who, rows[0], result)?;
        if !subject.who.is_peer() {
            fs::remove_dir_all(&dir)?; // a peer's goes with its mount
        }
    }
    for (_, library, rows) in CHECKPOINT_LIBRARIES.iter().filter(|of| (of.0, false) == setting) {
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
