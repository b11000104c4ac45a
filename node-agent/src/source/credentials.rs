//! A source and what it is asked with, which may be exchanged while volumes are mounted: keys are rotated, session
//! tokens expire. A question with a token that has expired waits for the next one, as for a store that does not answer.
//!
//! A question is asked once for all volumes of the scope, so it waits as long as the most patient of them. One that
//! waits less gives up on its own ([`CredentialedSource::give_up`]), and leaves the question to the others.

use crate::source::health::Health;
use bytes::Bytes;
use futures::future::BoxFuture;
use futures::{FutureExt, StreamExt};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;
use store::{ByteStream, Entry, Page, Source, StoreError, Version};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::time::Instant;
use volume::Credentials;

/// Longer than the volume's own `storeTimeout`: should the question end at that very moment, its error says more.
const GRACE: Duration = Duration::from_secs(1);
/// A token may be good again without a renewed secret (a clock was set right): one of all who wait asks, so often.
const AGAIN: Duration = Duration::from_secs(10);

/// Opens the source with these credentials, for questions that may take so long.
pub(crate) type Opener = dyn Fn(&Credentials, Duration) -> Result<Arc<dyn Source>, StoreError> + Send + Sync;

#[derive(Clone)]
struct Current {
    source: Arc<dyn Source>,
    /// How long `source` asks before it gives up. It is not opened anew to ask for a shorter time.
    patience: Duration,
    credentials: Credentials,
    /// The keys are no longer those that name the scope.
    rotated: bool,
    /// The last volume is gone: no publish will bring a secret.
    over: bool,
}

/// Shared by all who read from the scope. Clones are the same one.
#[derive(Clone)]
pub(crate) struct CredentialedSource {
    state: Arc<watch::Sender<Current>>,
    open: Arc<Opener>,
    /// Of those who wait for a renewed secret, the one who asks again without.
    turn: Arc<Semaphore>,
    again: Duration,
    /// For people.
    shown: String,
    health: Arc<Health>,
}

impl CredentialedSource {
    /// `patience`: the first volume's `storeTimeout`.
    pub(crate) fn new(
        open: Arc<Opener>,
        credentials: Credentials,
        patience: Duration,
        shown: String,
        health: Arc<Health>,
    ) -> Result<Self, StoreError> {
        let source = open(&credentials, patience)?;
        let state =
            watch::Sender::new(Current { source, patience, credentials, rotated: false, over: false });
        let (state, turn) = (Arc::new(state), Arc::new(Semaphore::new(1)));
        Ok(Self { state, open, turn, again: AGAIN, shown, health })
    }

    /// Of the same identity: key and secret are those that name this scope.
    pub(crate) fn replace(&self, credentials: Credentials) -> Result<(), StoreError> {
        self.exchange(credentials, false)
    }

    /// Keys that took the place of those that name this scope.
    pub(crate) fn rotate(&self, credentials: Credentials) -> Result<(), StoreError> {
        self.exchange(credentials, true)
    }

    fn exchange(&self, credentials: Credentials, rotated: bool) -> Result<(), StoreError> {
        let mut failed = None;
        self.state.send_modify(|asked| match (self.open)(&credentials, asked.patience) {
            Ok(source) => {
                let patience = asked.patience;
                *asked = Current { source, patience, credentials, rotated, over: false };
            }
            Err(error) => failed = Some(error),
        });
        failed.map_or(Ok(()), Err)
    }

    /// A volume waits so long. Questions that are under way go on for it.
    pub(crate) fn wait_for(&self, patience: Duration) -> Result<(), StoreError> {
        let mut failed = None;
        self.state.send_if_modified(|asked| {
            let again = std::mem::replace(&mut asked.over, false);
            if asked.patience >= patience {
                return again;
            }
            match (self.open)(&asked.credentials, patience) {
                Ok(source) => (asked.source, asked.patience) = (source, patience),
                Err(error) => failed = Some(error),
            }
            true
        });
        failed.map_or(Ok(()), Err)
    }

    /// Returns when a volume that waits for `own` has waited long enough, if questions take longer than that: its own
    /// end by themselves. `begun`: when it began to wait, or when an answer last came nearer.
    pub(crate) async fn give_up(&self, own: Duration, begun: impl Fn() -> Instant) {
        let mut changes = self.state.subscribe();
        loop {
            let longer = changes.borrow_and_update().patience > own;
            let until = begun() + own + GRACE;
            if longer && until <= Instant::now() {
                return;
            }
            let changed = async {
                if changes.changed().await.is_err() {
                    std::future::pending::<()>().await; // it lives as long as we do
                }
            };
            match longer {
                true => drop(tokio::time::timeout_at(until, changed).await),
                false => changed.await,
            }
        }
    }

    /// The keys with which the source is asked are newer than those that name the scope.
    pub(crate) fn note_rotated(&self) {
        self.state.send_modify(|asked| asked.rotated = true);
    }

    /// A question that waits for a secret gets an error.
    pub(crate) fn end(&self) {
        self.state.send_modify(|asked| asked.over = true);
    }

    /// Returns when the last volume is gone: no reader waits for an answer then.
    pub(crate) async fn ended(&self) {
        let mut changes = self.state.subscribe();
        if changes.wait_for(|asked| asked.over).await.is_err() {
            std::future::pending::<()>().await; // it lives as long as we do
        }
    }

    pub(crate) fn is_over(&self) -> bool {
        self.state.borrow().over
    }

    pub(crate) fn is_rotated(&self) -> bool {
        self.state.borrow().rotated
    }

    /// For a probe, which waits for no renewed secret.
    pub(crate) fn current(&self) -> Arc<dyn Source> {
        self.state.borrow().source.clone()
    }

    pub(crate) fn has(&self, credentials: &Credentials) -> bool {
        self.state.borrow().credentials == *credentials
    }

    /// Has somebody come who waits longer than this question, and is there time left?
    fn is_waited_for(&self, asked_for: Duration, begun: Instant) -> bool {
        let Current { patience, over, .. } = *self.state.borrow();
        !over && patience > asked_for && begun.elapsed() < patience
    }

    /// Asks; should the token have expired, again with the next one.
    async fn ask<'a, T>(
        &self,
        question: impl Fn(Arc<dyn Source>) -> BoxFuture<'a, Result<T, StoreError>>,
    ) -> Result<T, StoreError> {
        let begun = Instant::now();
        let mut changes = self.state.subscribe();
        let (mut waited, mut turn) = (false, None);
        loop {
            // Before the question: what comes while it is asked is a change.
            let Current { source, patience, over, .. } = changes.borrow_and_update().clone();
            match question(source).await {
                Err(error @ StoreError::Expired { .. }) if over => return Err(error),
                Err(error @ StoreError::Expired { .. }) => {
                    if !std::mem::replace(&mut waited, true) {
                        tracing::warn!(source = %self.shown, %error, "waiting for a renewed secret");
                    }
                    self.health.fails(&error.to_string());
                    drop(turn.take());
                    match tokio::time::timeout_at(begun + patience, self.renewed(&mut changes)).await {
                        Ok(mine) => turn = mine,
                        Err(_) => return Err(error),
                    }
                }
                Err(StoreError::Unavailable { .. }) if self.is_waited_for(patience, begun) => {}
                answer => {
                    if waited && answer.is_ok() {
                        self.health.works();
                    }
                    if turn.is_some() && answer.is_ok() {
                        self.state.send_modify(|_| {}); // the others, too
                    }
                    return answer;
                }
            }
        }
    }

    /// Returns when there is a renewed secret. Some: there is none, but it is the caller's turn to ask again.
    async fn renewed(&self, changes: &mut watch::Receiver<Current>) -> Option<OwnedSemaphorePermit> {
        let turn = async {
            let turn = self.turn.clone().acquire_owned().await.ok();
            tokio::time::sleep(self.again).await;
            turn
        };
        tokio::select! {
            biased;
            _ = changes.changed() => None,
            turn = turn => turn,
        }
    }

    /// Exactly `range` of this version, whatever tokens expire meanwhile.
    pub(crate) async fn get(
        &self,
        path: &[u8],
        version: &Version,
        range: Range<u64>,
    ) -> Result<ByteStream, StoreError> {
        let (begun, patience) = (Instant::now(), self.state.borrow().patience);
        let rest = Rest {
            source: self.clone(),
            path: path.to_vec(),
            version: version.clone(),
            range,
            begun,
            patience,
        };
        let first = rest.get().await?;
        let parts = futures::stream::unfold((Some(first), rest), |(stream, mut rest)| async move {
            let mut stream: ByteStream = stream?;
            loop {
                match stream.next().await? {
                    Ok(chunk) => {
                        rest.range.start += chunk.len() as u64;
                        return Some((Ok::<Bytes, StoreError>(chunk), (Some(stream), rest)));
                    }
                    Err(error) if rest.may_go_on(&error) => match rest.get().await {
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
    source: CredentialedSource,
    path: Vec<u8>,
    version: Version,
    range: Range<u64>,
    begun: Instant,
    /// For which it was asked.
    patience: Duration,
}

impl Rest {
    fn may_go_on(&self, error: &StoreError) -> bool {
        match error {
            StoreError::Expired { .. } => true,
            StoreError::Unavailable { .. } => self.source.is_waited_for(self.patience, self.begun),
            _ => false,
        }
    }

    async fn get(&self) -> Result<ByteStream, StoreError> {
        let Self { path, version, range, .. } = self;
        self.source.ask(|source| async move { source.get(path, version, range.clone()).await }.boxed()).await
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

    /// Never answers, and is given up when its time is over.
    #[derive(Debug)]
    struct Silent(Duration);

    #[async_trait::async_trait]
    impl Source for Silent {
        async fn list(&self, _: &[u8], _: Option<&str>) -> Result<Page, StoreError> {
            tokio::time::sleep(self.0).await;
            let cause = "silent".to_owned();
            Err(StoreError::Unavailable {
                what: "x".into(),
                waited: self.0,
                queued: Duration::ZERO,
                attempts: 1,
                cause,
            })
        }
        async fn head(&self, _: &[u8]) -> Result<Option<Entry>, StoreError> {
            self.list(b"", None).await.map(|_| None)
        }
        async fn get(&self, _: &[u8], _: &Version, range: Range<u64>) -> Result<ByteStream, StoreError> {
            let chunk = Bytes::from(vec![7; (range.end - range.start) as usize / 2]);
            let given_up = Self(self.0);
            let rest = futures::stream::once(async move { Err(given_up.list(b"", None).await.unwrap_err()) });
            Ok(futures::stream::iter([Ok(chunk)]).chain(rest).boxed())
        }
        async fn check(&self, _: Duration) -> Result<(), StoreError> {
            Ok(())
        }
    }

    type Told = tokio::sync::mpsc::UnboundedReceiver<crate::source::health::Change>;

    fn credentialed(open: Arc<Opener>, patience: Duration) -> (CredentialedSource, Told) {
        let (tell, told) = tokio::sync::mpsc::unbounded_channel();
        let health = Health::new(volume::ScopeId::parse(&"0".repeat(32)).unwrap(), tell);
        let with =
            CredentialedSource::new(open, Credentials::anonymous(), patience, "s".into(), Arc::new(health));
        (with.unwrap(), told)
    }

    /// Its first token has expired; the next is good.
    fn tokened(patience: Duration) -> (CredentialedSource, Arc<Mutex<Vec<Range<u64>>>>, Told) {
        let asked: Arc<Mutex<Vec<Range<u64>>>> = Arc::default();
        let (log, opened) = (asked.clone(), std::sync::atomic::AtomicBool::new(false));
        let open = move |_: &Credentials, _: Duration| {
            let renewed = opened.swap(true, std::sync::atomic::Ordering::SeqCst);
            Ok(Arc::new(Tokened { expired: !renewed, asked: log.clone() }) as Arc<dyn Source>)
        };
        let (with, told) = credentialed(Arc::new(open), patience);
        (with, asked, told)
    }

    fn silent(patience: Duration) -> (CredentialedSource, Told) {
        credentialed(Arc::new(|_: &Credentials, patience| Ok(Arc::new(Silent(patience)) as _)), patience)
    }

    const HOUR: Duration = Duration::from_secs(3600);
    const LONG: Duration = Duration::from_secs(60);
    const SHORT: Duration = Duration::from_millis(50);
    const LONGER: Duration = Duration::from_millis(400);

    #[tokio::test]
    async fn a_question_goes_on_for_a_volume_that_came_later_and_waits_longer() {
        let (with, _told) = silent(SHORT);
        let begun = Instant::now();
        let later = async { with.wait_for(LONGER).unwrap() };
        let (listed, ()) = tokio::join!(with.list(b"", None), later);
        assert!(matches!(listed, Err(StoreError::Unavailable { .. })));
        assert!(begun.elapsed() >= LONGER, "{:?}", begun.elapsed());
        // One that waits less changes nothing for the others.
        with.wait_for(SHORT).unwrap();
        let begun = Instant::now();
        with.list(b"", None).await.unwrap_err();
        assert!(begun.elapsed() >= LONGER, "{:?}", begun.elapsed());
    }

    #[tokio::test]
    async fn half_a_body_goes_on_for_a_volume_that_waits_longer() {
        let (with, _told) = silent(SHORT);
        let version = Version("v".into());
        let mut body = with.get(b"a", &version, 0..64).await.unwrap();
        assert_eq!(body.next().await.unwrap().unwrap().len(), 32);
        with.wait_for(HOUR).unwrap();
        assert_eq!(body.next().await.unwrap().unwrap().len(), 16);
    }

    #[tokio::test]
    async fn a_volume_that_waits_less_gives_up_by_itself_and_only_where_others_wait_longer() {
        let (with, _told) = silent(SHORT);
        let begun = Instant::now();
        // Its questions end by themselves.
        let alone = tokio::time::timeout(GRACE + LONGER, with.give_up(SHORT, || begun)).await;
        assert!(alone.is_err());
        // Somebody comes who makes them last.
        let (begun, joined) = (Instant::now(), async { with.wait_for(HOUR).unwrap() });
        tokio::join!(with.give_up(SHORT, || begun), joined);
        assert!(begun.elapsed() >= SHORT + GRACE);
        // As long as the answer comes nearer it waits.
        let nearer = Instant::now() + LONGER;
        with.give_up(SHORT, || nearer.min(Instant::now())).await;
        assert!(nearer.elapsed() >= SHORT + GRACE);
    }

    #[tokio::test]
    async fn whoever_asks_with_a_token_that_expired_goes_on_with_the_next_where_it_stopped() {
        let (with, asked, mut told) = tokened(Duration::from_secs(60));
        let version = Version("v".into());
        let mut stream = with.get(b"a", &version, 0..30).await.unwrap();
        assert_eq!(stream.next().await.unwrap().unwrap()[0], 0);
        // In this order, on the one thread: both wait when the token is renewed.
        let rest = stream.map(|chunk| chunk.unwrap()[0]).collect::<Vec<u8>>();
        let renewing = async { with.replace(Credentials::anonymous()).unwrap() };
        let (rest, listed, ()) = tokio::join!(rest, with.list(b"", None), renewing);
        assert_eq!(rest, [10, 20]);
        listed.unwrap();
        assert_eq!(*asked.lock().unwrap(), [0..30, 10..30, 10..30]);
        // As of a store that is away: that it is, and that it is over.
        let away = std::iter::from_fn(|| told.try_recv().ok()).map(|(_, why)| why.is_some());
        assert_eq!(away.collect::<Vec<_>>(), [true, false]);
    }

    /// Its token is good from some question on, as it is where a clock was wrong.
    #[derive(Debug)]
    struct Wavering(std::sync::atomic::AtomicU32);

    #[async_trait::async_trait]
    impl Source for Wavering {
        async fn list(&self, _: &[u8], _: Option<&str>) -> Result<Page, StoreError> {
            match self.0.fetch_add(1, std::sync::atomic::Ordering::SeqCst) {
                ..50 => Err(expired()),
                _ => Ok(Page::default()),
            }
        }
        async fn head(&self, _: &[u8]) -> Result<Option<Entry>, StoreError> {
            Ok(None)
        }
        async fn get(&self, _: &[u8], _: &Version, _: Range<u64>) -> Result<ByteStream, StoreError> {
            Err(expired())
        }
        async fn check(&self, _: Duration) -> Result<(), StoreError> {
            Ok(())
        }
    }

    #[tokio::test]
    async fn a_token_that_is_good_again_needs_no_renewed_secret() {
        const WAITING: u32 = 20;
        let source = Arc::new(Wavering(0.into()));
        let opened = source.clone();
        let (with, mut told) =
            credentialed(Arc::new(move |_: &Credentials, _| Ok(opened.clone() as _)), HOUR);
        let with = CredentialedSource { again: Duration::from_millis(2), ..with };
        let lists = (0..WAITING).map(|_| with.list(b"", None));
        let lists =
            tokio::time::timeout(LONG, futures::future::join_all(lists)).await.expect("one asks again");
        lists.into_iter().for_each(|listed| drop(listed.unwrap()));
        // Each asked, then one at a time, and in the end each of those who had not yet had an answer.
        assert_eq!(source.0.load(std::sync::atomic::Ordering::SeqCst), 50 + WAITING);
        let away = std::iter::from_fn(|| told.try_recv().ok()).map(|(_, why)| why.is_some());
        assert_eq!(away.collect::<Vec<_>>(), [true, false]);
    }

    #[tokio::test]
    async fn a_token_that_nobody_renews_is_an_error_in_the_end() {
        let patience = Duration::from_millis(50);
        let (with, _, _told) = tokened(patience);
        let begun = Instant::now();
        assert!(matches!(with.list(b"", None).await, Err(StoreError::Expired { .. })));
        assert!(begun.elapsed() >= patience);
    }

    #[tokio::test]
    async fn nobody_waits_for_a_secret_of_a_volume_that_is_gone() {
        let (with, _, _told) = tokened(HOUR);
        let ending = async { with.end() };
        let (listed, ()) = tokio::join!(with.list(b"", None), ending);
        assert!(matches!(listed, Err(StoreError::Expired { .. })));
    }
}
