//! One file to which programs of two pods append records.

use crate::random::Random;
use anyhow::{Context, Result, ensure};
use std::fs::OpenOptions;
use std::io::Write;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

const RECORD: usize = 64;
const PODS: usize = 2;

/// Returns how many.
pub(super) fn append(path: &Path, pod: usize, seed: u64, over: &AtomicBool) -> Result<u64> {
    let mut random = Random(seed);
    let open = || {
        OpenOptions::new()
            .append(true)
            .create(true)
            .open(path)
            .with_context(|| format!("open {}", path.display()))
    };
    let mut file = open()?;
    let mut number = 0;
    while !over.load(Relaxed) {
        let record = format!("{pod} {number:<width$}\n", width = RECORD - 3);
        let wrote =
            file.write(record.as_bytes()).with_context(|| format!("pod {pod}: append record {number}"))?;
        ensure!(wrote == RECORD, "pod {pod}: {wrote} bytes of record {number} were written");
        number += 1;
        if random.one_in(50) {
            file.sync_all().with_context(|| format!("pod {pod}: fsync after record {number}"))?;
        }
        if random.one_in(100) {
            drop(std::mem::replace(&mut file, open()?));
        }
        std::thread::sleep(Duration::from_micros(random.below(4000)));
    }
    file.sync_all().with_context(|| format!("pod {pod}: the last fsync"))?;
    Ok(number)
}

/// Is each record there once, whole, and after those that its pod wrote before?
pub(super) fn judge(bytes: &[u8]) -> Result<()> {
    let mut next = [0; PODS];
    ensure!(bytes.len().is_multiple_of(RECORD), "{} bytes are no whole records", bytes.len());
    for (at, record) in bytes.chunks(RECORD).enumerate() {
        let text = String::from_utf8_lossy(record);
        let mut words = text.split_whitespace();
        let mut number = || words.next().and_then(|word| word.parse::<u64>().ok());
        let (pod, number) = (number(), number());
        let (Some(pod), Some(number)) = (pod.filter(|pod| *pod < PODS as u64), number) else {
            anyhow::bail!("record {at} is none: {text:?}");
        };
        let expected = &mut next[pod as usize];
        ensure!(number == *expected, "record {at}: pod {pod} has {number} where {expected} follows");
        *expected += 1;
    }
    Ok(())
}
