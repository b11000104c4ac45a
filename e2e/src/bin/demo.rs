//! `make demo`: the main job, on this machine, with real parts.
//!
//! A real S3 server on loopback, the CSI plugin, the agent as a user without rights, twenty volumes in twenty pods.
//! Two of the pods read everything cold and then warm while their workers are killed, and compare every byte.

use anyhow::{Context, Result, bail};
use clap::Parser;
use comfy_table::{ContentArrangement, Table, presets};
use e2e::node::{AgentOptions, Mounted, Node, Protocol};
use e2e::oracle::Verified;
use e2e::pod::Pod;
use e2e::processes;
use e2e::tree::{Shape, Tree};
use indicatif::{HumanBytes, ProgressBar, ProgressStyle};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// Serves real files from a real server into twenty pods, kills workers meanwhile, shows a table (root).
#[derive(Parser)]
struct Options {
    /// Real files to serve; default: the crate sources that Cargo has on this machine.
    #[arg(long)]
    files: Option<PathBuf>,
    /// At most this many of them.
    #[arg(long, default_value_t = 8000)]
    max_files: usize,
    /// Size of the one large file.
    #[arg(long, default_value = "1Gi")]
    large: String,
    /// Volumes, one pod each.
    #[arg(long, default_value_t = 20)]
    volumes: usize,
    /// What the server speaks.
    #[arg(long, value_enum, default_value = "s3")]
    store: Protocol,
    /// Workers killed during each reading.
    #[arg(long, default_value_t = 5)]
    kills: usize,
}

/// One line of the table.
struct Row {
    reading: String,
    verified: Verified,
    fetched: u64,
    requests: u64,
    kills: usize,
    longest_heal: Duration,
}

fn main() -> ExitCode {
    run(&Options::parse()).unwrap_or_else(|error| {
        eprintln!("demo: {error:#}");
        ExitCode::FAILURE
    })
}

fn run(options: &Options) -> Result<ExitCode> {
    let large_bytes = volume::parse_bytes(&options.large).context("--large: write a size such as 1Gi")?;
    anyhow::ensure!(options.volumes >= 2, "--volumes: two of them are read, so at least 2");
    let mut node = Node::start(AgentOptions::with_store(options.store))?;
    println!(
        "{} server on {}, agent pid {}, CSI plugin pid {}",
        options.store.name().to_uppercase(),
        node.server.endpoint(),
        node.agent().pid(),
        node.plugin().pid()
    );

    let bar = spinner("gathering real files");
    let files = gather(options, &node.server.dir().join("files"), &bar)?;
    node.server.rescan()?;
    bar.finish_and_clear();
    let bar = spinner("writing the large file");
    let shape = Shape { directories: 0, files: 0, small_bytes: 0, large: 1, large_bytes };
    let large = Tree::generated("large/", shape);
    node.server.add(&large, "large")?;
    bar.finish_and_clear();
    println!(
        "{} files of {} and one file of {}",
        files.files.len(),
        HumanBytes(files.bytes()),
        HumanBytes(large.bytes())
    );

    let bar = ProgressBar::new(options.volumes as u64);
    bar.set_style(style("CreateVolume, NodePublishVolume [{bar:30}] {pos}/{len} {msg}")?);
    let mut mounted = Vec::new();
    let mut times = Vec::new();
    for k in 0..options.volumes {
        let prefix = if k % 2 == 0 { "files" } else { "large" };
        let volume = node.create(&format!("demo-{k}"), prefix, &[("freshness", "static")])?;
        let begun = Instant::now();
        mounted.push(node.publish(&volume, &format!("pod-{k}"))?);
        times.push(begun.elapsed());
        bar.inc(1);
    }
    bar.finish_and_clear();
    times.sort();
    println!(
        "{} volumes published: NodePublishVolume median {:.0} ms, longest {:.0} ms",
        mounted.len(),
        ms(times[times.len() / 2]),
        ms(times[times.len() - 1])
    );
    // Every volume has its pod; two of them read.
    let pods = mounted.iter().map(|m| node.pod(m)).collect::<Result<Vec<_>>>()?;
    let mut rows = Vec::new();
    for (name, k, tree) in [("small files", 0, &files), ("large file", 1, &large)] {
        for temperature in ["cold", "warm"] {
            let reading = format!("{name}, {temperature}");
            rows.push(read(&node, &mounted[k], &pods[k], tree, reading, options.kills)?);
        }
    }
    let right = show(&rows, &files, &large);
    for pod in pods {
        pod.end()?;
    }
    node.finish()?;
    println!("Everything was unpublished and removed; nothing is left mounted or running.");
    Ok(if right { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Reads the whole tree in the pod, byte by byte, and kills the volume's worker meanwhile.
fn read(
    node: &Node,
    mounted: &Mounted,
    pod: &Pod,
    tree: &Tree,
    reading: String,
    kills: usize,
) -> Result<Row> {
    node.server.reset()?;
    let heals_before = node.agent().heals()?.len();
    let bar = spinner(&reading);
    let mut running = pod.start_verify(tree, 2, 0)?;
    let mut killed = 0;
    let mut pause = Instant::now() + Duration::from_millis(20);
    while !running.is_finished() {
        bar.tick();
        if killed < kills && Instant::now() >= pause {
            let workers = node.agent().serving()?;
            if let Some((_, pid)) = workers.iter().find(|(volume, _)| *volume == mounted.id) {
                processes::kill_child(*pid, node.agent().pid())?;
                killed += 1;
            }
            pause = Instant::now() + Duration::from_millis(150);
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    let verified = running.finish(Duration::from_secs(60))?;
    bar.finish_and_clear();
    let stats = node.server.stats()?;
    let heals = node.agent().heals()?;
    let mine = heals.iter().take(heals.len() - heals_before);
    let longest = mine.filter(|h| h.volume_id == mounted.id).map(|h| h.duration_us).max().unwrap_or(0);
    Ok(Row {
        reading,
        verified,
        fetched: stats.bytes_get,
        requests: stats.total(),
        kills: killed,
        longest_heal: Duration::from_micros(longest),
    })
}

fn show(rows: &[Row], files: &Tree, large: &Tree) -> bool {
    let mut table = Table::new();
    table.load_style(presets::UTF8_HORIZONTAL_ONLY).set_content_arrangement(ContentArrangement::Dynamic);
    table.set_header([
        "reading",
        "files",
        "bytes",
        "time",
        "rate",
        "fetched",
        "of size",
        "requests",
        "hits",
        "workers killed",
        "longest heal",
        "failed calls",
    ]);
    let mut right = true;
    for row in rows {
        let v = &row.verified;
        let whole = if row.reading.starts_with("small") { files } else { large };
        let complete = v.failed == 0 && v.bytes == whole.bytes();
        right &= complete;
        table.add_row([
            row.reading.clone(),
            v.files.to_string(),
            HumanBytes(v.bytes).to_string(),
            format!("{:.2} s", v.seconds),
            format!("{:.0} MB/s", v.bytes as f64 / v.seconds.max(1e-9) / 1e6),
            HumanBytes(row.fetched).to_string(),
            format!("{:.2}×", row.fetched as f64 / whole.bytes().max(1) as f64),
            row.requests.to_string(),
            format!("{:.0} %", 100.0 * (1.0 - (row.fetched as f64 / v.bytes.max(1) as f64).min(1.0))),
            row.kills.to_string(),
            format!("{:.1} ms", ms(row.longest_heal)),
            v.failed.to_string(),
        ]);
    }
    println!("{table}");
    for row in rows {
        for failure in row.verified.failures.iter().take(5) {
            println!("  {}: {failure}", row.reading);
        }
    }
    match right {
        true => println!("Every byte of every file was compared with its original: all right."),
        false => println!("NOT everything was right: see above."),
    }
    right
}

/// Links (or copies) real files into the bucket's directory.
fn gather(options: &Options, bucket: &Path, bar: &ProgressBar) -> Result<Tree> {
    let from = match &options.files {
        Some(dir) => dir.clone(),
        None => cargo_sources()?,
    };
    let found = Tree::scan(&from)?;
    let chosen: Vec<_> = found.files.into_iter().filter(|f| f.size > 0).take(options.max_files).collect();
    anyhow::ensure!(!chosen.is_empty(), "{} holds no files: give --files another directory", from.display());
    for file in &chosen {
        let to = bucket.join(&file.path);
        std::fs::create_dir_all(to.parent().context("a file has a directory")?)?;
        let original = from.join(&file.path);
        // The pods compare as a user without rights: what that user may not read is copied.
        let readable = original.metadata().is_ok_and(|m| m.mode() & 0o004 != 0);
        if !readable || std::fs::hard_link(&original, &to).is_err() {
            std::fs::copy(&original, &to).with_context(|| original.display().to_string())?;
            std::fs::set_permissions(&to, std::fs::Permissions::from_mode(0o644))?;
        }
        bar.tick();
    }
    Tree::scan(bucket)
}

fn cargo_sources() -> Result<PathBuf> {
    let home = std::env::var_os("CARGO_HOME").map(PathBuf::from);
    let home = home.or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".cargo")));
    match home.map(|h| h.join("registry/src")).filter(|p| p.is_dir()) {
        Some(dir) => Ok(dir),
        None => bail!("Cargo has no crate sources on this machine: give --files a directory of real files"),
    }
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

fn style(template: &str) -> Result<ProgressStyle> {
    Ok(ProgressStyle::with_template(template).context("progress style")?.progress_chars("=> "))
}

fn spinner(what: &str) -> ProgressBar {
    let bar = ProgressBar::new_spinner();
    bar.set_message(what.to_owned());
    bar.enable_steady_tick(Duration::from_millis(100));
    bar
}
