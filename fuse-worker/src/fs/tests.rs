//! The file system without a kernel: a real metadata store, an agent that answers when the test says so.

use super::*;
use crate::client::Then;
use crate::reply::{Delivery, Sink};
use cache::meta::{Attributes, Cached, Clock, Incoming, InodeNumbers, Kind, MetaError, Options, ROOT, Store};
use fuse_abi::open::{FOPEN_KEEP_CACHE, FOPEN_PASSTHROUGH};
use link::Cause;
use link::worker::{ANNOUNCED_FROM, Ask, FromWorker, Reply as AgentReply};
use std::collections::VecDeque;
use std::fs::File;
use std::io::{IoSlice, Write};
use std::os::unix::fs::FileExt;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::time::Duration;
use volume::Permissions;

const GENERATION: u64 = 5;

#[derive(Default)]
struct FakeLink {
    asked: Mutex<VecDeque<(Ask, Then)>>,
    messages: Mutex<Vec<FromWorker>>,
}

impl Link for FakeLink {
    fn ask(&self, question: Ask, then: Then) {
        self.asked.lock().unwrap().push_back((question, then));
    }
    fn tell(&self, message: FromWorker) {
        self.messages.lock().unwrap().push(message);
    }
}

#[derive(Default)]
struct Answers {
    sent: Mutex<Vec<(u64, i32, Vec<u8>)>>,
    notified: Mutex<Vec<(i32, Vec<u8>)>>,
    drop_all: std::sync::atomic::AtomicBool,
}

impl Sink for Answers {
    fn notify(&self, code: i32, body: &[u8]) {
        self.notified.lock().unwrap().push((code, body.to_vec()));
    }
    fn send(&self, unique: u64, error: i32, body: &[IoSlice<'_>]) -> Delivery {
        if self.drop_all.load(SeqCst) {
            return Delivery::Dropped;
        }
        self.sent.lock().unwrap().push((unique, error, body.iter().flat_map(|part| part.to_vec()).collect()));
        Delivery::Delivered
    }
}

struct Counting(AtomicU64);
impl InodeNumbers for Counting {
    fn next(&self) -> Result<u64, MetaError> {
        Ok(self.0.fetch_add(1, SeqCst))
    }
}

struct Bench {
    fs: Arc<Fs>,
    store: Store,
    link: Arc<FakeLink>,
    answers: Arc<Answers>,
    settings: Settings,
    inflight: Arc<Inflight>,
    now: Arc<AtomicU64>,
    unique: AtomicU64,
    home: tempfile::TempDir,
}

impl Bench {
    fn new(mode: Mode, ttl: Option<Duration>) -> Self {
        let home = tempfile::tempdir().unwrap();
        let now = Arc::new(AtomicU64::new(1_000_000));
        let clock = now.clone();
        let wall = now.clone();
        let time = Clock::new("boot", move || clock.load(SeqCst), move || wall.load(SeqCst));
        let numbers = Arc::new(Counting(AtomicU64::new(16)));
        let store = Store::open_at(home.path(), &Options::default(), numbers, time).unwrap();
        let link = Arc::new(FakeLink::default());
        let clock = now.clone();
        let settings = settings(mode, ttl);
        let inflight = Arc::new(Inflight::map(Inflight::create(inflight::Room::ReadOnly).unwrap()).unwrap());
        let fs = Fs::new(
            settings.clone(),
            store.view(),
            link.clone(),
            inflight.clone(),
            vec![File::open(home.path()).unwrap().into()],
            Arc::new(move || clock.load(SeqCst)),
        );
        let (answers, unique) = (Arc::default(), AtomicU64::new(2));
        Self { fs, store, link, answers, settings, inflight, now, unique, home }
    }

    /// Another worker takes over.
    fn succeed(&mut self) {
        let settings = Settings { successor: true, ..self.settings.clone() };
        let now = self.now.clone();
        let clock = Arc::new(move || now.load(SeqCst));
        let (view, link, inflight) = (self.store.view(), self.link.clone(), self.inflight.clone());
        self.fs = Fs::new(settings, view, link, inflight, vec![], clock);
    }

    fn file(&self, name: &str, token: &str, size: u64) -> Attributes {
        self.store.put(ROOT, &incoming(name, token, size)).unwrap()
    }

    fn reply(&self) -> Reply {
        Reply::new(self.answers.clone(), self.unique.fetch_add(2, SeqCst))
    }

    /// What was answered since the last call.
    fn answered(&self) -> Vec<(i32, Vec<u8>)> {
        self.answers.sent.lock().unwrap().drain(..).map(|(_, error, body)| (error, body)).collect()
    }

    fn only(&self) -> (i32, Vec<u8>) {
        let mut answers = self.answered();
        assert_eq!(answers.len(), 1, "{answers:?}");
        answers.remove(0)
    }

    /// The oldest open question, answered.
    fn agent(&self, answer: Result<(AgentReply, Vec<OwnedFd>), Cause>) -> String {
        let (question, then) = self.link.asked.lock().unwrap().pop_front().expect("an open question");
        then(answer);
        format!("{question:?}")
    }

    fn open_questions(&self) -> usize {
        self.link.asked.lock().unwrap().len()
    }

    fn cached_file(&self, id: u64, bytes: &[u8]) -> File {
        let path = self.home.path().join(cache::data::file_name(id));
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        let mut file = File::options().read(true).write(true).create(true).truncate(true).open(path).unwrap();
        file.write_all(bytes).unwrap();
        file
    }
}

fn settings(mode: Mode, ttl: Option<Duration>) -> Settings {
    Settings {
        mode,
        show: Show {
            attributes_of_source: false,
            uid: 7,
            gid: 8,
            file_mode: 0o440,
            dir_mode: 0o550,
            ttl,
            revalidate_on_open: false,
        },
        generation: GENERATION,
        block_bytes: 4096,
        source: "s3://bucket/prefix/".into(),
        no_opendir: true,
        files_max: 16,
        buffer_bytes: 4 << 20,
        successor: false,
        injected_faults: Vec::new(),
    }
}

fn attributes() -> Attributes {
    let bench = Bench::new(Mode::Kept, None);
    bench.file("f", "a", 5)
}

fn incoming(name: &str, token: &str, size: u64) -> Incoming {
    Incoming {
        name: name.into(),
        kind: Kind::File,
        size,
        mtime_ns: 1,
        token: token.into(),
        target: vec![],
        permissions: None,
    }
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_ne_bytes(*bytes[at..].first_chunk().unwrap())
}
fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_ne_bytes(*bytes[at..].first_chunk().unwrap())
}

#[test]
fn a_known_name_is_answered_without_the_agent_for_the_rest_of_its_ttl() {
    let bench = Bench::new(Mode::Kept, Some(Duration::from_secs(10)));
    let file = bench.file("f", "a", 5);
    bench.now.fetch_add(4000, SeqCst);
    bench.fs.lookup(ROOT, b"f", bench.reply());
    let (error, body) = bench.only();
    assert_eq!((error, u64_at(&body, 0)), (0, node_id(Mode::Kept, &file)));
    assert_eq!((u64_at(&body, 16), u64_at(&body, 24)), (6, 6), "seconds left");
    assert_eq!(u64_at(&body, 40), file.ino);
    assert_eq!(bench.open_questions(), 0);
}

#[test]
fn owner_and_mode_are_the_sources_where_the_volume_wants_them_and_it_tells_them() {
    let shown = |attributes_of_source, permissions| {
        let mut settings = settings(Mode::Kept, None);
        settings.show.attributes_of_source = attributes_of_source;
        let shown = Shown::new(&settings, Arc::new(|| 0));
        [Kind::File, Kind::Directory, Kind::Symlink].map(|kind| {
            let stat = shown.stat(&Attributes { kind, permissions, ..attributes() });
            (stat.mode & 0o7777, stat.uid, stat.gid)
        })
    };
    let told = |mode, uid, gid| Some(Permissions { mode, uid, gid });
    let volumes = [(0o440, 7, 8), (0o550, 7, 8), (0o777, 7, 8)];
    assert_eq!(shown(false, told(0o600, Some(1), Some(2))), volumes);
    assert_eq!(shown(true, None), volumes);
    let sources = [(0o600, 1, 8), (0o600, 1, 8), (0o777, 1, 8)];
    assert_eq!(shown(true, told(0o600, Some(1), None)), sources);
    assert_eq!(shown(true, told(0o4700, None, Some(2)))[0], (0o700, 7, 2), "a damaged store gives no rights");
}

#[test]
fn a_stale_name_is_asked_again_and_an_unknown_one_once() {
    let bench = Bench::new(Mode::Kept, Some(Duration::from_secs(10)));
    bench.file("f", "a", 5);
    bench.now.fetch_add(10_000, SeqCst);
    bench.fs.lookup(ROOT, b"f", bench.reply());
    assert!(bench.answered().is_empty());
    bench.file("f", "b", 6);
    assert!(bench.agent(Ok((AgentReply::Stored, vec![]))).contains("Lookup"));
    assert_eq!(u64_at(&bench.only().1, 48), 6, "the new size");
    bench.fs.lookup(ROOT, b"g", bench.reply());
    bench.agent(Err(Cause::Denied));
    assert_eq!(bench.only(), (-libc::EACCES, vec![]));
}

#[test]
fn an_absent_name_is_a_cached_negative_entry() {
    let bench = Bench::new(Mode::NoOpen, Some(Duration::from_secs(10)));
    bench.store.put_absent(ROOT, b"gone").unwrap();
    bench.fs.lookup(ROOT, b"gone", bench.reply());
    let (error, body) = bench.only();
    assert_eq!((error, u64_at(&body, 0), u64_at(&body, 16)), (0, 0, 10));
    bench.fs.lookup(ROOT, &[b'x'; 300], bench.reply());
    assert_eq!(bench.only().0, -libc::ENAMETOOLONG);
}

#[test]
fn a_listing_goes_on_after_any_entry_and_shows_every_name_once() {
    let bench = Bench::new(Mode::Kept, None);
    let names: Vec<String> = (0..200).map(|i| format!("name-{i:03}")).collect();
    let mut listing = bench.store.begin_listing(ROOT).unwrap();
    listing.page(&names.iter().map(|name| incoming(name, "t", 1)).collect::<Vec<_>>()).unwrap();
    listing.finish().unwrap();
    for plus in [false, true] {
        let (mut seen, mut offset) = (Vec::new(), 0);
        loop {
            bench.fs.readdir(Batch { dir: ROOT, offset, bytes_max: 1000, plus }, bench.reply());
            let (error, mut rest) = bench.only();
            assert_eq!(error, 0);
            if rest.is_empty() {
                break;
            }
            while !rest.is_empty() {
                let entry = if plus { rest.split_off(128) } else { std::mem::take(&mut rest) };
                let len = u32_at(&entry, 16) as usize;
                offset = u64_at(&entry, 8);
                seen.push(String::from_utf8(entry[24..24 + len].to_vec()).unwrap());
                rest = entry[(24 + len).next_multiple_of(8)..].to_vec();
            }
        }
        assert_eq!(seen[..2], [".", ".."]);
        assert_eq!(seen[2..], names);
    }
}

#[test]
fn a_whole_file_is_read_without_asking_anyone() {
    let bench = Bench::new(Mode::Kept, None);
    let file = bench.file("f", "a", 9);
    bench.cached_file(0x77, b"some data");
    let cached = Cached { generation: GENERATION, root: 0, file: 0x77 };
    bench.store.set_cached(file.ino, file.version, Some(cached)).unwrap().unwrap();
    bench.fs.read(node_id(Mode::Kept, &file), u64::from(file.version), 5, 100, bench.reply());
    assert_eq!(bench.only(), (0, b"data".to_vec()));
    bench.fs.report_touched();
    assert!(
        matches!(&bench.link.messages.lock().unwrap()[..], [FromWorker::Touched { files }] if files == &[0x77])
    );
}

#[test]
fn a_location_of_another_agent_is_not_believed() {
    let bench = Bench::new(Mode::Kept, None);
    let file = bench.file("f", "a", 9);
    let data = bench.cached_file(0x77, b"some data");
    let cached = Cached { generation: GENERATION - 1, root: 0, file: 0x77 };
    bench.store.set_cached(file.ino, file.version, Some(cached)).unwrap().unwrap();
    bench.fs.read(node_id(Mode::Kept, &file), 0, 0, 9, bench.reply());
    let reply = AgentReply::File { file: 0x77, size: 9, whole: true };
    assert!(bench.agent(Ok((reply, vec![data.into()]))).contains("File"));
    assert_eq!(bench.only(), (0, b"some data".to_vec()));
}

/// A file of two blocks, of which the agent sends descriptors when asked.
fn partial(bench: &Bench) -> (Attributes, File, AgentReply, Vec<OwnedFd>, memmap2::MmapMut) {
    let file = bench.file("f", "a", 8192);
    let data = bench.cached_file(0x88, &[1; 8192]);
    let bits = rustix::fs::memfd_create("bits", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&bits, 8).unwrap();
    // SAFETY: a memory file of our own.
    let map = unsafe { memmap2::MmapMut::map_mut(&bits) }.unwrap();
    let fds = vec![data.try_clone().unwrap().into(), bits];
    (file, data, AgentReply::File { file: 0x88, size: 8192, whole: false }, fds, map)
}

#[test]
fn readers_of_one_content_share_one_question_for_its_file_and_each_asks_for_missing_bytes() {
    let bench = Bench::new(Mode::Kept, None);
    let (file, data, reply, fds, mut bits) = partial(&bench);
    let nodeid = node_id(Mode::Kept, &file);
    bench.fs.read(nodeid, 0, 0, 4096, bench.reply());
    bench.fs.read(nodeid, 0, 4096, 4096, bench.reply());
    assert_eq!(bench.open_questions(), 1);
    bits[0] = 1; // the first block
    bench.agent(Ok((reply, fds)));
    assert_eq!(bench.only(), (0, vec![1; 4096]), "present: answered at once");
    data.write_all_at(&[2; 4096], 4096).unwrap();
    assert!(
        bench
            .agent(Ok((AgentReply::Present { mark: Some(8100) }, vec![])))
            .contains("Read { file: 136, offset: 4096")
    );
    assert_eq!(bench.only(), (0, vec![2; 4096]));
    assert!(matches!(
        bench.link.messages.lock().unwrap()[..],
        [FromWorker::Advance { file: 0x88, offset: 8192 }]
    ));
}

#[test]
fn bytes_that_the_cache_cannot_take_come_along_and_failures_become_errnos() {
    let bench = Bench::new(Mode::Kept, None);
    let (file, _, reply, fds, _bits) = partial(&bench);
    let nodeid = node_id(Mode::Kept, &file);
    bench.fs.read(nodeid, 0, 0, 5, bench.reply());
    bench.agent(Ok((reply, fds)));
    let bytes = tempfile::tempfile().unwrap();
    bytes.write_all_at(b"hello", 0).unwrap();
    bench.agent(Ok((AgentReply::Uncached { len: 5, number: 9 }, vec![bytes.into()])));
    assert_eq!(bench.only(), (0, b"hello".to_vec()));
    for (cause, errno) in [
        (Cause::Unavailable, libc::EIO),
        (Cause::Stale, libc::ESTALE),
        (Cause::Denied, libc::EACCES),
        (Cause::NotFound, libc::ENOENT),
    ] {
        bench.fs.read(nodeid, 0, 0, 5, bench.reply());
        bench.agent(Err(cause));
        assert_eq!(bench.only().0, -errno);
    }
}

#[test]
fn a_file_that_turns_out_short_or_gone_is_fetched_anew_and_the_reader_sees_bytes() {
    let bench = Bench::new(Mode::Kept, None);
    let file = bench.file("f", "a", 9);
    let short = bench.cached_file(0x77, b"some");
    bench.fs.read(node_id(Mode::Kept, &file), 0, 0, 9, bench.reply());
    bench.agent(Ok((AgentReply::File { file: 0x77, size: 9, whole: true }, vec![short.into()])));
    assert!(bench.agent(Ok((AgentReply::Stored, vec![]))).contains("Damaged { file: 119 }"));
    let right = bench.cached_file(0x78, b"some data");
    bench.agent(Ok((AgentReply::File { file: 0x78, size: 9, whole: true }, vec![right.into()])));
    assert_eq!(bench.only(), (0, b"some data".to_vec()));
    bench.fs.forget_file(0x78);
    bench.fs.read(node_id(Mode::Kept, &file), 0, 0, 9, bench.reply());
    assert_eq!(bench.open_questions(), 1, "a forgotten file is not held any more");
    bench.agent(Err(Cause::Stale));
}

#[test]
fn a_sound_file_whose_disk_was_hanging_is_asked_for_again_and_not_called_damaged() {
    let bench = Bench::new(Mode::Kept, None);
    let (file, data, reply, fds, _bits) = partial(&bench);
    data.write_all_at(&[1; 4096], 0).unwrap();
    let id = |reply: &AgentReply| match reply {
        AgentReply::File { file, size, .. } => (*file, *size),
        other => panic!("{other:?}"),
    };
    let (known, size) = id(&reply);
    bench.fs.read(node_id(Mode::Kept, &file), 0, 0, 4096, bench.reply());
    // What the agent sends while the disk does not answer: nothing, of which nothing is present.
    let bits = tempfile::tempfile().unwrap();
    bits.set_len(4096).unwrap();
    let nothing = vec![tempfile::tempfile().unwrap().into(), bits.into()];
    bench.agent(Ok((AgentReply::File { file: known, size, whole: false }, nothing)));
    // It answers again.
    assert!(bench.agent(Ok((AgentReply::Present { mark: None }, vec![]))).contains("Read {"));
    assert!(bench.agent(Ok((reply, fds))).contains("File {"), "the file itself, and no complaint of it");
    bench.agent(Ok((AgentReply::Present { mark: None }, vec![])));
    assert_eq!(bench.only(), (0, vec![1; 4096]));
}

#[test]
fn an_open_file_keeps_its_version_and_a_superseded_node_id_is_estale_once() {
    let bench = Bench::new(Mode::Kept, None);
    let old = bench.file("f", "a", 9);
    let nodeid = node_id(Mode::Kept, &old);
    bench.fs.open(nodeid, libc::O_RDONLY, bench.reply());
    let (_, opened) = bench.only();
    assert_eq!((u64_at(&opened, 0), u32_at(&opened, 8) & FOPEN_KEEP_CACHE), (1, FOPEN_KEEP_CACHE));
    let new = bench.file("f", "b", 20);
    assert_ne!(node_id(Mode::Kept, &new), nodeid);
    bench.fs.read(nodeid, 1, 0, 9, bench.reply());
    assert_eq!(bench.agent(Err(Cause::Stale)), format!("File {{ ino: {}, version: 1 }}", old.ino));
    assert_eq!(bench.only().0, -libc::ESTALE);
    bench.fs.getattr(nodeid, false, bench.reply());
    assert_eq!(u64_at(&bench.only().1, 24), 9, "the old size: the new one would cut its pages");
    bench.fs.open(nodeid, libc::O_RDONLY, bench.reply());
    assert_eq!(bench.only().0, -libc::ESTALE);
    bench.fs.open(nodeid, libc::O_RDONLY, bench.reply());
    assert_eq!(u64_at(&bench.only().1, 0), 1, "served in its own version");
    bench.fs.open(nodeid, libc::O_RDWR, bench.reply());
    assert_eq!(bench.only().0, -libc::EROFS);
}

#[test]
fn where_the_kernel_opens_without_asking_a_content_that_is_gone_makes_it_ask() {
    let bench = Bench::new(Mode::NoOpen, None);
    let old = bench.file("f", "a", 9);
    let nodeid = node_id(Mode::NoOpen, &old);
    bench.fs.read(nodeid, 0, 0, 9, bench.reply());
    let new = bench.file("f", "b", 20);
    bench.agent(Err(Cause::Stale));
    assert_eq!(bench.only().0, -libc::ESTALE);
    let notified = std::mem::take(&mut *bench.answers.notified.lock().unwrap());
    let [(2, body)] = &notified[..] else { panic!("{notified:?}") };
    assert_eq!((u64_at(body, 0), u64_at(body, 8), u64_at(body, 16)), (nodeid, u64::MAX, 0));
    bench.fs.getattr(nodeid, false, bench.reply());
    assert_eq!(bench.only().0, -libc::ESTALE, "an open by name");
    bench.fs.getattr(nodeid, true, bench.reply());
    let (error, body) = bench.only();
    assert_eq!(
        (error, u64_at(&body, 0), u64_at(&body, 24)),
        (0, 0, 9),
        "its reader: the old size, not remembered"
    );
    bench.fs.lookup(ROOT, b"f", bench.reply());
    assert_eq!(u64_at(&bench.only().1, 0), node_id(Mode::NoOpen, &new));
    // If the name still leads there after all, it is as good as before.
    bench.fs.read(node_id(Mode::NoOpen, &new), 0, 0, 9, bench.reply());
    bench.agent(Err(Cause::Stale));
    assert_eq!(bench.only().0, -libc::ESTALE);
    bench.fs.lookup(ROOT, b"f", bench.reply());
    bench.fs.getattr(node_id(Mode::NoOpen, &new), false, bench.reply());
    assert!(bench.answered().iter().all(|(error, _)| *error == 0));
}

#[test]
fn passthrough_ids_are_recorded_before_the_reply_counted_once_and_closed_when_superseded() {
    let bench = Bench::new(Mode::Passthrough, None);
    let file = bench.file("f", "a", 9);
    let cached = Cached { generation: GENERATION, root: 0, file: 0x77 };
    let file = bench.store.set_cached(file.ino, file.version, Some(cached)).unwrap().unwrap();
    let nodeid = node_id(Mode::Passthrough, &file);
    bench.fs.open(nodeid, libc::O_RDONLY, bench.reply());
    bench.fs.open(nodeid, libc::O_RDONLY, bench.reply());
    assert!(bench.agent(Ok((AgentReply::Backing { id: 3 }, vec![]))).contains("BackingOpen { file: 119 }"));
    for (error, opened) in bench.answered() {
        assert_eq!((error, u32_at(&opened, 12)), (0, 3));
        assert_ne!(u32_at(&opened, 8) & FOPEN_PASSTHROUGH, 0);
    }
    bench.answers.drop_all.store(true, SeqCst);
    bench.fs.open(nodeid, libc::O_RDONLY, bench.reply()); // its caller is killed: no RELEASE will come
    bench.answers.drop_all.store(false, SeqCst);
    assert_eq!(bench.inflight.backings()[0].1.refs, 2);
    bench.store.set_cached(file.ino, file.version, None).unwrap();
    bench.fs.release(nodeid, bench.reply());
    assert_eq!((bench.inflight.backings().len(), bench.open_questions()), (1, 0));
    bench.fs.release(nodeid, bench.reply());
    assert!(bench.inflight.backings().is_empty());
    assert!(bench.agent(Ok((AgentReply::Stored, vec![]))).contains("BackingClose { id: 3 }"));
}

/// The agent says it once, perhaps to a worker that dies before it listens.
#[test]
fn a_passthrough_id_of_a_file_that_is_gone_is_closed_without_a_word_of_the_agents() {
    let mut bench = Bench::new(Mode::Passthrough, None);
    let file = bench.file("f", "a", 9);
    let cached = Cached { generation: GENERATION, root: 0, file: 0x77 };
    let file = bench.store.set_cached(file.ino, file.version, Some(cached)).unwrap().unwrap();
    let nodeid = node_id(Mode::Passthrough, &file);
    bench.fs.open(nodeid, libc::O_RDONLY, bench.reply());
    bench.agent(Ok((AgentReply::Backing { id: 3 }, vec![])));
    bench.store.set_cached(file.ino, file.version, None).unwrap();
    bench.fs.trim();
    assert_eq!(bench.inflight.backings().len(), 1, "closed while it is open");

    let file = bench.file("g", "a", 9);
    let cached = Cached { file: 0x78, ..cached };
    let file = bench.store.set_cached(file.ino, file.version, Some(cached)).unwrap().unwrap();
    let nodeid = node_id(Mode::Passthrough, &file);
    bench.fs.open(nodeid, libc::O_RDONLY, bench.reply());
    bench.agent(Ok((AgentReply::Backing { id: 4 }, vec![])));
    bench.fs.release(nodeid, bench.reply());
    bench.fs.trim();
    assert_eq!(bench.inflight.backings().len(), 2, "closed while it may be opened again");
    bench.store.set_cached(file.ino, file.version, None).unwrap();
    bench.succeed();
    bench.fs.trim();
    let left: Vec<u32> = bench.inflight.backings().iter().map(|(_, backing)| backing.id).collect();
    assert_eq!(left, [3]);
    assert!(bench.agent(Ok((AgentReply::Stored, vec![]))).contains("BackingClose { id: 4 }"));
}

#[test]
fn an_inode_that_has_just_changed_its_node_id_is_not_estale_again() {
    let bench = Bench::new(Mode::Passthrough, None);
    let (even, cached) = (bench.file("f", "a", 9), Cached { generation: GENERATION, root: 0, file: 0x77 });
    let odd = bench.store.set_cached(even.ino, even.version, Some(cached)).unwrap().unwrap();
    bench.fs.open(node_id(Mode::Passthrough, &even), libc::O_RDONLY, bench.reply());
    assert_eq!(bench.only().0, -libc::ESTALE);
    bench.fs.lookup(ROOT, b"f", bench.reply());
    assert_eq!(u64_at(&bench.only().1, 0), node_id(Mode::Passthrough, &odd));
    bench.store.set_cached(even.ino, even.version, None).unwrap();
    for _ in 0..2 {
        bench.fs.open(node_id(Mode::Passthrough, &odd), libc::O_RDONLY, bench.reply());
        let (error, opened) = bench.only();
        assert_eq!((error, u32_at(&opened, 8) & FOPEN_PASSTHROUGH, u64_at(&opened, 0)), (0, 0, 1));
        bench.fs.release(node_id(Mode::Passthrough, &odd), bench.reply());
        assert_eq!(bench.only().0, 0);
    }
    bench.now.fetch_add(10_000, SeqCst);
    bench.fs.open(node_id(Mode::Passthrough, &odd), libc::O_RDONLY, bench.reply());
    assert_eq!(bench.only().0, -libc::ESTALE, "now it may move on");
}

#[test]
fn a_successor_knows_what_was_open_and_sends_nobody_to_look_again_a_second_time() {
    let mut bench = Bench::new(Mode::Passthrough, None);
    let (first, cached) = (bench.file("f", "a", 9), Cached { generation: GENERATION, root: 0, file: 0x77 });
    bench.fs.open(node_id(Mode::Passthrough, &first), libc::O_RDONLY, bench.reply());
    assert_eq!(bench.only().0, 0);
    let whole = bench.store.set_cached(first.ino, first.version, Some(cached)).unwrap().unwrap();
    bench.fs.open(node_id(Mode::Passthrough, &first), libc::O_RDONLY, bench.reply());
    assert_eq!(bench.only().0, -libc::ESTALE, "its caller looks the name up again");
    bench.store.set_cached(first.ino, first.version, None).unwrap();
    bench.succeed();
    for nodeid in [&first, &whole].map(|a| node_id(Mode::Passthrough, a)) {
        bench.fs.getattr(nodeid, true, bench.reply());
        let (error, body) = bench.only();
        assert_eq!((error, u64_at(&body, 24)), (0, 9));
    }
    bench.fs.open(node_id(Mode::Passthrough, &whole), libc::O_RDONLY, bench.reply());
    let (error, opened) = bench.only();
    assert_eq!((error, u64_at(&opened, 0)), (0, 1), "a second ESTALE would reach the application");
    // Later it is as with any worker. A content that the source has replaced is known to its opener only.
    bench.now.fetch_add(10_000, SeqCst);
    let again = bench.store.set_cached(first.ino, first.version, Some(cached)).unwrap().unwrap();
    bench.store.set_cached(first.ino, first.version, None).unwrap();
    bench.fs.open(node_id(Mode::Passthrough, &again), libc::O_RDONLY, bench.reply());
    assert_eq!(bench.only().0, -libc::ESTALE);
    bench.file("f", "b", 20);
    bench.fs.getattr(node_id(Mode::Passthrough, &first), true, bench.reply());
    assert_eq!(bench.only().0, -libc::ESTALE);
}

#[test]
fn those_who_waited_until_a_file_was_whole_are_sent_to_its_new_node_id_and_who_comes_again_is_served() {
    let bench = Bench::new(Mode::Passthrough, None);
    let small = bench.file("small", "a", ANNOUNCED_FROM - 1);
    bench.fs.open(node_id(Mode::Passthrough, &small), libc::O_RDONLY, bench.reply());
    assert_eq!(bench.open_questions(), 0, "not worth a question");
    assert_eq!(bench.only().0, 0);
    let file = bench.file("large", "a", ANNOUNCED_FROM);
    let nodeid = node_id(Mode::Passthrough, &file);
    let open = || bench.fs.open(nodeid, libc::O_RDONLY, bench.reply());
    open();
    bench.agent(Ok((AgentReply::Stored, vec![])));
    let (error, opened) = bench.only();
    assert_eq!(
        (error, u32_at(&opened, 8) & FOPEN_KEEP_CACHE),
        (0, FOPEN_KEEP_CACHE),
        "not whole: an ordinary open"
    );
    open();
    open();
    assert_eq!((bench.open_questions(), bench.answered().len()), (2, 0));
    let cached = Cached { generation: GENERATION, root: 0, file: 0x77 };
    bench.store.set_cached(file.ino, file.version, Some(cached)).unwrap().unwrap();
    for _ in 0..2 {
        assert!(bench.agent(Ok((AgentReply::Stored, vec![]))).contains("Open { ino"));
        assert_eq!(bench.only().0, -libc::ESTALE);
    }
    open();
    let (error, opened) = bench.only();
    assert_eq!((error, u32_at(&opened, 8) & FOPEN_KEEP_CACHE), (0, FOPEN_KEEP_CACHE));
}

#[test]
fn a_refused_backing_id_makes_an_ordinary_open() {
    let bench = Bench::new(Mode::Passthrough, None);
    let file = bench.file("f", "a", 9);
    let cached = Cached { generation: GENERATION, root: 0, file: 0x77 };
    let file = bench.store.set_cached(file.ino, file.version, Some(cached)).unwrap().unwrap();
    bench.fs.open(node_id(Mode::Passthrough, &file), libc::O_RDONLY, bench.reply());
    bench.agent(Err(Cause::Internal));
    let (error, opened) = bench.only();
    assert_eq!((error, u32_at(&opened, 8) & (FOPEN_PASSTHROUGH | FOPEN_KEEP_CACHE)), (0, FOPEN_KEEP_CACHE));
}

#[test]
fn extended_attributes_tell_where_a_file_comes_from() {
    let bench = Bench::new(Mode::Kept, None);
    let file = bench.file("f", "abc", 9);
    let value = |name: &[u8]| {
        bench.fs.getxattr(file.ino, name, 100, bench.reply());
        bench.only()
    };
    assert_eq!(value(b"user.millpond.etag"), (0, b"abc".to_vec()));
    assert_eq!(value(b"user.millpond.version"), (0, b"1".to_vec()));
    assert_eq!(value(b"user.millpond.source"), (0, b"s3://bucket/prefix/f".to_vec()));
    assert_eq!(value(b"user.other").0, -libc::ENODATA);
    assert_eq!(value(b"user.millpond.hidden_keys").0, -libc::ENODATA, "a file hides nothing");
    bench.fs.getxattr(file.ino, b"user.millpond.cached_bytes", 100, bench.reply());
    let asked = bench.agent(Ok((AgentReply::Cached { bytes: 7 }, vec![])));
    assert_eq!(asked, format!("Cached {{ ino: {}, version: 1 }}", file.ino), "a look, not an open");
    assert_eq!(bench.only(), (0, b"7".to_vec()));
    bench.fs.listxattr(ROOT, 100, bench.reply());
    assert_eq!(bench.only().1, b"user.millpond.source\0user.millpond.hidden_keys\0");
}

#[test]
fn no_open_answers_enosys_and_a_volume_that_changes_has_no_kept_listing() {
    let fixed = Bench::new(Mode::NoOpen, None);
    fixed.fs.open(20, libc::O_RDONLY, fixed.reply());
    fixed.fs.opendir(fixed.reply());
    assert_eq!(fixed.answered(), vec![(-libc::ENOSYS, vec![]); 2]);
    let changing = Bench::new(Mode::NoOpen, Some(Duration::from_secs(1)));
    changing.fs.opendir(changing.reply());
    assert_eq!(u32_at(&changing.only().1, 8), 0);
}
