//! The benchmark's rows, tiny: that they still measure. Numbers are `make bench`'s; here none is judged.

use anyhow::{Context, Result, ensure};
use e2e::bench::{Options, Record, Size, markdown, run, workloads};
use e2e::node::Protocol;
use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

/// Those whose parts no unit test holds, and that take little.
const ROWS: [&str; 6] = [
    "sequential cold, loopback",
    "sequential cold, 20 ms link, https",
    "random 4 KiB, kept, 1 thread",
    "first byte of 10 GiB, after open",
    "publish of a known source, alone",
    "checkpoint, back, until the store has it",
];

#[test]
fn rows_are_measured_beside_their_baselines_and_the_record_reads_back() -> Result<()> {
    let size = Size {
        file_bytes: 8 << 20,
        random_ms: 100,
        // Larger than what is sent in one piece.
        checkpoint_bytes: 24 << 20,
        ..Size::scaled(0.0, 1, 0)
    };
    let dir = tempfile::tempdir()?;
    let path = dir.path().join("bench.json");
    let to = path.clone();
    let options = Options {
        size,
        store: Protocol::S3,
        peers: false,
        only: ROWS.map(str::to_owned).to_vec(),
        without: Vec::new(),
    };
    run(options, move |record| record.write(&to))?;
    let record = Record::read(&path)?;
    println!("{}", markdown(&record, &workloads(size)));
    let of = |row: &str, who: &str| {
        let found = record.samples.iter().find(|s| s.workload == row && s.who == who);
        found.with_context(|| format!("{row} has no {who}: {:?}", record.left_out))
    };
    for row in ROWS {
        let sample = of(row, "millpond")?;
        ensure!(sample.value.is_finite() && sample.value > 0.0 && sample.memory > 0, "{sample:?}");
    }
    let cold = of("sequential cold, loopback", "millpond")?;
    ensure!(cold.fetched_bytes >= size.file_bytes, "{cold:?}");
    of("random 4 KiB, kept, 1 thread", "cache file")?;
    let stored = of("checkpoint, back, until the store has it", "millpond")?;
    ensure!(stored.sent_bytes >= size.checkpoint_bytes && stored.fetched_bytes == 0, "{stored:?}");
    of("checkpoint, back, until the store has it", "native")?;
    // What the machine lacks is said, and nothing stands in its place.
    let lacks = |what: &str| record.left_out.iter().any(|why| why.contains(what));
    ensure!(lacks("does nothing") || of("random 4 KiB, kept, 1 thread", "passthrough").is_ok(), "{record:?}");
    for (row, who) in [
        ("sequential cold, loopback", "curl"),
        ("sequential cold, loopback", "8 curls"),
        ("sequential cold, 20 ms link, https", "32 curls"),
        ("checkpoint, back, until the store has it", "8 uploads"),
    ] {
        match of(row, who) {
            Ok(sample) => ensure!(sample.value > 0.0 && sample.cpu_s > 0.0, "{sample:?}"),
            Err(error) => ensure!(lacks("curl is not installed"), "{error:#}"),
        }
    }

    let (code, said) = compare(&path, &path)?;
    ensure!(
        code == Some(0) && said.contains("| sequential cold, loopback | millpond | MB/s |"),
        "{code:?}: {said}"
    );
    let text = std::fs::read(&path)?;
    let cut = dir.path().join("cut.json");
    std::fs::write(&cut, &text[..text.len() / 2])?;
    let (code, said) = compare(&path, &cut)?;
    ensure!(code == Some(2) && said.contains("was it cut?"), "{code:?}: {said}");
    Ok(())
}

#[test]
fn with_each_other_store_the_cold_rows_are_measured_beside_curl_and_the_rest_is_left_out_with_a_word()
-> Result<()> {
    let size = Size { file_bytes: 8 << 20, ..Size::scaled(0.0, 1, 0) };
    for store in Protocol::ALL.into_iter().filter(|store| *store != Protocol::S3) {
        let options = Options { size, store, peers: true, only: Vec::new(), without: Vec::new() };
        let record = run(options, |_| Ok(())).with_context(|| store.to_string())?;
        ensure!(record.store == store, "{record:?}");
        let rows: BTreeSet<&str> = record.samples.iter().map(|s| s.workload.as_str()).collect();
        let wanted = ["sequential cold, loopback", "small files, cold, loopback, 4 threads"];
        ensure!(rows == BTreeSet::from(wanted), "{store}: {rows:?}");
        let lacks = |what: &str| record.left_out.iter().any(|why| why.contains(what));
        ensure!(lacks("every row but") && lacks("peers"), "{:?}", record.left_out);
        for row in wanted {
            let of = |who: &str| record.samples.iter().any(|s| s.workload == row && s.who == who);
            ensure!(of("millpond"), "{row} has no millpond");
            ensure!(of("curl") || lacks("curl is not installed"), "{row} has no curl: {:?}", record.left_out);
        }
    }
    Ok(())
}

/// How `bench compare` ends, and what it says.
fn compare(a: &Path, b: &Path) -> Result<(Option<i32>, String)> {
    let output = Command::new(env!("CARGO_BIN_EXE_bench")).arg("compare").args([a, b]).output()?;
    let said = [output.stdout, output.stderr].concat();
    Ok((output.status.code(), String::from_utf8_lossy(&said).into_owned()))
}
