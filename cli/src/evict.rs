//! `millpond evict`: drops cached data.

use crate::client::connect;
use crate::output::{bytes, print};
use crate::warm::absolute;
use anyhow::Result;
use proto::agent::v1 as pb;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

#[derive(clap::Args)]
pub(crate) struct Options {
    /// A file or directory below the target of a mounted volume.
    #[arg(required_unless_present = "all", conflicts_with = "all")]
    path: Option<PathBuf>,
    /// Everything that this node has cached.
    #[arg(long)]
    all: bool,
}

pub(crate) async fn run(api: &Path, options: Options) -> Result<ExitCode> {
    let path = options.path.as_deref().map(absolute).transpose()?.unwrap_or_default();
    let mut agent = connect(api).await?;
    let done = agent
        .evict(pb::EvictRequest { path, all: options.all })
        .await
        .map_err(|status| anyhow::anyhow!("{}", status.message()))?
        .into_inner();
    print(format_args!(
        "{} files, {} evicted (open files keep what they hold)",
        done.files,
        bytes(done.bytes)
    ))?;
    Ok(ExitCode::SUCCESS)
}
