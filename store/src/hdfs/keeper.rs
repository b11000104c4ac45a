//! A helper for each question: the present one, or a new one in the place of one that is lost or was started with other
//! credentials. One that is started anew and again waits before it is, however many ask.

use super::session::{Lost, Session, Unusable};
use super::{Configuring, Helpers};
use crate::StoreError;
use crate::access::Access;
use crate::observe::RetryCause;
use crate::retry::Fault;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, PoisonError};
use std::time::Duration;
use tokio::sync::Mutex;
use tokio::time::{Instant, timeout};
use volume::Credentials;

const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(10);

pub(super) struct Keeper {
    helpers: Arc<dyn Helpers>,
    access: Arc<Access>,
    configuring: Configuring,
    /// From a helper's start to its readiness: it asks nobody until then.
    start_limit: Duration,
    /// Held while one is started: the others wait for that one.
    present: Mutex<Option<Present>>,
    /// Before this time none is started.
    not_before: std::sync::Mutex<Option<Instant>>,
    /// Helpers in a row that were lost since one has answered.
    lost: AtomicU32,
}

struct Present {
    session: Arc<Session>,
    credentials: Credentials,
}

impl Keeper {
    pub(super) fn new(
        helpers: Arc<dyn Helpers>,
        access: Arc<Access>,
        configuring: Configuring,
        start_limit: Duration,
    ) -> Self {
        Self {
            helpers,
            access,
            configuring,
            start_limit,
            present: Mutex::new(None),
            not_before: std::sync::Mutex::new(None),
            lost: AtomicU32::new(0),
        }
    }

    pub(super) async fn session(&self, what: &str) -> Result<Arc<Session>, Fault> {
        let mut present = self.present.lock().await;
        if let Some(Present { session, credentials }) = &*present
            && !session.is_over()
            && self.access.has(credentials)
        {
            return Ok(session.clone());
        }
        // Without the slot that the question holds.
        if let Some(after) = self.wait() {
            let detail = "the HDFS helpers before it were lost".to_owned();
            return Err(Fault::Retry { cause: RetryCause::Helper, detail, after: Some(after) });
        }
        // Questions that are under way go on with the old one, which ends with the last of them.
        *present = None;
        let credentials = self.access.credentials();
        let configure = (self.configuring)(&credentials).map_err(Fault::Fail)?;
        // Others wait for this one, each with a slot of its own.
        let begun = timeout(self.start_limit, self.begin(what, configure)).await;
        let begun = begun.unwrap_or_else(|_| {
            let late = format!("the HDFS helper was not ready within {:?}", self.start_limit);
            Err(Fault::retry(RetryCause::Helper, late))
        });
        let session = Arc::new(begun.inspect_err(|_| self.one_more())?);
        *present = Some(Present { session: session.clone(), credentials });
        Ok(session)
    }

    async fn begin(&self, what: &str, configure: hdfs::Configure) -> Result<Session, Fault> {
        let helper = self.helpers.start().await.map_err(|e| {
            Fault::retry(RetryCause::Helper, format!("no HDFS helper can be started on this node: {e}"))
        })?;
        let begun = Session::begin(helper, configure, |missing| self.helpers.told_missing(missing)).await;
        begun.map_err(|unusable| self.unusable(what, unusable))
    }

    pub(super) fn answered(&self) {
        self.lost.store(0, Ordering::Relaxed);
    }

    pub(super) fn lost(&self, session: &Session) {
        if session.is_first_loss() {
            self.one_more();
        }
    }

    fn one_more(&self) {
        let lost = self.lost.fetch_add(1, Ordering::Relaxed);
        // The first is replaced at once.
        let pause = lost.checked_sub(1).map(|more| FIRST_PAUSE.saturating_mul(1 << more.min(16)));
        *self.not_before() = pause.map(|pause| Instant::now() + pause.min(LONGEST_PAUSE));
    }

    /// How long until one may be started; None: now.
    fn wait(&self) -> Option<Duration> {
        let left = self.not_before().map(|at| at.saturating_duration_since(Instant::now()));
        left.filter(|left| !left.is_zero())
    }

    fn not_before(&self) -> std::sync::MutexGuard<'_, Option<Instant>> {
        self.not_before.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn unusable(&self, what: &str, unusable: Unusable) -> Fault {
        match unusable {
            Unusable::Lost(Lost::Lies(why)) => {
                Fault::retry(RetryCause::Malformed, format!("the HDFS helper said {why}"))
            }
            Unusable::Lost(_) => {
                let why = "the HDFS helper ended before it was ready (its words are in the agent's log)";
                Fault::retry(RetryCause::Helper, why)
            }
            Unusable::Configuration(why) => Fault::Fail(StoreError::Invalid { what: what.to_owned(), why }),
            Unusable::Protocol(theirs) => Fault::Fail(StoreError::Invalid {
                what: what.to_owned(),
                why: format!(
                    "hdfs-helper speaks version {theirs} of its protocol and this agent {}: install both from one release",
                    hdfs::PROTOCOL
                ),
            }),
        }
    }
}
