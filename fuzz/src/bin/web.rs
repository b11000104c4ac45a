//! What a web server says about a directory: JSON, pages of links, WebDAV, a manifest. It may be anybody's, as a store.

#![no_main]

use fuzz::Bound;
use libfuzzer_sys::fuzz_target;
use store::fuzz::index;

/// A link takes eleven bytes of a page and, as an entry of a map, two hundred of memory.
const BOUND: Bound = Bound { times: 32, besides: 512 << 10 };

fuzz_target!(|input: &[u8]| BOUND.hold(input, || index(input)));
