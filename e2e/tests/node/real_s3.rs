//! A server of S3 that somebody else wrote, beside a node: `scripts/stores` installs it.

use anyhow::{Context, Result};
use e2e::node::{BUCKET, Mounted, Node};
use object_store::ObjectStoreExt;
use object_store::aws::{AmazonS3, AmazonS3Builder};
use object_store::path::Path;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::Duration;
use tempfile::TempDir;
use testkit::process::Process;
use testkit::servers::{self, KEY_ID, REGION, SECRET_KEY};

const START: Duration = Duration::from_secs(60);

pub(crate) struct RealS3 {
    client: AmazonS3,
    endpoint: String,
    _process: Process,
    _dir: TempDir,
}

impl RealS3 {
    pub(crate) fn moto(node: &Node) -> Result<Self> {
        Self::start(node, "moto", |port, _| servers::moto(port))
    }

    pub(crate) fn minio(node: &Node) -> Result<Self> {
        Self::start(node, "minio", servers::minio)
    }

    fn start(
        node: &Node,
        name: &str,
        command: impl FnOnce(u16, &std::path::Path) -> std::process::Command,
    ) -> Result<Self> {
        let dir = tempfile::tempdir()?;
        // MinIO takes a directory for a bucket.
        fs::create_dir_all(dir.path().join("root").join(BUCKET))?;
        let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
        let said = File::create(dir.path().join("said"))?;
        let mut command = command(port, dir.path());
        command.stdout(said.try_clone()?).stderr(said);
        let mut process = Process::spawn(&mut command)?;
        // moto makes one for whoever asks. Either answers when it can work.
        let answers = || {
            let mut stream = TcpStream::connect(("127.0.0.1", port)).ok()?;
            let asks = format!(
                "PUT /{BUCKET} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
            );
            stream.write_all(asks.as_bytes()).ok()?;
            let mut answer = String::new();
            stream.read_to_string(&mut answer).ok()?;
            // 403 of MinIO, which looks at signatures.
            let status = answer.split(' ').nth(1)?;
            (status == "200" || status == "403").then_some(())
        };
        process.wait_until(START, answers).with_context(|| {
            format!("{name}: {}", fs::read_to_string(dir.path().join("said")).unwrap_or_default())
        })?;
        let endpoint = format!("http://127.0.0.1:{port}");
        // It makes a client of TLS, used or not.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let _entered = node.runtime().enter();
        let client = AmazonS3Builder::new()
            .with_endpoint(&endpoint)
            .with_allow_http(true)
            .with_bucket_name(BUCKET)
            .with_region(REGION)
            .with_access_key_id(KEY_ID)
            .with_secret_access_key(SECRET_KEY)
            .build()?;
        Ok(Self { client, endpoint, _process: process, _dir: dir })
    }

    /// A new volume in it that can be written to, at a new pod.
    pub(crate) fn workspace(
        &self,
        node: &mut Node,
        name: &str,
        prefix: &str,
        more: &[(&str, &str)],
    ) -> Result<Mounted> {
        let source = format!("s3://{BUCKET}/{prefix}");
        let own = [("source", source.as_str()), ("endpoint", &self.endpoint), ("region", REGION)];
        let parameters = node.parameters("", &[&own, more].concat());
        let secrets = [("accessKeyId", KEY_ID), ("secretAccessKey", SECRET_KEY)];
        node.workspace_of(name, parameters, &secrets)
    }

    /// What it keeps of a key.
    pub(crate) fn read(&self, node: &Node, key: &str) -> Result<Vec<u8>> {
        let read = async {
            let found = self.client.get(&Path::parse(key)?).await?;
            Ok(found.bytes().await?.to_vec())
        };
        node.runtime().block_on(read)
    }
}
