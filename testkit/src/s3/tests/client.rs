//! A client that does nothing by itself: no retries, no pool, one connection for each request.

use super::super::oss::{hex, hmac};
use super::super::{Bucket, Config, Key, Memory, Server};
use bytes::Bytes;
use http::{HeaderMap, Request};
use hyper::body::Body;
use hyper_util::rt::TokioIo;
use s3s::dto::{Timestamp, TimestampFormat};
use sha2::{Digest, Sha256};
use std::future::poll_fn;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::time::{Duration, Instant, SystemTime};
use tokio::net::TcpStream;

/// Small parts, and nobody signs.
pub(super) fn config(bucket: impl Bucket) -> Config {
    Config { anonymous: true, part_min: 4, ..Config::default() }.bucket("bucket", bucket)
}

pub(super) async fn served(config: Config) -> (Server, Client) {
    let server = Server::start(config).await.unwrap();
    let client = Client { address: server.address(), key: None };
    (server, client)
}

pub(super) async fn memory() -> (Server, Client) {
    served(config(Memory::default())).await
}

#[derive(Clone)]
pub(super) struct Client {
    address: SocketAddr,
    key: Option<Key>,
}

#[derive(Debug)]
pub(super) struct Reply {
    pub(super) status: u16,
    pub(super) headers: HeaderMap,
    pub(super) body: Bytes,
}

impl Reply {
    pub(super) fn text(&self) -> &str {
        std::str::from_utf8(&self.body).unwrap()
    }

    pub(super) fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(|value| value.to_str().unwrap())
    }

    pub(super) fn etag(&self) -> String {
        self.header("etag").expect("an ETag").to_owned()
    }

    /// Every value of this element, in order.
    pub(super) fn all(&self, tag: &str) -> Vec<String> {
        let (open, close) = (format!("<{tag}>"), format!("</{tag}>"));
        let rest = self.text().split(&open).skip(1);
        rest.map(|rest| rest.split(&close).next().unwrap().replace("&quot;", "\"")).collect()
    }

    pub(super) fn one(&self, tag: &str) -> String {
        self.all(tag).first().unwrap_or_else(|| panic!("no {tag} in {self:?}")).clone()
    }

    pub(super) fn is(&self, status: u16, code: &str) -> bool {
        assert_eq!((self.status, self.one("Code").as_str()), (status, code), "{self:?}");
        true
    }

    pub(super) fn ok(self) -> Self {
        assert!((200..300).contains(&self.status), "{self:?}");
        self
    }
}

impl Client {
    pub(super) fn signing(&self, id: &str, secret: &str) -> Self {
        let key = Key::new(id, secret, super::super::Rights::All);
        Self { address: self.address, key: Some(key) }
    }

    pub(super) async fn send(
        &self,
        method: &str,
        target: &str,
        headers: &[(&str, &str)],
        body: impl Into<Bytes>,
    ) -> io::Result<Reply> {
        let body = body.into();
        let mut request = Request::builder().method(method).uri(target);
        request = request.header("host", self.address.to_string()).header("content-length", body.len());
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        for (name, value) in self.signature(method, target) {
            request = request.header(name, value);
        }
        let request = request.body(s3s::Body::from(body)).unwrap();
        let stream = TcpStream::connect(self.address).await?;
        let (mut sender, connection) =
            hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.map_err(io::Error::other)?;
        let connection = tokio::spawn(connection);
        let answer = sender.send_request(request).await.map_err(io::Error::other)?;
        let (parts, mut body) = answer.into_parts();
        let mut bytes = Vec::new();
        while let Some(frame) = poll_fn(|context| Pin::new(&mut body).poll_frame(context)).await {
            if let Ok(data) = frame.map_err(io::Error::other)?.into_data() {
                bytes.extend_from_slice(&data);
            }
        }
        connection.abort();
        Ok(Reply { status: parts.status.as_u16(), headers: parts.headers, body: bytes.into() })
    }

    pub(super) async fn put(&self, key: &str, headers: &[(&str, &str)], body: &str) -> Reply {
        self.send("PUT", &format!("/bucket/{key}"), headers, body.to_owned()).await.unwrap()
    }
    pub(super) async fn get(&self, key: &str, headers: &[(&str, &str)]) -> Reply {
        self.send("GET", &format!("/bucket/{key}"), headers, "").await.unwrap()
    }
    pub(super) async fn head(&self, key: &str, headers: &[(&str, &str)]) -> Reply {
        self.send("HEAD", &format!("/bucket/{key}"), headers, "").await.unwrap()
    }
    pub(super) async fn delete(&self, key: &str, headers: &[(&str, &str)]) -> Reply {
        self.send("DELETE", &format!("/bucket/{key}"), headers, "").await.unwrap()
    }
    pub(super) async fn copy(&self, from: &str, to: &str, headers: &[(&str, &str)]) -> Reply {
        let source = format!("/bucket/{from}");
        let headers = [headers, &[("x-amz-copy-source", &*source)]].concat();
        self.put(to, &headers, "").await
    }

    /// The upload's id.
    pub(super) async fn create(&self, key: &str, headers: &[(&str, &str)]) -> String {
        let created = self.send("POST", &format!("/bucket/{key}?uploads"), headers, "").await.unwrap().ok();
        created.one("UploadId")
    }
    pub(super) async fn part(
        &self,
        (key, id): (&str, &str),
        number: i32,
        headers: &[(&str, &str)],
        body: &str,
    ) -> Reply {
        self.put(&format!("{key}?partNumber={number}&uploadId={id}"), headers, body).await
    }
    pub(super) async fn complete(
        &self,
        (key, id): (&str, &str),
        parts: &[(i32, &str)],
        headers: &[(&str, &str)],
    ) -> Reply {
        let part = |(number, etag): &(i32, &str)| {
            format!("<Part><PartNumber>{number}</PartNumber><ETag>{etag}</ETag></Part>")
        };
        let parts: String = parts.iter().map(part).collect();
        let body = format!("<CompleteMultipartUpload>{parts}</CompleteMultipartUpload>");
        self.send("POST", &format!("/bucket/{key}?uploadId={id}"), headers, body).await.unwrap()
    }

    /// As AWS documents version 4 of it; the payload is not signed.
    fn signature(&self, method: &str, target: &str) -> Vec<(&'static str, String)> {
        let Some(key) = &self.key else { return Vec::new() };
        let mut time = Vec::new();
        Timestamp::from(SystemTime::now()).format(TimestampFormat::DateTime, &mut time).unwrap();
        // 2026-11-26T05:45:00.123Z → 20261126T054500Z
        let time: String = String::from_utf8(time).unwrap().replace(['-', ':'], "")[..15].to_owned() + "Z";
        let (day, payload) = (&time[..8], "UNSIGNED-PAYLOAD");
        let (path, query) = target.split_once('?').unwrap_or((target, ""));
        let query =
            if query.is_empty() || query.contains('=') { query.to_owned() } else { format!("{query}=") };
        let names = "host;x-amz-content-sha256;x-amz-date";
        let host = self.address;
        let canonical = format!(
            "{method}\n{path}\n{query}\nhost:{host}\nx-amz-content-sha256:{payload}\nx-amz-date:{time}\n\n{names}\n{payload}"
        );
        let scope = format!("{day}/us-east-1/s3/aws4_request");
        let to_sign =
            format!("AWS4-HMAC-SHA256\n{time}\n{scope}\n{}", hex(&Sha256::digest(canonical.as_bytes())));
        let day = hmac(format!("AWS4{}", key.secret).as_bytes(), day);
        let signing = hmac(&hmac(&hmac(&day, "us-east-1"), "s3"), "aws4_request");
        let signature = hex(&hmac(&signing, &to_sign));
        let authorization = format!(
            "AWS4-HMAC-SHA256 Credential={}/{scope}, SignedHeaders={names}, Signature={signature}",
            key.id
        );
        vec![
            ("x-amz-date", time.clone()),
            ("x-amz-content-sha256", payload.into()),
            ("authorization", authorization),
        ]
    }
}

/// Until `is_there`, which the server brings about by itself.
pub(super) async fn eventually(mut is_there: impl AsyncFnMut() -> bool) {
    let begun = Instant::now();
    while !is_there().await {
        assert!(begun.elapsed() < Duration::from_secs(20), "it never came");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}
