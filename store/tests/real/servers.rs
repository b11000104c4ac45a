//! The servers: how each is started, and how an object is put into it.

use crate::common::BUCKET;
use crate::{ceph, web};
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use bytes::Bytes;
use crc_fast::CrcAlgorithm;
use futures::future::BoxFuture;
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, StatusCode};
use object_store::aws::{AwsAuthorizer, AwsCredential};
use object_store::azure::{AzureAccessKey, AzureAuthorizer, AzureCredential};
use object_store::client::HttpRequestBody;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use std::net::TcpListener;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use testkit::process::Process;
pub(crate) use testkit::servers::{KEY_ID, REGION, SECRET_KEY, program};

const STRICT: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~');
const STRICT_PATH: &AsciiSet = &STRICT.remove(b'/');

/// The account that every installation of Azurite has, as its documentation says.
const ACCOUNT: &str = "devstoreaccount1";
const ACCOUNT_KEY: &str =
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw==";

pub(crate) enum Kept {
    Yes,
    /// The server's status.
    No(u16),
}

/// What becomes of `a/b` where an object `a` is.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Below {
    Listed,
    Hidden,
    Refused,
}

pub(crate) struct Real {
    pub(crate) name: &'static str,
    pub(crate) scheme: &'static str,
    pub(crate) account: Option<&'static str>,
    pub(crate) secrets: Vec<(&'static str, String)>,
    /// Secrets that it refuses, and what our error then says. None: it looks at no signature.
    pub(crate) wrong: Option<(Vec<(&'static str, String)>, &'static str)>,
    /// Secrets with an id that it does not know, if it looks at ids.
    pub(crate) stranger: Option<Vec<(&'static str, String)>>,
    /// Whether it refuses a session token that it has not given.
    pub(crate) looks_at_token: bool,
    /// Whether it refuses signatures for a region that is not its own.
    pub(crate) looks_at_region: bool,
    /// How many of the odd keys it takes from nobody.
    pub(crate) refuses: usize,
    /// Keys that it takes, and then keeps as others or fails at.
    pub(crate) breaks_at: &'static [&'static str],
    pub(crate) below_a_file: Below,
    /// A directory that it shows in the bucket's listing, without a key below it.
    pub(crate) keyless: Option<&'static str>,
    /// Of an object with this checksum it tells that of its parts' checksums.
    pub(crate) tells_wrong: Option<&'static str>,
    port: u16,
    client: reqwest::Client,
    _process: Process,
    /// What it stands on; ended after it.
    pub(crate) others: Vec<Process>,
    dir: tempfile::TempDir,
}

type Start = fn() -> BoxFuture<'static, Real>;

/// Those that the command line of `scripts/stores` names.
pub(crate) fn chosen() -> Vec<Start> {
    let names =
        std::env::var("MILLPOND_STORES").expect("scripts/stores says which servers (MILLPOND_STORES)");
    let start = |name: &str| -> Start {
        match name {
            "moto" => || Box::pin(moto()),
            "azurite" => || Box::pin(azurite()),
            "fake-gcs-server" => || Box::pin(fake_gcs()),
            "versitygw" => || Box::pin(versitygw()),
            "minio" => || Box::pin(minio()),
            "ceph-rgw" => || Box::pin(ceph::rgw()),
            "nginx" => || Box::pin(web::nginx()),
            "nginx-json" => || Box::pin(web::nginx_json()),
            "apache" => || Box::pin(web::apache()),
            "apache-dav" => || Box::pin(web::apache_dav()),
            other => panic!("{other} is no server that is known here"),
        }
    };
    names.split_whitespace().map(start).collect()
}

pub(crate) fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

impl Real {
    pub(crate) fn start(
        name: &'static str,
        scheme: &'static str,
        command: impl FnOnce(u16, &std::path::Path) -> Command,
    ) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let port = free_port();
        let mut command = command(port, dir.path());
        let log = std::fs::File::create(dir.path().join("log")).unwrap();
        command.stdin(Stdio::null()).stdout(log.try_clone().unwrap()).stderr(log);
        let mut process = Process::spawn(&mut command).unwrap();
        let listens = || std::net::TcpStream::connect(("127.0.0.1", port)).ok();
        process.wait_until(Duration::from_secs(120), listens).unwrap_or_else(|e| {
            panic!("{name}: {e}\n{}", std::fs::read_to_string(dir.path().join("log")).unwrap_or_default())
        });
        let _ = rustls::crypto::ring::default_provider().install_default();
        let client = reqwest::Client::builder().no_proxy().build().unwrap();
        let (secrets, wrong) = (Vec::new(), None);
        Self {
            name,
            scheme,
            account: None,
            secrets,
            wrong,
            stranger: None,
            looks_at_token: false,
            looks_at_region: false,
            refuses: 0,
            breaks_at: &[],
            below_a_file: Below::Listed,
            keyless: None,
            tells_wrong: None,
            port,
            client,
            _process: process,
            others: Vec::new(),
            dir,
        }
    }

    pub(crate) fn endpoint(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    pub(crate) async fn put(&self, key: &str, body: Vec<u8>) -> Kept {
        if self.scheme == "http" {
            return web::put(self.dir.path(), key, &body);
        }
        let path = utf8_percent_encode(key, STRICT_PATH);
        let status = match self.scheme {
            "s3" => self.send(Method::PUT, &format!("/{BUCKET}/{path}"), &[], body).await,
            "az" => {
                let blob = [("x-ms-blob-type", "BlockBlob")];
                self.send(Method::PUT, &format!("/{ACCOUNT}/{BUCKET}/{path}"), &blob, body).await
            }
            _ => {
                let name = utf8_percent_encode(key, STRICT);
                let path = format!("/upload/storage/v1/b/{BUCKET}/o?uploadType=media&name={name}");
                self.send(Method::POST, &path, &[("content-type", "application/octet-stream")], body).await
            }
        };
        if status.is_success() { Kept::Yes } else { Kept::No(status.as_u16()) }
    }

    /// In two parts, as S3's clients upload large objects. `of`: what S3 is to keep a checksum of, and how.
    pub(crate) async fn put_in_parts(&self, key: &str, parts: [Vec<u8>; 2], of: (&str, &str)) -> Kept {
        let path = format!("/{BUCKET}/{}", utf8_percent_encode(key, STRICT_PATH));
        let (algorithm, kind) = of;
        let asks = [("x-amz-checksum-algorithm", algorithm), ("x-amz-checksum-type", kind)];
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let between = |text: &str, tag: &str| {
            let (_, rest) = text.split_once(&format!("<{tag}>"))?;
            Some(rest.split_once("</")?.0.to_owned())
        };
        let (status, _, said) = self.ask(Method::POST, &format!("{path}?uploads="), &asks, Vec::new()).await;
        let Some(upload) = between(&text(&said), "UploadId") else { return Kept::No(status.as_u16()) };
        let upload = utf8_percent_encode(&upload, STRICT).to_string();
        let mut list = String::new();
        for (number, part) in (1..).zip(parts) {
            let sum = match algorithm {
                "CRC64NVME" => crc_fast::checksum(CrcAlgorithm::Crc64Nvme, &part).to_be_bytes().to_vec(),
                _ => crc_fast::crc32_iscsi(&part).to_be_bytes().to_vec(),
            };
            let (name, sum) = (algorithm.to_ascii_lowercase(), BASE64_STANDARD.encode(sum));
            let path = format!("{path}?partNumber={number}&uploadId={upload}");
            let header = format!("x-amz-checksum-{name}");
            let (status, headers, _) = self.ask(Method::PUT, &path, &[(&header, &sum)], part).await;
            let Some(etag) = headers.get("etag").and_then(|etag| etag.to_str().ok()) else {
                return Kept::No(status.as_u16());
            };
            let tag = format!("Checksum{algorithm}");
            list.push_str(&format!(
                "<Part><ETag>{etag}</ETag><{tag}>{sum}</{tag}><PartNumber>{number}</PartNumber></Part>"
            ));
        }
        let list = format!("<CompleteMultipartUpload>{list}</CompleteMultipartUpload>").into_bytes();
        let path = format!("{path}?uploadId={upload}");
        let (status, _, said) = self.ask(Method::POST, &path, &asks[1..], list).await;
        let done = status.is_success() && !text(&said).contains("<Error>");
        if done { Kept::Yes } else { Kept::No(status.as_u16()) }
    }

    async fn send(&self, method: Method, path: &str, headers: &[(&str, &str)], body: Vec<u8>) -> StatusCode {
        self.ask(method, path, headers, body).await.0
    }

    async fn ask(
        &self,
        method: Method,
        path: &str,
        headers: &[(&str, &str)],
        body: Vec<u8>,
    ) -> (StatusCode, HeaderMap, Bytes) {
        let url = format!("{}{path}", self.endpoint());
        let mut request = Request::new(HttpRequestBody::from(body.clone()));
        *request.method_mut() = method;
        *request.uri_mut() = url.parse().unwrap();
        for (name, value) in headers {
            let name = HeaderName::try_from(*name).unwrap();
            request.headers_mut().insert(name, HeaderValue::from_str(value).unwrap());
        }
        let secret =
            |name: &str| self.secrets.iter().find(|(of, _)| *of == name).map(|(_, value)| value.clone());
        match self.scheme {
            "s3" => {
                let (key_id, secret_key) =
                    (secret("accessKeyId").unwrap(), secret("secretAccessKey").unwrap());
                let credential = AwsCredential { key_id, secret_key, token: None };
                AwsAuthorizer::new(&credential, "s3", REGION).try_authorize(&mut request, None).unwrap();
            }
            "az" => {
                request.headers_mut().insert("content-length", body.len().into());
                let key = AzureCredential::AccessKey(AzureAccessKey::try_new(ACCOUNT_KEY).unwrap());
                AzureAuthorizer::new(&key, ACCOUNT).try_authorize(&mut request).unwrap();
            }
            _ => {}
        }
        let (mut parts, _) = request.into_parts();
        // The client says nothing of an empty body, and Ceph wants to know.
        parts.headers.insert("content-length", body.len().into());
        let sent =
            self.client.request(parts.method, url).headers(parts.headers).body(body).send().await.unwrap();
        let (status, headers) = (sent.status(), sent.headers().clone());
        (status, headers, sent.bytes().await.unwrap_or_default())
    }
}

async fn moto() -> Real {
    let mut real = Real::start("moto", "s3", |port, _| testkit::servers::moto(port));
    real.secrets = vec![("accessKeyId", "id".into()), ("secretAccessKey", "secret".into())];
    // A line break.
    real.refuses = 1;
    real.tells_wrong = Some("CRC32C FULL_OBJECT");
    assert!(real.send(Method::PUT, &format!("/{BUCKET}"), &[], Vec::new()).await.is_success());
    real
}

async fn azurite() -> Real {
    let mut real = Real::start("azurite", "az", |port, dir| {
        let mut command = Command::new(program("azurite/node_modules/.bin/azurite-blob"));
        command.args([
            "--silent",
            "--disableTelemetry",
            "--blobHost",
            "127.0.0.1",
            "--blobPort",
            &port.to_string(),
            "--location",
        ]);
        command.arg(dir);
        command
    });
    real.account = Some(ACCOUNT);
    // Control characters are in its listing as they are, which is no XML; a backslash is a slash.
    real.breaks_at = &["\u{1}\u{7f}", "back\\slash"];
    real.secrets = vec![("accountName", ACCOUNT.into()), ("accountKey", ACCOUNT_KEY.into())];
    real.wrong = Some((vec![("accountKey", "d3Jvbmc=".into())], "check accountKey"));
    let container = format!("/{ACCOUNT}/{BUCKET}?restype=container");
    assert!(real.send(Method::PUT, &container, &[], Vec::new()).await.is_success());
    real
}

async fn fake_gcs() -> Real {
    let real = Real::start("fake-gcs-server", "gs", |port, _| {
        let mut command = Command::new(program("go/fake-gcs-server"));
        command.args([
            "-scheme",
            "http",
            "-host",
            "127.0.0.1",
            "-backend",
            "memory",
            "-port",
            &port.to_string(),
        ]);
        command
    });
    let body = format!("{{\"name\": \"{BUCKET}\"}}").into_bytes();
    let json = [("content-type", "application/json")];
    assert!(real.send(Method::POST, "/storage/v1/b?project=p", &json, body).await.is_success());
    real
}

impl Real {
    /// A server of S3 that looks at signatures, with a bucket.
    pub(crate) async fn with_bucket_and_keys(mut self) -> Self {
        let keys =
            |id: &str, secret: &str| vec![("accessKeyId", id.into()), ("secretAccessKey", secret.into())];
        self.secrets = keys(KEY_ID, SECRET_KEY);
        self.wrong = Some((keys(KEY_ID, "wrong"), "check secretAccessKey"));
        self.stranger = Some(keys("stranger", SECRET_KEY));
        let begun = Instant::now();
        let made = loop {
            let made = self.send(Method::PUT, &format!("/{BUCKET}"), &[], Vec::new()).await;
            // MinIO listens before it can do anything.
            if made != StatusCode::SERVICE_UNAVAILABLE || begun.elapsed() > Duration::from_secs(60) {
                break made;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        };
        assert!(made.is_success(), "{}: {made}", self.name);
        self
    }
}

/// S3 before a file system, whose temporary directory needs extended attributes.
async fn versitygw() -> Real {
    let real = Real::start("versitygw", "s3", |port, dir| {
        std::fs::create_dir(dir.join("root")).unwrap();
        let mut command = Command::new(program("versitygw/versitygw"));
        command.args(["--port", &format!("127.0.0.1:{port}"), "--access", KEY_ID, "--secret", SECRET_KEY]);
        // Without --keep-alive, as it comes: it closes each connection after one answer.
        command.args(["--quiet", "posix"]).arg(dir.join("root"));
        command
    });
    let mut real = real.with_bucket_and_keys().await;
    (real.looks_at_token, real.looks_at_region) = (true, true);
    // A control character is another in its listing.
    real.breaks_at = &["\u{1}\u{7f}"];
    real.below_a_file = Below::Refused;
    std::fs::create_dir(real.dir.path().join("root").join(BUCKET).join("made beside it")).unwrap();
    real.keyless = Some("made beside it");
    real
}

async fn minio() -> Real {
    let real = Real::start("minio", "s3", testkit::servers::minio);
    let mut real = real.with_bucket_and_keys().await;
    (real.looks_at_token, real.looks_at_region) = (true, true);
    real.below_a_file = Below::Hidden;
    real
}
