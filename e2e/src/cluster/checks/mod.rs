//! The checks, in the order in which they run: each gets the suite and prints what it saw.

mod chart;
mod deletion;
mod holders;
mod hostile;
mod install;
mod kinds;
mod mistakes;
mod notebook;
mod offline;
mod reboot;
mod security;
mod stores;
mod uninstall;
mod working;
mod workspaces;
mod writable;

use super::Suite;
use anyhow::Result;

#[derive(Clone, Copy, Debug)]
pub struct Check {
    pub name: &'static str,
    /// What it shows, for a person.
    pub claim: &'static str,
    /// Why it cannot run in a cluster that is not the suite's own.
    pub own_cluster: Option<&'static str>,
    pub run: fn(&mut Suite) -> Result<()>,
}

const LOOKS: Option<&str> = Some("it looks at the node's processes and mounts");
const SERVES: Option<&str> = Some("its stores are processes beside the suite's own node");
const STOPS: Option<&str> = Some("it stops parts of the node and kills processes on it");

pub const ALL: &[Check] = &[
    Check {
        name: "install",
        claim: "apply -k makes all Ready; a Job of 4 pods reads the data set, fetched once; a deleted claim leaves nothing",
        own_cluster: None,
        run: install::run,
    },
    Check {
        name: "chart",
        claim: "the Helm chart renders what the manifests say",
        own_cluster: Some("it needs no cluster; helm is built for the suite's own"),
        run: chart::run,
    },
    Check {
        name: "kinds",
        claim: "subPath, readOnly, mountOptions, groups, access modes, ephemeral, inline and static volumes work",
        own_cluster: None,
        run: kinds::run,
    },
    Check {
        name: "stores",
        claim: "a claim on S3, OSS, GCS, Azure, web servers and HDFS is read, with Secrets as their users have them, each byte fetched once",
        own_cluster: SERVES,
        run: stores::run,
    },
    Check {
        name: "mistakes",
        claim: "an Event says what is wrong; once it is mended the pod starts by itself",
        own_cluster: None,
        run: mistakes::run,
    },
    Check {
        name: "notebook",
        claim: "100 dead workers and restarts of container, kubelet and containerd: no failed call",
        own_cluster: STOPS,
        run: notebook::run,
    },
    Check {
        name: "holders",
        claim: "agent and broker deleted, killed, out of memory and rolled, with and without an API server: no failed call",
        own_cluster: STOPS,
        run: holders::run,
    },
    Check {
        name: "workspaces",
        claim: "pods, one of them a Jupyter server, write to shared and to single claims while workers, agent and broker die; retained and deleted directories",
        own_cluster: STOPS,
        run: workspaces::run,
    },
    Check {
        name: "offline",
        claim: "without an API server volumes are published, unpublished and healed; a warm publish is fast",
        own_cluster: STOPS,
        run: offline::run,
    },
    Check {
        name: "hostile",
        claim: "huge claimed sizes, ended connections and a mount in the background do no harm and are healed",
        own_cluster: STOPS,
        run: hostile::run,
    },
    Check {
        name: "deletion",
        claim: "pods go in time, whatever is broken underneath, and leave nothing on the node",
        own_cluster: STOPS,
        run: deletion::run,
    },
    Check {
        name: "reboot",
        claim: "after a power failure pods come back, and their data comes from the cache",
        own_cluster: STOPS,
        run: reboot::run,
    },
    Check {
        name: "security",
        claim: "agent and workers are confined; no log holds a secret; a tenant reads only what its credentials allow",
        own_cluster: LOOKS,
        run: security::run,
    },
    Check {
        name: "uninstall",
        claim: "the clean-up refuses while volumes are mounted, or while something is in no store; afterwards nothing is left but the cache, which it names",
        own_cluster: None,
        run: uninstall::run,
    },
];
