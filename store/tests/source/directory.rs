//! A directory as a source: nothing leads out of it, everything in it is shown.

use futures::TryStreamExt;
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use store::{Access, Kind, Limits, LimitsConfig, NoObserver, Source, StoreError, Version};
use testkit::content;
use volume::{Credentials, Parameters, Permissions, SourceUrl, VolumeId, VolumeSpec};

fn open(path: &Path) -> Arc<dyn Source> {
    let spec = VolumeSpec {
        id: VolumeId::parse("v").unwrap(),
        source: SourceUrl::Dir { path: path.to_owned() },
        parameters: Parameters::default(),
    };
    let limits = Arc::new(Limits::new(LimitsConfig::default()));
    store::open(&spec, Access::fixed(&spec, Credentials::anonymous()), limits, Arc::new(NoObserver)).unwrap()
}

async fn file(source: &dyn Source, path: &str) -> (u64, Version) {
    match source.head(path.as_bytes()).await.unwrap().map(|entry| entry.kind) {
        Some(Kind::File { size, version }) => (size, version),
        other => panic!("{path} is {other:?}"),
    }
}

async fn read(
    source: &dyn Source,
    path: &str,
    version: &Version,
    range: std::ops::Range<u64>,
) -> Result<Vec<u8>, StoreError> {
    let pieces: Vec<_> = source.get(path.as_bytes(), version, range).await?.try_collect().await?;
    Ok(pieces.concat())
}

#[tokio::test]
async fn files_directories_and_links_are_shown_as_they_are() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().canonicalize().unwrap();
    fs::create_dir_all(root.join("a/b")).unwrap();
    fs::write(root.join("a/f"), content::bytes(5, 0..3_000_000)).unwrap();
    symlink("../a/f", root.join("a/link")).unwrap();
    let _socket = std::os::unix::net::UnixListener::bind(root.join("a/socket")).unwrap();
    let source = open(&root);
    source.check(Duration::from_secs(5)).await.unwrap();
    let page = source.list(b"a", None).await.unwrap();
    let found: BTreeMap<_, _> =
        page.entries.iter().map(|entry| (entry.name.as_slice(), &entry.kind)).collect();
    assert_eq!(found.len(), 3);
    assert_eq!(found[&b"b"[..]], &Kind::Directory);
    assert_eq!(found[&b"link"[..]], &Kind::Symlink { target: b"../a/f".to_vec() });
    for entry in &page.entries {
        let shown = fs::symlink_metadata(root.join("a").join(OsStr::from_bytes(&entry.name))).unwrap();
        let permissions = Permissions::of(shown.mode(), Some(shown.uid()), Some(shown.gid()));
        let is_link = matches!(entry.kind, Kind::Symlink { .. });
        assert_eq!(entry.permissions, Some(permissions).filter(|_| !is_link));
    }
    assert_eq!(page.unnameable, ["socket (neither file, directory nor link)"]);
    for entry in &page.entries {
        let path = [b"a/", entry.name.as_slice()].concat();
        assert_eq!(source.head(&path).await.unwrap().as_ref(), Some(entry));
    }
    let (size, version) = file(&*source, "a/f").await;
    for range in [0..size, 1..2, 1_048_575..1_048_577, 2_999_999..size, 7..7] {
        let bytes = read(&*source, "a/f", &version, range.clone()).await.unwrap();
        assert_eq!(bytes.len() as u64, range.end - range.start);
        assert_eq!(content::first_wrong_byte(5, range.start, &bytes), None);
    }
    assert_eq!(source.head(b"a/none").await.unwrap(), None);
    assert_eq!(source.head(b"a/f/x").await.unwrap(), None);
}

#[tokio::test]
async fn nothing_leads_out_of_the_directory() {
    let dir = tempfile::tempdir().unwrap();
    let base = dir.path().canonicalize().unwrap();
    let root = base.join("root");
    fs::create_dir_all(root.join("sub")).unwrap();
    fs::write(base.join("secret"), "secret").unwrap();
    fs::write(root.join("sub/f"), "inside").unwrap();
    symlink(&base, root.join("out")).unwrap();
    symlink("../secret", root.join("secret-link")).unwrap();
    symlink("sub", root.join("sub-link")).unwrap();
    symlink("/proc/self/root", root.join("magic")).unwrap();
    let source = open(&root);
    let any = Version("6-0".into());
    for path in
        ["../secret", "sub/../../secret", "/etc/passwd", "out/secret", "magic/etc/passwd", "", ".", "sub//f"]
    {
        assert!(source.head(path.as_bytes()).await.unwrap().is_none(), "{path}");
        let got = read(&*source, path, &any, 0..6).await;
        assert!(matches!(got, Err(StoreError::NotFound { .. })), "{path}: {got:?}");
    }
    for dir in ["..", "out", "magic", "sub/..", "/etc", "sub-link", "secret-link"] {
        let listed = source.list(dir.as_bytes(), None).await;
        assert!(matches!(listed, Err(StoreError::NotFound { .. })), "{dir}: {listed:?}");
    }
    // A link as the last component is shown, and not opened.
    for link in ["secret-link", "out"] {
        assert!(matches!(source.head(link.as_bytes()).await.unwrap().unwrap().kind, Kind::Symlink { .. }));
        assert!(read(&*source, link, &any, 0..6).await.is_err());
    }
    // Nor may the directory itself lie behind one.
    symlink(&root, base.join("alias")).unwrap();
    let error = open(&base.join("alias")).check(Duration::from_secs(5)).await.unwrap_err();
    assert!(error.to_string().contains("symbolic link"), "{error}");
    let error = open(&base.join("none")).check(Duration::from_secs(5)).await.unwrap_err();
    assert!(matches!(error, StoreError::NotFound { .. }), "{error}");
}

#[tokio::test]
async fn a_file_that_changed_is_stale() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().canonicalize().unwrap();
    fs::write(root.join("f"), "one").unwrap();
    let source = open(&root);
    let (_, version) = file(&*source, "f").await;
    fs::write(root.join("f"), "three").unwrap();
    let got = read(&*source, "f", &version, 0..3).await;
    assert!(matches!(got, Err(StoreError::Stale { .. })), "{got:?}");
    let (size, version) = file(&*source, "f").await;
    assert_eq!(read(&*source, "f", &version, 0..size).await.unwrap(), b"three");
    // Rewritten between two pieces.
    fs::write(root.join("big"), content::bytes(1, 0..4 << 20)).unwrap();
    let (size, version) = file(&*source, "big").await;
    let mut stream = source.get(b"big", &version, 0..size).await.unwrap();
    stream.try_next().await.unwrap().unwrap();
    fs::write(root.join("big"), content::bytes(2, 0..(4 << 20) + 1)).unwrap();
    assert!(matches!(stream.try_next().await, Err(StoreError::Stale { .. })));
}

#[tokio::test]
async fn a_file_that_was_rewritten_with_its_size_and_time_kept_is_stale() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().canonicalize().unwrap();
    fs::write(root.join("f"), "one").unwrap();
    let source = open(&root);
    let (_, version) = file(&*source, "f").await;
    let modified = fs::metadata(root.join("f")).unwrap().modified().unwrap();
    // As `cp --preserve` over it, or an archive that is unpacked again.
    fs::write(root.join("f"), "two").unwrap();
    fs::File::options().write(true).open(root.join("f")).unwrap().set_modified(modified).unwrap();
    assert_eq!(fs::metadata(root.join("f")).unwrap().modified().unwrap(), modified);
    let got = read(&*source, "f", &version, 0..3).await;
    assert!(matches!(got, Err(StoreError::Stale { .. })), "{got:?}");
}

/// Whatever the steps of the file system's clock: what is delivered as a version is all of one.
#[tokio::test]
async fn a_file_that_is_rewritten_while_it_is_read_is_one_version_or_stale() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().canonicalize().unwrap();
    let size = 3 << 20;
    let (mut whole, mut stale) = (0, 0);
    for round in 0..40u8 {
        fs::write(root.join("f"), vec![round; size]).unwrap();
        let source = open(&root);
        let (len, version) = file(&*source, "f").await;
        let mut stream = match source.get(b"f", &version, 0..len).await {
            Ok(stream) => stream,
            Err(error) => panic!("it was not touched: {error}"),
        };
        let first = stream.try_next().await.unwrap().unwrap();
        if round % 2 == 0 {
            let times = fs::metadata(root.join("f")).unwrap().modified().unwrap();
            let f = fs::File::options().write(true).open(root.join("f")).unwrap();
            std::os::unix::fs::FileExt::write_all_at(&f, &vec![!round; size], 0).unwrap();
            f.set_modified(times).unwrap();
        }
        let rest: Result<Vec<_>, _> = stream.try_collect().await;
        match rest {
            Ok(rest) => {
                assert!(rest.iter().chain([&first]).all(|piece| piece.iter().all(|b| *b == round)), "torn");
                whole += 1;
            }
            Err(StoreError::Stale { .. }) => stale += 1,
            Err(other) => panic!("{other}"),
        }
    }
    assert_eq!((whole, stale), (20, 20));
}

#[tokio::test]
async fn large_directories_come_in_bounded_pages() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().canonicalize().unwrap();
    for n in 0..2345 {
        fs::write(root.join(format!("f{n}")), "").unwrap();
    }
    let source = open(&root);
    let (mut names, mut token) = (Vec::new(), None);
    loop {
        let page = source.list(b"", token.as_deref()).await.unwrap();
        assert!(page.entries.len() <= store::PAGE_ENTRIES);
        names.extend(page.entries.into_iter().map(|entry| entry.name));
        token = page.next;
        if token.is_none() {
            break;
        }
    }
    names.sort();
    names.dedup();
    assert_eq!(names.len(), 2345);
    assert!(matches!(source.list(b"", Some("nonsense")).await, Err(StoreError::Malformed { .. })));
}
