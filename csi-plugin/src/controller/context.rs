//! From a class's parameters and a claim to the volume context: what the node will get.

use super::Inner;
use super::claim::Claims;
use super::records::{Deletion, Record};
use crate::request::{CREDENTIALS, OWN_CREDENTIALS, PVC_NAME, PVC_NAMESPACE, PVC_UID, own_keys};
use crate::status::Failure;
use proto::csi::v1::CreateVolumeRequest;
use std::collections::BTreeMap;
use volume::{
    OnDelete, Parameters, TEMPLATED_PARAMETERS, TemplateValues, claim_chooses, expand, uses_annotations,
};

/// Why a request becomes no context.
#[derive(Debug)]
pub(super) enum Unfilled {
    /// The request, or the class behind it, is wrong: no claim gets a volume by it.
    Refused(Failure),
    /// What the claim says by now, or that it is gone. If it said something else when its volume was recorded, that
    /// counts.
    Claim(Failure),
}

impl<E: Into<Failure>> From<E> for Unfilled {
    fn from(error: E) -> Self {
        Self::Refused(error.into())
    }
}

impl Inner {
    /// Checked parameters, templates filled in; keys of Kubernetes left out, keys of ours added. And what shall become of the
    /// volume's directory, which no node has to know.
    pub(super) fn context(
        &self,
        request: &CreateVolumeRequest,
    ) -> Result<(BTreeMap<String, String>, Option<Deletion>), Unfilled> {
        let parameters = &request.parameters;
        let known = |key: &str| {
            parameters.get(&format!("csi.storage.k8s.io/{key}")).cloned().filter(|value| !value.is_empty())
        };
        let mut values = TemplateValues {
            pvc_name: known("pvc/name"),
            pvc_namespace: known("pvc/namespace"),
            pv_name: known("pv/name"),
            pvc_annotations: BTreeMap::new(),
        };
        let own = own_keys(parameters);
        let on_delete = own.get("onDelete").and_then(|value| OnDelete::of(value)).unwrap_or_default();
        let deletion = (on_delete == OnDelete::Delete).then_some(Deletion::Planned);
        let chooses = claim_chooses(own.get("source").copied(), own.get("path").copied())?;
        let mut pvc_uid = known("pvc/uid").or_else(|| uid_in(&request.name));
        if chooses || uses_annotations(own.values().copied())? {
            let claims = self.claims.as_ref().ok_or_else(|| {
                Failure::Precondition(
                    "this class looks at its claims, and the controller has no access to the Kubernetes API: start it with --records kubernetes".into(),
                )
            })?;
            let (Some(namespace), Some(name)) = (&values.pvc_namespace, &values.pvc_name) else {
                return Err(Unfilled::Refused(Failure::Invalid(
                    "this class looks at its claims, and the provisioner did not say which claim this is: run it with --extra-create-metadata".into(),
                )));
            };
            let claim = claims.get(namespace, name, known("pvc/uid").as_deref())?;
            let claim = claim.ok_or_else(|| Unfilled::Claim(Claims::gone(namespace, name)))?;
            if chooses {
                claims.check_class(&claim, parameters)?;
            }
            pvc_uid = claim.uid.or(pvc_uid);
            values.pvc_annotations = claim.annotations;
        }
        let context = self.fill(own, values, chooses, pvc_uid).map_err(Unfilled::Claim)?;
        Ok((context, deletion))
    }

    fn fill(
        &self,
        own: BTreeMap<&str, &str>,
        values: TemplateValues,
        chooses: bool,
        pvc_uid: Option<String>,
    ) -> Result<BTreeMap<String, String>, Failure> {
        let (source, parsed) = Parameters::parse(own.clone(), &values)?;
        if let Some(allow) = &self.allow {
            allow.check(&source, &parsed).map_err(|e| Failure::Denied(e.to_string()))?;
        }
        let mut context = BTreeMap::new();
        for (name, value) in own.into_iter().filter(|(name, _)| !matches!(*name, "path" | "onDelete")) {
            let filled = match TEMPLATED_PARAMETERS.contains(&name) {
                true => expand(value, &values)?,
                false => value.to_owned(),
            };
            context.insert(name.to_owned(), filled);
        }
        context.insert("source".into(), parsed.shown(&source));
        // A value may fit into a path and still not into a URL ('#', '?'): find that out here, not on a node.
        match Parameters::parse(&context, &TemplateValues::default()) {
            Ok(again) if again == (source, parsed) => {}
            Ok((other, _)) => {
                return Err(Failure::Invalid(format!("parameter \"path\" makes another source: {other}")));
            }
            Err(error) => return Err(error.into()),
        }
        if chooses {
            context.insert(CREDENTIALS.into(), OWN_CREDENTIALS.into());
        }
        let claim = [(PVC_NAME, values.pvc_name), (PVC_NAMESPACE, values.pvc_namespace), (PVC_UID, pvc_uid)];
        context.extend(claim.into_iter().filter_map(|(key, value)| Some((key.to_owned(), value?))));
        Ok(context)
    }
}

/// Names what was asked for, before any template is filled in. What Kubernetes adds does not count.
pub(super) fn digest(request: &CreateVolumeRequest) -> String {
    use sha2::Digest;
    let mut hasher = sha2::Sha256::new();
    for (key, value) in own_keys(&request.parameters) {
        for text in [key, value] {
            hasher.update((text.len() as u64).to_le_bytes());
            hasher.update(text);
        }
    }
    hex::encode(&hasher.finalize()[..16])
}

/// Is this the request that `record` was made for? Templates may become something else by now: the claim's annotations
/// counted when the volume was created. The record says what they were.
pub(super) fn asks_again(record: &Record, request: &CreateVolumeRequest, digest: &str) -> bool {
    let of_request = |key: &str| {
        let value = request.parameters.get(&format!("csi.storage.k8s.io/pvc/{key}")).map(String::as_str);
        value.filter(|value| !value.is_empty())
    };
    let of_record = |key: &str| record.context.get(key).map(String::as_str);
    let uid = of_request("uid").map(str::to_owned).or_else(|| uid_in(&request.name));
    record.name == request.name
        && record.request.as_deref() == Some(digest)
        && of_record(PVC_NAME) == of_request("name")
        && of_record(PVC_NAMESPACE) == of_request("namespace")
        && uid.is_none_or(|uid| of_record(PVC_UID).is_none_or(|known| known == uid))
}

/// The provisioner names volumes `pvc-<uid of the claim>`.
fn uid_in(name: &str) -> Option<String> {
    let uid = name.strip_prefix("pvc-")?;
    let groups: Vec<&str> = uid.split('-').collect();
    let lengths = groups.iter().map(|g| g.len()).eq([8, 4, 4, 4, 12]);
    (lengths && groups.iter().all(|g| g.bytes().all(|b| b.is_ascii_hexdigit()))).then(|| uid.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_claims_uid_is_read_from_the_provisioners_names_only() {
        let uid = "0f8fad5b-d9cb-469f-a165-70867728950e";
        assert_eq!(uid_in(&format!("pvc-{uid}")).as_deref(), Some(uid));
        for name in [uid, "pvc-1", "pvc-0f8fad5bxd9cb-469f-a165-70867728950e", "pvc-0f8fad5b-d9cb-469f-a165"]
        {
            assert_eq!(uid_in(name), None, "{name}");
        }
    }
}
