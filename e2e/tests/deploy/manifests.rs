//! What is written in several places is the same in all of them.

use crate::{repository, text, version};
use regex::Regex;
use std::collections::BTreeSet;
use volume::{AllowList, Parameters, TemplateValues};

const BASE: &str = "deploy/manifests/base";

fn values<'t>(text: &'t str, key: &str) -> Vec<&'t str> {
    text.lines()
        .filter_map(|l| l.trim().strip_prefix("- ").unwrap_or(l.trim()).strip_prefix(key))
        .map(str::trim)
        .collect()
}

#[test]
fn every_image_is_of_this_version_or_of_the_version_that_the_suite_builds() {
    let versions = text("e2e/cluster/versions.env");
    let pinned = |name: &str| {
        let line = versions.lines().find_map(|l| l.strip_prefix(name)?.strip_prefix('='));
        line.unwrap_or_else(|| panic!("{name} is not in versions.env")).to_owned()
    };
    let expected: BTreeSet<String> = [
        format!("ghcr.io/millpond/millpond:{}", version()),
        format!("registry.k8s.io/sig-storage/csi-provisioner:{}", pinned("CSI_PROVISIONER_VERSION")),
        format!(
            "registry.k8s.io/sig-storage/csi-node-driver-registrar:{}",
            pinned("CSI_NODE_DRIVER_REGISTRAR_VERSION")
        ),
        format!("registry.k8s.io/sig-storage/livenessprobe:{}", pinned("LIVENESSPROBE_VERSION")),
    ]
    .into();
    let mut found = BTreeSet::new();
    for file in ["controller.yaml", "node.yaml", "agent.yaml"] {
        let text = text(&format!("{BASE}/{file}"));
        found.extend(values(&text, "image:").into_iter().map(str::to_owned));
    }
    assert_eq!(found, expected);

    let chart = text("deploy/chart/millpond/values.yaml");
    for image in expected.iter().filter(|i| i.starts_with("registry")) {
        assert!(chart.contains(image.as_str()), "{image} is not in the chart's values");
    }
    let chart = text("deploy/chart/millpond/Chart.yaml");
    assert_eq!(values(&chart, "version:"), [version()]);
    assert_eq!(values(&chart, "appVersion:"), [version()]);
    let cleanup = text("deploy/manifests/cleanup/job.yaml");
    assert_eq!(values(&cleanup, "image:"), [format!("ghcr.io/millpond/millpond:{}", version())]);
}

/// The agent's tiers, what csi-plugin lets through and what it makes for the agent.
#[test]
fn the_plugin_knows_every_directory_of_the_agents_configuration() {
    let node = text(&format!("{BASE}/node.yaml"));
    for (config, patches) in [
        (format!("{BASE}/agent.toml"), String::new()),
        ("deploy/manifests/overlays/laptop/agent.toml".into(), String::new()),
        (
            "deploy/manifests/overlays/production/agent.toml".into(),
            text("deploy/manifests/overlays/production/kustomization.yaml"),
        ),
    ] {
        let arguments: Vec<String> = node
            .lines()
            .chain(patches.lines())
            .filter_map(|l| l.trim().strip_prefix("- --").or_else(|| l.trim().strip_prefix("value: --")))
            .map(str::to_owned)
            .collect();
        let has = |argument: String| {
            assert!(arguments.contains(&argument), "{config}: csi-plugin lacks --{argument}");
        };
        let agent: toml::Table = toml::from_str(&text(&config)).unwrap();
        for tier in agent["cache"]["tiers"].as_array().unwrap() {
            for path in tier["paths"].as_array().unwrap().iter().map(|p| p.as_str().unwrap()) {
                has(format!("cache-root={path}"));
                match tier["kind"].as_str().unwrap() {
                    "memory" => has(format!("memory-tier={path}={}", tier["quota"].as_str().unwrap())),
                    _ => has(format!("own-dir={path}")),
                }
            }
        }
        has(format!("own-dir={}", agent["cache"]["metadata_dir"].as_str().unwrap()));
        has(format!("own-dir={}", agent["agent"]["state_dir"].as_str().unwrap()));
        has(format!("broker-socket={}", agent["agent"]["broker_socket"].as_str().unwrap()));
        let api = agent["agent"]["api_socket"].as_str().unwrap();
        has(format!("own-dir={}", api.rsplit_once('/').unwrap().0));
    }
}

/// Every one is named in the README beside it.
#[test]
fn every_example_is_listed() {
    let readme = text("deploy/examples/README.md");
    for entry in std::fs::read_dir(repository().join("deploy/examples")).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        assert!(name == "README.md" || readme.contains(&format!("]({name})")), "{name}");
    }
}

/// What the chart's schema takes for a source, everywhere in its values.
fn chart_sources() -> Regex {
    let schema = text("deploy/chart/millpond/values.schema.json");
    assert_eq!(schema.matches("#/definitions/source\"").count(), 3, "{schema}");
    let schema: serde_json::Value = serde_json::from_str(&schema).unwrap();
    Regex::new(schema["definitions"]["source"]["pattern"].as_str().unwrap()).unwrap()
}

/// What an example's claim chooses, the default classes allow and the default agent does.
#[test]
fn every_source_of_an_example_is_allowed() {
    let classes = text(&format!("{BASE}/storageclasses.yaml"));
    let allowed = values(&classes, "allowedSources: ");
    assert!(allowed.len() >= 2, "{allowed:?}");
    let agent = text(&format!("{BASE}/agent.toml"));
    let agent: toml::Table = toml::from_str(&agent).unwrap();
    let sources: Vec<String> = agent["allow"]["sources"].clone().try_into().unwrap();
    let list = AllowList { sources, ..AllowList::default() };
    let in_values = chart_sources();
    for source in &list.sources {
        assert!(in_values.is_match(source), "{source}");
    }
    let mut seen = BTreeSet::new();
    for entry in std::fs::read_dir(repository().join("deploy/examples")).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        let example = text(&format!("deploy/examples/{name}"));
        for source in values(&example, "millpond.io/source: ") {
            let source = source.split(" #").next().unwrap_or(source);
            assert!(in_values.is_match(source), "{name}: {source}");
            let annotations = [("millpond.io/source".to_owned(), source.to_owned())].into();
            let claim = TemplateValues { pvc_annotations: annotations, ..TemplateValues::default() };
            for allowed in &allowed {
                assert!(in_values.is_match(allowed), "{allowed}");
                let class =
                    [("source", "${pvc.annotations['millpond.io/source']}"), ("allowedSources", allowed)];
                let parsed = Parameters::parse(class, &claim);
                let (source, parameters) = parsed.unwrap_or_else(|e| panic!("{name}: {e}"));
                list.check(&source, &parameters).unwrap_or_else(|e| panic!("{name}: {e}"));
                seen.insert(source.to_string());
            }
        }
    }
    assert!(
        ["oss://", "gs://", "az://"].iter().all(|scheme| seen.iter().any(|s| s.starts_with(scheme))),
        "{seen:?}"
    );
}
