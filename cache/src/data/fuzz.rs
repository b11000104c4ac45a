//! Sidecars and journals, as a disk gives them back: for the fuzz target `cache_records`.

use super::sidecar::Image;
use super::{journal, sidecar};
use crc_fast::crc32_iscsi;
use std::sync::Arc;

/// A sidecar. What is understood of it is written again, and means the same then.
pub fn sidecar(bytes: &[u8]) {
    let Some(header) = sidecar::decode_header(bytes) else { return };
    assert!(header.block_bytes > 0 && header.present_blocks <= header.blocks());
    let Some(known) = sidecar::decode_body(&header, bytes) else { return };
    let (mut count, mut last) = (0, None);
    for block in known.stretches.iter().flat_map(|stretch| stretch.blocks()) {
        assert!(last.is_none_or(|last| last < block) && block < header.blocks());
        (count, last) = (count + 1, Some(block));
    }
    assert_eq!(count, header.present_blocks);
    // A table may be a share of what is cached: of large blocks that is far more than this sidecar.
    if header.block_bytes > 4096 {
        return;
    }
    let image = Image {
        id: header.id,
        key: Arc::new(header.key.clone()),
        block_bytes: header.block_bytes,
        known: known.clone(),
    };
    let again = sidecar::encode(&image);
    let found = sidecar::decode_header(&again).expect("it was just written");
    assert_eq!((found.id, &found.key, found.block_bytes), (header.id, &header.key, header.block_bytes));
    assert_eq!(sidecar::decode_body(&found, &again), Some(known));
}

/// The same with the checksums that belong to these bytes: nobody guesses those.
pub fn sealed_sidecar(bytes: &[u8]) {
    const PREFIX: usize = 16;
    let mut bytes = bytes.to_vec();
    let Some(len) = bytes.get(8..12).and_then(|len| len.first_chunk()).map(|len| u32::from_le_bytes(*len))
    else {
        return;
    };
    let Some(body_at) = PREFIX.checked_add(len as usize).filter(|at| *at + 4 <= bytes.len()) else { return };
    let (sum, end) = (crc32_iscsi(&bytes[PREFIX..body_at]), bytes.len() - 4);
    bytes[12..16].copy_from_slice(&sum.to_le_bytes());
    let sum = crc32_iscsi(&bytes[body_at..end]);
    bytes[end..].copy_from_slice(&sum.to_le_bytes());
    sidecar(&bytes);
}

/// A journal. Its sound records are written again, and nothing else is found then.
pub fn journal(bytes: &[u8]) {
    let (records, torn) = journal::decode_all(bytes);
    assert!(torn <= records.len() as u64 + 1, "between two records is one stretch at most");
    let again: Vec<u8> = records.iter().flat_map(journal::encode).collect();
    assert!(again.len() <= bytes.len());
    assert_eq!(journal::decode_all(&again), (records, 0));
}

/// A journal of one record with these bytes and their checksum, between other bytes.
pub fn sealed_journal(bytes: &[u8]) {
    let mut whole = bytes.get(..32).unwrap_or_default().to_vec();
    for word in [journal::MAGIC, bytes.len() as u32, crc32_iscsi(bytes)] {
        whole.extend(word.to_le_bytes());
    }
    whole.extend(bytes);
    whole.extend(bytes.get(..32).unwrap_or_default());
    journal(&whole);
}
