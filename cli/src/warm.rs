//! `millpond warm`: brings files into the cache and shows how far it has come.

use crate::client::connect;
use crate::output::{bytes, print, remark};
use anyhow::{Context, Result};
use indicatif::{ProgressBar, ProgressStyle};
use proto::agent::v1 as pb;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

#[derive(clap::Args)]
pub(crate) struct Options {
    /// Files or directories below the target of a mounted volume.
    #[arg(required = true)]
    paths: Vec<PathBuf>,
    /// No bar, only the result.
    #[arg(long, short)]
    quiet: bool,
}

pub(crate) async fn run(api: &Path, options: Options) -> Result<ExitCode> {
    let paths = options.paths.iter().map(|p| absolute(p)).collect::<Result<Vec<_>>>()?;
    let mut agent = connect(api).await?;
    let mut stream = agent
        .warm(pb::WarmRequest { paths })
        .await
        .map_err(|status| anyhow::anyhow!("{}", status.message()))?
        .into_inner();
    let bar = if options.quiet { ProgressBar::hidden() } else { ProgressBar::new(0) };
    let style = "{spinner} [{bar:30}] {bytes}/{total_bytes} {bytes_per_sec} {msg}";
    bar.set_style(ProgressStyle::with_template(style).context("progress style")?.progress_chars("=> "));
    let mut last = pb::WarmProgress::default();
    while let Some(progress) =
        stream.message().await.map_err(|status| anyhow::anyhow!("{}", status.message()))?
    {
        bar.set_length(progress.bytes_total);
        bar.set_position(progress.bytes_done);
        let more = if progress.listed { "" } else { " (still listing)" };
        bar.set_message(format!("{}/{} files{more}", progress.files_done, progress.files_total));
        last = progress;
    }
    bar.finish_and_clear();
    anyhow::ensure!(last.done, "the agent ended before everything was warm: see its log, and run this again");
    let cached = bytes(last.bytes_done);
    print(format_args!("{} of {} files, {cached} in the cache", last.files_done, last.files_total))?;
    for error in &last.errors {
        remark(format_args!("  {error}"));
    }
    if last.failed > 0 {
        remark(format_args!("{} files could not be brought in", last.failed));
        return Ok(ExitCode::FAILURE);
    }
    Ok(ExitCode::SUCCESS)
}

/// Made absolute by name only: resolving it would ask the mount.
pub(crate) fn absolute(path: &Path) -> Result<String> {
    let path = std::path::absolute(path).with_context(|| format!("path {}", path.display()))?;
    path.into_os_string().into_string().map_err(|p| anyhow::anyhow!("path {p:?} is not UTF-8"))
}
