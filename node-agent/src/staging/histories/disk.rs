//! The staging disk of a history: jobs take their time and overtake each other, and what was not written out may be lost
//! with the power.

use super::fate::Fate;
use crate::lock::lock;
use crate::staging::simulated::{self, Simulated};
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// What a disk writes at once: whole, or not.
const SECTOR: usize = 512;

pub(super) struct Disk {
    /// The area's.
    dir: PathBuf,
    fate: Arc<Fate>,
    rng: Mutex<SmallRng>,
    durable: Mutex<Durable>,
    boots: Mutex<u32>,
    /// How long it may take, if some of its calls take longer.
    hangs: Mutex<Option<Duration>>,
}

/// One of so many calls does.
const HANGS_ONE_IN: u32 = 60;

/// What no loss of power takes.
#[derive(Default)]
struct Durable {
    /// Names of staged files.
    names: BTreeSet<String>,
    /// Their bytes.
    bytes: BTreeMap<String, Vec<u8>>,
    /// The journal's bytes, and the inode that they are of.
    journal: Option<(u64, Vec<u8>)>,
}

impl Disk {
    /// As this thread's.
    pub(super) fn new(dir: PathBuf, fate: Arc<Fate>, seed: u64) -> Arc<Self> {
        let rng = Mutex::new(SmallRng::seed_from_u64(seed));
        let disk = Arc::new(Self {
            dir,
            fate,
            rng,
            durable: Mutex::default(),
            boots: Mutex::new(1),
            hangs: Mutex::default(),
        });
        simulated::set(disk.clone());
        disk
    }

    pub(super) fn set_hangs(&self, limit: Option<Duration>) {
        *lock(&self.hangs) = limit;
    }

    fn files(&self) -> BTreeMap<String, PathBuf> {
        let Ok(entries) = fs::read_dir(self.dir.join("files")) else { return BTreeMap::new() };
        let named = |entry: fs::DirEntry| (entry.file_name().into_string().unwrap(), entry.path());
        entries.map(|entry| named(entry.unwrap())).collect()
    }

    fn journal(&self) -> (u64, Vec<u8>) {
        use std::os::unix::fs::MetadataExt;
        let path = self.dir.join("journal");
        (fs::metadata(&path).unwrap().ino(), fs::read(path).unwrap())
    }

    /// The node loses its power: of what was not written out some is there, and some is not.
    pub(super) fn loses_power(&self) {
        *lock(&self.boots) += 1;
        if !self.dir.join("journal").exists() {
            return; // before it was made
        }
        let mut rng = lock(&self.rng);
        let mut durable = lock(&self.durable);
        let Durable { names, bytes, journal } = &mut *durable;
        let present = self.files();
        let all: BTreeSet<String> = names.iter().chain(present.keys()).cloned().collect();
        for name in all {
            let path = self.dir.join("files").join(&name);
            let safe = bytes.get(&name).cloned().unwrap_or_default();
            let is_certain = names.contains(&name) && present.contains_key(&name);
            if is_certain || rng.random() {
                let now = fs::read(&path).unwrap_or_else(|_| safe.clone());
                let kept = mixed(&mut rng, &safe, &now);
                fs::write(&path, &kept).unwrap();
                bytes.insert(name, kept);
            } else {
                let _ = fs::remove_file(&path); // it may be gone already
                bytes.remove(&name);
            }
        }
        *names = self.files().into_keys().collect();
        let (inode, now) = self.journal();
        // One that was just compacted was written out by that.
        if let Some((_, safe)) = journal.as_ref().filter(|(of, _)| *of == inode) {
            let mut kept = mixed(&mut rng, safe, &now);
            kept.truncate(kept.len().max(safe.len()));
            fs::write(self.dir.join("journal"), kept).unwrap();
        }
    }
}

impl Simulated for Disk {
    fn take(self: Arc<Self>, job: Box<dyn FnOnce() + Send>) {
        let mut time = Duration::from_micros(lock(&self.rng).random_range(0..3000));
        if let Some(limit) = *lock(&self.hangs)
            && lock(&self.rng).random_ratio(1, HANGS_ONE_IN)
        {
            time = limit.mul_f64(lock(&self.rng).random_range(0.5..4.0));
        }
        tokio::spawn(async move {
            tokio::time::sleep(time).await;
            self.fate.is_alive().await;
            job();
        });
    }

    fn written_out(&self, data: &File) {
        use std::os::fd::AsRawFd;
        let path = fs::read_link(format!("/proc/self/fd/{}", data.as_raw_fd())).unwrap();
        let name = path.file_name().unwrap().to_str().unwrap().to_owned();
        let mut durable = lock(&self.durable);
        durable.names = self.files().into_keys().collect();
        // One that was removed meanwhile has no bytes to keep.
        if let Ok(bytes) = fs::read(path) {
            durable.bytes.insert(name, bytes);
        }
    }

    fn journal_written_out(&self) {
        lock(&self.durable).journal = Some(self.journal());
    }

    fn boot(&self) -> String {
        format!("boot {}", lock(&self.boots))
    }
}

/// Sectors of either, and a length of either. Where nothing was ever written there are zeros.
fn mixed(rng: &mut SmallRng, safe: &[u8], now: &[u8]) -> Vec<u8> {
    let len = if rng.random() { safe.len() } else { now.len() };
    let mut kept = vec![0; len];
    for start in (0..len).step_by(SECTOR) {
        let from = if rng.random() { safe } else { now };
        let end = len.min(start + SECTOR).min(from.len());
        if start < end {
            kept[start..end].copy_from_slice(&from[start..end]);
        }
    }
    kept
}
