//! What the fuzz targets share: the bound on memory that each input is held to, and the words in which inputs are read.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// Counts what lives of the Rust code's memory, and aborts where an input makes that grow above its bound: libFuzzer
/// keeps the input, as it keeps one that panics.
struct Counting;

static LIVE: AtomicUsize = AtomicUsize::new(0);
/// Of the input that is running; `usize::MAX`: none is.
static LIMIT: AtomicUsize = AtomicUsize::new(usize::MAX);

impl Counting {
    fn grew(bytes: usize) {
        let live = LIVE.fetch_add(bytes, Relaxed) + bytes;
        // What a panic's backtrace takes is not the input's.
        if live > LIMIT.load(Relaxed) && !std::thread::panicking() {
            LIMIT.store(usize::MAX, Relaxed);
            let said = b"fuzz: this input takes more memory than its target's bound allows\n";
            // SAFETY: plain system calls; whatever allocates would come back here.
            unsafe {
                libc::write(2, said.as_ptr().cast(), said.len());
                libc::abort();
            }
        }
    }

    fn shrank(bytes: usize) {
        LIVE.fetch_sub(bytes, Relaxed);
    }
}

// SAFETY: the system's allocator does it, with the arguments that came.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        Self::grew(layout.size());
        // SAFETY: forwarded as it came.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        Self::shrank(layout.size());
        // SAFETY: forwarded as it came.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // Both at once, as a move has them.
        Self::grew(size);
        // SAFETY: forwarded as it came.
        let moved = unsafe { System.realloc(pointer, layout, size) };
        Self::shrank(layout.size());
        moved
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

/// How much memory an input may take: `times` its length, and `besides`, bytes.
pub struct Bound {
    pub times: usize,
    pub besides: usize,
}

impl Bound {
    /// Runs one input.
    pub fn hold<T>(&self, input: &[u8], run: impl FnOnce() -> T) -> T {
        let before = LIVE.load(Relaxed);
        LIMIT.store(before + self.times * input.len() + self.besides, Relaxed);
        let done = run();
        LIMIT.store(usize::MAX, Relaxed);
        done
    }
}

/// An input as a sequence of numbers; where it ends, it goes on with zeros.
pub struct Numbers<'i>(&'i [u8]);

impl<'i> Numbers<'i> {
    pub fn new(input: &'i [u8]) -> Self {
        Self(input)
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn u8(&mut self) -> u8 {
        self.take::<1>()[0]
    }
    pub fn u16(&mut self) -> u16 {
        u16::from_le_bytes(self.take())
    }
    pub fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.take())
    }
    pub fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.take())
    }

    /// At most so many bytes.
    pub fn bytes(&mut self, len: usize) -> &'i [u8] {
        let (taken, rest) = self.0.split_at(len.min(self.0.len()));
        self.0 = rest;
        taken
    }

    fn take<const N: usize>(&mut self) -> [u8; N] {
        let mut bytes = [0; N];
        let taken = self.bytes(N);
        bytes[..taken.len()].copy_from_slice(taken);
        bytes
    }
}
