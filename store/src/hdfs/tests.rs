//! A source against helpers in this process that do what they like.

use super::*;
use crate::limits::LimitsConfig;
use crate::observe::NoObserver;
use ::hdfs::{Failure, Frame, Frames, FromHelper, ToHelper};
use bytes::Bytes;
use futures::future::BoxFuture;
use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

/// A file of which each byte tells its place.
const SIZE: u64 = 3_000_000;

fn of(range: Range<u64>) -> Vec<u8> {
    range.map(|at| (at ^ (at >> 8) ^ (at >> 16)) as u8).collect()
}

const VERSION: hdfs::Version = hdfs::Version { modified_ms: 5, length: SIZE };

fn status(is_directory: bool) -> Status {
    Status { is_directory, version: VERSION, mode: 0o640, owner: "alice".into(), group: "1234".into() }
}

/// One helper's end of its socket.
struct End {
    socket: tokio::net::UnixStream,
    frames: Frames<ToHelper>,
    /// Of all helpers of a test, from 0.
    number: usize,
    killed: Arc<AtomicBool>,
}

impl End {
    async fn hear(&mut self) -> Option<ToHelper> {
        loop {
            if let Some(Frame { message, .. }) = self.frames.take().unwrap() {
                return Some(message);
            }
            if self.socket.read_buf(self.frames.space()).await.ok()? == 0 {
                return None;
            }
        }
    }

    async fn say(&mut self, message: FromHelper) {
        self.send(&hdfs::encode(&message).unwrap()).await;
    }

    async fn data(&mut self, id: u64, bytes: &[u8]) {
        self.send(&hdfs::encode_before(&FromHelper::Data { id }, bytes).unwrap()).await;
        self.send(bytes).await;
    }

    async fn answer(&mut self, id: u64, answer: Result<Answer, Failure>) {
        self.say(FromHelper::Answer { id, answer }).await;
    }

    async fn send(&mut self, bytes: &[u8]) {
        let _ = self.socket.write_all(bytes).await; // the other end may have had enough
    }

    /// The usual beginning.
    async fn begin(&mut self) {
        self.say(FromHelper::Hello { protocol: hdfs::PROTOCOL }).await;
        assert!(matches!(self.hear().await, Some(ToHelper::Configure(_))));
        self.say(FromHelper::Ready { missing: Vec::new() }).await;
    }

    async fn asked(&mut self) -> Option<(u64, hdfs::Question)> {
        loop {
            if let ToHelper::Ask { id, question, .. } = self.hear().await? {
                return Some((id, question));
            }
        }
    }

    async fn until_killed(self) {
        while !self.killed.load(Ordering::SeqCst) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// As a helper should, for the one file.
    async fn honest(mut self) {
        self.begin().await;
        while let Some((id, question)) = self.asked().await {
            self.honest_answer(id, question, u64::MAX).await;
        }
    }

    /// Sends `most` bytes at most. False: and then no answer.
    async fn honest_answer(&mut self, id: u64, question: hdfs::Question, most: u64) -> bool {
        let answer = match question {
            hdfs::Question::Stat { .. } => Answer::Status(Some(status(false))),
            hdfs::Question::List { .. } => Answer::Page(hdfs::Page::default()),
            hdfs::Question::Read { mut start, end, window, .. } => {
                let (mut granted, mut sent) = (u64::from(window), 0);
                while start < end {
                    let piece = (end - start).min(64 << 10).min(most - sent);
                    if piece == 0 {
                        return false;
                    }
                    while granted < piece {
                        match self.hear().await {
                            Some(ToHelper::More { id: of, bytes }) if of == id => granted += u64::from(bytes),
                            Some(ToHelper::Cancel { id: of }) if of == id => return true,
                            None => return false,
                            _ => {}
                        }
                    }
                    self.data(id, &of(start..start + piece)).await;
                    (start, granted, sent) = (start + piece, granted - piece, sent + piece);
                }
                Answer::End
            }
        };
        self.answer(id, Ok(answer)).await;
        true
    }
}

type Script = dyn Fn(End) -> BoxFuture<'static, ()> + Send + Sync;

struct Scripted {
    script: Box<Script>,
    started: AtomicUsize,
    /// Of each helper: was it ended?
    killed: Mutex<Vec<Arc<AtomicBool>>>,
}

impl std::fmt::Debug for Scripted {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Scripted")
    }
}

struct Kill(Arc<AtomicBool>);

impl Drop for Kill {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

#[async_trait]
impl Helpers for Scripted {
    async fn start(&self) -> std::io::Result<Helper> {
        let (mine, theirs) = UnixStream::pair()?;
        theirs.set_nonblocking(true)?;
        let killed = Arc::new(AtomicBool::new(false));
        self.killed.lock().unwrap().push(killed.clone());
        let number = self.started.fetch_add(1, Ordering::SeqCst);
        let socket = tokio::net::UnixStream::from_std(theirs)?;
        tokio::spawn((self.script)(End {
            socket,
            frames: Frames::default(),
            number,
            killed: killed.clone(),
        }));
        Ok(Helper { socket: mine, process: Box::new(Kill(killed)) })
    }

    fn told_missing(&self, missing: &[String]) {
        println!("not confined: {missing:?}");
    }
}

impl Scripted {
    fn new<F: Future<Output = ()> + Send + 'static>(
        script: impl Fn(End) -> F + Send + Sync + 'static,
    ) -> Arc<Self> {
        let script = Box::new(move |end| -> BoxFuture<'static, ()> { Box::pin(script(end)) });
        Arc::new(Self { script, started: AtomicUsize::new(0), killed: Mutex::default() })
    }

    fn started(&self) -> usize {
        self.started.load(Ordering::SeqCst)
    }

    fn open(self: &Arc<Self>, store_timeout: Duration) -> Hdfs {
        self.open_with(store_timeout, Duration::from_millis(200))
    }

    fn open_with(self: &Arc<Self>, store_timeout: Duration, stall_timeout: Duration) -> Hdfs {
        use volume::{AllowList, Parameters, VolumeId};
        let source = SourceUrl::parse("hdfs://ns/data").unwrap();
        let parameters = Parameters { store_timeout, ..Parameters::default() };
        let spec = VolumeSpec { id: VolumeId::parse("v").unwrap(), source, parameters };
        let access = Access::fixed(&spec, Credentials::anonymous());
        let limits = Arc::new(Limits::new(LimitsConfig {
            stall_timeout,
            connect_timeout: START,
            ..LimitsConfig::default()
        }));
        let node = HdfsNode {
            helpers: self.clone(),
            allow: AllowList::default(),
            configurations: BTreeMap::new(),
            networks: Vec::new(),
            ids: HadoopIds { users: [("alice".to_owned(), 1000)].into(), ..HadoopIds::default() },
            api_server: None,
        };
        Hdfs::open(&spec, access, limits, Arc::new(NoObserver), Arc::new(node)).expect("an HDFS")
    }
}

/// Half of what a helper has to get ready.
const START: Duration = Duration::from_millis(500);
const LONG: Duration = Duration::from_secs(60);
const SHORT: Duration = Duration::from_millis(700);

async fn read(source: &Hdfs, range: Range<u64>) -> Result<Vec<u8>, StoreError> {
    let pieces: Vec<Bytes> = source.get(b"f", &version(VERSION), range).await?.try_collect().await?;
    Ok(pieces.concat())
}

fn failure(kind: FailureKind) -> Result<Answer, Failure> {
    Err(Failure { kind, why: "why".into() })
}

#[tokio::test]
async fn a_file_is_read_whole_and_in_ranges() {
    let helpers = Scripted::new(End::honest);
    let source = helpers.open(LONG);
    for range in [0..SIZE, 0..1, SIZE - 1..SIZE, 5..5, 1_000_000..2_500_000] {
        assert!(read(&source, range.clone()).await.unwrap() == of(range));
    }
    let found = source.head(b"f").await.unwrap().unwrap();
    assert_eq!(found.kind, Kind::File { size: SIZE, version: Version("5-3000000".into()) });
    assert_eq!(helpers.started(), 1);
    assert!(matches!(read(&source, 0..SIZE + 1).await, Err(StoreError::Malformed { .. })));
    drop(source);
    assert!(helpers.killed.lock().unwrap()[0].load(Ordering::SeqCst), "it ends with its source");
}

#[tokio::test]
async fn a_helper_that_dies_in_the_middle_is_replaced_and_the_read_goes_on_where_it_was() {
    // Each gives a part, and dies; the third at once, the fourth before it is ready.
    let helpers = Scripted::new(|mut end: End| async move {
        match end.number {
            0 | 1 => {
                end.begin().await;
                let (id, question) = end.asked().await.unwrap();
                assert!(!end.honest_answer(id, question, 1_000_000).await);
            }
            2 => end.begin().await,
            3 => end.say(FromHelper::Hello { protocol: hdfs::PROTOCOL }).await,
            _ => end.honest().await,
        }
    });
    assert!(read(&helpers.open(LONG), 0..SIZE).await.unwrap() == of(0..SIZE));
    assert_eq!(helpers.started(), 5);
}

#[tokio::test]
async fn questions_that_are_under_way_when_a_helper_dies_are_all_asked_again() {
    let helpers = Scripted::new(|mut end: End| async move {
        if end.number > 0 {
            return end.honest().await;
        }
        end.begin().await;
        for _ in 0..4 {
            end.asked().await.unwrap();
        }
    });
    let source = helpers.open_with(LONG, LONG);
    let (a, b, c, d) =
        tokio::join!(source.head(b"f"), source.head(b"g"), source.list(b"d", None), source.head(b"h"));
    assert!(a.is_ok() && b.is_ok() && c.is_ok() && d.is_ok());
    assert_eq!(helpers.started(), 2, "one new helper for all");
}

#[tokio::test]
async fn a_helper_that_hangs_is_ended_and_replaced() {
    let helpers = Scripted::new(|mut end: End| async move {
        if end.number > 0 {
            return end.honest().await;
        }
        end.begin().await;
        end.until_killed().await;
    });
    let source = helpers.open(LONG);
    assert!(source.head(b"f").await.unwrap().is_some());
    assert!(helpers.killed.lock().unwrap()[0].load(Ordering::SeqCst));
}

#[tokio::test]
async fn a_helper_that_never_begins_is_an_error_in_time() {
    let helpers = Scripted::new(End::until_killed);
    let begun = Instant::now();
    let error = helpers.open(SHORT).head(b"f").await.unwrap_err();
    assert!(matches!(error, StoreError::Unavailable { .. }), "{error}");
    assert!(begun.elapsed() < LONG);
}

#[tokio::test]
async fn a_helper_that_does_not_read_is_ended_and_what_waits_for_it_is_bounded() {
    let helpers = Scripted::new(|mut end: End| async move {
        end.begin().await;
        end.until_killed().await; // its socket is open, and nobody reads it
    });
    let source = helpers.open_with(LONG, LONG);
    // Asked and taken back again, until the pipe and the queue behind it are full.
    let name = [b'n'; 250];
    for k in 0..30_000 {
        drop(futures::poll!(Box::pin(source.head(&name))));
        if k % 100 == 0 {
            tokio::task::yield_now().await;
        }
        if helpers.started() > 1 {
            break;
        }
    }
    assert!(helpers.killed.lock().unwrap()[0].load(Ordering::SeqCst), "it was ended");
}

#[tokio::test]
async fn whatever_a_helper_may_not_say_ends_it_and_is_an_error_and_nothing_else() {
    type Lie = fn(&mut End, u64) -> BoxFuture<'_, ()>;
    let page = |page: hdfs::Page| Ok(Answer::Page(page));
    let lies: &[(&str, Lie)] = &[
        ("another answer", |end, id| Box::pin(end.answer(id, Ok(Answer::End)))),
        ("data", |end, id| Box::pin(async move { end.data(id, b"x").await })),
        ("empty data", |end, id| Box::pin(async move { end.data(id, b"").await })),
        ("hello again", |end, _| Box::pin(end.say(FromHelper::Hello { protocol: hdfs::PROTOCOL }))),
        ("no frame", |end, _| Box::pin(end.send(b"\x03\0\0\0\0\0\0\0\xff\xff\xff"))),
        ("an endless frame", |end, _| Box::pin(end.send(&[0xff; 64]))),
    ];
    for (name, lie) in lies {
        let lie = *lie;
        let helpers = Scripted::new(move |mut end: End| async move {
            end.begin().await;
            let Some((id, _)) = end.asked().await else { return };
            lie(&mut end, id).await;
            end.until_killed().await;
        });
        let error = helpers.open(LONG).head(b"f").await.expect_err(name);
        assert!(matches!(error, StoreError::Malformed { .. }), "{name}: {error}");
        assert!(helpers.killed.lock().unwrap().iter().all(|killed| killed.load(Ordering::SeqCst)), "{name}");
    }
    let entry = |name: &str| hdfs::Entry { name: name.to_owned(), status: status(true) };
    let start = |after: &str, hidden| {
        Some(PageStart { after: Some(after).filter(|a| !a.is_empty()).map(Into::into), hidden })
    };
    let pages = [
        ("a path", hdfs::Page { entries: vec![entry("a/../../b")], ..Default::default() }),
        ("no name", hdfs::Page { entries: vec![entry("")], ..Default::default() }),
        ("a byte 0", hdfs::Page { entries: vec![entry("a\0b")], ..Default::default() }),
        ("too many", hdfs::Page { entries: vec![entry("a"); 1001], ..Default::default() }),
        ("too many hidden", hdfs::Page { hidden: u32::MAX, ..Default::default() }),
        ("nowhere", hdfs::Page { next: start("", 0), ..Default::default() }),
        ("elsewhere", hdfs::Page { entries: vec![entry("a")], next: start("z", 0), ..Default::default() }),
        ("back", hdfs::Page { hidden: 1, next: start("", 0), ..Default::default() }),
    ];
    for (name, told) in pages {
        let answer = page(told);
        let helpers = Scripted::new(move |mut end: End| {
            let answer = answer.clone();
            async move {
                end.begin().await;
                let Some((id, _)) = end.asked().await else { return };
                end.answer(id, answer).await;
                end.until_killed().await;
            }
        });
        let error = helpers.open(LONG).list(b"d", None).await.expect_err(name);
        assert!(matches!(error, StoreError::Malformed { .. }), "{name}: {error}");
    }
}

#[tokio::test]
async fn a_helper_that_never_gets_ready_is_given_up_for_another_one() {
    let helpers = Scripted::new(|mut end: End| async move {
        match end.number {
            // One says nothing at all, one stops after its first word.
            0 => end.until_killed().await,
            1 => {
                end.say(FromHelper::Hello { protocol: hdfs::PROTOCOL }).await;
                end.until_killed().await;
            }
            _ => end.honest().await,
        }
    });
    let source = helpers.open_with(LONG, LONG);
    assert!(source.head(b"f").await.unwrap().is_some());
    assert_eq!(helpers.started(), 3);
}

#[tokio::test]
async fn a_person_is_told_whether_anybody_answers_and_then_what() {
    let refuses = Scripted::new(|mut end: End| async move {
        end.begin().await;
        while let Some((id, _)) = end.asked().await {
            end.answer(id, failure(FailureKind::Denied)).await;
        }
    });
    let told = refuses.open(LONG).examine(LONG).await;
    assert_eq!(
        told.iter().map(|one| (one.step, one.result.is_ok())).collect::<Vec<_>>(),
        [(Step::Connection, true), (Step::Access, false)]
    );
    assert!(told[1].result.as_ref().unwrap_err().contains("why"), "{told:?}");
    let silent = Scripted::new(|mut end: End| async move {
        end.begin().await;
        end.until_killed().await;
    });
    let told = silent.open(LONG).examine(SHORT).await;
    assert_eq!(told.len(), 1, "{told:?}");
    assert!(told[0].step == Step::Connection && told[0].result.is_err(), "{told:?}");
}

#[tokio::test]
async fn names_that_no_file_may_have_are_told_and_not_shown() {
    let helpers = Scripted::new(|mut end: End| async move {
        end.begin().await;
        let entry = |name: &str| hdfs::Entry { name: name.to_owned(), status: status(true) };
        let mut names = ["..", ".", "good", &"n".repeat(256), "huge"].map(entry).to_vec();
        names[4].status.version.length = u64::MAX;
        while let Some((id, _)) = end.asked().await {
            let page = hdfs::Page { entries: names.clone(), hidden: 2, next: None };
            end.answer(id, Ok(Answer::Page(page))).await;
        }
    });
    let page = helpers.open(LONG).list(b"d", None).await.unwrap();
    assert_eq!(page.entries.iter().map(|entry| entry.name.as_slice()).collect::<Vec<_>>(), [b"good"]);
    assert_eq!(page.unnameable.len(), 4 + 2);
}

#[tokio::test]
async fn a_reader_that_does_not_read_holds_up_its_helper_and_no_other_question() {
    let sent = Arc::new(AtomicUsize::new(0));
    let counted = sent.clone();
    let helpers = Scripted::new(move |mut end: End| {
        let sent = counted.clone();
        async move {
            end.begin().await;
            let (read, _) = end.asked().await.unwrap();
            for _ in 0..16 {
                end.data(read, &[0; 64 << 10]).await;
                sent.fetch_add(64 << 10, Ordering::SeqCst);
            }
            // The window is full. Other questions are answered meanwhile.
            while let Some(message) = end.hear().await {
                match message {
                    ToHelper::Ask { id, question, .. } => drop(end.honest_answer(id, question, 0).await),
                    ToHelper::More { bytes, .. } => {
                        end.data(read, &vec![0; (bytes as usize).min(128 << 10)]).await;
                    }
                    _ => {}
                }
            }
        }
    });
    let source = helpers.open_with(LONG, LONG);
    let mut stream = source.get(b"f", &version(VERSION), 0..SIZE).await.unwrap();
    for _ in 0..3 {
        assert!(source.head(b"f").await.unwrap().is_some());
    }
    assert_eq!(sent.load(Ordering::SeqCst), 1 << 20);
    assert!(stream.try_next().await.unwrap().is_some());
    assert_eq!(helpers.started(), 1);
    // One that sends more than it was granted is ended.
    let helpers = Scripted::new(|mut end: End| async move {
        end.begin().await;
        let Some((id, _)) = end.asked().await else { return };
        for _ in 0..17 {
            end.data(id, &[0; 64 << 10]).await;
        }
        end.until_killed().await;
    });
    let source = helpers.open(SHORT);
    let mut stream = source.get(b"f", &version(VERSION), 0..SIZE).await.unwrap();
    while !helpers.killed.lock().unwrap()[0].load(Ordering::SeqCst) {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    while let Ok(Some(_)) = stream.try_next().await {}
}

#[tokio::test]
async fn more_bytes_than_were_asked_for_are_none_of_the_file() {
    let helpers = Scripted::new(|mut end: End| async move {
        end.begin().await;
        let Some((id, _)) = end.asked().await else { return };
        end.data(id, &[7; 200]).await;
        end.answer(id, Ok(Answer::End)).await;
        end.until_killed().await;
    });
    let error = read(&helpers.open(LONG), 0..100).await.unwrap_err();
    assert!(matches!(error, StoreError::Malformed { .. }), "{error}");
}

#[tokio::test]
async fn less_than_was_asked_for_is_asked_for_again() {
    let helpers = Scripted::new(|mut end: End| async move {
        end.begin().await;
        while let Some((id, question)) = end.asked().await {
            // Half a mebibyte, and that that was all.
            if !end.honest_answer(id, question, 512 << 10).await {
                end.answer(id, Ok(Answer::End)).await;
            }
        }
    });
    assert!(read(&helpers.open(LONG), 0..SIZE).await.unwrap() == of(0..SIZE));
    assert_eq!(helpers.started(), 1);
}

#[tokio::test]
async fn failures_are_what_they_are_at_other_stores() {
    for (kind, is_right) in [
        (FailureKind::NotFound, (|e| matches!(e, StoreError::NotFound { .. })) as fn(&StoreError) -> bool),
        (FailureKind::Denied, |e| matches!(e, StoreError::Denied { .. })),
        (FailureKind::Expired, |e| matches!(e, StoreError::Expired { .. })),
        (FailureKind::Stale, |e| matches!(e, StoreError::Stale { .. })),
        (FailureKind::Invalid, |e| matches!(e, StoreError::Invalid { .. })),
        (FailureKind::Unfinished, |e| matches!(e, StoreError::Malformed { .. })),
        (FailureKind::Unreachable, |e| matches!(e, StoreError::Unavailable { .. })),
        (FailureKind::Silent, |e| matches!(e, StoreError::Unavailable { .. })),
        (FailureKind::Refused, |e| matches!(e, StoreError::Unavailable { .. })),
        (FailureKind::Broken, |e| matches!(e, StoreError::Unavailable { .. })),
        (FailureKind::Truncated, |e| matches!(e, StoreError::Unavailable { .. })),
    ] {
        let helpers = Scripted::new(move |mut end: End| async move {
            end.begin().await;
            while let Some((id, _)) = end.asked().await {
                end.answer(id, failure(kind)).await;
            }
        });
        let source = helpers.open(SHORT);
        for error in [source.head(b"f").await.unwrap_err(), read(&source, 0..1).await.unwrap_err()] {
            assert!(is_right(&error), "{kind:?}: {error}");
        }
        assert_eq!(helpers.started(), 1, "HDFS's faults are none of the helper's");
    }
}

#[tokio::test]
async fn a_helper_that_panics_at_an_answer_goes_on() {
    let helpers = Scripted::new(|mut end: End| async move {
        end.begin().await;
        let (id, _) = end.asked().await.unwrap();
        end.answer(id, failure(FailureKind::Panicked)).await;
        while let Some((id, question)) = end.asked().await {
            end.honest_answer(id, question, u64::MAX).await;
        }
    });
    assert!(helpers.open(LONG).head(b"f").await.unwrap().is_some());
    assert_eq!(helpers.started(), 1);
}

#[tokio::test]
async fn a_configuration_that_cannot_work_and_another_build_are_said_at_once() {
    let helpers = Scripted::new(|mut end: End| async move {
        end.say(FromHelper::Hello { protocol: hdfs::PROTOCOL }).await;
        end.hear().await;
        end.say(FromHelper::Unusable { why: "no NameNodes\n\tat java".into() }).await;
    });
    let error = helpers.open(LONG).head(b"f").await.unwrap_err();
    assert!(matches!(&error, StoreError::Invalid { why, .. } if why == "no NameNodes"), "{error}");
    let told = Arc::new(AtomicBool::new(false));
    let secrets = told.clone();
    let helpers = Scripted::new(move |mut end: End| {
        let told = secrets.clone();
        async move {
            end.say(FromHelper::Hello { protocol: hdfs::PROTOCOL + 1 }).await;
            told.fetch_or(end.hear().await.is_some(), Ordering::SeqCst);
        }
    });
    let error = helpers.open(LONG).head(b"f").await.unwrap_err();
    assert!(error.to_string().contains("install both from one release"), "{error}");
    assert!(!told.load(Ordering::SeqCst), "it was told no secret");
}

#[tokio::test]
async fn helpers_that_die_at_once_are_not_started_without_pause() {
    let helpers = Scripted::new(|mut end: End| async move { end.begin().await });
    let source = helpers.open(SHORT);
    let many = (0..50).map(|_| source.head(b"f"));
    assert!(futures::future::join_all(many).await.iter().all(Result::is_err));
    assert!(helpers.started() < 30, "{}", helpers.started());
}

#[test]
fn tokens_and_versions_come_back_as_they_went() {
    for after in [None, Some("a"), Some("ä /.\n"), Some(".")] {
        let start = PageStart { after: after.map(str::to_owned), hidden: 7 };
        assert_eq!(parse_token(&token(&start)), Some(start));
    }
    for bad in ["", "x", "7", "7.%", "-1.", "7._w"] {
        assert_eq!(parse_token(bad), None, "{bad}");
    }
    assert_eq!(parse(&version(VERSION)), Some(VERSION));
    for bad in ["", "5", "5-", "-5", "a-b", "5-6-7"] {
        assert_eq!(parse(&Version(bad.into())), None, "{bad}");
    }
}
