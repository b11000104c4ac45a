//! Chooses between the two ways of serving a volume, from a bounded look at what is in it.

use store::{Entry, Kind, Source, StoreError};

/// Somewhere between 0.5 and 1 MB the OPEN round trip of one profile costs as much as the copies of the other.
const SMALL_MEDIAN_BYTES: u64 = 768 << 10;
/// Listing requests that `auto` may cost.
const PAGES: usize = 3;
/// Fewer files than this say nothing.
const LEAST_FILES: usize = 8;

/// True for many small files: no-open. Looks at the first page, and while that holds only directories, into the
/// first of them.
pub(crate) async fn is_small(source: &dyn Source) -> Result<bool, StoreError> {
    let mut dir = Vec::new();
    for _ in 0..PAGES {
        let page = source.list(&dir, None).await?;
        let mut sizes = sizes(&page.entries);
        if !sizes.is_empty() {
            return Ok(decide(&mut sizes));
        }
        let Some(first) = page.entries.iter().find(|e| matches!(e.kind, Kind::Directory)) else { break };
        if !dir.is_empty() {
            dir.push(b'/');
        }
        dir.extend_from_slice(&first.name);
    }
    Ok(false)
}

fn sizes(entries: &[Entry]) -> Vec<u64> {
    let size = |e: &Entry| match e.kind {
        Kind::File { size, .. } => Some(size),
        _ => None,
    };
    entries.iter().filter_map(size).collect()
}

fn decide(sizes: &mut [u64]) -> bool {
    if sizes.len() < LEAST_FILES {
        return false;
    }
    let middle = sizes.len() / 2;
    *sizes.select_nth_unstable(middle).1 < SMALL_MEDIAN_BYTES
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_decides_and_few_files_say_nothing() {
        assert!(decide(&mut [100_000; 100]));
        assert!(!decide(&mut [10 << 20; 100]));
        assert!(!decide(&mut [1; 3]));
        let mut mixed = [1000; 10];
        mixed[0] = 1 << 40;
        assert!(decide(&mut mixed));
    }
}
