//! `s3-server`: the testkit's S3 server as a process of its own, for benchmarks, demos and real-process tests.

use anyhow::{Context, Result, bail};
use clap::Parser;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;
use testkit::faults::Script;
use testkit::s3::{
    ACCESS_KEY, ACCOUNT_KEY, Azure, Config, Directory, Index, Key, Lies, Memory, Oss, Protocol, Rights,
    SECRET_KEY, SERVICE_ACCOUNT_KEY, Server, Synthetic, Web,
};

#[derive(Debug, Parser)]
#[command(
    about = "An S3 server (or another kind of store) for tests: signatures checked, faults scripted, requests counted"
)]
struct Options {
    #[arg(long, default_value = "127.0.0.1:0")]
    listen: SocketAddr,
    /// Serve this directory tree.
    #[arg(long, group = "backend")]
    dir: Option<PathBuf>,
    /// Serve an empty bucket in memory (the default).
    #[arg(long, group = "backend")]
    memory: bool,
    /// Serve COUNT objects of SIZE bytes with computed content.
    #[arg(long, group = "backend", num_args = 2, value_names = ["COUNT", "SIZE"])]
    synthetic: Option<Vec<u64>>,
    /// Names of synthetic objects; {n} is the number, {dir} its directory.
    #[arg(long, default_value = "file-{n}", requires = "synthetic")]
    pattern: String,
    /// Synthetic objects in one {dir}.
    #[arg(long, default_value_t = 1000, requires = "synthetic")]
    per_dir: u64,
    /// How old the index of --dir may be when a listing uses it, milliseconds.
    #[arg(long, default_value_t = 5000)]
    rescan_ms: u64,
    #[arg(long, default_value = "bucket")]
    bucket: String,
    #[arg(long, default_value = ACCESS_KEY)]
    access_key: String,
    #[arg(long, default_value = SECRET_KEY)]
    secret_key: String,
    /// Also answer requests without a signature.
    #[arg(long)]
    anonymous: bool,
    /// Tell checksums as the store does that it stands for.
    #[arg(long)]
    checksums: bool,
    /// Speak OSS instead of S3, as this region.
    #[arg(long, value_name = "REGION", group = "protocol")]
    oss: Option<String>,
    /// Speak Google's JSON interface instead of S3. --access-key is the address of a service account, its key the testkit's.
    #[arg(long, group = "protocol")]
    gcs: bool,
    /// Speak Azure's protocol for blobs instead of S3, as this account, its key the testkit's.
    #[arg(long, value_name = "ACCOUNT", group = "protocol")]
    azure: Option<String>,
    /// Be a web server whose directories are told so. --access-key and --secret-key are name and password.
    #[arg(long, value_name = "INDEX", group = "protocol")]
    web: Option<Index>,
    /// Hold at most so many bytes, in objects and in parts of uploads; a write beyond is answered with 507.
    #[arg(long, value_name = "BYTES")]
    bytes_max: Option<u64>,
    /// Least bytes of each part of a multipart upload but the last.
    #[arg(long, value_name = "BYTES", default_value_t = 5 << 20)]
    part_min: u64,
    /// Most bytes that one copy copies.
    #[arg(long, value_name = "BYTES", default_value_t = 5 << 30)]
    copy_max: u64,
    /// What the server gets wrong, JSON: {"ignores-if-match-on-put": true}. It knows ignores-if-match-on-put,
    /// ignores-if-none-match, ignores-if-match-on-delete, ignores-conditions-on-complete, no-checksums.
    #[arg(long, value_name = "JSON")]
    lies: Option<String>,
    /// A fault script: JSON, or @file.
    #[arg(long)]
    faults: Option<String>,
    /// Where to write the address (host:port) once the server listens.
    #[arg(long)]
    ready_file: Option<PathBuf>,
}

fn main() -> Result<()> {
    let options = Options::parse();
    let config = config(&options)?;
    tokio::runtime::Builder::new_multi_thread().enable_all().build()?.block_on(async {
        let server = Server::start(config).await.with_context(|| format!("listen on {}", options.listen))?;
        println!("{}", server.endpoint());
        if let Some(path) = &options.ready_file {
            testkit::process::write_ready_file(path, &server.address().to_string())?;
        }
        let mut terminate = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate())?;
        tokio::select! {
            () = server.run() => bail!("the acceptor ended"),
            _ = terminate.recv() => Ok(()),
            _ = tokio::signal::ctrl_c() => Ok(()),
        }
    })
}

fn config(options: &Options) -> Result<Config> {
    let (protocol, secret) = match (&options.oss, options.gcs, &options.azure, options.web) {
        (Some(region), ..) => (Protocol::Oss(Oss { region: region.clone() }), options.secret_key.as_str()),
        (_, true, ..) => (Protocol::Gcs, SERVICE_ACCOUNT_KEY),
        (_, _, Some(account), _) => (Protocol::Azure(Azure { account: account.clone() }), ACCOUNT_KEY),
        (.., Some(index)) => (Protocol::Web(Web { index }), options.secret_key.as_str()),
        _ => (Protocol::S3, options.secret_key.as_str()),
    };
    let config = Config {
        listen: options.listen,
        anonymous: options.anonymous,
        checksums: options.checksums,
        keys: vec![Key::new(&options.access_key, secret, Rights::All)],
        protocol,
        part_min: options.part_min,
        copy_max: options.copy_max,
        bytes_max: options.bytes_max,
        lies: match &options.lies {
            Some(text) => serde_json::from_str(text).context("--lies does not say which")?,
            None => Lies::default(),
        },
        faults: match &options.faults {
            Some(text) => script(text)?,
            None => Script::default(),
        },
        ..Config::default()
    };
    Ok(match (&options.dir, options.synthetic.as_deref()) {
        (Some(dir), _) => {
            let dir = dir.canonicalize().with_context(|| format!("--dir {}", dir.display()))?;
            config.bucket(&options.bucket, Directory::new(dir, Duration::from_millis(options.rescan_ms)))
        }
        (None, Some(&[count, size])) => {
            let pattern = options.pattern.clone();
            config.bucket(&options.bucket, Synthetic { count, size, pattern, per_dir: options.per_dir })
        }
        (None, _) => config.bucket(&options.bucket, Memory::default()),
    })
}

fn script(text: &str) -> Result<Script> {
    let text = match text.strip_prefix('@') {
        Some(path) => std::fs::read_to_string(path).with_context(|| format!("--faults {path}"))?,
        None => text.to_owned(),
    };
    serde_json::from_str(&text).context("--faults is not a fault script")
}
