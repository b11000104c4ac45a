//! A directory as a sink.

use crate::common::sink::{ALL, Kept, body, conflict, holds, id, keeps_its_promises, of, write};
use std::fs;
use std::io::Write as _;
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::Path;
use std::sync::Arc;
use store::{
    Abilities, Access, Attributes, Condition, Kind, Limits, LimitsConfig, NoObserver, Sink, Source,
    StoreError, Write,
};
use volume::{Credentials, Parameters, SourceUrl, VolumeId, VolumeSpec};

fn open(path: &Path) -> (Arc<dyn Source>, Arc<dyn Sink>) {
    let spec = VolumeSpec {
        id: VolumeId::parse("v").unwrap(),
        source: SourceUrl::Dir { path: path.to_owned() },
        parameters: Parameters::default(),
    };
    let limits = Arc::new(Limits::new(LimitsConfig::default()));
    let access = Access::fixed(&spec, Credentials::anonymous());
    let source = store::open(&spec, access, limits, Arc::new(NoObserver)).unwrap();
    let sink = source.sink().unwrap();
    (source, sink)
}

fn names(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<_> = entries.collect();
    names.sort();
    names
}

#[tokio::test]
async fn a_directory_keeps_what_every_sink_promises() {
    let dir = tempfile::tempdir().unwrap();
    let (source, sink) = open(&dir.path().canonicalize().unwrap());
    let gives_away = rustix::process::geteuid().is_root();
    let able = keeps_its_promises(
        "directory",
        &*source,
        &*sink,
        &Kept { gives_away, knows_ended: true, odd: &|_| true },
    )
    .await;
    let all = Abilities { absent_in_parts: false, is_in_parts: false, ..ALL };
    assert_eq!(able, all);
    let left: Vec<_> = names(&dir.path().join("o"));
    assert!(!left.iter().any(|name| name.starts_with('.')), "{left:?}");
}

#[tokio::test]
async fn nothing_is_written_past_a_link_or_out_of_the_directory() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().canonicalize().unwrap();
    let (inside, outside) = (root.join("inside"), root.join("outside"));
    fs::create_dir(&inside).unwrap();
    fs::create_dir(&outside).unwrap();
    fs::write(outside.join("f"), "theirs").unwrap();
    symlink(&outside, inside.join("way")).unwrap();
    symlink(outside.join("f"), inside.join("link")).unwrap();
    let (_, sink) = open(&inside);
    let put = sink.put(b"way/new", &body(b"x"), &write(), &Condition::Absent).await;
    assert!(matches!(put, Err(StoreError::NotFound { .. })), "{put:?}");
    // A link itself is replaced, not what it leads to.
    assert!(sink.put(b"link", &body(b"x"), &write(), &Condition::Absent).await.is_err());
    sink.put(b"link", &body(b"x"), &write(), &Condition::Any).await.unwrap();
    assert_eq!(fs::read_to_string(outside.join("f")).unwrap(), "theirs");
    assert!(fs::symlink_metadata(inside.join("link")).unwrap().is_file());
    assert_eq!(names(&outside), ["f"]);
}

#[tokio::test]
async fn what_a_write_that_died_has_left_is_nobodys_file() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().canonicalize().unwrap();
    let (source, sink) = open(&root);
    let write = write();
    let beside = root.join(format!(".millpond-{}", write.id));
    fs::write(&beside, "half").unwrap();
    assert!(source.list(b"", None).await.unwrap().entries.is_empty());
    let bytes = of("f", 100_000);
    let written = sink.put(b"f", &body(&bytes), &write, &Condition::Absent).await.unwrap();
    holds(&*source, "f", &written, &bytes).await;
    assert!(!beside.exists());
    fs::write(&beside, "half").unwrap();
    // It has come to pass: what lies beside it may be what somebody else had written meanwhile.
    sink.withdraw(b"f", write.id, None).await.unwrap();
    assert!(beside.exists());
    sink.withdraw(b"f", write.id, Some(&Condition::Absent)).await.unwrap();
    assert!(!beside.exists() && root.join("f").exists());
    for path in ["f", "new", "no/such/directory/f"] {
        let other = id();
        let beside = root.join(format!(".millpond-{other}"));
        fs::write(&beside, "half").unwrap();
        sink.withdraw(path.as_bytes(), other, Some(&Condition::Absent)).await.unwrap();
        assert_eq!(beside.exists(), path.starts_with("no/"));
    }
}

#[tokio::test]
async fn a_file_that_somebody_else_has_changed_is_not_overwritten() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().canonicalize().unwrap();
    let (_, sink) = open(&root);
    let written = sink.put(b"f", &body(b"ours"), &write(), &Condition::Absent).await.unwrap();
    fs::File::options().append(true).open(root.join("f")).unwrap().write_all(b" and theirs").unwrap();
    let is = Condition::Is(written.version.clone());
    let found = conflict(sink.put(b"f", &body(b"ours again"), &write(), &is).await).unwrap();
    assert_ne!(found, written.version);
    assert!(conflict(sink.delete(b"f", &is).await).is_some());
    assert_eq!(fs::read_to_string(root.join("f")).unwrap(), "ours and theirs");
}

#[tokio::test]
async fn what_the_disk_does_not_give_back_is_not_written() {
    let dir = tempfile::tempdir().unwrap();
    let (source, sink) = open(&dir.path().canonicalize().unwrap());
    let mut wrong = body(&of("f", 100_000));
    wrong.crc32c ^= 1;
    let put = sink.put(b"f", &wrong, &write(), &Condition::Absent).await;
    assert!(matches!(put, Err(StoreError::Damaged { .. })), "{put:?}");
    assert_eq!(source.head(b"f").await.unwrap(), None);
    assert!(names(dir.path()).is_empty());
}

#[tokio::test]
async fn a_directory_that_is_not_empty_stays() {
    let dir = tempfile::tempdir().unwrap();
    let (source, sink) = open(&dir.path().canonicalize().unwrap());
    let attributes = Attributes { mode: Some(0o750), ..Attributes::default() };
    sink.make_dir(b"d", &Write { id: id(), attributes }).await.unwrap();
    assert_eq!(fs::metadata(dir.path().join("d")).unwrap().mode() & 0o7777, 0o750);
    sink.put(b"d/f", &body(b"x"), &write(), &Condition::Absent).await.unwrap();
    conflict(sink.remove_dir(b"d").await);
    assert!(matches!(source.head(b"d").await.unwrap().unwrap().kind, Kind::Directory));
    conflict(sink.make_dir(b"d/f", &write()).await);
    let put = sink.put(b"d/f/g", &body(b"x"), &write(), &Condition::Any).await;
    assert!(put.is_err(), "{put:?}");
    let put = sink.put(b"d", &body(b"x"), &write(), &Condition::Any).await;
    assert!(put.is_err(), "{put:?}");
    assert!(dir.path().join("d/f").is_file());
}

/// As a writer leaves it that dies between the exchange of the two names and what follows.
fn died_after_the_exchange(root: &Path, write: &Write, beside: &str) {
    fs::write(root.join(format!(".millpond-{}", write.id)), beside).unwrap();
}

#[tokio::test]
async fn a_writer_that_died_after_the_exchange_is_done_and_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().canonicalize().unwrap();
    let (_, sink) = open(&root);
    let first = sink.put(b"f", &body(b"first"), &write(), &Condition::Absent).await.unwrap();
    let kept = fs::metadata(root.join("f")).unwrap().modified().unwrap();
    let second = write();
    let is = Condition::Is(first.version);
    let written = sink.put(b"f", &body(b"second"), &second, &is).await.unwrap();
    died_after_the_exchange(&root, &second, "first");
    let beside = fs::File::options().write(true).open(root.join(format!(".millpond-{}", second.id))).unwrap();
    beside.set_modified(kept).unwrap();
    assert_eq!(sink.put(b"f", &body(b"second"), &second, &is).await.unwrap().version, written.version);
    assert_eq!(names(&root), ["f"]);
    assert_eq!(fs::read_to_string(root.join("f")).unwrap(), "second");
}

#[tokio::test]
async fn what_somebody_else_wrote_before_such_an_exchange_is_put_back() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().canonicalize().unwrap();
    let (_, sink) = open(&root);
    let first = sink.put(b"f", &body(b"first"), &write(), &Condition::Absent).await.unwrap();
    let (second, is) = (write(), Condition::Is(first.version));
    sink.put(b"f", &body(b"second"), &second, &is).await.unwrap();
    died_after_the_exchange(&root, &second, "theirs");
    conflict(sink.put(b"f", &body(b"second"), &second, &is).await);
    assert_eq!(names(&root), ["f"]);
    assert_eq!(fs::read_to_string(root.join("f")).unwrap(), "theirs");
}

#[tokio::test]
async fn no_file_takes_its_owners_rights() {
    let dir = tempfile::tempdir().unwrap();
    let (_, sink) = open(&dir.path().canonicalize().unwrap());
    let attributes = Attributes { mode: Some(0o6755), ..Attributes::default() };
    sink.put(b"f", &body(b"x"), &Write { id: id(), attributes }, &Condition::Absent).await.unwrap();
    sink.make_dir(b"d", &Write { id: id(), attributes }).await.unwrap();
    for name in ["f", "d"] {
        assert_eq!(fs::metadata(dir.path().join(name)).unwrap().mode() & 0o7777, 0o755, "{name}");
    }
}
