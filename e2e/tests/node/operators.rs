//! What a person at the node has in hand: the command line, the metrics page; and what the agent leaves of the disks.

use crate::disks::node_on;
use crate::{node_with, promises};
use anyhow::{Context, Result, bail, ensure};
use e2e::clock::wait_until;
use e2e::mountinfo;
use e2e::node::{AgentOptions, BUCKET, Node, secrets, small_disk};
use e2e::scenario::listing;
use e2e::tree::{Shape, Tree};
use rustix::process::Signal;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::Duration;
use testkit::faults::{Fault, Rule, Script};
use testkit::process::Process;

const PATIENCE: Duration = Duration::from_secs(30);

/// One run of `millpond` against this node's agent.
pub(crate) fn millpond(node: &Node, arguments: &[&str]) -> Result<Output> {
    let mut command = Command::new(node.places().bin("millpond"));
    command.arg("--api").arg(node.places().agent_socket()).args(arguments);
    let output = command.stdin(Stdio::null()).output()?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    println!("millpond {arguments:?}: {}\n{}{}", output.status, text(&output.stdout), text(&output.stderr));
    Ok(output)
}

pub(crate) fn json(output: &Output) -> Result<Value> {
    serde_json::from_slice(&output.stdout).context("the output is not JSON")
}

#[test]
fn a_laptop_mounts_a_bucket_reads_it_and_unmounts() -> Result<()> {
    let (node, tree) = node_with("set")?;
    let (dir, cache) = (node.places().root().join("laptop"), node.places().cache().join("laptop"));
    fs::create_dir(&dir)?;
    let mut command = Command::new(node.places().bin("millpond"));
    command.args(["mount", "--foreground", "--quota", "1Gi", "-o", "allowHttp=true", "-o"]);
    command.arg(format!("endpoint={}", node.server.endpoint())).arg("--cache").arg(&cache);
    command.arg(format!("s3://{BUCKET}/set")).arg(&dir);
    let [(_, id), (_, secret)] = secrets();
    command.env("AWS_ACCESS_KEY_ID", id).env("AWS_SECRET_ACCESS_KEY", secret).env_remove("AWS_SESSION_TOKEN");
    let log = fs::File::create(node.places().log("laptop"))?;
    let mut serving = Process::spawn(command.stdout(Stdio::piped()).stderr(log))?;
    let out = serving.child().stdout.take().context("a piped output")?;
    let mut line = String::new();
    BufReader::new(out).read_line(&mut line)?;
    ensure!(line.starts_with("serving s3://"), "it said {line:?}");
    for _ in 0..2 {
        for file in &tree.files {
            let bytes = fs::read(dir.join(&file.path)).with_context(|| file.path.clone())?;
            assert_eq!(bytes.len() as u64, file.size, "{}", file.path);
            assert_eq!(tree.reference(file)?.first_difference(0, &bytes), None, "{}", file.path);
        }
    }
    assert_eq!(
        node.server.stats()?.bytes_get,
        tree.files.iter().map(|f| f.size).sum::<u64>(),
        "fetched once"
    );
    let dir = dir.to_str().context("a path of ours")?;
    let twice = millpond(&node, &["mount", &format!("s3://{BUCKET}/set"), dir, "--foreground"])?;
    assert!(!twice.status.success() && String::from_utf8_lossy(&twice.stderr).contains("mounted already"));
    assert!(millpond(&node, &["umount", dir])?.status.success());
    let status = serving.wait_for_exit(Duration::from_secs(30))?;
    assert!(status.success(), "it ended with {status}");
    assert_eq!(mountinfo::below(Path::new(dir))?, []);
    assert_eq!(promises::names(Path::new(dir))?.len(), 0);
    let nothing = millpond(&node, &["umount", dir])?;
    assert!(
        !nothing.status.success()
            && String::from_utf8_lossy(&nothing.stderr).contains("nothing of Millpond's")
    );
    node.finish()
}

#[test]
fn status_warm_evict_and_doctor_tell_the_truth() -> Result<()> {
    let (mut node, tree) = node_with("set")?;
    let mounted = node.volume("v", "set", &[("profile", "large")])?;
    let target = mounted.target.to_str().context("a path of ours")?;
    let bytes: u64 = tree.files.iter().map(|f| f.size).sum();

    let warm = millpond(&node, &["warm", target])?;
    let said = String::from_utf8_lossy(&warm.stdout).into_owned();
    let files = tree.files.len();
    assert!(warm.status.success() && said.starts_with(&format!("{files} of {files} files")), "{said}");
    node.server.reset()?;
    node.pod(&mounted)?.verify(&tree, 2)?.ensure_all(&tree)?;
    assert_eq!(node.server.stats()?.of("GetObject"), 0, "what is warm was fetched again");

    let status = json(&millpond(&node, &["status", "--output", "json"])?)?;
    let volume = &status["volumes"][0];
    assert_eq!(
        (&volume["volumeId"], &volume["target"]),
        (&Value::from(mounted.id.as_str()), &Value::from(target))
    );
    assert_eq!(
        (&volume["worker"]["state"], &volume["mode"]),
        (&"serving".into(), &"passthrough".into()),
        "{volume}"
    );
    assert_eq!(status["agent"]["pid"], node.agent().pid());
    assert_eq!(status["agent"]["brokerConnected"], true);
    let cached = status["cache"]["tiers"][0]["bytes"].as_u64().context("bytes of the tier")?;
    assert!(cached >= bytes && cached < 2 * bytes, "{cached} of {bytes}");
    let table = millpond(&node, &["status"])?;
    assert!(String::from_utf8_lossy(&table.stdout).contains(&mounted.id));

    // The last heals, and how each worker ended.
    node.signal_worker(node.worker_of(&mounted.id, PATIENCE)?, Signal::KILL)?;
    let recorded = || node.agent().heals().is_ok_and(|heals| !heals.is_empty());
    assert!(wait_until(PATIENCE, recorded), "no heal was recorded");
    let status = json(&millpond(&node, &["status", "--output", "json"])?)?;
    let heal = &status["heals"][0];
    let is = |key: &str, value: Value| assert_eq!(heal[key], value, "{heal}");
    is("volumeId", mounted.id.as_str().into());
    is("level", 1.into());
    is("cause", "signal".into());
    is("ended", "signal: 9 (SIGKILL)".into());
    let table = millpond(&node, &["status"])?;
    assert!(String::from_utf8_lossy(&table.stdout).contains("signal: 9 (SIGKILL)"));

    let one = format!("{target}/large0");
    let evicted = millpond(&node, &["evict", &one])?;
    assert!(String::from_utf8_lossy(&evicted.stdout).starts_with("1 files, "));
    node.pod(&mounted)?.verify(&tree, 2)?.ensure_all(&tree)?;
    let refetched = node.server.stats()?.bytes_get;
    let size = tree.files.iter().find(|f| f.path == "large0").context("it is in the tree")?.size;
    assert_eq!(refetched, size, "one file was evicted");
    assert!(millpond(&node, &["evict", "--all"])?.status.success());
    let empty = || node.agent().cache().is_ok_and(|c| c.scopes.iter().all(|s| s.bytes == 0));
    assert!(wait_until(Duration::from_secs(20), empty), "{:?}", node.agent().cache()?);
    let elsewhere = millpond(&node, &["warm", "/tmp"])?;
    assert!(!elsewhere.status.success());

    // Nothing that this node lacks may be called broken, but an endpoint where no store listens is.
    let doctor = |endpoint: &str| millpond(&node, &["doctor", "--output", "json", "--endpoint", endpoint]);
    let fine = doctor(&node.server.endpoint())?;
    let findings = json(&fine)?;
    let findings = findings.as_array().context("a list of findings")?;
    let broken: Vec<_> = findings.iter().filter(|f| f["grade"] == "broken").collect();
    assert!(fine.status.success() && broken.is_empty(), "{broken:?}");
    for check in ["kernel", "/dev/fuse", "node agent", "mount broker", "endpoint 127.0.0.1"] {
        assert!(findings.iter().any(|f| f["check"] == check), "{check} was not looked at");
    }
    let of_source = |findings: &Value| -> Result<(String, String)> {
        let findings = findings.as_array().context("a list of findings")?;
        let found = findings
            .iter()
            .find(|f| f["check"].as_str().is_some_and(|check| check.starts_with("source s3://data/")));
        let found = found.context("no source was looked at")?;
        Ok((found["grade"].to_string(), found["saw"].to_string()))
    };
    let (grade, saw) = of_source(&json(&fine)?)?;
    assert!(grade.contains("fine") && saw.contains("may list and read"), "{grade}: {saw}");
    node.server.set_faults(&Script {
        seed: 0,
        rules: vec![Rule::always(Fault::Status { code: 403, retry_after_s: None })],
    })?;
    let (grade, saw) = of_source(&json(&millpond(&node, &["doctor", "--output", "json"])?)?)?;
    assert!(grade.contains("broken") && saw.contains("check the secret"), "{grade}: {saw}");
    node.server.no_faults()?;
    let ill = doctor("http://127.0.0.1:1")?;
    let findings = json(&ill)?;
    let ailing = findings.as_array().context("a list of findings")?.iter().find(|f| f["grade"] == "broken");
    assert!(
        !ill.status.success() && ailing.is_some_and(|f| f["todo"].as_str().is_some_and(|t| !t.is_empty()))
    );
    node.stop_agent()?;
    for command in ["status", "doctor"] {
        let without = millpond(&node, &[command])?;
        assert!(!without.status.success(), "{command} without an agent");
    }
    node.start_agent()?;
    node.unpublish(&mounted)?;
    node.finish()
}

/// The metrics page, whose port the agent's log tells.
fn metrics(node: &Node) -> Result<String> {
    let log = fs::read_to_string(node.places().log("node-agent"))?;
    let line = log.lines().rfind(|l| l.contains("metrics page")).context("the log tells the address")?;
    let address = line.rsplit("address=").next().unwrap_or_default();
    let address: String = address.chars().take_while(|c| c.is_ascii_digit() || ".:".contains(*c)).collect();
    let mut stream = TcpStream::connect(&address).with_context(|| format!("{address:?} of {line}"))?;
    write!(stream, "GET /metrics HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n\r\n")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    let (head, body) = answer.split_once("\r\n\r\n").context("an HTTP answer")?;
    ensure!(head.starts_with("HTTP/1.1 200") && head.contains("application/openmetrics-text"), "{head}");
    Ok(body.to_owned())
}

/// Reads a page as the OpenMetrics text format 1.0 demands it; samples by name and labels.
fn parse(page: &str) -> Result<BTreeMap<String, f64>> {
    let body = page.strip_suffix("# EOF\n").context("the page does not end with # EOF")?;
    let mut types = BTreeMap::new();
    let mut units = BTreeMap::new();
    let (mut samples, mut finished) = (BTreeMap::new(), BTreeSet::new());
    let mut current = String::new();
    for line in body.lines() {
        let name_of = |text: &str| -> Result<String> {
            let name: String =
                text.chars().take_while(|c| c.is_ascii_alphanumeric() || *c == '_' || *c == ':').collect();
            ensure!(!name.is_empty() && !name.starts_with(|c: char| c.is_ascii_digit()), "no name: {line}");
            Ok(name)
        };
        if let Some(rest) = line.strip_prefix("# ") {
            let words: Vec<&str> = rest.splitn(3, ' ').collect();
            let [keyword, family, value] = words[..] else { bail!("half a comment: {line}") };
            if family != current {
                ensure!(finished.insert(current), "a family in two places: {line}");
                current = family.to_owned();
            }
            match keyword {
                "HELP" => ensure!(!value.is_empty(), "no help: {line}"),
                "TYPE" => ensure!(
                    types.insert(family.to_owned(), value.to_owned()).is_none(),
                    "typed twice: {line}"
                ),
                "UNIT" => drop(units.insert(family.to_owned(), value.to_owned())),
                _ => bail!("unknown keyword: {line}"),
            }
            continue;
        }
        let name = name_of(line)?;
        let kind = types.get(&current).with_context(|| format!("a sample before its type: {line}"))?;
        let suffix =
            name.strip_prefix(&current).with_context(|| format!("a sample outside its family: {line}"))?;
        let allowed: &[&str] = match kind.as_str() {
            "counter" => &["_total", "_created"],
            "gauge" => &[""],
            "histogram" => &["_bucket", "_sum", "_count", "_created"],
            "info" => &["_info"],
            _ => bail!("type {kind}: {line}"),
        };
        ensure!(allowed.contains(&suffix), "a {kind} has no {suffix:?}: {line}");
        let (series, value) = line.rsplit_once(' ').with_context(|| format!("no value: {line}"))?;
        let labels = &series[name.len()..];
        if !labels.is_empty() {
            let inner = labels.strip_prefix('{').and_then(|l| l.strip_suffix('}'));
            let inner = inner.with_context(|| format!("labels: {line}"))?;
            ensure!(inner.split("\",").all(|pair| pair.contains("=\"")), "labels: {line}");
        }
        let value: f64 = value.parse().with_context(|| format!("no number: {line}"))?;
        ensure!(kind != "counter" || value >= 0.0, "a counter below 0: {line}");
        ensure!(samples.insert(series.to_owned(), value).is_none(), "twice: {line}");
    }
    for (family, unit) in units {
        ensure!(family.ends_with(&format!("_{unit}")), "{family} is counted in {unit} and does not say so");
    }
    Ok(samples)
}

#[test]
fn the_metrics_page_is_openmetrics_and_counts_what_happened() -> Result<()> {
    let (mut node, tree) = node_with("set")?;
    let mounted = node.volume("v", "set", &[("profile", "large")])?;
    for _ in 0..2 {
        node.pod(&mounted)?.verify(&tree, 2)?.ensure_all(&tree)?;
    }
    let bytes: u64 = tree.files.iter().map(|f| f.size).sum();
    // Workers tell what they counted once a second.
    let shown = || metrics(&node).is_ok_and(|page| page.contains("\nmillpond_reads_total{"));
    assert!(wait_until(Duration::from_secs(20), shown), "{}", metrics(&node)?);
    let page = metrics(&node)?;
    println!("{page}");
    let samples = parse(&page).with_context(|| page.clone())?;
    let counted = *samples.get("millpond_store_received_bytes_total").with_context(|| page.clone())?;
    assert!(counted >= bytes as f64, "{counted} of {bytes} bytes");
    assert!(samples.keys().all(|series| series.starts_with("millpond_")), "{page}");
    for (series, value) in samples.iter().filter(|(series, _)| series.contains("le=\"+Inf\"")) {
        let count = series.replace("_bucket", "_count");
        let count =
            count.replace("le=\"+Inf\",", "").replace(",le=\"+Inf\"", "").replace("{le=\"+Inf\"}", "");
        assert_eq!(samples.get(&count), Some(value), "{series} and {count}");
    }
    node.finish()
}

#[test]
fn a_large_directory_is_listed_once_completely_and_is_warm_for_the_next_mount() -> Result<()> {
    let mut node = Node::start(AgentOptions::default())?;
    let report = listing::run(&mut node, 50_000)?;
    println!("{report}");
    // 50 pages of the directory; of the root one at publish and one for the first look-up.
    assert_eq!(report.list_requests, 52, "{report}");
    node.finish()
}

#[test]
fn the_cache_keeps_its_disk_above_the_floor_whatever_it_is_fed() -> Result<()> {
    const DISK_MB: u64 = 128;
    let mut node = node_on(|node, uid| small_disk(node.places(), DISK_MB, uid))?;
    let disk = node.options().tiers[0].paths[0].clone();
    // The defaults of a node: kubelet evicts pods below 15 % of the bytes and 10 % of the inodes.
    node.stop_agent()?;
    node.options().tiers[0].min_free_percent = 15;
    node.start_agent()?;
    let shape = Shape { directories: 8, files: 100, small_bytes: 300_000, large: 4, large_bytes: 20 << 20 };
    let tree = Tree::generated("", shape);
    node.server.add(&tree, "set")?;
    let total: u64 = tree.files.iter().map(|f| f.size).sum();
    ensure!(total > 2 * (DISK_MB << 20), "the tree must not fit");
    let free = || -> Result<(f64, f64)> {
        let s = rustix::fs::statvfs(&disk)?;
        let percent = |free: u64, all: u64| 100.0 * free as f64 / all.max(1) as f64;
        Ok((percent(s.f_bavail, s.f_blocks), percent(s.f_favail, s.f_files)))
    };
    for profile in ["large", "small"] {
        let mounted = node.volume(profile, "set", &[("profile", profile)])?;
        let pod = node.pod(&mounted)?;
        let mut lowest = (100.0_f64, 100.0_f64);
        for _ in 0..2 {
            let reader = pod.start_verify(&tree, 2, 1)?;
            // While it reads: what is written goes through the same door.
            for _ in 0..50 {
                let (bytes, inodes) = free()?;
                lowest = (lowest.0.min(bytes), lowest.1.min(inodes));
                std::thread::yield_now();
            }
            reader.finish(Duration::from_secs(120))?.ensure_all(&tree)?;
        }
        // Another program needs room, no more at once than the floor keeps free: the cache gives way.
        let above = || free().is_ok_and(|(bytes, inodes)| bytes >= 15.0 && inodes >= 10.0);
        let hogs: Vec<_> = (0..3).map(|k| disk.join(format!("hog{k}"))).collect();
        // What readers have under way may take the room below the floor for a moment.
        assert!(wait_until(Duration::from_secs(30), above), "profile {profile}: {:?} % free", free()?);
        for hog in &hogs {
            fs::write(hog, vec![1; 12 << 20])?;
            assert!(wait_until(Duration::from_secs(30), above), "profile {profile}: {:?} % free", free()?);
        }
        let cached = node.agent().cache()?.tiers[0].bytes;
        println!(
            "profile {profile}: {lowest:?} % free at the least, {:?} with another's 36 MiB, {cached} bytes cached",
            free()?
        );
        assert!(cached > 0, "the cache gave everything away");
        pod.verify(&tree, 2)?.ensure_all(&tree)?;
        assert!(wait_until(Duration::from_secs(30), above), "profile {profile}: {:?} % free", free()?);
        hogs.iter().try_for_each(fs::remove_file)?;
        drop(pod);
        node.unpublish(&mounted)?;
    }
    node.finish()
}
