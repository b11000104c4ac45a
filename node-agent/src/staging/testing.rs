//! A node with one volume, at a store that a test directs.

use super::conditions::PROBE;
use super::{Area, Caller, Executed, Outcome, Staging};
use crate::state::StateDir;
use crate::testing::scope_over;
use crate::volumes::scope::Scope;
use cache::meta::ROOT;
use fuse_abi::{CreateIn, InHeader, WriteIn};
use inflight::{Inflight, Room};
use link::Cause;
use link::broker::MountId;
use link::writable::{Done, Operation, Owner, Wrong};
use std::fs;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use store::{
    Body, ByteStream, Condition, Entry, Leftover, Page, Part, Seen, Sink, SinkLimits, Source, StoreError,
    Upload, Version, Write, WriteId, Written,
};
use tokio::sync::watch;
use volume::{Parameters, ScopeId, SourceUrl, VolumeId, VolumeSpec, WriteMode};

pub(super) const SOON: Duration = Duration::from_secs(60);
pub(super) const MOUNT: MountId = MountId(1);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Does {
    Takes,
    Refuses,
    /// Gives no answer to what would change it.
    Hangs,
    /// Gives none to a copy, which it has made.
    HangsAfterCopy,
    /// Says of each object that it is not there, and of itself that it is missing.
    Lost,
}

/// A directory that takes what is written, or not.
#[derive(Clone, Debug)]
struct Gate {
    source: Arc<dyn Source>,
    sink: Arc<dyn Sink>,
    does: watch::Receiver<Does>,
    /// It makes copies of whatever is there, as some servers do.
    copies_anything: bool,
}

impl Gate {
    async fn pass(&self, path: &[u8]) -> Result<(), StoreError> {
        if path.starts_with(PROBE.as_bytes()) {
            return Ok(());
        }
        let mut does = self.does.clone();
        let met = *does.wait_for(|does| *does != Does::Hangs).await.expect("the test goes on");
        match met {
            Does::Refuses => Err(StoreError::Full { what: "the store".into(), why: "no room".into() }),
            Does::Lost => Err(lost(path)),
            Does::Takes | Does::Hangs | Does::HangsAfterCopy => Ok(()),
        }
    }

    fn is_lost(&self) -> bool {
        *self.does.borrow() == Does::Lost
    }
}

fn lost(path: &[u8]) -> StoreError {
    StoreError::NotFound { what: String::from_utf8_lossy(path).into_owned(), advice: "" }
}

#[async_trait::async_trait]
impl Source for Gate {
    async fn list(&self, dir: &[u8], token: Option<&str>) -> Result<Page, StoreError> {
        if self.is_lost() { Err(lost(b"bucket")) } else { self.source.list(dir, token).await }
    }
    async fn head(&self, path: &[u8]) -> Result<Option<Entry>, StoreError> {
        self.source.head(path).await
    }
    async fn get(&self, path: &[u8], version: &Version, range: Range<u64>) -> Result<ByteStream, StoreError> {
        self.source.get(path, version, range).await
    }
    async fn check(&self, limit: Duration) -> Result<(), StoreError> {
        self.source.check(limit).await
    }
    fn sink(&self) -> Option<Arc<dyn Sink>> {
        Some(Arc::new(self.clone()))
    }
}

#[async_trait::async_trait]
impl Sink for Gate {
    fn limits(&self) -> SinkLimits {
        self.sink.limits()
    }
    async fn put(
        &self,
        path: &[u8],
        body: &Body,
        write: &Write,
        is: &Condition,
    ) -> Result<Written, StoreError> {
        self.pass(path).await?;
        self.sink.put(path, body, write, is).await
    }
    async fn begin(&self, path: &[u8], write: &Write) -> Result<Upload, StoreError> {
        self.pass(path).await?;
        self.sink.begin(path, write).await
    }
    async fn part(&self, upload: &Upload, number: u32, body: &Body) -> Result<Part, StoreError> {
        self.sink.part(upload, number, body).await
    }
    async fn complete(&self, upload: &Upload, parts: &[Part], is: &Condition) -> Result<Written, StoreError> {
        self.sink.complete(upload, parts, is).await
    }
    async fn abandon(&self, upload: &Upload) -> Result<(), StoreError> {
        self.sink.abandon(upload).await
    }
    async fn leftovers(&self, age: Duration) -> Result<Vec<Leftover>, StoreError> {
        self.sink.leftovers(age).await
    }
    async fn look(&self, path: &[u8]) -> Result<Option<Seen>, StoreError> {
        if self.is_lost() { Ok(None) } else { self.sink.look(path).await }
    }
    async fn delete(&self, path: &[u8], is: &Condition) -> Result<(), StoreError> {
        self.pass(path).await?;
        self.sink.delete(path, is).await
    }
    async fn copy(
        &self,
        from: &[u8],
        version: &Version,
        size: u64,
        to: &[u8],
        write: &Write,
        is: &Condition,
    ) -> Result<Written, StoreError> {
        self.pass(from).await?;
        let now = self.sink.look(from).await?.filter(|_| self.copies_anything);
        let (version, size) = now.map_or((version.clone(), size), |now| (now.version, now.size));
        let copied = self.sink.copy(from, &version, size, to, write, is).await;
        let mut does = self.does.clone();
        let is_probe = from.starts_with(PROBE.as_bytes());
        let _ = does.wait_for(|does| is_probe || *does != Does::HangsAfterCopy).await;
        copied
    }
    async fn withdraw(&self, path: &[u8], write: WriteId, is: Option<&Condition>) -> Result<(), StoreError> {
        self.sink.withdraw(path, write, is).await
    }
    async fn make_dir(&self, path: &[u8], write: &Write) -> Result<(), StoreError> {
        self.sink.make_dir(path, write).await
    }
    async fn remove_dir(&self, path: &[u8]) -> Result<(), StoreError> {
        self.sink.remove_dir(path).await
    }
}

/// A node with one volume.
pub(super) struct Node {
    pub(super) dir: tempfile::TempDir,
    pub(super) does: watch::Sender<Does>,
    pub(super) staging: Arc<Staging>,
    numbers: Arc<StateDir>,
    scope: Option<Arc<Scope>>,
    pub(super) spec: VolumeSpec,
    pub(super) copies_anything: bool,
    unique: AtomicU64,
    pub(super) inflight: Inflight,
    pub(super) executed: Executed,
}

impl Node {
    pub(super) fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let at = dir.path().join("store");
        fs::create_dir(&at).unwrap();
        let source = SourceUrl::parse(&format!("file://{}", at.display())).unwrap();
        let parameters = Parameters {
            access: volume::Access::ReadWrite,
            write_mode: WriteMode::Back,
            ..Parameters::default()
        };
        let spec = VolumeSpec { id: VolumeId::parse("v").unwrap(), source, parameters };
        let inflight = Inflight::map(Inflight::create(Room::ReadWrite).unwrap()).unwrap();
        let numbers = Arc::new(StateDir::open(&dir.path().join("state")).unwrap());
        Self {
            staging: Arc::new(Staging::new(dir.path().join("staging"), Duration::from_secs(60))),
            does: watch::Sender::new(Does::Refuses),
            numbers,
            scope: None,
            spec,
            copies_anything: false,
            unique: AtomicU64::new(1),
            inflight,
            executed: Executed::default(),
            dir,
        }
    }

    pub(super) fn store(&self, name: &str) -> std::path::PathBuf {
        self.dir.path().join("store").join(name)
    }

    pub(super) async fn area(&mut self) -> Arc<Area> {
        let scope = match &self.scope {
            Some(scope) => scope.clone(),
            None => {
                let open = |access| {
                    let limits = Arc::new(store::Limits::new(store::LimitsConfig::default()));
                    let source = store::open(&self.spec, access, limits, Arc::new(store::NoObserver))?;
                    let sink = source.sink().expect("a directory can be written to");
                    let (does, copies_anything) = (self.does.subscribe(), self.copies_anything);
                    Ok(Arc::new(Gate { source, sink, does, copies_anything }) as Arc<dyn Source>)
                };
                let id = ScopeId::parse(&"0a".repeat(16)).unwrap();
                let (scope, changes) = scope_over(self.dir.path(), id, self.numbers.clone(), open);
                drop(changes);
                self.scope = Some(scope.clone());
                scope
            }
        };
        let area = self.staging.open(&self.spec, &scope, &self.numbers).await.unwrap();
        area.join(MOUNT, &self.executed);
        area
    }

    pub(super) async fn does(&self, area: &Area, operation: Operation) -> Done {
        self.asks(area, operation).await.unwrap()
    }

    pub(super) async fn asks(&self, area: &Area, operation: Operation) -> Outcome {
        self.asks_as(area, MOUNT, self.next_unique(), operation).await
    }

    pub(super) fn next_unique(&self) -> u64 {
        self.unique.fetch_add(1, Ordering::Relaxed)
    }

    /// A request of this mount's, which may be the same again.
    pub(super) async fn asks_as(
        &self,
        area: &Area,
        mount: MountId,
        unique: u64,
        operation: Operation,
    ) -> Outcome {
        let area = area.me.upgrade().unwrap();
        let (inflight, waits) = (&self.inflight, &|other| other == unique);
        let caller = Caller { mount, unique, waits, inflight, read_only: false };
        area.execute(&caller, &self.executed, operation).await.map(|(done, _)| done)
    }

    pub(super) async fn finds(&self, area: &Area, name: &str) -> Option<link::writable::Node> {
        match self.does(area, Operation::Lookup { parent: ROOT, name: name.into() }).await {
            Done::Node(node) => Some(node),
            Done::Absent => None,
            other => panic!("{other:?}"),
        }
    }

    /// As a program does, but for the way that the bytes come.
    pub(super) async fn write(&self, area: &Area, name: &str, text: &[u8], keep_open: bool) -> u64 {
        let (parent, name) = (ROOT, name.as_bytes().to_vec());
        let owner = Owner { uid: 0, gid: 0, mode: 0o644 };
        let create = Operation::Create { parent, name: name.clone(), owner, exclusive: false, open: true };
        let node = match self.asks(area, create).await {
            Ok(Done::Node(node)) => node,
            Err(Wrong::Cause(Cause::Stale)) => {
                let found = self.does(area, Operation::Lookup { parent, name }).await;
                let Done::Node(node) = found else { panic!("{found:?}") };
                self.does(area, Operation::Open { ino: node.ino, write: true }).await;
                node
            }
            made => panic!("{made:?}"),
        };
        let file = area.to_change(node.ino).await.unwrap();
        let data = file.content.read().await.clone().unwrap();
        data.write_all_at(text, 0).unwrap();
        file.wrote(0, text.len() as u64);
        drop(file);
        if !keep_open {
            self.does(area, Operation::Close { ino: node.ino }).await;
        }
        node.ino
    }

    /// Its agent dies.
    pub(super) async fn dies(&mut self, area: Arc<Area>) {
        let weak = Arc::downgrade(&area);
        drop(area);
        until(|| weak.strong_count() == 0).await;
        self.executed = Executed::default();
    }

    /// The last mount goes, and with it what this process knows of the area.
    pub(super) async fn close(&mut self, area: Arc<Area>) {
        area.leave(MOUNT).await;
        let weak = Arc::downgrade(&area);
        drop(area);
        until(|| weak.strong_count() == 0).await;
    }
}

pub(super) async fn until(done: impl Fn() -> bool) {
    let wait = async {
        while !done() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(SOON, wait).await.expect("it comes to pass");
}

/// A WRITE as a kernel and a worker bring it.
pub(super) fn bring_write(inflight: &Inflight, unique: u64, offset: u64, bytes: &[u8], flags: u32) {
    let write = WriteIn { offset, size: bytes.len() as u32, flags, ..WriteIn::default() };
    bring(inflight, unique, fuse_abi::opcode::WRITE, 0, &[&write.to_bytes()[..], bytes].concat());
}

/// And a CREATE of this user.
pub(super) fn bring_create(inflight: &Inflight, unique: u64, uid: u32, flags: i32) {
    let create = CreateIn { flags: flags as u32, mode: 0o100644, ..CreateIn::default() };
    bring(inflight, unique, fuse_abi::opcode::CREATE, uid, &[&create.to_bytes()[..], b"name\0"].concat());
}

fn bring(inflight: &Inflight, unique: u64, opcode: u32, uid: u32, body: &[u8]) {
    let len = InHeader::BYTES + body.len();
    let header = InHeader {
        len: len as u32,
        opcode,
        unique,
        nodeid: 2,
        uid,
        gid: 0,
        pid: 1,
        total_extlen: 0,
        padding: 0,
    };
    let all = [&header.to_bytes()[..], body].concat();
    let stage = inflight.acquire_stage().expect("there are more than requests");
    // SAFETY: the buffer is no shorter than the longest request.
    unsafe { std::ptr::copy_nonoverlapping(all.as_ptr(), inflight.stage_pointer(stage), all.len()) };
    let slot = inflight.put(stage, &header).expect("likewise");
    inflight.commit_stage(stage, unique);
    inflight.park(slot, unique);
    inflight.release_stage(stage);
}
