//! `scripts/image` against the Dockerfile: two ways to one image.

use crate::{repository, text, version};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

const PROGRAMS: [&str; 5] = ["csi-plugin", "node-agent", "fuse-worker", "hdfs-helper", "millpond"];
/// What an agent alone starts.
const CHILDREN: [&str; 2] = ["fuse-worker", "hdfs-helper"];

fn run(command: &mut Command) -> String {
    let output = command.output().unwrap_or_else(|e| panic!("{command:?}: {e}"));
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

fn make(dir: &Path, name: &str) -> PathBuf {
    let tar = dir.join(name);
    let mut script = Command::new(repository().join("scripts/image"));
    script
        .args(["--profile", "dev", "--output"])
        .arg(&tar)
        .env("MILLPOND_BIN", e2e::node::programs().unwrap());
    run(&mut script);
    tar
}

fn unpack(tar: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    run(Command::new("tar").arg("-xf").arg(tar).arg("-C").arg(to));
}

fn json(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

fn sha256(path: &Path) -> String {
    run(Command::new("sha256sum").arg(path)).split_whitespace().next().unwrap().to_owned()
}

/// Instructions of the last stage, continued lines joined.
fn last_stage() -> Vec<(String, String)> {
    let file = text("deploy/images/Dockerfile").replace("\\\n", " ");
    let lines = file.lines().map(str::trim).filter(|l| !l.is_empty() && !l.starts_with('#'));
    let all: Vec<_> = lines
        .map(|l| l.split_once(' ').unwrap())
        .map(|(what, rest)| (what.to_owned(), rest.split_whitespace().collect::<Vec<_>>().join(" ")))
        .collect();
    let from = all.iter().rposition(|(what, _)| what == "FROM").unwrap();
    all[from..].to_vec()
}

fn arguments<'s>(stage: &'s [(String, String)], instruction: &str) -> Vec<&'s str> {
    stage.iter().filter(|(what, _)| what == instruction).map(|(_, rest)| rest.as_str()).collect()
}

#[test]
fn the_image_is_built_by_the_pinned_compiler() {
    let toolchain: toml::Table = toml::from_str(&text("rust-toolchain.toml")).unwrap();
    let pinned = format!("ARG RUST={}", toolchain["toolchain"]["channel"].as_str().unwrap());
    assert!(text("deploy/images/Dockerfile").lines().any(|line| line == pinned), "Dockerfile: {pinned}");
}

#[test]
fn the_tar_is_an_image_with_the_programs_their_libraries_tls_roots_and_one_user() {
    let dir = tempfile::tempdir().unwrap();
    let tar = make(dir.path(), "image.tar");
    let image = dir.path().join("image");
    unpack(&tar, &image);

    let manifest = json(&image.join("manifest.json"));
    assert_eq!(manifest[0]["RepoTags"][0], format!("ghcr.io/millpond/millpond:{}", version()));
    let config_name = manifest[0]["Config"].as_str().unwrap();
    assert_eq!(config_name, format!("{}.json", sha256(&image.join(config_name))));
    let config = json(&image.join(config_name));
    let layers: Vec<_> =
        manifest[0]["Layers"].as_array().unwrap().iter().map(|l| image.join(l.as_str().unwrap())).collect();
    let root = dir.path().join("root");
    for (k, layer) in layers.iter().enumerate() {
        let digest = sha256(layer);
        assert_eq!(config["rootfs"]["diff_ids"][k], format!("sha256:{digest}"));
        assert!(layer.parent().unwrap().ends_with(&digest));
        let owners = run(Command::new("tar").args(["--numeric-owner", "-tvf"]).arg(layer));
        assert!(owners.lines().all(|line| line.contains(" 0/0 ")), "{owners}");
        unpack(layer, &root);
    }
    assert_eq!(config["config"]["User"], "65532:65532");
    assert!(
        config["config"]["Labels"]["org.opencontainers.image.revision"]
            .as_str()
            .is_some_and(|r| !r.is_empty())
    );

    assert!(std::fs::read_to_string(root.join("etc/passwd")).unwrap().contains("\nmillpond:x:65532:65532:"));
    let certificates = std::fs::read_to_string(root.join("etc/ssl/certs/ca-certificates.crt")).unwrap();
    assert!(certificates.matches("BEGIN CERTIFICATE").count() > 50);
    for path in ["bin/sh", "usr/bin/sh", "bin/bash"] {
        assert!(!root.join(path).exists(), "no shell: {path}");
    }
    // They start with nothing but what is in the image, as its user.
    for program in PROGRAMS.iter().filter(|p| !CHILDREN.contains(p)) {
        let said = run(Command::new("chroot")
            .arg("--userspec=65532:65532")
            .arg(&root)
            .arg(format!("/usr/bin/{program}"))
            .arg("--version"));
        assert!(said.contains(&version()), "{program}: {said}");
    }
    // Without their agent they say so; a library that is missing would be the loader's status 127.
    for program in CHILDREN {
        let mut child = Command::new("chroot");
        child.arg("--userspec=65532:65532").arg(&root).arg(format!("/usr/bin/{program}"));
        let status = child.output().unwrap().status;
        assert!(status.code().is_some_and(|code| code != 127), "{program}: {status}");
    }
    // What is loaded later has all that it links, too.
    let mut libraries = Vec::new();
    for dir in [
        "lib/x86_64-linux-gnu",
        "lib/aarch64-linux-gnu",
        "usr/lib/x86_64-linux-gnu",
        "usr/lib/aarch64-linux-gnu",
    ] {
        let Ok(entries) = std::fs::read_dir(root.join(dir)) else { continue };
        libraries.extend(entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()));
    }
    for library in ["libgssapi_krb5.so.2", "libkrb5.so.3", "libk5crypto.so.3", "libkrb5support.so.0"] {
        assert!(libraries.iter().any(|found| found == library), "{library}: {libraries:?}");
    }
}

#[test]
fn the_same_programs_make_the_same_bytes() {
    let dir = tempfile::tempdir().unwrap();
    let (one, two) = (make(dir.path(), "one.tar"), make(dir.path(), "two.tar"));
    assert_eq!(sha256(&one), sha256(&two));
}

#[test]
fn the_dockerfile_makes_the_same_image() {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    unpack(&make(dir.path(), "image.tar"), &image);
    let manifest = json(&image.join("manifest.json"));
    let config = json(&image.join(manifest[0]["Config"].as_str().unwrap()))["config"].clone();

    let stage = last_stage();
    let of = |what| arguments(&stage, what);
    // The file system is what deploy/images/rootfs assembles, in both: its two directories and nothing besides.
    assert_eq!(of("FROM"), ["scratch"]);
    assert_eq!(of("COPY"), ["--from=build /rootfs/base/ /", "--from=build /rootfs/programs/ /"]);
    assert!(of("ADD").is_empty() && of("RUN").is_empty());
    let whole = text("deploy/images/Dockerfile");
    assert!(whole.contains("deploy/images/rootfs target/release /rootfs"));
    assert!(text("scripts/image").contains("deploy/images/rootfs \"$programs\""));

    assert_eq!(of("USER"), [config["User"].as_str().unwrap()]);
    assert_eq!(of("WORKDIR"), [config["WorkingDir"].as_str().unwrap()]);
    let list = |text: &str| serde_json::from_str::<Value>(text).unwrap();
    assert_eq!(list(of("ENTRYPOINT")[0]), config["Entrypoint"]);
    assert_eq!(list(of("CMD")[0]), config["Cmd"]);
    let pairs = |text: &str| -> BTreeMap<String, String> {
        let text = text.replace("${VERSION}", &version());
        let mut rest = text.as_str();
        let mut pairs = BTreeMap::new();
        while let Some((name, after)) = rest.split_once("=\"") {
            let (value, next) = after.split_once('"').unwrap();
            pairs.insert(name.trim().to_owned(), value.to_owned());
            rest = next;
        }
        pairs
    };
    let environment: BTreeMap<_, _> = config["Env"]
        .as_array()
        .unwrap()
        .iter()
        .map(|e| e.as_str().unwrap().split_once('=').unwrap())
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .collect();
    assert_eq!(pairs(of("ENV")[0]), environment);
    let mut labels = pairs(of("LABEL")[0]);
    let revision = config["Labels"]["org.opencontainers.image.revision"].as_str().unwrap();
    labels.insert("org.opencontainers.image.revision".into(), revision.to_owned());
    assert_eq!(serde_json::to_value(labels).unwrap(), config["Labels"]);
    assert!(whole.contains(&format!("ARG VERSION={}\n", version())));
}

#[test]
fn what_the_dockerfile_builds_has_every_crate_of_the_workspace() {
    let manifest: toml::Table = toml::from_str(&text("Cargo.toml")).unwrap();
    let members = manifest["workspace"]["members"].as_array().unwrap().iter();
    let ignore = text(".dockerignore");
    for member in members.map(|member| member.as_str().unwrap().split('/').next().unwrap()) {
        let sent = format!("!{member}");
        assert!(ignore.lines().any(|line| line == sent), ".dockerignore keeps {member} from the build");
    }
}
