//! The `csi-plugin` binary: arguments, log, signals.

use anyhow::Context;
use clap::Parser;
use csi_plugin::config::{Arguments, LogFormat};
use mounts::{Helper, Kernel, Linux, LinuxPaths};
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use tracing_subscriber::EnvFilter;

/// Exit status of wrong arguments, as clap's own.
const USAGE: u8 = 2;

/// The client library logs every failed request as an error; whoever asked says it better, and once.
const LOG_DEFAULT: &str = "info,kube_client::client::builder=off";

fn main() -> anyhow::Result<ExitCode> {
    // The disposable processes that touch a mount are this binary too.
    mounts::run_if_asked();

    let config = match Arguments::parse().check() {
        Ok(config) => config,
        Err(error) => {
            eprintln!("csi-plugin: {error}");
            return Ok(ExitCode::from(USAGE));
        }
    };
    let filter = EnvFilter::try_from_env("MILLPOND_LOG").unwrap_or_else(|_| EnvFilter::new(LOG_DEFAULT));
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    match config.log_format {
        LogFormat::Json => log.json().init(),
        LogFormat::Text => log.with_ansi(false).init(),
    }
    if let Some(cleanup) = &config.cleanup {
        return Ok(csi_plugin::cleanup::run(cleanup));
    }
    let kernel: Arc<dyn Kernel> = match &config.node {
        Some(node) => {
            let paths = LinuxPaths { fusectl: node.fusectl_dir.clone(), ..LinuxPaths::default() };
            if node.mount_fusectl {
                mounts::fusectl::ensure(&paths.fusectl, &paths.device).context("--mount-fusectl")?;
                // Without it mounts keep the kernel's readahead, which costs streaming readers a third.
                if let Err(error) = mounts::sysfs::make_writable(Path::new("/sys")) {
                    tracing::warn!(%error, "/sys stays read-only");
                }
            }
            if std::fs::metadata(&paths.fusectl).is_err() {
                tracing::warn!(
                    directory = %paths.fusectl.display(),
                    "no FUSE control directory: load the fuse module and mount fusectl there, or waiting requests cannot be counted"
                );
            }
            Arc::new(Linux::new(paths, node.cache_roots.clone(), Helper::own()))
        }
        None => Arc::new(Linux::new(LinuxPaths::default(), Vec::new(), Helper::own())),
    };

    csi_plugin::server::run_until_signal(config, kernel)?;
    Ok(ExitCode::SUCCESS)
}
