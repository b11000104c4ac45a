//! A program of a history, with what it should find.

use super::life::Life;
use super::trace::trace;
use crate::lock::lock;
use crate::staging::testing::bring_write;
use crate::staging::{Caller, Executed};
use anyhow::{Result, bail, ensure};
use cache::meta::ROOT;
use inflight::{Inflight, Room};
use link::Cause;
use link::broker::MountId;
use link::writable::{Done, Node, Operation, Owner, SetAttributes, Wrong};
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};
use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex};
use volume::WriteMode;

/// Names that each has.
const NAMES: usize = 6;
const BYTES_MAX: usize = 60_000;
pub(super) const OWNER: Owner = Owner { mode: 0o640, uid: 3, gid: 4 };
/// How often it is asked where bytes are.
const LOCATED_MAX: u32 = 4;
/// Of each that is appended to the shared file: who, and the how many-th of it, from 1 on.
const RECORD: usize = 16;

#[derive(Clone, Debug)]
struct Known {
    ino: u64,
    bytes: Vec<u8>,
    mode: u32,
    is_open: bool,
    /// As it was when it was last said to be safe.
    safe: Option<Safe>,
}

#[derive(Clone, Debug)]
struct Safe {
    bytes: Vec<u8>,
    /// Written or cut off since.
    touched: Vec<(usize, usize)>,
    /// Sizes since.
    shortest: usize,
    longest: usize,
    /// Names since; None: unlinked.
    places: Vec<Option<String>>,
}

impl Safe {
    fn allows(&self, found: &[u8]) -> bool {
        let is_touched = |at: usize| self.touched.iter().any(|(from, to)| (*from..*to).contains(&at));
        (self.shortest..=self.longest).contains(&found.len())
            && (0..found.len().min(self.bytes.len())).all(|at| found[at] == self.bytes[at] || is_touched(at))
    }
}

impl Known {
    fn touch(&mut self, from: usize, to: usize) {
        let len = self.bytes.len();
        if let Some(safe) = &mut self.safe {
            safe.touched.push((from, to));
            (safe.shortest, safe.longest) = (safe.shortest.min(len), safe.longest.max(len));
        }
    }

    fn write(&mut self, offset: usize, bytes: &[u8]) {
        let end = offset + bytes.len();
        let before = self.bytes.len();
        self.bytes.resize(before.max(end), 0);
        self.bytes[offset..end].copy_from_slice(bytes);
        self.touch(offset, end);
    }

    fn cut(&mut self, size: usize) {
        let before = self.bytes.len();
        self.bytes.resize(size, 0);
        self.touch(size.min(before), size.max(before));
    }

    fn goes(&mut self, to: Option<&str>) {
        if let Some(safe) = &mut self.safe {
            safe.places.push(to.map(str::to_owned));
        }
    }

    fn is_safe(&mut self, name: Option<&str>) {
        let len = self.bytes.len();
        self.safe = Some(Safe {
            bytes: self.bytes.clone(),
            touched: Vec::new(),
            shortest: len,
            longest: len,
            places: vec![name.map(str::to_owned)],
        });
    }
}

/// What was found at each name.
type Files = BTreeMap<String, (Node, Vec<u8>)>;

#[derive(Clone, Debug)]
enum Act {
    FindDirectory,
    MakeDirectory,
    Create {
        name: String,
    },
    Open {
        name: String,
    },
    Write {
        ino: u64,
        offset: usize,
        bytes: Vec<u8>,
    },
    Append {
        ino: u64,
        bytes: Vec<u8>,
    },
    Cut {
        ino: u64,
        size: usize,
    },
    Mode {
        ino: u64,
        mode: u32,
    },
    Rename {
        from: String,
        to: String,
    },
    Unlink {
        name: String,
    },
    Sync {
        ino: u64,
        closing: bool,
    },
    Close {
        ino: u64,
    },
    OpenShared,
    /// Somebody else has made it.
    FindShared,
    /// As a kernel that has looked it up anew.
    OpenSharedAgain {
        ino: u64,
    },
    AppendShared,
    SyncShared,
    MakeEmpty {
        name: String,
    },
    RemoveEmpty {
        name: String,
    },
    /// Its directory gets its other name.
    Move,
}

pub(super) struct Client {
    pub(super) number: usize,
    pub(super) mount: MountId,
    pub(super) operations: usize,
    rng: SmallRng,
    inflight: Arc<Inflight>,
    next: u64,
    /// Asked, and not answered.
    pending: Option<(u64, Act)>,
    /// Failed, and not looked at what came of it.
    failed: Option<Act>,
    dir: Option<u64>,
    /// Which of its two names its directory has.
    is_moved: bool,
    files: BTreeMap<String, Known>,
    /// What the store has from before, and was not looked up yet.
    given: BTreeMap<String, Vec<u8>>,
    /// Open still.
    unlinked: Vec<Known>,
    /// Names at which something safe was, and that nothing but another file has taken since.
    kept: BTreeSet<String>,
    /// Empty directories in its own: is it there? None: nobody knows.
    empty: BTreeMap<String, Option<bool>>,
    shared: Option<u64>,
    /// It is there, and this program does not have it open yet.
    found_shared: Option<u64>,
    /// Records that were appended, and those of them that are safe.
    appended: BTreeSet<u64>,
    safe_records: BTreeSet<u64>,
    /// That it was not told of, and nobody knows.
    doubtful: BTreeSet<u64>,
    next_record: u64,
    has_lost: bool,
    /// What has failed did so with an agent before.
    is_of_before: bool,
    /// Records whose place may have been noted by an agent that died before it could write them.
    unfilled: usize,
    /// Requests that were answered and are not done yet.
    late: Mutex<Vec<tokio::task::JoinHandle<()>>>,
}

fn memory() -> Arc<Inflight> {
    let fd = Inflight::create(Room::ReadWrite).unwrap();
    Inflight::map(&fd).unwrap().into()
}

impl Client {
    pub(super) fn new(number: usize, seed: u64) -> Self {
        Self {
            number,
            mount: MountId(1000 + number as u64),
            operations: 0,
            rng: SmallRng::seed_from_u64(seed),
            inflight: memory(),
            next: 0,
            pending: None,
            failed: None,
            dir: None,
            is_moved: false,
            files: BTreeMap::new(),
            given: BTreeMap::new(),
            unlinked: Vec::new(),
            kept: BTreeSet::new(),
            empty: BTreeMap::new(),
            shared: None,
            found_shared: None,
            appended: BTreeSet::new(),
            safe_records: BTreeSet::new(),
            doubtful: BTreeSet::new(),
            next_record: 1,
            has_lost: false,
            is_of_before: false,
            unfilled: 0,
            late: Mutex::default(),
        }
    }

    /// Somebody else has left files in its directory. Returns their paths, with their bytes.
    pub(super) fn is_given(&mut self) -> Vec<(String, Vec<u8>)> {
        for name in (0..NAMES / 2).map(|n| format!("f{n}")) {
            let mut bytes = vec![0; self.rng.random_range(0..20_000)];
            self.rng.fill(&mut bytes[..]);
            self.given.insert(name, bytes);
        }
        self.given
            .iter()
            .map(|(name, bytes)| (format!("{}/{name}", self.directory()), bytes.clone()))
            .collect()
    }

    /// With its mount: another pod goes on after it.
    pub(super) fn loses_power(&mut self) {
        self.mount = MountId(self.mount.0 + 100);
        self.inflight = memory();
        for act in self.pending.take().map(|(_, act)| act).into_iter().chain(self.failed.take()) {
            self.may_have(&act);
        }
        (self.dir, self.shared, self.has_lost) = (None, None, true);
        self.found_shared = None;
        self.unlinked.clear();
    }

    /// Nobody knows whether it was done.
    fn may_have(&mut self, act: &Act) {
        match act {
            Act::Write { ino, offset, bytes } => {
                if let Some(known) = self.known(*ino) {
                    known.write(*offset, bytes);
                }
            }
            Act::Append { ino, bytes } => {
                if let Some(known) = self.known(*ino) {
                    let end = known.bytes.len();
                    known.write(end, bytes);
                }
            }
            Act::Cut { ino, size } => {
                if let Some(known) = self.known(*ino) {
                    known.cut(*size);
                }
            }
            Act::Rename { from, to } => {
                self.kept.remove(from);
                if let Some(known) = self.files.get_mut(to) {
                    known.goes(None);
                }
                if let Some(known) = self.files.get_mut(from) {
                    known.goes(Some(to));
                }
            }
            Act::Unlink { name } => {
                self.kept.remove(name);
                if let Some(known) = self.files.get_mut(name) {
                    known.goes(None);
                }
            }
            Act::MakeEmpty { name } | Act::RemoveEmpty { name } => _ = self.empty.insert(name.clone(), None),
            Act::AppendShared => drop(self.doubtful.insert(self.next_record - 1)),
            _ => {}
        }
    }

    fn known(&mut self, ino: u64) -> Option<&mut Known> {
        self.files.values_mut().chain(&mut self.unlinked).find(|known| known.ino == ino)
    }

    fn name_of(&self, ino: u64) -> Option<String> {
        self.files.iter().find(|(_, known)| known.ino == ino).map(|(name, _)| name.clone())
    }

    fn directory(&self) -> String {
        self.name_of_directory(self.is_moved)
    }

    fn name_of_directory(&self, is_moved: bool) -> String {
        format!("{}{}", if is_moved { 'm' } else { 'c' }, self.number)
    }

    /// What the store should have, with its mode.
    pub(super) fn objects(&self) -> BTreeMap<String, (Vec<u8>, u32)> {
        let at = |name: &String| format!("{}/{name}", self.directory());
        self.files.iter().map(|(name, known)| (at(name), (known.bytes.clone(), known.mode))).collect()
    }

    pub(super) async fn work(
        &mut self,
        life: &Life,
        executed: &Arc<Executed>,
        steps: usize,
        is_last: bool,
    ) -> Result<()> {
        if let Some((unique, act)) = self.pending.clone() {
            self.act(life, executed, unique, act).await?;
        }
        if let Some(act) = self.failed.clone() {
            self.is_of_before = true;
            self.failed(life, executed, act).await?;
        }
        self.is_of_before = false;
        if self.has_lost {
            self.find_directory(life, executed).await?;
            self.look_after_loss(life, executed).await?;
            self.has_lost = false;
        } else if self.rng.random() || is_last {
            self.look(life, executed).await?;
        }
        let steps = if is_last { 10 } else { steps };
        for _ in 0..steps {
            self.find_given(life, executed).await?;
            let act = self.choose();
            self.begin(life, executed, act).await?;
            if self.rng.random_bool(0.05) {
                self.look(life, executed).await?;
            }
            if self.rng.random_bool(0.05) {
                life.area.drop_clean().await; // as where the disk is full
            }
        }
        if is_last {
            let open: Vec<u64> = self.open().collect();
            for ino in open {
                self.begin(life, executed, Act::Close { ino }).await?;
            }
            self.look(life, executed).await?;
            ensure!(self.open().next().is_none(), "something is open still");
        }
        Ok(())
    }

    fn open(&self) -> impl Iterator<Item = u64> {
        let all = self.files.values().chain(&self.unlinked);
        all.filter(|known| known.is_open).map(|known| known.ino)
    }

    async fn begin(&mut self, life: &Life, executed: &Arc<Executed>, act: Act) -> Result<()> {
        self.next += 2;
        let unique = self.next;
        if let Act::AppendShared = act {
            self.next_record += 1;
        }
        self.arrives(unique, &act);
        self.pending = Some((unique, act.clone()));
        self.act(life, executed, unique, act).await
    }

    /// As the kernel and a worker bring a WRITE.
    fn arrives(&self, unique: u64, act: &Act) {
        let record;
        let (offset, bytes, flags) = match act {
            Act::Write { offset, bytes, .. } => (*offset, bytes, 0),
            Act::Append { bytes, .. } => (0, bytes, libc::O_APPEND as u32),
            Act::AppendShared => {
                record = self.record(self.next_record - 1);
                (0, &record, libc::O_APPEND as u32)
            }
            _ => return,
        };
        bring_write(&self.inflight, unique, offset as u64, bytes, flags);
    }

    fn record(&self, number: u64) -> Vec<u8> {
        [(self.number as u64 + 1).to_be_bytes(), number.to_be_bytes()].concat()
    }

    async fn ask(
        &self,
        life: &Life,
        executed: &Arc<Executed>,
        unique: u64,
        operation: Operation,
    ) -> Result<(Done, Option<OwnedFd>), Wrong> {
        let (area, executed, mount, inflight) =
            (life.area.clone(), executed.clone(), self.mount, self.inflight.clone());
        let is_silent = {
            let (area, executed) = (area.clone(), executed.clone());
            async move { area.is_silent_to(&executed, unique).await }
        };
        let mut work = Box::pin(async move {
            let waits = |other: u64| other == unique;
            let caller = Caller { mount, unique, waits: &waits, inflight: &inflight, read_only: false };
            area.execute(&caller, &executed, operation).await
        });
        let outcome = tokio::select! {
            biased;
            outcome = &mut work => outcome,
            wrong = is_silent => {
                lock(&self.late).push(tokio::spawn(async move { drop(work.await) }));
                Err(wrong)
            }
        };
        life.fate.is_alive().await;
        outcome
    }

    /// What was answered before it was done has come to its end.
    async fn late_ends(&self) {
        loop {
            let Some(late) = lock(&self.late).pop() else { return };
            let _ = late.await; // its agent may have died in it
        }
    }

    fn operation(&self, act: &Act) -> Operation {
        let dir = self.dir.unwrap_or(ROOT);
        let name = |name: &str| name.as_bytes().to_vec();
        match act {
            Act::FindDirectory => Operation::Lookup { parent: ROOT, name: name(&self.directory()) },
            Act::MakeDirectory => {
                Operation::MakeDirectory { parent: ROOT, name: name(&self.directory()), owner: OWNER }
            }
            Act::Create { name: new } => {
                Operation::Create { parent: dir, name: name(new), owner: OWNER, exclusive: true, open: true }
            }
            Act::Open { name } => Operation::Open { ino: self.files[name].ino, write: true },
            Act::Write { ino, .. } | Act::Append { ino, .. } => Operation::Write { ino: *ino },
            Act::Cut { ino, size } => {
                let set = SetAttributes { size: Some(*size as u64), ..SetAttributes::default() };
                Operation::SetAttributes { ino: *ino, set }
            }
            Act::Mode { ino, mode } => {
                let set = SetAttributes { mode: Some(*mode), ..SetAttributes::default() };
                Operation::SetAttributes { ino: *ino, set }
            }
            Act::Rename { from, to } => {
                Operation::Rename { parent: dir, name: name(from), to: dir, to_name: name(to), keep: false }
            }
            Act::Unlink { name: of } => Operation::Unlink { parent: dir, name: name(of) },
            Act::Sync { ino, closing } => Operation::Sync { ino: *ino, closing: *closing },
            Act::Close { ino } => Operation::Close { ino: *ino },
            Act::OpenShared => Operation::Create {
                parent: ROOT,
                name: name("shared"),
                owner: OWNER,
                exclusive: false,
                open: true,
            },
            Act::FindShared => Operation::Lookup { parent: ROOT, name: name("shared") },
            Act::OpenSharedAgain { ino } => Operation::Open { ino: *ino, write: true },
            Act::AppendShared => Operation::Write { ino: self.shared.unwrap() },
            Act::SyncShared => Operation::Sync { ino: self.shared.unwrap(), closing: false },
            Act::MakeEmpty { name: new } => {
                Operation::MakeDirectory { parent: dir, name: name(new), owner: OWNER }
            }
            Act::RemoveEmpty { name: of } => Operation::RemoveDirectory { parent: dir, name: name(of) },
            Act::Move => {
                let (from, to) = (self.directory(), self.name_of_directory(!self.is_moved));
                Operation::Rename {
                    parent: ROOT,
                    name: name(&from),
                    to: ROOT,
                    to_name: name(&to),
                    keep: false,
                }
            }
        }
    }

    async fn act(&mut self, life: &Life, executed: &Arc<Executed>, unique: u64, act: Act) -> Result<()> {
        let operation = self.operation(&act);
        let is_twice = self.rng.random_bool(0.1);
        let outcome = if is_twice {
            // A worker dies, and the next one asks the same agent again.
            let again = self.ask(life, executed, unique, operation.clone());
            let (first, second) = tokio::join!(self.ask(life, executed, unique, operation), again);
            ensure!(
                is_same(&act, &first, &second)
                    || life.plan.hangs && (is_unavailable(&first) || is_unavailable(&second))
                    || matches!(
                        act,
                        Act::Sync { .. } | Act::SyncShared | Act::FindDirectory | Act::FindShared
                    ),
                "{act:?} asked twice: {first:?}, {second:?}"
            );
            second
        } else {
            self.ask(life, executed, unique, operation).await
        };
        self.pending = None;
        self.operations += 1;
        if let Some(claim) = self.inflight.claim(unique) {
            self.inflight.answered(claim);
        }
        let outcome = outcome.map(|(done, _)| done);
        trace(|| format!("  client {} {unique}: {}: {outcome:?}", self.number, shown(&act)));
        match outcome {
            Ok(done) => self.done(life, act, done),
            Err(Wrong::Cause(Cause::Unavailable)) if life.plan.fails() => {
                self.failed(life, executed, act).await
            }
            Err(Wrong::Cause(Cause::Stale)) if matches!(act, Act::OpenShared) => Ok(()), // somebody else has made it
            // Of one before that was done and failed all the same.
            Err(Wrong::Exists) if matches!(act, Act::MakeDirectory) => Ok(()),
            Err(wrong @ (Wrong::Exists | Wrong::Cause(Cause::NotFound))) => match act {
                Act::Create { name } if wrong == Wrong::Exists => self.is_absent(life, executed, &name).await,
                Act::MakeEmpty { name } if self.empty.get(&name) == Some(&None) => {
                    ensure!(wrong == Wrong::Exists);
                    Ok(()) // as it was known a while ago
                }
                Act::RemoveEmpty { name } if self.empty.get(&name) == Some(&None) => {
                    ensure!(wrong != Wrong::Exists);
                    Ok(())
                }
                act => bail!("{act:?}: {wrong:?}"),
            },
            Err(wrong) => bail!("{}: {wrong:?}", shown(&act)),
        }
    }

    /// The store did not answer, or the disk.
    async fn failed(&mut self, life: &Life, executed: &Arc<Executed>, act: Act) -> Result<()> {
        self.failed = Some(act.clone()); // its agent may die before this has an answer
        trace(|| format!("  client {}: {} are late", self.number, lock(&self.late).len()));
        self.late_ends().await;
        self.look_at_failed(life, executed, act).await?;
        self.failed = None;
        Ok(())
    }

    async fn look_at_failed(&mut self, life: &Life, executed: &Arc<Executed>, act: Act) -> Result<()> {
        match &act {
            Act::Rename { from: name, .. } | Act::Unlink { name } => {
                let before = self.files[name].ino;
                let now = self.lookup(life, executed, name).await?;
                match now.is_some_and(|node| node.ino == before) {
                    true => Ok(()),
                    false => self.done(life, act, Done::Done),
                }
            }
            Act::MakeDirectory | Act::Sync { .. } | Act::SyncShared => Ok(()),
            Act::Move => {
                let now = self.named(life, executed, &self.directory()).await?;
                if now != self.dir {
                    self.done(life, act, Done::Done)?;
                    let now = self.named(life, executed, &self.directory()).await?;
                    ensure!(now == self.dir, "its directory has neither name: {now:?}, not {:?}", self.dir);
                }
                Ok(())
            }
            Act::MakeEmpty { name } | Act::RemoveEmpty { name } => {
                self.empty.insert(name.clone(), None);
                Ok(())
            }
            _ if !life.plan.hangs => bail!("{act:?} is not the store's"),
            Act::FindDirectory | Act::Open { .. } => Ok(()),
            Act::OpenShared | Act::FindShared | Act::OpenSharedAgain { .. } => Ok(()),
            // Nobody asks for it again.
            Act::Close { .. } => self.done(life, act, Done::Done),
            Act::Create { name } => {
                if let Some(node) = self.lookup(life, executed, name).await? {
                    let name = name.clone();
                    self.done(life, act, Done::Node(node))?;
                    self.files.get_mut(&name).expect("it was just made").is_open = false;
                }
                Ok(())
            }
            Act::Write { ino, .. } | Act::Append { ino, .. } | Act::Cut { ino, .. } => {
                let (ino, before) = (*ino, self.known(*ino).cloned());
                let found = self.bytes(life, executed, ino).await?;
                if before.as_ref().is_some_and(|known| known.bytes == found) {
                    return Ok(());
                }
                if let (Act::Append { bytes, .. }, Some(known)) = (&act, &before)
                    && self.is_of_before
                    && found.len() == known.bytes.len() + bytes.len()
                    && found.starts_with(&known.bytes)
                    && found[known.bytes.len()..].iter().all(|byte| *byte == 0)
                {
                    // Its place was noted, and nobody asks for it again.
                    self.known(ino).expect("it was just seen").cut(found.len());
                    return Ok(());
                }
                let done = match &act {
                    Act::Write { bytes, .. } | Act::Append { bytes, .. } => {
                        Done::Written { bytes: bytes.len() as u32 }
                    }
                    _ => self.about(life, executed, ino).await?,
                };
                self.done(life, act, done)?;
                let known = self.known(ino).expect("it was just changed");
                ensure!(known.bytes == found, "done in part: {}", differ(&found, &known.bytes));
                Ok(())
            }
            Act::Mode { ino, mode } => {
                let (ino, mode) = (*ino, *mode);
                let Done::Node(node) = self.about(life, executed, ino).await? else { bail!("no attributes") };
                let before = self.known(ino).map(|known| known.mode);
                match node.mode & 0o7777 {
                    now if now == mode => self.done(life, act, Done::Node(node)),
                    now => {
                        ensure!(Some(now) == before, "mode {now:o}");
                        Ok(())
                    }
                }
            }
            Act::AppendShared => {
                let number = self.next_record - 1;
                let ino = self.shared.expect("it was appended to");
                let found = self.bytes(life, executed, ino).await?;
                match times(&found, &self.record(number)) {
                    0 => {
                        self.unfilled += usize::from(self.is_of_before);
                        Ok(())
                    }
                    1 => self.done(life, act, Done::Written { bytes: RECORD as u32 }),
                    times => bail!("record {number} is there {times} times"),
                }
            }
        }
    }

    async fn about(&mut self, life: &Life, executed: &Arc<Executed>, ino: u64) -> Result<Done> {
        Ok(self.see(life, executed, Operation::Attributes { ino }).await?.0)
    }

    fn done(&mut self, life: &Life, act: Act, done: Done) -> Result<()> {
        let through = life.plan.mode == WriteMode::Through;
        match (act, done) {
            (Act::FindDirectory, Done::Node(node)) => self.dir = Some(node.ino),
            (Act::FindDirectory, Done::Absent) => {}
            (Act::MakeDirectory, Done::Node(node)) => self.dir = Some(node.ino),
            (Act::Create { name }, Done::Node(node)) => {
                let known =
                    Known { ino: node.ino, bytes: Vec::new(), mode: OWNER.mode, is_open: true, safe: None };
                ensure!(node.size == 0 && node.mode & 0o7777 == OWNER.mode, "{name}: {node:?}");
                self.files.insert(name, known);
            }
            (Act::Open { name }, Done::Done) => {
                self.files.get_mut(&name).expect("chosen from them").is_open = true;
            }
            (Act::Write { ino, offset, bytes }, Done::Written { bytes: written }) => {
                ensure!(written as usize == bytes.len());
                self.known(ino).expect("chosen from them").write(offset, &bytes);
            }
            (Act::Append { ino, bytes }, Done::Written { bytes: written }) => {
                ensure!(written as usize == bytes.len());
                let known = self.known(ino).expect("chosen from them");
                let end = known.bytes.len();
                known.write(end, &bytes);
            }
            (Act::Cut { ino, size }, Done::Node(node)) => {
                ensure!(node.size == size as u64, "{node:?} was cut to {size}");
                self.known(ino).expect("chosen from them").cut(size);
            }
            (Act::Mode { ino, mode }, Done::Node(node)) => {
                ensure!(node.mode & 0o7777 == mode, "{node:?}");
                self.known(ino).expect("chosen from them").mode = mode;
            }
            (Act::Rename { from, to }, Done::Done) => {
                let mut known = self.files.remove(&from).expect("chosen from them");
                self.kept.remove(&from);
                known.goes(Some(&to));
                if let Some(mut over) = self.files.insert(to, known)
                    && over.is_open
                {
                    over.goes(None);
                    self.unlinked.push(over);
                }
            }
            (Act::Unlink { name }, Done::Done) => {
                let mut known = self.files.remove(&name).expect("chosen from them");
                self.kept.remove(&name);
                known.goes(None);
                if known.is_open {
                    self.unlinked.push(known);
                }
            }
            (Act::Sync { ino, .. }, Done::Done) => {
                let name = self.name_of(ino);
                let at = name.as_ref().map(|name| format!("{}/{name}", self.directory()));
                let known = self.known(ino).expect("chosen from them");
                known.is_safe(name.as_deref());
                if let Some(at) = at.filter(|_| through) {
                    let object = life.store.object(&at);
                    let is_there = object.as_ref().is_some_and(|object| *object.bytes == known.bytes);
                    ensure!(is_there, "{at} was said to be in the store");
                }
                self.kept.extend(name);
            }
            (Act::Close { ino }, Done::Done) => {
                self.known(ino).expect("chosen from them").is_open = false;
                self.unlinked.retain(|known| known.is_open);
            }
            (Act::OpenShared, Done::Node(node)) => self.shared = Some(node.ino),
            (Act::FindShared, Done::Node(node)) => self.found_shared = Some(node.ino),
            (Act::FindShared, Done::Absent) => {}
            (Act::OpenSharedAgain { ino }, Done::Done) => self.shared = Some(ino),
            (Act::AppendShared, Done::Written { bytes }) => {
                ensure!(bytes as usize == RECORD);
                self.appended.insert(self.next_record - 1);
            }
            (Act::SyncShared, Done::Done) => {
                if through {
                    let object = life.store.object("shared");
                    let found = object.map(|object| object.bytes.to_vec()).unwrap_or_default();
                    for number in &self.appended {
                        ensure!(times(&found, &self.record(*number)) == 1, "record {number} in the store");
                    }
                }
                self.safe_records = self.appended.clone();
            }
            (Act::MakeEmpty { name }, Done::Node(_)) => _ = self.empty.insert(name, Some(true)),
            (Act::RemoveEmpty { name }, Done::Done) => _ = self.empty.insert(name, Some(false)),
            (Act::Move, Done::Done) => self.is_moved = !self.is_moved,
            (act, done) => bail!("{act:?}: {done:?}"),
        }
        Ok(())
    }

    fn choose(&mut self) -> Act {
        if self.dir.is_none() {
            return if self.rng.random() { Act::FindDirectory } else { Act::MakeDirectory };
        }
        if self.shared.is_none() {
            return match self.found_shared {
                Some(ino) => Act::OpenSharedAgain { ino },
                None if self.rng.random() => Act::FindShared,
                None => Act::OpenShared,
            };
        }
        let name = format!("f{}", self.rng.random_range(0..NAMES));
        let open: Vec<u64> = self.open().collect();
        let ino = (!open.is_empty()).then(|| open[self.rng.random_range(0..open.len())]);
        let Some(known) = self.files.get(&name) else {
            return Act::Create { name };
        };
        let is_open = known.is_open;
        let what = self.rng.random_range(0..104);
        if what >= 100 {
            let name = format!("d{}", self.rng.random_range(0..2));
            let known = self.empty.get(&name).copied().unwrap_or(Some(false));
            return match known.unwrap_or(self.rng.random()) {
                true => Act::RemoveEmpty { name },
                false => Act::MakeEmpty { name },
            };
        }
        if what < 1 {
            return Act::Move;
        }
        if what < 12 {
            return Act::AppendShared;
        }
        if what < 14 {
            return Act::SyncShared;
        }
        if what < 22 {
            let to = format!("f{}", self.rng.random_range(0..NAMES));
            return if to == name { Act::Unlink { name } } else { Act::Rename { from: name, to } };
        }
        if what < 26 {
            return Act::Unlink { name };
        }
        let Some(ino) = ino else {
            return Act::Open { name };
        };
        if what < 34 {
            return if is_open { Act::Sync { ino, closing: false } } else { Act::Open { name } };
        }
        let size = self.known(ino).expect("it is open").bytes.len();
        match what {
            34..72 => {
                let len = match self.rng.random_range(0..3) {
                    0 => self.rng.random_range(1..600),
                    _ => self.rng.random_range(1..12_000),
                };
                let mut bytes = vec![0; len];
                self.rng.fill(&mut bytes[..]);
                let offset = match self.rng.random_range(0..3) {
                    0 => size, // in order
                    1 => self.rng.random_range(0..=size),
                    _ => self.rng.random_range(0..size + 9000),
                };
                match offset + len > BYTES_MAX {
                    true => Act::Cut { ino, size: self.rng.random_range(0..=size) },
                    false if self.rng.random_range(0..4) == 0 => Act::Append { ino, bytes },
                    false => Act::Write { ino, offset, bytes },
                }
            }
            72..78 => Act::Cut { ino, size: self.rng.random_range(0..size + 3000) },
            78..82 => Act::Mode { ino, mode: self.rng.random_range(0..0o1000) | 0o600 },
            82..90 => Act::Sync { ino, closing: false },
            90..95 => Act::Sync { ino, closing: true },
            _ => Act::Close { ino },
        }
    }

    // ------------------------------------------------------------------ looks

    /// A question that changes nothing.
    async fn see(
        &mut self,
        life: &Life,
        executed: &Arc<Executed>,
        operation: Operation,
    ) -> Result<(Done, Option<OwnedFd>)> {
        loop {
            self.next += 2;
            match self.ask(life, executed, self.next, operation.clone()).await {
                Ok(done) => return Ok(done),
                // Where bytes are is asked of the store after a loss of power.
                Err(Wrong::Cause(Cause::Unavailable)) if life.plan.fails() => {}
                // Of a directory that was there for what a write that was given up had left, and is gone with it.
                Err(Wrong::Cause(Cause::NotFound))
                    if self.has_lost
                        && life.plan.faults > 0
                        && matches!(operation, Operation::Lookup { .. }) =>
                {
                    return Ok((Done::Absent, None));
                }
                Err(wrong) => bail!("{operation:?}: {wrong:?}"),
            }
        }
    }

    async fn lookup(&mut self, life: &Life, executed: &Arc<Executed>, name: &str) -> Result<Option<Node>> {
        let Some(parent) = self.dir else { return Ok(None) };
        let asked = Operation::Lookup { parent, name: name.as_bytes().to_vec() };
        match self.see(life, executed, asked).await?.0 {
            Done::Node(node) => Ok(Some(node)),
            Done::Absent => Ok(None),
            other => bail!("{name}: {other:?}"),
        }
    }

    /// What this name of the volume's leads to.
    async fn named(&mut self, life: &Life, executed: &Arc<Executed>, name: &str) -> Result<Option<u64>> {
        let asked = Operation::Lookup { parent: ROOT, name: name.as_bytes().to_vec() };
        match self.see(life, executed, asked).await?.0 {
            Done::Node(node) => Ok(Some(node.ino)),
            Done::Absent => Ok(None),
            other => bail!("{name}: {other:?}"),
        }
    }

    async fn bytes(&mut self, life: &Life, executed: &Arc<Executed>, ino: u64) -> Result<Vec<u8>> {
        for _ in 0..LOCATED_MAX {
            let version = match self.see(life, executed, Operation::Locate { ino }).await? {
                (Done::Stored { version }, None) => version,
                (Done::Staged { size }, Some(file)) => {
                    let file = std::fs::File::from(file);
                    let mut bytes = vec![0; size as usize];
                    file.read_exact_at(&mut bytes, 0)?;
                    return Ok(bytes);
                }
                other => bail!("{ino}: {other:?}"),
            };
            let names = &life.area.scope.names;
            let known = names.last_attributes(ino)?.filter(|known| known.version == version);
            let path = names.path(ino)?.unwrap_or_default();
            let object = life.store.object(&String::from_utf8(path)?);
            match known.zip(object) {
                Some((known, object)) if object.version == known.token => return Ok(object.bytes.to_vec()),
                _ => life.area.note_stale(), // as a worker that reads it
            }
        }
        bail!("{ino} is never where it is said to be")
    }

    /// What a write that was given up has left there may be seen until it is looked for.
    async fn is_absent(&mut self, life: &Life, executed: &Arc<Executed>, name: &str) -> Result<()> {
        if self.lookup(life, executed, name).await?.is_some() {
            ensure!(life.plan.faults > 0, "{name} is there");
            tokio::time::sleep(2 * crate::staging::late::LOOK).await;
            let found = self.lookup(life, executed, name).await?;
            ensure!(found.is_none(), "{name} is there: {found:?}");
        }
        Ok(())
    }

    /// All that it knows is there.
    async fn look(&mut self, life: &Life, executed: &Arc<Executed>) -> Result<()> {
        let Some(dir) = self.dir else { return Ok(()) };
        for name in (0..NAMES).map(|n| format!("f{n}")) {
            let Some(known) = self.files.get(&name).cloned() else {
                if self.given.contains_key(&name) {
                    continue;
                }
                self.is_absent(life, executed, &name).await?;
                continue;
            };
            let found = self.lookup(life, executed, &name).await?;
            let found = found.ok_or_else(|| anyhow::anyhow!("{name} is not there"))?;
            let shown = (found.ino, found.size, found.mode & 0o7777);
            let expected = (known.ino, known.bytes.len() as u64, known.mode);
            ensure!(shown == expected, "{name}: {shown:?} instead of {expected:?}");
            let bytes = self.bytes(life, executed, known.ino).await?;
            ensure!(bytes == known.bytes, "{name}: {}", differ(&bytes, &known.bytes));
        }
        for known in self.unlinked.clone() {
            let bytes = self.bytes(life, executed, known.ino).await?;
            ensure!(bytes == known.bytes, "unlinked {}: {}", known.ino, differ(&bytes, &known.bytes));
        }
        let there = self.empty.iter().filter(|(_, is)| **is == Some(true)).map(|(name, _)| name.clone());
        let dots = [".".to_owned(), "..".to_owned()];
        let expected: BTreeSet<String> =
            self.files.keys().chain(self.given.keys()).cloned().chain(there).chain(dots).collect();
        let mut listed = self.list(life, executed, dir).await?;
        if listed != expected && life.plan.faults > 0 {
            tokio::time::sleep(2 * crate::staging::late::LOOK).await; // as of a single name
            listed = self.list(life, executed, dir).await?;
        }
        ensure!(listed == expected, "{listed:?} is listed instead of {expected:?}");
        Ok(())
    }

    /// What is at the other name of its directory goes.
    async fn clear_other(&mut self, life: &Life, executed: &Arc<Executed>, files: Files) -> Result<()> {
        let of = self.name_of_directory(!self.is_moved).into_bytes();
        let Some(dir) = self.named(life, executed, &self.name_of_directory(!self.is_moved)).await? else {
            return Ok(());
        };
        let unlink = |name: String| Operation::Unlink { parent: dir, name: name.into_bytes() };
        let remove = |parent, name| Operation::RemoveDirectory { parent, name };
        let all = files.into_keys().map(unlink);
        let dirs = ["d0", "d1"].map(|name| remove(dir, name.as_bytes().to_vec()));
        for operation in all.chain(dirs).chain([remove(ROOT, of)]) {
            loop {
                self.next += 2;
                match self.ask(life, executed, self.next, operation.clone()).await {
                    Ok(_) | Err(Wrong::Cause(Cause::NotFound)) => break,
                    Err(Wrong::Cause(Cause::Unavailable)) if life.plan.fails() => {}
                    Err(wrong) => bail!("{operation:?}: {wrong:?}"),
                }
            }
        }
        Ok(())
    }

    async fn list(&mut self, life: &Life, executed: &Arc<Executed>, dir: u64) -> Result<BTreeSet<String>> {
        let mut listed = BTreeSet::new();
        let mut offset = 0;
        loop {
            let page = self.see(life, executed, Operation::ReadDirectory { dir, offset }).await?;
            let Done::Names(page) = page.0 else { bail!("a listing: {page:?}") };
            let Some(last) = page.last() else { break };
            offset = last.next;
            for name in page {
                ensure!(listed.insert(String::from_utf8(name.name.clone())?), "{:?} twice", name.name);
            }
        }
        listed.retain(|name| self.empty.get(name) != Some(&None));
        Ok(listed)
    }

    async fn find_given(&mut self, life: &Life, executed: &Arc<Executed>) -> Result<()> {
        while self.dir.is_some()
            && let Some(name) = self.given.keys().next().cloned()
        {
            let node = self.lookup(life, executed, &name).await?;
            let node = node.ok_or_else(|| anyhow::anyhow!("{name} is not there"))?;
            let bytes = self.given.remove(&name).expect("it is the first of them");
            ensure!(bytes.len() as u64 == node.size && node.mode & 0o7777 == OWNER.mode, "{name}: {node:?}");
            let mut known = Known { ino: node.ino, bytes, mode: OWNER.mode, is_open: false, safe: None };
            known.is_safe(Some(&name));
            self.kept.insert(name.clone());
            self.files.insert(name, known);
        }
        Ok(())
    }

    async fn find_directory(&mut self, life: &Life, executed: &Arc<Executed>) -> Result<()> {
        self.dir = self.named(life, executed, &self.directory()).await?;
        if self.dir.is_none() {
            // One that was moved and not written out may have either name.
            self.dir = self.named(life, executed, &self.name_of_directory(!self.is_moved)).await?;
            self.is_moved ^= self.dir.is_some();
        }
        Ok(())
    }

    /// Of the name that its directory does not have: what a rename left there that a loss of power came into.
    async fn find_other(&mut self, life: &Life, executed: &Arc<Executed>) -> Result<Files> {
        let Some(dir) = self.named(life, executed, &self.name_of_directory(!self.is_moved)).await? else {
            return Ok(Files::new());
        };
        ensure!(Some(dir) != self.dir, "its directory has two names");
        let own = self.dir.replace(dir);
        let found = self.found(life, executed).await;
        self.dir = own;
        found
    }

    /// What is at its names.
    async fn found(&mut self, life: &Life, executed: &Arc<Executed>) -> Result<Files> {
        let mut found = Files::new();
        for name in (0..NAMES).map(|n| format!("f{n}")) {
            if let Some(node) = self.lookup(life, executed, &name).await? {
                let bytes = self.bytes(life, executed, node.ino).await?;
                ensure!(bytes.len() as u64 == node.size, "{name}: {} bytes of {node:?}", bytes.len());
                found.insert(name, (node, bytes));
            }
        }
        Ok(found)
    }

    /// What was safe is there; what is there counts from now on.
    async fn look_after_loss(&mut self, life: &Life, executed: &Arc<Executed>) -> Result<()> {
        self.find_given(life, executed).await?;
        let mut found = self.found(life, executed).await?;
        if life.plan.faults > 0 && found.keys().any(|name| !self.kept.contains(name)) {
            // It may be what a write that was given up has left, until it is looked for.
            tokio::time::sleep(2 * crate::staging::late::LOOK).await;
            found = self.found(life, executed).await?;
        }
        let other = self.find_other(life, executed).await?;
        for known in self.files.values() {
            let Some(safe) = &known.safe else { continue };
            let is_in = |all: &Files, name: &str| all.get(name).is_some_and(|(_, bytes)| safe.allows(bytes));
            let is_at = |place: &Option<String>| match place {
                Some(name) => is_in(&found, name) || is_in(&other, name),
                None => true,
            };
            ensure!(
                safe.places.iter().any(is_at),
                "what was safe ({} bytes) is at none of {:?}: {:?}",
                safe.bytes.len(),
                safe.places,
                found.iter().map(|(name, (_, bytes))| (name, bytes.len())).collect::<Vec<_>>()
            );
        }
        for name in &self.kept {
            let is_there = found.contains_key(name) || other.contains_key(name);
            ensure!(is_there, "neither the old {name} nor the new one is there");
        }
        self.clear_other(life, executed, other).await?;
        self.kept = found.keys().cloned().collect();
        self.files = BTreeMap::new();
        for (name, (node, bytes)) in found {
            let mode = node.mode & 0o7777;
            let mut known = Known { ino: node.ino, bytes, mode, is_open: false, safe: None };
            known.is_safe(Some(&name));
            self.files.insert(name, known);
        }
        let asked = Operation::Lookup { parent: ROOT, name: b"shared".to_vec() };
        let shared = match self.see(life, executed, asked).await?.0 {
            Done::Node(node) => self.bytes(life, executed, node.ino).await?,
            _ => Vec::new(),
        };
        for number in &self.safe_records {
            ensure!(times(&shared, &self.record(*number)) == 1, "record {number} was safe");
        }
        let all = std::mem::take(&mut self.appended);
        for number in all.into_iter().chain(std::mem::take(&mut self.doubtful)) {
            match times(&shared, &self.record(number)) {
                0 => {}
                1 => drop(self.appended.insert(number)),
                n => bail!("record {number} is there {n} times"),
            }
        }
        // As it is on the disk, and may be read by another client that has lost its power too.
        self.safe_records = self.appended.clone();
        if self.files.is_empty() {
            self.find_directory(life, executed).await?;
        }
        Ok(())
    }
}

fn is_same<T>(act: &Act, first: &Result<(Done, T), Wrong>, second: &Result<(Done, T), Wrong>) -> bool {
    match (first, second) {
        // Others may have written to it in between.
        (Ok((Done::Node(first), _)), Ok((Done::Node(second), _))) if matches!(act, Act::OpenShared) => {
            first.ino == second.ino
        }
        (first, second) => first.as_ref().map(|(done, _)| done) == second.as_ref().map(|(done, _)| done),
    }
}

fn is_unavailable(outcome: &Result<(Done, Option<OwnedFd>), Wrong>) -> bool {
    matches!(outcome, Err(Wrong::Cause(Cause::Unavailable)))
}

fn shown(act: &Act) -> String {
    match act {
        Act::Write { ino, offset, bytes } => format!("Write {ino} at {offset}: {} bytes", bytes.len()),
        Act::Append { ino, bytes } => format!("Append {ino}: {} bytes", bytes.len()),
        act => format!("{act:?}"),
    }
}

fn differ(found: &[u8], expected: &[u8]) -> String {
    let at = found.iter().zip(expected).position(|(a, b)| a != b);
    format!("{} bytes instead of {}, other from {at:?} on", found.len(), expected.len())
}

/// How often it stands there.
fn times(all: &[u8], record: &[u8]) -> usize {
    all.chunks(RECORD).filter(|chunk| *chunk == record).count()
}

pub(super) fn judge_shared(
    bytes: &[u8],
    clients: &[tokio::sync::MutexGuard<'_, Client>],
    loses_power: bool,
) -> Result<()> {
    let mut count = 0;
    for client in clients {
        for number in &client.appended {
            let times = times(bytes, &client.record(*number));
            ensure!(times == 1, "record {number} of client {} is there {times} times", client.number);
        }
        count += client.appended.len();
    }
    let unfilled = bytes.chunks(RECORD).filter(|chunk| chunk.iter().all(|byte| *byte == 0)).count();
    // A loss of power may leave holes.
    ensure!(
        loses_power
            || bytes.len() == (count + unfilled) * RECORD
                && unfilled <= clients.iter().map(|client| client.unfilled).sum(),
        "{} bytes of {count} records, {unfilled} of them zeros",
        bytes.len()
    );
    Ok(())
}
