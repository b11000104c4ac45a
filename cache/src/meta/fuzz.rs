//! Records of the metadata store, as its file gives them back: for the fuzz target `cache_records`.

use super::record::{Directory, Known, Record, next_even, next_odd, split_key};
use super::types::EPOCH_MAX;

/// A record of a name. What is understood of it is written again, and means the same then.
pub fn record(bytes: &[u8]) {
    let Ok(record) = Record::new(bytes) else { return };
    let Ok(known) = record.to_owned() else { return };
    for in_force in [0, 1, record.last(), u32::MAX] {
        let fits = known.attributes.as_ref().is_none_or(|a| a.size <= volume::FILE_BYTES_MAX);
        assert!(!record.is_visible(in_force) || known.is_visible(in_force));
        assert!(
            !fits || known.attributes.is_none() || record.is_visible(in_force) == known.is_visible(in_force)
        );
    }
    if let Some(attributes) = &known.attributes {
        assert!(next_even(attributes.epoch) <= EPOCH_MAX);
        assert!(next_odd(attributes.epoch).is_none_or(|epoch| epoch > attributes.epoch && epoch < EPOCH_MAX));
    }
    let mut again = Vec::new();
    known.encode(&mut again).expect("its token fitted");
    let found = Record::new(&again).and_then(Record::to_owned).expect("it was just written");
    assert_eq!(said(&found), said(&known));
}

fn said(known: &Known) -> String {
    format!("{known:?}")
}

/// A record of a directory, or a key of a name.
pub fn other(bytes: &[u8]) {
    if let Ok(directory) = Directory::decode(bytes) {
        let again = Directory::decode(&directory.encode()).expect("it was just written");
        assert_eq!(format!("{again:?}"), format!("{directory:?}"));
    }
    if let Ok((parent, name)) = split_key(bytes) {
        assert_eq!([&parent.to_be_bytes()[..], name].concat(), bytes);
    }
}
