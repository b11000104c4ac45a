//! Bytes that prove where they came from: every byte of a generated file follows from its path and its offset.

/// The id that a path's content is made from (FNV-1a, then mixed).
pub fn file_id(path: &str) -> u64 {
    let hash = path.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |h, b| (h ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3));
    mix(hash)
}

/// Fills `buffer` with the bytes of file `id` from `offset` on.
pub fn fill(id: u64, offset: u64, buffer: &mut [u8]) {
    let (mut at, mut rest) = (offset, buffer);
    let head = ((8 - at % 8) % 8).min(rest.len() as u64) as usize;
    let (first, tail) = rest.split_at_mut(head);
    for byte in first {
        *byte = byte_at(id, at);
        at += 1;
    }
    rest = tail;
    let mut words = rest.chunks_exact_mut(8);
    for word in &mut words {
        word.copy_from_slice(&word_at(id, at / 8).to_le_bytes());
        at += 8;
    }
    for byte in words.into_remainder() {
        *byte = byte_at(id, at);
        at += 1;
    }
}

/// Offset (in the file) of the first byte that is not what [`fill`] would have written; None: all are right.
pub fn first_difference(id: u64, offset: u64, bytes: &[u8]) -> Option<u64> {
    let head = (((8 - offset % 8) % 8) as usize).min(bytes.len());
    let slow = |from: usize, part: &[u8]| {
        let at = offset + from as u64;
        part.iter().zip(at..).find(|&(b, at)| *b != byte_at(id, at)).map(|(_, at)| at)
    };
    let body = &bytes[head..];
    let start = (offset + head as u64) / 8;
    let same = |(k, word): (u64, &[u8])| word == word_at(id, start + k).to_le_bytes();
    slow(0, &bytes[..head]).or_else(|| match (0u64..).zip(body.chunks_exact(8)).find(|pair| !same(*pair)) {
        Some((k, word)) => slow(head + k as usize * 8, word),
        None => slow(bytes.len() - body.len() % 8, &bytes[bytes.len() - body.len() % 8..]),
    })
}

fn byte_at(id: u64, at: u64) -> u8 {
    word_at(id, at / 8).to_le_bytes()[(at % 8) as usize]
}

fn word_at(id: u64, index: u64) -> u64 {
    mix(id ^ index.wrapping_mul(0x9e37_79b9_7f4a_7c15))
}

/// The finaliser of splitmix64.
fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// A small deterministic generator for choices that need no quality; every test prints its seed.
#[derive(Clone, Debug)]
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }
    /// Uniform enough in `0..limit`; 0 for a limit of 0.
    pub fn below(&mut self, limit: u64) -> u64 {
        if limit == 0 { 0 } else { self.next() % limit }
    }
    pub fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_cut_of_a_file_checks_and_any_flipped_byte_is_found() {
        let id = file_id("a/b");
        let mut whole = vec![0; 1000];
        fill(id, 0, &mut whole);
        let mut random = Random(7);
        for _ in 0..500 {
            let from = random.below(1000) as usize;
            let to = from + random.below(1000 - from as u64 + 1) as usize;
            let mut cut = vec![0; to - from];
            fill(id, from as u64, &mut cut);
            assert_eq!(cut, whole[from..to]);
            assert_eq!(first_difference(id, from as u64, &cut), None);
            if !cut.is_empty() {
                let at = random.below(cut.len() as u64) as usize;
                cut[at] ^= 1;
                assert_eq!(first_difference(id, from as u64, &cut), Some((from + at) as u64));
            }
        }
        assert_ne!(file_id("a/b"), file_id("a/c"));
    }
}
