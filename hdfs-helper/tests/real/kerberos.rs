//! HDFS with Kerberos: keytabs, tickets, tokens, clocks.

use crate::common::{Asking, Log, Spawner, file, listed, read};
use crate::content;
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use std::sync::Arc;
use std::time::{Duration, Instant};
use store::{NoObserver, StoreError};
use testkit::hdfs::Hdfs;
use volume::Credentials;

/// An HDFS with its KDC, and a user's krb5.conf for it.
struct Realm {
    cluster: Hdfs,
    name: String,
    kdc: String,
    authority: String,
    krb5_conf: String,
    _place: tempfile::TempDir,
}

impl Realm {
    /// `mode`: kerberos, or kerberos-short, where tickets are good for [`SHORT`].
    fn start(mode: &str) -> Self {
        let place = tempfile::tempdir().unwrap();
        let cluster = Hdfs::start(mode, place.path()).unwrap();
        let told = cluster.told.clone();
        let [name, kdc, port] = &told[..] else { panic!("{told:?}") };
        let krb5_conf = format!(
            "[libdefaults]\n default_realm = {name}\n dns_lookup_kdc = false\n rdns = false\n udp_preference_limit = 1\n\
             [realms]\n {name} = {{\n  kdc = 127.0.0.1:{kdc}\n }}\n[domain_realm]\n localhost = {name}\n"
        );
        let (name, kdc, authority) = (name.clone(), kdc.clone(), format!("localhost:{port}"));
        Self { cluster, name, kdc, authority, krb5_conf, _place: place }
    }

    fn alice(&self) -> String {
        format!("alice@{}", self.name)
    }

    fn file(&self, name: &str) -> Vec<u8> {
        std::fs::read(self.cluster.place().join(name)).unwrap()
    }

    /// `secret`: keytab or ticketCache, and its file.
    fn asking(&self, principal: &str, (secret, file): (&str, &[u8]), krb5_conf: &str) -> Asking {
        let mut asking = Asking::simple(&self.authority, "/d", "nobody");
        asking.settings.insert("dfs.data.transfer.protection".into(), "privacy".into());
        asking.credentials = Credentials::from_secrets([
            ("principal", principal),
            ("krb5.conf", krb5_conf),
            (secret, &BASE64_STANDARD.encode(file)),
        ])
        .unwrap();
        asking.within(Duration::from_secs(40))
    }
}

/// As long as tickets are good in mode kerberos-short.
const SHORT: Duration = Duration::from_secs(20);

/// A keytab with other keys. (Version 2: entries with their size before them; the key and its length end each.)
fn spoiled(keytab: &[u8]) -> Vec<u8> {
    let mut spoiled = keytab.to_vec();
    let mut at = 2;
    while at + 4 <= keytab.len() {
        let size = i32::from_be_bytes(keytab[at..at + 4].try_into().unwrap());
        let end = at + 4 + size.unsigned_abs() as usize;
        // Behind the key there may be a version of four bytes.
        if size > 0 {
            spoiled[end - 8] ^= 1;
        }
        at = end;
    }
    spoiled
}

#[tokio::test(flavor = "multi_thread")]
async fn kerberos_and_privacy_with_a_keytab_and_with_a_wrong_one() {
    let mut realm = Realm::start("kerberos");
    let (alice, keytab) = (realm.alice(), realm.file("user.keytab"));
    let whole = content(10, (3 << 20) + 5);
    realm.cluster.put("/d/f", &whole).unwrap();
    let with = |principal: &str, keytab: &[u8], krb5_conf: &str| {
        realm.asking(principal, ("keytab", keytab), krb5_conf).open(Spawner::new(), Arc::new(NoObserver))
    };
    let source = with(&alice, &keytab, &realm.krb5_conf);
    let begun = Instant::now();
    source.check(Duration::from_secs(30)).await.unwrap();
    println!("kerberos: first contact after {:?}", begun.elapsed());
    let (size, version) = file(&*source, b"f").await;
    let begun = Instant::now();
    assert!(read(&*source, b"f", &version, 0..size).await.unwrap() == whole);
    println!("kerberos: {size} bytes with privacy in {:?}", begun.elapsed());
    // Two users at once, each with its own configuration, in one program.
    let other = with(&alice, &keytab, &realm.krb5_conf);
    let (one, two) = tokio::join!(listed(&*source, b""), listed(&*other, b""));
    assert_eq!(one.unwrap(), two.unwrap());

    // Tickets that somebody else has fetched.
    let of_cache = |cache: &[u8]| {
        realm
            .asking(&alice, ("ticketCache", cache), &realm.krb5_conf)
            .open(Spawner::new(), Arc::new(NoObserver))
    };
    let cached = of_cache(&realm.file("user.ccache"));
    cached.check(Duration::from_secs(20)).await.unwrap();
    assert!(read(&*cached, b"f", &version, 0..size).await.unwrap() == whole);
    let nonsense = of_cache(b"nonsense").check(Duration::from_secs(20)).await;
    println!("a ticket cache that is none: {nonsense:?}");
    assert!(matches!(nonsense, Err(StoreError::Denied { .. })), "{nonsense:?}");

    // What is wrong is said at once, or in time.
    let mallory = format!("mallory@{}", realm.name);
    for (name, principal, keytab) in [
        ("another user's", &mallory, keytab.clone()),
        ("a spoiled key", &alice, spoiled(&keytab)),
        ("no keytab at all", &alice, b"x".to_vec()),
    ] {
        let refused = with(principal, &keytab, &realm.krb5_conf).check(Duration::from_secs(20)).await;
        println!("{name}: {refused:?}");
        assert!(matches!(refused, Err(StoreError::Denied { .. })), "{name}: {refused:?}");
    }
    let kdc = format!("127.0.0.1:{}", realm.kdc);
    let nowhere = realm.krb5_conf.replace(&kdc, "127.0.0.1:1");
    let away = with(&alice, &keytab, &nowhere).check(Duration::from_secs(5)).await;
    println!("no KDC: {away:?}");
    assert!(matches!(away, Err(StoreError::Unavailable { .. })), "{away:?}");
    // A KDC where stores are not to be asked: Kerberos' own code does not get there either.
    let (tcp, udp) = loop {
        let tcp = std::net::TcpListener::bind("127.0.0.2:0").unwrap();
        if let Ok(udp) = std::net::UdpSocket::bind(tcp.local_addr().unwrap()) {
            break (tcp, udp);
        }
    };
    tcp.set_nonblocking(true).unwrap();
    udp.set_nonblocking(true).unwrap();
    let there = realm.krb5_conf.replace(&kdc, &tcp.local_addr().unwrap().to_string());
    let mut asking = realm.asking(&alice, ("keytab", &keytab), &there);
    asking.networks = vec!["127.0.0.1", "::1"];
    let refused = asking.open(Spawner::new(), Arc::new(NoObserver)).check(Duration::from_secs(5)).await;
    println!("a KDC that is refused: {refused:?}");
    assert!(refused.is_err());
    assert!(tcp.accept().is_err() && udp.recv(&mut [0; 16]).is_err(), "it was asked");
    // A user without credentials.
    let simple = Asking::simple(&realm.authority, "/d", "alice").open(Spawner::new(), Arc::new(NoObserver));
    let refused = simple.check(Duration::from_secs(10)).await;
    println!("no credentials: {refused:?}");
    // The library does not tell why.
    let Err(StoreError::Unavailable { cause, .. }) = refused else { panic!("{refused:?}") };
    assert!(cause.contains("Kerberos"), "{cause}");
}

#[tokio::test(flavor = "multi_thread")]
async fn tickets_that_end_are_fetched_anew_with_a_keytab_and_said_to_be_over_without() {
    let mut realm = Realm::start("kerberos-short");
    let (alice, keytab, cache) = (realm.alice(), realm.file("user.keytab"), realm.file("user.ccache"));
    let begun = Instant::now();
    let whole = content(11, 100_000);
    realm.cluster.put("/d/f", &whole).unwrap();
    let (spawner, log) = (Spawner::new(), Arc::new(Log::default()));
    let source =
        realm.asking(&alice, ("keytab", &keytab), &realm.krb5_conf).open(spawner.clone(), log.clone());
    let (size, version) = file(&*source, b"f").await;
    assert!(read(&*source, b"f", &version, 0..size).await.unwrap() == whole);
    // Time that has to pass is what this is about.
    tokio::time::sleep_until((begun + SHORT + Duration::from_secs(5)).into()).await;
    // The NameNode has closed what idled: there must be a new connection, and a ticket for it.
    assert!(read(&*source, b"f", &version, 0..size).await.unwrap() == whole);
    println!("over their tickets' end: retries {:?}", log.retries.lock().unwrap());
    assert_eq!(spawner.count(), 1);

    let of = |realm: &Realm, cache: &[u8]| {
        realm
            .asking(&alice, ("ticketCache", cache), &realm.krb5_conf)
            .open(Spawner::new(), Arc::new(NoObserver))
    };
    let over = of(&realm, &cache).check(Duration::from_secs(10)).await;
    println!("a cache of tickets that are over: {over:?}");
    assert!(matches!(over, Err(StoreError::Expired { .. })), "{over:?}");
    let renewed = realm.cluster.place().join("renewed.ccache");
    realm.cluster.say(&format!("kinit {}", renewed.display())).unwrap();
    of(&realm, &realm.file("renewed.ccache")).check(Duration::from_secs(10)).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_delegation_token_opens_what_its_owner_may_read_and_a_spoiled_one_nothing() {
    let mut realm = Realm::start("kerberos");
    let whole = content(12, 100_000);
    realm.cluster.put("/d/f", &whole).unwrap();
    let path = realm.cluster.place().join("tokens");
    realm.cluster.say(&format!("token {}", path.display())).unwrap();
    let token = realm.file("tokens");
    let with = |token: &[u8]| {
        let port = realm.authority.rsplit(':').next().unwrap();
        // A token is for an address.
        let mut asking = Asking::simple(format!("127.0.0.1:{port}"), "/d", "nobody");
        asking.settings.insert("dfs.data.transfer.protection".into(), "privacy".into());
        asking.credentials =
            Credentials::from_secrets([("delegationToken", BASE64_STANDARD.encode(token))]).unwrap();
        asking.within(Duration::from_secs(20)).open(Spawner::new(), Arc::new(NoObserver))
    };
    let source = with(&token);
    source.check(Duration::from_secs(20)).await.unwrap();
    let (size, version) = file(&*source, b"f").await;
    assert!(read(&*source, b"f", &version, 0..size).await.unwrap() == whole);
    // One whose password is another.
    let mut spoiled = token.clone();
    let kind = token.windows(4).position(|four| four == b"HDFS").unwrap();
    spoiled[kind - 4] ^= 1;
    let refused = with(&spoiled).check(Duration::from_secs(10)).await;
    println!("a spoiled token: {refused:?}");
    assert!(refused.is_err());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_clock_that_is_ten_minutes_off_is_named() {
    let realm = Realm::start("kerberos");
    let (alice, keytab) = (realm.alice(), realm.file("user.keytab"));
    let library = realm.cluster.place().join("clock.so");
    let source = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/real/clock.c");
    let built = std::process::Command::new("cc")
        .args(["-shared", "-fPIC", "-o"])
        .arg(&library)
        .arg(source)
        .status()
        .unwrap();
    assert!(built.success());
    let strict = realm.krb5_conf.replace("[libdefaults]\n", "[libdefaults]\n kdc_timesync = 0\n");
    let off = realm
        .asking(&alice, ("keytab", &keytab), &strict)
        .open(Spawner::with_preload(&library), Arc::new(NoObserver));
    let refused = off.check(Duration::from_secs(10)).await;
    println!("ten minutes off: {refused:?}");
    assert!(matches!(&refused, Err(StoreError::Denied { why, .. }) if why.contains("NTP")), "{refused:?}");
}
