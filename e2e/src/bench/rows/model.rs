//! A model in a safetensors file behind a slow link: what a second load on the node takes, beside a program that
//! downloads it each time.

use crate::bench::curl::parts;
use crate::bench::stage::Stage;
use crate::bench::subject::Subject;
use crate::bench::who::Who;
use crate::bench::work;
use crate::bench::workload::{MODEL, RTT_MS};
use anyhow::{Context, Result, ensure};
use serde_json::{Map, Value, json};
use std::fs::File;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Instant;

const PREFIX: &str = "model";
const NAME: &str = "model.safetensors";
/// Of one connection: the link of the row's name.
const LINK_MEGABYTES_PER_S: u64 = 33;
const TENSORS: u64 = 48;

pub(in crate::bench) fn play(stage: &mut Stage) -> Result<()> {
    if !stage.wants(MODEL) {
        return Ok(());
    }
    let dir = stage.node().server.dir().join(PREFIX);
    std::fs::create_dir_all(&dir)?;
    write(&dir.join(NAME), stage.size().model_bytes)?;
    let link = stage.link(RTT_MS, LINK_MEGABYTES_PER_S)?;
    for round in 0..stage.size().rounds {
        direct(stage, round, &link.endpoint())?;
        for who in stage.mounted([MODEL], round) {
            let result = second(stage, who, round, &link.endpoint());
            stage.forgive(who, MODEL, result)?;
        }
    }
    Ok(())
}

/// Downloaded by one curl, as a program does that keeps nothing, and loaded.
fn direct(stage: &mut Stage, round: usize, endpoint: &str) -> Result<()> {
    let Some(curl) = stage.curl(endpoint)? else { return Ok(()) };
    let scratch = stage.scratch()?;
    let dir = stage.node().server.dir().join(PREFIX);
    work::heat(&dir, u64::MAX)?;
    let bytes = dir.join(NAME).metadata()?.len();
    let subject = Subject::bare(Who::Curl, &scratch);
    stage.sample(&subject, MODEL, round, || {
        let begun = Instant::now();
        let files = curl.fetch(&format!("{PREFIX}/{NAME}"), &parts(bytes, 1), Some(&scratch))?;
        files.iter().try_for_each(|file| load(file))?;
        Ok(begun.elapsed().as_secs_f64())
    })?;
    Ok(std::fs::remove_dir_all(&scratch)?)
}

fn second(stage: &mut Stage, who: Who, round: usize, endpoint: &str) -> Result<()> {
    let prefix = stage.fresh(PREFIX)?;
    let subject = stage.mount(who, &prefix, endpoint, "large")?;
    let file = subject.root.join(NAME);
    load(&file)?;
    work::drop_page_cache()?;
    stage.sample(&subject, MODEL, round, || {
        let begun = Instant::now();
        load(&file)?;
        Ok(begun.elapsed().as_secs_f64())
    })?;
    stage.done(subject, &prefix)
}

/// The format: eight bytes with the header's length, the header as JSON, padded with spaces to eight bytes, the tensors.
fn write(path: &Path, bytes: u64) -> Result<()> {
    let of_each = (bytes / TENSORS) & !1;
    let mut header = Map::new();
    header.insert("__metadata__".to_owned(), json!({"format": "pt"}));
    for k in 0..TENSORS {
        let offsets = [k * of_each, (k + 1) * of_each];
        let tensor = json!({"dtype": "F16", "shape": [of_each / 2], "data_offsets": offsets});
        header.insert(format!("model.layers.{k}.weight"), tensor);
    }
    let mut header = serde_json::to_string(&header)?;
    header += &" ".repeat(header.len().next_multiple_of(8) - header.len());
    let mut file = File::create(path)?;
    file.write_all(&(header.len() as u64).to_le_bytes())?;
    file.write_all(header.as_bytes())?;
    for k in 0..TENSORS {
        file.write_all(&testkit::content::bytes(k, 0..of_each))?;
    }
    Ok(file.sync_all()?)
}

/// What a program does that loads the model: parses the header, reads every tensor whole.
fn load(path: &Path) -> Result<()> {
    let file = File::open(path).with_context(|| path.display().to_string())?;
    let mut length = [0; 8];
    file.read_exact_at(&mut length, 0)?;
    let length = u64::from_le_bytes(length);
    ensure!(length < 100_000_000, "a header of {length} bytes is more than the format allows");
    let mut header = vec![0; length as usize];
    file.read_exact_at(&mut header, 8)?;
    let header: Map<String, Value> = serde_json::from_slice(&header).context("the header is no JSON")?;
    let range = |tensor: &Value| -> Option<(u64, u64)> {
        let offsets = tensor.get("data_offsets")?.as_array()?;
        Some((offsets.first()?.as_u64()?, offsets.get(1)?.as_u64()?))
    };
    let mut tensors: Vec<(u64, u64)> = header.values().filter_map(range).collect();
    tensors.sort_unstable();
    ensure!(!tensors.is_empty(), "{} has no tensors", path.display());
    let (mut buffer, mut end) = (Vec::new(), 0);
    for (begin, next) in tensors {
        ensure!(begin == end && next >= begin, "{} has a hole at {end}", path.display());
        buffer.resize((next - begin) as usize, 0);
        file.read_exact_at(&mut buffer, 8 + length + begin)?;
        end = next;
    }
    let whole = file.metadata()?.len();
    ensure!(whole == 8 + length + end, "{} has {whole} bytes and ends at {end}", path.display());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_that_was_written_loads_and_one_that_was_cut_does_not() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(NAME);
        write(&path, 1_000_000).unwrap();
        load(&path).unwrap();
        let whole = std::fs::metadata(&path).unwrap().len();
        assert!((990_000..1_010_000).contains(&whole), "{whole}");
        File::options().write(true).open(&path).unwrap().set_len(whole - 1).unwrap();
        assert!(load(&path).is_err());
    }
}
