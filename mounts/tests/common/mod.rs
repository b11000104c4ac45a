//! What more than one test program needs.

use fuse_abi::{InHeader, InitOut, OutHeader};

/// The reply of a server that offers nothing special: version 7.31, 128 KiB writes.
pub fn init_reply(init: &[u8]) -> Vec<u8> {
    let unique = InHeader::from_bytes(init.first_chunk().unwrap()).unique;
    let reply =
        InitOut { major: 7, minor: 31, max_readahead: 1 << 20, max_write: 128 << 10, ..InitOut::default() };
    [&OutHeader::new(InitOut::BYTES, 0, unique).to_bytes()[..], &reply.to_bytes()].concat()
}
