//! Every bad input has its own message, and no message has a secret.

use crate::common::*;
use std::sync::Arc;
use std::time::Duration;
use store::{Access, EgressConfig, Limits, LimitsConfig, NoObserver, StoreError};
use testkit::s3::{ACCESS_KEY, Config, Key, Memory, Rights, SECRET_KEY, Server};
use volume::{Credentials, EndpointPattern, VolumeSpec};

const LIMIT: Duration = Duration::from_secs(2);

async fn server(anonymous: bool) -> Server {
    let mut config = Config { anonymous, ..Config::default() };
    for (id, rights) in
        [("list-only", Rights::ListOnly), ("read-only", Rights::ReadOnly), ("nobody", Rights::None)]
    {
        config.keys.push(Key::new(id, SECRET_KEY, rights));
    }
    let server = Server::start(config.bucket(BUCKET, Memory::default())).await.unwrap();
    server.put(BUCKET, "p/o", "content").unwrap();
    server
}

async fn check(spec: &VolumeSpec, credentials: &Credentials) -> Result<(), StoreError> {
    let access = Access::fixed(spec, credentials.clone());
    let source = store::open(spec, access, Arc::new(Limits::new(quick())), Arc::new(NoObserver))?;
    let result = source.check(LIMIT).await;
    let debug = format!("{source:?} {result:?}");
    let text = result.as_ref().err().map(ToString::to_string).unwrap_or_default();
    for (name, secret) in credentials.to_secrets() {
        assert!(!debug.contains(&secret) && !text.contains(&secret), "{name} is shown in {debug} / {text}");
    }
    result
}

async fn refused(spec: &VolumeSpec, credentials: &Credentials) -> (StoreError, String) {
    let error = check(spec, credentials).await.expect_err("should have been refused");
    let text = error.to_string();
    println!("{text}");
    (error, text)
}

#[tokio::test]
async fn a_good_source_passes() {
    let server = server(false).await;
    check(&spec(&server, "s3://bucket"), &keys(ACCESS_KEY, SECRET_KEY)).await.unwrap();
    check(&spec(&server, "s3://bucket/p"), &keys(ACCESS_KEY, SECRET_KEY)).await.unwrap();
}

#[tokio::test]
async fn wrong_keys_and_missing_rights_are_told_apart() {
    let server = server(false).await;
    let spec = spec(&server, "s3://bucket");
    for (credentials, advice) in [
        (keys("UNKNOWNKEY", SECRET_KEY), "check accessKeyId"),
        (keys(ACCESS_KEY, "wrong-secret-key"), "check secretAccessKey"),
        (keys("nobody", SECRET_KEY), "grant s3:ListBucket"),
        (keys("read-only", SECRET_KEY), "grant s3:ListBucket"),
        (keys("list-only", SECRET_KEY), "grant s3:GetObject"),
        (Credentials::anonymous(), "grant s3:ListBucket"),
    ] {
        let (error, text) = refused(&spec, &credentials).await;
        assert!(matches!(error, StoreError::Denied { .. }), "{error:?}");
        assert!(text.contains(advice), "{text}");
    }
}

#[tokio::test]
async fn a_key_that_may_read_but_not_list_still_reads() {
    let server = server(false).await;
    let limits = Arc::new(Limits::new(quick()));
    let spec = spec(&server, "s3://bucket");
    let access = Access::fixed(&spec, keys("read-only", SECRET_KEY));
    let source = store::open(&spec, access, limits, Arc::new(NoObserver)).unwrap();
    let entry = source.head(b"p/o").await.unwrap().unwrap();
    let store::Kind::File { size, version } = entry.kind else { panic!("{entry:?}") };
    assert_eq!(read(&*source, b"p/o", &version, 0..size).await.unwrap(), b"content");
}

#[tokio::test]
async fn anonymous_works_where_it_is_allowed() {
    let server = server(true).await;
    check(&spec(&server, "s3://bucket"), &Credentials::anonymous()).await.unwrap();
}

#[tokio::test]
async fn a_missing_bucket_or_prefix_is_not_found() {
    let server = server(false).await;
    let good = keys(ACCESS_KEY, SECRET_KEY);
    let (error, text) = refused(&spec(&server, "s3://other-bucket"), &good).await;
    assert!(matches!(error, StoreError::NotFound { .. }) && text.contains("bucket other-bucket"), "{text}");
    let (error, text) = refused(&spec(&server, "s3://bucket/nothing"), &good).await;
    assert!(
        matches!(error, StoreError::NotFound { .. }) && text.contains("no key below this prefix"),
        "{text}"
    );
}

#[tokio::test]
async fn an_endpoint_that_is_down_or_unknown_or_speaks_no_tls_says_so() {
    let server = server(false).await;
    let good = keys(ACCESS_KEY, SECRET_KEY);
    let mut spec = spec(&server, "s3://bucket");

    spec.parameters.endpoint = Some(format!("https://{}", server.address()).parse().unwrap());
    let (error, text) = refused(&spec, &good).await;
    assert!(matches!(error, StoreError::Invalid { .. }) && text.contains("TLS"), "{text}");

    spec.parameters.endpoint = Some("http://no-such-host.invalid".parse().unwrap());
    let (error, text) = refused(&spec, &good).await;
    assert!(
        matches!(error, StoreError::Unavailable { .. }) && text.contains("no-such-host.invalid"),
        "{text}"
    );

    // As where a name server does not answer.
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = silent.local_addr().unwrap().to_string();
    spec.parameters.endpoint = Some(format!("http://{address}").parse().unwrap());
    let (error, text) = refused(&spec, &good).await;
    assert!(matches!(error, StoreError::Unavailable { .. }) && text.contains(&address), "{text}");

    // The bucket becomes part of a host's name, which an address has none of.
    spec.parameters.addressing = volume::Addressing::Virtual;
    spec.parameters.endpoint = Some(format!("http://{}", server.address()).parse().unwrap());
    let (error, text) = refused(&spec, &good).await;
    assert!(matches!(error, StoreError::Invalid { .. }) && text.contains("addressingStyle"), "{text}");
    spec.parameters.addressing = volume::Addressing::Path;

    // A port that was free a moment ago.
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    spec.parameters.endpoint = Some(format!("http://{free}").parse().unwrap());
    let (error, text) = refused(&spec, &good).await;
    assert!(matches!(error, StoreError::Unavailable { .. }) && text.contains("cannot connect"), "{text}");
    assert!(text.contains("refused"), "{text}");
}

#[tokio::test]
async fn a_session_token_is_never_shown() {
    let server = server(false).await;
    let secrets = [
        ("accessKeyId", "UNKNOWNKEY"),
        ("secretAccessKey", "hunter2hunter2"),
        ("sessionToken", "T0KENT0KENT0KEN"),
    ];
    let credentials = Credentials::from_secrets(secrets).unwrap();
    refused(&spec(&server, "s3://bucket"), &credentials).await;
}

fn open(spec: &VolumeSpec, limits: LimitsConfig, credentials: Credentials) -> Arc<dyn store::Source> {
    store::open(spec, Access::fixed(spec, credentials), Arc::new(Limits::new(limits)), Arc::new(NoObserver))
        .unwrap()
}

/// Sends every request elsewhere, as a captive portal or a hostile store would.
async fn redirector(to: String) -> String {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let mut request = [0; 4096];
            let _ = stream.read(&mut request).await;
            let answer =
                format!("HTTP/1.1 307 Temporary Redirect\r\nlocation: {to}/\r\ncontent-length: 0\r\n\r\n");
            let _ = stream.write_all(answer.as_bytes()).await;
        }
    });
    format!("http://{address}")
}

#[tokio::test]
async fn redirects_are_reported_not_followed() {
    let server = server(false).await;
    let mut spec = spec(&server, "s3://bucket");
    spec.parameters.endpoint = Some(redirector(server.endpoint()).await.parse().unwrap());
    let (error, text) = refused(&spec, &keys(ACCESS_KEY, SECRET_KEY)).await;
    assert!(matches!(error, StoreError::Invalid { .. }) && text.contains("endpoint"), "{text}");
    assert_eq!(server.stats().total(), 0);
}

#[tokio::test]
async fn an_endpoint_on_the_node_must_be_named() {
    let server = server(false).await;
    let credentials = keys(ACCESS_KEY, SECRET_KEY);
    let open = |endpoint: &str, named: &[&str]| {
        let mut spec = spec(&server, "s3://bucket");
        spec.parameters.endpoint = Some(endpoint.parse().unwrap());
        let named = named.iter().map(|entry| EndpointPattern::parse(entry).unwrap()).collect();
        let egress = EgressConfig { named, ..EgressConfig::default() };
        let limits = Limits::new(LimitsConfig { egress, ..quick() });
        store::open(&spec, Access::fixed(&spec, credentials.clone()), Arc::new(limits), Arc::new(NoObserver))
    };
    let port = server.endpoint().rsplit(':').next().unwrap().to_owned();
    let (address, name) = (format!("http://127.0.0.1:{port}"), format!("http://localhost:{port}"));
    for star in ["http://*", "http://*:*"] {
        let error = open(&address, &[star]).map(drop).unwrap_err();
        let text = error.to_string();
        assert!(matches!(error, StoreError::Invalid { .. }), "{error:?}");
        assert!(text.contains("127.0.0.1") && text.contains("allow.endpoints"), "{text}");
        // A name is found out when it is asked, and not asked again and again.
        let begun = std::time::Instant::now();
        let error = open(&name, &[star]).unwrap().check(Duration::from_secs(60)).await.unwrap_err();
        let text = error.to_string();
        assert!(matches!(error, StoreError::Invalid { .. }), "{error:?}");
        assert!(text.contains("localhost has address") && text.contains("loopback"), "{text}");
        assert!(begun.elapsed() < Duration::from_secs(30), "it was tried again");
    }
    for endpoint in [&address, &name] {
        open(endpoint, &["http://*", endpoint]).unwrap().check(LIMIT).await.unwrap();
    }
}

/// nginx takes everybody's connection and says in a page whose certificate it misses.
#[tokio::test]
async fn a_page_that_asks_for_a_certificate_is_understood() {
    let server = server(false).await;
    let mut spec = spec(&server, "s3://bucket");
    for (title, words) in [
        (
            "400 No required SSL certificate was sent",
            "put one that it accepts into the secret as clientCertificate",
        ),
        ("400 The SSL certificate error", "refuses clientCertificate"),
        ("400 Request Header Or Cookie Too Large", "cannot be used: HTTP 400"),
    ] {
        let page = format!("<html><head><title>{title}</title></head></html>");
        let endpoint = answering(move |_| reply("400 Bad Request", &page)).await;
        spec.parameters.endpoint = Some(endpoint.parse().unwrap());
        let text = refused(&spec, &keys(ACCESS_KEY, SECRET_KEY)).await.1;
        assert!(text.contains(words), "{text}");
    }
}

#[tokio::test]
async fn what_a_key_service_refuses_says_what_to_grant_and_no_key() {
    const KEY: &str = "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=";
    let server = server(false).await;
    let xml =
        |code: &str, message: &str| format!("<Error><Code>{code}</Code><Message>{message}</Message></Error>");
    let json = |reason: &str, message: &str| {
        format!(r#"{{"error": {{"message": "{message}", "errors": [{{"reason": "{reason}"}}]}}}}"#)
    };
    let decrypt = "User: arn:aws:iam::1:user/u is not authorized to perform: kms:Decrypt on resource: arn:aws:kms:r:1:key/k";
    let secure = format!(
        "Requests specifying Server Side Encryption with Customer provided keys must be made over a secure connection. {KEY}"
    );
    for (source, status, body, words) in [
        ("s3", "403 Forbidden", xml("AccessDenied", decrypt), "grant kms:Decrypt"),
        ("oss", "403 Forbidden", xml("AccessDenied", decrypt), "grant kms:Decrypt"),
        ("s3", "400 Bad Request", xml("KMS.DisabledException", "arn is disabled."), "is disabled: enable it"),
        (
            "s3",
            "400 Bad Request",
            xml("KMS.NotFoundException", "Key is not found."),
            "does not exist any more",
        ),
        (
            "s3",
            "400 Bad Request",
            xml("KMS.KMSInvalidStateException", "arn is pending deletion."),
            "cancel that",
        ),
        ("s3", "400 Bad Request", xml("KMS.Other", "no"), "look at its state and its policy"),
        ("s3", "400 Bad Request", xml("InvalidRequest", &secure), "use an https endpoint"),
        (
            "gs",
            "403 Forbidden",
            json("forbidden", "Permission denied on Cloud KMS key."),
            "roles/cloudkms.crypto",
        ),
        (
            "az",
            "403 Forbidden",
            xml("KeyVaultEncryptionKeyNotFound", "no"),
            "account testkit cannot use the key",
        ),
    ] {
        let mut spec = spec(&server, &format!("{source}://bucket"));
        spec.parameters.region = Some("r".into());
        spec.parameters.storage_account = Some("testkit".into());
        let endpoint = answering(move |_| reply(status, &body)).await;
        spec.parameters.endpoint = Some(endpoint.parse().unwrap());
        let key = (source != "oss").then_some(("customerKey", KEY));
        let credentials = Credentials::from_secrets(key).unwrap();
        let access = Access::fixed(&spec, credentials);
        let source =
            store::open(&spec, access, Arc::new(Limits::new(quick())), Arc::new(NoObserver)).unwrap();
        let version = store::Version("7".into());
        let text = source.get(b"o", &version, 0..1).await.err().unwrap().to_string();
        assert!(text.contains(words) && !text.contains(KEY), "{text}");
    }
}

#[tokio::test]
async fn empty_pages_without_end_are_an_error_and_a_few_are_passed_over() {
    let server = server(false).await;
    let mut spec = spec(&server, "gs://bucket");
    for (pages, found) in [(7, true), (usize::MAX, false)] {
        let asked = Arc::new(std::sync::atomic::AtomicUsize::new(0));
        let count = asked.clone();
        let endpoint = answering(move |_| {
            let number = count.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
            let page = match number < pages {
                true => format!(r#"{{"kind": "storage#objects", "nextPageToken": "{number}"}}"#),
                false => r#"{"kind": "storage#objects", "prefixes": ["d/"]}"#.to_owned(),
            };
            reply("200 OK", &page)
        });
        spec.parameters.endpoint = Some(endpoint.await.parse().unwrap());
        let source = open(&spec, quick(), Credentials::anonymous());
        let page = source.list(b"", None).await;
        let asked = asked.load(std::sync::atomic::Ordering::SeqCst);
        match found {
            true => assert_eq!((page.unwrap().entries.len(), asked), (1, 8)),
            false => assert!(page.unwrap_err().to_string().contains("empty pages") && asked < 200, "{asked}"),
        }
    }
}

/// As after a clock was set right: a token that was made before is thrown away with the refusal.
#[tokio::test]
async fn a_token_that_was_refused_is_made_anew() {
    use testkit::s3::{SERVICE_ACCOUNT_KEY, key_file};
    let tokens = Arc::new(std::sync::Mutex::new(Vec::new()));
    let seen = tokens.clone();
    let endpoint = answering(move |head| {
        let token = head.lines().find(|line| line.to_ascii_lowercase().starts_with("authorization: bearer "));
        seen.lock().unwrap().push(token.unwrap_or_default().to_owned());
        reply("401 Unauthorized", r#"{"error": {"message": "Invalid Credentials"}}"#)
    });
    let server = server(false).await;
    let mut spec = spec(&server, "gs://bucket");
    spec.parameters.endpoint = Some(endpoint.await.parse().unwrap());
    let file = key_file("a", SERVICE_ACCOUNT_KEY);
    let source = open(&spec, quick(), Credentials::from_secrets([("serviceAccountKey", file)]).unwrap());
    // It says in which second it was made.
    let renewed = async {
        loop {
            let error = source.list(b"", None).await.unwrap_err();
            assert!(matches!(error, StoreError::Denied { .. }), "{error:?}");
            let tokens = tokens.lock().unwrap().clone();
            assert!(tokens.iter().all(|token| token.len() > 100), "{tokens:?}");
            if tokens.first() != tokens.last() {
                return;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), renewed).await.expect("the refused token is sent again");
}

/// Google unpacks objects that were stored packed for who does not say that he takes them as they are.
#[tokio::test]
async fn bytes_that_were_unpacked_on_their_way_are_refused() {
    let server = server(false).await;
    let mut spec = spec(&server, "gs://bucket");
    for (stored, sent, good) in
        [("gzip", "gzip", true), ("identity", "", true), ("gzip", "", false), ("", "gzip", false)]
    {
        let endpoint = answering(move |head| {
            assert!(head.to_ascii_lowercase().contains("accept-encoding: gzip"), "{head}");
            let header = |name: &str, value: &str| match value {
                "" => String::new(),
                value => format!("{name}: {value}\r\n"),
            };
            let (stored, sent) =
                (header("x-goog-stored-content-encoding", stored), header("content-encoding", sent));
            format!(
                "HTTP/1.1 206 Partial Content\r\ncontent-range: bytes 0-3/4\r\ncontent-length: 4\r\nx-goog-generation: 7\r\n\
                 connection: close\r\n{stored}{sent}\r\nabcd"
            )
        });
        spec.parameters.endpoint = Some(endpoint.await.parse().unwrap());
        let source = open(&spec, quick(), Credentials::anonymous());
        let bytes = read(&*source, b"k", &store::Version("7".into()), 0..4).await;
        match good {
            true => assert_eq!(bytes.unwrap(), b"abcd"),
            false => assert!(bytes.unwrap_err().to_string().contains("unpacks"), "{stored}, {sent}"),
        }
    }
}

fn steps(examined: &[store::Examined]) -> Vec<(store::Step, bool)> {
    examined.iter().map(|examined| (examined.step, examined.result.is_ok())).collect()
}

#[tokio::test]
async fn what_fails_is_found_step_by_step() {
    use store::Step::{Access as Asked, Clock, Connection, Name};
    let server = server(false).await;
    let examine = async |endpoint: &str, credentials: Credentials| {
        let mut spec = spec(&server, "s3://bucket");
        spec.parameters.endpoint = Some(endpoint.parse().unwrap());
        let egress = EgressConfig {
            named: ["http://127.0.0.1:*", "http://localhost:*", "http://*.invalid"]
                .map(|entry| EndpointPattern::parse(entry).unwrap())
                .to_vec(),
            ..EgressConfig::default()
        };
        let examined = open(&spec, LimitsConfig { egress, ..quick() }, credentials).examine(LIMIT).await;
        let last = examined.last().unwrap().result.clone();
        (steps(&examined), last.unwrap_or_else(|why| why))
    };
    let good = || keys(ACCESS_KEY, SECRET_KEY);
    let (found, saw) = examine(&server.endpoint(), good()).await;
    assert_eq!(found, [(Connection, true), (Clock, true), (Asked, true)], "{saw}");
    let (found, saw) = examine(&server.endpoint().replace("127.0.0.1", "localhost"), good()).await;
    assert_eq!(found, [(Name, true), (Connection, true), (Clock, true), (Asked, true)], "{saw}");
    let (found, saw) = examine(&server.endpoint(), keys("unknown", SECRET_KEY)).await;
    assert_eq!(found, [(Connection, true), (Clock, true), (Asked, false)]);
    assert!(saw.contains("check accessKeyId"), "{saw}");
    let (found, saw) = examine("http://nowhere.invalid", good()).await;
    assert_eq!(found, [(Name, false)]);
    assert!(saw.contains("nowhere.invalid"), "{saw}");
    let (found, saw) = examine("http://127.0.0.1:1", good()).await;
    assert_eq!(found, [(Connection, false)]);
    assert!(saw.contains("cannot connect"), "{saw}");
    let old = answering(|_| {
        "HTTP/1.1 200 OK\r\ndate: Wed, 21 Oct 2015 07:28:00 GMT\r\ncontent-length: 0\r\nconnection: close\r\n\r\n".into()
    });
    let (found, saw) = examine(&old.await, good()).await;
    assert_eq!(found[..2], [(Connection, true), (Clock, false)], "{saw}");
    // A store that tells no time, and then nothing of use.
    let (found, saw) = examine(&answering(|_| reply("200 OK", "<html>")).await, good()).await;
    assert_eq!(found, [(Connection, true), (Asked, false)], "{saw}");
}
