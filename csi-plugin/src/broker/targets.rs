//! The targets that were mounted in this boot, on disk: after a reboot their directories are left behind and
//! nothing else says which are ours, and after the death of every process that held a mount nothing else says what it was made
//! from.

use super::Order;
use link::MountSpec;
use mounts::{Connection, Kernel, MountOptions, Target, TargetError, stack_at};
use serde::{Deserialize, Serialize};
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use volume::{Credentials, VolumeId};

const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";
const FORMAT: u32 = 1;
/// Dead mounts of one target that are still looked for; the oldest are given up.
const DEAD_MAX: usize = 16;

/// One file for each target, named by its digest.
#[derive(Debug)]
pub(super) struct Targets {
    directory: PathBuf,
    boot: String,
    /// Held while a record is changed.
    changing: Mutex<()>,
}

/// What a mount is made from, but for its secret.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Recipe {
    #[serde(flatten)]
    pub(super) spec: MountSpec,
    /// Does it need one?
    secret: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct TargetRecord {
    format: u32,
    boot: String,
    volume: VolumeId,
    target: PathBuf,
    /// None: written by a version that did not know how to mount anew.
    #[serde(default)]
    recipe: Option<Recipe>,
    /// Device numbers of dead mounts of this target that containers may still have.
    #[serde(default)]
    dead: Vec<(u32, u32)>,
    /// That of the mount. When it is taken from its target, a container may still have it. None: it was not
    /// mounted, or by a version that did not write it down.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    mounted: Option<(u32, u32)>,
}

impl Recipe {
    pub(super) fn of(order: &Order) -> Self {
        Self { spec: order.spec.clone(), secret: !order.credentials.is_empty() }
    }

    /// None: it needs a secret, which is not on record.
    pub(super) fn order(self, options: MountOptions) -> Option<Order> {
        let anonymous = Credentials::anonymous();
        (!self.secret).then(|| Order { spec: self.spec, credentials: anonymous, options })
    }
}

impl Targets {
    pub(super) fn open(state_dir: &Path) -> io::Result<Self> {
        let boot = fs::read_to_string(BOOT_ID)?.trim().to_owned();
        Self::of_boot(state_dir, boot)
    }

    fn of_boot(state_dir: &Path, boot: String) -> io::Result<Self> {
        let directory = state_dir.join("targets");
        fs::create_dir_all(&directory)?;
        Ok(Self { directory, boot, changing: Mutex::default() })
    }

    fn file(&self, target: &Path) -> PathBuf {
        use sha2::Digest;
        use std::os::unix::ffi::OsStrExt;
        let digest = sha2::Sha256::digest(target.as_os_str().as_bytes());
        self.directory.join(hex::encode(&digest[..16])).with_extension("json")
    }

    fn read(&self, target: &Path) -> Option<TargetRecord> {
        let entry = read(&self.file(target))?;
        (entry.boot == self.boot && entry.target == target).then_some(entry)
    }

    /// A record that cannot be written costs a directory that stays behind after a reboot and a mount that waits for
    /// its republish, not a publish.
    fn change(&self, target: &Path, volume: &VolumeId, change: impl FnOnce(&mut TargetRecord)) {
        let _changing = self.changing.lock().unwrap_or_else(PoisonError::into_inner);
        let before = self.read(target);
        let mut entry = before.clone().unwrap_or_else(|| TargetRecord {
            format: FORMAT,
            boot: self.boot.clone(),
            volume: volume.clone(),
            target: target.to_owned(),
            recipe: None,
            dead: Vec::new(),
            mounted: None,
        });
        change(&mut entry);
        if before.as_ref() == Some(&entry) {
            return;
        }
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

    /// Before the mount.
    pub(super) fn add(&self, target: &Path, recipe: Recipe) {
        let volume = recipe.spec.volume.id.clone();
        self.change(target, &volume.clone(), |entry| {
            // Of another volume's mount nothing can be left for this one.
            if entry.volume != volume {
                entry.mounted = None;
            }
            entry.volume = volume;
            entry.recipe = Some(recipe);
        });
    }

    /// As soon as its number is known.
    pub(super) fn set_mounted(&self, target: &Path, volume: &VolumeId, connection: Connection) {
        self.change(target, volume, |entry| entry.mounted = Some((connection.major, connection.minor)));
    }

    /// The mount of this volume that was made there last, in this boot.
    pub(super) fn mounted(&self, target: &Path, volume: &str) -> Option<Connection> {
        let entry = self.read(target).filter(|entry| entry.volume.as_str() == volume)?;
        entry.mounted.map(|(major, minor)| Connection { major, minor })
    }

    pub(super) fn recipe(&self, target: &Path) -> Option<Recipe> {
        let mut recipe = self.read(target)?.recipe?;
        // A record of the version before this one has it beside the recipe only.
        if recipe.spec.target.is_empty() {
            recipe.spec.target = target.display().to_string();
        }
        Some(recipe)
    }

    /// Before a dead mount is replaced: should we die on the way, the next broker goes on.
    pub(super) fn add_dead(&self, target: &Path, volume: &VolumeId, dead: Connection) -> Vec<Connection> {
        self.change(target, volume, |entry| {
            let dead = (dead.major, dead.minor);
            entry.dead.retain(|earlier| *earlier != dead);
            entry.dead.push(dead);
            let surplus = entry.dead.len().saturating_sub(DEAD_MAX);
            entry.dead.drain(..surplus);
        });
        self.dead(target)
    }

    pub(super) fn dead(&self, target: &Path) -> Vec<Connection> {
        let dead = self.read(target).map(|entry| entry.dead).unwrap_or_default();
        dead.into_iter().map(|(major, minor)| Connection { major, minor }).collect()
    }

    /// None of them is anywhere any more.
    pub(super) fn forget_dead(&self, target: &Path, volume: &VolumeId) {
        self.change(target, volume, |entry| entry.dead.clear());
    }

    pub(super) fn remove(&self, target: &Path) {
        let _changing = self.changing.lock().unwrap_or_else(PoisonError::into_inner);
        let file = self.file(target);
        match fs::remove_file(&file) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                tracing::warn!(file = %file.display(), %error, "the record of a target stays");
            }
            _ => {}
        }
    }

    /// Records of an earlier boot, whose mounts went with it: their empty directories are removed, so that no pod
    /// takes them for volumes. Kubelet makes them again where it still wants them.
    pub(super) fn clean_previous_boot(&self, kubelet_dirs: &[PathBuf], kernel: &dyn Kernel) {
        let table = match kernel.table() {
            Ok(table) => table,
            Err(error) => return tracing::warn!(%error, "targets of an earlier boot are not cleaned"),
        };
        let entries = fs::read_dir(&self.directory).into_iter().flatten().flatten();
        let mut cleaned = 0;
        for file in entries.map(|e| e.path()) {
            match read(&file) {
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

fn read(file: &Path) -> Option<TargetRecord> {
    let entry: TargetRecord = serde_json::from_slice(&fs::read(file).ok()?).ok()?;
    (entry.format == FORMAT).then_some(entry)
}

fn remove(kubelet_dirs: &[PathBuf], entry: &TargetRecord) -> bool {
    match Target::resolve(kubelet_dirs, &entry.target).and_then(|target| target.remove()) {
        Ok(()) => true,
        Err(TargetError::NoParent(_)) => false,
        // Another program's files, or not a directory: nothing of ours.
        Err(error) => {
            tracing::warn!(volume = %entry.volume, %error, "a target of an earlier boot is left alone");
            false
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use link::{Claim, Pod, Subjects};
    use mounts::{Fake, MountSource};
    use volume::VolumeSpec;

    fn recipe(volume: &str, secrets: &[(&str, &str)]) -> Recipe {
        let volume = VolumeSpec {
            id: VolumeId::parse(volume).unwrap(),
            source: volume::SourceUrl::parse("s3://bucket/a").unwrap(),
            parameters: volume::Parameters::default(),
        };
        Recipe::of(&Order {
            spec: MountSpec { environment: true, ..MountSpec::new(volume, "/kubelet/t") },
            credentials: Credentials::from_secrets(secrets.iter().copied()).unwrap(),
            options: MountOptions::default(),
        })
    }

    #[test]
    fn what_a_mount_was_made_from_is_known_but_for_its_secret() {
        let dir = tempfile::tempdir().unwrap();
        let targets = Targets::of_boot(dir.path(), "boot".into()).unwrap();
        let (plain, secret) = (Path::new("/plain"), Path::new("/secret"));
        targets.add(plain, recipe("v", &[]));
        targets.add(secret, recipe("w", &[("accessKeyId", "id"), ("secretAccessKey", "hunter2")]));
        let options = MountOptions { no_exec: true, ..MountOptions::default() };
        let order = targets.recipe(plain).unwrap().order(options).unwrap();
        assert_eq!(
            (order.spec.volume.id.as_str(), order.spec.environment, order.options),
            ("v", true, options)
        );
        assert!(targets.recipe(secret).unwrap().order(options).is_none());
        // Nor can it be made without an authority or a certificate, although nothing signs its requests.
        let authority = Path::new("/authority");
        targets.add(authority, recipe("a", &[("caBundle", "-----BEGIN CERTIFICATE-----")]));
        assert!(targets.recipe(authority).unwrap().order(options).is_none());
        for file in fs::read_dir(dir.path().join("targets")).unwrap() {
            assert!(!fs::read_to_string(file.unwrap().path()).unwrap().contains("hunter2"));
        }
        // A record of the version before this one.
        let file = targets.file(plain);
        let mut old: serde_json::Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
        old.as_object_mut().unwrap().retain(|key, _| !["recipe", "dead"].contains(&key.as_str()));
        fs::write(&file, old.to_string()).unwrap();
        assert!(targets.read(plain).is_some() && targets.recipe(plain).is_none());
        assert!(Targets::of_boot(dir.path(), "other".into()).unwrap().recipe(secret).is_none());
    }

    /// The record but for the boot.
    #[test]
    fn records_are_those_of_the_golden_file_and_of_before_the_first_release_are_read() {
        let dir = tempfile::tempdir().unwrap();
        let targets = Targets::of_boot(dir.path(), "BOOT".into()).unwrap();
        let (at, id) = (Path::new("/kubelet/t"), VolumeId::parse("pvc-1").unwrap());
        let subject = |text: &str| text.to_owned();
        let subjects = Subjects {
            pod: Some(Pod { name: subject("p"), namespace: subject("n"), uid: subject("u") }),
            claim: Some(Claim { name: subject("c"), namespace: subject("n"), uid: None }),
        };
        let recipe = Recipe { secret: true, spec: MountSpec { subjects, ..recipe("pvc-1", &[]).spec } };
        targets.add(at, recipe.clone());
        targets.add_dead(at, &id, Connection { major: 0, minor: 47 });
        let written = fs::read_to_string(targets.file(at)).unwrap() + "\n";
        let text = crate::golden::same(crate::GOLDEN, "target-1.json", &written);
        for text in [text, crate::golden::read(crate::GOLDEN, "target-0.json")] {
            fs::write(targets.file(at), text).unwrap();
            assert_eq!(targets.recipe(at), Some(recipe.clone()));
            assert_eq!(targets.dead(at), [Connection { major: 0, minor: 47 }]);
        }
    }

    #[test]
    fn a_record_tells_which_mount_was_made_last() {
        let dir = tempfile::tempdir().unwrap();
        let targets = Targets::of_boot(dir.path(), "BOOT".into()).unwrap();
        let (at, id) = (Path::new("/kubelet/t"), VolumeId::parse("pvc-1").unwrap());
        targets.add(at, recipe("pvc-1", &[]));
        assert_eq!(targets.mounted(at, "pvc-1"), None);
        targets.set_mounted(at, &id, Connection { major: 0, minor: 48 });
        let written = fs::read_to_string(targets.file(at)).unwrap() + "\n";
        crate::golden::same(crate::GOLDEN, "target-1-mounted.json", &written);
        targets.add(at, recipe("pvc-1", &[]));
        assert_eq!(targets.mounted(at, "pvc-1"), Some(Connection { major: 0, minor: 48 }));
        assert_eq!(targets.mounted(at, "other"), None);
        targets.add(at, recipe("other", &[]));
        assert_eq!(targets.mounted(at, "other"), None, "another volume's mount");
    }

    #[test]
    fn a_record_of_a_volume_that_only_a_later_version_understands_is_kept_as_it_is() {
        let dir = tempfile::tempdir().unwrap();
        let targets = Targets::of_boot(dir.path(), "boot".into()).unwrap();
        let at = Path::new("/t");
        let mut later = recipe("v", &[]);
        later.spec.volume = serde_json::from_str(
            r#"{"id":"v","source":"later://x","parameters":{"rule":"r"},"hints":{"hint":"h"}}"#,
        )
        .unwrap();
        targets.add(at, later.clone());
        assert_eq!(targets.recipe(at).unwrap(), later);
        // A record of a format that is not ours says nothing, and costs nothing but a wait for the republish.
        let text = fs::read_to_string(targets.file(at)).unwrap();
        fs::write(targets.file(at), text.replace("\"format\":1", "\"format\":2")).unwrap();
        assert!(targets.recipe(at).is_none());
        let whole = text.len();
        for cut in 0..whole {
            fs::write(targets.file(at), &text[..cut]).unwrap();
            assert!(targets.recipe(at).is_none(), "{}", &text[..cut]);
        }
    }

    #[test]
    fn dead_mounts_are_remembered_until_they_are_gone_and_not_without_limit() {
        let dir = tempfile::tempdir().unwrap();
        let targets = Targets::of_boot(dir.path(), "boot".into()).unwrap();
        let (at, id) = (Path::new("/t"), VolumeId::parse("v").unwrap());
        targets.add(at, recipe("v", &[]));
        let dead = |minor| Connection { major: 0, minor };
        for minor in [1, 2, 1] {
            targets.add_dead(at, &id, dead(minor));
        }
        targets.add(at, recipe("v", &[]));
        assert_eq!(targets.dead(at), [dead(2), dead(1)]);
        for minor in 10..100 {
            targets.add_dead(at, &id, dead(minor));
        }
        assert_eq!((targets.dead(at).len(), targets.dead(at).last()), (DEAD_MAX, Some(&dead(99))));
        targets.forget_dead(at, &id);
        assert!(targets.dead(at).is_empty() && targets.recipe(at).is_some());
    }

    #[test]
    fn after_a_reboot_empty_targets_go_and_others_stay() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().canonicalize().unwrap();
        let kubelet = root.join("kubelet");
        let before = Targets::of_boot(&root, "first".into()).unwrap();
        let target = |name: &str| kubelet.join(name);
        for name in ["empty", "full", "mounted", "gone", "unpublished"] {
            fs::create_dir_all(target(name)).unwrap();
            before.add(&target(name), recipe("v", &[]));
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
