//! What the allocator keeps is what it needs: glibc by itself keeps what each of its heaps once used.

use std::time::Duration;

/// glibc makes up to eight for each processor.
const HEAPS_MAX: libc::c_int = 4;
/// It calls one function of the C library.
const TRIM_STACK: usize = 64 << 10;
const TRIM_EVERY: Duration = Duration::from_secs(30);

/// To be called before other threads are started: what a busy minute has used is given back in the next one.
///
/// # Errors
/// The thread that gives back cannot be started.
pub fn keep_small() -> std::io::Result<()> {
    // SAFETY: an integer; refused, memory is larger, nothing else.
    unsafe { libc::mallopt(libc::M_ARENA_MAX, HEAPS_MAX) };
    let trim = || {
        loop {
            std::thread::sleep(TRIM_EVERY);
            // SAFETY: takes the heaps' own locks, one after the other.
            unsafe { libc::malloc_trim(0) };
        }
    };
    std::thread::Builder::new().name("trim".into()).stack_size(TRIM_STACK).spawn(trim).map(drop)
}

/// Blocks of 1 MiB and more come from the kernel one by one, and go back to it. By itself glibc takes the size of the first
/// that is freed for a usual one and gives such blocks from its heaps from then on, where it must clear each: the 3 MiB
/// that LMDB keeps for each store that is open, of which it uses some pages, became memory.
pub fn map_large_blocks() {
    const LARGE: libc::c_int = 1 << 20;
    /// What is free at a heap's end before it is given back: glibc's own number once it has seen a few such blocks.
    const TRIMMED_FROM: libc::c_int = 4 << 20;
    // SAFETY: both set a number, under the allocator's own lock.
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, LARGE);
        libc::mallopt(libc::M_TRIM_THRESHOLD, TRIMMED_FROM);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn large_blocks_that_are_not_touched_are_no_memory_however_often_they_come_and_go() {
        let resident = || {
            let status = std::fs::read_to_string("/proc/self/status").unwrap();
            let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
            line.trim().trim_end_matches(" kB").parse::<usize>().unwrap() << 10
        };
        map_large_blocks();
        let take = || (0..32).map(|_| vec![0_u8; 2 << 20]).collect::<Vec<_>>();
        let mut before = take();
        before.iter_mut().for_each(|block| block.fill(1));
        drop(before);
        let none = resident();
        let untouched = take();
        assert!(resident() < none + (16 << 20), "{none} {}", resident());
        drop(untouched);
    }
}
