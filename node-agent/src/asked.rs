//! A source and what it is asked with, which may be exchanged while volumes are mounted: keys are rotated, session tokens
//! expire. Whoever asks with a token that has expired waits for the next one, as for a store that does not answer.

use crate::health::Health;
use bytes::Bytes;
use futures::future::BoxFuture;
use futures::{FutureExt, StreamExt};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;
use store::{ByteStream, Entry, Page, Source, StoreError, Version};
use tokio::sync::watch;
use tokio::time::Instant;
use volume::Credentials;

#[derive(Clone)]
struct Asked {
    source: Arc<dyn Source>,
    credentials: Credentials,
    /// The keys are no longer those that name the scope.
    rotated: bool,
    /// The last volume is gone: nobody will bring a secret.
    over: bool,
}

/// Shared by all who read from the scope. Clones are the same one.
#[derive(Clone)]
pub(crate) struct AskedWith {
    current: Arc<watch::Sender<Asked>>,
    /// Longest wait for a new token: the volume's `storeTimeout`.
    patience: Duration,
    /// For people.
    shown: String,
    health: Arc<Health>,
}

impl AskedWith {
    pub(crate) fn new(
        source: Arc<dyn Source>,
        credentials: Credentials,
        patience: Duration,
        shown: String,
        health: Arc<Health>,
    ) -> Self {
        let current = watch::Sender::new(Asked { source, credentials, rotated: false, over: false });
        Self { current: Arc::new(current), patience, shown, health }
    }

    /// Of the same identity: key and secret are those that name this scope.
    pub(crate) fn replace(&self, source: Arc<dyn Source>, credentials: Credentials) {
        self.current.send_replace(Asked { source, credentials, rotated: false, over: false });
    }

    /// Keys that took the place of those that name this scope.
    pub(crate) fn rotate(&self, source: Arc<dyn Source>, credentials: Credentials) {
        self.current.send_replace(Asked { source, credentials, rotated: true, over: false });
    }

    /// The keys with which the source is asked are newer than those that name the scope.
    pub(crate) fn note_rotated(&self) {
        self.current.send_modify(|asked| asked.rotated = true);
    }

    /// Whoever waits for a secret gets an error.
    pub(crate) fn end(&self) {
        self.current.send_modify(|asked| asked.over = true);
    }

    pub(crate) fn is_rotated(&self) -> bool {
        self.current.borrow().rotated
    }

    pub(crate) fn has(&self, credentials: &Credentials) -> bool {
        self.current.borrow().credentials == *credentials
    }

    /// For a first contact, which waits for no renewed secret.
    pub(crate) fn source(&self) -> Arc<dyn Source> {
        self.current.borrow().source.clone()
    }

    /// Asks; should the token have expired, again with the next one.
    async fn ask<'a, T>(
        &self,
        question: impl Fn(Arc<dyn Source>) -> BoxFuture<'a, Result<T, StoreError>>,
    ) -> Result<T, StoreError> {
        let until = Instant::now() + self.patience;
        let mut changes = self.current.subscribe();
        let mut waited = false;
        loop {
            // Before the question: what comes while it is asked is a change.
            let Asked { source, over, .. } = changes.borrow_and_update().clone();
            match question(source).await {
                Err(error @ StoreError::Expired { .. }) if over => return Err(error),
                Err(error @ StoreError::Expired { .. }) => {
                    tracing::warn!(source = %self.shown, %error, "waiting for a renewed secret");
                    self.health.fails(&error.to_string());
                    if tokio::time::timeout_at(until, changes.changed()).await.is_err() {
                        return Err(error);
                    }
                    waited = true;
                }
                answer => {
                    if waited && answer.is_ok() {
                        self.health.works();
                    }
                    return answer;
                }
            }
        }
    }

    /// Exactly `range` of this version, whatever tokens expire meanwhile.
    pub(crate) async fn get(
        &self,
        path: &[u8],
        version: &Version,
        range: Range<u64>,
    ) -> Result<ByteStream, StoreError> {
        let rest = Rest { asked: self.clone(), path: path.to_vec(), version: version.clone(), range };
        let first = rest.get().await?;
        let parts = futures::stream::unfold((Some(first), rest), |(stream, mut rest)| async move {
            let mut stream: ByteStream = stream?;
            loop {
                match stream.next().await? {
                    Ok(chunk) => {
                        rest.range.start += chunk.len() as u64;
                        return Some((Ok::<Bytes, StoreError>(chunk), (Some(stream), rest)));
                    }
                    Err(StoreError::Expired { .. }) => match rest.get().await {
                        Ok(again) => stream = again,
                        Err(error) => return Some((Err(error), (None, rest))),
                    },
                    Err(error) => return Some((Err(error), (None, rest))),
                }
            }
        });
        Ok(parts.boxed())
    }

    pub(crate) async fn list(&self, dir: &[u8], token: Option<&str>) -> Result<Page, StoreError> {
        self.ask(|source| async move { source.list(dir, token).await }.boxed()).await
    }

    pub(crate) async fn head(&self, path: &[u8]) -> Result<Option<Entry>, StoreError> {
        self.ask(|source| async move { source.head(path).await }.boxed()).await
    }
}

/// What a reader has not been given yet.
struct Rest {
    asked: AskedWith,
    path: Vec<u8>,
    version: Version,
    range: Range<u64>,
}

impl Rest {
    async fn get(&self) -> Result<ByteStream, StoreError> {
        let Self { path, version, range, .. } = self;
        self.asked.ask(|source| async move { source.get(path, version, range.clone()).await }.boxed()).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;

    /// Gives ten bytes a chunk. A token that has expired is good for the first chunk of the first transfer.
    #[derive(Debug)]
    struct Tokened {
        expired: bool,
        asked: Arc<Mutex<Vec<Range<u64>>>>,
    }

    fn expired() -> StoreError {
        StoreError::Expired { what: "x".into(), why: "renew".into() }
    }

    #[async_trait::async_trait]
    impl Source for Tokened {
        async fn list(&self, _: &[u8], _: Option<&str>) -> Result<Page, StoreError> {
            if self.expired { Err(expired()) } else { Ok(Page::default()) }
        }
        async fn head(&self, _: &[u8]) -> Result<Option<Entry>, StoreError> {
            Ok(None)
        }
        async fn get(&self, _: &[u8], _: &Version, range: Range<u64>) -> Result<ByteStream, StoreError> {
            let first = {
                let mut asked = self.asked.lock().unwrap();
                asked.push(range.clone());
                asked.len() == 1
            };
            let chunk = |start: u64| Bytes::from(vec![start as u8; 10]);
            let chunks: Vec<_> = match (self.expired, first) {
                (true, true) => vec![Ok(chunk(range.start)), Err(expired())],
                (true, false) => return Err(expired()),
                (false, _) => range.step_by(10).map(|start| Ok(chunk(start))).collect(),
            };
            Ok(futures::stream::iter(chunks).boxed())
        }
        async fn check(&self, _: Duration) -> Result<(), StoreError> {
            Ok(())
        }
    }

    type Told = tokio::sync::mpsc::UnboundedReceiver<crate::health::Change>;

    fn asked_with(patience: Duration) -> (AskedWith, Arc<Mutex<Vec<Range<u64>>>>, Told) {
        let (tell, told) = tokio::sync::mpsc::unbounded_channel();
        let health = Health::new(volume::ScopeId::parse(&"0".repeat(32)).unwrap(), tell);
        let asked = Arc::new(Mutex::default());
        let old = Arc::new(Tokened { expired: true, asked: asked.clone() });
        (AskedWith::new(old, Credentials::anonymous(), patience, "s".into(), Arc::new(health)), asked, told)
    }

    #[tokio::test]
    async fn whoever_asks_with_a_token_that_expired_goes_on_with_the_next_where_it_stopped() {
        let (with, asked, mut told) = asked_with(Duration::from_secs(60));
        let version = Version("v".into());
        let mut stream = with.get(b"a", &version, 0..30).await.unwrap();
        assert_eq!(stream.next().await.unwrap().unwrap()[0], 0);
        // In this order, on the one thread: both wait when the token is renewed.
        let rest = stream.map(|chunk| chunk.unwrap()[0]).collect::<Vec<u8>>();
        let renewed = Arc::new(Tokened { expired: false, asked: asked.clone() });
        let renewing = async { with.replace(renewed, Credentials::anonymous()) };
        let (rest, listed, ()) = tokio::join!(rest, with.list(b"", None), renewing);
        assert_eq!(rest, [10, 20]);
        listed.unwrap();
        assert_eq!(*asked.lock().unwrap(), [0..30, 10..30, 10..30]);
        // As of a store that is away: that it is, and that it is over.
        let away = std::iter::from_fn(|| told.try_recv().ok()).map(|(_, why)| why.is_some());
        assert_eq!(away.collect::<Vec<_>>(), [true, false]);
    }

    #[tokio::test]
    async fn a_token_that_nobody_renews_is_an_error_in_the_end() {
        let patience = Duration::from_millis(50);
        let (with, _, _told) = asked_with(patience);
        let begun = Instant::now();
        assert!(matches!(with.list(b"", None).await, Err(StoreError::Expired { .. })));
        assert!(begun.elapsed() >= patience);
    }

    #[tokio::test]
    async fn nobody_waits_for_a_secret_of_a_volume_that_is_gone() {
        let (with, _, _told) = asked_with(Duration::from_secs(3600));
        let ending = async { with.end() };
        let (listed, ()) = tokio::join!(with.list(b"", None), ending);
        assert!(matches!(listed, Err(StoreError::Expired { .. })));
    }
}
