//! What Events say: what happened, and what to do. They are read by the owner of a pod, not by its node's operator.

use link::broker::Unsent;
use std::time::Duration;
use volume::{RequestTimeout, VolumeId};

pub fn healed(volume: &VolumeId, cause: &str, took: Duration, node: &str) -> String {
    let what = match cause {
        "broker" => "csi-plugin is back, and holds the mount again",
        _ => "the process that serves the mount was replaced",
    };
    format!(
        "Volume {volume}: {what} ({cause}) within {took:?}; no call failed. Nothing to do. If this goes on, see `millpond status` on node {node}."
    )
}

pub fn degraded(volume: &VolumeId, why: &str, heal_timeout: Duration, node: &str) -> String {
    format!(
        "Volume {volume}: no worker serves the mount ({why}): calls that need it wait. If nothing helps within {heal_timeout:?} (healTimeout) they fail. Look at the Millpond agent's pod on node {node}."
    )
}

pub fn recovered(volume: &VolumeId) -> String {
    format!("Volume {volume}: the mount is served again; waiting calls go on. Nothing to do.")
}

pub fn renewed(volume: &VolumeId) -> String {
    format!(
        "Volume {volume}: all who held the mount had died, and it was made anew. Files that were open before fail (ENOTCONN) and must be opened again; paths work."
    )
}

pub(crate) fn ended_by_others(volume: &VolumeId, node: &str) -> String {
    format!(
        "Volume {volume}: a process on node {node} that is not Millpond's has ended its mount (umount -f, an abort through /sys/fs/fuse/connections, or the kernel's limit fs.fuse.max_request_timeout). It is made anew by itself, within seconds if the agent's pod runs. Files that were open fail (ENOTCONN) and must be opened again."
    )
}

pub(crate) fn renewed_after_others(volume: &VolumeId) -> String {
    format!(
        "Volume {volume}: the mount that another process had ended was made anew. Files that were open before fail (ENOTCONN) and must be opened again; paths work."
    )
}

pub fn request_timeout(volume: &VolumeId, limit: RequestTimeout, node: &str) -> String {
    let (limit, half) = (limit.limit(), limit.cap(Duration::MAX));
    format!(
        "Volume {volume}: the kernel of node {node} ends a mount in which a call takes longer than {limit:?} (fs.fuse.max_request_timeout, default_request_timeout). So that it does not, calls fail after {half:?} at the latest, whatever storeTimeout and healTimeout say. Ask the node's administrator to set both to 0."
    )
}

/// For want of an Event that says it better.
pub fn dead(volume: &str) -> String {
    format!(
        "Volume {volume}: the mount is dead, and programs get ENOTCONN. It is made anew by itself when the agent's pod runs, or with kubelet's next republish."
    )
}

pub fn no_agent(volume: &str) -> String {
    format!(
        "Volume {volume}: no worker is known to serve the mount: calls that need it wait. Look at the agent's pod."
    )
}

pub fn not_renewed(volume: &str, why: &str) -> String {
    format!(
        "Volume {volume}: the mount has ended, and it is not made anew yet ({why}). Programs get ENOTCONN. It is tried again by itself; a missing secret comes with kubelet's next republish, within minutes."
    )
}

pub(crate) fn caught_up(volume: &VolumeId) -> String {
    format!("Volume {volume}: no container has the dead one any more. Nothing to do.")
}

/// At its target, while it lives in a container.
pub fn unmounted(volume: &str) -> String {
    format!(
        "Volume {volume}: a process that is not Millpond's has unmounted it on its node. Containers that have it still use it; those that start get it with kubelet's next republish, which gives all of them a new mount (what is open fails then with ENOTCONN)."
    )
}

pub(crate) fn left_behind(volume: &VolumeId, why: &str) -> String {
    format!(
        "Volume {volume}: the mount was made anew, but a container still has the dead one ({why}). Programs in it get ENOTCONN: restart that container or delete the pod."
    )
}

pub fn poisoned(volume: &VolumeId, operation: &str, node: &str) -> String {
    format!(
        "Volume {volume}: a request ({operation}) ended the processes that tried to serve it, one after the other, and was answered EIO. All else goes on. This is a defect of Millpond: please report it with the log of the agent's pod on node {node}."
    )
}

pub fn source_away(volume: &str, why: &str) -> String {
    format!(
        "Volume {volume}: its source does not answer ({why}). What is cached goes on; other calls wait up to storeTimeout and fail with EIO. Check the store, its endpoint and the network; calls are tried again."
    )
}

pub(crate) fn serving_stale(volume: &str, why: &str) -> String {
    format!(
        "Volume {volume}: its source does not answer ({why}). Names and versions that are known go on as they were last seen for staleIfError beyond their metadataTtl, with what is cached of them; other calls wait up to storeTimeout and fail with EIO. Check the store, its endpoint and the network; it is asked again until it answers."
    )
}

pub(crate) fn source_back(volume: &VolumeId) -> String {
    format!("Volume {volume}: its source answers again. Nothing to do.")
}

pub(crate) fn uploads_late(volume: &str, unsent: &Unsent, node: &str) -> String {
    let oldest = Duration::from_secs(unsent.oldest_ms / 1000);
    format!(
        "Volume {volume}: {} written on node {node} {} not in its store yet; the oldest has waited for {oldest:?} ({}). It is kept on the node's disk, and sent as soon as the store takes it. Check the store and what the volume's secret may do there. `millpond staging list` on the node shows what waits.",
        files(unsent),
        are(unsent.files),
        last(unsent)
    )
}

pub(crate) fn upload_conflict(volume: &str, unsent: &Unsent, node: &str) -> String {
    let count =
        if unsent.conflicts == 1 { "a file".to_owned() } else { format!("{} files", unsent.conflicts) };
    format!(
        "Volume {volume}: somebody else has changed in the store {count} that {} also written on node {node} ({}): theirs stays in the store, and what was written here is kept on the node. `millpond staging export` copies it out, `millpond staging discard` gives it up; until then it cannot be written to the store.",
        if unsent.conflicts == 1 { "was" } else { "were" },
        unsent.path
    )
}

pub(crate) fn uploads_done(volume: &VolumeId, node: &str) -> String {
    format!("Volume {volume}: all that was written on node {node} is in its store. Nothing to do.")
}

pub(crate) fn uploads_left(volume: &str, unsent: &Unsent, node: &str) -> String {
    format!(
        "Volume {volume}: {} written on node {node} {} not in its store when the volume was unpublished ({}). If the store gave no answer, the node goes on for some minutes. What is left then is kept on it, and sent when the volume is published on that node again or `millpond staging upload` is run there; pods on other nodes do not see it before.",
        files(unsent),
        were(unsent.files),
        last(unsent)
    )
}

fn files(unsent: &Unsent) -> String {
    let size = match unsent.bytes {
        0..1_048_576 => format!("{:.1} KiB", unsent.bytes as f64 / 1024.0),
        1_048_576..1_073_741_824 => format!("{:.1} MiB", unsent.bytes as f64 / 1_048_576.0),
        _ => format!("{:.1} GiB", unsent.bytes as f64 / 1_073_741_824.0),
    };
    if unsent.files == 1 { format!("a file ({size})") } else { format!("{} files ({size})", unsent.files) }
}

fn are(files: u64) -> &'static str {
    if files == 1 { "is" } else { "are" }
}

fn were(files: u64) -> &'static str {
    if files == 1 { "was" } else { "were" }
}

/// Which, and what came of it.
fn last(unsent: &Unsent) -> String {
    let why = unsent.why.as_deref().unwrap_or("no attempt has failed");
    if unsent.path.is_empty() { why.to_owned() } else { format!("{}: {why}", unsent.path) }
}

pub fn ended(volume: &VolumeId, why: &str) -> String {
    format!(
        "Volume {volume}: the mount has ended ({why}). Programs get ENOTCONN until an agent is there again, which makes the mount anew; what is open must then be opened again. Look at the Millpond agent's pod."
    )
}

pub fn vanished(volume: &VolumeId, node: &str) -> String {
    format!(
        "Volume {volume}: a process on node {node} that is not Millpond's has unmounted it, and no container has it any more. Kubelet's next publish, which comes before a container is started, mounts it anew."
    )
}

pub(crate) fn not_published(volume: &str, why: &str) -> String {
    format!("Volume {volume} could not be mounted: {why}. It is tried again by itself.")
}

pub(crate) fn secret_refused(volume: &VolumeId, why: &str) -> String {
    format!(
        "Volume {volume}: its secret has changed, and the new one is not used ({why}). The mount goes on with the one before: correct the secret."
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    /// It may have been an administrator, healTimeout or an unmount as well.
    #[test]
    fn what_is_not_made_anew_says_no_more_than_is_known() {
        assert!(!not_renewed("v", "why").contains("died"));
        assert!(!unmounted("v").contains("dead") && !unmounted("v").contains("made anew by itself"));
    }

    #[test]
    fn what_waits_is_told_with_its_size_and_what_the_store_said() {
        let why = Some("upload: 503".to_owned());
        let unsent =
            Unsent { files: 1, bytes: 3 << 29, oldest_ms: 301_500, path: "a/b".into(), why, conflicts: 0 };
        let late = uploads_late("v", &unsent, "n");
        assert!(late.contains("a file (1.5 GiB) written on node n is not"), "{late}");
        assert!(late.contains("301s (a/b: upload: 503)"), "{late}");
        let left = uploads_left("v", &Unsent { files: 2, bytes: 2048, why: None, ..unsent.clone() }, "n");
        assert!(left.contains("2 files (2.0 KiB) written on node n were not"), "{left}");
        let conflict = upload_conflict("v", &Unsent { conflicts: 1, ..unsent }, "n");
        assert!(conflict.contains("a file that was also written on node n (a/b)"), "{conflict}");
    }

    #[test]
    fn a_heal_names_who_was_away() {
        let of = |cause| healed(&VolumeId::parse("v").unwrap(), cause, Duration::from_millis(3), "n");
        assert!(of("signal").contains("that serves the mount was replaced (signal)"), "{}", of("signal"));
        assert!(of("broker").contains("csi-plugin is back") && !of("broker").contains("was replaced"));
    }
}
