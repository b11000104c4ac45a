//! Alibaba Cloud's own client, for no OSS is at hand: what the testkit's server takes for a good signature is one to that client,
//! and so are ours.

use crate::common::{BUCKET, ODD_KEYS, listed, named, read, spec};
use crate::servers::program;
use percent_encoding::percent_decode_str;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use store::{Access, Kind, Limits, LimitsConfig, NoObserver, Source, Version};
use testkit::process::Process;
use testkit::s3::{ACCESS_KEY, Config, Key, Memory, Oss, Protocol, Rights, SECRET_KEY, Server};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpListener;
use volume::{Credentials, VolumeSpec};

const REGION: &str = "cn-testkit";
const GUEST: &str = "guest";
const TOKEN: &str = "go/od+token=";

/// Has the client do that, and gives what it says.
fn sdk(what: &str, order: &Value) -> Value {
    let dir = tempfile::tempdir().unwrap();
    let (given, said) = (dir.path().join("order"), dir.path().join("said"));
    std::fs::write(&given, order.to_string()).unwrap();
    let mut command = Command::new("python3");
    command
        .env("PYTHONPATH", program("oss-sdk"))
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .env("NO_PROXY", "127.0.0.1");
    command.arg(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/real/oss_sdk.py")).arg(what).arg(&given);
    let mut process = Process::spawn(command.stdout(std::fs::File::create(&said).unwrap())).unwrap();
    let status = process.wait_for_exit(Duration::from_secs(60)).unwrap();
    assert!(status.success(), "{what}: {status}, see above");
    serde_json::from_slice(&std::fs::read(&said).unwrap()).unwrap()
}

fn open(spec: &VolumeSpec, id: &str, token: Option<&str>) -> Arc<dyn Source> {
    let keys = [("accessKeyId", id), ("secretAccessKey", SECRET_KEY)];
    let secrets = keys.into_iter().chain(token.map(|token| ("sessionToken", token)));
    let access = Access::fixed(spec, Credentials::from_secrets(secrets).unwrap());
    let limits = LimitsConfig { egress: named(), ..LimitsConfig::default() };
    store::open(spec, access, Arc::new(Limits::new(limits)), Arc::new(NoObserver)).unwrap()
}

async fn server() -> Server {
    let keys = vec![
        Key::new(ACCESS_KEY, SECRET_KEY, Rights::All),
        Key::new(GUEST, SECRET_KEY, Rights::All).with_token(TOKEN),
    ];
    let config = Config { protocol: Protocol::Oss(Oss { region: REGION.into() }), keys, ..Config::default() };
    Server::start(config.bucket(BUCKET, Memory::default())).await.unwrap()
}

fn volume(server: &Server) -> VolumeSpec {
    let mut spec = spec(server, &format!("oss://{BUCKET}"));
    spec.parameters.region = Some(REGION.into());
    spec
}

#[tokio::test(flavor = "multi_thread")]
async fn oss_sdk_can_use_the_testkits_server_and_what_it_puts_there_is_read() {
    let server = server().await;
    let contents: BTreeMap<_, _> = ODD_KEYS.iter().map(|key| (*key, format!("bytes of {key}"))).collect();
    let said = sdk(
        "use",
        &json!({
            "endpoint": server.endpoint(), "region": REGION, "bucket": BUCKET, "prefix": "dir é+/",
            "id": ACCESS_KEY, "secret": SECRET_KEY, "guest": GUEST, "token": TOKEN, "contents": contents,
        }),
    );
    println!("Alibaba Cloud's client: {said}");
    let refusals = json!({
        "stale": [412, "PreconditionFailed"],
        "secret": [403, "SignatureDoesNotMatch"],
        "id": [403, "InvalidAccessKeyId"],
        "region": [400, "InvalidArgument"],
        "token": [403, "SecurityTokenExpired"],
    });
    assert_eq!(said, json!({"found": ODD_KEYS.len(), "pages": 5, "refusals": refusals}));

    let source = open(&volume(&server), ACCESS_KEY, None);
    let found = listed(&*source, "dir é+").await;
    assert_eq!(found.len(), ODD_KEYS.len());
    for (key, text) in contents {
        let Some(Kind::File { size, version }) = found.get(key.as_bytes()) else { panic!("{key:?}") };
        let path = format!("dir é+/{key}");
        assert_eq!(read(&*source, path.as_bytes(), version, 0..*size).await.unwrap(), text.into_bytes());
    }
}

/// Answers 404 to whatever comes, and keeps it.
async fn recorder() -> (String, Arc<Mutex<Vec<Value>>>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    let (kept, url) = (Arc::new(Mutex::new(Vec::new())), endpoint.clone());
    let keep = kept.clone();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let (keep, url) = (keep.clone(), url.clone());
            tokio::spawn(async move {
                let mut stream = BufReader::new(stream);
                let mut head = Vec::new();
                // Requests that ask have no body.
                while !head.ends_with(b"\r\n\r\n") && stream.read_until(b'\n', &mut head).await.unwrap() > 0 {
                }
                if head.is_empty() {
                    return;
                }
                keep.lock().unwrap().push(request(&url, &String::from_utf8(head).unwrap()));
                let answer = b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n";
                stream.write_all(answer).await.unwrap();
            });
        }
    });
    (endpoint, kept)
}

/// As `sign` wants it.
fn request(endpoint: &str, head: &str) -> Value {
    let mut lines = head.lines();
    let mut first = lines.next().unwrap().split(' ');
    let (method, target) = (first.next().unwrap(), first.next().unwrap());
    let pairs = lines.filter_map(|line| line.split_once(": "));
    let headers: BTreeMap<_, _> = pairs.map(|(name, value)| (name.to_lowercase(), value)).collect();
    let path = target.split('?').next().unwrap();
    let key = path.strip_prefix(&format!("/{BUCKET}/")).unwrap();
    let key = Some(percent_decode_str(key).decode_utf8().unwrap()).filter(|key| !key.is_empty());
    let url = format!("{endpoint}{target}");
    json!({"method": method, "url": url, "key": key, "headers": headers})
}

#[tokio::test(flavor = "multi_thread")]
async fn oss_sdk_signs_each_of_our_requests_as_we_do() {
    for (id, token) in [(ACCESS_KEY, None), (GUEST, Some(TOKEN))] {
        let (endpoint, kept) = recorder().await;
        let mut spec = volume(&server().await);
        spec.parameters.endpoint = Some(endpoint.parse().unwrap());
        spec.parameters.requester_pays = token.is_some();
        let source = open(&spec, id, token);
        for key in ODD_KEYS {
            let path = format!("dir é+/{key}");
            // None is there, which is not what this is about.
            let _ = source.list(path.as_bytes(), None).await;
            let _ = source.list(path.as_bytes(), Some(&format!("{key}+/=&~"))).await;
            let _ = source.head(path.as_bytes()).await;
            let _ = source.get(path.as_bytes(), &Version("e".into()), 3..77).await;
        }
        let requests = std::mem::take(&mut *kept.lock().unwrap());
        let of = |is: fn(&Value) -> bool| requests.iter().filter(|request| is(request)).count();
        let lists = of(|request| request["url"].as_str().unwrap().contains("list-type=2"));
        let heads = of(|request| request["method"] == "HEAD");
        let gets = of(|request| request["headers"].get("if-match").is_some());
        println!("signed: {lists} lists, {heads} HEAD, {gets} GET, as {id}");
        assert!(lists >= 3 * ODD_KEYS.len() && heads == ODD_KEYS.len() && gets == ODD_KEYS.len());
        let order = json!({
            "region": REGION, "bucket": BUCKET, "id": id, "secret": SECRET_KEY, "token": token, "requests": requests,
        });
        let theirs = sdk("sign", &order);
        for (ours, theirs) in requests.iter().zip(theirs.as_array().unwrap()) {
            assert_eq!(ours["headers"]["authorization"], *theirs, "{ours}");
        }
        assert_eq!(theirs.as_array().unwrap().len(), requests.len());
    }
}
