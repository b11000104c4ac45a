//! A simulated directory that forgets at a power loss what was not synced: any part of it, in any order.

use crate::disk::{Disk, File};
use rustix::io::Errno;
use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// The process dies in this call, which has done its work, some of it, or nothing.
    Die,
    Full,
    Eio,
}

/// Strikes at the call `at`, counted from when it was set; an error at so many calls in turn.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fault {
    pub(super) at: u32,
    pub(super) kind: Kind,
    pub(super) times: u32,
}

#[derive(Clone)]
pub(super) struct Sim(Arc<Mutex<World>>);

struct SimFile {
    sim: Sim,
    inode: usize,
}

struct World {
    /// None is ever freed: a name that a power loss brings back has its file.
    inodes: Vec<Inode>,
    names: BTreeMap<String, usize>,
    durable_names: BTreeMap<String, usize>,
    /// What each call since the last sync of the directory changed, together.
    pending_names: Vec<Vec<(String, Option<usize>)>>,
    random: u64,
    calls: u32,
    faults: Vec<Fault>,
    is_dead: bool,
    has_failed: bool,
    /// The longest buffer that was read into.
    read_max: usize,
    log: Vec<&'static str>,
}

#[derive(Default)]
struct Inode {
    live: Vec<u8>,
    durable: Vec<u8>,
    pending: Vec<Pending>,
}

#[derive(Clone)]
enum Pending {
    Write(usize, Vec<u8>),
    Size(usize),
}

impl Pending {
    fn apply(&self, bytes: &mut Vec<u8>) {
        match self {
            Pending::Write(at, new) => {
                bytes.resize(bytes.len().max(at + new.len()), 0);
                bytes[*at..at + new.len()].copy_from_slice(new);
            }
            Pending::Size(size) => bytes.resize(*size, 0),
        }
    }
}

impl World {
    fn below(&mut self, end: usize) -> usize {
        // SplitMix64.
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.random ^ (self.random >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % end as u64) as usize
    }

    fn is_heads(&mut self) -> bool {
        self.below(2) == 0
    }

    /// What goes wrong in the call that begins.
    fn call(&mut self, name: &'static str) -> io::Result<Option<Kind>> {
        if self.is_dead {
            return Err(Errno::IO.into());
        }
        self.log.push(name);
        let now = self.calls;
        self.calls += 1;
        let Some(fault) = self.faults.iter().find(|f| (f.at..f.at + f.times).contains(&now)) else {
            return Ok(None);
        };
        let kind = fault.kind;
        self.has_failed = true;
        self.is_dead = kind == Kind::Die;
        Ok(Some(kind))
    }

    /// A call that does its work as a whole or not at all.
    fn whole(&mut self, name: &'static str, work: impl FnOnce(&mut World)) -> io::Result<()> {
        let Some(kind) = self.call(name)? else {
            work(self);
            return Ok(());
        };
        if kind == Kind::Die && self.is_heads() {
            work(self);
        }
        Err(error(kind))
    }

    fn change_names(&mut self, changes: Vec<(String, Option<usize>)>) {
        apply_names(&changes, &mut self.names);
        self.pending_names.push(changes);
    }

    /// The parts of the unsynced writes that the disk has by now, in the order in which it got them.
    fn some_of(&mut self, pending: &[Pending]) -> Vec<Pending> {
        let sector = [usize::MAX, 512, 8][self.below(3)];
        let kept_of_ten = [0, 3, 8, 10][self.below(4)];
        let mut some = Vec::new();
        for write in pending {
            let Pending::Write(at, bytes) = write else {
                some.push(write.clone());
                continue;
            };
            // Sectors lie where they lie on the disk, whatever the write's offset.
            let mut from = *at;
            while from < at + bytes.len() {
                let to = (at + bytes.len()).min((from / sector + 1).saturating_mul(sector));
                let range: Range<usize> = from - at..to - at;
                some.push(match self.below(20) {
                    // Blocks that were allocated, and whose bytes did not come.
                    0 => Pending::Write(to, Vec::new()),
                    _ => Pending::Write(from, bytes[range].to_vec()),
                });
                from = to;
            }
        }
        some.retain(|_| self.below(10) < kept_of_ten);
        for last in (1..some.len()).rev() {
            let other = self.below(last + 1);
            some.swap(last, other);
        }
        some
    }
}

fn apply_names(changes: &[(String, Option<usize>)], names: &mut BTreeMap<String, usize>) {
    for (name, inode) in changes {
        match inode {
            Some(inode) => drop(names.insert(name.clone(), *inode)),
            None => drop(names.remove(name)),
        }
    }
}

fn error(kind: Kind) -> io::Error {
    if kind == Kind::Full { Errno::NOSPC.into() } else { Errno::IO.into() }
}

impl Sim {
    pub(super) fn new(seed: u64) -> Sim {
        Sim(Arc::new(Mutex::new(World {
            inodes: Vec::new(),
            names: BTreeMap::new(),
            durable_names: BTreeMap::new(),
            pending_names: Vec::new(),
            random: seed,
            calls: 0,
            faults: Vec::new(),
            is_dead: false,
            has_failed: false,
            read_max: 0,
            log: Vec::new(),
        })))
    }

    /// A disk with this one file, durable.
    pub(super) fn with(name: &str, bytes: &[u8]) -> Sim {
        let sim = Sim::new(0);
        {
            let mut world = sim.world();
            let (live, durable) = (bytes.to_vec(), bytes.to_vec());
            world.inodes.push(Inode { live, durable, pending: Vec::new() });
            world.names.insert(name.to_owned(), 0);
            world.durable_names.insert(name.to_owned(), 0);
        }
        sim
    }

    fn world(&self) -> MutexGuard<'_, World> {
        self.0.lock().unwrap()
    }

    /// A process begins, and this happens to it; the first of them where several strike at one call.
    pub(super) fn begin(&self, faults: &[Fault]) {
        let mut world = self.world();
        (world.calls, world.faults, world.is_dead, world.has_failed) = (0, faults.to_vec(), false, false);
    }

    /// As `begin`, from the next call on.
    pub(super) fn fail_next(&self, after: u32, kind: Kind, times: u32) {
        self.begin(&[Fault { at: after, kind, times }]);
    }

    pub(super) fn power_loss(&self) {
        let mut world = self.world();
        let world = &mut *world;
        let mut inodes = std::mem::take(&mut world.inodes);
        for inode in &mut inodes {
            for write in world.some_of(&std::mem::take(&mut inode.pending)) {
                write.apply(&mut inode.durable);
            }
            inode.live = inode.durable.clone();
        }
        world.inodes = inodes;
        for changes in std::mem::take(&mut world.pending_names) {
            if world.is_heads() {
                apply_names(&changes, &mut world.durable_names);
            }
        }
        world.names = world.durable_names.clone();
    }

    pub(super) fn is_dead(&self) -> bool {
        self.world().is_dead
    }

    pub(super) fn has_failed(&self) -> bool {
        self.world().has_failed
    }

    pub(super) fn calls(&self) -> u32 {
        self.world().calls
    }

    pub(super) fn read_max(&self) -> usize {
        self.world().read_max
    }

    /// The calls since the last time.
    pub(super) fn take_log(&self) -> Vec<&'static str> {
        std::mem::take(&mut self.world().log)
    }

    pub(super) fn names(&self) -> Vec<String> {
        self.world().names.keys().cloned().collect()
    }

    pub(super) fn bytes(&self, name: &str) -> Vec<u8> {
        let world = self.world();
        world.inodes[world.names[name]].live.clone()
    }

    pub(super) fn add(&self, name: &str, bytes: &[u8]) {
        let file = self.create(name).unwrap();
        file.write(bytes, 0).unwrap();
    }
}

impl Disk for Sim {
    fn open(&self, name: &str) -> io::Result<Option<Box<dyn File>>> {
        let mut world = self.world();
        world.whole("open", |_| ())?;
        let inode = world.names.get(name).copied();
        Ok(inode.map(|inode| Box::new(SimFile { sim: self.clone(), inode }) as Box<dyn File>))
    }

    fn create(&self, name: &str) -> io::Result<Box<dyn File>> {
        let mut world = self.world();
        if world.names.contains_key(name) {
            return Err(Errno::EXIST.into());
        }
        let inode = world.inodes.len();
        world.inodes.push(Inode::default());
        world.whole("create", |world| world.change_names(vec![(name.to_owned(), Some(inode))]))?;
        Ok(Box::new(SimFile { sim: self.clone(), inode }))
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        let mut world = self.world();
        let inode = world.names.get(from).copied();
        let rename = move |world: &mut World| {
            if inode.is_some() {
                world.change_names(vec![(to.to_owned(), inode), (from.to_owned(), None)]);
            }
        };
        match world.whole("rename", rename) {
            // An error of a rename says nothing of whether it was made.
            Err(error) if !world.is_dead && world.is_heads() => {
                rename(&mut world);
                Err(error)
            }
            result => result,
        }
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        let mut world = self.world();
        world.whole("remove", |world| {
            if world.names.contains_key(name) {
                world.change_names(vec![(name.to_owned(), None)]);
            }
        })
    }

    fn sync(&self) -> io::Result<()> {
        self.world().whole("sync_dir", |world| {
            for changes in std::mem::take(&mut world.pending_names) {
                apply_names(&changes, &mut world.durable_names);
            }
        })
    }
}

impl File for SimFile {
    fn size(&self) -> io::Result<u64> {
        let mut world = self.sim.world();
        world.whole("size", |_| ())?;
        Ok(world.inodes[self.inode].live.len() as u64)
    }

    fn read(&self, into: &mut [u8], at: u64) -> io::Result<usize> {
        let mut world = self.sim.world();
        world.whole("read", |_| ())?;
        world.read_max = world.read_max.max(into.len());
        let bytes = world.inodes[self.inode].live.get(at as usize..).unwrap_or_default();
        let len = bytes.len().min(into.len());
        into[..len].copy_from_slice(&bytes[..len]);
        Ok(len)
    }

    fn write(&self, bytes: &[u8], at: u64) -> io::Result<usize> {
        let mut world = self.sim.world();
        let kind = world.call("write")?;
        let written = match kind {
            None => bytes.len(),
            Some(Kind::Die) => world.below(bytes.len() + 1),
            Some(_) => world.below(bytes.len()),
        };
        if written > 0 {
            let write = Pending::Write(at as usize, bytes[..written].to_vec());
            write.apply(&mut world.inodes[self.inode].live);
            world.inodes[self.inode].pending.push(write);
        }
        match kind {
            None => Ok(written),
            // A short write; why, the next call tells.
            Some(kind @ (Kind::Full | Kind::Eio)) if written > 0 => {
                let at = world.calls;
                world.faults.push(Fault { at, kind, times: 1 });
                Ok(written)
            }
            Some(kind) => Err(error(kind)),
        }
    }

    fn set_size(&self, size: u64) -> io::Result<()> {
        self.sim.world().whole("set_size", |world| {
            let change = Pending::Size(size as usize);
            change.apply(&mut world.inodes[self.inode].live);
            world.inodes[self.inode].pending.push(change);
        })
    }

    fn sync(&self) -> io::Result<()> {
        let mut world = self.sim.world();
        let result = world.whole("sync", |world| {
            let inode = &mut world.inodes[self.inode];
            for change in inode.pending.drain(..) {
                change.apply(&mut inode.durable);
            }
            // Of writes that an earlier, failed sync has dropped, the size comes, and the bytes do not.
            inode.durable.resize(inode.live.len(), 0);
        });
        if result.is_err() && !world.is_dead {
            // As Linux: the pages are clean now, whether the disk has them or not. A size stays what it is: a file
            // system that cannot keep its own records stops.
            let pending = std::mem::take(&mut world.inodes[self.inode].pending);
            let (sizes, writes): (Vec<_>, Vec<_>) =
                pending.into_iter().partition(|p| matches!(p, Pending::Size(_)));
            let written = world.some_of(&writes);
            let inode = &mut world.inodes[self.inode];
            written.iter().for_each(|write| write.apply(&mut inode.durable));
            inode.pending = sizes;
        }
        result
    }
}
