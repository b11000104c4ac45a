//! Uploads in parts that are left over, case by case: at the store of the histories, on a disk and a time that are real.

use super::client::OWNER;
use super::fate::Fate;
use super::store::SimulatedStore;
use crate::staging::opening::{FORMAT, JOURNAL};
use crate::staging::parts::FIRST;
use crate::staging::uploads::OLD;
use crate::staging::{Area, Caller, Executed, Looked, Staging};
use crate::state::StateDir;
use crate::testing::scope_over;
use crate::volumes::scope::Scope;
use cache::meta::ROOT;
use inflight::{Inflight, Room};
use journal::Journal;
use link::broker::MountId;
use link::writable::{Done, Operation};
use std::io::Read;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::time::{Duration, Instant};
use store::{Attributes, Body, Condition, Sink, Upload, Write, WriteId};
use volume::{Access, Parameters, ScopeId, SourceUrl, VolumeId, VolumeSpec, WriteMode};

pub(super) const SOON: Duration = Duration::from_secs(60);
const SECOND: Duration = Duration::from_secs(1);

/// With one volume.
pub(super) struct Node {
    dir: tempfile::TempDir,
    store: Arc<SimulatedStore>,
    staging: Arc<Staging>,
    numbers: Arc<StateDir>,
    scope: Option<Arc<Scope>>,
}

pub(super) fn store() -> Arc<SimulatedStore> {
    SimulatedStore::new(Arc::new(Fate::default()), 1, true, false)
}

fn spec() -> VolumeSpec {
    let parameters =
        Parameters { access: Access::ReadWrite, write_mode: WriteMode::Back, ..Parameters::default() };
    let (id, source) = (VolumeId::parse("v").unwrap(), SourceUrl::parse("s3://bucket/v").unwrap());
    VolumeSpec { id, source, parameters }
}

impl Node {
    fn new(store: &Arc<SimulatedStore>) -> Self {
        Self::on_disk(store, SOON)
    }

    /// `limit`: how long the disk may take.
    pub(super) fn on_disk(store: &Arc<SimulatedStore>, limit: Duration) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let numbers = Arc::new(StateDir::open(&dir.path().join("state")).unwrap());
        let staging = Arc::new(Staging::new(dir.path().join("staging"), limit));
        Self { store: store.clone(), staging, numbers, scope: None, dir }
    }

    /// What another agent opens its areas with.
    pub(super) fn another(&self) -> Arc<Staging> {
        Arc::new(Staging::new(self.dir.path().join("staging"), SOON))
    }

    pub(super) async fn open(&mut self) -> Result<Arc<Area>, String> {
        let staging = self.staging.clone();
        self.opens(&staging).await
    }

    pub(super) async fn opens(&mut self, staging: &Arc<Staging>) -> Result<Arc<Area>, String> {
        let scope = self.scope.get_or_insert_with(|| {
            let (id, store) = (ScopeId::parse(&"0a".repeat(16)).unwrap(), self.store.clone());
            scope_over(self.dir.path(), id, self.numbers.clone(), |_| Ok(store)).0
        });
        staging.open(&spec(), scope, &self.numbers).await.map_err(|refusal| refusal.message)
    }

    /// Its agent hands over to another one.
    pub(super) async fn succeed(&mut self, area: Arc<Area>) -> Arc<Area> {
        assert!(area.release(Instant::now() + SOON));
        self.close(area).await;
        self.open().await.unwrap()
    }

    /// Bytes that are staged of this inode.
    pub(super) fn staged(&self, ino: u64) -> u64 {
        self.file(ino).metadata().unwrap().len()
    }

    pub(super) fn bytes(&self, ino: u64) -> Vec<u8> {
        let mut bytes = Vec::new();
        self.file(ino).read_to_end(&mut bytes).unwrap();
        bytes
    }

    /// To be read alone.
    pub(super) fn file(&self, ino: u64) -> std::fs::File {
        std::fs::File::open(self.dir.path().join(format!("staging/v/files/{ino:016x}"))).unwrap()
    }

    pub(super) async fn close(&self, area: Arc<Area>) {
        let weak = Arc::downgrade(&area);
        drop(area);
        until(|| weak.strong_count() == 0).await;
    }

    fn journal(&self) -> Journal {
        let dir = std::fs::File::open(self.dir.path().join("staging/v")).unwrap();
        Journal::open(dir.as_fd(), JOURNAL, FORMAT).unwrap().0
    }
}

async fn until(done: impl Fn() -> bool) {
    let wait = async {
        while !done() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(SOON, wait).await.expect("it comes to pass");
}

fn body(bytes: &[u8]) -> Body {
    let file = tempfile::tempfile().unwrap();
    file.write_all_at(bytes, 0).unwrap();
    let crc32c = crc_fast::checksum(crc_fast::CrcAlgorithm::Crc32Iscsi, bytes) as u32;
    Body { file: Arc::new(file), range: 0..bytes.len() as u64, crc32c }
}

/// By whomever.
async fn begin(store: &SimulatedStore, path: &str, id: u8) -> Upload {
    let write = Write { id: WriteId::new([id; 16]), attributes: Attributes::default() };
    let upload = store.begin(path.as_bytes(), &write).await.unwrap();
    store.part(&upload, 1, &body(b"part")).await.unwrap();
    upload
}

fn noted(area: &Area) -> usize {
    area.state().uploads.len()
}

#[tokio::test(flavor = "multi_thread")]
async fn what_an_agent_that_is_gone_had_begun_is_ended_by_the_next_one() {
    let store = store();
    let mut node = Node::new(&store);
    let area = node.open().await.unwrap();
    let upload = begin(&store, "a", 1).await;
    let held = area.note_upload(&upload).await.unwrap();
    assert_eq!(store.uploads().len(), 1);
    let area = node.succeed(area).await;
    until(|| store.uploads().is_empty() && noted(&area) == 0).await;
    drop(held);
    // And not again.
    node.close(area).await;
    assert!(node.journal().iter().all(|(key, _)| key[0] != b'u'));

    // The same without a word to a successor, of one that had no part yet, and of one that the store does not know any more.
    let area = node.open().await.unwrap();
    let write = Write { id: WriteId::new([2; 16]), attributes: Attributes::default() };
    let empty = store.begin(b"b", &write).await.unwrap();
    let over = begin(&store, "c", 3).await;
    drop((area.note_upload(&empty).await.unwrap(), area.note_upload(&over).await.unwrap()));
    store.abandon(&over).await.unwrap();
    node.close(area).await;
    let area = node.open().await.unwrap();
    until(|| store.uploads().is_empty() && noted(&area) == 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_completed_by_an_agent_that_died_before_it_noted_that_stays() {
    let store = store();
    let mut node = Node::new(&store);
    let area = node.open().await.unwrap();
    let write = Write { id: WriteId::new([1; 16]), attributes: Attributes::default() };
    let upload = store.begin(b"a", &write).await.unwrap();
    let part = store.part(&upload, 1, &body(b"all")).await.unwrap();
    drop(area.note_upload(&upload).await.unwrap());
    store.complete(&upload, &[part], &Condition::Absent).await.unwrap();
    let area = node.succeed(area).await;
    until(|| noted(&area) == 0).await;
    assert_eq!(*store.object("a").unwrap().bytes, b"all");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_being_sent_is_left_alone_however_old_it_is_said_to_be() {
    let store = store();
    let area = Node::new(&store).open().await.unwrap();
    let held = area.note_upload(&begin(&store, "a", 1).await).await.unwrap();
    store.puts_its_clock_on(100 * OLD);
    area.end_left_uploads().await;
    area.end_old_uploads().await;
    assert_eq!((store.uploads().len(), noted(&area)), (1, 1));
    drop(held);
    area.end_old_uploads().await;
    assert_eq!((store.uploads().len(), noted(&area)), (1, 1), "it is ended as one of this node's");
    area.end_left_uploads().await;
    assert_eq!((store.uploads().len(), noted(&area)), (0, 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_ended_stays_noted_until_it_can() {
    let store = store();
    let mut node = Node::new(&store);
    let area = node.open().await.unwrap();
    drop(area.note_upload(&begin(&store, "a", 1).await).await.unwrap());
    store.set_faults(1000);
    area.end_left_uploads().await;
    assert_eq!(noted(&area), 1);
    let area = node.succeed(area).await;
    assert_eq!(noted(&area), 1);
    area.end_left_uploads().await;
    assert_eq!(noted(&area), 1);
    store.set_faults(0);
    area.end_left_uploads().await;
    assert_eq!((store.uploads().len(), noted(&area)), (0, 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn what_nobody_has_noted_is_ended_after_a_week_by_the_stores_clock() {
    let store = store();
    let area = Node::new(&store).open().await.unwrap();
    begin(&store, "theirs/young", 1).await;
    area.end_old_uploads().await;
    store.puts_its_clock_on(OLD - SECOND);
    begin(&store, "theirs/younger", 2).await;
    area.end_old_uploads().await;
    assert_eq!(store.uploads().len(), 2);
    store.puts_its_clock_on(SECOND);
    // It does not say, or does not end it: another day.
    store.set_faults(1000);
    area.end_old_uploads().await;
    store.set_faults(0);
    area.end_old_uploads().await;
    let left: Vec<_> = store.uploads().into_values().map(|(path, _)| path).collect();
    assert_eq!(left, ["theirs/younger"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_store_that_says_of_each_upload_that_it_is_old_is_not_believed() {
    let store = store();
    let area = Node::new(&store).open().await.unwrap();
    store.puts_its_clock_on(OLD);
    store.forgets_beginnings();
    begin(&store, "theirs", 1).await;
    area.end_old_uploads().await;
    let left: Vec<_> = store.uploads().into_values().map(|(path, _)| path).collect();
    assert_eq!(left, ["theirs"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_another_node_ends_after_a_week_is_sent_anew() {
    let store = store();
    let (mut one, mut other) = (Node::new(&store), Node::new(&store));
    let (one, area) = (one.open().await.unwrap(), other.open().await.unwrap());
    let (executed, inflight) =
        (Executed::default(), Inflight::map(Inflight::create(Room::ReadWrite).unwrap()).unwrap());
    let caller =
        Caller { mount: MountId(1), unique: 1, waits: &|_| false, inflight: &inflight, read_only: false };
    area.join(caller.mount, &executed);
    let create = Operation::Create {
        parent: ROOT,
        name: b"slow".to_vec(),
        owner: OWNER,
        exclusive: false,
        open: true,
    };
    let made = area.clone().execute(&caller, &executed, create).await.unwrap().0;
    let Done::Node(node) = made else { panic!("{made:?}") };
    let bytes: Vec<u8> = (0..5 * FIRST).map(|at| (at / 7) as u8).collect();
    let file = area.to_change(node.ino).await.unwrap();
    let data = file.content.read().await.clone().unwrap();
    data.write_all_at(&bytes, 0).unwrap();
    file.wrote(0, bytes.len() as u64);
    area.advance(&file); // its writer goes on
    until(|| file.sending.try_lock().is_ok_and(|ongoing| ongoing.upload.is_some())).await;
    assert!(noted(&area) == 1 && store.uploads().len() == 1);

    one.end_left_uploads().await;
    one.end_old_uploads().await;
    assert_eq!(store.uploads().len(), 1);
    store.puts_its_clock_on(OLD);
    one.end_old_uploads().await;
    assert_eq!(store.uploads().len(), 0);

    file.wrote(0, 1);
    area.send(&file).await.unwrap();
    assert!(*store.object("slow").unwrap().bytes == bytes);
    assert_eq!((store.uploads().len(), noted(&area)), (0, 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_journal_without_uploads_is_read_and_a_key_of_another_version_is_refused() {
    let store = store();
    let mut node = Node::new(&store);
    let area = node.open().await.unwrap();
    drop(area.note_upload(&begin(&store, "a", 1).await).await.unwrap());
    node.close(area).await;
    // Who only looks into it does not mind.
    let Looked::Area(looked) = node.staging.inspect(&spec().id, SOON).await else { panic!("it is there") };
    assert!(looked.problem.is_none() && looked.waiting.files == 0, "{looked:?}");
    // As the version before has left it.
    let keys: Vec<_> = node.journal().iter().map(|(key, _)| key.to_vec()).collect();
    let uploads: Vec<_> = keys.into_iter().filter(|key| key[0] == b'u').collect();
    assert_eq!(uploads.len(), 1);
    node.journal().delete(&uploads[0]).unwrap();
    let area = node.open().await.unwrap();
    assert_eq!(noted(&area), 0);
    node.close(area).await;
    // As the version before meets what this one notes.
    for (key, value) in [(&b"unknown"[..], &b"1"[..]), (&b"z"[..], &b"1"[..])] {
        node.journal().put(key, value).unwrap();
        let refused = node.open().await.err().unwrap();
        assert!(refused.contains("does not understand"), "{refused}");
        node.journal().delete(key).unwrap();
    }
    node.open().await.unwrap();
}
