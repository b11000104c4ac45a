//! What holds for every store, whatever it speaks: each claim over each store.

use crate::common::{BUCKET, Log, ODD_KEYS, listed, named, quick, read};
use futures::TryStreamExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;
use store::{
    Access, EgressConfig, ExpiryObserver, Kind, Limits, LimitsConfig, NoObserver, RetryCause, Source, Step,
    StoreError, TlsVersion,
};
use testkit::content;
use testkit::faults::{Fault, Rule, Script};
use testkit::proxy::Proxy;
use testkit::s3::{
    ACCESS_KEY, ACCOUNT_KEY, Azure, Config, Index, Key, Memory, OTHER_SERVICE_ACCOUNT_KEY, Oss, Protocol,
    Rights, SECRET_KEY, SERVICE_ACCOUNT_KEY, Server, Web, generation, key_file, sas_token, time_and_length,
};
use testkit::tls::{Authority, Front, Issued};
use volume::{Credentials, Parameters, SourceUrl, VolumeId, VolumeSpec};

struct Store {
    /// Of a web server: in which form its directories are.
    scheme: &'static str,
    server: Server,
}

const REGION: &str = "cn-testkit";
const ACCOUNT: &str = "testkit";

/// With what somebody asks.
#[derive(Clone, Copy, Debug)]
enum Who {
    Owner,
    /// Whose rights end sometime.
    Guest,
    /// The same, and it has ended.
    Late,
    /// Who may list and not read.
    Lister,
    /// Whose secret is that of somebody else.
    Forger,
    Stranger,
    Anonymous,
}

/// One server for each that the testkit can be.
async fn stores() -> Vec<Store> {
    stores_where(|_| {}).await
}

async fn stores_where(change: impl Fn(&mut Config)) -> Vec<Store> {
    let (mut stores, listing) = (Vec::new(), Rights::ListOnly);
    let keys = || {
        vec![
            Key::new(ACCESS_KEY, SECRET_KEY, Rights::All),
            Key::new("guest-key", SECRET_KEY, Rights::All).with_token("good"),
            Key::new("lists", SECRET_KEY, listing),
        ]
    };
    let accounts = || [(ACCESS_KEY, Rights::All), ("lists", listing)];
    let accounts = accounts().map(|(id, rights)| Key::new(id, SERVICE_ACCOUNT_KEY, rights));
    let shared = [
        Key::new(ACCOUNT, ACCOUNT_KEY, Rights::All),
        Key::new("sas", "", Rights::All).with_token("go/od+sig="),
        Key::new("lists", "", listing).with_token("lists"),
    ];
    for (scheme, protocol, keys) in [
        ("s3", Protocol::S3, keys()),
        ("oss", Protocol::Oss(Oss { region: REGION.into() }), keys()),
        ("gs", Protocol::Gcs, accounts.to_vec()),
        ("az", Protocol::Azure(Azure { account: ACCOUNT.into() }), shared.to_vec()),
        ("pages", Protocol::Web(Web { index: Index::Html }), keys()),
        ("json", Protocol::Web(Web { index: Index::Json }), keys()),
        ("dav", Protocol::Web(Web { index: Index::Dav }), keys()),
    ] {
        let mut config = Config { protocol, keys, ..Config::default() };
        change(&mut config);
        let server = Server::start(config.bucket(BUCKET, Memory::default())).await.unwrap();
        stores.push(Store { scheme, server });
    }
    stores
}

type Secrets = Vec<(&'static str, String)>;

impl Store {
    fn parameters(&self) -> Parameters {
        Parameters {
            endpoint: Some(self.server.endpoint().parse().unwrap()),
            region: Some(REGION.into()),
            storage_account: Some(ACCOUNT.into()),
            allow_http: true,
            store_timeout: Duration::from_secs(60),
            ..Parameters::default()
        }
    }

    /// None: this store knows no such.
    fn secrets(&self, who: Who) -> Option<Secrets> {
        let keys = |id: &str, secret: &str| {
            vec![("accessKeyId", id.to_owned()), ("secretAccessKey", secret.to_owned())]
        };
        let session = |token: &str| {
            let token = [("sessionToken", token.to_owned())];
            keys("guest-key", SECRET_KEY).into_iter().chain(token).collect()
        };
        let file = |id: &str, key: &str| vec![("serviceAccountKey", key_file(id, key))];
        let account =
            |name: &str, key: &str| vec![("accountName", name.to_owned()), ("accountKey", key.to_owned())];
        let sas = |signature: &str, until: &str| vec![("sasToken", sas_token(signature, until))];
        Some(match (self.scheme, who) {
            (_, Who::Anonymous) => Vec::new(),
            ("s3" | "oss", Who::Owner) => keys(ACCESS_KEY, SECRET_KEY),
            ("s3" | "oss", Who::Guest) => session("good"),
            ("s3" | "oss", Who::Late) => session("0ld"),
            ("s3" | "oss", Who::Lister) => keys("lists", SECRET_KEY),
            ("s3" | "oss", Who::Forger) => keys(ACCESS_KEY, "hunter2"),
            ("s3" | "oss", Who::Stranger) => keys("unknown", SECRET_KEY),
            ("gs", Who::Owner) => file(ACCESS_KEY, SERVICE_ACCOUNT_KEY),
            ("gs", Who::Guest | Who::Late) => return None,
            ("gs", Who::Lister) => file("lists", SERVICE_ACCOUNT_KEY),
            ("gs", Who::Forger) => file(ACCESS_KEY, OTHER_SERVICE_ACCOUNT_KEY),
            ("gs", Who::Stranger) => file("unknown", SERVICE_ACCOUNT_KEY),
            ("az", Who::Owner) => account(ACCOUNT, ACCOUNT_KEY),
            ("az", Who::Guest) => sas("go/od+sig=", "2099-01-01T00:00:00Z"),
            ("az", Who::Late) => sas("go/od+sig=", "2001-01-01T00:00:00Z"),
            ("az", Who::Lister) => sas("lists", "2099-01-01T00:00:00Z"),
            ("az", Who::Forger) => account(ACCOUNT, "d3Jvbmc="),
            ("az", Who::Stranger) => account("stranger", ACCOUNT_KEY),
            ("pages" | "json" | "dav", who) => {
                let login = |user: &str, password: &str| {
                    vec![("username", user.to_owned()), ("password", password.to_owned())]
                };
                match who {
                    Who::Owner => login(ACCESS_KEY, SECRET_KEY),
                    Who::Lister => login("lists", SECRET_KEY),
                    Who::Forger => login(ACCESS_KEY, "hunter2"),
                    Who::Stranger => login("unknown", SECRET_KEY),
                    Who::Guest => vec![("bearerToken", "good".to_owned())],
                    Who::Late => vec![("bearerToken", "0ld".to_owned())],
                    Who::Anonymous => Vec::new(),
                }
            }
            (scheme, who) => panic!("{who:?} of {scheme}"),
        })
    }

    fn spec(&self, bucket: &str, mut parameters: Parameters) -> VolumeSpec {
        let source = match self.scheme {
            "pages" | "json" | "dav" => format!("{}{bucket}", parameters.endpoint.take().unwrap()),
            scheme => format!("{scheme}://{bucket}"),
        };
        let source = SourceUrl::parse(&source).unwrap();
        VolumeSpec { id: VolumeId::parse("v").unwrap(), source, parameters }
    }

    fn open(&self, bucket: &str, parameters: Parameters, secrets: &Secrets) -> Arc<dyn Source> {
        self.try_open(bucket, parameters, secrets).unwrap()
    }

    fn try_open(
        &self,
        bucket: &str,
        parameters: Parameters,
        secrets: &Secrets,
    ) -> Result<Arc<dyn Source>, StoreError> {
        self.open_within(quick(), bucket, parameters, secrets)
    }

    fn open_within(
        &self,
        limits: LimitsConfig,
        bucket: &str,
        parameters: Parameters,
        secrets: &Secrets,
    ) -> Result<Arc<dyn Source>, StoreError> {
        let spec = self.spec(bucket, parameters);
        let credentials = Credentials::from_secrets(secrets.iter().map(|(k, v)| (*k, v.as_str()))).unwrap();
        let access = Access::fixed(&spec, credentials);
        store::open(&spec, access, Arc::new(Limits::new(limits)), Arc::new(NoObserver))
    }

    fn owner(&self) -> Secrets {
        self.secrets(Who::Owner).unwrap()
    }

    fn source(&self) -> Arc<dyn Source> {
        self.open(BUCKET, self.parameters(), &self.owner())
    }

    async fn check(&self, bucket: &str, parameters: Parameters, secrets: &Secrets) -> Result<(), StoreError> {
        self.try_open(bucket, parameters, secrets)?.check(Duration::from_secs(3)).await
    }

    fn put(&self, key: &str, size: u64) -> store::Version {
        let meta = self.server.put(BUCKET, key, content::bytes(content::id(key), 0..size)).unwrap();
        store::Version(match self.scheme {
            "gs" => generation(&meta),
            "json" => time_and_length(&meta),
            "pages" | "dav" => format!("\"{}\"", meta.etag),
            _ => meta.etag,
        })
    }
}

#[tokio::test]
async fn odd_keys_are_listed_found_and_read_and_hide_nothing() {
    for store in stores().await {
        for key in ODD_KEYS {
            store.put(&format!("dir é+/{key}"), 500);
        }
        let source = store.source();
        let found = listed(&*source, "dir é+").await;
        assert_eq!(found.len(), ODD_KEYS.len(), "{}", store.scheme);
        for key in ODD_KEYS {
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
async fn pages_of_any_size_are_the_whole_directory() {
    for max in [1, 7, 1000] {
        for store in stores_where(|config| config.page_max = max).await {
            for k in 0..23 {
                store.put(&format!("d/{k:05}"), 1);
                store.put(&format!("d/{k:05}.d/x"), 1);
            }
            let source = store.source();
            let found = listed(&*source, "d").await;
            let directories = found.values().filter(|kind| **kind == Kind::Directory).count();
            assert_eq!((found.len(), directories), (46, 23), "{}, {max}", store.scheme);
            let entry = source.head(b"d/00007.d").await.unwrap().unwrap();
            assert_eq!(entry.kind, Kind::Directory, "{}, {max}", store.scheme);
        }
    }
}

#[tokio::test]
async fn a_clock_that_is_an_hour_behind_the_stores_is_said() {
    let hour = Duration::from_secs(3600);
    for store in stores_where(|config| config.clock_ahead = hour + Duration::from_secs(60)).await {
        let scheme = store.scheme;
        store.put("o", 1);
        let source = store.source();
        // Web servers do not ask what time it is, and `doctor` does.
        if !matches!(scheme, "pages" | "json" | "dav") {
            let error = source.check(Duration::from_secs(3)).await.unwrap_err().to_string();
            assert!(error.contains("clock"), "{scheme}: {error}");
        }
        let examined = source.examine(Duration::from_secs(3)).await;
        let clock = examined.iter().find(|examined| examined.step == Step::Clock).unwrap();
        let text = clock.result.as_ref().unwrap_err();
        assert!(text.contains("behind the store's"), "{scheme}: {text}");
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
        let (scheme, ours) = (store.scheme, || store.parameters());
        if let Some(guest) = store.secrets(Who::Guest) {
            store.check(BUCKET, ours(), &guest).await.unwrap();
        }
        let nowhere = Parameters { endpoint: Some("http://127.0.0.1:1".parse().unwrap()), ..ours() };
        let unresolved = Parameters { endpoint: Some("https://nowhere.invalid".parse().unwrap()), ..ours() };
        let (forged, strange, nobody) = match scheme {
            "gs" => ("check serviceAccountKey", "check serviceAccountKey", "a secret with serviceAccountKey"),
            "az" => ("check accountKey", "another account", "a secret with accountKey"),
            "pages" | "json" | "dav" => ("check those", "check those", "put username and password"),
            _ => ("check secretAccessKey", "check accessKeyId", "check the secret"),
        };
        let place =
            if matches!(scheme, "pages" | "json" | "dav") { "check 'source'" } else { "check 'endpoint'" };
        for (what, bucket, parameters, who, words) in [
            ("wrong secret", BUCKET, ours(), Who::Forger, forged),
            ("unknown key", BUCKET, ours(), Who::Stranger, strange),
            ("old token", BUCKET, ours(), Who::Late, "renew the secret"),
            ("no right to read", BUCKET, ours(), Who::Lister, "can be listed"),
            ("no bucket", "nothing", ours(), Who::Owner, "check 'source'"),
            ("anonymous", BUCKET, ours(), Who::Anonymous, nobody),
            ("nobody listens", BUCKET, nowhere, Who::Owner, place),
            ("no such host", BUCKET, unresolved, Who::Owner, place),
        ] {
            let Some(secrets) = store.secrets(who) else { continue };
            let error = store.check(bucket, parameters, &secrets).await.expect_err(what).to_string();
            assert!(error.contains(words), "{scheme}, {what}: {error}");
            let known = |(name, value): &(&str, String)| {
                !matches!(*name, "accountName" | "username") && error.contains(value.as_str())
            };
            assert!(!secrets.iter().any(known), "{scheme}, {what}: {error}");
        }
    }
}

/// Says how often somebody has begun to wait for a renewed secret.
#[derive(Default)]
struct Waiting(Arc<AtomicU32>);

impl ExpiryObserver for Waiting {
    fn expired(&self, _: &StoreError) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
    fn works_again(&self) {}
}

#[tokio::test(flavor = "multi_thread")]
async fn questions_wait_for_the_secret_that_follows_one_that_has_ended() {
    for store in stores().await {
        let credentials = |who| {
            let secrets = store.secrets(who)?;
            Some(Credentials::from_secrets(secrets.iter().map(|(k, v)| (*k, v.as_str()))).unwrap())
        };
        let (Some(late), Some(guest)) = (credentials(Who::Late), credentials(Who::Guest)) else { continue };
        let seen = store.put("o", 100);
        let spec = store.spec(BUCKET, store.parameters());
        let waiting = Waiting::default();
        let count = waiting.0.clone();
        let access = Access::renewable(late, Duration::from_secs(60), Box::new(waiting));
        let source =
            store::open(&spec, access.clone(), Arc::new(Limits::new(quick())), Arc::new(NoObserver)).unwrap();
        let renewing = async {
            while count.load(Ordering::SeqCst) == 0 {
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
            access.replace(guest);
        };
        let all = async {
            tokio::join!(source.list(b"", None), source.head(b"o"), read(&*source, b"o", &seen, 0..100))
        };
        let both = async { tokio::join!(all, renewing) };
        let ((listed, found, bytes), ()) =
            tokio::time::timeout(Duration::from_secs(60), both).await.expect(store.scheme);
        assert_eq!(listed.unwrap().entries.len(), 1, "{}", store.scheme);
        assert!(found.unwrap().is_some(), "{}", store.scheme);
        assert_eq!(bytes.unwrap(), content::bytes(content::id("o"), 0..100), "{}", store.scheme);
    }
}

#[tokio::test]
async fn a_secret_of_another_store_is_refused_by_name() {
    let stores = stores().await;
    for store in &stores {
        for other in stores.iter().filter(|other| other.scheme != store.scheme) {
            // S3's and OSS's are alike, and Azure takes what JuiceFS calls the account and its key.
            let alike = |scheme| matches!(scheme, "s3" | "oss");
            let web = |scheme| matches!(scheme, "pages" | "json" | "dav");
            if web(other.scheme) && web(store.scheme) {
                continue;
            }
            if alike(other.scheme) && (alike(store.scheme) || store.scheme == "az") {
                continue;
            }
            let error = store.try_open(BUCKET, store.parameters(), &other.owner()).err();
            let error = error.unwrap_or_else(|| panic!("{} takes {}'s", store.scheme, other.scheme));
            assert!(error.to_string().contains(other.owner()[other.owner().len() - 1].0), "{error}");
        }
    }
    let azure = stores.iter().find(|store| store.scheme == "az").unwrap();
    azure.put("o", 1);
    let keys = vec![("access-key", ACCOUNT.to_owned()), ("secret-key", ACCOUNT_KEY.to_owned())];
    azure.check(BUCKET, azure.parameters(), &keys).await.unwrap();
}

#[tokio::test]
async fn who_says_so_pays_and_nobody_else() {
    // Azure's readers never pay, nor do a web server's.
    let stores = stores_where(|config| config.requester_pays = true).await;
    for store in stores.into_iter().filter(|store| matches!(store.scheme, "s3" | "oss" | "gs")) {
        let scheme = store.scheme;
        let seen = store.put("d/o", 100);
        let keys = store.owner();
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
        let with = |pem: &str| [store.owner(), vec![("caBundle", pem.to_owned())]].concat();
        let check = async |secrets: Secrets| store.check(BUCKET, parameters(), &secrets).await;
        check(with(&ours.pem)).await.unwrap();
        let bundle = format!("{}{}", other.pem, ours.pem);
        check(with(&bundle)).await.unwrap();
        for secrets in [with(&other.pem), store.owner()] {
            let error = check(secrets).await.unwrap_err().to_string();
            assert!(error.contains("caBundle"), "{scheme}: {error}");
        }
        // What only looks like one.
        let broken = "-----BEGIN CERTIFICATE-----\nnothing\n-----END CERTIFICATE-----\n";
        let error = check(with(broken)).await.unwrap_err().to_string();
        assert!(error.contains("caBundle in the secret"), "{scheme}: {error}");
    }
}

#[tokio::test]
async fn a_store_that_asks_for_a_certificate_gets_the_one_in_the_secret() {
    let (ours, clients) = (Authority::create().unwrap(), Authority::create().unwrap());
    let (good, other) = (clients.issue("reader").unwrap(), ours.issue("stranger").unwrap());
    for store in stores().await {
        let scheme = store.scheme;
        let seen = store.put("o", 100);
        let front = Front::demanding(&ours, &clients, &store.server.address().to_string()).unwrap();
        let endpoint = Some(format!("https://{}", front.address).parse().unwrap());
        let parameters = || Parameters { endpoint: endpoint.clone(), ..store.parameters() };
        let with = |of: &Issued| {
            let pair = [("clientCertificate", of.certificate.clone()), ("clientKey", of.key.clone())];
            [store.owner(), vec![("caBundle", ours.pem.clone())], pair.to_vec()].concat()
        };
        let source = store.open(BUCKET, parameters(), &with(&good));
        source.check(Duration::from_secs(3)).await.unwrap();
        assert_eq!(read(&*source, b"o", &seen, 0..100).await.unwrap().len(), 100, "{scheme}");
        let none = [store.owner(), vec![("caBundle", ours.pem.clone())]].concat();
        for (what, secrets, words) in [
            ("none", none, "wants a client certificate: put one"),
            ("one of another authority", with(&other), "refuses clientCertificate"),
        ] {
            let error = store.check(BUCKET, parameters(), &secrets).await.unwrap_err();
            assert!(matches!(error, StoreError::Denied { .. }), "{scheme}, {what}: {error}");
            let text = error.to_string();
            assert!(text.contains(words) && !text.contains("BEGIN"), "{scheme}, {what}: {text}");
        }
        let mixed = Issued { certificate: good.certificate.clone(), key: other.key.clone() };
        let error = store.try_open(BUCKET, parameters(), &with(&mixed)).err().unwrap().to_string();
        assert!(error.contains("the key of another certificate"), "{scheme}: {error}");
        // Who asks for none is not shown any, and nobody asks over plain http.
        let front = Front::start(&ours, &store.server.address().to_string()).unwrap();
        let endpoint = Some(format!("https://{}", front.address).parse().unwrap());
        let unasked = Parameters { endpoint, ..store.parameters() };
        store.check(BUCKET, unasked, &with(&other)).await.unwrap();
        let error = store.try_open(BUCKET, store.parameters(), &with(&good)).err().unwrap().to_string();
        assert!(error.contains("use an https endpoint"), "{scheme}: {error}");
    }
}

#[tokio::test]
async fn a_store_of_an_older_tls_than_the_node_wants_is_not_asked() {
    let authority = Authority::create().unwrap();
    for store in stores().await {
        let scheme = store.scheme;
        store.put("o", 1);
        let old = Front::old(&authority, &store.server.address().to_string()).unwrap();
        let new = Front::start(&authority, &store.server.address().to_string()).unwrap();
        let check = async |front: &Front, tls_min| {
            let endpoint = Some(format!("https://{}", front.address).parse().unwrap());
            let parameters = Parameters { endpoint, ..store.parameters() };
            let secrets = [store.owner(), vec![("caBundle", authority.pem.clone())]].concat();
            let limits = LimitsConfig { tls_min, ..quick() };
            let source = store.open_within(limits, BUCKET, parameters, &secrets).unwrap();
            source.check(Duration::from_secs(3)).await
        };
        for front in [&old, &new] {
            check(front, TlsVersion::default()).await.unwrap();
        }
        check(&new, TlsVersion::Tls13).await.unwrap();
        let error = check(&old, TlsVersion::Tls13).await.unwrap_err();
        assert!(matches!(error, StoreError::Invalid { .. }), "{scheme}: {error:?}");
        let text = error.to_string();
        assert!(
            text.contains("speaks no TLS 1.3 or later") && text.contains("store.tls_min"),
            "{scheme}: {text}"
        );
    }
}

fn proxied(proxy: &Proxy, except: &[&str]) -> LimitsConfig {
    let url = format!("http://{}", proxy.address).try_into().unwrap();
    let except = except.iter().map(|text| (*text).to_owned().try_into().unwrap()).collect();
    let egress = EgressConfig { proxy: Some(store::Proxy { url, except }), ..named() };
    LimitsConfig { egress, ..quick() }
}

#[tokio::test]
async fn stores_are_asked_through_the_proxy_that_the_operator_names() {
    let authority = Authority::create().unwrap();
    for store in stores().await {
        let scheme = store.scheme;
        let seen = store.put("o", 100_000);
        let front = Front::start(&authority, &store.server.address().to_string()).unwrap();
        let (plain, secure) = (store.server.address(), front.address);
        let secrets = [store.owner(), vec![("caBundle", authority.pem.clone())]].concat();
        let at =
            |endpoint: &str| Parameters { endpoint: Some(endpoint.parse().unwrap()), ..store.parameters() };
        let method = if matches!(scheme, "pages" | "json" | "dav") { "PROPFIND" } else { "GET" };
        for (endpoint, to, first) in [
            (format!("https://{secure}"), secure, format!("CONNECT {secure} HTTP/1.1")),
            (format!("http://{plain}"), plain, format!("{method} http://{plain}/")),
        ] {
            let proxy = Proxy::start(Some(to)).await.unwrap();
            let source = store.open_within(proxied(&proxy, &[]), BUCKET, at(&endpoint), &secrets).unwrap();
            source.check(Duration::from_secs(3)).await.unwrap();
            assert_eq!(read(&*source, b"o", &seen, 0..100_000).await.unwrap().len(), 100_000, "{scheme}");
            let asked = proxy.asked();
            assert!(asked.iter().any(|line| line.starts_with(&first)), "{scheme}: {asked:?}");
            let proxy = Proxy::start(None).await.unwrap();
            let limits = proxied(&proxy, &["127.0.0.0/8"]);
            let source = store.open_within(limits, BUCKET, at(&endpoint), &secrets).unwrap();
            source.check(Duration::from_secs(3)).await.unwrap();
            assert_eq!(proxy.asked(), [""; 0], "{scheme}: it is asked for what goes without it");
        }
        let proxy = Proxy::start(None).await.unwrap();
        let source = store
            .open_within(proxied(&proxy, &[]), BUCKET, at(&format!("https://{secure}")), &secrets)
            .unwrap();
        let error = source.check(Duration::from_secs(3)).await.unwrap_err().to_string();
        assert!(error.contains("check store.proxy"), "{scheme}: {error}");
        // Names are the proxy's to resolve; OSS and Azure would have them with the bucket or without the account in it.
        if matches!(scheme, "s3" | "gs") {
            let proxy = Proxy::start(Some(secure)).await.unwrap();
            let endpoint = format!("https://{}", testkit::tls::NAME);
            let source = store.open_within(proxied(&proxy, &[]), BUCKET, at(&endpoint), &secrets).unwrap();
            source.check(Duration::from_secs(3)).await.unwrap();
            assert_eq!(proxy.asked(), [format!("CONNECT {}:443 HTTP/1.1", testkit::tls::NAME)], "{scheme}");
        }
        let proxy = Proxy::start(Some(secure)).await.unwrap();
        for endpoint in
            ["https://169.254.169.254", "https://localhost:9000", "https://metadata.google.internal"]
        {
            let error = store.open_within(proxied(&proxy, &[]), BUCKET, at(endpoint), &secrets).err();
            let error = error.unwrap_or_else(|| panic!("{scheme}: {endpoint} is asked")).to_string();
            assert!(error.contains("allow.endpoints"), "{scheme}: {error}");
        }
    }
}

/// The test runs itself again, with an environment of its own.
#[tokio::test]
async fn no_environment_variable_reroutes_requests() {
    const AGAIN: &str = "MILLPOND_TEST_WITH_PROXY";
    if std::env::var_os(AGAIN).is_some() {
        for store in stores().await {
            store.put("o", 1);
            store.check(BUCKET, store.parameters(), &store.owner()).await.expect(store.scheme);
        }
        return;
    }
    let proxy = Proxy::start(None).await.unwrap();
    let mut again = std::process::Command::new(std::env::current_exe().unwrap());
    again.args(["--exact", "contract::no_environment_variable_reroutes_requests"]).env(AGAIN, "1");
    again.env_remove("NO_PROXY").env_remove("no_proxy");
    for name in ["HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"] {
        again.env(name, format!("http://{}", proxy.address));
    }
    let output = tokio::task::spawn_blocking(move || again.output()).await.unwrap().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains("1 passed"), "{text}");
    assert_eq!(proxy.asked(), [""; 0]);
}

#[tokio::test]
async fn objects_that_are_encrypted_with_a_customers_key_are_read_with_it_alone() {
    const KEY: &str = "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=";
    let other = KEY.replace("AAEC", "BBEC");
    let sealed = stores_where(|config| config.customer_key = Some(KEY.into())).await;
    for (store, plain) in sealed.into_iter().zip(stores().await) {
        let scheme = store.scheme;
        let seen = (store.put("d/o", 100), plain.put("d/o", 100));
        let with = |key: &str| [store.owner(), vec![("customerKey", key.to_owned())]].concat();
        if !matches!(scheme, "s3" | "gs" | "az") {
            let error = store.try_open(BUCKET, store.parameters(), &with(KEY)).err().unwrap().to_string();
            assert!(error.contains("take customerKey out of the secret"), "{error}");
            continue;
        }
        let source = store.open(BUCKET, store.parameters(), &with(KEY));
        source.check(Duration::from_secs(3)).await.unwrap();
        assert_eq!(listed(&*source, "d").await.len(), 1, "{scheme}");
        assert!(source.head(b"d/o").await.unwrap().is_some(), "{scheme}");
        let bytes = read(&*source, b"d/o", &seen.0, 0..100).await.unwrap();
        assert_eq!(bytes, content::bytes(content::id("d/o"), 0..100), "{scheme}");
        for (what, at, seen, secrets, words) in [
            ("none", &store, &seen.0, store.owner(), "put that key into the secret as customerKey"),
            ("another", &store, &seen.0, with(&other), "is not the key that the object is encrypted with"),
            ("one for nothing", &plain, &seen.1, with(KEY), "whose secret has no customerKey"),
        ] {
            let source = at.open(BUCKET, at.parameters(), &secrets);
            assert_eq!(listed(&*source, "d").await.len(), 1, "{scheme}, {what}: names need no key");
            let error = read(&*source, b"d/o", seen, 0..100).await.unwrap_err().to_string();
            assert!(error.contains(words) && !error.contains(KEY), "{scheme}, {what}: {error}");
            // What Google tells of an object it tells without.
            if scheme != "gs" {
                let error = source.head(b"d/o").await.unwrap_err().to_string();
                assert!(error.contains(words), "{scheme}, {what}: {error}");
                let error = source.check(Duration::from_secs(3)).await.unwrap_err().to_string();
                assert!(error.contains(words), "{scheme}, {what}: {error}");
            }
        }
    }
}

#[tokio::test]
async fn a_gateway_sees_the_headers_that_the_volume_adds_on_every_request() {
    for store in stores_where(|config| config.gate = Some(("x-tenant", "team a"))).await {
        let scheme = store.scheme;
        let seen = store.put("d/o", 100);
        let refused = store.check(BUCKET, store.parameters(), &store.owner()).await;
        assert!(matches!(refused, Err(StoreError::Denied { .. })), "{scheme}: {refused:?}");
        let extra_headers = [("x-tenant".to_owned(), "team a".to_owned())].into();
        let parameters = Parameters { extra_headers, ..store.parameters() };
        let source = store.open(BUCKET, parameters, &store.owner());
        source.check(Duration::from_secs(3)).await.unwrap();
        assert_eq!(listed(&*source, "d").await.len(), 1, "{scheme}");
        assert!(source.head(b"d/o").await.unwrap().is_some(), "{scheme}");
        assert_eq!(read(&*source, b"d/o", &seen, 0..100).await.unwrap().len(), 100, "{scheme}");
    }
}

#[tokio::test]
async fn another_region_is_said() {
    for store in stores().await.into_iter().filter(|store| store.scheme == "oss") {
        store.put("o", 1);
        let parameters = Parameters { region: Some("cn-other".into()), ..store.parameters() };
        let error = store.check(BUCKET, parameters, &store.owner()).await.unwrap_err().to_string();
        assert!(error.contains("set 'region'"), "{error}");
    }
}

#[tokio::test]
async fn a_body_that_was_changed_on_its_way_is_fetched_again() {
    const SIZE: u64 = 200_000;
    // Web servers tell nothing.
    let stores = stores_where(|config| config.checksums = true).await;
    for store in stores.into_iter().filter(|store| matches!(store.scheme, "s3" | "oss" | "gs" | "az")) {
        let scheme = store.scheme;
        let seen = store.put("o", SIZE);
        let log = Arc::new(Log::default());
        let spec = store.spec(BUCKET, store.parameters());
        let secrets = store.owner();
        let credentials = Credentials::from_secrets(secrets.iter().map(|(k, v)| (*k, v.as_str()))).unwrap();
        let access = Access::fixed(&spec, credentials);
        let source = store::open(&spec, access, Arc::new(Limits::new(quick())), log.clone()).unwrap();
        let flipped = |times: u64| {
            let rule = Rule::always(Fault::FlippedBit).op("GetObject").times(times);
            store.server.faults().set(Script { seed: times, rules: vec![rule] });
        };
        flipped(2);
        let whole = content::bytes(content::id("o"), 0..SIZE);
        assert!(read(&*source, b"o", &seen, 0..SIZE).await.unwrap() == whole, "{scheme}: other bytes");
        assert_eq!(*log.retries.lock().unwrap(), [("get", RetryCause::Corrupted); 2], "{scheme}");
        // Whoever sends it so each time: nothing of it is given out.
        flipped(u64::MAX);
        let mut body = source.get(b"o", &seen, 0..SIZE).await.unwrap();
        let error = body.try_next().await.unwrap_err();
        assert!(
            matches!(&error, StoreError::Malformed { why, .. } if why.contains("checksum")),
            "{scheme}: {error}"
        );
        // Broken in the middle and changed afterwards: the sum is of what came in one piece.
        let rules = vec![
            Rule::nth(Fault::ResetBody, &[1]).op("GetObject"),
            Rule::nth(Fault::FlippedBit, &[2]).op("GetObject"),
            Rule::nth(Fault::Truncate, &[3]).op("GetObject"),
        ];
        store.server.faults().set(Script { seed: 3, rules });
        assert!(read(&*source, b"o", &seen, 0..SIZE).await.unwrap() == whole, "{scheme}: other bytes");
        // A part of it: where the store tells the sum of the whole, there is none for it.
        flipped(1);
        let part = read(&*source, b"o", &seen, 10..1000).await.unwrap();
        assert_eq!(part == whole[10..1000], scheme == "az", "{scheme}");
    }
}

#[tokio::test]
async fn what_a_store_tells_of_a_whole_object_is_known_when_its_parts_have_come() {
    use store::Checksum;
    const SIZE: u64 = 5 << 20;
    const SMALL: u64 = 3 << 20;
    let stores = stores_where(|config| config.checksums = true).await;
    for store in stores {
        let scheme = store.scheme;
        let seen = store.put("o", SIZE);
        let source = store.source();
        // Azure has none of more than 4 MiB.
        assert_eq!(source.sums(SIZE).is_some(), matches!(scheme, "s3" | "oss" | "gs"), "{scheme}");
        let Some(algorithm) = source.sums(SMALL) else {
            assert!(matches!(scheme, "pages" | "json" | "dav"), "{scheme}");
            assert_eq!(source.checksum(b"o", &seen).await.unwrap(), None, "{scheme}");
            continue;
        };
        assert_eq!(source.sums(500_000), None, "{scheme}: compared as it comes");
        let whole = content::bytes(content::id("o"), 0..SIZE);
        let right = Checksum { algorithm, value: crc_fast::checksum(algorithm, &whole) };
        let requests = || store.server.stats().requests.values().sum::<u64>();
        // In two parts: who tells it with each part is not asked again.
        for range in [0..SIZE / 2, SIZE / 2..SIZE] {
            read(&*source, b"o", &seen, range).await.unwrap();
        }
        let before = requests();
        let told = source.checksum(b"o", &seen).await.unwrap();
        assert_eq!(told, (scheme != "az").then_some(right), "{scheme}");
        let questions = if scheme == "s3" { 1 } else { 0 };
        assert_eq!(requests() - before, questions, "{scheme}");
        // In one piece: nobody is asked.
        let small = store.put("small", SMALL);
        let whole = content::bytes(content::id("small"), 0..SMALL);
        let right = Checksum { algorithm, value: crc_fast::checksum(algorithm, &whole) };
        read(&*source, b"small", &small, 0..SMALL).await.unwrap();
        let before = requests();
        assert_eq!(source.checksum(b"small", &small).await.unwrap(), Some(right), "{scheme}");
        assert_eq!(requests(), before, "{scheme}");
        // Of another version it tells nothing that could be taken for this one's.
        store.put("o", SIZE + 1);
        match source.checksum(b"o", &seen).await {
            Ok(None) | Err(StoreError::Stale { .. }) => {}
            other => panic!("{scheme}: {other:?}"),
        }
    }
    // A store that tells nothing is asked now and then.
    for store in stores_where(|_| {}).await {
        let source = store.source();
        let mut asked = 0;
        for k in 0..100 {
            let seen = store.put(&format!("o{k}"), SIZE);
            let before = store.server.stats().requests.values().sum::<u64>();
            assert_eq!(source.checksum(format!("o{k}").as_bytes(), &seen).await.unwrap(), None);
            asked += store.server.stats().requests.values().sum::<u64>() - before;
        }
        assert!(asked < 20, "{}: {asked}", store.scheme);
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
