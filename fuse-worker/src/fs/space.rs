//! Buffers for bytes on their way to the kernel, shared by all threads and given back when idle.

use std::ops::{Deref, DerefMut};
use std::sync::Mutex;

const SMALLEST: usize = 128 << 10;
const KEPT_MAX: usize = 8;

#[derive(Default)]
pub(super) struct Buffers(Mutex<Kept>);

#[derive(Default)]
struct Kept {
    free: Vec<Vec<u8>>,
    used_since_trim: bool,
}

/// A buffer of at least the length asked for; it goes back when dropped.
pub(super) struct Buffer<'a> {
    bytes: Vec<u8>,
    home: &'a Buffers,
}

impl Buffers {
    pub(super) fn take(&self, len: usize) -> Buffer<'_> {
        let mut kept = self.lock();
        kept.used_since_trim = true;
        let fitting = kept.free.iter().position(|buffer| buffer.len() >= len);
        let found = fitting.map(|i| kept.free.swap_remove(i));
        drop(kept);
        let bytes = found.unwrap_or_else(|| vec![0; len.next_power_of_two().max(SMALLEST)]);
        Buffer { bytes, home: self }
    }

    /// Frees the buffers if none was used since the last call.
    pub(super) fn trim(&self) {
        let mut kept = self.lock();
        if !std::mem::take(&mut kept.used_since_trim) {
            kept.free = Vec::new();
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Kept> {
        self.0.lock().unwrap_or_else(|e| e.into_inner())
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
        let mut kept = self.home.lock();
        if kept.free.len() < KEPT_MAX {
            kept.free.push(std::mem::take(&mut self.bytes));
        }
    }
}
