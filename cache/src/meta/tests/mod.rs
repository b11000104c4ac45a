//! What the metadata store promises, as claims.

mod collisions;
mod content;
mod distrust;
mod idle;
mod listings;
mod model;
mod placed;
mod processes;

use super::{Clock, Incoming, InodeNumbers, Kind, Lookup, MetaError, Options, Store, View};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// A store on a temporary directory with a clock and a number giver that the test holds.
struct Bench {
    clock: Arc<AtomicU64>,
    numbers: Arc<Numbers>,
    dir: tempfile::TempDir,
}

/// Counts up, and outlives the store as the agent's high-water mark does.
struct Numbers(AtomicU64);

impl InodeNumbers for Numbers {
    fn next(&self) -> Result<u64, MetaError> {
        Ok(self.0.fetch_add(1, Ordering::Relaxed))
    }
}

const SMALL: Options =
    Options { map_bytes: 1 << 30, start_anew: true, reserve_bytes: 4 << 20, readers_max: 512 };

impl Bench {
    fn new() -> Self {
        Self {
            clock: Arc::new(AtomicU64::new(1_000)),
            numbers: Arc::new(Numbers(AtomicU64::new(super::FIRST_INO))),
            dir: tempfile::tempdir().unwrap(),
        }
    }

    fn open(&self) -> Store {
        open(self.dir.path(), &SMALL, &self.clock, &self.numbers).unwrap()
    }

    fn at(&self, ms: u64) {
        self.clock.store(ms, Ordering::Relaxed);
    }
}

fn open(
    dir: &Path,
    options: &Options,
    clock: &Arc<AtomicU64>,
    numbers: &Arc<Numbers>,
) -> Result<Store, MetaError> {
    let clock = clock.clone();
    let since_boot = clock.clone();
    let clock =
        Clock::new("boot", move || since_boot.load(Ordering::Relaxed), move || clock.load(Ordering::Relaxed));
    Store::open_at(dir, options, numbers.clone(), clock)
}

fn file(name: &str, token: &str) -> Incoming {
    Incoming {
        name: name.into(),
        kind: Kind::File,
        size: token.len() as u64,
        mtime_ns: 7_000_000_000,
        token: token.into(),
        target: Vec::new(),
        permissions: None,
    }
}

fn directory(name: &str) -> Incoming {
    Incoming { kind: Kind::Directory, size: 0, token: String::new(), ..file(name, "") }
}

/// Stores a whole listing of `dir`.
fn list(store: &Store, dir: u64, entries: &[Incoming]) -> super::ListingState {
    let mut listing = store.begin_listing(dir).unwrap();
    listing.page(entries).unwrap();
    listing.finish().unwrap()
}

/// Names that `read_dir` shows, and None without a complete listing.
fn names(view: &View, dir: u64, after: Option<u64>) -> Option<Vec<String>> {
    let mut names = Vec::new();
    view.read_dir(dir, after, &mut |name, _| {
        names.push(String::from_utf8_lossy(name).into_owned());
        true
    })
    .unwrap()?;
    Some(names)
}

fn found(view: &View, parent: u64, name: &str) -> super::Attributes {
    match view.lookup(parent, name.as_bytes()).unwrap() {
        Lookup::Found { attributes, .. } => attributes,
        other => panic!("{name} is {other:?}"),
    }
}
