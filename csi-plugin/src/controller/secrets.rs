//! Which secrets a StorageClass hands to its claims: every pair of parameters that external-provisioner honours.
//!
//! The provisioner resolves these pairs itself and strips most of them before CreateVolume, so they are read from the
//! class. A claim that chooses its source must not choose it with another user's rights, and a secret that is
//! meant for one call reaches others: the pair without a prefix stands in for each of the other pairs.

use crate::status::Failure;
use std::collections::BTreeMap;

const PREFIX: &str = "csi.storage.k8s.io/";
/// The template by which a class names the namespace of each claim.
const OWN_NAMESPACE: &str = "${pvc.namespace}";

struct Pair {
    name: &'static str,
    namespace: &'static str,
}

const fn pair(name: &'static str, namespace: &'static str) -> Pair {
    Pair { name, namespace }
}

/// `secretParamsMap` of external-provisioner 5.3, `pkg/controller/controller.go`. The last four are the spelling of old
/// ones: read by the provisioner, and not stripped.
const PAIRS: &[Pair] = &[
    pair("csi.storage.k8s.io/secret-name", "csi.storage.k8s.io/secret-namespace"),
    pair("csi.storage.k8s.io/provisioner-secret-name", "csi.storage.k8s.io/provisioner-secret-namespace"),
    pair(
        "csi.storage.k8s.io/controller-publish-secret-name",
        "csi.storage.k8s.io/controller-publish-secret-namespace",
    ),
    pair("csi.storage.k8s.io/node-stage-secret-name", "csi.storage.k8s.io/node-stage-secret-namespace"),
    pair("csi.storage.k8s.io/node-publish-secret-name", "csi.storage.k8s.io/node-publish-secret-namespace"),
    pair(
        "csi.storage.k8s.io/controller-expand-secret-name",
        "csi.storage.k8s.io/controller-expand-secret-namespace",
    ),
    pair("csi.storage.k8s.io/node-expand-secret-name", "csi.storage.k8s.io/node-expand-secret-namespace"),
    pair("csiProvisionerSecretName", "csiProvisionerSecretNamespace"),
    pair("csiControllerPublishSecretName", "csiControllerPublishSecretNamespace"),
    pair("csiNodeStageSecretName", "csiNodeStageSecretNamespace"),
    pair("csiNodePublishSecretName", "csiNodePublishSecretNamespace"),
];

/// A parameter that names a secret, not a setting of the volume.
pub(super) fn names_a_secret(key: &str) -> bool {
    PAIRS.iter().any(|pair| key == pair.name || key == pair.namespace)
}

/// Every secret of the class is one of the claim's own namespace. A namespace is compared as it is written: any other
/// template than the claim's namespace is none, whatever it would become.
pub(super) fn check(
    class: &str,
    parameters: &BTreeMap<String, String>,
    claim_namespace: &str,
) -> Result<(), Failure> {
    for Pair { name, namespace } in PAIRS {
        if !parameters.contains_key(*name) && !parameters.contains_key(*namespace) {
            continue;
        }
        let found = parameters.get(*namespace).map(String::as_str).unwrap_or_default();
        if found != OWN_NAMESPACE && (found.is_empty() || found != claim_namespace) {
            return Err(Failure::Denied(format!(
                "StorageClass {class:?} lets the claim choose its source, and gives it a secret of namespace {found:?}: set {namespace} to {OWN_NAMESPACE}, or leave the secret out for anonymous access"
            )));
        }
    }
    let unknown = parameters.keys().find(|key| {
        let reserved = key.starts_with(PREFIX) || key.starts_with("csi");
        reserved && key.to_ascii_lowercase().contains("secret") && !names_a_secret(key)
    });
    match unknown {
        None => Ok(()),
        Some(key) => Err(Failure::Denied(format!(
            "StorageClass {class:?} lets the claim choose its source, and parameter {key:?} names a secret in a way that this driver does not know: leave it out"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn judge(pairs: &[(&str, &str)]) -> Result<(), Failure> {
        let parameters = pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
        check("class", &parameters, "team")
    }

    #[test]
    fn a_secret_of_another_namespace_is_refused_in_every_pair() {
        assert!(judge(&[("source", "s")]).is_ok());
        for Pair { name, namespace } in PAIRS {
            assert!(judge(&[(name, "${pvc.annotations['s']}"), (namespace, OWN_NAMESPACE)]).is_ok());
            assert!(judge(&[(name, "keys"), (namespace, "team")]).is_ok());
            for bad in [
                &[(*name, "keys"), (*namespace, "kube-system")][..],
                &[(name, "keys")],
                &[(name, "keys"), (namespace, "")],
                &[(namespace, "kube-system")],
                &[(name, "keys"), (namespace, "${pvc.namespace}-x")],
                &[(name, "keys"), (namespace, " ${pvc.namespace}")],
                &[(name, "keys"), (namespace, "$pvc.namespace")],
                &[(name, "keys"), (namespace, "${pvc.annotations['ns']}")],
                &[(name, "keys"), (namespace, "Team")],
            ] {
                let error = judge(bad).unwrap_err();
                let named = |text: &str| text.contains("\"class\"") && text.contains(namespace);
                assert!(matches!(&error, Failure::Denied(text) if named(text)), "{bad:?}: {error}");
            }
        }
    }

    #[test]
    fn one_right_pair_excuses_no_other() {
        for wrong in PAIRS {
            let all = PAIRS.iter().flat_map(|p| {
                let namespace = if p.name == wrong.name { "kube-system" } else { OWN_NAMESPACE };
                [(p.name, "keys"), (p.namespace, namespace)]
            });
            assert!(judge(&all.collect::<Vec<_>>()).is_err(), "{}", wrong.name);
        }
    }

    #[test]
    fn a_secret_under_an_unknown_name_is_refused() {
        for key in
            ["csi.storage.k8s.io/x-secret-name", "csi.storage.k8s.io/Secret-Name", "csiNodeExpandSecretName"]
        {
            let error = judge(&[(key, "team")]).unwrap_err();
            assert!(matches!(&error, Failure::Denied(text) if text.contains(key)), "{error}");
        }
        assert!(
            judge(&[("csi.storage.k8s.io/fstype", "x"), ("csi.storage.k8s.io/pvc/name", "secret")]).is_ok()
        );
    }
}
