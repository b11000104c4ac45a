//! What many tests have at work while something dies: a volume of each profile, and applications whose every call is judged.

use anyhow::Result;
use e2e::node::{Mounted, Node};
use e2e::oracle::Report;
use e2e::pod::Running;
use std::time::Duration;

const PROFILES: [&str; 2] = ["large", "small"];
const END: Duration = Duration::from_secs(60);

/// Of the prefix `set`.
pub(crate) fn volumes(node: &mut Node) -> Result<Vec<Mounted>> {
    PROFILES.iter().map(|p| node.volume(&format!("v-{p}"), "set", &[("profile", p)])).collect()
}

/// Ends an application. No call may have failed.
pub(crate) fn judge(application: Running<Report>) -> Result<()> {
    let report = application.finish(END)?;
    println!("{}", report.summary());
    report.ensure_clean()
}
