//! Compiles every `*.proto` of the folder above with protox (no `protoc` needed) into Rust code, one file a package.
//!
//! The code lies in `proto/src/generated`, so that a build of Millpond needs no protobuf compiler; a test of this
//! crate holds the files to what it generates.

use anyhow::{Context, Result};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// Requests that carry secrets: `proto/src/lib.rs` gives them a `Debug` that does not show any.
const SECRETIVE_OF_AGENT: &[&str] = &["UploadStagingRequest"];
/// The same of the Container Storage Interface.
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

/// Where the `.proto` files lie.
pub fn sources() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Where the generated code lies.
pub fn generated() -> PathBuf {
    sources().join("src/generated")
}

/// The code of every package, by file name.
pub fn generate() -> Result<BTreeMap<String, String>> {
    let folder = sources();
    let mut files = Vec::new();
    for entry in fs::read_dir(&folder)? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "proto") {
            files.push(path);
        }
    }
    files.sort();
    let descriptors = protox::compile(&files, [&folder])?;
    let of_csi = SECRETIVE.iter().map(|name| format!(".csi.v1.{name}"));
    let of_agent = SECRETIVE_OF_AGENT.iter().map(|name| format!(".millpond.agent.v1.{name}"));
    let hidden: Vec<String> = of_csi.chain(of_agent).collect();
    let out = tempfile::tempdir()?;
    tonic_prost_build::configure()
        .emit_rerun_if_changed(false)
        .skip_debug(&hidden)
        .out_dir(out.path())
        .compile_fds(descriptors)?;
    let mut code = BTreeMap::new();
    for entry in fs::read_dir(out.path())? {
        let path = entry?.path();
        let name = path.file_name().and_then(|name| name.to_str()).context("packages have plain names")?;
        // protox compiles google's well-known types, too; they are prost-types'.
        if !name.starts_with("google.") {
            code.insert(name.to_owned(), fs::read_to_string(&path)?);
        }
    }
    Ok(code)
}
