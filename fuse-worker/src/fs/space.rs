//! Buffers for bytes on their way to the kernel: shared by all threads, bounded, given back when idle.

use std::ops::{Deref, DerefMut};
use std::sync::{Condvar, Mutex, MutexGuard};

const SMALLEST: usize = 128 << 10;

pub(super) struct Buffers {
    kept: Mutex<Kept>,
    returned: Condvar,
    bytes_max: usize,
}

#[derive(Default)]
struct Kept {
    free: Vec<Vec<u8>>,
    /// Of all buffers, free and lent.
    bytes: usize,
    lent: usize,
    used_since_trim: bool,
}

/// A buffer of at least the length asked for; it goes back when dropped.
pub(super) struct Buffer<'a> {
    bytes: Vec<u8>,
    home: &'a Buffers,
}

impl Buffers {
    /// A buffer larger than `bytes_max` is lent while no other is.
    pub(super) fn new(bytes_max: usize) -> Self {
        Self { kept: Mutex::default(), returned: Condvar::new(), bytes_max }
    }

    /// Waits while too much is lent. A thread that has a buffer only copies: it waits for no other, and gives it back
    /// soon.
    pub(super) fn take(&self, len: usize) -> Buffer<'_> {
        let size = len.next_power_of_two().max(SMALLEST);
        let mut kept = self.lock();
        kept.used_since_trim = true;
        loop {
            if let Some(k) = kept.free.iter().position(|buffer| buffer.len() >= len) {
                let bytes = kept.free.swap_remove(k);
                kept.lent += 1;
                return Buffer { bytes, home: self };
            }
            // Free ones are too small: they make room.
            while kept.bytes + size > self.bytes_max
                && let Some(small) = kept.free.pop()
            {
                kept.bytes -= small.len();
            }
            if kept.bytes + size <= self.bytes_max || kept.lent == 0 {
                kept.bytes += size;
                kept.lent += 1;
                drop(kept);
                return Buffer { bytes: vec![0; size], home: self };
            }
            kept = self.returned.wait(kept).unwrap_or_else(|e| e.into_inner());
        }
    }

    /// Frees the buffers if none was used since the last call.
    pub(super) fn trim(&self) {
        let mut kept = self.lock();
        if !std::mem::take(&mut kept.used_since_trim) {
            kept.bytes -= kept.free.iter().map(Vec::len).sum::<usize>();
            kept.free = Vec::new();
        }
    }

    fn lock(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(|e| e.into_inner())
    }
}

impl Deref for Buffer<'_> {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.bytes
    }
}
impl DerefMut for Buffer<'_> {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.bytes
    }
}
impl Drop for Buffer<'_> {
    fn drop(&mut self) {
        let bytes = std::mem::take(&mut self.bytes);
        let mut kept = self.home.lock();
        kept.lent -= 1;
        if kept.bytes <= self.home.bytes_max {
            kept.free.push(bytes);
        } else {
            kept.bytes -= bytes.len();
        }
        drop(kept);
        // All: they may wait for different lengths.
        self.home.returned.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

    #[test]
    fn all_buffers_together_stay_within_the_bound_and_nobody_waits_for_ever() {
        const MAX: usize = 3 << 20;
        let buffers = Buffers::new(MAX);
        let (lent, most) = (AtomicUsize::new(0), AtomicUsize::new(0));
        std::thread::scope(|scope| {
            for thread in 0..8 {
                let (buffers, lent, most) = (&buffers, &lent, &most);
                scope.spawn(move || {
                    for round in 0..500 {
                        let buffer = buffers.take([4096, 1 << 20, 300_000][(thread + round) % 3]);
                        let now = lent.fetch_add(buffer.len(), SeqCst) + buffer.len();
                        most.fetch_max(now, SeqCst);
                        lent.fetch_sub(buffer.len(), SeqCst);
                    }
                });
            }
        });
        assert!(most.load(SeqCst) <= MAX, "{most:?}");
        assert!(buffers.lock().bytes <= MAX);
        drop(buffers.take(16 << 20)); // more than the bound: alone, and not kept
        assert!(buffers.lock().bytes <= MAX);
        buffers.trim();
        buffers.trim();
        assert_eq!(buffers.lock().bytes, 0);
    }
}
