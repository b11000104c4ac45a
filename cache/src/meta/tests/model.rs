//! The store against a reference made of sets and maps, under random operations.

use super::*;
use crate::meta::{Attributes, Cached, ListingState, ROOT};
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};

const NAMES: [&str; 5] = ["a", "a!", "b", "c", "d"];

/// What a test asks. Directories are numbers into those that exist at the time.
#[derive(Clone, Debug)]
enum Op {
    Put { dir: usize, entry: Entry },
    Absent { dir: usize, name: usize },
    Begin { dir: usize },
    Page { dir: usize, entries: Vec<Entry> },
    Finish { dir: usize },
    Abort { dir: usize },
    TakeBack { dir: usize },
    Cache { dir: usize, name: usize, stale: bool, file: Option<u64> },
    Forget { dir: usize },
    Reopen,
}

#[derive(Clone, Debug)]
struct Entry {
    name: usize,
    kind: Kind,
    token: u8,
}

impl Entry {
    fn incoming(&self) -> Incoming {
        Incoming { kind: self.kind, ..file(NAMES[self.name], &format!("token{}", self.token)) }
    }
}

fn entry() -> impl Strategy<Value = Entry> {
    let kind = prop_oneof![6 => Just(Kind::File), 3 => Just(Kind::Directory), 1 => Just(Kind::Symlink)];
    (0..NAMES.len(), kind, 0..3u8).prop_map(|(name, kind, token)| Entry { name, kind, token })
}

fn op() -> impl Strategy<Value = Op> {
    let (dir, name) = (0..3usize, 0..NAMES.len());
    prop_oneof![
        4 => (dir.clone(), entry()).prop_map(|(dir, entry)| Op::Put { dir, entry }),
        2 => (dir.clone(), name.clone()).prop_map(|(dir, name)| Op::Absent { dir, name }),
        3 => dir.clone().prop_map(|dir| Op::Begin { dir }),
        5 => (dir.clone(), prop::collection::vec(entry(), 0..5)).prop_map(|(dir, entries)| Op::Page { dir, entries }),
        3 => dir.clone().prop_map(|dir| Op::Finish { dir }),
        1 => dir.clone().prop_map(|dir| Op::Abort { dir }),
        2 => dir.clone().prop_map(|dir| Op::TakeBack { dir }),
        3 => (dir.clone(), name, prop::bool::weighted(0.2), prop::option::of(0..3u64))
            .prop_map(|(dir, name, stale, file)| Op::Cache { dir, name, stale, file }),
        1 => dir.prop_map(|dir| Op::Forget { dir }),
        1 => Just(Op::Reopen),
    ]
}

#[derive(Clone, Debug)]
struct Name {
    attributes: Attributes,
    seen_ms: u64,
}

#[derive(Debug, Default)]
struct Pending {
    seen_ms: u64,
    names: BTreeSet<Vec<u8>>,
    hidden: u64,
    undecided: Vec<Incoming>,
}

#[derive(Debug, Default)]
struct Dir {
    /// Everything that ever had an inode.
    names: BTreeMap<Vec<u8>, Name>,
    shown: BTreeSet<Vec<u8>>,
    absent: BTreeMap<Vec<u8>, u64>,
    complete: Option<(u64, u64)>,
    pending: Option<Pending>,
    /// The last listing that was begun has brought them, unseen, and nothing else has ever spoken of them.
    own: BTreeSet<Vec<u8>>,
}

impl Dir {
    fn forget(&mut self) {
        (self.shown, self.absent, self.complete, self.pending) = Default::default();
    }
}

#[derive(Debug, Default)]
struct Model {
    dirs: BTreeMap<u64, Dir>,
    now_ms: u64,
    next_ino: u64,
}

impl Model {
    /// Inode of the n-th directory that is shown, the root first.
    fn pick(&self, n: usize) -> u64 {
        let mut all = vec![ROOT];
        for dir in self.dirs.values() {
            let shown = dir.names.iter().filter(|(name, _)| dir.shown.contains(*name));
            all.extend(
                shown.filter(|(_, n)| n.attributes.kind == Kind::Directory).map(|(_, n)| n.attributes.ino),
            );
        }
        all[n % all.len()]
    }

    fn dir(&mut self, ino: u64) -> &mut Dir {
        self.dirs.entry(ino).or_default()
    }

    fn learn(&mut self, dir: u64, incoming: &Incoming, listed: bool) {
        let (now_ms, next) = (self.now_ms, self.next_ino);
        let d = self.dir(dir);
        let begun = d.pending.as_ref().map_or(0, |p| p.seen_ms);
        let here = d.shown.contains(&incoming.name)
            || d.pending.as_ref().is_some_and(|p| p.names.contains(&incoming.name));
        let seen_ms = if listed { begun } else { now_ms };
        let (mut orphan, is_new) = (None, !d.names.contains_key(&incoming.name));
        match d.names.get_mut(&incoming.name) {
            None => {
                let attributes = Attributes {
                    ino: next,
                    kind: incoming.kind,
                    size: incoming.size,
                    mtime_ns: incoming.mtime_ns,
                    version: 1,
                    epoch: 0,
                    since_epoch: 0,
                    token: incoming.token.clone(),
                    cached: None,
                    target: vec![],
                    permissions: None,
                };
                d.names.insert(incoming.name.clone(), Name { attributes, seen_ms });
                self.next_ino += 1;
            }
            Some(name) => {
                let a = &mut name.attributes;
                if !here && a.cached.take().is_some() {
                    a.epoch += 1;
                }
                if !(here && listed && begun < name.seen_ms) {
                    name.seen_ms = seen_ms;
                    let same = a.kind == incoming.kind
                        && (a.kind == Kind::Directory
                            || a.size == incoming.size && a.token == incoming.token);
                    if !same {
                        a.version += 1;
                        a.epoch += 2 - a.epoch % 2;
                        a.since_epoch = a.epoch;
                        a.cached = None;
                    }
                    if a.kind == Kind::Directory && incoming.kind != Kind::Directory {
                        orphan = Some(a.ino);
                    }
                    (a.kind, a.size, a.token) = (incoming.kind, incoming.size, incoming.token.clone());
                }
            }
        }
        let d = self.dir(dir);
        d.absent.remove(&incoming.name);
        if listed && is_new && d.complete.is_some() {
            d.own.insert(incoming.name.clone());
        } else if !listed {
            d.own.remove(&incoming.name);
        }
        if !listed || d.complete.is_none() {
            d.shown.insert(incoming.name.clone());
        }
        if let Some(p) = d.pending.as_mut() {
            p.names.insert(incoming.name.clone());
        }
        if let Some(orphan) = orphan.and_then(|ino| self.dirs.get_mut(&ino)) {
            orphan.forget();
        }
    }

    fn page(&mut self, dir: u64, incoming: &Incoming, last_word: bool) {
        let d = self.dir(dir);
        let was_directory = d.names.get(&incoming.name).is_some_and(|n| n.attributes.kind == Kind::Directory);
        let known = d.names.contains_key(&incoming.name);
        let p = d.pending.as_mut().unwrap();
        let listed = p.names.contains(&incoming.name);
        match (was_directory, incoming.kind == Kind::Directory) {
            (true, false) if listed => return p.hidden += 1,
            (true, false) if !last_word => return p.undecided.push(incoming.clone()),
            (false, true) if listed && known => p.hidden += 1,
            _ => {}
        }
        self.learn(dir, incoming, true);
    }

    fn lookup(&self, dir: u64, name: &[u8]) -> Lookup {
        let empty = Dir::default();
        let d = self.dirs.get(&dir).unwrap_or(&empty);
        if d.shown.contains(name) {
            let n = &d.names[name];
            return Lookup::Found { attributes: n.attributes.clone(), seen_ms: n.seen_ms };
        }
        let listed = d.complete.map(|(seen_ms, _)| seen_ms);
        match (d.absent.get(name).copied(), listed) {
            (None, None) => Lookup::Unknown,
            (asked, listed) => Lookup::Absent { seen_ms: asked.unwrap_or(0).max(listed.unwrap_or(0)) },
        }
    }
}

/// Everything that the store can say, compared.
fn compare(store: &Store, model: &Model) {
    for (ino, dir) in model.dirs.iter() {
        for name in NAMES {
            assert_eq!(store.lookup(*ino, name.as_bytes()).unwrap(), model.lookup(*ino, name.as_bytes()));
        }
        let listed = store.listing(*ino).unwrap().filter(|l| l.complete);
        let expected = dir.complete.map(|(seen_ms, hidden)| ListingState {
            complete: true,
            seen_ms,
            entries: dir.shown.len() as u64,
            hidden,
        });
        assert_eq!(listed, expected, "listing of {ino}");
        let expected: Option<Vec<String>> =
            dir.complete.map(|_| dir.shown.iter().map(|n| String::from_utf8_lossy(n).into_owned()).collect());
        assert_eq!(names(store, *ino, None), expected);
        for (name, known) in &dir.names {
            let a = &known.attributes;
            assert_eq!(store.last_attributes(a.ino).unwrap().unwrap().ino, a.ino);
            assert_eq!(store.parent(a.ino).unwrap(), Some(*ino));
            let shown = dir.shown.contains(name).then(|| (a.clone(), known.seen_ms));
            assert_eq!(store.attributes(a.ino).unwrap(), shown);
            // readdir goes on behind every name that ever was, shown or not.
            let behind = expected
                .as_ref()
                .map(|all| all.iter().filter(|n| n.as_bytes() > &name[..]).cloned().collect::<Vec<_>>());
            assert_eq!(names(store, *ino, Some(a.ino)), behind);
        }
    }
}

fn run(ops: Vec<Op>) {
    let bench = Bench::new();
    let mut store = Arc::new(bench.open());
    let mut model = Model { next_ino: super::super::FIRST_INO, now_ms: 1_000, ..Model::default() };
    model.dir(ROOT);
    let mut epochs: BTreeMap<u64, (u32, u32)> = BTreeMap::new();
    let mut at = 0;
    while at < ops.len() {
        // Writers borrow the store, so an opening ends where the next one begins.
        let borrowed = store.clone();
        let mut writers: BTreeMap<u64, super::super::ListingWriter<&super::super::Store>> = BTreeMap::new();
        while at < ops.len() {
            let op = ops[at].clone();
            at += 1;
            model.now_ms += 10;
            bench.at(model.now_ms);
            match op {
                Op::Put { dir, entry } => {
                    let (dir, incoming) = (model.pick(dir), entry.incoming());
                    let stored = borrowed.put(dir, &incoming).unwrap();
                    model.learn(dir, &incoming, false);
                    assert_eq!(stored, model.dirs[&dir].names[&incoming.name].attributes);
                }
                Op::Absent { dir, name } => {
                    let (dir, name) = (model.pick(dir), NAMES[name].as_bytes());
                    borrowed.put_absent(dir, name).unwrap();
                    let now_ms = model.now_ms;
                    let d = model.dir(dir);
                    d.shown.remove(name);
                    d.absent.insert(name.to_vec(), now_ms);
                    if let Some(p) = d.pending.as_mut() {
                        p.names.remove(name);
                    }
                    d.own.remove(name);
                    if let Some(n) = d.names.get_mut(name)
                        && n.attributes.cached.take().is_some()
                    {
                        n.attributes.epoch += 1;
                    }
                }
                Op::Begin { dir } => {
                    let dir = model.pick(dir);
                    let seen_ms = model.now_ms;
                    let d = model.dir(dir);
                    match borrowed.begin_listing(dir) {
                        Ok(writer) => {
                            assert!(d.pending.is_none());
                            // In place of one that a forgetting overtook, if any.
                            writers.insert(dir, writer.with_batch(1));
                            d.pending = Some(Pending { seen_ms, ..Pending::default() });
                            d.own.clear();
                        }
                        Err(MetaError::ListingInProgress(_)) => assert!(d.pending.is_some()),
                        Err(other) => panic!("{other}"),
                    }
                }
                Op::Page { dir, entries } => {
                    let dir = model.pick(dir);
                    if let Some(writer) = writers.get_mut(&dir) {
                        let entries: Vec<Incoming> = entries.iter().map(Entry::incoming).collect();
                        if model.dir(dir).pending.is_none() {
                            let written = writer.page(&entries);
                            assert!(
                                entries.is_empty() || matches!(written, Err(MetaError::ListingFailed(_)))
                            );
                            continue;
                        }
                        writer.page(&entries).unwrap();
                        for entry in &entries {
                            model.page(dir, entry, false);
                        }
                    }
                }
                Op::Finish { dir } => {
                    let dir = model.pick(dir);
                    if let Some(writer) = writers.remove(&dir) {
                        if model.dir(dir).pending.is_none() {
                            assert!(matches!(writer.finish(), Err(MetaError::ListingFailed(_))));
                            continue;
                        }
                        writer.finish().unwrap();
                        let mut undecided =
                            std::mem::take(&mut model.dir(dir).pending.as_mut().unwrap().undecided);
                        undecided.sort_by(|a, b| a.name.cmp(&b.name));
                        for entry in &undecided {
                            model.page(dir, entry, true);
                        }
                        let d = model.dir(dir);
                        let p = d.pending.take().unwrap();
                        (d.shown, d.complete) = (p.names, Some((p.seen_ms, p.hidden)));
                        d.own.clear();
                    }
                }
                Op::Abort { dir } => {
                    let dir = model.pick(dir);
                    writers.remove(&dir);
                    model.dir(dir).pending = None;
                }
                Op::TakeBack { dir } => {
                    let dir = model.pick(dir);
                    let Some(writer) = writers.remove(&dir) else { continue };
                    writer.take_back(|| true).unwrap();
                    let d = model.dir(dir);
                    d.pending = None;
                    let own = std::mem::take(&mut d.own);
                    d.names.retain(|name, _| !own.contains(name));
                }
                Op::Cache { dir, name, stale, file } => {
                    let dir = model.pick(dir);
                    let Some(n) = model.dir(dir).names.get_mut(NAMES[name].as_bytes()) else { continue };
                    let a = &mut n.attributes;
                    let cached = file.map(|file| Cached { generation: 1, root: 0, file });
                    let noted = borrowed.set_cached(a.ino, a.version + u32::from(stale), cached).unwrap();
                    if stale || a.kind != Kind::File {
                        assert_eq!(noted, None);
                    } else {
                        if a.cached != cached {
                            // To the next odd number, or to the next even one.
                            a.epoch += if cached.is_some() { 1 + a.epoch % 2 } else { 1 };
                            a.cached = cached;
                        }
                        assert_eq!(noted.as_ref(), Some(&*a));
                    }
                }
                Op::Forget { dir } => {
                    let dir = model.pick(dir);
                    borrowed.forget(dir).unwrap();
                    model.dir(dir).forget();
                }
                Op::Reopen => break,
            }
            compare(&borrowed, &model);
            for dir in model.dirs.values() {
                for n in dir.names.values() {
                    let a = &n.attributes;
                    let (version, epoch) = epochs.entry(a.ino).or_insert((0, 0));
                    assert!(a.version >= *version && a.epoch >= *epoch);
                    assert_eq!(a.epoch % 2 == 1, a.cached.is_some());
                    (*version, *epoch) = (a.version, a.epoch);
                }
            }
        }
        drop(writers);
        for dir in model.dirs.values_mut() {
            dir.pending = None;
        }
        drop(borrowed);
        drop(Arc::try_unwrap(store).expect("no writer is left"));
        store = Arc::new(bench.open());
        compare(&store, &model);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_store_says_what_the_reference_says(ops in prop::collection::vec(op(), 1..60)) {
        run(ops);
    }
}
