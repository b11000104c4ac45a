//! What holds for every object store, whatever it speaks: each claim over each store.

use crate::common::{BUCKET, quick, read, version};
use futures::TryStreamExt;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use store::{Access, Kind, Limits, NoObserver, Source, StoreError};
use testkit::content;
use testkit::faults::{Fault, Rule, Script};
use testkit::s3::{ACCESS_KEY, Config, Key, Memory, Oss, Rights, SECRET_KEY, Server};
use testkit::tls::{Authority, Front};
use volume::{Credentials, Parameters, SourceUrl, VolumeId, VolumeSpec};

struct Store {
    scheme: &'static str,
    server: Server,
}

const REGION: &str = "cn-testkit";

/// One server for each that the testkit can be.
async fn stores() -> Vec<Store> {
    stores_where(|_| {}).await
}

async fn stores_where(change: impl Fn(&mut Config)) -> Vec<Store> {
    let mut stores = Vec::new();
    for (scheme, oss) in [("s3", None), ("oss", Some(Oss { region: REGION.into() }))] {
        let mut config = Config { oss, ..Config::default() };
        config.keys.push(Key::new("session", SECRET_KEY, Rights::All).with_token("good"));
        config.keys.push(Key::new("lists", SECRET_KEY, Rights::ListOnly));
        change(&mut config);
        let server = Server::start(config.bucket(BUCKET, Memory::default())).await.unwrap();
        stores.push(Store { scheme, server });
    }
    stores
}

impl Store {
    fn parameters(&self) -> Parameters {
        Parameters {
            endpoint: Some(self.server.endpoint().parse().unwrap()),
            region: Some(REGION.into()),
            allow_http: true,
            store_timeout: Duration::from_secs(60),
            ..Parameters::default()
        }
    }

    fn open(&self, bucket: &str, parameters: Parameters, secrets: &[(&str, &str)]) -> Arc<dyn Source> {
        self.try_open(bucket, parameters, secrets).unwrap()
    }

    fn try_open(
        &self,
        bucket: &str,
        parameters: Parameters,
        secrets: &[(&str, &str)],
    ) -> Result<Arc<dyn Source>, StoreError> {
        let source = SourceUrl::parse(&format!("{}://{bucket}", self.scheme)).unwrap();
        let spec = VolumeSpec { id: VolumeId::parse("v").unwrap(), source, parameters };
        let credentials = Credentials::from_secrets(secrets.iter().copied()).unwrap();
        let access = Access::fixed(&spec, credentials);
        store::open(&spec, access, Arc::new(Limits::new(quick())), Arc::new(NoObserver))
    }

    fn source(&self) -> Arc<dyn Source> {
        self.open(BUCKET, self.parameters(), &[("accessKeyId", ACCESS_KEY), ("secretAccessKey", SECRET_KEY)])
    }

    async fn check(
        &self,
        bucket: &str,
        parameters: Parameters,
        secrets: &[(&str, &str)],
    ) -> Result<(), StoreError> {
        self.try_open(bucket, parameters, secrets)?.check(Duration::from_secs(3)).await
    }

    fn put(&self, key: &str, size: u64) -> store::Version {
        version(&self.server.put(BUCKET, key, content::bytes(content::id(key), 0..size)).unwrap())
    }
}

async fn listed(source: &dyn Source, dir: &str) -> BTreeMap<Vec<u8>, Kind> {
    let (mut found, mut token) = (BTreeMap::new(), None);
    loop {
        let page = source.list(dir.as_bytes(), token.as_deref()).await.unwrap();
        found.extend(page.entries.into_iter().map(|entry| (entry.name, entry.kind)));
        token = page.next;
        if token.is_none() {
            return found;
        }
    }
}

#[tokio::test]
async fn odd_keys_are_listed_found_and_read_and_hide_nothing() {
    let odd = [
        "space in name",
        " leading",
        "trailing ",
        "per%cent",
        "%41",
        "%2F",
        "plus+plus",
        "a&b=c",
        "hash#",
        "question?",
        "semi;colon",
        "quote\"'",
        "back\\slash",
        "日本",
        "emoji 🦀",
        "new\nline",
        "tab\t",
        "\u{1}\u{7f}",
        "colon:at@",
        "tilde~",
        "*star*",
        "...",
        "..a",
        ".hidden",
        "a,b",
        "[x]{y}|z",
        "<xml>&amp;",
        "$dollar",
        "(paren)!",
    ];
    for store in stores().await {
        for key in odd {
            store.put(&format!("dir é+/{key}"), 500);
        }
        let source = store.source();
        let found = listed(&*source, "dir é+").await;
        assert_eq!(found.len(), odd.len(), "{}", store.scheme);
        for key in odd {
            let path = format!("dir é+/{key}");
            let entry = source.head(path.as_bytes()).await.unwrap();
            let entry = entry.unwrap_or_else(|| panic!("{}: {key:?} is not found", store.scheme));
            assert_eq!(found.get(key.as_bytes()), Some(&entry.kind), "{}: {key:?}", store.scheme);
            let Kind::File { size, version } = entry.kind else { panic!("{key:?} is no file") };
            let bytes = read(&*source, path.as_bytes(), &version, 0..size).await.unwrap();
            assert_eq!(
                content::first_wrong_byte(content::id(&path), 0, &bytes),
                None,
                "{}: {key:?}",
                store.scheme
            );
        }
        for nothing in ["dir é+/space", "dir é+/per", "dir é", "dir é+/space in name/x"] {
            assert_eq!(source.head(nothing.as_bytes()).await.unwrap(), None, "{}: {nothing:?}", store.scheme);
        }
    }
}

#[tokio::test]
async fn pages_go_on_where_they_stopped() {
    for store in stores().await {
        for k in 0..2_345 {
            store.put(&format!("d/{k:05}"), 1);
            if k % 100 == 0 {
                store.put(&format!("d/{k:05}.d/x"), 1);
            }
        }
        let found = listed(&*store.source(), "d").await;
        let directories = found.values().filter(|kind| **kind == Kind::Directory).count();
        assert_eq!((found.len(), directories), (2_345 + 24, 24), "{}", store.scheme);
    }
}

#[tokio::test]
async fn ranges_at_the_edges_have_their_bytes() {
    const SIZE: u64 = (1 << 20) + 7;
    for store in stores().await {
        let seen = store.put("o", SIZE);
        let source = store.source();
        for range in [0..1, SIZE - 1..SIZE, 0..SIZE, 4095..4097, 5..5, SIZE..SIZE, 1..SIZE - 1] {
            let bytes = read(&*source, b"o", &seen, range.clone()).await.unwrap();
            assert_eq!(bytes, content::bytes(content::id("o"), range.clone()), "{}: {range:?}", store.scheme);
        }
    }
}

#[tokio::test]
async fn a_version_that_is_gone_is_stale_also_in_the_middle_of_a_body() {
    for store in stores().await {
        let scheme = store.scheme;
        let old = store.put("o", 8 << 20);
        let source = store.source();
        let mut body = source.get(b"o", &old, 0..8 << 20).await.unwrap();
        let mut came = body.try_next().await.unwrap().unwrap().len();
        store.put("o", 8 << 20);
        // The rest has to come over a connection of its own.
        let broken = Rule::always(Fault::ResetBody).op("GetObject");
        store.server.faults().set(Script { seed: 1, rules: vec![broken.times(3)] });
        let mut again = source.get(b"o", &old, 0..8 << 20).await.err();
        let read = async {
            while let Some(piece) = body.try_next().await? {
                came += piece.len();
            }
            Ok::<(), StoreError>(())
        };
        match read.await {
            // All of it was on its way already: of the old version, as a whole.
            Ok(()) => assert_eq!(came, 8 << 20, "{scheme}"),
            Err(error) => assert!(matches!(error, StoreError::Stale { .. }), "{scheme}: {error}"),
        }
        let again = again.take();
        assert!(matches!(again, Some(StoreError::Stale { .. })), "{scheme}: {again:?}");
        let gone = source.get(b"p", &old, 0..1).await.err();
        assert!(matches!(gone, Some(StoreError::NotFound { .. })), "{scheme}: {gone:?}");
    }
}

#[tokio::test]
async fn what_is_wrong_is_said_with_what_to_do() {
    for store in stores().await {
        store.put("o", 1);
        let ours = || store.parameters();
        let keys =
            |id: &'static str, secret: &'static str| [("accessKeyId", id), ("secretAccessKey", secret)];
        let session = [("accessKeyId", "session"), ("secretAccessKey", SECRET_KEY), ("sessionToken", "old")];
        let good = [("accessKeyId", "session"), ("secretAccessKey", SECRET_KEY), ("sessionToken", "good")];
        store.check(BUCKET, ours(), &good).await.unwrap();
        let nowhere = Parameters { endpoint: Some("http://127.0.0.1:1".parse().unwrap()), ..ours() };
        let unresolved = Parameters { endpoint: Some("https://nowhere.invalid".parse().unwrap()), ..ours() };
        for (what, said, words) in [
            (
                "wrong secret",
                store.check(BUCKET, ours(), &keys(ACCESS_KEY, "wrong")).await,
                "check secretAccessKey",
            ),
            (
                "unknown key",
                store.check(BUCKET, ours(), &keys("unknown", SECRET_KEY)).await,
                "check accessKeyId",
            ),
            ("old token", store.check(BUCKET, ours(), &session).await, "renew the secret"),
            (
                "no right to read",
                store.check(BUCKET, ours(), &keys("lists", SECRET_KEY)).await,
                "can be listed",
            ),
            (
                "no bucket",
                store.check("nothing", ours(), &keys(ACCESS_KEY, SECRET_KEY)).await,
                "check 'source'",
            ),
            ("anonymous", store.check(BUCKET, ours(), &[]).await, "check the secret"),
            (
                "nobody listens",
                store.check(BUCKET, nowhere, &keys(ACCESS_KEY, SECRET_KEY)).await,
                "check 'endpoint'",
            ),
            (
                "no such host",
                store.check(BUCKET, unresolved, &keys(ACCESS_KEY, SECRET_KEY)).await,
                "check 'endpoint'",
            ),
        ] {
            let error = said.expect_err(what).to_string();
            assert!(error.contains(words), "{}, {what}: {error}", store.scheme);
            assert!(
                !error.contains(SECRET_KEY) && !error.contains(ACCESS_KEY),
                "{}, {what}: {error}",
                store.scheme
            );
        }
    }
}

#[tokio::test]
async fn who_says_so_pays_and_nobody_else() {
    for store in stores_where(|config| config.requester_pays = true).await {
        let scheme = store.scheme;
        let seen = store.put("d/o", 100);
        let keys = [("accessKeyId", ACCESS_KEY), ("secretAccessKey", SECRET_KEY)];
        let refused = store.check(BUCKET, store.parameters(), &keys).await;
        assert!(matches!(refused, Err(StoreError::Denied { .. })), "{scheme}: {refused:?}");
        let parameters = Parameters { requester_pays: true, ..store.parameters() };
        let source = store.open(BUCKET, parameters, &keys);
        source.check(Duration::from_secs(3)).await.unwrap();
        assert_eq!(listed(&*source, "d").await.len(), 1, "{scheme}");
        assert!(source.head(b"d/o").await.unwrap().is_some(), "{scheme}");
        assert_eq!(read(&*source, b"d/o", &seen, 0..100).await.unwrap().len(), 100, "{scheme}");
    }
}

#[tokio::test]
async fn a_store_behind_an_authority_of_its_own_is_trusted_where_the_secret_has_it() {
    let (ours, other) = (Authority::create().unwrap(), Authority::create().unwrap());
    for store in stores().await {
        let scheme = store.scheme;
        store.put("o", 1);
        let front = Front::start(&ours, &store.server.address().to_string()).unwrap();
        let endpoint = Some(format!("https://{}", front.address).parse().unwrap());
        let parameters = || Parameters { endpoint: endpoint.clone(), ..store.parameters() };
        let keys = [("accessKeyId", ACCESS_KEY), ("secretAccessKey", SECRET_KEY)];
        let with =
            |pem: &str| [keys[0], keys[1], ("caBundle", pem)].map(|(k, v)| (k.to_owned(), v.to_owned()));
        let check = async |secrets: Vec<(String, String)>| {
            let secrets: Vec<_> = secrets.iter().map(|(k, v)| (k.as_str(), v.as_str())).collect();
            store.check(BUCKET, parameters(), &secrets).await
        };
        check(with(&ours.pem).to_vec()).await.unwrap();
        let bundle = format!("{}{}", other.pem, ours.pem);
        check(with(&bundle).to_vec()).await.unwrap();
        for secrets in [with(&other.pem).to_vec(), with(&other.pem)[..2].to_vec()] {
            let error = check(secrets).await.unwrap_err().to_string();
            assert!(error.contains("caBundle"), "{scheme}: {error}");
        }
        // What only looks like one.
        let broken = "-----BEGIN CERTIFICATE-----\nnothing\n-----END CERTIFICATE-----\n";
        let error = check(with(broken).to_vec()).await.unwrap_err().to_string();
        assert!(error.contains("caBundle in the secret"), "{scheme}: {error}");
    }
}

#[tokio::test]
async fn another_region_is_said() {
    for store in stores().await.into_iter().filter(|store| store.scheme == "oss") {
        store.put("o", 1);
        let parameters = Parameters { region: Some("cn-other".into()), ..store.parameters() };
        let keys = [("accessKeyId", ACCESS_KEY), ("secretAccessKey", SECRET_KEY)];
        let error = store.check(BUCKET, parameters, &keys).await.unwrap_err().to_string();
        assert!(error.contains("set 'region'"), "{error}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_store_that_fails_in_every_way_still_gives_the_right_bytes() {
    for store in stores().await {
        let scheme = store.scheme;
        for k in 0..100 {
            store.put(&format!("d/{k}"), 200_000);
        }
        let kinds = [
            Fault::Status { code: 503, retry_after_s: None },
            Fault::Reset,
            Fault::ResetBody,
            Fault::Truncate,
            Fault::StallBody { ms: None },
        ];
        let rules = kinds.map(|kind| Rule::with_probability(kind, 0.03)).to_vec();
        store.server.faults().set(Script { seed: 7, rules });
        let source = store.source();
        for (name, kind) in listed(&*source, "d").await {
            let Kind::File { size, version } = kind else { panic!("{scheme}: a directory") };
            let path = format!("d/{}", String::from_utf8(name).unwrap());
            let bytes = read(&*source, path.as_bytes(), &version, 0..size).await.unwrap();
            assert_eq!(bytes.len() as u64, size, "{scheme}: {path}");
            assert_eq!(content::first_wrong_byte(content::id(&path), 0, &bytes), None, "{scheme}: {path}");
        }
        assert!(store.server.faults().hits() > 5, "{scheme}: {} faults", store.server.faults().hits());
    }
}
