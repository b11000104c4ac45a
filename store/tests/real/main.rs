//! What the contract claims, against servers that others wrote: `scripts/stores` installs them and runs this. What a server
//! cannot keep is named here, so that a table of it can be shown.
#![allow(clippy::unwrap_used)] // Helpers of tests are tests too; clippy only knows #[test] functions.

mod ceph;
#[path = "../common/mod.rs"]
mod common;
mod erase;
mod oss_sdk;
mod servers;
mod web;
mod writes;

use common::{BUCKET, ODD_KEYS, listed, named, read};
use servers::{Below, Kept, REGION, Real};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use store::{Access, Kind, Limits, LimitsConfig, NoObserver, Source, StoreError};
use testkit::content;
use volume::{Credentials, Parameters, SourceUrl, VolumeId, VolumeSpec};

fn open(
    real: &Real,
    bucket: &str,
    secrets: &[(&'static str, String)],
) -> Result<Arc<dyn Source>, StoreError> {
    open_in(REGION, real, bucket, secrets)
}

fn open_in(
    region: &str,
    real: &Real,
    bucket: &str,
    secrets: &[(&'static str, String)],
) -> Result<Arc<dyn Source>, StoreError> {
    let (spec, access, limits) = asking(region, real, bucket, secrets);
    store::open(&spec, access, limits, Arc::new(NoObserver))
}

/// What is asked, and with what.
fn asking(
    region: &str,
    real: &Real,
    bucket: &str,
    secrets: &[(&'static str, String)],
) -> (VolumeSpec, Arc<Access>, Arc<Limits>) {
    // A web server's source has its address in it.
    let (source, endpoint) = match real.scheme {
        "http" => (format!("{}/{bucket}", real.endpoint()), None),
        scheme => (format!("{scheme}://{bucket}"), Some(real.endpoint().parse().unwrap())),
    };
    let source = SourceUrl::parse(&source).unwrap();
    let parameters = Parameters {
        endpoint,
        region: Some(region.into()),
        storage_account: real.account.map(str::to_owned),
        allow_http: true,
        store_timeout: Duration::from_secs(60),
        ..Parameters::default()
    };
    let spec = VolumeSpec { id: VolumeId::parse("v").unwrap(), source, parameters };
    let credentials = Credentials::from_secrets(secrets.iter().map(|(k, v)| (*k, v.as_str()))).unwrap();
    let limits = LimitsConfig { egress: named(), ..LimitsConfig::default() };
    let access = Access::fixed(&spec, credentials);
    (spec, access, Arc::new(Limits::new(limits)))
}

fn of(path: &str, range: std::ops::Range<u64>) -> Vec<u8> {
    content::bytes(content::id(path), range)
}

/// One server at a time: what each is, stands in `servers`.
#[tokio::test]
async fn each_server_keeps_what_the_contract_claims() {
    let mut table = Vec::new();
    for start in servers::chosen() {
        let real = start().await;
        println!("{}: {}", real.name, real.endpoint());
        let source = open(&real, BUCKET, &real.secrets).unwrap();
        source.check(Duration::from_secs(30)).await.unwrap();

        // Odd keys: each is kept and read, or refused by the server itself when it is put.
        let (mut kept, mut lost) = (0, Vec::new());
        for key in ODD_KEYS.iter().filter(|key| !real.breaks_at.contains(key)) {
            let path = format!("dir é+/{key}");
            match real.put(&path, of(&path, 0..500)).await {
                Kept::Yes => kept += 1,
                Kept::No(why) => lost.push(format!("{key:?} ({why})")),
            }
        }
        if real.scheme == "http" {
            // Apache's ETags are weak in the second in which a file was changed, and strong from then on.
            let second = || SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
            let put = second();
            while second() == put {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        }
        let found = listed(&*source, "dir é+").await;
        let tried = ODD_KEYS.iter().filter(|key| !real.breaks_at.contains(key));
        for key in tried.filter(|key| !lost.iter().any(|lost| lost.starts_with(&format!("{key:?} (")))) {
            let path = format!("dir é+/{key}");
            let entry = source.head(path.as_bytes()).await.unwrap();
            let entry = entry.unwrap_or_else(|| panic!("{}: {key:?} is not found", real.name));
            assert_eq!(found.get(key.as_bytes()), Some(&entry.kind), "{}: {key:?}", real.name);
            let Kind::File { size, version } = entry.kind else { panic!("{key:?} is no file") };
            assert_eq!(
                read(&*source, path.as_bytes(), &version, 0..size).await.unwrap(),
                of(&path, 0..500),
                "{}: {key:?}",
                real.name
            );
        }
        assert_eq!(found.len(), kept, "{}: {:?}", real.name, found.keys());
        assert_eq!(lost.len(), real.refuses, "{}: {lost:?}", real.name);

        // Pages, with directories in between.
        for k in 0..1_203 {
            assert!(matches!(real.put(&format!("d/{k:05}"), Vec::new()).await, Kept::Yes));
            if k % 100 == 0 {
                assert!(matches!(real.put(&format!("d/{k:05}.d/x"), Vec::new()).await, Kept::Yes));
            }
        }
        let pages = listed(&*source, "d").await;
        let directories = pages.values().filter(|kind| **kind == Kind::Directory).count();
        assert_eq!((pages.len(), directories), (1_203 + 13, 13), "{}", real.name);
        assert!(
            matches!(source.list(b"nothing", None).await, Err(StoreError::NotFound { .. })),
            "{}",
            real.name
        );
        assert_eq!(source.head(b"d/nothing").await.unwrap(), None, "{}", real.name);
        // Longer than any key of theirs, in names that POSIX takes.
        let long = vec!["n".repeat(250); 5].join("/");
        assert_eq!(source.head(long.as_bytes()).await.unwrap(), None, "{}", real.name);

        // Directories that are empty: a marker's, and what a gateway shows in their parent alone.
        assert!(matches!(real.put("marked/", Vec::new()).await, Kept::Yes), "{}", real.name);
        for empty in ["marked"].into_iter().chain(real.keyless) {
            let parent = listed(&*source, "").await;
            assert_eq!(parent.get(empty.as_bytes()), Some(&Kind::Directory), "{}: {empty}", real.name);
            assert_eq!(listed(&*source, empty).await.len(), 0, "{}: {empty}", real.name);
            let entry = source.head(empty.as_bytes()).await.unwrap();
            assert_eq!(entry.map(|entry| entry.kind), Some(Kind::Directory), "{}: {empty}", real.name);
        }

        // A file and a directory of one name.
        assert!(matches!(real.put("two", vec![1]).await, Kept::Yes), "{}", real.name);
        let taken = matches!(real.put("two/x", vec![2]).await, Kept::Yes);
        let page = source.list(b"", None).await.unwrap();
        let below = match (taken, page.entries.iter().filter(|entry| entry.name == b"two").count()) {
            (true, 2) => Below::Listed,
            (true, 1) => Below::Hidden,
            (false, 1) => Below::Refused,
            other => panic!("{}: {other:?}", real.name),
        };
        assert_eq!(below, real.below_a_file, "{}", real.name);

        // Ranges, and a version that is gone, also in the middle of a body.
        const SIZE: u64 = (1 << 20) + 7;
        let version = async |path: &str| match source.head(path.as_bytes()).await.unwrap().unwrap().kind {
            Kind::File { version, .. } => version,
            other => panic!("{other:?}"),
        };
        assert!(matches!(real.put("o", of("o", 0..SIZE)).await, Kept::Yes));
        let old = version("o").await;
        for range in [0..1, SIZE - 1..SIZE, 0..SIZE, 4095..4097, 5..5, 1..SIZE - 1] {
            assert_eq!(
                read(&*source, b"o", &old, range.clone()).await.unwrap(),
                of("o", range),
                "{}",
                real.name
            );
        }
        assert!(matches!(real.put("o", of("other", 0..SIZE)).await, Kept::Yes));
        let stale = read(&*source, b"o", &old, 0..10).await;
        assert!(matches!(stale, Err(StoreError::Stale { .. })), "{}: {stale:?}", real.name);
        let now = version("o").await;
        assert_ne!(now, old, "{}", real.name);
        assert_eq!(read(&*source, b"o", &now, 0..SIZE).await.unwrap(), of("other", 0..SIZE), "{}", real.name);

        // Checksums of whole objects: those that it tells are right, however they were put there.
        const PART: u64 = 5 << 20;
        let (mut told, mut untold) = (Vec::new(), Vec::new());
        for checksum in [
            None,
            Some(("CRC64NVME", "FULL_OBJECT")),
            Some(("CRC32C", "FULL_OBJECT")),
            Some(("CRC32C", "COMPOSITE")),
        ] {
            let name =
                checksum.map_or("one piece".to_owned(), |(algorithm, kind)| format!("{algorithm} {kind}"));
            let kept = match checksum {
                None => real.put("m", of("m", 0..PART + SIZE)).await,
                // Other stores than S3 have other ways.
                Some(_) if real.scheme != "s3" => continue,
                Some(checksum) => {
                    real.put_in_parts("m", [of("m", 0..PART), of("m", PART..PART + SIZE)], checksum).await
                }
            };
            if let Kept::No(why) = kept {
                untold.push(format!("{name} ({why})"));
                continue;
            }
            let version = version("m").await;
            for range in [0..PART, PART..PART + SIZE] {
                read(&*source, b"m", &version, range).await.unwrap();
            }
            if let Some(sum) = source.checksum(b"m", &version).await.unwrap() {
                let whole = of("m", 0..PART + SIZE);
                let is_right = sum.value == crc_fast::checksum(sum.algorithm, &whole);
                assert_eq!(is_right, real.tells_wrong != Some(name.as_str()), "{}: {name}", real.name);
                told.push(name);
            } else {
                untold.push(name);
            }
        }

        // What is wrong.
        let nothing =
            open(&real, "no-such-bucket", &real.secrets).unwrap().check(Duration::from_secs(10)).await;
        let nothing = nothing.unwrap_err().to_string();
        assert!(nothing.contains("check 'source'"), "{}: {nothing}", real.name);
        if let Some((wrong, words)) = &real.wrong {
            let refused = open(&real, BUCKET, wrong).unwrap().check(Duration::from_secs(10)).await;
            let refused = refused.unwrap_err().to_string();
            assert!(refused.contains(words), "{}: {refused}", real.name);
        }
        if let Some(stranger) = &real.stranger {
            let refused = open(&real, BUCKET, stranger).unwrap().check(Duration::from_secs(10)).await;
            let refused = refused.unwrap_err().to_string();
            assert!(refused.contains("check accessKeyId"), "{}: {refused}", real.name);
        }
        if real.looks_at_token {
            let token = [("sessionToken", "none".to_owned())];
            let secrets: Vec<_> = real.secrets.iter().cloned().chain(token).collect();
            let refused = open(&real, BUCKET, &secrets).unwrap().check(Duration::from_secs(10)).await;
            assert!(matches!(refused, Err(StoreError::Expired { .. })), "{}: {refused:?}", real.name);
        }
        let elsewhere = open_in("eu-elsewhere-1", &real, BUCKET, &real.secrets).unwrap();
        match (elsewhere.check(Duration::from_secs(10)).await, real.looks_at_region) {
            (Ok(()), false) => {}
            (Err(why), true) => {
                let why = why.to_string();
                assert!(why.contains(&format!("set 'region' to {REGION}")), "{}: {why}", real.name);
            }
            other => panic!("{}: {other:?}", real.name),
        }
        table.push(format!(
            "{:<16} tells checksums of {told:?} and not of {untold:?}; {kept} of {} odd keys; refuses {lost:?}, breaks at {:?}",
            real.name,
            ODD_KEYS.len(),
            real.breaks_at
        ));
    }
    println!("{}", table.join("\n"));
    assert!(!table.is_empty(), "no server was chosen");
}
