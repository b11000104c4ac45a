//! One large file: cold over three kinds of link, beside what curl does with the same server; warm; and by eight at once.

use super::random;
use crate::bench::curl::{Curl, cat, parts};
use crate::bench::stage::Stage;
use crate::bench::subject::Subject;
use crate::bench::who::Who;
use crate::bench::work;
use crate::bench::workload::{
    COLD, COLD_FAR, COLD_FAR_TLS, MEGABYTES_PER_S, RANDOM_DROPPED, RANDOM_KEPT, READERS, RTT_MS, WARM,
};
use crate::tree::{Shape, Tree};
use anyhow::{Result, ensure};
use std::time::Instant;

/// Below this prefix of the bucket; the key of the file itself.
const PREFIX: &str = "one";
const KEY: &str = "one/large0";
const NAME: &str = "large0";

/// What follows a cold read on one mount.
const AFTER_COLD: [&str; 5] =
    [WARM, RANDOM_KEPT[0].0, RANDOM_KEPT[1].0, RANDOM_DROPPED[0].0, RANDOM_DROPPED[1].0];

pub(in crate::bench) fn play(stage: &mut Stage) -> Result<()> {
    let near = std::iter::once(COLD).chain(AFTER_COLD);
    if !stage.wants_any(near.clone().chain([COLD_FAR, COLD_FAR_TLS, READERS])) {
        return Ok(());
    }
    let bytes = stage.size().file_bytes;
    let shape = Shape { directories: 0, files: 0, small_bytes: 0, large: 1, large_bytes: bytes };
    stage.node().server.add(&Tree::generated("", shape), PREFIX)?;
    let direct = stage.node().server.endpoint();
    let link = stage.link(RTT_MS, MEGABYTES_PER_S)?;
    let front = stage.front()?;
    let link_to_front = crate::node::Proxy::start(
        stage.node().places(),
        &front.address.to_string(),
        RTT_MS,
        MEGABYTES_PER_S,
    )?;
    let far_tls = format!("https://{}", link_to_front.address());
    for round in 0..stage.size().rounds {
        if stage.wants_any(AFTER_COLD) {
            native(stage, round)?;
        }
        for who in stage.mounted(near.clone(), round) {
            let result = one_reader(stage, who, round, &direct);
            stage.forgive(who, COLD, result)?;
        }
        curls(stage, COLD, Who::Curl, round, &direct)?;
        curls(stage, COLD, Who::EightCurls, round, &direct)?;
        for who in stage.mounted([COLD_FAR], round) {
            let result = cold(stage, COLD_FAR, who, round, &link.endpoint());
            stage.forgive(who, COLD_FAR, result)?;
        }
        curls(stage, COLD_FAR, Who::ManyCurls, round, &link.endpoint())?;
        if stage.wants(COLD_FAR_TLS) {
            cold(stage, COLD_FAR_TLS, Who::Millpond, round, &far_tls)?;
            curls(stage, COLD_FAR_TLS, Who::ManyCurls, round, &far_tls)?;
        }
        if stage.wants(READERS) {
            native_readers(stage, round)?;
        }
        for who in stage.mounted([READERS], round) {
            let result = readers(stage, who, round, &direct);
            stage.forgive(who, READERS, result)?;
        }
    }
    Ok(())
}

/// Megabytes per second of the file read once.
fn rate(stage: &mut Stage) -> impl Fn(f64) -> f64 + use<> {
    let bytes = stage.size().file_bytes as f64;
    move |seconds| bytes / 1e6 / seconds
}

fn native(stage: &mut Stage, round: usize) -> Result<()> {
    let rate = rate(stage);
    let subject = Subject::bare(Who::Native, stage.node().server.dir().join(PREFIX));
    let file = subject.root.join(NAME);
    work::sequential(&file)?;
    stage.sample(&subject, WARM, round, || Ok(rate(work::sequential(&file)?)))?;
    random::dropped(stage, &subject, &file, round)
}

fn one_reader(stage: &mut Stage, who: Who, round: usize, endpoint: &str) -> Result<()> {
    let rate = rate(stage);
    let prefix = stage.fresh(PREFIX)?;
    let subject = stage.mount(who, &prefix, endpoint, "large")?;
    let file = subject.root.join(NAME);
    stage.sample(&subject, COLD, round, || Ok(rate(work::sequential(&file)?)))?;
    if AFTER_COLD.iter().any(|workload| stage.plays(workload, who, round)) {
        // Until the cache has settled: written files flushed, a file found whole verified and passed through.
        work::sequential(&file)?;
        rustix::fs::sync();
        work::sequential(&file)?;
        stage.sample(&subject, WARM, round, || Ok(rate(work::sequential(&file)?)))?;
        random::kept(stage, &subject, &file, round)?;
        random::dropped(stage, &subject, &file, round)?;
    }
    stage.done(subject, &prefix)
}

fn cold(stage: &mut Stage, workload: &'static str, who: Who, round: usize, endpoint: &str) -> Result<()> {
    let rate = rate(stage);
    let prefix = stage.fresh(PREFIX)?;
    let subject = stage.mount(who, &prefix, endpoint, "large")?;
    let file = subject.root.join(NAME);
    stage.sample(&subject, workload, round, || Ok(rate(work::sequential(&file)?)))?;
    stage.done(subject, &prefix)
}

/// The file by curl: whole or in parts, into files that are then read, or to /dev/null.
fn curls(stage: &mut Stage, workload: &'static str, who: Who, round: usize, endpoint: &str) -> Result<()> {
    let Some(curl) = stage.curl(endpoint)?.filter(|_| stage.plays(workload, who, round)) else {
        return Ok(());
    };
    let (rate, bytes) = (rate(stage), stage.size().file_bytes);
    let (count, to_files) = match who {
        Who::Curl => (1, true),
        Who::ManyCurls => (32, true),
        _ => (8, false),
    };
    let scratch = stage.scratch()?;
    work::heat(&stage.node().server.dir().join(PREFIX), u64::MAX)?;
    let subject = Subject::bare(who, &scratch);
    let download = |curl: &Curl| -> Result<f64> {
        let begun = Instant::now();
        let files = curl.fetch(KEY, &parts(bytes, count), to_files.then_some(&*scratch))?;
        if to_files {
            cat(&files)?;
        }
        let seconds = begun.elapsed().as_secs_f64();
        let total = files.iter().map(|file| Ok(file.metadata()?.len())).sum::<Result<u64>>()?;
        ensure!(!to_files || total == bytes, "curl has brought {total} bytes of {bytes}");
        Ok(rate(seconds))
    };
    stage.sample(&subject, workload, round, || download(&curl))?;
    Ok(std::fs::remove_dir_all(&scratch)?)
}

const AT_ONCE: usize = 8;

fn native_readers(stage: &mut Stage, round: usize) -> Result<()> {
    let rate = rate(stage);
    let subject = Subject::bare(Who::Native, stage.node().server.dir().join(PREFIX));
    let paths = vec![subject.root.join(NAME); AT_ONCE];
    work::drop_page_cache()?;
    stage.sample(&subject, READERS, round, || Ok(AT_ONCE as f64 * rate(work::many_readers(&paths)?)))
}

/// Millpond's eight pods are eight mounts, as in Kubernetes; a peer has one.
fn readers(stage: &mut Stage, who: Who, round: usize, endpoint: &str) -> Result<()> {
    let rate = rate(stage);
    let prefix = stage.fresh(PREFIX)?;
    let subject = stage.mount(who, &prefix, endpoint, "large")?;
    let mut paths = vec![subject.root.join(NAME); AT_ONCE];
    let mut others = Vec::new();
    if who == Who::Millpond {
        for (k, path) in paths.iter_mut().enumerate().skip(1) {
            let more = [("profile", "large"), ("freshness", "static")];
            let mounted = stage.node().volume(&format!("{prefix}-reader{k}"), &prefix, &more)?;
            *path = mounted.target.join(NAME);
            others.push(mounted);
        }
    }
    stage.sample(&subject, READERS, round, || Ok(AT_ONCE as f64 * rate(work::many_readers(&paths)?)))?;
    for mounted in &others {
        stage.node().unpublish(mounted)?;
    }
    stage.done(subject, &prefix)
}
