//! Volumes that pods write to: shared, owned by one pod, under programs that work while every part dies, and their end.

use super::working::{self, NOTEBOOK};
use super::writable::{BACK, THROUGH, WORK, class, object, refuse_writes, shell, writer};
use crate::cluster::Suite;
use crate::cluster::names::*;
use crate::cluster::objects::{self, Pod};
use crate::cluster::waits::PATIENCE;
use anyhow::{Context, Result, ensure};
use serde_json::json;
use std::path::{Path, PathBuf};

pub(super) fn run(suite: &mut Suite) -> Result<()> {
    prepare(suite)?;
    let kept = suite.kubectl.wait_bound(TENANT, BACK)?;
    shared(suite).context("two pods of one ReadWriteMany claim")?;
    let gone = suite.kubectl.wait_bound(TENANT, THROUGH)?;
    working::run(suite).context("programs that work while everything dies")?;
    left(suite, &kept).context("what a pod leaves behind it")?;
    deleted(suite, &kept, &gone).context("deleted claims")
}

/// Classes and claims: one whose directory stays with the volume's end, and one whose directory goes with it.
fn prepare(suite: &Suite) -> Result<()> {
    suite.tenant(TENANT)?;
    let k = &suite.kubectl;
    let controller = json!([{ "kind": "ServiceAccount", "name": CONTROLLER, "namespace": SYSTEM }]);
    let meta = json!({ "name": "workspace-deletion", "namespace": TENANT });
    let rules = json!([{ "apiGroups": [""], "resources": ["secrets"], "resourceNames": [S3_SECRET], "verbs": ["get"] }]);
    let role =
        json!({ "apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "workspace-deletion" });
    k.apply(&[
        json!({ "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role", "metadata": meta, "rules": rules }),
        json!({
            "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "RoleBinding", "metadata": meta, "roleRef": role,
            "subjects": controller,
        }),
        class(suite, BACK, &[("writeMode", "back")]),
        class(
            suite,
            THROUGH,
            &[
                ("writeMode", "through"),
                ("onDelete", "delete"),
                ("csi.storage.k8s.io/provisioner-secret-name", S3_SECRET),
                ("csi.storage.k8s.io/provisioner-secret-namespace", TENANT),
            ],
        ),
        objects::claim(TENANT, BACK, BACK, "ReadWriteMany", &[]),
        objects::claim(TENANT, THROUGH, THROUGH, "ReadWriteOncePod", &[]),
    ])
}

fn shared(suite: &Suite) -> Result<()> {
    let k = &suite.kubectl;
    let names = ["one", "two"];
    let pods = names.map(|name| writer(Pod::sleeper(TENANT, name).claim(BACK)).object());
    k.apply(&pods)?;
    for name in names {
        k.wait_ready(TENANT, name)?;
    }
    // Each sees at once what the other one does.
    shell(suite, "one", "mkdir /data/shared && echo hello > /data/shared/greeting")?;
    let greeting =
        shell(suite, "two", "cat /data/shared/greeting && mv /data/shared/greeting /data/shared/read")?;
    let listed = shell(suite, "one", "ls /data/shared")?;
    ensure!(greeting.trim() == "hello" && listed.trim() == "read", "{greeting:?}, {listed:?}");
    let lines = "for n in $(seq 100); do echo $HOSTNAME $n >> /data/shared/log; done";
    std::thread::scope(|scope| {
        let writing = names.map(|name| scope.spawn(move || shell(suite, name, lines)));
        writing.into_iter().try_for_each(|done| done.join().expect("it has not panicked").map(drop))
    })?;
    let log = shell(suite, "one", "sort /data/shared/log | uniq | wc -l; wc -l < /data/shared/log")?;
    ensure!(log.split_whitespace().collect::<Vec<_>>() == ["200", "200"], "two pods that append: {log}");
    println!("    ReadWriteMany: two pods see each other's files at once, and 200 lines that both appended");
    for name in names {
        k.delete("pod", TENANT, name)?;
    }
    names.iter().try_for_each(|name| k.wait_gone("pod", TENANT, name).map(drop))
}

/// The store does not take what a pod has written when it goes: that is told, kept, and sent with the next pod.
fn left(suite: &Suite, volume: &str) -> Result<()> {
    let k = &suite.kubectl;
    k.apply(&[writer(Pod::sleeper(TENANT, "first").claim(BACK)).object()])?;
    k.wait_ready(TENANT, "first")?;
    refuse_writes(suite)?;
    let outcome = (|| {
        shell(suite, "first", "echo kept > /data/left && sync /data/left")?;
        k.delete("pod", TENANT, "first")?;
        k.wait_gone("pod", TENANT, "first")?;
        ensure!(object(suite, volume, "left").is_none(), "the store has it");
        k.wait_event(TENANT, "PersistentVolumeClaim", BACK, &["in its store when the volume was unpublished"])
    })();
    suite.bucket.no_faults()?;
    outcome?;
    k.apply(&[writer(Pod::sleeper(TENANT, "second").claim(BACK)).object()])?;
    k.wait_ready(TENANT, "second")?;
    ensure!(shell(suite, "second", "cat /data/left")?.trim() == "kept");
    k.wait("what was left in the store", PATIENCE, |_| {
        Ok((object(suite, volume, "left").as_deref() == Some(b"kept\n")).then_some(()))
    })?;
    println!("    the next pod of the node found it, and it went to the store");
    k.delete("pod", TENANT, "second")?;
    k.wait_gone("pod", TENANT, "second").map(drop)
}

fn deleted(suite: &Suite, kept: &str, gone: &str) -> Result<()> {
    let k = &suite.kubectl;
    for (volume, name) in [(kept, "left"), (kept, NOTEBOOK), (gone, "work/checkpoint")] {
        ensure!(object(suite, volume, name).is_some(), "{volume} has no {name}");
    }
    for (claim, volume) in [(BACK, kept), (THROUGH, gone)] {
        k.delete("pvc", TENANT, claim)?;
        k.wait_gone("pv", "", volume)?;
    }
    ensure!(object(suite, kept, "left").is_some(), "what the class retains is gone");
    // The server keeps the directories of its files.
    let left = files_below(&suite.bucket.file(&format!("{WORK}/{TENANT}/{gone}")));
    ensure!(left.is_empty(), "objects are left: {left:?}");
    println!("    claims deleted: one directory retained, one deleted");
    for class in [BACK, THROUGH] {
        k.run(&["delete", "storageclass", class])?;
    }
    k.run(&["delete", "role,rolebinding", "-n", TENANT, "workspace-deletion"]).map(drop)
}

fn files_below(directory: &Path) -> Vec<PathBuf> {
    let paths = std::fs::read_dir(directory).into_iter().flatten().flatten().map(|entry| entry.path());
    paths.flat_map(|path| if path.is_dir() { files_below(&path) } else { vec![path] }).collect()
}
