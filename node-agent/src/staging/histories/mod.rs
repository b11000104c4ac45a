//! Histories of a staging area, each from a seed: MILLPOND_SEED=n MILLPOND_HISTORIES=1 repeats the one that failed.
//!
//! ```text
//!  clients ──Operation──► Area (the product's) ──jobs──► the disk: they overtake each other; power is lost
//!     │ each knows what it     │
//!     │ should find            └──► the store: it refuses, loses answers, does things late
//! ```
//!
//! Agents die at any step and at any time, are succeeded, and lose their node's power; what they were asked and had not answered
//! is asked of the next one. All is on one thread, under a time of its own.

mod client;
mod disk;
mod fate;
mod life;
mod silent;
mod store;
mod trace;
mod uploads;

use super::conditions::PROBE;
use super::uploads::{LISTING, OLD};
use super::{Executed, STEPS, Staging};
use crate::lock::lock;
use crate::state::StateDir;
use crate::testing::scope_over;
use client::Client;
use disk::Disk;
use fate::Fate;
use life::{Life, Plan};
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;
use store::SimulatedStore;
use trace::trace;
use volume::{Access, Parameters, ScopeId, SourceUrl, VolumeId, VolumeSpec};

const VOLUME: &str = "simulated";
/// How long a staging disk may take.
const DISK_LIMIT: Duration = Duration::from_secs(2);
/// What is left to upload is uploaded by then, once nothing fails any more.
const UPLOADS: Duration = Duration::from_secs(3600);
const LIVES: usize = 6;
/// Steps at which nobody dies in a hundred histories: uploads in parts are seldom waited for.
const RARE: usize = 2;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    /// Its clients have done what they wanted.
    Quiet,
    Killed,
    Succeeded,
    PowerLost,
}

#[derive(Default)]
struct Summary {
    operations: usize,
    ends: BTreeMap<String, usize>,
    deaths: BTreeMap<&'static str, u32>,
}

struct World {
    seed: u64,
    plan: Plan,
    rng: SmallRng,
    dir: tempfile::TempDir,
    fate: Arc<Fate>,
    disk: Arc<Disk>,
    store: Arc<SimulatedStore>,
    clients: Vec<Arc<tokio::sync::Mutex<Client>>>,
    summary: Summary,
}

/// In memory where there is room: it is written out often.
fn directory() -> tempfile::TempDir {
    let shared = std::path::Path::new("/dev/shm");
    let free = rustix::fs::statvfs(shared).map_or(0, |about| about.f_bavail.saturating_mul(about.f_frsize));
    if free > 2 << 30 { tempfile::tempdir_in(shared).unwrap() } else { tempfile::tempdir().unwrap() }
}

impl World {
    fn new(seed: u64) -> Self {
        let plan = Plan::of(seed);
        let mut rng = SmallRng::seed_from_u64(seed);
        let (dir, fate) = (directory(), Arc::new(Fate::default()));
        let disk = Disk::new(dir.path().join("staging").join(VOLUME), fate.clone(), rng.random());
        let store =
            SimulatedStore::new(fate.clone(), rng.random(), plan.holds_conditions, plan.versions_of_bytes);
        let observed = fate.clone();
        failpoint::observe(Rc::new(move |step| observed.step(step)));
        let clients = (0..plan.clients).map(|number| {
            let mut client = Client::new(number, rng.random());
            if plan.has_files {
                client
                    .is_given()
                    .into_iter()
                    .for_each(|(path, bytes)| store.has(&path, bytes, client::OWNER));
            }
            Arc::new(tokio::sync::Mutex::new(client))
        });
        let clients = clients.collect();
        Self { seed, plan, rng, dir, fate, disk, store, clients, summary: Summary::default() }
    }

    fn spec(&self) -> VolumeSpec {
        let parameters =
            Parameters { access: Access::ReadWrite, write_mode: self.plan.mode, ..Parameters::default() };
        let (id, source) = (VolumeId::parse(VOLUME).unwrap(), SourceUrl::parse("s3://bucket/a").unwrap());
        VolumeSpec { id, source, parameters }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn history(mut self) -> Summary {
        for life in 0..LIVES {
            self.store.set_faults(self.plan.faults);
            self.disk.set_hangs(self.plan.hangs.then_some(DISK_LIMIT));
            // Each in its turn: some come seldom.
            let step = STEPS[(self.seed as usize % STEPS.len() * 5 + life) % STEPS.len()];
            let armed = self.rng.random_bool(0.8).then(|| (step, self.rng.random_range(0..2)));
            self.fate.begins(armed);
            let end = self.life(life, false);
            *self.summary.ends.entry(format!("{end:?}")).or_default() += 1;
            self.store.is_left();
            if end == End::PowerLost {
                // What has reached it is done before the node is up again.
                self.store.settles();
                self.disk.loses_power();
                // As its store of names does when it is opened after another run of the kernel.
                std::fs::remove_dir_all(self.path("meta")).unwrap();
                for client in &self.clients {
                    client.try_lock().unwrap().loses_power();
                }
            }
        }
        // Nothing fails any more.
        self.store.settles();
        self.store.set_faults(0);
        self.disk.set_hangs(None);
        self.fate.begins(None);
        assert_eq!(self.life(LIVES, true), End::Quiet);
        self.summary.operations =
            self.clients.iter().map(|client| client.try_lock().unwrap().operations).sum();
        self.summary.deaths = lock(&self.fate.deaths).clone();
        self.summary
    }

    fn life(&mut self, number: usize, is_last: bool) -> End {
        let mut builder = tokio::runtime::Builder::new_current_thread();
        let runtime = builder.enable_all().start_paused(true).max_blocking_threads(2).build().unwrap();
        let numbers = Arc::new(StateDir::open(&self.path("state")).unwrap());
        let scope = runtime.block_on(async {
            let id = ScopeId::parse(&format!("{:032x}", self.seed)).unwrap();
            let store = self.store.clone();
            scope_over(self.dir.path(), id, numbers.clone(), |_| Ok(store)).0
        });
        let end = runtime.block_on(async {
            tokio::spawn(clock());
            let (spec, fails) = (self.spec(), self.plan.fails());
            let staging = Arc::new(Staging::new(self.path("staging"), DISK_LIMIT));
            let (of, numbers, fate) = (scope.clone(), numbers.clone(), self.fate.clone());
            let opening = tokio::spawn(async move {
                loop {
                    match staging.open(&spec, &of, &numbers).await {
                        Ok(area) => return area,
                        // It is published again, if its agent lives.
                        Err(refusal) => {
                            fate.is_alive().await;
                            assert!(fails, "{}", refusal.message);
                        }
                    }
                }
            });
            let opened = tokio::select! {
                biased;
                () = self.fate.death() => None,
                opened = opening => Some(opened.unwrap_or_else(|error| panic!("seed {}: {error}", self.seed))),
            };
            let Some(area) = opened else { return self.killed() };
            let life = Arc::new(Life {
                area: area.clone(),
                fate: self.fate.clone(),
                store: self.store.clone(),
                plan: self.plan,
            });
            let (seed, step_count) = (self.seed, self.rng.random_range(5..80));
            let mut tasks = tokio::task::JoinSet::new();
            for client in &self.clients {
                let (client, life) = (client.clone(), life.clone());
                tasks.spawn(async move {
                    let mut client = client.lock().await;
                    let executed = Arc::new(Executed::default());
                    life.area.join(client.mount, &executed);
                    let worked = client.work(&life, &executed, step_count, is_last).await;
                    if worked.is_err() {
                        trace(|| life.shown());
                    }
                    worked.unwrap_or_else(|error| panic!("client {} of seed {seed}: {error:#}", client.number));
                });
            }
            let all = async {
                while let Some(done) = tasks.join_next().await {
                    match done {
                        Ok(()) => {}
                        Err(error) if self.fate.is_dead() => drop(error), // it was unwound
                        Err(error) => std::panic::resume_unwind(error.into_panic()),
                    }
                }
            };
            // Its clock says of each upload that it is old, also of those that are under way.
            let is_put_on = self.rng.random_bool(0.2);
            let listed_at = Duration::from_millis(self.rng.random_range(5..500));
            if is_put_on {
                let (area, store) = (Arc::downgrade(&area), self.store.clone());
                tokio::spawn(async move {
                    tokio::time::sleep(listed_at).await;
                    store.puts_its_clock_on(OLD);
                    if let Some(area) = area.upgrade() {
                        area.end_old_uploads().await;
                    }
                });
            }
            let at = Duration::from_millis(self.rng.random_range(5..1500));
            let is_timed = !is_last && self.rng.random_bool(0.4);
            let timed = async {
                match is_timed {
                    true => tokio::time::sleep(at).await,
                    false => std::future::pending().await,
                }
            };
            let end = tokio::select! {
                biased;
                () = self.fate.death() => End::Killed,
                () = all => End::Quiet,
                () = timed => match self.rng.random() {
                    true => End::Killed,
                    false => self.leaves(&area).await,
                },
            };
            if is_last {
                self.judge(&area).await;
            }
            match end {
                End::Killed => self.killed(),
                End::Quiet if !is_last && self.rng.random() => {
                    assert!(area.release(std::time::Instant::now() + DISK_LIMIT));
                    End::Succeeded
                }
                end => end,
            }
        });
        self.fate.ends();
        drop(runtime);
        drop(scope); // outside of it: on this thread, before the next life opens the same files
        trace(|| format!("life {number} of seed {}: {end:?}", self.seed));
        end
    }

    /// It is succeeded while programs wait for what they have asked of it.
    async fn leaves(&mut self, area: &Arc<super::Area>) -> End {
        let mut pause = || Duration::from_micros(self.rng.random_range(0..20_000));
        let (before, after) = (pause(), pause());
        self.fate.leaves();
        // Its release waits for a call of the disk meanwhile.
        area.tenure.end();
        tokio::time::sleep(before).await;
        assert!(area.release(std::time::Instant::now() + DISK_LIMIT));
        tokio::time::sleep(after).await;
        End::Succeeded
    }

    fn killed(&mut self) -> End {
        if self.plan.loses_power && self.rng.random() { End::PowerLost } else { End::Killed }
    }

    /// At the end the store has what the clients know, and nothing else.
    async fn judge(&self, area: &Arc<super::Area>) {
        let seed = self.seed;
        assert!(area.send_all(UPLOADS).await, "seed {seed}: {:?} is not sent", area.waiting());
        // What came late is looked for, and which uploads are left over.
        tokio::time::advance(2 * super::late::LOOK).await;
        tokio::time::sleep(Duration::from_secs(2)).await;
        let mut uploads = self.store.uploads();
        // The probe is no file's.
        uploads.retain(|_, (path, has_parts)| *has_parts && !path.starts_with(PROBE));
        assert_eq!(uploads, BTreeMap::new(), "seed {seed}: uploads whose parts stay");
        assert!(area.state().uploads.is_empty(), "seed {seed}: uploads are noted that are over");
        // Whose begin was not answered, or whose agent died before it was noted: a week later.
        self.store.puts_its_clock_on(OLD);
        tokio::time::advance(LISTING).await;
        tokio::time::sleep(Duration::from_secs(2)).await;
        assert_eq!(self.store.uploads(), BTreeMap::new(), "seed {seed}: uploads that stay");
        let mut expected = BTreeMap::new();
        for client in &self.clients {
            let client = client.try_lock().unwrap();
            expected.extend(client.objects());
        }
        let mut found = self.store.objects();
        found.retain(|path, _| !path.starts_with(PROBE));
        if let Some(shared) = found.remove("shared") {
            let all: Vec<_> = self.clients.iter().map(|client| client.try_lock().unwrap()).collect();
            client::judge_shared(&shared.bytes, &all, self.plan.loses_power)
                .unwrap_or_else(|e| panic!("seed {seed}: {e:#}"));
        }
        let names = |all: &BTreeMap<String, _>| all.keys().cloned().collect::<Vec<String>>();
        assert_eq!(
            found.keys().cloned().collect::<Vec<_>>(),
            names(&expected),
            "seed {seed}: names in the store"
        );
        for (path, (bytes, mode)) in expected {
            let object = &found[&path];
            let differs = object.bytes.iter().zip(&bytes).position(|(is, wanted)| is != wanted);
            assert!(
                *object.bytes == bytes,
                "seed {seed}: {path} has {} bytes in the store instead of {}, and others from {differs:?} on",
                object.bytes.len(),
                bytes.len()
            );
            assert_eq!(object.attributes.mode, Some(mode), "seed {seed}: the mode of {path} in the store");
        }
    }
}

/// Time goes on by itself, a little faster than threads of the cache work.
async fn clock() {
    loop {
        for _ in 0..4 {
            tokio::task::yield_now().await;
        }
        tokio::time::advance(Duration::from_millis(1)).await;
    }
}

pub(super) fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

#[test]
fn whatever_dies_what_was_written_is_found_and_gets_to_the_store_once() {
    let first = number("MILLPOND_SEED").unwrap_or_else(rand::random);
    let count = number("MILLPOND_HISTORIES").unwrap_or(120);
    let mut all = Summary::default();
    for seed in (0..count).map(|n| first.wrapping_add(n)) {
        println!("MILLPOND_SEED={seed} MILLPOND_HISTORIES=1");
        let summary = World::new(seed).history();
        all.operations += summary.operations;
        for (end, times) in summary.ends {
            *all.ends.entry(end).or_default() += times;
        }
        for (step, times) in summary.deaths {
            *all.deaths.entry(step).or_default() += times;
        }
    }
    println!(
        "{count} histories from seed {first}: {} operations, {:?}, deaths at {:?}",
        all.operations, all.ends, all.deaths
    );
    let survived: Vec<_> = STEPS.iter().filter(|step| !all.deaths.contains_key(*step)).collect();
    assert!(count < 100 || survived.len() <= RARE, "no agent died at {survived:?}");
    assert!(count < 1000 || survived.is_empty(), "no agent died at {survived:?}");
}
