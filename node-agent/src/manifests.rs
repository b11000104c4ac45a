//! The configurations that users install are ones that the agent accepts.

use crate::config::{Config, TierKind};
use link::budget;
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

#[test]
fn a_pod_has_the_time_that_its_program_needs_to_leave() {
    for directory in ["manifests/base", "chart/millpond/templates"] {
        for (file, pod) in [("agent.yaml", budget::AGENT_POD), ("node.yaml", budget::PLUGIN_POD)] {
            let path = format!("{}/../deploy/{directory}/{file}", env!("CARGO_MANIFEST_DIR"));
            let text = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{path}: {e}"));
            let grace = format!("\n      terminationGracePeriodSeconds: {}\n", pod.time.as_secs());
            assert!(text.contains(&grace), "{path}: {pod:?}");
        }
    }
}
