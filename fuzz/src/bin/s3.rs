//! What a store says: listings, errors, headers, keys. It may be anybody's: a claim may choose it.

#![no_main]

use fuzz::Bound;
use libfuzzer_sys::fuzz_target;
use store::fuzz::{error, key, listing, value};

/// A key may lie there as it came, decoded, as a name and as a message, the last with three bytes for each that is no
/// UTF-8; and a page of empty entries is a page of entries.
const BOUND: Bound = Bound { times: 16, besides: 512 << 10 };

fuzz_target!(|input: &[u8]| {
    BOUND.hold(input, || {
        listing(input);
        error(input);
        key(input);
        if let Ok(text) = std::str::from_utf8(input) {
            value(text);
            text.lines().take(64).for_each(value);
        }
    });
});
