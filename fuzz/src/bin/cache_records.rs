//! What the cache wrote and a disk gives back: sidecars, journals, records of the metadata store.

#![no_main]

use cache::data::fuzz::{journal, sealed_journal, sealed_sidecar, sidecar};
use cache::meta::fuzz::{other, record};
use fuzz::Bound;
use libfuzzer_sys::fuzz_target;

/// A stretch of blocks (20 bytes with its checksum) is known in some 100, a few times at once. A table of the first kind
/// is written of at most 4 KiB, or 64 bytes for each block of 4 KiB that is there.
const BOUND: Bound = Bound { times: 64, besides: 64 << 10 };

fuzz_target!(|input: &[u8]| {
    BOUND.hold(input, || {
        sidecar(input);
        sealed_sidecar(input);
        journal(input);
        sealed_journal(input);
        record(input);
        other(input);
    });
});
