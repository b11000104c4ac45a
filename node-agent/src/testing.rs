//! A scope over a source that a test directs.

use crate::source::credentials::CredentialedSource;
use crate::source::health::{Change, Health};
use crate::volumes::scope::Scope;
use cache::data::{Engine, OpenError, Tier, TierKind};
use cache::meta::{InodeNumbers, MetaError, Store};
use futures::StreamExt;
use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use store::{Access, ByteStream, Entry, Kind, Page, Source, StoreError, Version};
use tokio::sync::{mpsc, watch};
use volume::{Credentials, ScopeId};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Does {
    Answers,
    /// Gives the first page of each listing, and then nothing.
    FirstPage,
    /// Gives page after page of each listing.
    Endless,
    /// Gives page after page without a name, each of which says that there are more.
    EmptyPages,
    /// Says of each page that it is followed by itself.
    SamePage,
    /// Says that the session token has expired.
    Expires,
    /// As [`Self::Nothing`]: the question waits for a slot on this node.
    Queues,
    /// There was no slot on this node.
    IsFull,
    Nothing,
    Refuses,
    Denies,
}

const PATIENCE: Duration = Duration::from_secs(30);

/// A scope over any source, whose names and cache lie in `dir`.
pub(crate) fn scope_over(
    dir: &Path,
    id: ScopeId,
    numbers: Arc<dyn InodeNumbers>,
    open: impl FnOnce(Arc<Access>) -> Result<Arc<dyn Source>, StoreError>,
) -> (Arc<Scope>, mpsc::UnboundedReceiver<Change>) {
    let (sender, receiver) = mpsc::unbounded_channel();
    let health = Arc::new(Health::new(id.clone(), sender));
    let patience = Duration::from_secs(60);
    let (shown, anonymous) = ("scripted".to_owned(), Credentials::anonymous());
    let asked = CredentialedSource::new(open, anonymous, patience, shown, health.clone()).unwrap();
    let metadata = dir.join("meta");
    let names = Store::open(&metadata, numbers);
    let tier = Tier {
        name: "ssd".into(),
        kind: TierKind::Ssd,
        paths: vec![dir.join("cache")],
        quota_bytes: 1 << 30,
        quota_inodes: 1000,
        high_percent: 90,
        low_percent: 70,
        min_free_bytes_percent: 0,
        min_free_inodes_percent: 0,
    };
    let reading = cache::data::Reading { readahead_bytes: 0, part_bytes: 1 << 20, parallel_parts: 1 };
    let config = cache::data::Config {
        tiers: vec![tier],
        block_bytes: 4096,
        scope_limit_bytes: None,
        reading,
        reading_max: reading,
        memory_bytes: 8 << 20,
        disk_timeout: Duration::from_secs(60),
    };
    // The engine that had this directory before lets go of it when the last call of its threads is done.
    let begun = std::time::Instant::now();
    let (engine, _) = loop {
        match Engine::open(config.clone(), Arc::new(()), tokio::runtime::Handle::current()) {
            Err(OpenError::InUse { .. }) if begun.elapsed() < PATIENCE => {
                std::thread::sleep(Duration::from_millis(1));
            }
            opened => break opened.unwrap(),
        }
    };
    let shown = "scripted".to_owned();
    let names = Arc::new(names.unwrap());
    (Scope::new(id, shown, names, metadata, engine, asked, health, 1, 48), receiver)
}

/// Of each small file.
pub(crate) const SMALL_BYTES: u64 = 1000;

/// Directories `d0`, `d1` … and a file `f`, whose version and size are a number, or small files instead of it.
#[derive(Debug)]
pub(crate) struct Scripted {
    directories: usize,
    /// `s0`, `s1` … of [`SMALL_BYTES`] in its root.
    small_files: usize,
    /// Of its scope.
    dir: tempfile::TempDir,
    does: watch::Sender<Does>,
    version: AtomicU64,
    more: AtomicUsize,
    asked: AtomicUsize,
    begun: AtomicUsize,
    /// Bytes of bodies that were asked for.
    sent: AtomicU64,
    looked_at: AtomicUsize,
    access: OnceLock<Arc<Access>>,
}

impl Scripted {
    pub(crate) fn new(directories: usize) -> Arc<Self> {
        Self::with_files(directories, 0)
    }

    pub(crate) fn with_files(directories: usize, small_files: usize) -> Arc<Self> {
        Arc::new(Self {
            directories,
            small_files,
            dir: tempfile::tempdir().unwrap(),
            does: watch::Sender::new(Does::Answers),
            version: AtomicU64::new(1),
            more: AtomicUsize::new(0),
            asked: AtomicUsize::new(0),
            begun: AtomicUsize::new(0),
            sent: AtomicU64::new(0),
            looked_at: AtomicUsize::new(0),
            access: OnceLock::new(),
        })
    }

    pub(crate) fn does(&self, what: Does) {
        self.does.send_replace(what);
    }

    pub(crate) fn change(&self) {
        self.version.fetch_add(1, Ordering::SeqCst);
    }

    /// The file has so many bytes from now on.
    pub(crate) fn resize(&self, bytes: u64) {
        self.version.store(bytes, Ordering::SeqCst);
    }

    /// How often a reader wanted to know whether its questions are queued.
    pub(crate) fn looked_at(&self) -> usize {
        self.looked_at.load(Ordering::SeqCst)
    }

    pub(crate) fn sent(&self) -> u64 {
        self.sent.load(Ordering::SeqCst)
    }

    /// Questions so far.
    pub(crate) fn asked(&self) -> usize {
        self.asked.load(Ordering::SeqCst)
    }

    /// Listings that were begun.
    pub(crate) fn begun(&self) -> usize {
        self.begun.load(Ordering::SeqCst)
    }

    /// Until so many second and later pages were asked for.
    pub(crate) async fn asked_for_more(&self, many: usize) {
        let wait = async {
            while self.more.load(Ordering::SeqCst) < many {
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(20), wait).await.expect("no question for more");
    }

    pub(crate) fn scope(self: &Arc<Self>) -> Arc<Scope> {
        self.scope_and_changes().0
    }

    pub(crate) fn scope_and_changes(self: &Arc<Self>) -> (Arc<Scope>, mpsc::UnboundedReceiver<Change>) {
        let open = |access| -> Result<Arc<dyn Source>, StoreError> {
            let _ = self.access.set(access); // of its first scope
            Ok(self.clone())
        };
        let id = ScopeId::parse(&format!("{:032x}", Arc::as_ptr(self) as usize)).unwrap();
        scope_over(self.dir.path(), id, Arc::new(Numbers(AtomicU64::new(1 << 20))), open)
    }

    /// Does what it is to do instead of an answer. As every source does, it waits for a renewed token.
    async fn meet(&self) -> Result<(), StoreError> {
        let mut question = self.access.get().expect("it has a scope").question();
        loop {
            match self.attempt().await {
                Err(error @ StoreError::Expired { .. }) => question.await_renewal(error).await?,
                answer => {
                    question.answered();
                    return answer;
                }
            }
        }
    }

    async fn attempt(&self) -> Result<(), StoreError> {
        self.asked.fetch_add(1, Ordering::SeqCst);
        let what = "scripted".to_owned();
        let mut does = self.does.subscribe();
        let now = *does
            .wait_for(|does| !matches!(*does, Does::Nothing | Does::Queues))
            .await
            .expect("we hold the sender");
        match now {
            Does::Denies => Err(StoreError::Denied { what, why: "the test wants it so".into() }),
            Does::IsFull => Err(StoreError::Busy { what, waited: Duration::ZERO }),
            Does::Expires => Err(StoreError::Expired { what, why: "the test wants it so".into() }),
            Does::Refuses => Err(StoreError::Unavailable {
                what,
                waited: Duration::ZERO,
                queued: Duration::ZERO,
                attempts: 1,
                cause: "the test wants it so".into(),
            }),
            _ => Ok(()),
        }
    }

    fn file(&self) -> Entry {
        let version = self.version.load(Ordering::SeqCst);
        let kind = Kind::File { size: version, version: Version(version.to_string()) };
        Entry { name: b"f".to_vec(), kind, modified_ns: 0, permissions: None }
    }
}

fn small_file(name: String) -> Entry {
    let kind = Kind::File { size: SMALL_BYTES, version: Version("1".to_owned()) };
    Entry { name: name.into_bytes(), kind, modified_ns: 0, permissions: None }
}

fn directory(name: String) -> Entry {
    Entry { name: name.into_bytes(), kind: Kind::Directory, modified_ns: 0, permissions: None }
}

#[async_trait::async_trait]
impl Source for Scripted {
    async fn list(&self, dir: &[u8], token: Option<&str>) -> Result<Page, StoreError> {
        let now = *self.does.borrow();
        let endless = now == Does::Endless;
        match token {
            None => drop(self.begun.fetch_add(1, Ordering::SeqCst)),
            Some(number) if endless => {
                self.meet().await?;
                tokio::time::sleep(Duration::from_millis(1)).await; // or it would be all that is done
                let next: u64 = number.parse().expect("we gave it");
                let entries = vec![directory(format!("e{next}"))];
                return Ok(Page { entries, next: Some((next + 1).to_string()), ..Page::default() });
            }
            Some(token) => {
                let more = self.more.fetch_add(1, Ordering::SeqCst);
                return match now {
                    Does::EmptyPages => Ok(Page { next: Some(more.to_string()), ..Page::default() }),
                    Does::SamePage => Ok(Page { next: Some(token.to_owned()), ..Page::default() }),
                    _ => std::future::pending().await,
                };
            }
        }
        self.meet().await?;
        let mut page = Page::default();
        page.entries.extend((self.small_files == 0).then(|| self.file()));
        if endless {
            page.next = Some("0".to_owned());
            return Ok(page);
        }
        if dir.is_empty() {
            page.entries.extend((0..self.directories).map(|k| directory(format!("d{k}"))));
            page.entries.extend((0..self.small_files).map(|k| small_file(format!("s{k}"))));
        }
        let goes_on = matches!(now, Does::FirstPage | Does::EmptyPages | Does::SamePage);
        page.next = goes_on.then(|| "more".to_owned());
        Ok(page)
    }

    async fn head(&self, path: &[u8]) -> Result<Option<Entry>, StoreError> {
        self.meet().await?;
        let name = String::from_utf8(path.to_vec()).unwrap();
        Ok(match name.as_str() {
            "f" => Some(self.file()),
            _ if name.starts_with('d') => Some(directory(name)),
            _ if name.starts_with('s') => Some(small_file(name)),
            _ => None,
        })
    }

    async fn get(&self, _: &[u8], _: &Version, range: Range<u64>) -> Result<ByteStream, StoreError> {
        self.meet().await?;
        let bytes = vec![7; (range.end - range.start) as usize];
        self.sent.fetch_add(bytes.len() as u64, Ordering::SeqCst);
        Ok(futures::stream::iter([Ok(bytes.into())]).boxed())
    }

    async fn check(&self, _: Duration) -> Result<(), StoreError> {
        self.attempt().await
    }

    fn is_queued(&self) -> bool {
        self.looked_at.fetch_add(1, Ordering::SeqCst);
        *self.does.borrow() == Does::Queues
    }
}

struct Numbers(AtomicU64);

impl InodeNumbers for Numbers {
    fn next(&self) -> Result<u64, MetaError> {
        Ok(self.0.fetch_add(1, Ordering::SeqCst))
    }
}
