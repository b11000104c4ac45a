//! The arguments in the manifests are arguments that this program understands.

use clap::Parser;
use csi_plugin::config::{Arguments, Config};

fn repository(path: &str) -> String {
    format!("{}/../{path}", env!("CARGO_MANIFEST_DIR"))
}

/// Arguments of the container that runs csi-plugin, and what kustomize patches add to them.
fn arguments(file: &str, overlay: Option<&str>) -> Vec<String> {
    let text = std::fs::read_to_string(repository(file)).unwrap();
    let from = text.find("command: [/usr/bin/csi-plugin]").unwrap();
    let list = text[from..].lines().skip(2).map(str::trim).filter(|l| !l.starts_with('#'));
    let mut arguments: Vec<String> =
        list.map_while(|l| l.strip_prefix("- --")).map(|a| format!("--{a}")).collect();
    if let Some(overlay) = overlay {
        let text = std::fs::read_to_string(repository(overlay)).unwrap();
        arguments.extend(
            text.lines().filter_map(|l| l.trim().strip_prefix("value: --")).map(|a| format!("--{a}")),
        );
    }
    assert!(arguments.len() > 3, "{file}: {arguments:?}");
    arguments
}

fn check(arguments: Vec<String>) -> Config {
    let config = repository("deploy/manifests/base/agent.toml");
    let arguments = arguments
        .iter()
        .map(|a| a.replace("$(NODE_NAME)", "node-1").replace("/etc/millpond/agent.toml", &config));
    Arguments::try_parse_from(["csi-plugin".to_owned()].into_iter().chain(arguments))
        .unwrap()
        .check()
        .unwrap()
}

#[test]
fn the_manifests_start_a_controller_and_nodes() {
    let controller = check(arguments("deploy/manifests/base/controller.yaml", None));
    assert!(controller.node.is_none());
    assert!(controller.controller.unwrap().allow.is_some(), "sources are refused at the claim");

    let overlay = "deploy/manifests/overlays/production/kustomization.yaml";
    for overlay in [None, Some(overlay)] {
        let node = check(arguments("deploy/manifests/base/node.yaml", overlay));
        assert!(node.controller.is_none());
        let node = node.node.unwrap();
        assert_eq!(node.node_id, "node-1");
        assert_eq!(node.agent_uid, 65532);
        assert!(node.mount_fusectl);
        assert_eq!(node.cache_roots.len(), 1 + usize::from(overlay.is_some()));
    }
}
