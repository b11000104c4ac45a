//! Records as objects of the Kubernetes API: both replicas of the controller see the same ones.

use super::{Deletion, FORMAT, MillpondVolume, Record, RecordError, Records, digest};
use crate::cluster::{Cluster, ClusterError};
use k8s_openapi::jiff::Timestamp;
use kube::Api;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams};
use std::collections::BTreeMap;
use std::sync::Arc;
use volume::VolumeId;

/// Objects asked for at once.
const CHUNK: u32 = 500;
/// A list whose continuation has expired is begun again so often.
const RESTARTS: u32 = 2;
/// When CreateVolume last answered with a record that was there already.
const HANDED_OUT: &str = "millpond.io/handed-out-again";

#[derive(Debug)]
pub struct Kubernetes {
    cluster: Arc<Cluster>,
}

impl Kubernetes {
    pub fn new(cluster: Arc<Cluster>) -> Self {
        Self { cluster }
    }

    fn api(&self) -> Api<MillpondVolume> {
        Api::all(self.cluster.client())
    }

    /// The smallest `max` ids after `after`, of all objects.
    async fn scan(
        &self,
        after: Option<&VolumeId>,
        max: usize,
    ) -> kube::Result<BTreeMap<VolumeId, MillpondVolume>> {
        let mut found = BTreeMap::new();
        let mut page = ListParams::default().limit(CHUNK);
        loop {
            let list = self.api().list(&page).await?;
            for object in list.items.into_iter().filter(|o| after.is_none_or(|after| o.spec.id > *after)) {
                found.insert(object.spec.id.clone(), object);
                if found.len() > max {
                    found.pop_last();
                }
            }
            match list.metadata.continue_.filter(|token| !token.is_empty()) {
                Some(token) => page.continue_token = Some(token),
                None => return Ok(found),
            }
        }
    }
}

/// An id may hold what a name of an object may not: capitals and underscores.
fn object_name(id: &VolumeId) -> String {
    let id = id.as_str();
    let legal = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit();
    let label =
        |l: &str| l.starts_with(legal) && l.ends_with(legal) && l.chars().all(|c| legal(c) || c == '-');
    match id.split('.').all(label) {
        true => id.to_owned(),
        false => digest(id),
    }
}

fn pruned(object: MillpondVolume) -> RecordError {
    RecordError::Pruned { name: object.metadata.name.unwrap_or_default() }
}

fn record(object: MillpondVolume) -> Result<Record, RecordError> {
    match object.spec.format {
        FORMAT => Ok(object.spec),
        found => Err(RecordError::Format { name: object.metadata.name.unwrap_or_default(), found }),
    }
}

impl Records for Kubernetes {
    fn get(&self, id: &VolumeId) -> Result<Option<Record>, RecordError> {
        let name = object_name(id);
        let object = self.cluster.wait("read MillpondVolumes", self.api().get_opt(&name))?;
        object.map(record).transpose()
    }

    fn insert(&self, record: &Record) -> Result<bool, RecordError> {
        let object = MillpondVolume::new(&object_name(&record.id), record.clone());
        let api = self.api();
        match self.cluster.wait("create a MillpondVolume", api.create(&PostParams::default(), &object)) {
            // An API server leaves out what its CRD does not know.
            Ok(kept) if kept.spec.deletion != record.deletion => {
                self.remove(&record.id)?;
                Err(pruned(kept))
            }
            Ok(_) => Ok(true),
            Err(ClusterError::Exists) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    fn hand_out_again(&self, record: &Record) -> Result<bool, RecordError> {
        let (api, name) = (self.api(), object_name(&record.id));
        // For the version of the object, which rises with it; and for a person who wonders.
        let now = Timestamp::now().to_string();
        let patch = Patch::Merge(serde_json::json!({ "metadata": { "annotations": { HANDED_OUT: now } } }));
        match self.cluster.wait("patch a MillpondVolume", api.patch(&name, &PatchParams::default(), &patch)) {
            Ok(object) => Ok(!object.spec.is_going()),
            Err(ClusterError::Absent) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    fn are_shared(&self) -> bool {
        true
    }

    fn advance_deletion(&self, record: &Record, to: Deletion) -> Result<bool, RecordError> {
        let (api, name) = (self.api(), object_name(&record.id));
        let patch = Patch::Merge(serde_json::json!({ "spec": { "deletion": to } }));
        match self.cluster.wait("patch a MillpondVolume", api.patch(&name, &PatchParams::default(), &patch)) {
            Ok(object) if object.spec.deletion == Some(to) => Ok(true),
            Ok(object) => Err(pruned(object)),
            Err(ClusterError::Absent) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    fn remove(&self, id: &VolumeId) -> Result<(), RecordError> {
        let (api, name) = (self.api(), object_name(id));
        match self.cluster.wait("delete a MillpondVolume", api.delete(&name, &DeleteParams::default())) {
            Ok(_) | Err(ClusterError::Absent) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// The API pages with tokens of its own that expire; ours name an id and do not. So all objects are looked at,
    /// in chunks, and `max` of them are kept.
    fn list(&self, after: Option<&VolumeId>, max: usize) -> Result<(Vec<Record>, bool), RecordError> {
        let mut restarts = 0;
        let mut found = loop {
            match self.cluster.wait("list MillpondVolumes", self.scan(after, max.saturating_add(1))) {
                Err(ClusterError::Expired) if restarts < RESTARTS => restarts += 1,
                done => break done?,
            }
        };
        let more = found.len() > max;
        if more {
            found.pop_last();
        }
        Ok((found.into_values().map(record).collect::<Result<_, _>>()?, more))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_id_has_an_object_name_of_its_own() {
        let name = |id: &str| object_name(&VolumeId::parse(id).unwrap());
        assert_eq!(name("pvc-0123.x"), "pvc-0123.x");
        for id in ["A", "a_b", "a.", "a..b", "-a", "a-", "a.-b"] {
            let name = name(id);
            assert!(name.starts_with("n-") && name.len() == 34, "{id}: {name}");
        }
        assert_ne!(name("A"), name("B"));
    }
}
