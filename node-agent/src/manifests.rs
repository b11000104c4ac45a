//! The configurations that users install are ones that the agent accepts.

use crate::config::{Config, TierKind};
use std::path::Path;

#[test]
fn every_configuration_in_the_manifests_is_accepted() {
    for (file, tiers) in [("base", 1), ("overlays/laptop", 1), ("overlays/production", 2)] {
        let path = format!("{}/../deploy/manifests/{file}/agent.toml", env!("CARGO_MANIFEST_DIR"));
        let config = Config::load(Path::new(&path)).unwrap_or_else(|e| panic!("{e}"));
        assert_eq!(config.cache.tiers.len(), tiers, "{file}");
        let memory = config.cache.tiers.iter().any(|t| t.kind == TierKind::Memory);
        assert_eq!(memory, file == "overlays/production");
        assert!(!config.allow.sources.is_empty() && config.agent.metrics.is_some());
    }
}
