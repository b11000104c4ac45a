//! The CSI community's own test suite, in full, against the real plugin, agent, worker and FUSE.

use crate::node_with;
use anyhow::{Context, Result, ensure};
use e2e::node::{Node, secrets};
use std::path::{Path, PathBuf};
use std::process::Command;

const SUITE: &str = "github.com/kubernetes-csi/csi-test/v5/cmd/csi-sanity@v5.5.0";
/// Tests in 5.5; a suite that shrinks unnoticed would prove less.
const TESTS: usize = 90;

#[test]
fn csi_sanity_passes_in_full() -> Result<()> {
    let suite = install()?;
    let (node, _tree) = node_with("set")?;
    let files = node.places().root().join("sanity");
    std::fs::create_dir(&files)?;
    let (secrets_file, parameters, report) =
        (files.join("secrets.yaml"), files.join("parameters.yaml"), files.join("report.xml"));
    let lines = secrets().map(|(k, v)| format!("  {k}: {v}\n")).concat();
    std::fs::write(&secrets_file, format!("NodePublishVolumeSecret:\n{lines}"))?;
    let lines: String = node.parameters("set", &[]).iter().map(|(k, v)| format!("{k}: {v:?}\n")).collect();
    std::fs::write(&parameters, lines)?;
    let log = std::fs::File::create(node.places().log("csi-sanity"))?;
    let status = Command::new(suite)
        .arg("--csi.endpoint")
        .arg(node.places().csi_socket())
        .arg("--csi.mountdir")
        .arg(node.places().kubelet().join("sanity-mount"))
        .arg("--csi.stagingdir")
        .arg(node.places().kubelet().join("sanity-staging"))
        .arg("--csi.secrets")
        .arg(&secrets_file)
        .arg("--csi.testvolumeparameters")
        .arg(&parameters)
        .arg("--ginkgo.junit-report")
        .arg(&report)
        .args(["--ginkgo.no-color", "--ginkgo.v"])
        .stdout(log.try_clone()?)
        .stderr(log)
        .status()?;
    let cases = cases(&std::fs::read_to_string(&report).context("csi-sanity wrote no report")?);
    let count = |wanted: &str| cases.iter().filter(|c| c.status == wanted).count();
    for case in cases.iter().filter(|c| c.status != "passed") {
        println!("{}: {}\n    {}", case.status, case.name, case.reason);
    }
    let (passed, skipped) = (count("passed"), count("skipped"));
    println!("csi-sanity: {passed} passed, {skipped} skipped, {} failed", cases.len() - passed - skipped);
    if !status.success() || passed + skipped != cases.len() {
        let log = std::fs::read_to_string(node.places().log("csi-sanity"))?;
        println!("{}", log.lines().filter(|l| !l.trim().is_empty()).collect::<Vec<_>>().join("\n"));
        anyhow::bail!("csi-sanity failed: {status}");
    }
    ensure!(cases.len() >= TESTS, "csi-sanity ran only {} tests", cases.len());
    finish(node)
}

/// The suite removes what it made; the harness checks that.
fn finish(node: Node) -> Result<()> {
    assert_eq!(node.fuse_mounts()?, []);
    node.finish()
}

struct Case {
    name: String,
    status: String,
    reason: String,
}

/// What is needed of a JUnit report, without an XML library: ginkgo writes one element per line.
fn cases(report: &str) -> Vec<Case> {
    let attribute = |element: &str, name: &str| {
        let from = element.find(&format!(" {name}=\""))? + name.len() + 3;
        let text = &element[from..from + element[from..].find('"')?];
        Some(
            text.replace("&#34;", "\"")
                .replace("&#39;", "'")
                .replace("&lt;", "<")
                .replace("&gt;", ">")
                .replace("&amp;", "&"),
        )
    };
    let mut all = Vec::new();
    for element in report.split("<testcase").skip(1) {
        let name = attribute(element, "name").unwrap_or_default();
        // [BeforeSuite], [ReportAfterSuite] and the like are no tests.
        if !name.starts_with("[It]") {
            continue;
        }
        let reason = element.find("<skipped").or_else(|| element.find("<failure"));
        let reason = reason.and_then(|at| attribute(&element[at..], "message")).unwrap_or_default();
        let mut status = attribute(element, "status").unwrap_or_default();
        let mut reason = reason;
        if status == "pending" {
            // Switched off by the suite's own authors.
            (status, reason) = ("skipped".to_owned(), "pending in the suite itself".to_owned());
        }
        all.push(Case { name: name.trim_start_matches("[It] ").to_owned(), status, reason });
    }
    all
}

/// Built once, kept under target/.
fn install() -> Result<PathBuf> {
    let target = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/tools");
    std::fs::create_dir_all(&target)?;
    let target = target.canonicalize()?;
    let suite = target.join("csi-sanity");
    if !suite.exists() {
        eprintln!("installing csi-sanity: some minutes, once");
        let go = Command::new("go")
            .args(["install", SUITE])
            .env("GOBIN", &target)
            .env("GOFLAGS", "")
            .current_dir("/")
            .status();
        ensure!(go.context("csi-sanity needs Go")?.success(), "go install {SUITE} failed");
    }
    Ok(suite)
}
