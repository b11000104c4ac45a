//! The volume context as a node gets it: which of it is the user's, which Kubernetes', which our controller's.
//!
//! The context of an inline volume is written by the author of a pod. Nothing in it is believed but what kubelet
//! itself adds, and the keys of our controller are refused there.

use crate::request::{CREDENTIALS, INTERNAL_PREFIX, PVC_NAME, PVC_NAMESPACE, PVC_UID, own_keys};
use crate::status::Failure;
use link::{Claim, Pod, Subjects};
use std::collections::{BTreeMap, HashMap};

/// Set by kubelet on every publish, over whatever the user wrote (`podInfoOnMount`).
const EPHEMERAL: &str = "csi.storage.k8s.io/ephemeral";

#[derive(Debug)]
pub(super) struct Context<'r> {
    /// For [`volume::Parameters::parse`].
    pub(super) parameters: BTreeMap<&'r str, &'r str>,
    pub(super) subjects: Subjects,
    /// Written by the author of a pod.
    pub(super) inline: bool,
    /// May the agent use credentials of its own environment?
    pub(super) environment: bool,
}

impl<'r> Context<'r> {
    pub(super) fn parse(volume_id: &str, context: &'r HashMap<String, String>) -> Result<Self, Failure> {
        let inline = is_inline(volume_id, context);
        let mut parameters = own_keys(context);
        let internal: Vec<&str> =
            parameters.keys().copied().filter(|key| key.starts_with(INTERNAL_PREFIX)).collect();
        for key in internal {
            if inline {
                return Err(Failure::Invalid(format!(
                    "volume attribute {key:?} is the driver's own: leave it out"
                )));
            }
            if ![CREDENTIALS, PVC_NAME, PVC_NAMESPACE, PVC_UID].contains(&key) {
                return Err(Failure::Invalid(format!(
                    "volume attribute {key:?} is not known to this version: upgrade the node plugin to the controller's"
                )));
            }
            parameters.remove(key);
        }
        // It would be a promise that nobody keeps.
        if parameters.remove("onDelete").is_some_and(|value| value != "retain") {
            return Err(Failure::Invalid(
                "volume attribute \"onDelete\" is for StorageClasses: the directory of an inline or static volume always stays; leave it out".into(),
            ));
        }
        Ok(Self {
            parameters,
            subjects: subjects(inline, context),
            inline,
            environment: !inline && !context.contains_key(CREDENTIALS),
        })
    }
}

/// kubelet names inline volumes `csi-<sha256>`: that tells them also where the CSIDriver object lacks
/// `podInfoOnMount`, without which a user could claim not to be one.
fn is_inline(volume_id: &str, context: &HashMap<String, String>) -> bool {
    let named = volume_id
        .strip_prefix("csi-")
        .is_some_and(|digest| digest.len() == 64 && digest.bytes().all(|b| b.is_ascii_hexdigit()));
    named || context.get(EPHEMERAL).is_some_and(|value| value != "false")
}

/// Whom Events are for, as far as it is known: also of a request that is otherwise wrong.
pub(super) fn subjects_of(volume_id: &str, context: &HashMap<String, String>) -> Subjects {
    subjects(is_inline(volume_id, context), context)
}

fn subjects(inline: bool, context: &HashMap<String, String>) -> Subjects {
    let pod = |key: &str| context.get(&format!("csi.storage.k8s.io/pod.{key}")).cloned();
    let claim = |key: &str| context.get(key).filter(|_| !inline).cloned();
    Subjects {
        pod: pod("name").map(|name| Pod {
            name,
            namespace: pod("namespace").unwrap_or_default(),
            uid: pod("uid").unwrap_or_default(),
        }),
        claim: claim(PVC_NAME).zip(claim(PVC_NAMESPACE)).map(|(name, namespace)| Claim {
            name,
            namespace,
            uid: claim(PVC_UID),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn context(pairs: &[(&str, &str)]) -> HashMap<String, String> {
        pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect()
    }

    #[test]
    fn inline_volumes_never_use_the_agents_credentials_whatever_they_say() {
        let digest = format!("csi-{}", "a1".repeat(32));
        for (id, pairs) in [
            ("v", &[(EPHEMERAL, "true")][..]),
            ("v", &[(EPHEMERAL, "True")]),
            (&digest, &[]),
            (&digest, &[(EPHEMERAL, "false")]),
        ] {
            assert!(!Context::parse(id, &context(pairs)).unwrap().environment, "{id} {pairs:?}");
        }
        for key in [CREDENTIALS, PVC_NAME, "internal.millpond.io/x"] {
            let pairs = context(&[(EPHEMERAL, "true"), (key, "agent")]);
            let error = Context::parse("v", &pairs).unwrap_err().to_string();
            assert!(error.contains(key), "{error}");
        }
        let plain = context(&[("source", "s3://b"), (EPHEMERAL, "false")]);
        assert!(Context::parse("v", &plain).unwrap().environment);
        for value in ["own", "", "anything"] {
            let marked = context(&[("source", "s3://b"), (CREDENTIALS, value)]);
            assert!(!Context::parse("v", &marked).unwrap().environment);
        }
        assert!(Context::parse("v", &context(&[("internal.millpond.io/new", "x")])).is_err());
    }

    #[test]
    fn nobody_is_promised_that_the_directory_of_a_volume_goes_that_no_claim_made() {
        for (value, good) in [("retain", true), ("delete", false), ("", false)] {
            let pairs = context(&[("source", "s3://b"), ("onDelete", value)]);
            let parsed = Context::parse("v", &pairs);
            assert_eq!(parsed.is_ok(), good, "{value}");
            assert!(parsed.is_err() || !parsed.unwrap().parameters.contains_key("onDelete"));
        }
    }

    #[test]
    fn pod_and_claim_are_read_and_are_no_parameters() {
        let pairs = context(&[
            ("source", "s3://b"),
            ("csi.storage.k8s.io/pod.name", "p"),
            ("csi.storage.k8s.io/pod.namespace", "n"),
            ("csi.storage.k8s.io/pod.uid", "u"),
            ("csi.storage.k8s.io/serviceAccount.name", "default"),
            (PVC_NAME, "c"),
            (PVC_NAMESPACE, "n"),
        ]);
        let parsed = Context::parse("v", &pairs).unwrap();
        assert_eq!(parsed.parameters, BTreeMap::from([("source", "s3://b")]));
        let pod = Pod { name: "p".into(), namespace: "n".into(), uid: "u".into() };
        let claim = Claim { name: "c".into(), namespace: "n".into(), uid: None };
        assert_eq!(parsed.subjects, Subjects { pod: Some(pod), claim: Some(claim) });
    }
}
