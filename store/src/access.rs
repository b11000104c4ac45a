//! What a source is asked with, by all volumes that read it: credentials, which may be exchanged while it is asked (keys
//! are rotated, session tokens expire), and how long an answer is waited for.
//!
//! A question is asked once for all volumes, so it waits as long as the most patient of them, also if that one came
//! later. A volume that waits less gives up on its own ([`Access::give_up`]) and leaves the question to the others. A
//! question whose token has expired waits for the next token, as for a store that does not answer.

use crate::StoreError;
use crate::dispatch::{Lane, NoSlot};
use crate::shares::Turn;
use crate::traffic::{Place, Slot};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::time::{Instant, timeout_at};
use volume::{Credentials, VolumeSpec};

/// Longer than the volume's own `storeTimeout`: should the question end at that very moment, its error says more.
const GRACE: Duration = Duration::from_secs(1);
/// A token may be good again without a renewed secret (a clock was set right): one of all that wait asks, so often.
const AGAIN: Duration = Duration::from_secs(10);

/// Hears that questions wait for a renewed secret.
pub trait ExpiryObserver: Send + Sync {
    /// A question was answered with this error. It waits.
    fn expired(&self, error: &StoreError);
    /// A question that has waited got its answer.
    fn works_again(&self);
}

/// Shared by all that ask one source.
pub struct Access {
    state: watch::Sender<State>,
    /// Of those that wait for a renewed secret, the one that asks again without.
    turn: Arc<Semaphore>,
    again: Duration,
    observer: Option<Box<dyn ExpiryObserver>>,
}

#[derive(Clone)]
struct State {
    credentials: Credentials,
    /// The longest of all volumes.
    store_timeout: Duration,
    /// A publish may bring a renewed secret.
    renewable: bool,
}

impl std::fmt::Debug for Access {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let State { store_timeout, renewable, .. } = *self.state.borrow();
        f.debug_struct("Access")
            .field("store_timeout", &store_timeout)
            .field("renewable", &renewable)
            .finish()
    }
}

impl Access {
    /// `store_timeout`: the first volume's.
    pub fn renewable(
        credentials: Credentials,
        store_timeout: Duration,
        observer: Box<dyn ExpiryObserver>,
    ) -> Arc<Self> {
        Arc::new(Self::new(credentials, store_timeout, Some(observer)))
    }

    /// Of one volume and with these credentials only: an expired token is an error.
    pub fn fixed(spec: &VolumeSpec, credentials: Credentials) -> Arc<Self> {
        Arc::new(Self::new(credentials, spec.parameters.store_timeout, None))
    }

    fn new(
        credentials: Credentials,
        store_timeout: Duration,
        observer: Option<Box<dyn ExpiryObserver>>,
    ) -> Self {
        let state = watch::Sender::new(State { credentials, store_timeout, renewable: observer.is_some() });
        Self { state, turn: Arc::new(Semaphore::new(1)), again: AGAIN, observer }
    }

    /// From the next attempt on, also of questions that are under way.
    pub fn replace(&self, credentials: Credentials) {
        self.state.send_modify(|state| {
            state.credentials = credentials;
            state.renewable = self.observer.is_some();
        });
    }

    /// A volume with this `storeTimeout` has come. Questions that are under way go on for it.
    pub fn wait_for(&self, store_timeout: Duration) {
        self.state.send_if_modified(|state| {
            let again = self.observer.is_some() && !std::mem::replace(&mut state.renewable, true);
            let longer = store_timeout > state.store_timeout;
            state.store_timeout = state.store_timeout.max(store_timeout);
            again || longer
        });
    }

    /// The last volume is gone: a question that waits for a secret gets its error.
    pub fn end(&self) {
        self.state.send_modify(|state| state.renewable = false);
    }

    /// No publish brings a renewed secret: the last volume is gone, or there is just one secret.
    pub fn is_over(&self) -> bool {
        !self.state.borrow().renewable
    }

    /// Returns when the last volume is gone: no reader waits for an answer then.
    pub async fn ended(&self) {
        let mut changes = self.state.subscribe();
        if changes.wait_for(|state| !state.renewable).await.is_err() {
            std::future::pending::<()>().await; // it lives as long as we do
        }
    }

    /// Do these say the same about where to ask? See [`Credentials::hadoop`].
    pub fn asks_where(&self, credentials: &Credentials) -> bool {
        self.state.borrow().credentials.hadoop() == credentials.hadoop()
    }

    pub fn has(&self, credentials: &Credentials) -> bool {
        self.state.borrow().credentials == *credentials
    }

    pub(crate) fn credentials(&self) -> Credentials {
        self.state.borrow().credentials.clone()
    }

    /// Returns when a volume that waits for `own` has waited long enough, if questions take longer than that: its own
    /// end by themselves. `begun`: when it began to wait, or when an answer last came nearer.
    pub async fn give_up(&self, own: Duration, begun: impl Fn() -> Instant) {
        let mut changes = self.state.subscribe();
        loop {
            let longer = changes.borrow_and_update().store_timeout > own;
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
                true => drop(timeout_at(until, changed).await),
                false => changed.await,
            }
        }
    }

    /// Begins a question of the volumes.
    pub fn question(self: &Arc<Self>) -> Question {
        self.begin(None)
    }

    /// Begins one that is given up after `limit`, and that waits for no renewed secret.
    pub(crate) fn probe(self: &Arc<Self>, limit: Duration) -> Question {
        self.begin(Some(limit))
    }

    fn begin(self: &Arc<Self>, limit: Option<Duration>) -> Question {
        let (access, changes) = (self.clone(), self.state.subscribe());
        Question {
            access,
            changes,
            begun: Instant::now(),
            paused: Duration::ZERO,
            limit,
            waits: false,
            turn: None,
        }
    }
}

/// One question, through all its attempts.
pub struct Question {
    access: Arc<Access>,
    /// Since the last attempt began.
    changes: watch::Receiver<State>,
    begun: Instant,
    /// So long it has waited for renewed secrets, all times together: a store cannot make it wait for ever by taking and
    /// refusing a token in turn.
    paused: Duration,
    /// Some: it is a probe.
    limit: Option<Duration>,
    /// For a renewed secret.
    waits: bool,
    turn: Option<OwnedSemaphorePermit>,
}

impl Question {
    /// When to give up. It moves while it is waited for: a volume may come that waits longer.
    pub(crate) fn deadline(&self) -> Instant {
        self.begun + self.paused + self.limit()
    }

    /// How long it may take.
    pub(crate) fn limit(&self) -> Duration {
        self.limit.unwrap_or_else(|| self.store_timeout())
    }

    fn store_timeout(&self) -> Duration {
        self.access.state.borrow().store_timeout
    }

    /// Waits for a slot, until the deadline.
    pub(crate) async fn enter(&self, place: &Place, lane: Lane, turn: Turn) -> Result<Slot, NoSlot> {
        loop {
            let deadline = self.deadline();
            match place.enter(lane, deadline, turn).await {
                Err(_) if self.deadline() > deadline => {}
                entered => return entered,
            }
        }
    }

    /// `work`, until the deadline; None: it has passed.
    pub(crate) async fn in_time<T>(&self, work: impl Future<Output = T>) -> Option<T> {
        tokio::pin!(work);
        loop {
            let deadline = self.deadline();
            match timeout_at(deadline, &mut work).await {
                Ok(done) => return Some(done),
                Err(_) if self.deadline() > deadline => {}
                Err(_) => return None,
            }
        }
    }

    /// Before each attempt: what is exchanged from now on is a reason for the next one.
    pub(crate) fn begin_attempt(&mut self) {
        self.changes.mark_unchanged();
    }

    /// The access was exchanged since the attempt began, or works again.
    pub(crate) fn is_outdated(&self) -> bool {
        self.changes.has_changed().unwrap_or(false)
    }

    /// After an attempt that was answered with `error`, an expired token. Returns when it is time to ask again, or with
    /// the error when no renewed secret came.
    pub async fn await_renewal(&mut self, error: StoreError) -> Result<(), StoreError> {
        drop(self.turn.take());
        let (Some(observer), None) = (&self.access.observer, self.limit) else { return Err(error) };
        if self.access.is_over() {
            return Err(error);
        }
        observer.expired(&error);
        self.waits = true;
        let begun = Instant::now();
        let left = self.store_timeout().saturating_sub(self.paused);
        let again = async {
            let turn = self.access.turn.clone().acquire_owned().await.ok();
            tokio::time::sleep(self.access.again).await;
            turn
        };
        let changed = tokio::select! {
            biased;
            _ = self.changes.changed() => None,
            turn = again => turn,
            () = tokio::time::sleep(left) => return Err(error),
        };
        self.turn = changed;
        self.paused += begun.elapsed();
        Ok(())
    }

    /// An attempt was answered.
    pub fn answered(&mut self) {
        if std::mem::take(&mut self.waits) {
            self.access.observer.iter().for_each(|observer| observer.works_again());
        }
        if self.turn.take().is_some() {
            self.access.state.send_modify(|_| {}); // the others ask, too
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use std::sync::Mutex;
    use std::sync::atomic::{AtomicU32, Ordering};

    pub(crate) fn fixed() -> Arc<Access> {
        Arc::new(Access::new(Credentials::anonymous(), HOUR, None))
    }

    /// Whether a renewed secret was waited for (true) or had come (false), in the order in which it was said.
    #[derive(Clone, Default)]
    struct Said(Arc<Mutex<Vec<bool>>>);

    impl ExpiryObserver for Said {
        fn expired(&self, _: &StoreError) {
            self.0.lock().unwrap().push(true);
        }
        fn works_again(&self) {
            self.0.lock().unwrap().push(false);
        }
    }

    fn renewable(patience: Duration) -> (Arc<Access>, Said) {
        let said = Said::default();
        (Access::renewable(keys("old"), patience, Box::new(said.clone())), said)
    }

    fn keys(token: &str) -> Credentials {
        let secrets = [("accessKeyId", "k"), ("secretAccessKey", "s"), ("sessionToken", token)];
        Credentials::from_secrets(secrets).unwrap()
    }

    fn expired() -> StoreError {
        StoreError::Expired { what: "x".into(), why: "renew".into() }
    }

    /// As a source asks. None: the deadline has passed.
    async fn ask<F: Future<Output = bool>>(
        access: &Arc<Access>,
        is_good: impl Fn(Credentials) -> F,
    ) -> Result<Option<()>, StoreError> {
        let mut question = access.question();
        loop {
            question.begin_attempt();
            match question.in_time(is_good(access.credentials())).await {
                None => return Ok(None),
                Some(true) => {
                    question.answered();
                    return Ok(Some(()));
                }
                Some(false) => question.await_renewal(expired()).await?,
            }
        }
    }

    async fn silence(_: Credentials) -> bool {
        std::future::pending().await
    }

    const HOUR: Duration = Duration::from_secs(3600);
    const LONG: Duration = Duration::from_secs(60);
    const SHORT: Duration = Duration::from_millis(50);
    const LONGER: Duration = Duration::from_millis(400);

    #[tokio::test]
    async fn a_question_goes_on_for_a_volume_that_came_later_and_waits_longer() {
        let (access, _) = renewable(SHORT);
        let begun = Instant::now();
        let later = async { access.wait_for(LONGER) };
        let (answer, ()) = tokio::join!(ask(&access, silence), later);
        assert!(answer.unwrap().is_none() && begun.elapsed() >= LONGER, "{:?}", begun.elapsed());
        // One that waits less changes nothing for the others.
        access.wait_for(SHORT);
        let begun = Instant::now();
        assert!(ask(&access, silence).await.unwrap().is_none());
        assert!(begun.elapsed() >= LONGER, "{:?}", begun.elapsed());
        // A probe waits for no volume.
        let probe = access.probe(SHORT);
        assert!(tokio::time::timeout(LONG, probe.in_time(silence(keys("x")))).await.unwrap().is_none());
    }

    #[tokio::test]
    async fn a_volume_that_waits_less_gives_up_by_itself_and_only_where_others_wait_longer() {
        let (access, _) = renewable(SHORT);
        let begun = Instant::now();
        // Its questions end by themselves.
        assert!(tokio::time::timeout(GRACE + LONGER, access.give_up(SHORT, || begun)).await.is_err());
        // A volume comes that makes them last.
        let (begun, joined) = (Instant::now(), async { access.wait_for(HOUR) });
        tokio::join!(access.give_up(SHORT, || begun), joined);
        assert!(begun.elapsed() >= SHORT + GRACE);
        // As long as the answer comes nearer it waits.
        let nearer = Instant::now() + LONGER;
        access.give_up(SHORT, || nearer.min(Instant::now())).await;
        assert!(nearer.elapsed() >= SHORT + GRACE);
    }

    #[tokio::test]
    async fn a_question_with_an_expired_token_goes_on_with_the_next() {
        let (access, said) = renewable(LONG);
        let good = async |given: Credentials| given == keys("new");
        // In this order, on the one thread: both wait when the token is renewed.
        let renewing = async { access.replace(keys("new")) };
        let (one, other, ()) = tokio::join!(ask(&access, good), ask(&access, good), renewing);
        assert_eq!((one.unwrap(), other.unwrap()), (Some(()), Some(())));
        assert_eq!(*said.0.lock().unwrap(), [true, true, false, false]);
        // What came while an attempt was under way is a reason for another one.
        let asked = AtomicU32::new(0);
        let meanwhile = async |_| {
            access.replace(keys("newer"));
            asked.fetch_add(1, Ordering::SeqCst) > 0
        };
        tokio::time::timeout(LONG, ask(&access, meanwhile)).await.unwrap().unwrap();
        assert_eq!(asked.load(Ordering::SeqCst), 2);
    }

    #[tokio::test]
    async fn a_token_that_is_good_again_needs_no_renewed_secret() {
        const WAITING: u32 = 20;
        let said = Said::default();
        let access = Access::new(keys("old"), HOUR, Some(Box::new(said.clone())));
        let access = Arc::new(Access { again: Duration::from_millis(2), ..access });
        let asked = AtomicU32::new(0);
        // From some question on, as where a clock was wrong.
        let wavering = async |_| asked.fetch_add(1, Ordering::SeqCst) >= 50;
        let all = futures::future::join_all((0..WAITING).map(|_| ask(&access, wavering)));
        let all = tokio::time::timeout(LONG, all).await.expect("one asks again");
        assert!(all.into_iter().all(|answer| answer.unwrap().is_some()));
        // Each asked, then one at a time, and in the end each of those that had not yet had an answer.
        assert_eq!(asked.load(Ordering::SeqCst), 50 + WAITING);
        assert_eq!(said.0.lock().unwrap().iter().filter(|waits| !**waits).count(), WAITING as usize);
    }

    #[tokio::test]
    async fn a_token_that_stays_expired_is_an_error_in_the_end() {
        let (access, _) = renewable(SHORT);
        let never = async |_| false;
        let begun = Instant::now();
        assert!(matches!(ask(&access, never).await, Err(StoreError::Expired { .. })));
        assert!(begun.elapsed() >= SHORT);
        // At once where no renewed secret can come, and of a probe.
        let begun = Instant::now();
        assert!(matches!(ask(&fixed(), never).await, Err(StoreError::Expired { .. })));
        let (access, said) = renewable(HOUR);
        access.probe(HOUR).await_renewal(expired()).await.unwrap_err();
        assert!(begun.elapsed() < LONG && said.0.lock().unwrap().is_empty());
    }

    #[tokio::test]
    async fn a_token_that_is_taken_and_refused_in_turn_is_an_error_in_the_end() {
        let access = Access::new(keys("old"), LONGER, Some(Box::new(Said::default())));
        let access = Arc::new(Access { again: Duration::from_millis(2), ..access });
        let mut question = access.question();
        let body = async {
            while question.await_renewal(expired()).await.is_ok() {
                question.answered(); // and its body breaks at once
            }
        };
        tokio::time::timeout(LONG, body).await.expect("it waits for ever");
    }

    #[tokio::test]
    async fn a_question_of_volumes_that_are_gone_waits_for_no_secret() {
        let (access, _) = renewable(HOUR);
        let ending = async { access.end() };
        let (answer, ()) = tokio::join!(ask(&access, async |_| false), ending);
        assert!(matches!(answer, Err(StoreError::Expired { .. })));
        assert!(access.is_over());
        // The next volume finds it as it was.
        access.wait_for(SHORT);
        assert!(!access.is_over());
    }

    #[test]
    fn what_is_shown_of_it_has_no_secret() {
        let shown = format!("{:?}", renewable(SHORT).0);
        assert!(shown.contains("store_timeout") && !shown.contains("old"), "{shown}");
    }
}
