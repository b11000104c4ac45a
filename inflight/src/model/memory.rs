//! A connection's memory in the model checker: each word that the product's code touches is an atomic of loom's.

use super::model::atomic::{AtomicU32, AtomicU64};
use std::cell::{Cell, RefCell};
use std::collections::{BTreeSet, HashMap};
use std::io;
use std::os::fd::{AsFd, OwnedFd};

thread_local! {
    /// Offset and bytes of what a model touches. Loom wants an atomic made before the threads that use it are; so what
    /// one execution finds, the next ones begin with.
    static KNOWN: RefCell<BTreeSet<(usize, usize)>> = RefCell::default();
    static GREW: Cell<bool> = const { Cell::new(false) };
}

/// Another model begins: of its words none is known.
pub(super) fn forget() {
    KNOWN.take();
    GREW.set(false);
}

/// True: a word was not known, so what was explored since is no exploration.
pub(super) fn grew() -> bool {
    GREW.replace(false)
}

#[derive(Debug)]
pub(super) struct Memory {
    u64s: HashMap<usize, AtomicU64>,
    u32s: HashMap<usize, AtomicU32>,
}

impl Memory {
    pub(super) fn new() -> Self {
        KNOWN.with_borrow(|known| {
            let of = |bytes| known.iter().filter(move |(_, b)| *b == bytes).map(|(offset, _)| *offset);
            Self {
                u64s: of(8).map(|offset| (offset, AtomicU64::modelled())).collect(),
                u32s: of(4).map(|offset| (offset, AtomicU32::modelled())).collect(),
            }
        })
    }

    pub(super) fn u64(&self, offset: usize) -> &AtomicU64 {
        self.u64s.get(&offset).unwrap_or_else(|| {
            note(offset, 8);
            Box::leak(Box::new(AtomicU64::unknown())) // a few in each model
        })
    }

    pub(super) fn u32(&self, offset: usize) -> &AtomicU32 {
        self.u32s.get(&offset).unwrap_or_else(|| {
            note(offset, 4);
            Box::leak(Box::new(AtomicU32::unknown()))
        })
    }

    // What needs a mapping and a kernel is not modelled.

    pub(super) fn map(_: impl AsFd, _: usize) -> io::Result<Self> {
        Err(io::ErrorKind::Unsupported.into())
    }
    pub(super) fn pointer(&self, _: usize, _: usize) -> *mut u8 {
        std::ptr::null_mut()
    }
    pub(super) fn populate(&self, _: usize, _: usize, _: bool) {}
}

pub(super) fn create(_: usize) -> io::Result<OwnedFd> {
    Err(io::ErrorKind::Unsupported.into())
}

fn note(offset: usize, bytes: usize) {
    GREW.set(true);
    KNOWN.with_borrow_mut(|known| {
        known.insert((offset, bytes));
        let overlaps = match bytes {
            8 => known.contains(&(offset, 4)) || known.contains(&(offset + 4, 4)),
            _ => known.contains(&(offset - offset % 8, 8)),
        };
        assert!(!overlaps, "the word at {offset} is accessed in two sizes");
    });
}
