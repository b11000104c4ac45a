//! Files, by piece. Where a file's blocks are is asked once for each version that is being read, and kept for a while.
//!
//! A NameNode tells blocks without a version, so the version is asked for after the blocks: whoever asks has seen this
//! version before, hence blocks that were told since are its or a later one's, and if it is still the present version
//! then, they are its. DataNodes check nothing of that kind: they give the blocks that are asked for, or do not have them any
//! more. The library compares each piece with its checksum, and takes another DataNode where one gives bad bytes.

use crate::failure::{failure, of};
use crate::file_system::{FileSystem, Lent, apart};
use crate::listing::told;
use bytes::Bytes;
use futures::StreamExt;
use futures::stream::BoxStream;
use hdfs::{Failure, FailureKind, Version};
use hdfs_native::HdfsError;
use hdfs_native::file::FileReader;
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::time::Instant;

/// A reader has some hundred bytes for each block.
const KEPT_MAX: usize = 32;
/// A reader does not ask a DataNode again that has failed it.
const KEPT_FOR: Duration = Duration::from_secs(30);

#[derive(Default)]
pub(crate) struct Readers {
    kept: Mutex<VecDeque<Kept>>,
}

struct Kept {
    path: String,
    version: Version,
    since: Instant,
    reader: Arc<FileReader>,
}

/// One read, from its first piece to its last.
pub(crate) struct Reading {
    pub(crate) fs: Arc<FileSystem>,
    pub(crate) readers: Arc<Readers>,
    pub(crate) path: String,
    pub(crate) version: Version,
    pub(crate) patience: Duration,
}

type Pieces = BoxStream<'static, hdfs_native::Result<Bytes>>;

/// What is still to come of it.
pub(crate) struct Rest {
    pieces: Option<Pieces>,
    lent: Lent,
    left: u64,
}

impl Reading {
    pub(crate) async fn begin(&self, range: Range<u64>) -> Result<Rest, Failure> {
        if range.start > range.end || range.end > self.version.length {
            return Err(failure(FailureKind::Invalid, "a range past the end of the file"));
        }
        let (pieces, lent) = self.pieces(&range).await?;
        Ok(Rest { pieces: Some(pieces), lent, left: range.end - range.start })
    }

    /// The next piece; None: that was all.
    pub(crate) async fn next(&self, rest: &mut Rest) -> Result<Option<Bytes>, Failure> {
        if rest.left == 0 {
            return Ok(None);
        }
        let Some(mut pieces) = rest.pieces.take() else {
            return Err(failure(FailureKind::Broken, "it has failed before"));
        };
        let work = async move {
            let piece = pieces.next().await;
            (pieces, piece)
        };
        let (pieces, piece) = apart(self.patience, work).await.inspect_err(|why| {
            self.readers.forget(&self.path);
            if why.kind == FailureKind::Silent {
                self.fs.doubt(rest.lent.generation);
            }
        })?;
        match piece {
            None => {
                self.readers.forget(&self.path);
                Err(failure(FailureKind::Truncated, "HDFS gave less than the file's length"))
            }
            Some(Ok(piece)) if piece.len() as u64 > rest.left => {
                Err(failure(FailureKind::Malformed, "HDFS gave more than it was asked for"))
            }
            Some(Ok(piece)) => {
                rest.left -= piece.len() as u64;
                rest.pieces = Some(pieces);
                Ok(Some(piece))
            }
            Some(Err(error)) => Err(self.explained(&error).await),
        }
    }

    async fn pieces(&self, range: &Range<u64>) -> Result<(Pieces, Lent), Failure> {
        let lent = self.fs.lend();
        let reader = match self.readers.get(&self.path, self.version) {
            Some(reader) => reader,
            None => {
                let (client, path) = (lent.client.clone(), self.path.clone());
                let work = async move { client.read(&path).await };
                let reader = self.asked(&lent, apart(self.patience, work).await)?;
                if self.now(&lent).await? != Some(self.version) {
                    return Err(stale());
                }
                let reader = Arc::new(reader);
                self.readers.keep(&self.path, self.version, reader.clone());
                reader
            }
        };
        // The library panics at what lies beyond it. Of a file that is being written it does not know the last block, which
        // the file's length counts as far as it is on the DataNodes.
        if (reader.file_length() as u64) < range.end {
            self.readers.forget(&self.path);
            return Err(failure(
                FailureKind::Unfinished,
                "it is being written, and its last block cannot be read before that is done",
            ));
        }
        // The stream has its own part of what it needs of the reader.
        let stream = reader.read_range_stream(range.start as usize, (range.end - range.start) as usize);
        Ok((stream.boxed(), lent))
    }

    fn asked<T>(&self, lent: &Lent, answer: Result<hdfs_native::Result<T>, Failure>) -> Result<T, Failure> {
        match answer {
            Ok(Ok(found)) => Ok(found),
            Ok(Err(error)) => match of(&error) {
                // It had a version once.
                Failure { kind: FailureKind::NotFound, .. } => Err(stale()),
                other => Err(other),
            },
            Err(why) => {
                if why.kind == FailureKind::Silent {
                    self.fs.doubt(lent.generation);
                }
                Err(why)
            }
        }
    }

    /// The present version; None: it is no file.
    async fn now(&self, lent: &Lent) -> Result<Option<Version>, Failure> {
        let (client, path) = (lent.client.clone(), self.path.clone());
        let work = async move { client.get_file_info(&path).await };
        let status = told(&self.asked(lent, apart(self.patience, work).await)?);
        Ok((!status.is_directory).then_some(status.version))
    }

    /// A file that was replaced or removed loses its blocks, and a DataNode says only that it does not have them.
    async fn explained(&self, error: &HdfsError) -> Failure {
        self.readers.forget(&self.path);
        match self.now(&self.fs.lend()).await {
            Ok(now) if now != Some(self.version) => stale(),
            Err(why) if why.kind == FailureKind::Stale => why,
            _ => of(error),
        }
    }
}

fn stale() -> Failure {
    failure(FailureKind::Stale, "it has changed, or is gone")
}

impl Readers {
    fn get(&self, path: &str, version: Version) -> Option<Arc<FileReader>> {
        let mut kept = self.lock();
        kept.retain(|one| one.since.elapsed() < KEPT_FOR);
        kept.iter().find(|one| one.path == path && one.version == version).map(|one| one.reader.clone())
    }

    fn keep(&self, path: &str, version: Version, reader: Arc<FileReader>) {
        let mut kept = self.lock();
        kept.retain(|one| one.path != path);
        if kept.len() == KEPT_MAX {
            kept.pop_front();
        }
        kept.push_back(Kept { path: path.to_owned(), version, since: Instant::now(), reader });
    }

    fn forget(&self, path: &str) {
        self.lock().retain(|one| one.path != path);
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, VecDeque<Kept>> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
