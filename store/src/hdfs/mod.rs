//! An HDFS as a source. What speaks to it is a helper, a process that others start and that may die, hang or lie; what
//! it takes to get an answer all the same is here.
//!
//! ```text
//! mod.rs      Source: which questions answer which question about a tree
//! session.rs  one helper: handshake, questions, what comes back
//! keeper.rs   a helper for each question: the present one, or a new one in its place
//! configure.rs what a helper is told
//! ids.rs      whose numbers HDFS's users and groups have
//! body.rs     a file's bytes: what goes on where a helper, or HDFS, stopped
//! ```

mod body;
mod configure;
mod ids;
mod keeper;
mod session;
#[cfg(test)]
mod tests;

use crate::access::{Access, Question};
use crate::dispatch::Lane;
use crate::keys::{is_name, is_path, show};
use crate::limits::Limits;
use crate::observe::{Observer, Outcome, RetryCause};
use crate::retry::{Attempts, Fault, Request};
use crate::traffic::Place;
use crate::{ByteStream, Entry, Examined, Kind, Page, Source, Step, StoreError, Version};
use async_trait::async_trait;
use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use configure::Asking;
pub use configure::{HadoopConfig, HdfsNode};
use futures::TryStreamExt;
use hdfs::{Answer, Configure, FailureKind, PageStart, Status};
pub use ids::HadoopIds;
use keeper::Keeper;
use session::{Lost, Session};
use std::any::Any;
use std::ops::Range;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;
use volume::{Credentials, SourceUrl, VolumeSpec};

/// Starts helpers. Whoever implements it gives them no rights beyond the network.
#[async_trait]
pub trait Helpers: Send + Sync + std::fmt::Debug {
    /// # Errors
    /// Why there is none now; it is asked again.
    async fn start(&self) -> std::io::Result<Helper>;

    /// What this kernel cannot do of a helper's confinement, as each helper says once.
    fn told_missing(&self, missing: &[String]);
}

/// A process that was started, and expects its configuration.
pub struct Helper {
    pub socket: UnixStream,
    /// The process ends when this is dropped.
    pub process: Box<dyn Any + Send + Sync>,
}

/// What a user's credentials make of a configuration.
type Configuring = Box<dyn Fn(&Credentials) -> Result<Configure, StoreError> + Send + Sync>;

pub(crate) struct Hdfs {
    client: Arc<Client>,
}

/// Everything that is the same for all questions of one source.
struct Client {
    /// `hdfs://authority`, as messages begin.
    endpoint: String,
    /// "" or "/a/b".
    root: String,
    ids: HadoopIds,
    keeper: Keeper,
    place: Place,
    limits: Arc<Limits>,
    observer: Arc<dyn Observer>,
    access: Arc<Access>,
}

impl std::fmt::Debug for Hdfs {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Hdfs({})", self.client.what(b""))
    }
}

impl Hdfs {
    /// None: the volume's source is no HDFS.
    pub(crate) fn open(
        spec: &VolumeSpec,
        access: Arc<Access>,
        limits: Arc<Limits>,
        observer: Arc<dyn Observer>,
        node: Arc<HdfsNode>,
    ) -> Option<Self> {
        let SourceUrl::Hdfs { authority, prefix } = &spec.source else { return None };
        let asking = Asking::of(spec, &node, &limits.config().egress)?;
        let (helpers, ids) = (node.helpers.clone(), node.ids.clone());
        let configuring: Configuring = Box::new(move |credentials| asking.configure(&node, credentials));
        let readers = limits.readers(spec, &access.credentials());
        let endpoint = format!("hdfs://{authority}");
        let place = limits.place(&endpoint, readers.as_str(), 1);
        let start_limit = limits.config().connect_timeout.saturating_mul(2);
        let keeper = Keeper::new(helpers, access.clone(), configuring, start_limit);
        let root = match prefix.trim_end_matches('/') {
            "" => String::new(),
            prefix => format!("/{prefix}"),
        };
        Some(Self {
            client: Arc::new(Client { endpoint, root, ids, keeper, place, limits, observer, access }),
        })
    }

    async fn stat(&self, path: &[u8], question: Question) -> Result<Option<Status>, StoreError> {
        let what = self.client.what(path);
        let ask = || hdfs::Question::Stat { path: self.client.path(path) };
        self.client
            .ask("head", &what, question, ask, |answer| match answer {
                Answer::Status(status) => Ok(status),
                _ => Err("another answer than was asked for"),
            })
            .await
    }

    async fn page(&self, dir: &[u8], start: PageStart, question: Question) -> Result<hdfs::Page, StoreError> {
        let what = self.client.what(dir);
        let ask = || hdfs::Question::List { path: self.client.path(dir), start: start.clone() };
        self.client
            .ask("list", &what, question, ask, |answer| match answer {
                Answer::Page(page) => is_sound(&start, &page).map(|()| page),
                _ => Err("another answer than was asked for"),
            })
            .await
    }
}

/// A helper may be in somebody else's hands: each page must bring the listing forward, by no more than a page.
fn is_sound(start: &PageStart, page: &hdfs::Page) -> Result<(), &'static str> {
    if page.entries.len() + page.hidden as usize > hdfs::PAGE_ENTRIES {
        return Err("a page of more entries than any");
    }
    if page.entries.iter().any(|entry| entry.name.is_empty() || entry.name.contains(['/', '\0'])) {
        return Err("a name that no file has");
    }
    let Some(next) = &page.next else { return Ok(()) };
    let moves = match (page.entries.last(), page.hidden) {
        (None, 0) => false,
        (None, hidden) => next.after == start.after && Some(next.hidden) == start.hidden.checked_add(hidden),
        (Some(last), _) => next.after.as_ref() == Some(&last.name) && next.after != start.after,
    };
    if moves { Ok(()) } else { Err("a page of a listing that leads nowhere") }
}

impl Client {
    fn path(&self, below: &[u8]) -> String {
        // What is asked for is a path, and so is UTF-8.
        let below = String::from_utf8_lossy(below);
        match (self.root.as_str(), below.as_ref()) {
            ("", "") => "/".to_owned(),
            (root, "") => root.to_owned(),
            (root, below) => format!("{root}/{below}"),
        }
    }

    /// A path as messages name it.
    fn what(&self, path: &[u8]) -> String {
        format!("{}{}", self.endpoint, show(self.path(path).as_bytes()))
    }

    fn request<'a>(&'a self, op: &'static str, lane: Lane, what: &'a str) -> Request<'a> {
        let stall_timeout = self.limits.config().stall_timeout;
        let (endpoint, place, observer) = (self.endpoint.as_str(), &self.place, &self.observer);
        Request { what, endpoint, op, place, lane, observer, stall_timeout }
    }

    /// Runs a small question until it is answered.
    async fn ask<T>(
        &self,
        op: &'static str,
        what: &str,
        question: Question,
        ask: impl Fn() -> hdfs::Question + Sync,
        read: impl Fn(Answer) -> Result<T, &'static str> + Sync,
    ) -> Result<T, StoreError> {
        let attempt = |patience| {
            let (ask, read) = (&ask, &read);
            async move {
                let session = self.session(what).await?;
                let mut asked = session.ask(ask(), patience).map_err(|lost| self.lost(&session, lost))?;
                let answer = asked.answer(patience).await.map_err(|lost| self.lost(&session, lost))?;
                let answer = answer.map_err(|failure| self.fault(what, failure))?;
                self.keeper.answered();
                read(answer).map_err(|why| {
                    session.end();
                    Fault::retry(RetryCause::Malformed, format!("the HDFS helper said {why}"))
                })
            }
        };
        let (answer, _slot, meter) =
            Attempts::new(question).ask(&self.request(op, Lane::Metadata, what), attempt).await?;
        meter.end(Outcome::Ok);
        Ok(answer)
    }

    async fn session(&self, what: &str) -> Result<Arc<Session>, Fault> {
        self.keeper.session(what).await
    }

    /// The helper is gone, hangs, or lied. Whatever it was, there is another one.
    fn lost(&self, session: &Arc<Session>, lost: Lost) -> Fault {
        session.end();
        self.keeper.lost(session);
        match lost {
            Lost::Gone => Fault::retry(RetryCause::Helper, "the HDFS helper ended"),
            Lost::Hangs => Fault::retry(RetryCause::Helper, "the HDFS helper did not answer, and was ended"),
            Lost::Lies(why) => {
                Fault::retry(RetryCause::Malformed, format!("the HDFS helper said {why}, and was ended"))
            }
        }
    }

    fn fault(&self, what: &str, failure: hdfs::Failure) -> Fault {
        let what = what.to_owned();
        let why = hdfs::words(&failure.why);
        let retry = |cause| Fault::retry(cause, why.clone());
        match failure.kind {
            FailureKind::NotFound => Fault::Fail(StoreError::not_found(&what)),
            FailureKind::Denied => Fault::Fail(StoreError::Denied { what, why }),
            FailureKind::Expired => Fault::Fail(StoreError::Expired { what, why }),
            FailureKind::Stale => Fault::Fail(StoreError::Stale { what }),
            FailureKind::Invalid => Fault::Fail(StoreError::Invalid { what, why }),
            FailureKind::Unfinished => Fault::Fail(StoreError::Malformed { what, why }),
            FailureKind::Unreachable => retry(RetryCause::Connect),
            FailureKind::Silent => retry(RetryCause::Stalled),
            FailureKind::Refused => retry(RetryCause::ServerError),
            FailureKind::Broken => retry(RetryCause::Reset),
            FailureKind::Truncated => retry(RetryCause::Truncated),
            FailureKind::Malformed | FailureKind::Panicked => retry(RetryCause::Malformed),
        }
    }
}

/// Version tokens are made here and read here.
fn version(version: hdfs::Version) -> Version {
    Version(format!("{}-{}", version.modified_ms, version.length))
}

fn parse(version: &Version) -> Option<hdfs::Version> {
    let (modified_ms, length) = version.as_str().split_once('-')?;
    Some(hdfs::Version { modified_ms: modified_ms.parse().ok()?, length: length.parse().ok()? })
}

fn entry(name: &[u8], status: Status, ids: &HadoopIds) -> Entry {
    let kind = match status.is_directory {
        true => Kind::Directory,
        false => Kind::File { size: status.version.length, version: version(status.version) },
    };
    let modified_ms = i64::try_from(status.version.modified_ms).unwrap_or(i64::MAX);
    let modified_ns = modified_ms.saturating_mul(1_000_000);
    Entry { name: name.to_vec(), kind, modified_ns, permissions: Some(ids.permissions(&status)) }
}

/// A page's start as a token: how many names are hidden, and the name before them.
fn token(start: &PageStart) -> String {
    let after = start.after.as_ref().map(|name| URL_SAFE_NO_PAD.encode(name)).unwrap_or_default();
    format!("{}.{after}", start.hidden)
}

fn parse_token(token: &str) -> Option<PageStart> {
    let (hidden, after) = token.split_once('.')?;
    let after = String::from_utf8(URL_SAFE_NO_PAD.decode(after).ok()?).ok()?;
    Some(PageStart { after: Some(after).filter(|name| !name.is_empty()), hidden: hidden.parse().ok()? })
}

#[async_trait]
impl Source for Hdfs {
    fn is_queued(&self) -> bool {
        self.client.place.is_queued(Lane::Metadata)
    }

    fn others_move(&self) -> bool {
        self.client.place.others_move()
    }

    async fn list(&self, dir: &[u8], token_: Option<&str>) -> Result<Page, StoreError> {
        let what = self.client.what(dir);
        if !dir.is_empty() && !is_path(dir) {
            return Err(StoreError::not_found(&what));
        }
        let start = token_.map_or_else(|| Some(PageStart::default()), parse_token);
        let start = start.ok_or_else(|| StoreError::malformed(&what, "a foreign page token"))?;
        let found = self.page(dir, start, self.client.access.question()).await?;
        let mut page = Page { next: found.next.as_ref().map(token), ..Page::default() };
        for one in found.entries {
            match is_name(one.name.as_bytes()) && one.status.version.length <= volume::FILE_BYTES_MAX {
                true => page.entries.push(entry(one.name.as_bytes(), one.status, &self.client.ids)),
                false => page.unnameable.push(show(one.name.as_bytes())),
            }
        }
        // The library keeps their names to itself.
        page.unnameable.extend((0..found.hidden).map(|_| "a name that is not UTF-8".to_owned()));
        Ok(page)
    }

    async fn head(&self, path: &[u8]) -> Result<Option<Entry>, StoreError> {
        if !is_path(path) {
            return Ok(None);
        }
        let name = path.rsplit(|byte| *byte == b'/').next().unwrap_or(path);
        let status = self.stat(path, self.client.access.question()).await?;
        let shown = status.filter(|status| status.version.length <= volume::FILE_BYTES_MAX);
        Ok(shown.map(|status| entry(name, status, &self.client.ids)))
    }

    async fn get(&self, path: &[u8], version: &Version, range: Range<u64>) -> Result<ByteStream, StoreError> {
        let what = self.client.what(path);
        if !is_path(path) {
            return Err(StoreError::not_found(&what));
        }
        let wanted = parse(version).ok_or_else(|| StoreError::malformed(&what, "a foreign version"))?;
        if range.end > wanted.length {
            return Err(StoreError::malformed(&what, "a range past the end of this version"));
        }
        let path = self.client.path(path);
        body::open(self.client.clone(), path, what, wanted, range, self.client.access.question()).await
    }

    async fn examine(&self, limit: Duration) -> Vec<Examined> {
        let begun = Instant::now();
        // Whoever says no has answered: what it was is the next step's to say.
        let connection = match self.stat(b"", self.client.access.probe(limit)).await {
            Err(e @ (StoreError::Unavailable { .. } | StoreError::Invalid { .. })) => Err(e.to_string()),
            Ok(_) | Err(_) => Ok(format!("answers after {} ms", begun.elapsed().as_millis())),
        };
        let mut examined = vec![Examined { step: Step::Connection, result: connection }];
        if examined[0].result.is_ok() {
            let access = self.check(limit).await;
            let result = access.map(|()| "may list and read".to_owned()).map_err(|e| e.to_string());
            examined.push(Examined { step: Step::Access, result });
        }
        examined
    }

    async fn check(&self, limit: Duration) -> Result<(), StoreError> {
        let started = Instant::now();
        let ask = || self.client.access.probe(limit.saturating_sub(started.elapsed()));
        let what = self.client.what(b"");
        match self.stat(b"", ask()).await? {
            None => {
                let advice = ": check 'source'; the path is absolute in HDFS";
                return Err(StoreError::NotFound { what, advice });
            }
            Some(status) if !status.is_directory => {
                let why = "it is a file: name the directory that it is in".to_owned();
                return Err(StoreError::Invalid { what, why });
            }
            Some(_) => {}
        }
        let page = self.page(b"", PageStart::default(), ask()).await?;
        // The right to list and to read, and that DataNodes can be reached: found out now, not at the pod's first read.
        let is_file = |entry: &&hdfs::Entry| !entry.status.is_directory && entry.status.version.length > 0;
        let Some(file) = page.entries.iter().find(is_file).filter(|file| is_name(file.name.as_bytes()))
        else {
            return Ok(());
        };
        let (path, what) = (self.client.path(file.name.as_bytes()), self.client.what(file.name.as_bytes()));
        let read = async {
            let version = file.status.version;
            body::open(self.client.clone(), path, what, version, 0..1, ask())
                .await?
                .try_collect::<Vec<_>>()
                .await
        };
        match read.await {
            // It has changed since: that it can be read is not to be doubted.
            Ok(_) | Err(StoreError::Stale { .. }) => Ok(()),
            Err(e) => Err(e),
        }
    }
}
