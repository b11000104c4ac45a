//! The targets that were mounted in this boot, on disk: after a reboot their directories are left behind and nobody
//! else knows which are ours.

use mounts::{Kernel, Target, TargetError, stack_at};
use serde::{Deserialize, Serialize};
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use volume::VolumeId;

const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";
const FORMAT: u32 = 1;

/// One file for each target, named by its digest.
#[derive(Debug)]
pub(super) struct Targets {
    directory: PathBuf,
    boot: String,
}

#[derive(Debug, Serialize, Deserialize)]
struct Entry {
    format: u32,
    boot: String,
    volume: VolumeId,
    target: PathBuf,
}

impl Targets {
    pub(super) fn open(state_dir: &Path) -> io::Result<Self> {
        let boot = fs::read_to_string(BOOT_ID)?.trim().to_owned();
        Self::of_boot(state_dir, boot)
    }

    fn of_boot(state_dir: &Path, boot: String) -> io::Result<Self> {
        let directory = state_dir.join("targets");
        fs::create_dir_all(&directory)?;
        Ok(Self { directory, boot })
    }

    fn file(&self, target: &Path) -> PathBuf {
        use sha2::Digest;
        use std::os::unix::ffi::OsStrExt;
        let digest = sha2::Sha256::digest(target.as_os_str().as_bytes());
        self.directory.join(hex::encode(&digest[..16])).with_extension("json")
    }

    /// Before the mount. A record that cannot be written costs a directory that stays behind after a reboot, not a
    /// publish.
    pub(super) fn add(&self, volume: &VolumeId, target: &Path) {
        let entry = Entry {
            format: FORMAT,
            boot: self.boot.clone(),
            volume: volume.clone(),
            target: target.to_owned(),
        };
        let file = self.file(target);
        let write = || -> io::Result<()> {
            let draft = file.with_extension("new");
            File::create(&draft)?.write_all(&serde_json::to_vec(&entry)?)?;
            fs::rename(&draft, &file)
        };
        if let Err(error) = write() {
            tracing::warn!(%volume, file = %file.display(), %error, "the record of a target was not written");
        }
    }

    pub(super) fn remove(&self, target: &Path) {
        let file = self.file(target);
        match fs::remove_file(&file) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                tracing::warn!(file = %file.display(), %error, "the record of a target stays");
            }
            _ => {}
        }
    }

    /// Records of an earlier boot, whose mounts went with it: their empty directories are removed, so that nobody
    /// takes them for volumes. Kubelet makes them again where it still wants them.
    pub(super) fn clean_previous_boot(&self, kubelet_dirs: &[PathBuf], kernel: &dyn Kernel) {
        let table = match kernel.table() {
            Ok(table) => table,
            Err(error) => return tracing::warn!(%error, "targets of an earlier boot are not cleaned"),
        };
        let entries = fs::read_dir(&self.directory).into_iter().flatten().flatten();
        let mut cleaned = 0;
        for file in entries.map(|e| e.path()) {
            let entry: Option<Entry> =
                fs::read(&file).ok().and_then(|text| serde_json::from_slice(&text).ok());
            match entry.filter(|e| e.format == FORMAT) {
                Some(entry) if entry.boot == self.boot => continue,
                // In use again already: its record is written anew by the next publish.
                Some(entry) if !stack_at(&table, &entry.target).is_empty() => continue,
                Some(entry) => cleaned += usize::from(remove(kubelet_dirs, &entry)),
                // A torn record of a crash names nothing.
                None => {}
            }
            if let Err(error) = fs::remove_file(&file) {
                tracing::warn!(file = %file.display(), %error, "the record of a target stays");
            }
        }
        if cleaned > 0 {
            tracing::info!(directories = cleaned, "targets of an earlier boot were removed");
        }
    }
}

fn remove(kubelet_dirs: &[PathBuf], entry: &Entry) -> bool {
    match Target::resolve(kubelet_dirs, &entry.target).and_then(|target| target.remove()) {
        Ok(()) => true,
        Err(TargetError::NoParent(_)) => false,
        // Somebody's files, or not a directory: nothing of ours.
        Err(error) => {
            tracing::warn!(volume = %entry.volume, %error, "a target of an earlier boot is left alone");
            false
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mounts::{Fake, MountSource};

    #[test]
    fn after_a_reboot_empty_targets_go_and_others_stay() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().canonicalize().unwrap();
        let kubelet = root.join("kubelet");
        let id = VolumeId::parse("v").unwrap();
        let before = Targets::of_boot(&root, "first".into()).unwrap();
        let target = |name: &str| kubelet.join(name);
        for name in ["empty", "full", "mounted", "gone", "unpublished"] {
            fs::create_dir_all(target(name)).unwrap();
            before.add(&id, &target(name));
        }
        fs::write(target("full").join("file"), b"x").unwrap();
        fs::remove_dir(target("gone")).unwrap();
        before.remove(&target("unpublished"));
        fs::write(root.join("targets/torn.json"), b"{").unwrap();
        let kernel = Fake::default();
        kernel.leave_mount(&target("mounted"), &MountSource { volume: "v".into(), digest: "d".into() });

        before.clean_previous_boot(std::slice::from_ref(&kubelet), &kernel);
        assert!(target("empty").exists(), "the same boot");

        let after = Targets::of_boot(&root, "second".into()).unwrap();
        after.clean_previous_boot(std::slice::from_ref(&kubelet), &kernel);
        let left: Vec<bool> =
            ["empty", "full", "mounted", "unpublished"].iter().map(|n| target(n).exists()).collect();
        assert_eq!(left, [false, true, true, true]);
        assert_eq!(fs::read_dir(root.join("targets")).unwrap().count(), 1, "the mounted one's record");
    }
}
