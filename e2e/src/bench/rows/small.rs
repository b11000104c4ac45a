//! Many small files, each opened, read and closed: cold over two kinds of link, and again when they are cached.

use crate::bench::stage::Stage;
use crate::bench::subject::Subject;
use crate::bench::who::Who;
use crate::bench::work;
use crate::bench::workload::{
    Delivered, FILE_BYTES, MEGABYTES_PER_S, RTT_MS, SMALL_COLD, SMALL_COLD_FAR, SMALL_DROPPED, SMALL_KEPT,
};
use anyhow::Result;
use std::time::Instant;

const PREFIX: &str = "small";

/// What follows on one mount when the files are cached.
const CACHED: [&str; 4] = [SMALL_KEPT[0].0, SMALL_KEPT[1].0, SMALL_DROPPED[0].0, SMALL_DROPPED[1].0];

pub(in crate::bench) fn play(stage: &mut Stage) -> Result<()> {
    let far = SMALL_COLD_FAR.map(|(workload, _)| workload);
    if !stage.wants_any(CACHED.into_iter().chain([SMALL_COLD.0]).chain(far)) {
        return Ok(());
    }
    let files = stage.size().files;
    let per_directory = 1000.min(files);
    let names = stage.write_small(PREFIX, files / per_directory, per_directory, FILE_BYTES)?;
    let direct = stage.node().server.endpoint();
    let link = stage.link(RTT_MS, MEGABYTES_PER_S)?;
    for round in 0..stage.size().rounds {
        if stage.wants_any(CACHED) {
            let subject = Subject::bare(Who::Native, stage.node().server.dir().join(PREFIX));
            cached(stage, &subject, &names, round)?;
        }
        for who in stage.mounted(CACHED, round) {
            let result = again(stage, who, &names, round, &direct);
            stage.forgive(who, "small files, cached", result)?;
        }
        let near = std::iter::once((SMALL_COLD, direct.clone()));
        for ((workload, threads), endpoint) in near.chain(SMALL_COLD_FAR.map(|row| (row, link.endpoint()))) {
            for who in stage.mounted([workload], round) {
                let result = cold(stage, who, &names, round, (workload, threads), &endpoint);
                stage.forgive(who, workload, result)?;
            }
        }
    }
    Ok(())
}

/// Peers need minutes for all of them: a tenth tells their rate as well.
fn part(who: Who, names: &[String]) -> (&[String], Delivered) {
    let part = if who.is_peer() { &names[..names.len().div_ceil(10)] } else { names };
    (part, Delivered { bytes: part.len() as u64 * FILE_BYTES, files: part.len() as u64 })
}

fn again(stage: &mut Stage, who: Who, names: &[String], round: usize, endpoint: &str) -> Result<()> {
    let prefix = stage.fresh(PREFIX)?;
    let subject = stage.mount(who, &prefix, endpoint, "small")?;
    cached(stage, &subject, names, round)?;
    stage.done(subject, &prefix)
}

fn cached(stage: &mut Stage, subject: &Subject, names: &[String], round: usize) -> Result<()> {
    let (part, delivered) = part(subject.who, names);
    let epoch = |threads| work::epoch(&subject.root, part, threads, 1 + round as u64);
    epoch(4)?;
    rustix::fs::sync();
    epoch(4)?;
    for (workload, threads) in SMALL_KEPT {
        stage.sample_part(subject, workload, round, delivered, || epoch(threads))?;
    }
    for (workload, threads) in SMALL_DROPPED {
        if stage.plays(workload, subject.who, round) {
            work::drop_page_cache()?;
            stage.sample_part(subject, workload, round, delivered, || epoch(threads))?;
        }
    }
    Ok(())
}

fn cold(
    stage: &mut Stage,
    who: Who,
    names: &[String],
    round: usize,
    (workload, threads): (&'static str, usize),
    endpoint: &str,
) -> Result<()> {
    let (part, delivered) = part(who, names);
    let prefix = stage.fresh(PREFIX)?;
    let subject = stage.mount(who, &prefix, endpoint, "small")?;
    let epoch = || work::epoch(&subject.root, part, threads, 1 + round as u64);
    stage.sample_part(&subject, workload, round, delivered, epoch)?;
    if who == Who::Millpond && workload == SMALL_COLD.0 {
        // Before what is cached is deleted: ext4 passes over inodes that were free a moment ago, one by one, and curl's files
        // would pay for that.
        curl(stage, names, round, endpoint)?;
    }
    stage.done(subject, &prefix)
}

/// The files by one curl with a connection for each of the readers, who read them when all are there.
fn curl(stage: &mut Stage, names: &[String], round: usize, endpoint: &str) -> Result<()> {
    let (workload, threads) = SMALL_COLD;
    let Some(curl) = stage.curl(endpoint)?.filter(|_| stage.plays(workload, Who::Curl, round)) else {
        return Ok(());
    };
    let scratch = stage.scratch()?;
    work::heat(&stage.node().server.dir().join(PREFIX), u64::MAX)?;
    let subject = Subject::bare(Who::Curl, &scratch);
    stage.sample(&subject, workload, round, || {
        let begun = Instant::now();
        curl.fetch_all(PREFIX, names, threads, &scratch)?;
        work::epoch(&scratch, names, threads, 1 + round as u64)?;
        Ok(names.len() as f64 / begun.elapsed().as_secs_f64())
    })?;
    Ok(std::fs::remove_dir_all(&scratch)?)
}
