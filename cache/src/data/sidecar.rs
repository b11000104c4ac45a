//! The sidecar of a larger file: which version it is a copy of, which blocks are there, and their checksums.
//!
//! ```text
//! magic 8 | header length u32 | crc32c of the header u32 | header | body | crc32c of the body
//! header: id u64, size u64, block u32, blocks present u64, scope 32, path length u32, token length u32, path, token
//! body 1: presence bitmap | crc32c of each block of the file
//! body 2: of each 64 blocks of which one is present: number u64 | presence u64 | crc32c of each that is present
//! ```
//!
//! A body of the first kind grows with the size that an object claims to have: it is written where it is small beside
//! what lies in the cache. To a build that knows the first kind only, the second is a miss.

use super::FileKey;
use super::blocks::{Known, KnownStretch, STRETCH};
use crc_fast::crc32_iscsi;
use std::sync::Arc;
use volume::ScopeId;

const MAGIC: [u8; 8] = *b"MPIDX\0\0\x01";
const SPARSE: [u8; 8] = *b"MPIDX\0\0\x02";
/// A body of the first kind takes at most this share of the bytes that it speaks of …
const SHARE: u64 = 64;
/// … or this much, which a file system takes for any file.
const LITTLE: u64 = 4096;
const PREFIX: usize = 16;
const FIXED: usize = 8 + 8 + 4 + 8 + 32 + 4 + 4;
/// Enough for the header of any key; the scan at start reads no more than this of a sidecar.
pub(crate) const HEAD_MAX: usize = 8 << 10;

/// What an earlier moment knew about a file.
pub(crate) struct Image {
    pub id: u64,
    pub key: Arc<FileKey>,
    pub block_bytes: u64,
    pub known: Known,
}

/// The part that the scan at start needs.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Header {
    pub id: u64,
    pub key: FileKey,
    pub block_bytes: u64,
    pub present_blocks: u64,
    body_at: usize,
    sparse: bool,
}

impl Header {
    pub(crate) fn blocks(&self) -> u64 {
        self.key.size.div_ceil(self.block_bytes)
    }
}

pub(crate) fn encode(image: &Image) -> Vec<u8> {
    let key = &image.key;
    let mut header = Vec::with_capacity(FIXED + key.path.len() + key.token.len());
    header.extend_from_slice(&image.id.to_le_bytes());
    header.extend_from_slice(&key.size.to_le_bytes());
    header.extend_from_slice(&(image.block_bytes as u32).to_le_bytes());
    let (blocks, present) = (key.size.div_ceil(image.block_bytes), image.known.count());
    header.extend_from_slice(&present.to_le_bytes());
    header.extend_from_slice(key.scope.as_str().as_bytes());
    header.extend_from_slice(&(key.path.len() as u32).to_le_bytes());
    header.extend_from_slice(&(key.token.len() as u32).to_le_bytes());
    header.extend_from_slice(&key.path);
    header.extend_from_slice(key.token.as_bytes());
    let affordable = (present.saturating_mul(image.block_bytes) / SHARE).max(LITTLE);
    let (magic, body) = match dense_bytes(blocks).filter(|bytes| *bytes <= affordable) {
        Some(bytes) => (MAGIC, dense(&image.known, blocks, bytes as usize)),
        None => (SPARSE, sparse(&image.known)),
    };
    let sum = crc32_iscsi(&body);
    let mut bytes = Vec::with_capacity(PREFIX + header.len() + body.len() + 4);
    bytes.extend_from_slice(&magic);
    bytes.extend_from_slice(&(header.len() as u32).to_le_bytes());
    bytes.extend_from_slice(&crc32_iscsi(&header).to_le_bytes());
    bytes.extend_from_slice(&header);
    bytes.extend_from_slice(&body);
    bytes.extend_from_slice(&sum.to_le_bytes());
    bytes
}

/// Length of a body of the first kind; None: no file is that long.
fn dense_bytes(blocks: u64) -> Option<u64> {
    bitmap_bytes(blocks).checked_add(blocks.checked_mul(4)?)
}

fn bitmap_bytes(blocks: u64) -> u64 {
    blocks.div_ceil(STRETCH).max(1) * 8
}

fn dense(known: &Known, blocks: u64, bytes: usize) -> Vec<u8> {
    let mut body = vec![0; bytes];
    let (bitmap, crcs) = body.split_at_mut(bitmap_bytes(blocks) as usize);
    for stretch in &known.stretches {
        let at = stretch.index as usize * 8;
        bitmap[at..at + 8].copy_from_slice(&stretch.bits.to_le_bytes());
        for (k, crc) in stretch.blocks().zip(&stretch.crcs) {
            let at = k as usize * 4;
            crcs[at..at + 4].copy_from_slice(&crc.to_le_bytes());
        }
    }
    body
}

fn sparse(known: &Known) -> Vec<u8> {
    let mut body = Vec::new();
    for stretch in &known.stretches {
        body.extend_from_slice(&stretch.index.to_le_bytes());
        body.extend_from_slice(&stretch.bits.to_le_bytes());
        stretch.crcs.iter().for_each(|crc| body.extend_from_slice(&crc.to_le_bytes()));
    }
    body
}

/// None: damaged, or not ours.
pub(crate) fn decode_header(bytes: &[u8]) -> Option<Header> {
    let short = |b: &[u8], at: usize| Some(u32::from_le_bytes(b.get(at..at + 4)?.try_into().ok()?));
    let long = |b: &[u8], at: usize| Some(u64::from_le_bytes(b.get(at..at + 8)?.try_into().ok()?));
    let magic = bytes.get(..8)?;
    if magic != MAGIC && magic != SPARSE {
        return None;
    }
    let len = short(bytes, 8)? as usize;
    let header = bytes.get(PREFIX..PREFIX.checked_add(len)?)?;
    if len < FIXED || crc32_iscsi(header) != short(bytes, 12)? {
        return None;
    }
    let (path_len, token_len) = (short(header, 60)? as usize, short(header, 64)? as usize);
    if FIXED + path_len + token_len != len {
        return None;
    }
    let (path, token) = header[FIXED..].split_at(path_len);
    let block_bytes = u64::from(short(header, 16)?);
    let header = Header {
        id: long(header, 0)?,
        key: FileKey {
            scope: ScopeId::parse(std::str::from_utf8(&header[28..60]).ok()?)?,
            path: path.to_vec(),
            token: String::from_utf8(token.to_vec()).ok()?,
            size: long(header, 8)?,
        },
        block_bytes,
        present_blocks: long(header, 20)?,
        body_at: PREFIX + len,
        sparse: magic == SPARSE,
    };
    (block_bytes > 0 && header.present_blocks <= header.blocks()).then_some(header)
}

/// The blocks present and their checksums. None: damaged.
pub(crate) fn decode_body(header: &Header, bytes: &[u8]) -> Option<Known> {
    let body = bytes.get(header.body_at..bytes.len().checked_sub(4)?)?;
    let sum = u32::from_le_bytes(bytes[bytes.len() - 4..].try_into().ok()?);
    if crc32_iscsi(body) != sum {
        return None;
    }
    let blocks = header.blocks();
    let known = if header.sparse { decode_sparse(body)? } else { decode_dense(body, blocks)? };
    let ascending = known.stretches.is_sorted_by(|a, b| a.index < b.index);
    let within = known.stretches.last().is_none_or(|last| last.blocks().last().is_some_and(|k| k < blocks));
    (ascending && within && known.count() == header.present_blocks).then_some(known)
}

fn decode_dense(body: &[u8], blocks: u64) -> Option<Known> {
    if dense_bytes(blocks)? != body.len() as u64 {
        return None;
    }
    let (bitmap, crcs) = body.split_at(bitmap_bytes(blocks) as usize);
    let mut known = Known::default();
    for (index, bits) in bitmap.chunks_exact(8).enumerate() {
        let bits = u64::from_le_bytes(bits.try_into().ok()?);
        let mut stretch = KnownStretch { index: index as u64, bits, crcs: Vec::new() };
        for k in stretch.blocks() {
            stretch.crcs.push(u32::from_le_bytes(crcs.get(k as usize * 4..)?.first_chunk().copied()?));
        }
        known.stretches.extend((bits != 0).then_some(stretch));
    }
    Some(known)
}

fn decode_sparse(mut body: &[u8]) -> Option<Known> {
    let mut known = Known::default();
    while !body.is_empty() {
        let (index, rest) = body.split_first_chunk::<8>()?;
        let (bits, rest) = rest.split_first_chunk::<8>()?;
        let (index, bits) = (u64::from_le_bytes(*index), u64::from_le_bytes(*bits));
        let (crcs, rest) = rest.split_at_checked(bits.count_ones() as usize * 4)?;
        // So that its blocks have numbers.
        if bits == 0 || index > u64::MAX / STRETCH - 1 {
            return None;
        }
        let crcs = crcs.chunks_exact(4).map(|c| u32::from_le_bytes([c[0], c[1], c[2], c[3]])).collect();
        known.stretches.push(KnownStretch { index, bits, crcs });
        body = rest;
    }
    Some(known)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// `stretch`: which 64 blocks of the file are there, but for the first two of them.
    fn image(size: u64, stretch: u64, blocks: u32) -> Image {
        let scope = ScopeId::parse(&"0b".repeat(16)).unwrap();
        let key = FileKey { scope, path: b"a/b".to_vec(), token: "v1".into(), size };
        let bits = (!0 >> (64 - blocks)) & !3;
        let known =
            Known { stretches: vec![KnownStretch { index: stretch, bits, crcs: (2..blocks).collect() }] };
        Image { id: 77, key: Arc::new(key), block_bytes: 4096, known }
    }

    #[test]
    fn what_lies_beside_a_file_is_as_little_as_what_is_cached_of_it() {
        let of = |size: u64| encode(&image(size, 0, 10));
        let little = of(500 << 12);
        assert_eq!(
            (&little[..8], little.len() > 2000),
            (&MAGIC[..], true),
            "one disk block, whatever is in it"
        );
        for size in [1 << 30, 1 << 53, i64::MAX as u64] {
            let bytes = of(size);
            assert_eq!((&bytes[..8], bytes.len() < 256), (&SPARSE[..], true), "{}", bytes.len());
        }
        // A file that is there, or a good part of it, has the table that every build reads.
        let whole = Known::all(&vec![1; 100_000]);
        let bytes = encode(&Image { known: whole.clone(), ..image(100_000 << 12, 0, 10) });
        assert_eq!(bytes[..8], MAGIC);
        assert_eq!(decode_body(&decode_header(&bytes).unwrap(), &bytes), Some(whole));
    }

    #[test]
    fn blocks_that_a_file_cannot_have_are_damage() {
        let largest = i64::MAX as u64;
        let sound = |image: &Image| {
            let bytes = encode(image);
            decode_header(&bytes).and_then(|h| decode_body(&h, &bytes)).is_some()
        };
        let last = largest.div_ceil(4096) / 64 - 1;
        assert!(sound(&image(largest, last, 64)));
        for index in [last + 1, u64::MAX / 64, u64::MAX] {
            assert!(!sound(&image(largest, index, 64)), "{index}");
        }
    }

    #[test]
    fn a_sidecar_is_that_of_the_golden_file() {
        for (name, image) in
            [("sidecar-1.txt", image(9 * 4096 + 1, 0, 10)), ("sidecar-2.txt", image(1 << 60, 5, 10))]
        {
            let hex = crate::golden::same(crate::GOLDEN, name, &crate::golden::to_hex(&encode(&image)));
            let bytes = crate::golden::from_hex(&hex);
            let header = decode_header(&bytes).unwrap();
            assert_eq!((&header.key, header.id, header.block_bytes), (&*image.key, 77, 4096));
            assert_eq!(decode_body(&header, &bytes), Some(image.known));
        }
    }

    proptest! {
        #[test]
        fn any_damage_is_noticed(at in any::<prop::sample::Index>(), flip in 1u8.., cut in any::<prop::sample::Index>()) {
            for image in [image(9 * 4096 + 1, 0, 10), image(1 << 60, 5, 10)] {
                let bytes = encode(&image);
                let header = decode_header(&bytes).unwrap();
                prop_assert_eq!((&header.key, header.id, header.present_blocks), (&*image.key, 77, 8));
                prop_assert_eq!(decode_body(&header, &bytes), Some(image.known.clone()));
                let mut flipped = bytes.clone();
                flipped[at.index(bytes.len())] ^= flip;
                let sound = |b: &[u8]| decode_header(b).and_then(|h| decode_body(&h, b)).is_some();
                prop_assert!(!sound(&flipped));
                prop_assert!(!sound(&bytes[..cut.index(bytes.len())]));
            }
        }
    }
}
