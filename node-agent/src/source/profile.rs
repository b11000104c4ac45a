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
    use std::ops::Range;
    use std::sync::Mutex;
    use std::time::Duration;
    use store::{ByteStream, Page, Version};

    #[test]
    fn the_median_decides_and_few_files_say_nothing() {
        assert!(decide(&mut [100_000; 100]));
        assert!(!decide(&mut [10 << 20; 100]));
        assert!(!decide(&mut [1; 3]));
        let mut mixed = [1000; 10];
        mixed[0] = 1 << 40;
        assert!(decide(&mut mixed));
        assert!(!decide(&mut [1; LEAST_FILES - 1]) && decide(&mut [1; LEAST_FILES]));
        assert!(decide(&mut [SMALL_MEDIAN_BYTES - 1; 9]) && !decide(&mut [SMALL_MEDIAN_BYTES; 9]));
        // Of an even number the larger half decides.
        let (small, large) = (1, SMALL_MEDIAN_BYTES);
        assert!(!decide(&mut [small, small, small, small, large, large, large, large]));
        assert!(decide(&mut [large, small, small, small, small, small, large, large, large]));
    }

    /// Directories within one another, `depth` of them, and small files in the last.
    #[derive(Debug)]
    struct Nested {
        depth: usize,
        asked: Mutex<Vec<Vec<u8>>>,
    }

    #[async_trait::async_trait]
    impl Source for Nested {
        async fn list(&self, dir: &[u8], _: Option<&str>) -> Result<Page, StoreError> {
            self.asked.lock().unwrap().push(dir.to_vec());
            let here = dir.split(|byte| *byte == b'/').filter(|name| !name.is_empty()).count();
            let file = |k| Kind::File { size: k, version: Version("1".into()) };
            let entry = |kind, k| Entry {
                name: format!("e{k}").into_bytes(),
                kind,
                modified_ns: 0,
                permissions: None,
            };
            let entries = match here == self.depth {
                true => (0..20).map(|k| entry(file(k), k)).collect(),
                false => (0..20).map(|k| entry(Kind::Directory, k)).collect(),
            };
            Ok(Page { entries, ..Page::default() })
        }

        async fn head(&self, _: &[u8]) -> Result<Option<Entry>, StoreError> {
            Ok(None)
        }

        async fn get(&self, path: &[u8], _: &Version, _: Range<u64>) -> Result<ByteStream, StoreError> {
            Err(StoreError::Stale { what: String::from_utf8_lossy(path).into_owned() })
        }

        async fn check(&self, _: Duration) -> Result<(), StoreError> {
            Ok(())
        }

        fn is_queued(&self) -> bool {
            false
        }
    }

    #[tokio::test]
    async fn files_are_looked_for_in_the_first_directory_of_the_first_and_no_deeper() {
        for (depth, small) in [(0, true), (1, true), (2, true), (3, false)] {
            let source = Nested { depth, asked: Mutex::default() };
            assert_eq!(is_small(&source).await.unwrap(), small, "{depth}");
            let paths = [&b""[..], b"e0", b"e0/e0"];
            assert_eq!(*source.asked.lock().unwrap(), paths[..(depth + 1).min(PAGES)], "{depth}");
        }
    }
}
