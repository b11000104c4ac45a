//! The Helm chart says the same as the manifests.

use crate::cluster::Suite;
use anyhow::{Result, ensure};
use std::process::Command;

pub(super) fn run(suite: &mut Suite) -> Result<()> {
    let places = suite.machine().places();
    let output = Command::new(suite.source().join("scripts/chart-test"))
        .arg(places.program_dir("KUBERNETES")?.join("kubectl"))
        .arg(places.program_dir("HELM")?.join("helm"))
        .output()?;
    let text = String::from_utf8_lossy(&output.stdout);
    for line in text.lines() {
        println!("    {line}");
    }
    ensure!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    Ok(())
}
