//! What a sink promises, whatever is behind it.

use super::{ODD_KEYS, listed, read};
use crc_fast::CrcAlgorithm;
use futures::StreamExt;
use std::collections::BTreeSet;
use std::io::Write as _;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use store::{
    Abilities, Attributes, Body, Condition, Kind, Leftover, Part, Sink, Source, StoreError, Upload, Version,
    Write, WriteId, Written,
};
use testkit::content;

static DRAWN: AtomicU64 = AtomicU64::new(1);

pub fn id() -> WriteId {
    let number = u128::from(DRAWN.fetch_add(1, Ordering::Relaxed));
    WriteId::new((number << 64 | u128::from(std::process::id())).to_be_bytes())
}

pub fn write() -> Write {
    Write { id: id(), attributes: Attributes::default() }
}

pub const ALL: Abilities = Abilities {
    absent: true,
    is: true,
    absent_in_parts: true,
    is_in_parts: true,
    is_at_delete: true,
    is_at_copy: true,
    confirms: true,
};

/// A file with these bytes, and them as a body.
pub fn body(bytes: &[u8]) -> Body {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(bytes).unwrap();
    let crc32c = crc_fast::checksum(CrcAlgorithm::Crc32Iscsi, bytes) as u32;
    Body { file: Arc::new(file), range: 0..bytes.len() as u64, crc32c }
}

pub fn of(name: &str, bytes: u64) -> Vec<u8> {
    content::bytes(content::id(name), 0..bytes)
}

pub async fn version(source: &dyn Source, path: &str) -> Option<(u64, Version)> {
    match source.head(path.as_bytes()).await.unwrap()?.kind {
        Kind::File { size, version } => Some((size, version)),
        other => panic!("{path} is {other:?}"),
    }
}

pub async fn holds(source: &dyn Source, path: &str, written: &Written, bytes: &[u8]) {
    let size = bytes.len() as u64;
    assert_eq!(version(source, path).await, Some((size, written.version.clone())), "{path}");
    assert!(read(source, path.as_bytes(), &written.version, 0..size).await.unwrap() == bytes, "{path}");
}

pub fn conflict(result: Result<impl std::fmt::Debug, StoreError>) -> Option<Version> {
    match result {
        Err(StoreError::Conflict { found, .. }) => found,
        other => panic!("{other:?}"),
    }
}

/// `gives_away`: it keeps the owner that it is told. `odd`: names that it takes. `knows_ended`: it refuses a part of an upload
/// that was ended, and its completion.
pub struct Kept<'a> {
    pub gives_away: bool,
    pub knows_ended: bool,
    pub odd: &'a dyn Fn(&str) -> bool,
}

pub async fn keeps_its_promises(
    name: &str,
    source: &dyn Source,
    sink: &dyn Sink,
    kept: &Kept<'_>,
) -> Abilities {
    let able = store::probe(sink, b".millpond-probe", id).await.unwrap();
    assert_eq!(sink.look(b".millpond-probe").await.unwrap(), None, "{name}: the probe leaves nothing");
    objects(source, sink, able).await;
    attributes(sink, kept).await;
    removals(source, sink, able).await;
    copies(source, sink, able).await;
    directories(source, sink).await;
    if sink.limits().parts_max > 0 {
        parts(source, sink, able, kept).await;
    } else {
        assert!(matches!(sink.begin(b"p", &write()).await, Err(StoreError::Unsupported { .. })));
    }
    for key in ODD_KEYS.iter().filter(|key| (kept.odd)(key)) {
        let path = format!("odd/{key}");
        let bytes = of(&path, 100);
        let written = sink.put(path.as_bytes(), &body(&bytes), &write(), &Condition::Absent).await;
        let written = written.unwrap_or_else(|e| panic!("{name}: {key:?}: {e}"));
        holds(source, &path, &written, &bytes).await;
        sink.delete(path.as_bytes(), &Condition::Any).await.unwrap();
        assert_eq!(version(source, &path).await, None, "{name}: {key:?}");
    }
    for (bad, _) in [("a//b", ()), ("", ()), ("../a", ()), ("a/.", ())] {
        let put = sink.put(bad.as_bytes(), &body(b"x"), &write(), &Condition::Any).await;
        assert!(matches!(put, Err(StoreError::Unsupported { .. })), "{name}: {bad:?}: {put:?}");
    }
    able
}

async fn objects(source: &dyn Source, sink: &dyn Sink, able: Abilities) {
    sink.make_dir(b"o", &write()).await.unwrap();
    sink.make_dir(b"odd", &write()).await.unwrap();
    let (one, two) = (of("one", 700_001), of("two", 300_000));
    let first = write();
    let written = sink.put(b"o/f", &body(&one), &first, &Condition::Absent).await.unwrap();
    holds(source, "o/f", &written, &one).await;
    assert_eq!(written.confirmed, able.confirms);

    // The same write once more, as after an answer that was lost.
    let again = sink.put(b"o/f", &body(&one), &first, &Condition::Absent).await;
    if able.absent {
        assert_eq!(again.unwrap().version, written.version);
        assert_eq!(
            conflict(sink.put(b"o/f", &body(&two), &write(), &Condition::Absent).await),
            Some(written.version.clone())
        );
    }
    let written = Written { version: version(source, "o/f").await.unwrap().1, confirmed: true };
    holds(source, "o/f", &written, &one).await;
    if able.is {
        let nobodys = Condition::Is(Version("0".repeat(32)));
        assert_eq!(
            conflict(sink.put(b"o/f", &body(&two), &write(), &nobodys).await),
            Some(written.version.clone())
        );
        assert_eq!(conflict(sink.put(b"o/none", &body(&two), &write(), &nobodys).await), None);
        assert_eq!(version(source, "o/none").await, None);
    }
    let before = if able.is { Condition::Is(written.version.clone()) } else { Condition::Any };
    let second = write();
    let now = sink.put(b"o/f", &body(&two), &second, &before).await.unwrap();
    assert_ne!(now.version, written.version);
    holds(source, "o/f", &now, &two).await;
    let stale = read(source, b"o/f", &written.version, 0..10).await;
    assert!(matches!(stale, Err(StoreError::Stale { .. })), "{stale:?}");
    if able.is {
        assert_eq!(sink.put(b"o/f", &body(&two), &second, &before).await.unwrap().version, now.version);
        assert_eq!(
            conflict(sink.put(b"o/f", &body(&one), &write(), &before).await),
            Some(now.version.clone())
        );
    }
    let empty = sink.put(b"o/empty", &body(b""), &write(), &Condition::Absent).await.unwrap();
    holds(source, "o/empty", &empty, b"").await;

    if able.absent {
        let many = futures::stream::iter(0..16).map(|k| async move {
            sink.put(b"o/race", &body(&of(&format!("{k}"), 1000)), &write(), &Condition::Absent)
                .await
                .ok()
                .map(|w| (k, w))
        });
        let won: Vec<_> = many.buffer_unordered(16).filter_map(async |won| won).collect().await;
        assert_eq!(won.len(), 1, "{won:?}");
        holds(source, "o/race", &won[0].1, &of(&format!("{}", won[0].0), 1000)).await;
    }
}

async fn attributes(sink: &dyn Sink, kept: &Kept<'_>) {
    assert_eq!(sink.look(b"o/nothing").await.unwrap(), None);
    assert_eq!(sink.look(b"nowhere/nothing").await.unwrap(), None);
    let attributes = Attributes {
        mode: Some(0o640),
        uid: Some(10_001),
        gid: Some(10_002),
        modified_ns: Some(1_700_000_000_123_456_789),
    };
    let write = Write { id: id(), attributes };
    let written = sink.put(b"o/attributes", &body(b"x"), &write, &Condition::Absent).await.unwrap();
    let seen = sink.look(b"o/attributes").await.unwrap().unwrap();
    assert_eq!((seen.version, seen.size, seen.write), (written.version, 1, Some(write.id)));
    let Attributes { uid, gid, .. } = seen.attributes;
    assert_eq!(seen.attributes, Attributes { uid, gid, ..attributes });
    if kept.gives_away {
        assert_eq!(seen.attributes, attributes);
    }
}

async fn removals(source: &dyn Source, sink: &dyn Sink, able: Abilities) {
    let written = sink.put(b"o/gone", &body(b"x"), &write(), &Condition::Absent).await.unwrap();
    if able.is_at_delete {
        let nobodys = Condition::Is(Version("0".repeat(32)));
        assert_eq!(conflict(sink.delete(b"o/gone", &nobodys).await), Some(written.version.clone()));
        assert!(version(source, "o/gone").await.is_some());
    }
    let is = if able.is_at_delete { Condition::Is(written.version.clone()) } else { Condition::Any };
    sink.delete(b"o/gone", &is).await.unwrap();
    assert_eq!(version(source, "o/gone").await, None);
    sink.delete(b"o/gone", &is).await.unwrap();
    sink.delete(b"o/gone", &Condition::Any).await.unwrap();
}

async fn copies(source: &dyn Source, sink: &dyn Sink, able: Abilities) {
    let bytes = of("copied", 400_000);
    let from = sink.put(b"o/from", &body(&bytes), &write(), &Condition::Absent).await.unwrap();
    let attributes = Attributes { mode: Some(0o600), ..Attributes::default() };
    let write_ = Write { id: id(), attributes };
    let size = bytes.len() as u64;
    let to = sink.copy(b"o/from", &from.version, size, b"o/to", &write_, &Condition::Any).await.unwrap();
    holds(source, "o/to", &to, &bytes).await;
    holds(source, "o/from", &from, &bytes).await;
    let seen = sink.look(b"o/to").await.unwrap().unwrap();
    assert_eq!((seen.attributes.mode, seen.write), (Some(0o600), Some(write_.id)));
    // Other attributes of the same bytes.
    let attributes = Attributes { mode: Some(0o444), ..Attributes::default() };
    let touched = Write { id: id(), attributes };
    let is = if able.is { Condition::Is(to.version.clone()) } else { Condition::Any };
    let now = sink.copy(b"o/to", &to.version, size, b"o/to", &touched, &is).await.unwrap();
    holds(source, "o/to", &now, &bytes).await;
    assert_eq!(sink.look(b"o/to").await.unwrap().unwrap().attributes.mode, Some(0o444));
    if able.is_at_copy {
        let nobodys = Version("0".repeat(32));
        let stale = sink.copy(b"o/from", &nobodys, size, b"o/else", &write(), &Condition::Any).await;
        assert!(matches!(stale, Err(StoreError::Stale { .. })), "{stale:?}");
        assert_eq!(version(source, "o/else").await, None);
    }
}

async fn directories(source: &dyn Source, sink: &dyn Sink) {
    sink.make_dir(b"d", &write()).await.unwrap();
    sink.make_dir(b"d", &write()).await.unwrap();
    sink.make_dir(b"d/e", &write()).await.unwrap();
    assert_eq!(listed(source, "").await.get(&b"d"[..]), Some(&Kind::Directory));
    assert_eq!(listed(source, "d").await.get(&b"e"[..]), Some(&Kind::Directory));
    assert!(listed(source, "d/e").await.is_empty());
    sink.remove_dir(b"d/e").await.unwrap();
    sink.remove_dir(b"d/e").await.unwrap();
    assert!(listed(source, "d").await.is_empty());
    sink.remove_dir(b"d").await.unwrap();
    assert_eq!(listed(source, "").await.get(&b"d"[..]), None);
}

async fn parts(source: &dyn Source, sink: &dyn Sink, able: Abilities, kept: &Kept<'_>) {
    let part_bytes = sink.limits().part_bytes_min;
    let bytes = of("parts", 2 * part_bytes + 1_000_001);
    let file = Arc::new(tempfile::tempfile().unwrap());
    file.write_all_at(&bytes, 0).unwrap();
    let part = |number: u64| {
        let range = (number - 1) * part_bytes..(number * part_bytes).min(bytes.len() as u64);
        let wanted = &bytes[range.start as usize..range.end as usize];
        let crc32c = crc_fast::checksum(CrcAlgorithm::Crc32Iscsi, wanted) as u32;
        Body { file: file.clone(), range, crc32c }
    };
    let begun = write();
    let upload = sink.begin(b"o/parts", &begun).await.unwrap();
    // In another order, and one of them twice.
    let wrong = body(&of("wrong", part_bytes));
    sink.part(&upload, 2, &wrong).await.unwrap();
    let mut done: Vec<Part> = Vec::new();
    for number in [3, 1, 2] {
        done.push(sink.part(&upload, number, &part(u64::from(number))).await.unwrap());
    }
    done.sort_by_key(|part| part.number);
    assert_eq!(version(source, "o/parts").await, None, "it is not there before it is complete");
    let written = sink.complete(&upload, &done, &Condition::Absent).await.unwrap();
    holds(source, "o/parts", &written, &bytes).await;
    assert_eq!(written.confirmed, able.confirms, "{done:?}");
    assert_eq!(sink.look(b"o/parts").await.unwrap().unwrap().write, Some(begun.id));
    // As after an answer that was lost.
    let again = sink.complete(&upload, &done, &Condition::Absent).await.unwrap();
    assert_eq!(again.version, written.version);
    sink.abandon(&upload).await.unwrap();
    holds(source, "o/parts", &written, &bytes).await;

    // One that was ended meanwhile.
    let upload = sink.begin(b"o/parts", &write()).await.unwrap();
    let one = sink.part(&upload, 1, &part(1)).await.unwrap();
    sink.abandon(&upload).await.unwrap();
    sink.abandon(&upload).await.unwrap();
    if kept.knows_ended {
        let late = sink.part(&upload, 2, &part(2)).await;
        assert!(matches!(late, Err(StoreError::NotFound { .. })), "{late:?}");
        let is = Condition::Is(written.version.clone());
        let late = sink.complete(&upload, std::slice::from_ref(&one), &is).await;
        // A server may acknowledge it all the same; what is there then is not this write's.
        let refused = matches!(late, Err(StoreError::NotFound { .. } | StoreError::Conflict { .. }));
        assert!(refused, "{late:?}");
    }
    let nobody = Upload { id: "no-such-upload".into(), ..upload };
    sink.abandon(&nobody).await.unwrap();
    holds(source, "o/parts", &written, &bytes).await;

    if able.is_in_parts {
        let upload = sink.begin(b"o/parts", &write()).await.unwrap();
        let one = sink.part(&upload, 1, &part(1)).await.unwrap();
        let nobodys = Condition::Is(Version("0".repeat(32)));
        let refused = sink.complete(&upload, std::slice::from_ref(&one), &nobodys).await;
        assert_eq!(conflict(refused), Some(written.version.clone()));
        let now = sink.complete(&upload, &[one], &Condition::Is(written.version)).await.unwrap();
        holds(source, "o/parts", &now, &bytes[..part_bytes as usize]).await;
    }
}

/// Below a prefix: of how many of three uploads the store tells, and of no others.
pub async fn tells_of_uploads(sink: &dyn Sink) -> usize {
    let told = async || {
        let found = sink.leftovers(Duration::ZERO).await.unwrap();
        let named = found.into_iter().map(|Leftover { upload, .. }| (upload.path, upload.id));
        named.collect::<BTreeSet<_>>()
    };
    assert_eq!(told().await, BTreeSet::new());
    let mut begun = Vec::new();
    for path in [&b"u/a b+c"[..], b"u/a b+c", b"u/d"] {
        begun.push(sink.begin(path, &write()).await.unwrap());
    }
    let all: BTreeSet<_> = begun.iter().map(|upload| (upload.path.clone(), upload.id.clone())).collect();
    let found = told().await;
    assert!(found.is_subset(&all), "{found:?} of {all:?}");
    for upload in &begun {
        sink.abandon(upload).await.unwrap();
    }
    assert_eq!(told().await, BTreeSet::new());
    found.len()
}
