//! Blocks on their way to the disk: checksummed, written, then shown to readers. Runs on the root's threads.

use super::file::{Body, File, Woken, send_all};
use super::memory::Share;
use super::pool::call_returned;
use super::root::Root;
use bytes::Bytes;
use crc_fast::{CrcAlgorithm, Digest};
use std::io::{self, IoSlice};
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// Linux's UIO_MAXIOV.
const SLICES_MAX: usize = 1024;

/// Consecutive whole blocks of one file, and the memory that they are charged with.
pub(crate) struct Batch {
    file: Arc<File>,
    first: u64,
    blocks: Vec<Vec<Bytes>>,
    bytes: u64,
    permits: Vec<Share>,
    /// Submitted: the batch answers for its blocks, even if it is dropped unwritten.
    answers: bool,
}

impl Batch {
    pub(crate) fn new(file: Arc<File>, first: u64) -> Self {
        Self { file, first, blocks: Vec::new(), bytes: 0, permits: Vec::new(), answers: false }
    }
    pub(crate) fn push(&mut self, block: Vec<Bytes>, bytes: u64, permit: Option<Share>) {
        self.blocks.push(block);
        self.bytes += bytes;
        self.permits.extend(permit);
    }
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }
    pub(crate) fn end(&self) -> u64 {
        self.first + self.blocks.len() as u64
    }

    pub(crate) fn submit(mut self) {
        if self.blocks.is_empty() {
            return;
        }
        self.answers = true;
        let file = self.file.clone();
        if let Some(root) = file.placed() {
            root.pool.submit_body(move || self.write());
        }
    }

    fn write(mut self) {
        let file = self.file.clone();
        let Some(root) = file.placed() else { return };
        // A disk that has just refused a write would refuse this one too, maybe after a long time-out.
        if file.is_gone() || !root.is_writable() {
            return;
        }
        let crcs: Vec<u32> = self.blocks.iter().map(|block| checksum(block)).collect();
        let written = file.data_fd(root).and_then(|fd| self.store(fd));
        if let Err(error) = written {
            file.refused(root, "write", &error);
            file.engine.ring();
            return;
        }
        self.answers = false;
        self.blocks = Vec::new();
        self.permits.clear();
        file.stored(root, self.first, &crcs, self.bytes);
    }

    fn store(&self, fd: &OwnedFd) -> io::Result<()> {
        let mut slices: Vec<IoSlice<'_>> = self.blocks.iter().flatten().map(|b| IoSlice::new(b)).collect();
        let mut slices = &mut slices[..];
        let mut position = self.file.bytes_of(&(self.first..self.first + 1)).start;
        while !slices.is_empty() {
            let some = slices.len().min(SLICES_MAX);
            match rustix::io::pwritev(fd, &slices[..some], position) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(n) => {
                    call_returned();
                    position += n as u64;
                    IoSlice::advance_slices(&mut slices, n);
                }
                Err(rustix::io::Errno::INTR) => {}
                Err(e) => return Err(e.into()),
            }
        }
        Ok(())
    }
}

impl Drop for Batch {
    fn drop(&mut self) {
        if self.answers && self.bytes > 0 {
            self.file.not_stored(&(self.first..self.end()));
        }
    }
}

impl File {
    /// The bytes are in the data file: now readers may know.
    fn stored(self: &Arc<Self>, root: &Root, first: u64, crcs: &[u32], bytes: u64) {
        let range = first..first + crcs.len() as u64;
        // Charged before anyone knows: the next file is placed by what this one took.
        let pressure = self.engine.charge(self.id(), root, bytes);
        let (woken, completed) = {
            let mut state = self.lock();
            let Body::Partial(blocks) = &mut state.body else { return };
            for (k, &crc) in range.clone().zip(crcs) {
                blocks.written(k, crc);
            }
            blocks.unsaved += bytes;
            let completed = state.body.complete();
            (state.wake(&range, None), completed)
        };
        send_all(woken);
        if let Some(blocks) = completed {
            self.completed(root, &blocks);
        }
        self.engine.ease(root, pressure);
    }

    /// The disk did not take them: their readers go to the source.
    fn not_stored(&self, range: &Range<u64>) {
        let woken = {
            let mut state = self.lock();
            if let Body::Partial(blocks) = &mut state.body {
                blocks.give_back(range);
            }
            state.wake(range, Some(&Woken::Direct))
        };
        send_all(woken);
    }
}

pub(crate) fn checksum(pieces: &[Bytes]) -> u32 {
    let mut digest = Digest::new(CrcAlgorithm::Crc32Iscsi);
    pieces.iter().for_each(|piece| digest.update(piece));
    digest.finalize() as u32
}
