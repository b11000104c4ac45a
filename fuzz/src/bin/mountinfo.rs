//! The mount table: a mount point, a source or a file system type is a text of whoever has mounted it.

#![no_main]

use fuzz::Bound;
use libfuzzer_sys::fuzz_target;
use mounts::{MountEntry, parse_mountinfo, stack_at, unescape};
use std::path::PathBuf;

/// An entry takes some 200 bytes and has at least 16 (`1 1 0:0 / / r - `); the vector of them doubles.
const BOUND: Bound = Bound { times: 64, besides: 64 << 10 };

fuzz_target!(|input: &[u8]| {
    BOUND.hold(input, || {
        assert!(unescape(input).len() <= input.len());
        let table = parse_mountinfo(input);
        assert!(table.len() <= input.split(|byte| *byte == b'\n').count());
        for entry in table.iter().take(8).chain(table.last()) {
            let _ = entry.ours();
            let stack = stack_at(&table, &entry.mount_point);
            // All that lie there, each once. The kernel writes a path in one form; an input may have it in others.
            let form: PathBuf = entry.mount_point.components().collect();
            let is_there = |e: &&MountEntry| e.mount_point.as_os_str() == form.as_os_str();
            assert_eq!(stack.len(), table.iter().filter(is_there).count());
            for (lower, upper) in stack.iter().zip(stack.iter().skip(1)) {
                assert!(!std::ptr::eq(*lower, *upper));
            }
        }
    });
});
