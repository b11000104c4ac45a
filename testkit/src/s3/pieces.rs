//! Bytes that arrived one after the other.

use bytes::Bytes;
use std::ops::Range;

/// Bytes in pieces, so that an object of many parts is not copied as it is completed.
#[derive(Clone, Debug, Default)]
pub struct Pieces(Vec<Bytes>);

impl Pieces {
    pub fn size(&self) -> u64 {
        self.0.iter().map(|piece| piece.len() as u64).sum()
    }

    pub fn iter(&self) -> impl Iterator<Item = &Bytes> {
        self.0.iter()
    }

    /// `range` lies within; no piece is longer than `max`.
    pub fn slice(&self, range: Range<u64>, max: usize) -> Vec<Bytes> {
        let (mut at, mut found) = (0, Vec::new());
        for piece in &self.0 {
            let length = piece.len() as u64;
            let first = range.start.clamp(at, at + length) - at;
            let last = range.end.clamp(at, at + length) - at;
            let wanted = piece.slice(first as usize..last.max(first) as usize);
            let starts = (0..wanted.len()).step_by(max);
            found.extend(starts.map(|start| wanted.slice(start..wanted.len().min(start + max))));
            at += length;
        }
        found
    }
}

impl From<Bytes> for Pieces {
    fn from(bytes: Bytes) -> Self {
        Self(vec![bytes])
    }
}

impl FromIterator<Self> for Pieces {
    fn from_iter<T: IntoIterator<Item = Self>>(bodies: T) -> Self {
        Self(bodies.into_iter().flat_map(|body| body.0).collect())
    }
}

impl FromIterator<Bytes> for Pieces {
    fn from_iter<T: IntoIterator<Item = Bytes>>(pieces: T) -> Self {
        Self(pieces.into_iter().collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slice_crosses_pieces() {
        let pieces: Pieces =
            ["abc", "", "defg", "h"].into_iter().map(|text| Bytes::from_static(text.as_bytes())).collect();
        for first in 0..=8 {
            for last in first..=8 {
                let found = pieces.slice(first..last, 2);
                assert!(found.iter().all(|piece| piece.len() <= 2));
                assert_eq!(found.concat(), b"abcdefgh"[first as usize..last as usize]);
            }
        }
    }
}
