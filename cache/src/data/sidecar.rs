//! The sidecar of a larger file: which version it is a copy of, which blocks are there, and their checksums.
//!
//! ```text
//! magic 8 | header length u32 | crc32c of the header u32 | header | presence bitmap | crc32c per block | crc32c of both
//! header: id u64, size u64, block u32, blocks present u64, scope 32, path length u32, token length u32, path, token
//! ```

use super::FileKey;
use super::bitmap::Bits;
use std::sync::Arc;
use volume::ScopeId;

const MAGIC: [u8; 8] = *b"MPIDX\0\0\x01";
const PREFIX: usize = 16;
const FIXED: usize = 8 + 8 + 4 + 8 + 32 + 4 + 4;
/// Enough for the header of any key; the scan at start reads no more than this of a sidecar.
pub(crate) const HEAD_MAX: usize = 8 << 10;

/// What an earlier moment knew about a file.
pub(crate) struct Image {
    pub id: u64,
    pub key: Arc<FileKey>,
    pub block_bytes: u64,
    pub present: Bits,
    /// One per block; 0 where the block is not there.
    pub crcs: Vec<u32>,
}

/// The part that the scan at start needs.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Header {
    pub id: u64,
    pub key: FileKey,
    pub block_bytes: u64,
    pub present_blocks: u64,
    body_at: usize,
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
    header.extend_from_slice(&image.present.count().to_le_bytes());
    header.extend_from_slice(key.scope.as_str().as_bytes());
    header.extend_from_slice(&(key.path.len() as u32).to_le_bytes());
    header.extend_from_slice(&(key.token.len() as u32).to_le_bytes());
    header.extend_from_slice(&key.path);
    header.extend_from_slice(key.token.as_bytes());
    let mut body = image.present.to_bytes();
    body.reserve(image.crcs.len() * 4 + 4);
    image.crcs.iter().for_each(|crc| body.extend_from_slice(&crc.to_le_bytes()));
    let sum = crc32c::crc32c(&body);
    let mut bytes = Vec::with_capacity(PREFIX + header.len() + body.len() + 4);
    bytes.extend_from_slice(&MAGIC);
    bytes.extend_from_slice(&(header.len() as u32).to_le_bytes());
    bytes.extend_from_slice(&crc32c::crc32c(&header).to_le_bytes());
    bytes.extend_from_slice(&header);
    bytes.extend_from_slice(&body);
    bytes.extend_from_slice(&sum.to_le_bytes());
    bytes
}

/// None: damaged, or not ours.
pub(crate) fn decode_header(bytes: &[u8]) -> Option<Header> {
    let short = |b: &[u8], at: usize| Some(u32::from_le_bytes(b.get(at..at + 4)?.try_into().ok()?));
    let long = |b: &[u8], at: usize| Some(u64::from_le_bytes(b.get(at..at + 8)?.try_into().ok()?));
    if bytes.get(..8)? != MAGIC {
        return None;
    }
    let len = short(bytes, 8)? as usize;
    let header = bytes.get(PREFIX..PREFIX.checked_add(len)?)?;
    if len < FIXED || crc32c::crc32c(header) != short(bytes, 12)? {
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
    };
    (block_bytes > 0 && header.present_blocks <= header.blocks()).then_some(header)
}

/// The blocks present and the checksums. None: damaged.
pub(crate) fn decode_body(header: &Header, bytes: &[u8]) -> Option<(Bits, Vec<u32>)> {
    let blocks = header.blocks();
    let bitmap = blocks.div_ceil(64).max(1) as usize * 8;
    let body = bytes.get(header.body_at..bytes.len().checked_sub(4)?)?;
    let sum = u32::from_le_bytes(bytes[bytes.len() - 4..].try_into().ok()?);
    if body.len() as u64 != bitmap as u64 + blocks * 4 || crc32c::crc32c(body) != sum {
        return None;
    }
    let present = Bits::from_bytes(&body[..bitmap], blocks)?;
    let crcs = body[bitmap..].chunks_exact(4).map(|c| u32::from_le_bytes([c[0], c[1], c[2], c[3]])).collect();
    Some((present, crcs))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn image() -> Image {
        let scope = ScopeId::parse(&"0b".repeat(16)).unwrap();
        let key = FileKey { scope, path: b"a/b".to_vec(), token: "v1".into(), size: 9 * 4096 + 1 };
        let mut present = Bits::new(10);
        present.set_range(2..10, true);
        Image { id: 77, key: Arc::new(key), block_bytes: 4096, present, crcs: (0..10).collect() }
    }

    #[test]
    fn a_sidecar_is_that_of_the_golden_file() {
        let (image, bytes) = (image(), encode(&image()));
        let hex = crate::golden::same(crate::GOLDEN, "sidecar-1.txt", &crate::golden::to_hex(&bytes));
        let bytes = crate::golden::from_hex(&hex);
        let header = decode_header(&bytes).unwrap();
        assert_eq!((&header.key, header.id, header.block_bytes), (&*image.key, 77, 4096));
        assert_eq!(decode_body(&header, &bytes), Some((image.present.clone(), image.crcs)));
    }

    proptest! {
        #[test]
        fn any_damage_is_noticed(at in any::<prop::sample::Index>(), flip in 1u8.., cut in any::<prop::sample::Index>()) {
            let image = image();
            let bytes = encode(&image);
            let header = decode_header(&bytes).unwrap();
            prop_assert_eq!((&header.key, header.id, header.present_blocks), (&*image.key, 77, 8));
            prop_assert_eq!(decode_body(&header, &bytes), Some((image.present.clone(), image.crcs.clone())));
            let mut flipped = bytes.clone();
            flipped[at.index(bytes.len())] ^= flip;
            let sound = |b: &[u8]| decode_header(b).and_then(|h| decode_body(&h, b)).is_some();
            prop_assert!(!sound(&flipped));
            prop_assert!(!sound(&bytes[..cut.index(bytes.len())]));
        }
    }
}
