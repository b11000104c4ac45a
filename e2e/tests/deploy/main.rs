//! What users install: the image, and the manifests' agreement with it and with each other. Rendering needs kubectl and
//! helm, which `make e2e` builds: scripts/chart-test.

#![allow(clippy::unwrap_used)]

mod image;
mod manifests;

use std::path::PathBuf;

fn repository() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned()
}

fn text(path: &str) -> String {
    let path = repository().join(path);
    std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// `version` of the workspace.
fn version() -> String {
    let manifest: toml::Table = toml::from_str(&text("Cargo.toml")).unwrap();
    manifest["workspace"]["package"]["version"].as_str().unwrap().to_owned()
}
