//! The store of a history: it takes its time, refuses, loses its answers, and does what it was asked for when nobody expects
//! it any more.

use super::fate::Fate;
use super::trace::trace;
use crate::lock::lock;
use async_trait::async_trait;
use bytes::Bytes;
use futures::StreamExt;
use link::writable::Owner;
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;
use store::{
    Attributes, Body, ByteStream, Condition, Entry, Kind, Leftover, Page, Part, Seen, Sink, SinkLimits,
    Source, StoreError, Upload, Version, Write, WriteId, Written,
};

pub(super) struct SimulatedStore {
    me: Weak<Self>,
    fate: Arc<Fate>,
    inner: Mutex<Inner>,
}

#[derive(Clone)]
pub(super) struct Object {
    pub(super) bytes: Arc<Vec<u8>>,
    pub(super) version: String,
    pub(super) attributes: Attributes,
    write: Option<WriteId>,
}

/// Something that it was asked for and has not done yet.
type Late = Box<dyn FnOnce(&mut Inner) + Send>;

struct Inner {
    rng: SmallRng,
    /// Of a thousand calls of its writing half.
    faults: u32,
    holds_conditions: bool,
    /// Versions are of the bytes, as ETags are; else each write has its own.
    versions_of_bytes: bool,
    objects: BTreeMap<Vec<u8>, Object>,
    dirs: BTreeSet<Vec<u8>>,
    uploads: BTreeMap<String, UnderWay>,
    /// What its clock shows: it stands still but where it is put on.
    clock: Duration,
    /// It says of each upload that it was begun when the clock showed nothing.
    forgets_beginnings: bool,
    late: Vec<Late>,
    /// Calls that have not got there yet, by number, and whether they may get there when nobody waits any more.
    under_way: BTreeMap<u64, (bool, Late)>,
    count: u64,
}

#[derive(Clone)]
struct UnderWay {
    path: Vec<u8>,
    write: Write,
    /// With their tags.
    parts: BTreeMap<u32, (Vec<u8>, String)>,
    begun: Duration,
}

enum Does {
    AsAsked,
    Refuses,
    LosesTheAnswer,
    Later,
}

impl fmt::Debug for SimulatedStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SimulatedStore")
    }
}

fn unavailable(what: &[u8]) -> StoreError {
    StoreError::Unavailable {
        what: String::from_utf8_lossy(what).into_owned(),
        waited: Duration::ZERO,
        queued: Duration::ZERO,
        attempts: 1,
        cause: "the history wants it so".into(),
    }
}

fn absent(what: &[u8]) -> StoreError {
    StoreError::NotFound { what: String::from_utf8_lossy(what).into_owned(), advice: "" }
}

fn conflict(what: &[u8], found: Option<String>) -> StoreError {
    StoreError::Conflict { what: String::from_utf8_lossy(what).into_owned(), found: found.map(Version) }
}

/// As the product's client sends them: they may be others by now than those that were read.
fn bytes_of(body: &Body, what: &[u8]) -> Result<Vec<u8>, StoreError> {
    let mut bytes = vec![0; body.len() as usize];
    let read = body.file.read_exact_at(&mut bytes, body.range.start);
    let sum = crc_fast::checksum(crc_fast::CrcAlgorithm::Crc32Iscsi, &bytes) as u32;
    let why = match read {
        Err(error) => error.to_string(),
        Ok(()) if sum != body.crc32c => "it has another checksum".into(),
        Ok(()) => return Ok(bytes),
    };
    Err(StoreError::Damaged { what: String::from_utf8_lossy(what).into_owned(), why })
}

impl Inner {
    fn version(&mut self, bytes: &[u8], kind: &str) -> String {
        self.count += 1;
        let mut hasher = DefaultHasher::new();
        bytes.hash(&mut hasher);
        kind.hash(&mut hasher);
        match self.versions_of_bytes {
            true => format!("{:016x}", hasher.finish()),
            false => format!("v{}", self.count),
        }
    }

    fn check(&self, path: &[u8], condition: &Condition) -> Result<(), StoreError> {
        let now = self.objects.get(path).map(|object| object.version.clone());
        let holds = match condition {
            Condition::Any => true,
            Condition::Absent => now.is_none(),
            Condition::Is(version) => now.as_ref() == Some(&version.0),
        };
        if holds || !self.holds_conditions { Ok(()) } else { Err(conflict(path, now)) }
    }

    fn make(
        &mut self,
        path: &[u8],
        bytes: Vec<u8>,
        write: &Write,
        kind: &str,
    ) -> Result<Written, StoreError> {
        let version = self.version(&bytes, kind);
        let bytes = Arc::new(bytes);
        let (attributes, write) = (write.attributes, Some(write.id));
        self.objects.insert(path.to_vec(), Object { bytes, version: version.clone(), attributes, write });
        Ok(Written { version: Version(version), confirmed: true })
    }

    /// Where no condition holds, or a version comes again with the bytes that it is of, whatever comes late overwrites what is newer:
    /// no client can help that (docs/semantics.md).
    fn may_be_late(&self, condition: &Condition) -> bool {
        self.holds_conditions && (!self.versions_of_bytes || !matches!(condition, Condition::Is(_)))
    }

    fn do_late(&mut self, all: bool) {
        let mut k = 0;
        while k < self.late.len() {
            if all || self.rng.random_range(0..6) == 0 {
                let late = self.late.remove(k);
                late(self);
            } else {
                k += 1;
            }
        }
    }
}

impl SimulatedStore {
    pub(super) fn new(
        fate: Arc<Fate>,
        seed: u64,
        holds_conditions: bool,
        versions_of_bytes: bool,
    ) -> Arc<Self> {
        Arc::new_cyclic(|me| Self {
            me: me.clone(),
            fate,
            inner: Mutex::new(Inner {
                rng: SmallRng::seed_from_u64(seed),
                faults: 0,
                holds_conditions,
                versions_of_bytes,
                objects: BTreeMap::new(),
                dirs: BTreeSet::new(),
                uploads: BTreeMap::new(),
                clock: Duration::ZERO,
                forgets_beginnings: false,
                late: Vec::new(),
                under_way: BTreeMap::new(),
                count: 0,
            }),
        })
    }

    /// From before all histories.
    pub(super) fn has(&self, path: &str, bytes: Vec<u8>, owner: Owner) {
        let mut inner = lock(&self.inner);
        let version = inner.version(&bytes, "whole");
        let bytes = Arc::new(bytes);
        let Owner { mode, uid, gid } = owner;
        let attributes =
            Attributes { mode: Some(mode), uid: Some(uid), gid: Some(gid), modified_ns: Some(1) };
        inner.objects.insert(path.into(), Object { bytes, version, attributes, write: None });
    }

    pub(super) fn set_faults(&self, faults: u32) {
        lock(&self.inner).faults = faults;
    }

    /// What it was asked for and has not done: it does it now.
    pub(super) fn settles(&self) {
        lock(&self.inner).do_late(true);
    }

    /// Its client is gone: what is on its way may still arrive.
    pub(super) fn is_left(&self) {
        let mut inner = lock(&self.inner);
        let under_way = std::mem::take(&mut inner.under_way);
        for (may_be_late, late) in under_way.into_values() {
            if may_be_late && inner.rng.random() {
                inner.late.push(late);
            }
        }
    }

    pub(super) fn puts_its_clock_on(&self, by: Duration) {
        lock(&self.inner).clock += by;
    }

    pub(super) fn forgets_beginnings(&self) {
        lock(&self.inner).forgets_beginnings = true;
    }

    /// Uploads under way, by their names, and whether they have a part.
    pub(super) fn uploads(&self) -> BTreeMap<String, (String, bool)> {
        let shown = |upload: &UnderWay| {
            (String::from_utf8_lossy(&upload.path).into_owned(), !upload.parts.is_empty())
        };
        lock(&self.inner).uploads.iter().map(|(id, upload)| (id.clone(), shown(upload))).collect()
    }

    pub(super) fn object(&self, path: &str) -> Option<Object> {
        lock(&self.inner).objects.get(path.as_bytes()).cloned()
    }

    pub(super) fn objects(&self) -> BTreeMap<String, Object> {
        let text = |path: &Vec<u8>| String::from_utf8(path.clone()).unwrap();
        lock(&self.inner).objects.iter().map(|(path, object)| (text(path), object.clone())).collect()
    }

    fn may_be_late(&self, condition: &Condition) -> bool {
        lock(&self.inner).may_be_late(condition)
    }

    async fn pause(&self) {
        let micros = lock(&self.inner).rng.random_range(0..20_000);
        tokio::time::sleep(Duration::from_micros(micros)).await;
        self.fate.is_alive().await;
    }

    /// One call of the writing half.
    async fn call<T: Send + fmt::Debug + 'static>(
        &self,
        call: &'static str,
        may_be_late: bool,
        what: &[u8],
        work: impl FnOnce(&mut Inner) -> Result<T, StoreError> + Send + 'static,
    ) -> Result<T, StoreError> {
        let does = {
            let mut inner = lock(&self.inner);
            inner.do_late(false);
            let is_fault = inner.faults > 0 && inner.rng.random_range(0..1000) < inner.faults;
            match if is_fault { inner.rng.random_range(0..3) } else { 3 } {
                0 => Does::Refuses,
                1 => Does::LosesTheAnswer,
                2 if may_be_late => Does::Later,
                _ => Does::AsAsked,
            }
        };
        let (answer, result) = std::sync::mpsc::channel();
        let of = String::from_utf8_lossy(what).into_owned();
        let late: Late = Box::new(move |inner| {
            let done = work(inner);
            trace(|| format!("    store: {call} {of}: {done:?}"));
            drop(answer.send(done)); // nobody may wait for it
        });
        let number = {
            let mut inner = lock(&self.inner);
            inner.count += 1;
            let number = inner.count;
            inner.under_way.insert(number, (may_be_late, late));
            number
        };
        self.pause().await;
        {
            let mut inner = lock(&self.inner);
            let (_, late) =
                inner.under_way.remove(&number).expect("nobody else takes it while its client lives");
            match does {
                Does::Refuses => {}
                Does::Later => inner.late.push(late),
                Does::AsAsked | Does::LosesTheAnswer => late(&mut inner),
            }
        }
        self.pause().await;
        match does {
            Does::AsAsked => result.try_recv().expect("it was done"),
            _ => {
                trace(|| format!("    store: {call} {}: no answer", String::from_utf8_lossy(what)));
                Err(unavailable(what))
            }
        }
    }
}

fn child<'p>(dir: &[u8], path: &'p [u8]) -> Option<&'p [u8]> {
    let rest = if dir.is_empty() { path } else { path.strip_prefix(dir)?.strip_prefix(b"/")? };
    (!rest.is_empty()).then_some(rest)
}

fn file(name: &[u8], object: &Object) -> Entry {
    let version = Version(object.version.clone());
    let Attributes { mode, uid, gid, modified_ns } = object.attributes;
    Entry {
        name: name.to_vec(),
        kind: Kind::File { size: object.bytes.len() as u64, version },
        modified_ns: modified_ns.unwrap_or_default(),
        permissions: mode.map(|mode| volume::Permissions::of(mode, uid, gid)),
    }
}

fn directory(name: &[u8]) -> Entry {
    Entry { name: name.to_vec(), kind: Kind::Directory, modified_ns: 0, permissions: None }
}

#[async_trait]
impl Source for SimulatedStore {
    async fn list(&self, dir: &[u8], _: Option<&str>) -> Result<Page, StoreError> {
        self.pause().await;
        let mut page = Page::default();
        {
            let inner = lock(&self.inner);
            let mut dirs = BTreeSet::new();
            for (path, object) in &inner.objects {
                let Some(rest) = child(dir, path) else { continue };
                match rest.iter().position(|byte| *byte == b'/') {
                    Some(slash) => drop(dirs.insert(rest[..slash].to_vec())),
                    None => page.entries.push(file(rest, object)),
                }
            }
            for path in &inner.dirs {
                let Some(rest) = child(dir, path) else { continue };
                let end = rest.iter().position(|byte| *byte == b'/').unwrap_or(rest.len());
                dirs.insert(rest[..end].to_vec());
            }
            page.entries.extend(dirs.iter().map(|name| directory(name)));
            if page.entries.is_empty() && !dir.is_empty() && !inner.dirs.contains(dir) {
                return Err(absent(dir));
            }
        }
        self.pause().await;
        Ok(page)
    }

    async fn head(&self, path: &[u8]) -> Result<Option<Entry>, StoreError> {
        self.pause().await;
        let found = {
            let inner = lock(&self.inner);
            let name = path.rsplit(|byte| *byte == b'/').next().unwrap();
            let is_dir = inner.dirs.contains(path)
                || inner.objects.keys().chain(&inner.dirs).any(|other| child(path, other).is_some());
            match is_dir {
                true => Some(directory(name)),
                false => inner.objects.get(path).map(|object| file(name, object)),
            }
        };
        self.pause().await;
        Ok(found)
    }

    async fn get(&self, path: &[u8], version: &Version, range: Range<u64>) -> Result<ByteStream, StoreError> {
        self.pause().await;
        let object = lock(&self.inner).objects.get(path).cloned().ok_or_else(|| absent(path))?;
        if object.version != version.0 {
            return Err(StoreError::Stale { what: String::from_utf8_lossy(path).into_owned() });
        }
        let bytes = Bytes::copy_from_slice(&object.bytes[range.start as usize..range.end as usize]);
        Ok(futures::stream::iter([Ok(bytes)]).boxed())
    }

    async fn check(&self, _: Duration) -> Result<(), StoreError> {
        Ok(())
    }

    fn sink(&self) -> Option<Arc<dyn Sink>> {
        Some(self.me.upgrade()?)
    }
}

#[async_trait]
impl Sink for SimulatedStore {
    fn limits(&self) -> SinkLimits {
        SinkLimits {
            put_bytes_max: 5 << 30,
            part_bytes_min: 1,
            part_bytes_max: 5 << 30,
            parts_max: 10_000,
            object_bytes_max: 5 << 40,
        }
    }

    async fn put(
        &self,
        path: &[u8],
        body: &Body,
        write: &Write,
        condition: &Condition,
    ) -> Result<Written, StoreError> {
        self.pause().await;
        let (to, bytes, write, condition) = (path.to_vec(), bytes_of(body, path)?, *write, condition.clone());
        self.call("put", self.may_be_late(&condition), path, move |inner| {
            inner.check(&to, &condition)?;
            inner.make(&to, bytes, &write, "whole")
        })
        .await
    }

    async fn begin(&self, path: &[u8], write: &Write) -> Result<Upload, StoreError> {
        let (to, write) = (path.to_vec(), *write);
        self.call("begin", true, path, move |inner| {
            inner.count += 1;
            let id = format!("u{}", inner.count);
            let upload = UnderWay { path: to.clone(), write, parts: BTreeMap::new(), begun: inner.clock };
            inner.uploads.insert(id.clone(), upload);
            Ok(Upload { path: to, id, write: write.id })
        })
        .await
    }

    async fn part(&self, upload: &Upload, number: u32, body: &Body) -> Result<Part, StoreError> {
        self.pause().await;
        let is_bad = {
            let mut inner = lock(&self.inner);
            // A probe's bytes come from no disk.
            let is_file = !upload.path.starts_with(b".millpond-probe");
            is_file && inner.faults > 0 && inner.rng.random_range(0..1000) < inner.faults
        };
        if is_bad {
            let what = String::from_utf8_lossy(&upload.path).into_owned();
            return Err(StoreError::Damaged { what, why: "a sector, this time".into() });
        }
        let (id, bytes, crc32c) = (upload.id.clone(), bytes_of(body, &upload.path)?, body.crc32c);
        let path = upload.path.clone();
        self.call("part", true, &upload.path, move |inner| {
            inner.count += 1;
            let (len, tag) = (bytes.len() as u64, format!("t{}", inner.count));
            let upload = inner.uploads.get_mut(&id).ok_or_else(|| absent(&path))?;
            upload.parts.insert(number, (bytes, tag.clone()));
            Ok(Part { number, bytes: len, crc32c, tag, confirmed: true })
        })
        .await
    }

    async fn complete(
        &self,
        upload: &Upload,
        parts: &[Part],
        condition: &Condition,
    ) -> Result<Written, StoreError> {
        let (upload, parts, condition) = (upload.clone(), parts.to_vec(), condition.clone());
        self.call("complete", self.may_be_late(&condition), &upload.path.clone(), move |inner| {
            // As the product's: what is there already was made by this write.
            if let Some(object) = inner.objects.get(&upload.path)
                && object.write == Some(upload.write)
                && !inner.uploads.contains_key(&upload.id)
            {
                return Ok(Written { version: Version(object.version.clone()), confirmed: true });
            }
            let UnderWay { path, write, parts: arrived, .. } =
                inner.uploads.get(&upload.id).cloned().ok_or_else(|| absent(&upload.path))?;
            let mut bytes = Vec::new();
            for part in &parts {
                match arrived.get(&part.number).filter(|(_, tag)| *tag == part.tag) {
                    Some((some, _)) => bytes.extend(some),
                    None => return Err(absent(&upload.path)), // another has come in its place
                }
            }
            inner.check(&path, &condition)?;
            inner.uploads.remove(&upload.id);
            inner.make(&path, bytes, &write, &format!("{} parts", parts.len()))
        })
        .await
    }

    async fn abandon(&self, upload: &Upload) -> Result<(), StoreError> {
        let id = upload.id.clone();
        self.call("abandon", true, &upload.path, move |inner| {
            inner.uploads.remove(&id);
            Ok(())
        })
        .await
    }

    async fn leftovers(&self, age: Duration) -> Result<Vec<Leftover>, StoreError> {
        self.call("leftovers", true, b"", move |inner| {
            let told = |(id, upload): (&String, &UnderWay)| {
                let UnderWay { path, write, .. } = upload;
                let begun = if inner.forgets_beginnings { Duration::ZERO } else { upload.begun };
                let upload = Upload { path: path.clone(), id: id.clone(), write: write.id };
                Leftover { upload, age: inner.clock - begun }
            };
            Ok(inner.uploads.iter().map(told).filter(|leftover| leftover.age >= age).collect())
        })
        .await
    }

    async fn look(&self, path: &[u8]) -> Result<Option<Seen>, StoreError> {
        let at = path.to_vec();
        self.call("look", true, path, move |inner| {
            Ok(inner.objects.get(&at).map(|object| Seen {
                version: Version(object.version.clone()),
                size: object.bytes.len() as u64,
                attributes: object.attributes,
                write: object.write,
            }))
        })
        .await
    }

    async fn delete(&self, path: &[u8], condition: &Condition) -> Result<(), StoreError> {
        let (at, condition) = (path.to_vec(), condition.clone());
        self.call("delete", self.may_be_late(&condition), path, move |inner| {
            if inner.objects.contains_key(&at) {
                inner.check(&at, &condition)?;
                inner.objects.remove(&at);
            }
            Ok(())
        })
        .await
    }

    async fn copy(
        &self,
        from: &[u8],
        version: &Version,
        _: u64,
        to: &[u8],
        write: &Write,
        condition: &Condition,
    ) -> Result<Written, StoreError> {
        let (from, to, version) = (from.to_vec(), to.to_vec(), version.clone());
        let (write, condition) = (*write, condition.clone());
        self.call("copy", self.may_be_late(&condition), &from.clone(), move |inner| {
            let object = inner.objects.get(&from).cloned().ok_or_else(|| absent(&from))?;
            if object.version != version.0 {
                return Err(StoreError::Stale { what: String::from_utf8_lossy(&from).into_owned() });
            }
            inner.check(&to, &condition)?;
            inner.make(&to, object.bytes.to_vec(), &write, "whole")
        })
        .await
    }

    async fn make_dir(&self, path: &[u8], _: &Write) -> Result<(), StoreError> {
        let at = path.to_vec();
        self.call("make_dir", false, path, move |inner| {
            inner.dirs.insert(at);
            Ok(())
        })
        .await
    }

    async fn remove_dir(&self, path: &[u8]) -> Result<(), StoreError> {
        let at = path.to_vec();
        self.call("remove_dir", false, path, move |inner| {
            inner.dirs.remove(&at);
            Ok(())
        })
        .await
    }
}
