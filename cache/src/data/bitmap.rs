//! Which blocks of a file are there: a private bit set, and one that workers can map.

use memmap2::{MmapOptions, MmapRaw};
use rustix::fs::{MemfdFlags, SealFlags};
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};

/// A plain bit set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Bits {
    words: Box<[u64]>,
}

impl Bits {
    pub(crate) fn new(len: u64) -> Self {
        Self { words: vec![0; words(len)].into_boxed_slice() }
    }
    pub(crate) fn get(&self, k: u64) -> bool {
        self.words[(k / 64) as usize] & (1 << (k % 64)) != 0
    }
    pub(crate) fn set(&mut self, k: u64, on: bool) {
        let (word, bit) = (&mut self.words[(k / 64) as usize], 1 << (k % 64));
        if on { *word |= bit } else { *word &= !bit }
    }
    pub(crate) fn set_range(&mut self, range: Range<u64>, on: bool) {
        range.for_each(|k| self.set(k, on));
    }
    pub(crate) fn add(&mut self, other: &Self) {
        self.words.iter_mut().zip(&other.words).for_each(|(word, more)| *word |= more);
    }
    pub(crate) fn count(&self) -> u64 {
        self.words.iter().map(|w| u64::from(w.count_ones())).sum()
    }
    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        self.words.iter().flat_map(|w| w.to_le_bytes()).collect()
    }
    /// None if the length is wrong or a bit beyond `len` is set.
    pub(crate) fn from_bytes(bytes: &[u8], len: u64) -> Option<Self> {
        if bytes.len() != words(len) * 8 {
            return None;
        }
        let words: Box<[u64]> = bytes
            .chunks_exact(8)
            .map(|c| u64::from_le_bytes(c.try_into().expect("chunks_exact(8) gives eight bytes")))
            .collect();
        let tail = len % 64;
        let clean = tail == 0 || words.last().is_none_or(|w| w >> tail == 0);
        clean.then_some(Self { words })
    }
}

/// The presence bitmap: bit k of little-endian u64 words is set (Release) after block k may be read.
/// It moves to shared memory when a worker first asks for it: most files are whole before anyone does.
pub(crate) struct Shared {
    len: u64,
    place: Place,
}

enum Place {
    Heap(Box<[AtomicU64]>),
    Mapped { map: MmapRaw, fd: OwnedFd },
}

impl Shared {
    pub(crate) fn new(len: u64) -> Self {
        Self { len, place: Place::Heap((0..words(len)).map(|_| AtomicU64::new(0)).collect()) }
    }

    pub(crate) fn get(&self, k: u64) -> bool {
        self.words()[(k / 64) as usize].load(Ordering::Acquire) & bit(k) != 0
    }
    /// Only after the bytes of block `k` are written and, if an earlier run wrote them, verified.
    pub(crate) fn set(&self, k: u64) {
        self.words()[(k / 64) as usize].fetch_or(bit(k), Ordering::Release);
    }
    pub(crate) fn to_bits(&self) -> Bits {
        Bits { words: self.words().iter().map(|w| u64::from_le(w.load(Ordering::Acquire))).collect() }
    }

    /// A descriptor of the bitmap that a worker can map for reading and nobody can write.
    pub(crate) fn share(&mut self) -> io::Result<OwnedFd> {
        if let Place::Heap(heap) = &self.place {
            let fd = rustix::fs::memfd_create(
                "millpond-presence",
                MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING,
            )?;
            rustix::fs::ftruncate(&fd, (words(self.len) * 8) as u64)?;
            let map = MmapOptions::new().map_raw(&fd)?;
            // Our mapping is made before the seals: it stays the only writable one, and the size never changes, so that
            // neither side can be given a SIGBUS by the other.
            rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW)?;
            // Since Linux 5.1; an older kernel is merely more trusting.
            let _ = rustix::fs::fcntl_add_seals(&fd, SealFlags::FUTURE_WRITE);
            let _ = rustix::fs::fcntl_add_seals(&fd, SealFlags::SEAL);
            let mapped = Place::Mapped { map, fd };
            for (to, from) in atomics(&mapped, self.len).iter().zip(heap.iter()) {
                to.store(from.load(Ordering::Acquire), Ordering::Release);
            }
            self.place = mapped;
        }
        match &self.place {
            Place::Mapped { fd, .. } => fd.as_fd().try_clone_to_owned(),
            Place::Heap(_) => unreachable!("the bitmap was moved to shared memory above"),
        }
    }

    fn words(&self) -> &[AtomicU64] {
        atomics(&self.place, self.len)
    }
}

/// What a file without any block present shows to a worker.
pub(crate) fn nothing_present(len: u64) -> io::Result<OwnedFd> {
    Shared::new(len).share()
}

fn atomics(place: &Place, len: u64) -> &[AtomicU64] {
    match place {
        Place::Heap(words) => words,
        // Needed because the bitmap is shared with another process: atomics over mapped memory have no safe constructor.
        // SAFETY: the mapping is page-aligned, `words(len) * 8` bytes long (ftruncate, then sealed against shrinking),
        // lives as long as `place`, and is only ever accessed through atomics.
        Place::Mapped { map, .. } => unsafe {
            std::slice::from_raw_parts(map.as_ptr().cast::<AtomicU64>(), words(len))
        },
    }
}

fn bit(k: u64) -> u64 {
    (1u64 << (k % 64)).to_le()
}

/// At least one, because an empty file cannot be mapped.
fn words(len: u64) -> usize {
    (len.div_ceil(64)).max(1) as usize
}
