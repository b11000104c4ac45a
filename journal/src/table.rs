//! The live records, in memory.

use crate::frame::Change;
use std::collections::BTreeMap;

#[derive(Default)]
pub(crate) struct Table {
    pub(crate) records: BTreeMap<Vec<u8>, Vec<u8>>,
    /// That a log of these records alone takes, but for the heads of its frames.
    pub(crate) bytes: u64,
}

impl Table {
    pub(crate) fn apply(&mut self, change: &Change<'_>) {
        let (key, before) = match *change {
            Change::Put { key, value } => {
                self.bytes += change.bytes() as u64;
                (key, self.records.insert(key.to_vec(), value.to_vec()))
            }
            Change::Delete { key } => (key, self.records.remove(key)),
        };
        if let Some(value) = before {
            self.bytes -= Change::Put { key, value: &value }.bytes() as u64;
        }
    }

    /// As changes that make an empty table into this one.
    pub(crate) fn puts(&self) -> impl Iterator<Item = Change<'_>> {
        self.records.iter().map(|(key, value)| Change::Put { key, value })
    }
}
