//! A connection's passthrough ids in a message, all of them in one packet.
//!
//! The kernel counts ids up, so that thousands of them written out as numbers do not fit into a packet, and a mount whose
//! message does not fit could not be given to an agent. More than [`LISTED_MAX`] are written as the distances between them,
//! each as a LEB128 number, in hex.

use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Ids of one connection at most: as many as its shared memory records (`inflight::BACKINGS`, which makes sure of it), and
/// those that are being opened or closed. Even spread over all numbers they take 50 KB.
pub const BACKING_IDS_MAX: usize = 8_192 + 256;
/// So many are written as plain numbers, which builds before this one understand.
const LISTED_MAX: usize = 1024;

#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum Written {
    Listed(Vec<u32>),
    Distances(String),
}

pub(crate) fn serialize<S: Serializer>(ids: &[u32], to: S) -> Result<S::Ok, S::Error> {
    if ids.len() <= LISTED_MAX {
        return ids.serialize(to);
    }
    let mut sorted = ids.to_vec();
    sorted.sort_unstable();
    sorted.dedup();
    let mut bytes = Vec::with_capacity(sorted.len() * 3);
    let mut last = 0;
    for id in sorted {
        let mut distance = id - last;
        last = id;
        while distance >= 0x80 {
            bytes.push(distance as u8 | 0x80);
            distance >>= 7;
        }
        bytes.push(distance as u8);
    }
    hex::encode(bytes).serialize(to)
}

pub(crate) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<u32>, D::Error> {
    let ids = match Written::deserialize(from)? {
        Written::Listed(ids) => ids,
        Written::Distances(text) => {
            let bytes = hex::decode(text).map_err(D::Error::custom)?;
            parse(&bytes).ok_or_else(|| D::Error::custom("passthrough ids cannot be read"))?
        }
    };
    match ids.len() {
        0..=BACKING_IDS_MAX => Ok(ids),
        more => {
            Err(D::Error::custom(format!("{more} passthrough ids, at most {BACKING_IDS_MAX} are possible")))
        }
    }
}

fn parse(bytes: &[u8]) -> Option<Vec<u32>> {
    let (mut ids, mut id, mut distance, mut shift) = (Vec::new(), 0u32, 0u32, 0);
    for byte in bytes {
        let bits = u32::from(byte & 0x7f);
        // The fifth byte has room for four bits.
        if shift > 28 || shift == 28 && bits > 0xf {
            return None;
        }
        distance |= bits << shift;
        shift += 7;
        if byte & 0x80 == 0 {
            id = id.checked_add(distance)?;
            ids.push(id);
            (distance, shift) = (0, 0);
        }
    }
    (shift == 0).then_some(ids)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    struct Message {
        #[serde(default, with = "super")]
        backing: Vec<u32>,
    }

    fn written(ids: impl IntoIterator<Item = u32>) -> String {
        serde_json::to_string(&Message { backing: ids.into_iter().collect() }).unwrap()
    }

    #[test]
    fn as_many_as_there_can_be_fit_into_a_packet_however_they_are_spread() {
        for step in [1, 2, 127, 128, 40_000, u32::MAX / BACKING_IDS_MAX as u32] {
            let ids: Vec<u32> = (1..=BACKING_IDS_MAX as u32).map(|i| i * step).collect();
            let text = written(ids.clone());
            // Beside it: the volume, its secrets, INIT.
            assert!(text.len() <= crate::MAX_MESSAGE - 12 * 1024, "step {step}: {} bytes", text.len());
            assert_eq!(serde_json::from_str::<Message>(&text).unwrap().backing, ids);
        }
    }

    #[test]
    fn a_few_are_written_as_builds_before_wrote_them() {
        assert_eq!(written([1, 9]), r#"{"backing":[1,9]}"#);
        assert!(serde_json::from_str::<Message>("{}").unwrap().backing.is_empty());
    }

    #[test]
    fn more_than_there_can_be_are_refused() {
        assert!(serde_json::from_str::<Message>(&written(0..BACKING_IDS_MAX as u32 + 1)).is_err());
    }

    proptest! {
        #[test]
        fn ids_survive_the_wire(ids in proptest::collection::btree_set(any::<u32>(), 0..3000)) {
            let back: Message = serde_json::from_str(&written(ids.iter().copied())).unwrap();
            prop_assert_eq!(back.backing, ids.into_iter().collect::<Vec<_>>());
        }

        #[test]
        fn garbage_is_refused_or_read(bytes in proptest::collection::vec(any::<u8>(), 0..100)) {
            if let Some(ids) = parse(&bytes) {
                prop_assert!(ids.len() <= bytes.len() && ids.is_sorted());
            }
        }
    }
}
