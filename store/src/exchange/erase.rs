//! The directory of a volume in a bucket, removed: every key below its prefix, and uploads that nobody completed.
//!
//! ```text
//!   pass ── a page of keys ► below the prefix? beyond the page before? may it go on? ► deleted in batches ┐
//!    ▲         ▲                                                                                         │
//!    │         └───────────────── the next page ◄────────────────────────────────────────────────────────┤ none
//!    │                                                                                                   ▼
//!    └── something was there ◄── a page of uploads ► aborted ── the next page … ◄────────────────────────┘
//!         nothing was there ► done
//! ```
//!
//! What is believed is a pass that finds nothing, not that something was acknowledged. Nothing is kept between two passes but
//! numbers, so that it can be ended at any moment and begun anew.

use super::client::{Ask, Client, Opens, Sends, content, read_all};
use super::{Bucket, From, uploads};
use crate::dialect::batch::{self, Batch};
use crate::dialect::writes::{self, ListedUpload, UploadsPage, Writes};
use crate::keys::show;
use crate::observe::RetryCause;
use crate::retry::Fault;
use crate::{PAGE_ENTRIES, StoreError};
use futures::future::BoxFuture;
use futures::{FutureExt, StreamExt};
use http::header::{CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue};
use http::{Method, StatusCode};
use reqwest::Url;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Duration;
use tokio::time::timeout;

/// Of a page; as many are sent at once as a page has.
const BATCH_KEYS: usize = 250;
const REQUESTS_AT_ONCE: usize = 4;
/// Twice what an answer about a batch takes, of keys of 1,024 bytes with every byte encoded.
const BATCH_ANSWER_BYTES_MAX: usize = 2 << 20;
/// Something was there in each: somebody writes, or the store deletes nothing.
const PASSES_MAX: u32 = 5;
/// Once it is allowed, a page of names has gone after so long, or is left for the next time: whoever forbids it knows when nothing
/// of it is under way any more.
pub const ERASE_PAGE_LIMIT: Duration = Duration::from_secs(30);
const MD5: HeaderName = HeaderName::from_static("content-md5");

/// How far it is. Counts what the store has acknowledged.
#[derive(Debug, Default)]
pub struct Erased {
    objects: AtomicU64,
    uploads: AtomicU64,
    /// Uploads whose keys no request can name: their parts stay.
    left: AtomicU64,
    keeps_versions: AtomicBool,
}

impl Erased {
    pub fn objects(&self) -> u64 {
        self.objects.load(Relaxed)
    }

    /// Unfinished uploads that were aborted.
    pub fn uploads(&self) -> u64 {
        self.uploads.load(Relaxed)
    }

    /// Unfinished uploads that could not be.
    pub fn left(&self) -> u64 {
        self.left.load(Relaxed)
    }

    /// The bucket is versioned: what was deleted is hidden, and still there as older versions.
    pub fn keeps_versions(&self) -> bool {
        self.keeps_versions.load(Relaxed)
    }
}

/// Whether it may, at this moment.
pub type MayGoOn = dyn Fn() -> BoxFuture<'static, bool> + Send + Sync;

/// Removes all that is below a source's prefix.
pub struct Eraser {
    bucket: Bucket,
    store: Arc<dyn Writes>,
}

impl std::fmt::Debug for Eraser {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Eraser({})", self.client().what(self.prefix()))
    }
}

/// The answer to a removal, and to one that found nothing.
fn removed(_: &Url, status: StatusCode, _: &HeaderMap) -> bool {
    status.is_success() || status == StatusCode::NOT_FOUND
}

/// Can it be a part of a URL? What reads a URL leaves its dots out, and asks for another object.
fn is_in_urls(key: &[u8]) -> bool {
    !key.split(|byte| *byte == b'/').any(|segment| matches!(segment, b"." | b".."))
}

impl Eraser {
    /// None: the bucket's root, of which no volume is the owner.
    pub(crate) fn of(bucket: Bucket) -> Option<Self> {
        let store = bucket.store.clone().writes()?;
        let is_directory = bucket.prefix.0.len() > 1 && bucket.prefix.0.ends_with('/');
        is_directory.then_some(Self { bucket, store })
    }

    fn client(&self) -> &Client {
        &self.bucket.client
    }

    fn prefix(&self) -> &[u8] {
        self.bucket.prefix.0.as_bytes()
    }

    /// Returns when nothing is left. May be ended at any moment, and begun anew; two at once are no harm.
    ///
    /// `may_go_on` is asked before each page; what it allows is done within [`ERASE_PAGE_LIMIT`], or given up. False: it has said no.
    pub async fn erase(&self, erased: &Erased, may_go_on: &MayGoOn) -> Result<bool, StoreError> {
        for _ in 0..PASSES_MAX {
            let objects = self.objects(erased, may_go_on).await.map_err(with_rights)?;
            let Some(objects) = objects else { return Ok(false) };
            let uploads = self.uploads(erased, may_go_on).await.map_err(with_rights)?;
            let Some(uploads) = uploads else { return Ok(false) };
            if objects + uploads == 0 {
                return Ok(true);
            }
        }
        let why = "there is always something again: somebody still writes below it, or the store does not delete what it says";
        Err(self.malformed(why))
    }

    fn malformed(&self, why: impl Into<String>) -> StoreError {
        StoreError::malformed(&self.client().what(self.prefix()), why)
    }

    /// Nothing of a page goes unless all of it is ours.
    fn check<'k>(&self, keys: impl Iterator<Item = &'k [u8]>) -> Result<(), StoreError> {
        let mut stray = keys.filter(|key| !key.starts_with(self.prefix()));
        stray.next().map_or(Ok(()), |key| {
            Err(self.malformed(format!("its listing has {}, which is not below it", show(key))))
        })
    }

    /// What was allowed a moment ago.
    async fn in_time(&self, work: impl Future<Output = Result<(), StoreError>>) -> Result<(), StoreError> {
        let late = |_| StoreError::Unavailable {
            what: self.client().what(self.prefix()),
            waited: ERASE_PAGE_LIMIT,
            queued: Duration::ZERO,
            attempts: 1,
            cause: "one page of its names takes longer than that".into(),
        };
        timeout(ERASE_PAGE_LIMIT, work).await.map_err(late)?
    }

    /// How many were there. None: it may not go on.
    async fn objects(&self, erased: &Erased, may_go_on: &MayGoOn) -> Result<Option<u64>, StoreError> {
        let (mut found, mut token, mut last) = (0, None::<String>, Vec::new());
        loop {
            let from = token.as_deref().map_or(From::Start, From::Token);
            let ask = || self.bucket.access.question();
            let page = self.bucket.some_page(self.prefix(), false, from, PAGE_ENTRIES, ask).await?;
            let (keys, next) = page.into_keys().map_err(|why| self.malformed(why))?;
            self.check(keys.iter().map(Vec::as_slice))?;
            let greatest = keys.iter().max().cloned().unwrap_or_default();
            if !keys.is_empty() && greatest <= last {
                return Err(self.malformed("its listing goes round in circles"));
            }
            found += keys.len() as u64;
            last = last.max(greatest);
            if !keys.is_empty() {
                if !may_go_on().await {
                    return Ok(None);
                }
                self.in_time(self.delete(keys, erased)).await?;
            }
            match next {
                Some(next) if Some(&next) != token.as_ref() => token = Some(next),
                Some(_) => return Err(self.malformed("its listing goes round in circles")),
                None => return Ok(Some(found)),
            }
        }
    }

    async fn delete(&self, keys: Vec<Vec<u8>>, erased: &Erased) -> Result<(), StoreError> {
        let (batched, single): (Vec<_>, Vec<_>) = keys.into_iter().partition(|key| batch::can_hold(key));
        self.all(batched.chunks(BATCH_KEYS).map(|keys| self.delete_batch(keys, erased).boxed()).collect())
            .await?;
        self.all(single.iter().map(|key| self.delete_one(key, erased).boxed()).collect()).await
    }

    /// A few at a time, until one fails.
    async fn all<'w>(&self, work: Vec<BoxFuture<'w, Result<(), StoreError>>>) -> Result<(), StoreError> {
        let mut under_way = futures::stream::iter(work).buffer_unordered(REQUESTS_AT_ONCE);
        while let Some(done) = under_way.next().await {
            done?;
        }
        Ok(())
    }

    async fn delete_batch(&self, keys: &[Vec<u8>], erased: &Erased) -> Result<(), StoreError> {
        let what = self.client().what(self.prefix());
        let Batch { text, md5 } = batch::request(keys);
        let url = batch::url(&self.store.place().base);
        let mut headers = HeaderMap::new();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/xml"));
        headers.insert(MD5, HeaderValue::try_from(md5).expect("Base64 can be sent"));
        let attempt = async |patience| {
            let headers = headers.clone();
            let ask = Ask { method: Method::POST, url: &url, headers, takes: content, opens: Opens::Nothing };
            let response = self.client().send_with(ask, Sends::Text(&text), &what, patience).await?;
            let body = read_all(response, BATCH_ANSWER_BYTES_MAX, patience).await?;
            let said = batch::answer(&body).map_err(|why| Fault::retry(RetryCause::Malformed, why))?;
            if let Some(refused) = said.refused {
                return Err(refused.fault(&what));
            }
            Ok((said, body.len() as u64))
        };
        let question = self.bucket.access.question();
        let said = self.client().ask("delete", &what, question, |patience| attempt(patience).boxed()).await?;
        // It may say anything, and not more than it was asked.
        erased.objects.fetch_add(said.deleted.min(keys.len() as u64), Relaxed);
        erased.keeps_versions.fetch_or(said.has_markers, Relaxed);
        Ok(())
    }

    /// Where a batch cannot hold the key.
    async fn delete_one(&self, key: &[u8], erased: &Erased) -> Result<(), StoreError> {
        let what = self.client().what(key);
        if !is_in_urls(key) {
            let why = "no request can name this key: delete it by other means".into();
            return Err(StoreError::Unsupported { what, why });
        }
        self.remove(&what, &self.store.object(key)).await?;
        erased.objects.fetch_add(1, Relaxed);
        Ok(())
    }

    async fn remove(&self, what: &str, url: &Url) -> Result<(), StoreError> {
        let attempt = async |patience| {
            let headers = HeaderMap::new();
            let ask = Ask { method: Method::DELETE, url, headers, takes: removed, opens: Opens::Nothing };
            self.client().send(ask, what, patience).await.map(|_| ((), 0))
        };
        let question = self.bucket.access.question();
        self.client().ask("delete", what, question, |patience| attempt(patience).boxed()).await
    }

    async fn abort(&self, upload: ListedUpload, erased: &Erased) -> Result<(), StoreError> {
        let ListedUpload { key, id, .. } = upload;
        let what = self.client().what(&key);
        self.remove(&what, &writes::upload(&self.store.object(&key), &id)).await?;
        erased.uploads.fetch_add(1, Relaxed);
        Ok(())
    }

    /// How many were there that can be aborted. None: it may not go on.
    async fn uploads(&self, erased: &Erased, may_go_on: &MayGoOn) -> Result<Option<u64>, StoreError> {
        let (mut found, mut left, mut after) = (0, 0, None::<(Vec<u8>, String)>);
        loop {
            let marker = after.as_ref().map(|(key, id)| (key.as_slice(), id.as_str()));
            let question = self.bucket.access.question();
            let page = uploads::page(self.client(), &*self.store, self.prefix(), marker, question).await?;
            let UploadsPage { uploads, next } = page.page;
            self.check(uploads.iter().map(|upload| upload.key.as_slice()))?;
            let (named, unnamed): (Vec<_>, Vec<_>) =
                uploads.into_iter().partition(|upload| is_in_urls(&upload.key));
            found += named.len() as u64;
            left += unnamed.len() as u64;
            if !named.is_empty() {
                if !may_go_on().await {
                    return Ok(None);
                }
                let aborts = named.into_iter().map(|upload| self.abort(upload, erased).boxed());
                self.in_time(self.all(aborts.collect())).await?;
            }
            match next {
                Some(next) if Some(&next) > after.as_ref() => after = Some(next),
                Some(_) => return Err(self.malformed("the listing of its uploads goes round in circles")),
                None => break,
            }
        }
        erased.left.store(left, Relaxed);
        Ok(Some(found))
    }
}

/// What it takes, for whoever is refused one of them.
fn with_rights(error: StoreError) -> StoreError {
    match error {
        StoreError::Denied { what, why } => {
            let rights = "deleting a volume's directory takes s3:ListBucket, s3:DeleteObject, s3:ListBucketMultipartUploads and \
                          s3:AbortMultipartUpload";
            StoreError::Denied { what, why: format!("{why}; {rights}") }
        }
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_url_would_turn_into_another_key_is_never_put_into_one() {
        for key in [&b"a/../b"[..], b"..", b"a/.", b"./a", b"a/..", b"a/./b"] {
            assert!(!is_in_urls(key), "{key:?}");
        }
        for key in [&b"a//b"[..], b"a/", b"a/...", b"a/%2e%2e/b", b"a/\x01", b"\xff"] {
            assert!(is_in_urls(key), "{key:?}");
            let mut url = Url::parse("http://h/bucket/").unwrap();
            url.set_path(&format!("/bucket/{}", crate::keys::encode_path(key)));
            let decoded: Vec<u8> = percent_encoding::percent_decode_str(url.path()).collect();
            assert_eq!(decoded, [&b"/bucket/"[..], key].concat());
        }
    }
}
