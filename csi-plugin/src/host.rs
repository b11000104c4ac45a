//! What the unprivileged agent needs on the host and cannot make itself: its directories, its memory tier.

use crate::config::NodeConfig;
use crate::own_dir::{OwnDirError, own_directory};
use anyhow::Context;

/// Before the agent may connect: by then everything is there.
pub(crate) fn prepare(node: &NodeConfig) -> anyhow::Result<()> {
    for path in &node.own_dirs {
        own_directory(path, node.agent_uid).context("--own-dir")?;
    }
    if let Some(tier) = &node.memory_tier {
        // The directory below the tier stays root's: without the tmpfs no program fills the node's disk in its place.
        own_directory(&tier.path, 0)
            .or_else(|error| match error {
                // It is mounted already, and what is seen is the tmpfs of the agent.
                OwnDirError::Owner { .. } => Ok(()),
                other => Err(other),
            })
            .context("--memory-tier")?;
        tier.ensure(node.agent_uid).context("--memory-tier")?;
        tracing::info!(path = %tier.path.display(), bytes = tier.bytes, "memory tier");
    }
    Ok(())
}
