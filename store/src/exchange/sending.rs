//! The body of a write: bytes of a file, read as the connection takes them.

use crate::sink::Body;
use bytes::Bytes;
use crc_fast::{CrcAlgorithm, Digest};
use futures::FutureExt;
use futures::future::BoxFuture;
use http_body::{Frame, SizeHint};
use md5::{Digest as _, Md5};
use std::fs::File;
use std::io;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Context, Poll, ready};

/// One read of the file: of a part of a few MiB some dozens.
const PIECE_BYTES: u64 = 256 << 10;

/// How far a body has come, for those who wait for it.
#[derive(Debug, Default)]
pub(super) struct Progress {
    taken: AtomicU64,
    outcome: Mutex<Outcome>,
}

#[derive(Debug, Default)]
struct Outcome {
    /// Why it ended before its end: the file's fault, not the connection's.
    broken: Option<String>,
    /// Of all of it.
    md5: Option<[u8; 16]>,
}

impl Progress {
    /// Bytes that the connection has taken.
    pub(super) fn taken(&self) -> u64 {
        self.taken.load(Ordering::Relaxed)
    }

    pub(super) fn broken(&self) -> Option<String> {
        self.lock().broken.clone()
    }

    /// None: not all of it was taken.
    pub(super) fn md5(&self) -> Option<[u8; 16]> {
        self.lock().md5
    }

    fn lock(&self) -> MutexGuard<'_, Outcome> {
        self.outcome.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

/// Sent once; a retry makes another one.
pub(super) struct Sending {
    file: Arc<File>,
    at: u64,
    end: u64,
    crc: Digest,
    crc32c: u32,
    /// Where the store may tell no other checksum.
    md5: Option<Md5>,
    /// The next piece, being read.
    reading: Mutex<Option<BoxFuture<'static, io::Result<Bytes>>>>,
    progress: Arc<Progress>,
}

impl Sending {
    pub(super) fn new(body: &Body, with_md5: bool, progress: Arc<Progress>) -> Self {
        Self {
            file: body.file.clone(),
            at: body.range.start,
            end: body.range.end.max(body.range.start),
            crc: Digest::new(CrcAlgorithm::Crc32Iscsi),
            crc32c: body.crc32c,
            md5: with_md5.then(Md5::new),
            reading: Mutex::new(None),
            progress,
        }
    }

    fn break_off(&self, why: String) -> io::Error {
        self.progress.lock().broken = Some(why.clone());
        io::Error::other(why)
    }

    /// Before the last piece goes out: without it the store makes no object of the others.
    fn account(&mut self, piece: &Bytes) -> io::Result<()> {
        self.crc.update(piece);
        if let Some(md5) = &mut self.md5 {
            md5.update(piece);
        }
        self.at += piece.len() as u64;
        if self.at < self.end {
            return Ok(());
        }
        let found = self.crc.finalize();
        if found != u64::from(self.crc32c) {
            let why = format!(
                "what was written had checksum {:08x}, and the disk gives back {found:08x}",
                self.crc32c
            );
            return Err(self.break_off(why));
        }
        self.progress.lock().md5 = self.md5.take().map(|md5| md5.finalize().into());
        Ok(())
    }
}

async fn piece(file: Arc<File>, at: u64, length: usize) -> io::Result<Bytes> {
    let work = tokio::task::spawn_blocking(move || {
        let mut buffer = Vec::with_capacity(length);
        let mut read = || rustix::io::pread(&*file, rustix::buffer::spare_capacity(&mut buffer), at);
        rustix::io::retry_on_intr(&mut read)?;
        buffer.truncate(length); // the allocator may have been generous
        match buffer.is_empty() {
            true => Err(io::Error::other("the file is shorter than what is to be sent of it")),
            false => Ok(Bytes::from(buffer)),
        }
    });
    work.await.map_err(io::Error::other)?
}

impl http_body::Body for Sending {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        let sending = self.get_mut();
        if sending.at >= sending.end {
            if sending.crc32c == 0 || sending.crc.finalize() == u64::from(sending.crc32c) {
                return Poll::Ready(None);
            }
            let why = sending.break_off("what is to be sent is empty, and its checksum is not".into());
            return Poll::Ready(Some(Err(why)));
        }
        let reading = sending.reading.get_mut().unwrap_or_else(|poisoned| poisoned.into_inner());
        let length = (sending.end - sending.at).min(PIECE_BYTES) as usize;
        let next = reading.get_or_insert_with(|| piece(sending.file.clone(), sending.at, length).boxed());
        let read = ready!(next.poll_unpin(context));
        *reading = None;
        let piece = match read {
            Ok(piece) => piece,
            Err(error) => return Poll::Ready(Some(Err(sending.break_off(error.to_string())))),
        };
        if let Err(error) = sending.account(&piece) {
            return Poll::Ready(Some(Err(error)));
        }
        sending.progress.taken.fetch_add(piece.len() as u64, Ordering::Relaxed);
        Poll::Ready(Some(Ok(Frame::data(piece))))
    }

    fn is_end_stream(&self) -> bool {
        self.at >= self.end && self.crc32c == 0
    }

    /// With which the request gets a Content-Length: stores take no body of unknown length.
    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.end - self.at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    fn body(bytes: &[u8], range: std::ops::Range<u64>) -> Body {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(bytes).unwrap();
        let wanted = bytes.get(range.start as usize..range.end as usize).unwrap_or_default();
        let crc32c = crc_fast::checksum(CrcAlgorithm::Crc32Iscsi, wanted) as u32;
        Body { file: Arc::new(file), range, crc32c }
    }

    async fn sent(body: &Body, progress: &Arc<Progress>) -> io::Result<Vec<u8>> {
        let mut sending = Sending::new(body, true, progress.clone());
        let mut all = Vec::new();
        while let Some(frame) =
            std::future::poll_fn(|cx| http_body::Body::poll_frame(Pin::new(&mut sending), cx)).await
        {
            all.extend_from_slice(&frame?.into_data().unwrap());
        }
        Ok(all)
    }

    #[tokio::test]
    async fn a_range_is_sent_in_pieces_and_adds_up() {
        let bytes: Vec<u8> = (0..1_000_003_u32).map(|k| (k % 251) as u8).collect();
        let (body, progress) = (body(&bytes, 5..1_000_001), Arc::new(Progress::default()));
        assert_eq!(
            http_body::Body::size_hint(&Sending::new(&body, false, progress.clone())).exact(),
            Some(999_996)
        );
        assert!(sent(&body, &progress).await.unwrap() == bytes[5..1_000_001]);
        assert_eq!(progress.taken(), 999_996);
        assert_eq!(progress.md5(), Some(Md5::digest(&bytes[5..1_000_001]).into()));
        assert_eq!(progress.broken(), None);
    }

    #[tokio::test]
    async fn nothing_is_sent_to_its_end_that_is_not_what_was_written() {
        let bytes = vec![7; 600 << 10];
        let whole = body(&bytes, 0..600 << 10);
        for (wrong, words) in [
            (Body { crc32c: whole.crc32c ^ 1, ..whole.clone() }, "gives back"),
            (Body { range: 0..601 << 10, ..whole.clone() }, "shorter"),
            (Body { range: 0..0, ..whole.clone() }, "empty"),
        ] {
            let progress = Arc::new(Progress::default());
            let error = sent(&wrong, &progress).await.unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
            assert_eq!(progress.broken(), Some(error));
            assert!(progress.taken() < wrong.len().max(1), "the last piece stays here");
        }
    }

    #[tokio::test]
    async fn an_empty_object_is_sent() {
        let progress = Arc::new(Progress::default());
        assert_eq!(sent(&body(b"", 0..0), &progress).await.unwrap(), b"");
    }
}
