//! Who may import whom: the crates of the workspace, and the libraries that only one part may know. docs/architecture.md
//! says why.

mod circles;
mod surface;

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Each crate and the crates of ours that it imports. What stands here and is not imported is wrong, too.
const CRATES: &[(&str, &[&str])] = &[
    ("millpond", &["link", "mounts", "node-agent", "proto", "startup", "volume"]),
    ("millpond-cache", &["inflight", "version", "volume"]),
    ("millpond-cgroups", &["mounts"]),
    (
        "millpond-csi-plugin",
        &["cgroups", "failpoint", "link", "mounts", "proto", "startup", "store", "version", "volume"],
    ),
    ("millpond-e2e", &["proto", "testkit", "volume"]),
    ("millpond-failpoint", &[]),
    ("millpond-fuse-abi", &[]),
    (
        "millpond-fuse-worker",
        &["cache", "failpoint", "fuse-abi", "inflight", "link", "lockdown", "startup", "version", "volume"],
    ),
    ("millpond-hdfs", &[]),
    ("millpond-hdfs-helper", &["hdfs", "lockdown"]),
    ("millpond-hostile", &["cache", "fuse-abi", "fuse-worker", "inflight", "link", "version"]),
    ("millpond-inflight", &["fuse-abi", "version"]),
    ("millpond-journal", &[]),
    ("millpond-link", &["version", "volume"]),
    ("millpond-lockdown", &[]),
    ("millpond-mounts", &["fuse-abi"]),
    (
        "millpond-node-agent",
        &[
            "cache",
            "failpoint",
            "fuse-abi",
            "inflight",
            "journal",
            "link",
            "proto",
            "startup",
            "store",
            "version",
            "volume",
        ],
    ),
    ("millpond-proto", &[]),
    ("millpond-proto-generate", &[]),
    ("millpond-sim", &["cache", "csi-plugin", "inflight", "link", "mounts", "node-agent", "volume"]),
    ("millpond-startup", &["failpoint"]),
    ("millpond-store", &["hdfs", "volume"]),
    ("millpond-testkit", &[]),
    ("millpond-version", &[]),
    ("millpond-volume", &["hdfs"]),
];

/// Libraries that stand behind one border each, and who may import them.
const LIBRARIES: &[(&str, &[&str])] = &[
    ("fuser", &["fuse-worker", "testkit"]),
    ("hdfs-native", &["hdfs-helper"]),
    ("heed", &["cache"]),
    ("kube", &["csi-plugin"]),
    ("object_store", &["store"]),
    ("tonic", &["csi-plugin", "e2e", "millpond", "node-agent", "proto"]),
];

/// Package, and what it imports (not for tests or builds alone).
fn packages() -> Result<BTreeMap<String, BTreeSet<String>>> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().context("the crate lies in the workspace")?;
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    command.args(["metadata", "--offline", "--no-deps", "--format-version", "1"]).current_dir(root);
    let output = command.output()?;
    ensure!(output.status.success(), "cargo metadata: {}", String::from_utf8_lossy(&output.stderr));
    let metadata: Value = serde_json::from_slice(&output.stdout)?;
    let text = |value: &Value| value.as_str().map(str::to_owned).context("a name is text");
    let list = |value: &Value| value.as_array().cloned().context("a list");
    let mut found = BTreeMap::new();
    for package in list(&metadata["packages"])? {
        let mut imports = BTreeSet::new();
        for dependency in list(&package["dependencies"])? {
            if dependency["kind"].is_null() {
                imports.insert(text(&dependency["name"])?);
            }
        }
        found.insert(text(&package["name"])?, imports);
    }
    Ok(found)
}

/// Each crate of the tree: its name there, and its directory.
fn crates(root: &Path) -> Result<Vec<(String, PathBuf)>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(root)? {
        let directory = entry?.path();
        if directory.join("Cargo.toml").is_file() && directory.join("src").is_dir() {
            let name = directory.file_name().context("a name")?.to_string_lossy().into_owned();
            found.push((name, directory));
        }
    }
    Ok(found)
}

fn short(package: &str) -> &str {
    package.strip_prefix("millpond-").unwrap_or(package)
}

#[test]
fn crates_import_what_they_may_and_nothing_else() -> Result<()> {
    let packages = packages()?;
    let known: BTreeSet<&str> = CRATES.iter().map(|(name, _)| *name).collect();
    let there: BTreeSet<&str> = packages.keys().map(String::as_str).collect();
    assert_eq!(there, known, "the crates of the workspace");
    for (name, may) in CRATES {
        let imports: BTreeSet<&str> = packages[*name]
            .iter()
            .filter(|import| there.contains(import.as_str()))
            .map(|i| short(i))
            .collect();
        assert_eq!(imports, may.iter().copied().collect(), "{name}");
    }
    Ok(())
}

#[test]
fn libraries_stay_behind_their_borders() -> Result<()> {
    let packages = packages()?;
    for (library, may) in LIBRARIES {
        let import = packages.iter().filter(|(_, imports)| imports.contains(*library));
        let import: BTreeSet<&str> = import.map(|(name, _)| short(name)).collect();
        assert_eq!(import, may.iter().copied().collect(), "{library}");
    }
    Ok(())
}
