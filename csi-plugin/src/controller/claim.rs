//! The claim behind a CreateVolume: its annotations, and whether its class keeps credentials apart.

use super::secrets;
use crate::cluster::{Cluster, ClusterError};
use crate::request::own_keys;
use crate::status::Failure;
use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use k8s_openapi::api::storage::v1::StorageClass;
use kube::Api;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

/// Takes precedence over `spec.storageClassName`, for the provisioner as for us.
const CLASS_ANNOTATION: &str = "volume.beta.kubernetes.io/storage-class";

/// Reads claims and their classes from the API server.
#[derive(Clone, Debug)]
pub struct Claims {
    pub cluster: Arc<Cluster>,
    pub driver_name: String,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Claim {
    pub uid: Option<String>,
    pub annotations: BTreeMap<String, String>,
    namespace: String,
    class: Option<String>,
}

impl Claims {
    /// None: there is none. `uid`: where the provisioner gives it, another claim of that name does not
    /// count.
    pub fn get(&self, namespace: &str, name: &str, uid: Option<&str>) -> Result<Option<Claim>, Failure> {
        let api: Api<PersistentVolumeClaim> = Api::namespaced(self.cluster.client(), namespace);
        let claim = match self.cluster.wait("read the PersistentVolumeClaim", api.get(name)) {
            Ok(claim) => claim,
            Err(ClusterError::Absent) => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        let metadata = claim.metadata;
        if uid.is_some() && metadata.uid.as_deref() != uid {
            return Ok(None);
        }
        let annotations = metadata.annotations.unwrap_or_default();
        let class = annotations.get(CLASS_ANNOTATION).cloned().filter(|c| !c.is_empty());
        let class = class.or_else(|| claim.spec.and_then(|spec| spec.storage_class_name));
        Ok(Some(Claim { uid: metadata.uid, annotations, namespace: namespace.to_owned(), class }))
    }

    pub fn gone(namespace: &str, name: &str) -> Failure {
        Failure::Unavailable(format!("PersistentVolumeClaim {namespace}/{name} does not exist any more"))
    }

    /// A claim that chooses its source must not do so with another user's rights.
    pub(crate) fn check_class(
        &self,
        claim: &Claim,
        parameters: &HashMap<String, String>,
    ) -> Result<(), Failure> {
        let name = claim.class.as_deref().unwrap_or_default();
        let absent = || {
            Failure::Unavailable(format!(
                "StorageClass {name:?} of the claim does not exist, and its secret must be checked: create it again"
            ))
        };
        if name.is_empty() {
            return Err(absent());
        }
        let api: Api<StorageClass> = Api::all(self.cluster.client());
        match self.cluster.wait("read the StorageClass", api.get(name)) {
            Ok(class) => judge(name, &class, &self.driver_name, parameters, &claim.namespace),
            Err(ClusterError::Absent) => Err(absent()),
            Err(error) => Err(error.into()),
        }
    }
}

fn judge(
    name: &str,
    class: &StorageClass,
    driver_name: &str,
    parameters: &HashMap<String, String>,
    claim_namespace: &str,
) -> Result<(), Failure> {
    let empty = BTreeMap::new();
    let of_class = class.parameters.as_ref().unwrap_or(&empty);
    // The claim's annotations may have changed since the provisioner looked at them, and with them its class.
    let mut settings = [own_keys(of_class), own_keys(parameters)];
    for side in &mut settings {
        side.retain(|key, _| !secrets::names_a_secret(key));
    }
    let [ours, asked] = settings;
    if class.provisioner != driver_name || ours != asked {
        return Err(Failure::Unavailable(format!(
            "StorageClass {name:?} of the claim is not the one that this call came from: the call will be repeated"
        )));
    }
    secrets::check(name, of_class, claim_namespace)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn class(pairs: &[(&str, &str)]) -> StorageClass {
        let parameters = pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
        StorageClass { provisioner: "d".into(), parameters: Some(parameters), ..StorageClass::default() }
    }

    #[test]
    fn a_class_that_is_not_the_calls_own_does_not_count() {
        let request = HashMap::from([
            ("source".to_owned(), "s".to_owned()),
            ("csi.storage.k8s.io/pvc/name".to_owned(), "c".to_owned()),
        ]);
        assert!(judge("c", &class(&[("source", "s")]), "d", &request, "team").is_ok());
        let secret = [("source", "s"), ("csi.storage.k8s.io/secret-namespace", "other")];
        let refused = judge("c", &class(&secret), "d", &request, "team");
        assert!(matches!(refused, Err(Failure::Denied(_))), "{refused:?}");
        assert!(judge("c", &class(&[("source", "other")]), "d", &request, "team").is_err());
        assert!(judge("c", &class(&[("source", "s")]), "other", &request, "team").is_err());
    }
}
