//! Compiles every `*.proto` of this folder with protox (no `protoc` needed) and writes one module tree for all packages.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::{env, fs};

type Error = Box<dyn std::error::Error>;

/// Requests that carry secrets: `lib.rs` gives them a `Debug` that does not show any.
const SECRETIVE: &[&str] = &[
    "CreateVolumeRequest",
    "DeleteVolumeRequest",
    "ControllerPublishVolumeRequest",
    "ControllerUnpublishVolumeRequest",
    "ValidateVolumeCapabilitiesRequest",
    "ControllerModifyVolumeRequest",
    "CreateSnapshotRequest",
    "DeleteSnapshotRequest",
    "ListSnapshotsRequest",
    "GetSnapshotRequest",
    "ControllerExpandVolumeRequest",
    "NodeStageVolumeRequest",
    "NodePublishVolumeRequest",
    "NodeExpandVolumeRequest",
];

fn main() -> Result<(), Error> {
    println!("cargo::rerun-if-changed=.");
    let here = PathBuf::from(env::var("CARGO_MANIFEST_DIR")?);
    let out = PathBuf::from(env::var("OUT_DIR")?);
    let mut files: Vec<PathBuf> = fs::read_dir(&here)?
        .map(|entry| Ok(entry?.path()))
        .collect::<Result<Vec<_>, std::io::Error>>()?
        .into_iter()
        .filter(|path| path.extension().is_some_and(|e| e == "proto"))
        .collect();
    files.sort();

    let descriptors = protox::compile(&files, [&here])?;
    let mut packages: Vec<String> = descriptors
        .file
        .iter()
        .filter_map(|file| file.package.clone())
        .filter(|package| !package.starts_with("google."))
        .collect();
    packages.sort();
    packages.dedup();

    let hidden: Vec<String> = SECRETIVE.iter().map(|name| format!(".csi.v1.{name}")).collect();
    tonic_prost_build::configure()
        .emit_rerun_if_changed(false)
        .skip_debug(&hidden)
        .compile_fds(descriptors)?;

    let mut tree = Tree::default();
    for package in packages {
        // `millpond.agent.v1` is `proto::agent::v1`: inside the project its own name says nothing.
        let path = package.strip_prefix("millpond.").unwrap_or(&package).to_owned();
        tree.insert(path.split('.'), &package);
    }
    fs::write(out.join("packages.rs"), tree.render())?;
    Ok(())
}

/// Rust modules by package segment.
#[derive(Default)]
struct Tree {
    package: Option<String>,
    children: BTreeMap<String, Tree>,
}

impl Tree {
    fn insert<'a>(&mut self, mut path: impl Iterator<Item = &'a str>, package: &str) {
        match path.next() {
            None => self.package = Some(package.to_owned()),
            Some(segment) => self.children.entry(segment.to_owned()).or_default().insert(path, package),
        }
    }

    fn render(&self) -> String {
        let mut text = String::new();
        if let Some(package) = &self.package {
            text += &format!("include!(concat!(env!(\"OUT_DIR\"), \"/{package}.rs\"));\n");
        }
        for (name, child) in &self.children {
            text += &format!("pub mod {name} {{\n{}}}\n", child.render());
        }
        text
    }
}
