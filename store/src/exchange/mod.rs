//! A bucket of an object store, or a prefix of one, or a tree on a web server as a source. What stores speak is their [`Dialect`]'s; what it takes to
//! get an answer out of any of them is here, once.
//!
//! Every request is built, sent and judged by us rather than by `object_store`: its `Path` type refuses whole pages
//! because of one odd key, it retries inside its calls while we must give the request slot back, and it cannot resume
//! a broken body in place.
//!
//! ```text
//! mod.rs      Source: which requests answer which question about a bucket
//! tree.rs     the same about a tree of files on a web server
//! client.rs   one attempt: sign, send, wait for the headers, judge the status
//! body.rs     a body that survives resets: the only request that resumes
//! erase.rs    all that is below a prefix, removed
//! write.rs    the same bucket as a sink, and what becomes of writes whose answer was lost
//! sending.rs  the body of a write, from a file
//! told.rs     what stores told meanwhile of whole objects
//! uploads.rs  uploads in parts that are under way
//! ```

mod body;
mod client;
mod erase;
mod sending;
mod told;
mod tree;
mod uploads;
mod write;

pub use erase::{ERASE_PAGE_LIMIT, Erased, Eraser, MayGoOn};
pub(crate) use tree::Tree;

use crate::access::{Access, Question};
use crate::dialect::checksum::{self, HELD_MAX};
use crate::dialect::listing::Answer;
use crate::dialect::{BucketDialect, From, Object};
use crate::dispatch::Lane;
use crate::keys::{is_path, show};
use crate::limits::Limits;
use crate::observe::{Observer, RetryCause};
use crate::retry::Fault;
use crate::sink::Sink;
use crate::{ByteStream, Checksum, Entry, Examined, Kind, Page, Source, Step, StoreError, Version};
use async_trait::async_trait;
use client::{Ask, Client, Opens, content};
use crc_fast::CrcAlgorithm;
use futures::FutureExt;
use http::{HeaderMap, Method};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// What a source's keys begin with: "" or what ends in "/".
#[derive(Clone)]
struct Prefix(String);

impl Prefix {
    fn key(&self, path: &[u8]) -> Vec<u8> {
        [self.0.as_bytes(), path].concat()
    }

    /// "a/b" → what everything below it begins with; "" → the prefix itself.
    fn directory(&self, dir: &[u8]) -> Vec<u8> {
        let mut key = self.key(dir);
        if !dir.is_empty() {
            key.push(b'/');
        }
        key
    }
}

pub(crate) struct Bucket {
    client: Arc<Client>,
    store: Arc<dyn BucketDialect>,
    prefix: Prefix,
    access: Arc<Access>,
    /// It has shown an empty directory (see [`Bucket::is_shown`]).
    shows_empty: AtomicBool,
}

impl std::fmt::Debug for Bucket {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Bucket({})", self.client.what(self.prefix.0.as_bytes()))
    }
}

impl Bucket {
    pub(crate) fn open(
        store: Arc<dyn BucketDialect>,
        prefix: &str,
        extra: HeaderMap,
        access: Arc<Access>,
        readers: &str,
        limits: Arc<Limits>,
        observer: Arc<dyn Observer>,
    ) -> Result<Self, StoreError> {
        let client = Arc::new(Client::new(store.clone(), extra, access.clone(), readers, limits, observer)?);
        Ok(Self {
            client,
            store,
            prefix: Prefix(prefix.to_owned()),
            access,
            shows_empty: AtomicBool::new(false),
        })
    }

    async fn page(
        &self,
        key: &[u8],
        delimiter: bool,
        from: From<'_>,
        max: usize,
        question: Question,
    ) -> Result<Answer, StoreError> {
        let what = self.client.what(key);
        let url = self.store.list(key, delimiter, from, max);
        let attempt = async |patience| {
            let ask = Ask {
                method: Method::GET,
                url: &url,
                headers: HeaderMap::new(),
                takes: content,
                opens: Opens::Nothing,
            };
            let body = self.client.whole(ask, &what, patience).await?.body;
            let malformed = |why| Fault::retry(RetryCause::Malformed, why);
            Ok((self.store.listed(&body).map_err(malformed)?, body.len() as u64))
        };
        self.client.ask("list", &what, question, |patience| attempt(patience).boxed()).await
    }

    /// The first page from there on that is not empty, or the last: some stores answer with empty pages in between.
    async fn some_page(
        &self,
        key: &[u8],
        delimiter: bool,
        from: From<'_>,
        max: usize,
        question: impl Fn() -> Question,
    ) -> Result<Answer, StoreError> {
        let mut answer = self.page(key, delimiter, from, max, question()).await?;
        for _ in 0..EMPTY_PAGES_MAX {
            let Some(next) = answer.next().filter(|_| answer.is_empty()).map(str::to_owned) else {
                return Ok(answer);
            };
            answer = self.page(key, delimiter, From::Token(&next), max, question()).await?;
        }
        Err(StoreError::malformed(
            &self.client.what(key),
            format!("{EMPTY_PAGES_MAX} empty pages of its listing in a row"),
        ))
    }

    /// Does the parent's listing have this directory, although its own listing is empty? A gateway in front of a file
    /// system has empty directories.
    async fn is_shown(&self, directory: &[u8], question: Question) -> Result<bool, StoreError> {
        let name = directory.strip_suffix(b"/").unwrap_or(directory);
        // `d.…` is all that sorts between this and `d/`.
        let before = [name, ".\u{10ffff}".as_bytes()].concat();
        let page = self.page(name, true, From::After(&before), crate::PAGE_ENTRIES, question).await?;
        Ok(page.has_prefix(directory))
    }

    /// By a request of its own, where the store has one for it.
    async fn ask_for_checksum(&self, key: &[u8], version: &Version) -> Result<Option<Checksum>, StoreError> {
        let Some(headers) = self.store.telling(version) else { return Ok(None) };
        let told = self.client.told();
        if !told.is_worth_asking() {
            return Ok(None);
        }
        let (what, url) = (self.client.what(key), self.store.object(key));
        let (what, url, headers) = (&what, &url, &headers);
        let attempt = async |patience| {
            let ask = Ask {
                method: Method::HEAD,
                url,
                headers: headers.clone(),
                takes: content,
                opens: Opens::Object,
            };
            let answer = self.client.send(ask, what, patience).await?;
            let is_it = self.store.version(answer.headers(), version).is_some_and(|found| found == *version);
            Ok((self.store.checksum(answer.headers()).filter(|_| is_it), 0))
        };
        let question = self.access.question();
        let answer = self.client.ask("head", what, question, |patience| attempt(patience).boxed()).await;
        told.asked(matches!(answer, Ok(Some(_))));
        Ok(answer?.map(Checksum::from))
    }

    /// The object of exactly this key; None also where a listing would report it as one that cannot be shown.
    async fn object(&self, key: &[u8], question: Question) -> Result<Option<Object>, StoreError> {
        let what = self.client.what(key);
        match self.client.look(key, &what, question).await {
            Ok(found) => Ok(found),
            Err(StoreError::NotFound { .. }) => Ok(None),
            Err(e) => Err(e),
        }
    }
}

impl std::convert::From<checksum::Checksum> for Checksum {
    fn from(told: checksum::Checksum) -> Self {
        Self { algorithm: told.algorithm, value: told.value }
    }
}

/// Stores refuse signatures that are older than a quarter of an hour; some, tokens that are five minutes from the future.
const SKEW_MAX_S: u64 = 4 * 60;

/// More than any store has a reason for.
const EMPTY_PAGES_MAX: usize = 100;

#[async_trait]
impl Source for Bucket {
    fn sink(&self) -> Option<Arc<dyn Sink>> {
        let store = self.store.clone().writes()?;
        let (client, prefix, access) = (self.client.clone(), self.prefix.clone(), self.access.clone());
        Some(Arc::new(write::BucketSink { client, store, prefix, access }))
    }

    fn is_queued(&self) -> bool {
        self.client.place().is_queued(Lane::Metadata)
    }

    fn others_move(&self) -> bool {
        self.client.place().others_move()
    }

    async fn list(&self, dir: &[u8], token: Option<&str>) -> Result<Page, StoreError> {
        let key = self.prefix.directory(dir);
        if !dir.is_empty() && !is_path(dir) {
            return Err(StoreError::not_found(&self.client.what(&key)));
        }
        let ask = || self.access.question();
        let answer = match token {
            None => self.some_page(&key, true, From::Start, crate::PAGE_ENTRIES, ask).await?,
            Some(token) => self.page(&key, true, From::Token(token), crate::PAGE_ENTRIES, ask()).await?,
        };
        // Keys below it are all that makes a directory. The volume's root was checked at publish; should it become
        // empty later, an empty directory is the truth.
        if !dir.is_empty() && token.is_none() && answer.is_empty() {
            if !self.is_shown(&key, self.access.question()).await? {
                return Err(StoreError::not_found(&self.client.what(&key)));
            }
            self.shows_empty.store(true, Ordering::Relaxed);
        }
        Ok(answer.into_page(&key))
    }

    async fn head(&self, path: &[u8]) -> Result<Option<Entry>, StoreError> {
        if !is_path(path) {
            return Ok(None);
        }
        let name = path.rsplit(|byte| *byte == b'/').next().unwrap_or(path).to_vec();
        let (key, below) = (self.prefix.key(path), self.prefix.directory(path));
        // Two questions, because `a` and `a/b` may exist together; at once, because a lookup waits for them.
        let (object, below) = loop {
            let both = self.access.question();
            let answers = tokio::join!(
                self.object(&key, self.access.question()),
                self.some_page(&below, false, From::Start, 1, || self.access.question())
            );
            match answers {
                // A HEAD answer has no body that says what was refused. Was it the token, the listing has waited.
                (Err(_), Ok(_)) if both.is_outdated() => {}
                answers => break answers,
            }
        };
        let directory =
            || Entry { name: name.clone(), kind: Kind::Directory, modified_ns: 0, permissions: None };
        let file = |object: Object| Entry {
            name: name.clone(),
            kind: Kind::File { size: object.size, version: object.version },
            modified_ns: object.modified_ns,
            permissions: None,
        };
        match (object, below) {
            (_, Ok(below)) if !below.is_empty() => Ok(Some(directory())),
            (Ok(Some(object)), Ok(_)) => Ok(Some(file(object))),
            // Credentials that may read but not list still see the files that they name.
            (Ok(Some(object)), Err(StoreError::Denied { .. })) => Ok(Some(file(object))),
            (Ok(None), Ok(_)) if self.shows_empty.load(Ordering::Relaxed) => {
                let key = self.prefix.directory(path);
                Ok(self.is_shown(&key, self.access.question()).await?.then(directory))
            }
            (Ok(None), Ok(_)) => Ok(None),
            // Of two errors the listing's says more: a HEAD answer has no body.
            (_, Err(e)) | (Err(e), Ok(_)) => Err(e),
        }
    }

    async fn get(&self, path: &[u8], version: &Version, range: Range<u64>) -> Result<ByteStream, StoreError> {
        let key = self.prefix.key(path);
        if !is_path(path) {
            return Err(StoreError::not_found(&self.client.what(&key)));
        }
        body::open(self.client.clone(), &key, version, range, self.access.question()).await
    }

    fn sums(&self, size: u64) -> Option<CrcAlgorithm> {
        self.store.sums(size).filter(|_| size > HELD_MAX && self.client.told().is_believed())
    }

    fn told_wrong(&self) -> bool {
        self.client.told().is_wrong()
    }

    async fn checksum(&self, path: &[u8], version: &Version) -> Result<Option<Checksum>, StoreError> {
        let key = self.prefix.key(path);
        let told = self.store.content(&key, version).and_then(|url| self.client.told().take(&url, version));
        match told {
            Some(told) => Ok(told.map(Checksum::from)),
            None => self.ask_for_checksum(&key, version).await,
        }
    }

    async fn check(&self, limit: Duration) -> Result<(), StoreError> {
        let started = tokio::time::Instant::now();
        let prefix = self.prefix.0.as_bytes();
        let ask = || self.access.probe(limit.saturating_sub(started.elapsed()));
        let answer = self.some_page(prefix, false, From::Start, 1, ask).await?;
        if answer.is_empty() && !prefix.is_empty() {
            return Err(StoreError::NotFound {
                what: self.client.what(prefix),
                advice: ": the bucket can be listed but has no key below this prefix; check 'source' and 'path'",
            });
        }
        // Rights to list and to read are separate: find out now, not at the pod's first read.
        let Some(key) = answer.first_key().filter(|key| is_path(key)) else { return Ok(()) };
        let left = self.access.probe(limit.saturating_sub(started.elapsed()));
        match self.object(key, left).await {
            Ok(_) => Ok(()),
            // With a key for the objects it may be that one: the error itself says so.
            Err(StoreError::Denied { .. }) if self.access.credentials().customer_key().is_none() => {
                Err(StoreError::Denied {
                    what: self.client.what(prefix),
                    why: format!(
                        "the bucket can be listed but {} not be read: grant {}",
                        show(key),
                        self.store.right_to_read()
                    ),
                })
            }
            Err(e) => Err(e),
        }
    }

    async fn examine(&self, limit: Duration) -> Vec<Examined> {
        examine(&self.client, limit, self.check(limit)).await
    }
}

/// Step by step, the last of which is `check`.
async fn examine(
    client: &Client,
    limit: Duration,
    check: impl Future<Output = Result<(), StoreError>>,
) -> Vec<Examined> {
    let mut examined = Vec::new();
    let mut say = |step, result: Result<String, String>| {
        let works = result.is_ok();
        examined.push(Examined { step, result });
        works
    };
    if let Some(found) = client.resolve(limit).await
        && !say(Step::Name, found)
    {
        return examined;
    }
    let clock = match client.hello(limit).await {
        Err(why) => {
            say(Step::Connection, Err(why));
            return examined;
        }
        Ok(hello) => {
            say(Step::Connection, Ok(format!("answers after {} ms", hello.took.as_millis())));
            hello.ahead_s
        }
    };
    if let Some(ahead) = clock {
        let text = format!(
            "this node's is {} s {} the store's",
            ahead.abs(),
            if ahead < 0 { "behind" } else { "before" }
        );
        say(Step::Clock, if ahead.unsigned_abs() <= SKEW_MAX_S { Ok(text) } else { Err(text) });
    }
    let checked = check.await;
    say(Step::Access, checked.map(|()| "may list and read".to_owned()).map_err(|e| e.to_string()));
    examined
}
