//! Directories, by page. The library lists from the start and no other way, so a listing whose next page will be asked
//! for is kept; where it is not there any more, the directory is listed again up to that place.

use crate::failure::{failure, of};
use crate::file_system::{FileSystem, apart};
use futures::FutureExt;
use hdfs::{Entry, Failure, FailureKind, PAGE_ENTRIES, PAGE_NAME_BYTES, Page, PageStart, Status, Version};
use hdfs_native::client::{FileStatus, ListStatusIterator};
use std::cmp::Ordering;
use std::collections::VecDeque;
use std::panic::AssertUnwindSafe;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;
use tokio::time::Instant;

/// Looked at in one go: a hop to another task is not worth one name.
const AHEAD: usize = 64;
/// Each keeps a page of the NameNode's.
const KEPT_MAX: usize = 32;
const KEPT_FOR: Duration = Duration::from_secs(60);
/// Longer than any user's or group's name.
const USER_BYTES_MAX: usize = 256;

#[derive(Default)]
pub(crate) struct Listings {
    kept: Mutex<VecDeque<Kept>>,
}

struct Kept {
    path: String,
    next: PageStart,
    since: Instant,
    listing: Listing,
}

struct Listing {
    names: ListStatusIterator,
    /// Longer than the paths that come out of it by a name: "" for the root.
    base: String,
    generation: u64,
    /// Was seen, and is to come.
    ahead: VecDeque<Result<Item, Failure>>,
}

enum Item {
    Named(Entry),
    /// The library fails at a name that is not UTF-8, and goes on behind it.
    Hidden,
}

impl Listings {
    pub(crate) async fn page(
        &self,
        fs: &FileSystem,
        path: &str,
        start: PageStart,
        patience: Duration,
    ) -> Result<Page, Failure> {
        let mut listing = match self.take(path, &start) {
            Some(listing) => listing,
            None => {
                {
                    let lent = fs.lend();
                    let names = lent.client.list_status_iter(path, false);
                    let base = path.trim_end_matches('/').to_owned();
                    Listing { names, base, generation: lent.generation, ahead: VecDeque::new() }
                }
                .behind(&start, fs, patience)
                .await?
            }
        };
        let mut page = Page::default();
        let (mut reached, mut bytes) = (start, 0);
        loop {
            let (back, item) = listing.next(fs, patience).await?;
            listing = back;
            let Some(item) = item else { return Ok(page) };
            let size = match &item {
                Item::Named(Entry { name, status }) => name.len() + status.owner.len() + status.group.len(),
                Item::Hidden => 0,
            };
            if page.entries.len() + page.hidden as usize == PAGE_ENTRIES || bytes + size > PAGE_NAME_BYTES {
                listing.ahead.push_front(Ok(item));
                page.next = Some(reached.clone());
                self.keep(path, reached, listing);
                return Ok(page);
            }
            bytes += size;
            match item {
                Item::Named(entry) => {
                    reached = PageStart { after: Some(entry.name.clone()), hidden: 0 };
                    page.entries.push(entry);
                }
                Item::Hidden => {
                    reached.hidden += 1;
                    page.hidden += 1;
                }
            }
        }
    }

    fn keep(&self, path: &str, next: PageStart, listing: Listing) {
        let mut kept = self.lock();
        if kept.len() == KEPT_MAX {
            kept.pop_front();
        }
        kept.push_back(Kept { path: path.to_owned(), next, since: Instant::now(), listing });
    }

    fn take(&self, path: &str, start: &PageStart) -> Option<Listing> {
        let mut kept = self.lock();
        kept.retain(|one| one.since.elapsed() < KEPT_FOR);
        let at = kept.iter().position(|one| one.path == path && one.next == *start)?;
        kept.remove(at).map(|one| one.listing)
    }

    /// Of a client that hangs.
    pub(crate) fn forget(&self) {
        self.lock().clear();
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, VecDeque<Kept>> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Listing {
    /// From its beginning to where a page starts.
    async fn behind(
        mut self,
        start: &PageStart,
        fs: &FileSystem,
        patience: Duration,
    ) -> Result<Self, Failure> {
        let Some(after) = &start.after else { return self.behind_hidden(start.hidden, fs, patience).await };
        loop {
            let (back, item) = self.next(fs, patience).await?;
            self = back;
            match item {
                None => return Ok(self),
                Some(Item::Named(entry)) if order(&entry.name, after) == Ordering::Greater => {
                    self.ahead.push_front(Ok(Item::Named(entry)));
                    return Ok(self);
                }
                Some(Item::Named(entry)) if entry.name == *after => {
                    return self.behind_hidden(start.hidden, fs, patience).await;
                }
                Some(_) => {}
            }
        }
    }

    async fn behind_hidden(
        mut self,
        mut hidden: u32,
        fs: &FileSystem,
        patience: Duration,
    ) -> Result<Self, Failure> {
        while hidden > 0 {
            let (back, item) = self.next(fs, patience).await?;
            self = back;
            match item {
                Some(Item::Hidden) => hidden -= 1,
                Some(other) => {
                    self.ahead.push_front(Ok(other));
                    return Ok(self);
                }
                None => return Ok(self),
            }
        }
        Ok(self)
    }

    /// The next item; None: there are no more.
    async fn next(mut self, fs: &FileSystem, patience: Duration) -> Result<(Self, Option<Item>), Failure> {
        if self.ahead.is_empty() {
            let generation = self.generation;
            let work = async move {
                self.look_ahead().await;
                self
            };
            self = apart(patience, work).await.inspect_err(|why| {
                if why.kind == FailureKind::Silent {
                    fs.doubt(generation);
                }
            })?;
        }
        match self.ahead.pop_front() {
            None => Ok((self, None)),
            Some(Ok(item)) => Ok((self, Some(item))),
            Some(Err(why)) => Err(why),
        }
    }

    /// Some more items, unless there are none. Most are in memory, so this is one answer of the NameNode's at most, where
    /// it gives as many at once as is usual.
    async fn look_ahead(&mut self) {
        while self.ahead.len() < AHEAD {
            let found = AssertUnwindSafe(self.names.next()).catch_unwind().await;
            match self.item(found.map_err(drop)).transpose() {
                None => return,
                Some(item) => {
                    let failed = item.is_err();
                    self.ahead.push_back(item);
                    if failed {
                        return;
                    }
                }
            }
        }
    }

    /// Err in `found`: the library panicked at one name, which is behind it now.
    fn item(
        &self,
        found: Result<Option<hdfs_native::Result<FileStatus>>, ()>,
    ) -> Result<Option<Item>, Failure> {
        let status = match found {
            Err(()) => return Ok(Some(Item::Hidden)),
            Ok(None) => return Ok(None),
            Ok(Some(Err(error))) => return Err(of(&error)),
            Ok(Some(Ok(status))) => status,
        };
        // Asked to list a file, a NameNode answers with the file, without a name.
        let name = status.path.strip_prefix(&self.base).and_then(|rest| rest.strip_prefix('/'));
        match name {
            None | Some("") => Err(failure(FailureKind::NotFound, "it is not a directory")),
            Some(name) => Ok(Some(Item::Named(Entry { name: name.to_owned(), status: told(&status) }))),
        }
    }
}

pub(crate) fn told(status: &FileStatus) -> Status {
    let version = Version { modified_ms: status.modification_time, length: status.length as u64 };
    // A NameNode may tell anything.
    let name = |name: &str| if name.len() > USER_BYTES_MAX { String::new() } else { name.to_owned() };
    let (owner, group) = (name(&status.owner), name(&status.group));
    Status { is_directory: status.isdir, version, mode: status.permission & 0o7777, owner, group }
}

/// As a NameNode lists: by bytes, which are signed in Java.
fn order(a: &str, b: &str) -> Ordering {
    let signed = |name: &str| name.bytes().map(|byte| byte as i8).collect::<Vec<_>>();
    signed(a).cmp(&signed(b))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_in_the_order_of_a_namenode() {
        assert_eq!(order("a", "b"), Ordering::Less);
        assert_eq!(order("a", "a/"), Ordering::Less);
        // Bytes beyond ASCII are negative.
        assert_eq!(order("é", "a"), Ordering::Less);
        assert_eq!(order("é", "é"), Ordering::Equal);
    }
}
