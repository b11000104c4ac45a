//! What a store really does with conditions: tried on a file of our own, not believed. Servers that speak S3 ignore some of
//! them in silence (MinIO's DELETE ignores If-Match; Ceph's CompleteMultipartUpload overwrites).

use crate::sink::{Attributes, Body, Condition, Part, Sink, Upload, Write, WriteId};
use crate::{StoreError, Version};
use crc_fast::CrcAlgorithm;
use rustix::fs::MemfdFlags;
use std::sync::Arc;

/// Where one is false, a writer elsewhere can be overwritten unseen: what is left is to look before.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Abilities {
    /// [`Condition::Absent`] of an object in one piece holds.
    pub absent: bool,
    /// [`Condition::Is`] of an object in one piece holds.
    pub is: bool,
    /// The same of objects in parts; false where there are none.
    pub absent_in_parts: bool,
    pub is_in_parts: bool,
    /// [`Condition::Is`] of a removal holds.
    pub is_at_delete: bool,
    /// A copy is made of the version that it names, or not at all.
    pub is_at_copy: bool,
    /// It tells a checksum of what has arrived.
    pub confirms: bool,
}

/// `draw` gives names of writes. The file at `path` is ours alone; it is gone afterwards, as far as the store lets it go.
pub async fn probe(
    sink: &dyn Sink,
    path: &[u8],
    draw: impl FnMut() -> WriteId,
) -> Result<Abilities, StoreError> {
    let found = tried(sink, path, draw).await;
    let gone = sink.delete(path, &Condition::Any).await;
    // What went wrong first says more.
    found.and_then(|able| gone.map(|()| able))
}

async fn tried(
    sink: &dyn Sink,
    path: &[u8],
    mut draw: impl FnMut() -> WriteId,
) -> Result<Abilities, StoreError> {
    // Of an attempt before that did not come to its end.
    sink.delete(path, &Condition::Any).await?;
    let mut write = || Write { id: draw(), attributes: Attributes::default() };
    let body = body(sink, path)?;
    let first = sink.put(path, &body, &write(), &Condition::Absent).await?;
    let absent = refused(sink.put(path, &body, &write(), &Condition::Absent).await.map(drop))?;
    let nobodys = || Condition::Is(Version(NOBODYS.into()));
    // What refuses every version knows none: Ceph compares ETags with their quotation marks.
    let is = refused(sink.put(path, &body, &write(), &nobodys()).await.map(drop))?
        && !refused(sink.put(path, &body, &write(), &now(sink, path).await?).await.map(drop))?;
    let (mut absent_in_parts, mut is_in_parts) = (false, false);
    if sink.limits().parts_max > 0 {
        absent_in_parts = in_parts(sink, path, &body, &write(), &Condition::Absent).await?;
        is_in_parts = in_parts(sink, path, &body, &write(), &nobodys()).await?
            && !in_parts(sink, path, &body, &write(), &now(sink, path).await?).await?;
    }
    let size = body.len();
    let stale = sink.copy(path, &Version(NOBODYS.into()), size, path, &write(), &Condition::Any).await;
    let is_at_copy = match stale {
        Ok(_) => false,
        Err(StoreError::Stale { .. }) => true,
        Err(error) => return Err(error),
    };
    let is_at_delete = refused(sink.delete(path, &nobodys()).await)?
        && !refused(sink.delete(path, &now(sink, path).await?).await)?;
    Ok(Abilities {
        absent,
        is,
        absent_in_parts,
        is_in_parts,
        is_at_delete,
        is_at_copy,
        confirms: first.confirmed,
    })
}

/// That it stays as it is.
async fn now(sink: &dyn Sink, path: &[u8]) -> Result<Condition, StoreError> {
    Ok(sink.look(path).await?.map_or(Condition::Absent, |seen| Condition::Is(seen.version)))
}

/// Does the condition hold that should not let it happen?
fn refused(done: Result<(), StoreError>) -> Result<bool, StoreError> {
    match done {
        Ok(()) => Ok(false),
        Err(StoreError::Conflict { .. }) => Ok(true),
        Err(error) => Err(error),
    }
}

async fn in_parts(
    sink: &dyn Sink,
    path: &[u8],
    body: &Body,
    write: &Write,
    condition: &Condition,
) -> Result<bool, StoreError> {
    let upload: Upload = sink.begin(path, write).await?;
    let done = async {
        let part: Part = sink.part(&upload, 1, body).await?;
        refused(sink.complete(&upload, &[part], condition).await.map(drop))
    };
    let done = done.await;
    if !matches!(done, Ok(false)) {
        sink.abandon(&upload).await?;
    }
    done
}

/// A version that no object has.
const NOBODYS: &str = "00000000000000000000000000000000";

const BYTES: &[u8] = b"Millpond tries here what this store does with conditions. This file may be removed.\n";

fn body(sink: &dyn Sink, path: &[u8]) -> Result<Body, StoreError> {
    let failed = |e: rustix::io::Errno| StoreError::Damaged {
        what: format!("{sink:?} {}", String::from_utf8_lossy(path)),
        why: e.to_string(),
    };
    let file = rustix::fs::memfd_create("probe", MemfdFlags::CLOEXEC).map_err(failed)?;
    let written = rustix::io::pwrite(&file, BYTES, 0).map_err(failed)?;
    let crc32c = crc_fast::checksum(CrcAlgorithm::Crc32Iscsi, &BYTES[..written]);
    let crc32c = u32::try_from(crc32c).unwrap_or_default();
    Ok(Body { file: Arc::new(file.into()), range: 0..written as u64, crc32c })
}
