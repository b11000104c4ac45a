//! File contents that need no storage: every byte is a function of the file's id and the offset.

/// Mixes 64 bits so that neighbouring inputs give unrelated outputs (the finaliser of splitmix64).
pub fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

fn word(id: u64, index: u64) -> [u8; 8] {
    mix(id ^ index.wrapping_mul(0x9e37_79b9_7f4a_7c15)).to_le_bytes()
}

/// A file id from a name: the same name always has the same content.
pub fn id(name: impl AsRef<[u8]>) -> u64 {
    let mut state = 0xcbf2_9ce4_8422_2325_u64;
    for byte in name.as_ref() {
        state = (state ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3);
    }
    mix(state)
}

/// Fills `buffer` with the bytes of file `id` from `offset` on.
pub fn fill(id: u64, offset: u64, buffer: &mut [u8]) {
    let (head, skip) = (offset / 8, (offset % 8) as usize);
    let lead = if skip == 0 { 0 } else { (8 - skip).min(buffer.len()) };
    let (first, rest) = buffer.split_at_mut(lead);
    first.copy_from_slice(&word(id, head)[skip..skip + lead]);
    for (index, chunk) in (head + u64::from(skip != 0)..).zip(rest.chunks_mut(8)) {
        chunk.copy_from_slice(&word(id, index)[..chunk.len()]);
    }
}

/// The bytes of file `id` in `range`.
pub fn bytes(id: u64, range: std::ops::Range<u64>) -> Vec<u8> {
    let mut buffer = vec![0; usize::try_from(range.end - range.start).expect("test files fit in memory")];
    fill(id, range.start, &mut buffer);
    buffer
}

/// The offset in the file of the first byte that is not as [`fill`] would have written it.
pub fn first_wrong_byte(id: u64, offset: u64, found: &[u8]) -> Option<u64> {
    let mut expected = [0; 4096];
    let mut at = offset;
    for chunk in found.chunks(expected.len()) {
        let expected = &mut expected[..chunk.len()];
        fill(id, at, expected);
        if expected != chunk {
            let wrong = expected.iter().zip(chunk).take_while(|(a, b)| a == b).count();
            return Some(at + wrong as u64);
        }
        at += chunk.len() as u64;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_piece_equals_that_piece_of_the_whole() {
        let whole = bytes(7, 0..100);
        for start in 0..40_u64 {
            for end in start..60 {
                assert_eq!(bytes(7, start..end), whole[start as usize..end as usize], "{start}..{end}");
            }
        }
        assert_ne!(bytes(8, 0..100), whole);
    }

    #[test]
    fn a_flipped_byte_is_found() {
        let mut data = bytes(3, 1000..9000);
        assert_eq!(first_wrong_byte(3, 1000, &data), None);
        data[5001] ^= 1;
        assert_eq!(first_wrong_byte(3, 1000, &data), Some(6001));
    }
}
