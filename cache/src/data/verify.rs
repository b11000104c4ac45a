//! What an earlier run left is read and checked before anyone may rely on it.

use super::blocks::{Blocks, Known};
use super::file::{Body, File, Launch, State, Woken, send_all};
use super::pool::call_returned;
use super::read::Busy;
use super::root::Root;
use super::sidecar;
use crc_fast::crc32_iscsi;
use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// Verified at once at most, when a reader waits: little enough for the reader, enough for the disk.
const STEP_BYTES: u64 = 1 << 20;
/// Verified at once in the background.
const BACKGROUND_BYTES: u64 = 8 << 20;

impl File {
    /// Claims what of `want` needs verifying.
    pub(crate) fn verify_soon(&self, state: &mut State, want: &Range<u64>) {
        let Body::Partial(blocks) = &mut state.body else { return };
        let mut k = want.start;
        while let Some(first) = blocks.next_unverified(k..want.end) {
            // A reader that is here will most likely go on.
            let limit = (first + (STEP_BYTES / self.block_bytes()).max(1)).max(want.end).min(self.blocks());
            k = blocks.end_of_unverified(first..limit);
            blocks.claim(first..k);
            state.launches.push(Launch::Verify(first..k));
        }
    }

    /// The blocks are claimed already.
    pub(crate) fn check(self: &Arc<Self>, run: Range<u64>) {
        let check = Check { file: self.clone(), run, busy: Some(Busy::new(&self.busy)) };
        if let Some(root) = self.placed() {
            root.pool.submit(move || check.run());
        }
    }

    /// Verifies the file from end to end, so that it can be called whole.
    pub(crate) fn verify_in_background(self: &Arc<Self>) {
        let file = self.clone();
        let large = self.is_large();
        self.engine.runtime.spawn(inflight::carry(async move {
            let _turn = if large { file.engine.verifying.clone().acquire_owned().await.ok() } else { None };
            file.awaken().await;
            let step = BACKGROUND_BYTES / file.block_bytes();
            let mut first = 0;
            while first < file.blocks() && !file.is_gone() {
                let want = first..(first + step.max(1)).min(file.blocks());
                let Some(root) = file.placed() else { return };
                {
                    let mut state = file.lock();
                    file.verify_soon(&mut state, &want);
                    file.launch(state);
                }
                // Behind the checks just submitted (the root has two threads: nearly).
                if root.run(|| ()).await.is_none() {
                    return;
                }
                first = want.end;
            }
        }));
    }

    /// Reads the sidecar of a file that an earlier instance left.
    pub(crate) async fn awaken(self: &Arc<Self>) {
        let resting = matches!(self.lock().body, Body::Resting);
        let Some(root) = self.placed().filter(|_| resting) else { return };
        let file = self.clone();
        let read = root.run(move || file.read_sidecar()).await;
        // A block that cannot be read counts as absent. Where the disk hangs, its state is not known yet.
        if read.is_some() || !root.hangs() {
            self.settle_body(None);
        }
    }

    fn read_sidecar(&self) {
        let Some(root) = self.placed() else { return };
        let bytes = match root.read_sidecar(self.key(), self.id()) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return,
            Err(error) => return root.failed("read sidecar", &error, false),
        };
        let decoded = sidecar::decode_header(&bytes).and_then(|header| {
            let same = header.key == **self.key() && header.block_bytes == self.block_bytes();
            let known = sidecar::decode_body(&header, &bytes)?;
            same.then_some(known)
        });
        if decoded.is_none() {
            self.engine.observer.checksum_failed(root.number, 1);
        }
        self.settle_body(decoded);
    }
}

/// Blocks to verify, claimed.
struct Check {
    file: Arc<File>,
    run: Range<u64>,
    busy: Option<Busy>,
}

impl Check {
    fn run(mut self) {
        let file = self.file.clone();
        let Some(root) = file.placed() else { return };
        let crcs: Vec<u32> = match &file.lock().body {
            Body::Partial(blocks) => self.run.clone().map(|k| blocks.crc(k).unwrap_or_default()).collect(),
            _ => return,
        };
        let mut buffer = vec![0; file.block_bytes() as usize];
        let fd = file.existing_data_fd(root);
        for (k, crc) in self.run.clone().zip(crcs) {
            call_returned();
            let sound = !file.is_gone() && file.is_sound(root, &fd, k, crc, &mut buffer);
            file.verified(root, k, sound);
            self.run.start = k + 1;
        }
        self.busy.take();
    }
}

impl Drop for Check {
    fn drop(&mut self) {
        // Not run to its end (closed pool): no reader may wait for it.
        if !self.run.is_empty() {
            let woken = {
                let mut state = self.file.lock();
                if let Body::Partial(blocks) = &mut state.body {
                    blocks.give_back(&self.run);
                }
                state.wake(&self.run, Some(&Woken::Direct))
            };
            send_all(woken);
        }
    }
}

impl File {
    fn is_sound(&self, root: &Root, fd: &io::Result<OwnedFd>, k: u64, crc: u32, buffer: &mut [u8]) -> bool {
        let bytes = self.bytes_of(&(k..k + 1));
        let buffer = &mut buffer[..(bytes.end - bytes.start) as usize];
        let fd = match fd {
            Ok(fd) => fd,
            Err(error) => {
                root.failed("open", error, false);
                return false;
            }
        };
        match read_exact_at(fd, buffer, bytes.start) {
            Ok(()) if crc32_iscsi(buffer) == crc => true,
            Ok(()) => {
                self.engine.observer.checksum_failed(root.number, 1);
                tracing::warn!(
                    file = self.id(),
                    block = k,
                    "a cached block does not match its checksum: fetching it again"
                );
                false
            }
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                self.engine.observer.checksum_failed(root.number, 1);
                false
            }
            Err(error) => {
                root.failed("read", &error, false);
                false
            }
        }
    }

    fn verified(self: &Arc<Self>, root: &Root, k: u64, sound: bool) {
        let (woken, completed) = {
            let mut state = self.lock();
            let Body::Partial(blocks) = &mut state.body else { return };
            if sound {
                blocks.verified(k);
            } else {
                blocks.wrong(k);
                // The sidecar must not promise it again.
                blocks.unsaved += 1;
            }
            let completed = state.body.complete();
            (state.wake(&(k..k + 1), (!sound).then_some(&Woken::Look)), completed)
        };
        send_all(woken);
        if let Some(blocks) = completed {
            self.completed(root, &blocks);
        }
    }

    fn settle_body(&self, found: Option<Known>) {
        let mut state = self.lock();
        if matches!(state.body, Body::Resting) {
            let blocks = Blocks::unverified(self.blocks(), found.unwrap_or_default());
            state.body = Body::Partial(Box::new(blocks));
        }
    }
}

pub(crate) fn read_exact_at(fd: &OwnedFd, mut buffer: &mut [u8], mut offset: u64) -> io::Result<()> {
    while !buffer.is_empty() {
        match rustix::io::pread(fd, &mut *buffer, offset) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(n) => {
                buffer = &mut buffer[n..];
                offset += n as u64;
            }
            Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
    }
    Ok(())
}
