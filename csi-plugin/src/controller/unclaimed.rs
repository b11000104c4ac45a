//! Records of volumes that no claim got: CreateVolume answered, the answer was lost, and the claim went away.
//!
//! The provisioner repeats a CreateVolume whose answer it did not get, also for a claim that was deleted meanwhile, and
//! then deletes what it got; so such a record usually goes by itself. It stays if the provisioner was replaced before:
//! what it was about is in its memory only. A volume that is used has a PersistentVolume; one that may still be has a
//! claim. A record that has neither for [`Pace::grace`], without having been touched, is removed.
//!
//! Every replica of the controller looks for itself and none has to lead. A removal names the version of the record
//! that was looked at, and a CreateVolume that hands out an existing record changes that version
//! ([`super::records::Records::hand_out_again`]): of a removal and a CreateVolume one finds that the other came first.

use super::records::MillpondVolume;
use crate::cluster::Cluster;
use crate::request::{PVC_NAME, PVC_NAMESPACE, PVC_UID};
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use kube::api::{DeleteParams, ListParams, Preconditions};
use kube::{Api, ResourceExt};
use serde::de::DeserializeOwned;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Objects asked for at once.
const CHUNK: u32 = 500;

/// How often it is looked, and how long a record must have been unclaimed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pace {
    pub every: Duration,
    /// Longer than the provisioner's pauses between two attempts (`--retry-interval-max`, 5 minutes).
    pub grace: Duration,
}

impl Default for Pace {
    fn default() -> Self {
        Self { every: Duration::from_secs(15 * 60), grace: Duration::from_secs(3600) }
    }
}

/// One state of one record: each change of the record makes another one.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Version {
    name: String,
    uid: String,
    resource_version: String,
}

/// What a record says about its owner.
#[derive(Debug)]
struct Owned {
    version: Version,
    id: String,
    claim_namespace: String,
    claim_name: String,
    claim_uid: Option<String>,
}

/// Since when each record has been unclaimed. By a clock that no administrator sets: at worst a restart begins anew.
#[derive(Debug, Default)]
struct Unclaimed {
    since: BTreeMap<Version, Instant>,
}

impl Unclaimed {
    /// `found`: what is unclaimed now. Returns what has been for `grace`.
    fn step(&mut self, now: Instant, found: BTreeSet<Version>, grace: Duration) -> Vec<Version> {
        self.since.retain(|version, _| found.contains(version));
        for version in found {
            self.since.entry(version).or_insert(now);
        }
        let over = |since: &Instant| now.saturating_duration_since(*since) >= grace;
        self.since.iter().filter(|(_, since)| over(since)).map(|(version, _)| version.clone()).collect()
    }
}

/// Looks for ever. What fails is tried again the next time.
pub async fn run(cluster: Arc<Cluster>, pace: Pace) {
    let mut unclaimed = Unclaimed::default();
    loop {
        tokio::time::sleep(pace.every).await;
        let found = match look(&cluster).await {
            Ok(found) => found,
            Err(error) => {
                let error = crate::status::chain(&error);
                tracing::warn!(error, "records without a volume could not be looked for: tried again later");
                continue;
            }
        };
        for version in unclaimed.step(Instant::now(), found, pace.grace) {
            remove(&cluster, &version).await;
        }
    }
}

async fn remove(cluster: &Cluster, version: &Version) {
    let preconditions = Preconditions {
        uid: Some(version.uid.clone()),
        resource_version: Some(version.resource_version.clone()),
    };
    let parameters = DeleteParams { preconditions: Some(preconditions), ..DeleteParams::default() };
    let api: Api<MillpondVolume> = Api::all(cluster.client());
    match api.delete(&version.name, &parameters).await {
        Ok(_) => {
            tracing::info!(
                record = version.name,
                "a record was removed: no claim and no PersistentVolume has it"
            );
        }
        // Another call was first: the other replica, a DeleteVolume, or a CreateVolume that handed it out.
        Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => {}
        Err(error) => {
            let error = crate::status::chain(&error);
            tracing::warn!(record = version.name, error, "a record without a volume could not be removed");
        }
    }
}

/// What is unclaimed at this moment. Records are read first: one that is created meanwhile is not among them, and a
/// volume that its owner gets meanwhile is found.
async fn look(cluster: &Cluster) -> kube::Result<BTreeSet<Version>> {
    let mut entries = Vec::new();
    each(&Api::all(cluster.client()), |record| entries.extend(entry(record))).await?;
    if entries.is_empty() {
        return Ok(BTreeSet::new());
    }
    let mut taken = BTreeSet::new();
    each(&Api::all(cluster.client()), |volume: PersistentVolume| {
        let name = volume.metadata.name;
        let handle = volume.spec.and_then(|spec| spec.csi).map(|csi| csi.volume_handle);
        taken.extend(name.into_iter().chain(handle));
    })
    .await?;
    let mut unclaimed = BTreeSet::new();
    for entry in entries.into_iter().filter(|entry| !taken.contains(&entry.id)) {
        let api: Api<PersistentVolumeClaim> = Api::namespaced(cluster.client(), &entry.claim_namespace);
        let claim = api.get_opt(&entry.claim_name).await?;
        // Another claim of that name is none of this record's.
        let same = |claim: &PersistentVolumeClaim| {
            entry.claim_uid.is_none() || claim.metadata.uid == entry.claim_uid
        };
        if !claim.as_ref().is_some_and(same) {
            unclaimed.insert(entry.version);
        }
    }
    Ok(unclaimed)
}

async fn each<K>(api: &Api<K>, mut with: impl FnMut(K)) -> kube::Result<()>
where
    K: Clone + DeserializeOwned + std::fmt::Debug,
{
    let mut page = ListParams::default().limit(CHUNK);
    loop {
        let list = api.list(&page).await?;
        list.items.into_iter().for_each(&mut with);
        match list.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => page.continue_token = Some(token),
            None => return Ok(()),
        }
    }
}

/// None: a record of which it cannot be said whose it is, which stays.
fn entry(record: MillpondVolume) -> Option<Owned> {
    let version =
        Version { name: record.name_any(), uid: record.uid()?, resource_version: record.resource_version()? };
    let mut context = record.spec.context;
    Some(Owned {
        version,
        id: record.spec.id.to_string(),
        claim_namespace: context.remove(PVC_NAMESPACE)?,
        claim_name: context.remove(PVC_NAME)?,
        claim_uid: context.remove(PVC_UID),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const GRACE: Duration = Duration::from_secs(3600);

    fn version(name: &str, resource_version: u32) -> Version {
        Version { name: name.into(), uid: "u".into(), resource_version: resource_version.to_string() }
    }

    fn at(start: Instant, minutes: u64) -> Instant {
        start + Duration::from_secs(60 * minutes)
    }

    #[test]
    fn a_record_goes_when_it_has_been_nobodys_all_the_time() {
        let (start, mut unclaimed) = (Instant::now(), Unclaimed::default());
        let found = || BTreeSet::from([version("a", 1)]);
        for minutes in [0, 15, 59] {
            assert_eq!(unclaimed.step(at(start, minutes), found(), GRACE), []);
        }
        assert_eq!(unclaimed.step(at(start, 60), found(), GRACE), [version("a", 1)]);
        // A removal that failed is tried again.
        assert_eq!(unclaimed.step(at(start, 75), found(), GRACE), [version("a", 1)]);
    }

    #[test]
    fn whoever_had_it_or_changed_it_meanwhile_starts_the_time_anew() {
        let (start, mut unclaimed) = (Instant::now(), Unclaimed::default());
        unclaimed.step(start, BTreeSet::from([version("a", 1), version("b", 1)]), GRACE);
        // a has an owner for a moment, b is handed out again.
        unclaimed.step(at(start, 30), BTreeSet::from([version("b", 2)]), GRACE);
        let both = || BTreeSet::from([version("a", 1), version("b", 2)]);
        assert_eq!(unclaimed.step(at(start, 61), both(), GRACE), []);
        assert_eq!(unclaimed.step(at(start, 90), both(), GRACE), [version("b", 2)]);
        assert_eq!(unclaimed.step(at(start, 121), both(), GRACE), [version("a", 1), version("b", 2)]);
        assert_eq!(unclaimed.step(at(start, 122), BTreeSet::new(), GRACE), []);
        assert!(unclaimed.since.is_empty(), "what is gone is forgotten");
    }
}
