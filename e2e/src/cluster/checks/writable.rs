//! What checks of volumes that can be written to share.

use crate::cluster::Suite;
use crate::cluster::names::*;
use crate::cluster::objects::Pod;
use crate::cluster::suite::BUCKET;
use anyhow::Result;
use serde_json::{Value, json};
use testkit::faults::{Fault, Rule, Script};

/// Where volumes of the suite that can be written to lie in its bucket.
pub(super) const WORK: &str = "work";
pub(super) const BACK: &str = "workspace-back";
pub(super) const THROUGH: &str = "workspace-through";

pub(super) fn class(suite: &Suite, name: &str, more: &[(&str, &str)]) -> Value {
    let source = format!("s3://{BUCKET}/{WORK}");
    let base = [
        ("source", source.as_str()),
        ("path", "${pvc.namespace}/${pv.name}"),
        ("access", "readWrite"),
        ("freshness", "strict"),
    ];
    suite.class(name, &[&base, more].concat(), &[])
}

/// In the bucket, of the volume of a claim.
pub(super) fn object(suite: &Suite, volume: &str, name: &str) -> Option<Vec<u8>> {
    std::fs::read(suite.bucket.file(&format!("{WORK}/{TENANT}/{volume}/{name}"))).ok()
}

/// The group of all files, which may write them.
pub(super) fn writer(pod: Pod) -> Pod {
    let user = json!({ "runAsUser": 10001, "runAsGroup": 10001, "fsGroup": 10001, "runAsNonRoot": true });
    pod.with("securityContext", user)
}

pub(super) fn shell(suite: &Suite, pod: &str, script: &str) -> Result<String> {
    suite.kubectl.exec(TENANT, pod, "main", &["sh", "-c", script])
}

/// The store takes nothing.
pub(super) fn refuse_writes(suite: &Suite) -> Result<()> {
    let refused = || Rule::always(Fault::Status { code: 403, retry_after_s: None });
    let rules = ["PutObject", "CreateMultipartUpload"].map(|op| refused().op(op)).to_vec();
    suite.bucket.set_faults(&Script { seed: 0, rules })
}
