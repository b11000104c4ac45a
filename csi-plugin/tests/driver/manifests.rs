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

/// As docs/configuration.md and docs/operations.md say.
#[test]
fn prometheus_alone_is_let_in_and_nobody_who_asks_stores_reaches_a_metadata_service() {
    use serde_json::{Value, json};
    let text = std::fs::read_to_string(repository("deploy/manifests/base/networkpolicies.yaml")).unwrap();
    let policies: Vec<Value> = text
        .split("\n---\n")
        .filter(|document| document.contains("kind: NetworkPolicy"))
        .map(|document| serde_saphyr::from_str(document).unwrap())
        .collect();
    let [ingress, egress, of_controller] = &policies[..] else { panic!("{policies:?}") };
    let prometheus = json!([{
        "namespaceSelector": { "matchLabels": { "kubernetes.io/metadata.name": "monitoring" } },
        "podSelector": { "matchLabels": { "app.kubernetes.io/name": "prometheus" } },
    }]);
    let metrics = json!([{ "protocol": "TCP", "port": "metrics" }]);
    let expected = json!({
        "podSelector": {}, "policyTypes": ["Ingress"], "ingress": [{ "from": prometheus, "ports": metrics }],
    });
    assert_eq!(ingress["spec"], expected);
    let docs = std::fs::read_to_string(repository("docs/operations.md")).unwrap();
    assert!(docs.contains("`app.kubernetes.io/name: prometheus` of the namespace `monitoring`"));
    let values = std::fs::read_to_string(repository("deploy/chart/millpond/values.yaml")).unwrap();
    let values: Value = serde_saphyr::from_str(&values).unwrap();
    assert_eq!(values["networkPolicies"]["prometheus"], prometheus);
    let chart =
        std::fs::read_to_string(repository("deploy/chart/millpond/templates/networkpolicies.yaml")).unwrap();
    assert!(chart.contains("{{- with .Values.networkPolicies.prometheus }}\n  ingress:\n    - from:"));

    assert_eq!(egress["spec"]["podSelector"]["matchLabels"]["app.kubernetes.io/component"], "agent");
    // As restricted as the agent.
    assert_eq!(
        of_controller["spec"]["podSelector"]["matchLabels"]["app.kubernetes.io/component"],
        "controller"
    );
    assert_eq!(of_controller["spec"]["egress"], egress["spec"]["egress"]);
    let blocks = egress["spec"]["egress"][0]["to"].as_array().unwrap();
    let except = |cidr: &str| {
        let block = blocks.iter().map(|to| &to["ipBlock"]).find(|block| block["cidr"] == cidr).unwrap();
        block["except"].as_array().unwrap().iter().map(|c| c.as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    // Every address by which a cloud tells its machines what they may do; the agent refuses them itself, too.
    let metadata = [
        "169.254.169.254/32",
        "169.254.170.2/32",
        "169.254.170.23/32",
        "169.254.42.42/32",
        "100.100.100.200/32",
        "192.0.0.192/32",
        "168.63.129.16/32",
    ];
    assert_eq!(except("0.0.0.0/0"), metadata);
    let metadata_v6 = [
        "fd00:ec2::254/128",
        "fd00:ec2::23/128",
        "fd20:ce::254/128",
        "fd00:c1::a9fe:a9fe/128",
        "fd00:42::42/128",
    ];
    assert_eq!(except("::/0"), metadata_v6);
    for address in metadata.iter().chain(&metadata_v6) {
        assert_eq!(chart.matches(address).count(), 2, "{address}");
    }
}
