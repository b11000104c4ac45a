//! Bytes that tell where they belong: each page has its number and the pass that wrote it at its beginning, so that a file
//! of which a part is old, misplaced or missing is seen to be wrong.

use anyhow::{Result, ensure};
use std::io::{BufReader, Read};
use std::ops::Range;

pub(super) const PAGE: u64 = 4096;
/// One call of write(2) in a file that is written in order.
pub(super) const BLOCK: u64 = 1 << 20;
const PAGES: u64 = BLOCK / PAGE;

/// A block that is filled again and again: what it costs to make bytes is not to be measured.
pub(super) struct Pages(Vec<u8>);

impl Pages {
    pub(super) fn new() -> Self {
        Self(testkit::content::bytes(testkit::content::id("pages"), 0..BLOCK))
    }

    /// These pages, at most a block of them, as this pass writes them.
    pub(super) fn of(&mut self, numbers: Range<u64>, pass: u64) -> &[u8] {
        let first = numbers.start % PAGES;
        let count = numbers.end - numbers.start;
        assert!(first + count <= PAGES, "pages of two blocks");
        for number in numbers {
            let at = (number % PAGES * PAGE) as usize;
            self.0[at..at + 8].copy_from_slice(&number.to_le_bytes());
            self.0[at + 8..at + 16].copy_from_slice(&pass.to_le_bytes());
        }
        &self.0[(first * PAGE) as usize..((first + count) * PAGE) as usize]
    }
}

/// Is what can be read the pages `numbers`, each as the pass wrote it that `pass_of` tells, and nothing else?
pub(super) fn check(from: impl Read, numbers: Range<u64>, pass_of: &dyn Fn(u64) -> u64) -> Result<()> {
    // In a volume that can be written to each read(2) asks for attributes.
    let mut from = BufReader::with_capacity(BLOCK as usize, from);
    let (mut pages, mut page) = (Pages::new(), [0; PAGE as usize]);
    for number in numbers {
        from.read_exact(&mut page)?;
        let (pass, wanted) = (pass_of(number), page_tells(&page));
        ensure!(
            page == pages.of(number..number + 1, pass),
            "page {number} is not as pass {pass} wrote it: it tells of page {} and pass {}",
            wanted.0,
            wanted.1
        );
    }
    ensure!(from.read(&mut page)? == 0, "there is more than was written");
    Ok(())
}

fn page_tells(page: &[u8; PAGE as usize]) -> (u64, u64) {
    let at = |k: usize| u64::from_le_bytes(std::array::from_fn(|byte| page[k + byte]));
    (at(0), at(8))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_that_is_old_misplaced_missing_or_too_much_is_found() {
        let mut pages = Pages::new();
        let mut bytes = pages.of(0..PAGES, 1).to_vec();
        bytes.extend(pages.of(PAGES..PAGES + 2, 1));
        let is_right = |bytes: &[u8], pass: u64| check(bytes, 0..PAGES + 2, &|_| pass).is_ok();
        assert!(is_right(&bytes, 1) && !is_right(&bytes, 2));
        assert!(!is_right(&bytes[..bytes.len() - 1], 1) && !is_right(&[&bytes[..], b"1"].concat(), 1));
        let mut other = bytes.clone();
        other.copy_within(0..PAGE as usize, PAGE as usize);
        assert!(!is_right(&other, 1));
        bytes[5000] ^= 1;
        assert!(!is_right(&bytes, 1));
    }
}
