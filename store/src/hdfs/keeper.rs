//! A helper for each question: the present one, or a new one in the place of one that is lost or was started with other
//! credentials. One that is started anew and again waits before it is, however many ask.

use super::session::{Lost, Session, Unusable};
use super::{Configuring, Helpers};
use crate::StoreError;
use crate::access::Access;
use crate::observe::RetryCause;
use crate::retry::Fault;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;
use tokio::sync::Mutex;
use tokio::time::Instant;
use volume::Credentials;

const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(10);

pub(super) struct Keeper {
    helpers: Arc<dyn Helpers>,
    access: Arc<Access>,
    configuring: Configuring,
    /// Held while one is started: the others wait for that one.
    present: Mutex<Option<Present>>,
    /// Helpers in a row that were lost before they had answered anything.
    lost: AtomicU32,
}

struct Present {
    session: Arc<Session>,
    credentials: Credentials,
    since: Instant,
}

impl Keeper {
    pub(super) fn new(helpers: Arc<dyn Helpers>, access: Arc<Access>, configuring: Configuring) -> Self {
        Self { helpers, access, configuring, present: Mutex::new(None), lost: AtomicU32::new(0) }
    }

    pub(super) async fn session(&self, what: &str) -> Result<Arc<Session>, Fault> {
        let mut present = self.present.lock().await;
        if let Some(Present { session, credentials, .. }) = &*present
            && !session.is_over()
            && self.access.has(credentials)
        {
            return Ok(session.clone());
        }
        if let Some(since) = present.as_ref().map(|present| present.since) {
            tokio::time::sleep_until(since + self.pause()).await;
        }
        // Questions that are under way go on with the old one, which ends with the last of them.
        *present = None;
        let credentials = self.access.credentials();
        let configure = (self.configuring)(&credentials).map_err(Fault::Fail)?;
        let helper = self.helpers.start().await.map_err(|e| {
            Fault::retry(RetryCause::Reset, format!("no HDFS helper can be started on this node: {e}"))
        })?;
        let begun = Session::begin(helper, configure).await;
        let session = Arc::new(begun.map_err(|unusable| self.unusable(what, unusable))?);
        *present = Some(Present { session: session.clone(), credentials, since: Instant::now() });
        Ok(session)
    }

    pub(super) fn answered(&self, _: &Session) {
        self.lost.store(0, Ordering::Relaxed);
    }

    pub(super) fn lost(&self, _: &Session) {
        self.lost.fetch_add(1, Ordering::Relaxed);
    }

    fn pause(&self) -> Duration {
        match self.lost.load(Ordering::Relaxed) {
            0 => Duration::ZERO,
            lost => FIRST_PAUSE.saturating_mul(1 << (lost - 1).min(16)).min(LONGEST_PAUSE),
        }
    }

    fn unusable(&self, what: &str, unusable: Unusable) -> Fault {
        match unusable {
            Unusable::Lost(Lost::Lies(why)) => {
                Fault::retry(RetryCause::Malformed, format!("the HDFS helper said {why}"))
            }
            Unusable::Lost(_) => {
                let why = "the HDFS helper ended before it was ready (its words are in the agent's log)";
                Fault::retry(RetryCause::Reset, why)
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
