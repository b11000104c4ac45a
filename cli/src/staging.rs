//! `millpond staging`: what was written on this node and is not in its store yet.

mod export;
mod secret;

use crate::client::{Client, connect};
use crate::output::{Format, ago, bytes, print, print_json, remark, table};
use anyhow::{Context, Result, ensure};
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use clap::Subcommand;
use indicatif::{ProgressBar, ProgressStyle};
use proto::agent::v1 as pb;
use serde_json::json;
use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

#[derive(clap::Args)]
pub(crate) struct Options {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Staging areas of this node, whether a mount has them or not.
    List(ListOptions),
    /// Copy staged files into a directory. Nothing there is overwritten.
    Export(ExportOptions),
    /// Drop what waits: what the store has counts from then on.
    Discard(DiscardOptions),
    /// Bring what waits into the store now, also where no mount has the volume.
    Upload(UploadOptions),
}

#[derive(clap::Args)]
struct ListOptions {
    /// This one alone.
    volume: Option<String>,
    /// Each file that waits.
    #[arg(long)]
    files: bool,
    #[arg(long, short, value_enum, default_value_t)]
    output: Format,
}

#[derive(clap::Args)]
struct ExportOptions {
    volume: String,
    /// Where the files go, under the names that they have in the volume. Made if it is not there.
    #[arg(long, value_name = "DIR")]
    to: PathBuf,
    /// Files, or directories with all that waits in them, below the volume's source. Default: all.
    paths: Vec<OsString>,
}

#[derive(clap::Args)]
struct DiscardOptions {
    volume: String,
    /// Files, or directories with all that waits in them, below the volume's source. Default: all.
    paths: Vec<OsString>,
    /// Really: the bytes are gone then.
    #[arg(long)]
    yes: bool,
}

#[derive(clap::Args)]
struct UploadOptions {
    volume: String,
    /// Credentials, where no mount has the volume: a JSON object with the names of its Kubernetes secret ("accessKeyId" and so
    /// on), or the secret itself as `kubectl get secret -o json` shows it; - for standard input.
    #[arg(long, value_name = "FILE")]
    secret_file: Option<PathBuf>,
    /// No bar, only the result.
    #[arg(long, short)]
    quiet: bool,
}

pub(crate) async fn run(api: &Path, options: Options) -> Result<ExitCode> {
    match options.command {
        Command::List(options) => list(&mut connect(api).await?, options).await,
        Command::Export(options) => {
            export::run(&mut connect(api).await?, options.volume, &options.to, bytes_of(options.paths)).await
        }
        Command::Discard(options) => discard(&mut connect(api).await?, options).await,
        Command::Upload(options) => {
            // Read before anything else: standard input may be a pipe of somebody who waits.
            let secrets = options.secret_file.as_deref().map(secret::read).transpose()?.unwrap_or_default();
            upload(&mut connect(api).await?, options, secrets).await
        }
    }
}

fn bytes_of(paths: Vec<OsString>) -> Vec<Vec<u8>> {
    paths.into_iter().map(OsString::into_vec).collect()
}

/// What the agent says, and of one that knows nothing of staging areas what to do.
fn said(status: &tonic::Status) -> anyhow::Error {
    match status.code() {
        tonic::Code::Unimplemented => {
            anyhow::anyhow!("this node's agent is of a version that has no such command: upgrade it")
        }
        tonic::Code::Unknown | tonic::Code::Unavailable if status.message() == "transport error" => {
            anyhow::anyhow!("the agent has ended in the middle: see its log, and run this again")
        }
        _ => anyhow::anyhow!("{}", status.message()),
    }
}

/// A name as a terminal may show it: whatever a program has called its files.
pub(crate) fn shown(path: &[u8]) -> String {
    let mut text = String::new();
    for chunk in path.utf8_chunks() {
        for c in chunk.valid().chars() {
            match c {
                '\'' | '"' => text.push(c),
                _ => text.extend(c.escape_debug()),
            }
        }
        chunk.invalid().iter().for_each(|byte| text += &format!("\\x{byte:02x}"));
    }
    text
}

/// An area, and its files if they were asked for.
pub(crate) struct Listed {
    pub(crate) area: pb::StagingArea,
    files: Vec<pb::StagedFile>,
}

impl Listed {
    /// Something waits, or may.
    pub(crate) fn is_noteworthy(&self) -> bool {
        self.area.files > 0 || !self.area.problem.is_empty()
    }
}

/// Of one volume, or of all. None: this node's agent does not know of staging areas.
pub(crate) async fn areas(agent: &mut Client, volume: &str, files: bool) -> Result<Option<Vec<Listed>>> {
    let request = pb::ListStagingRequest { volume_id: volume.to_owned(), files };
    let mut stream = match agent.list_staging(request).await {
        Ok(stream) => stream.into_inner(),
        Err(status) if status.code() == tonic::Code::Unimplemented => return Ok(None),
        Err(status) => return Err(said(&status)),
    };
    let mut all: Vec<Listed> = Vec::new();
    while let Some(page) = stream.message().await.map_err(|status| said(&status))? {
        all.extend(page.area.map(|area| Listed { area, files: Vec::new() }));
        let last = all.last_mut().context("the agent tells of files without their area: report this")?;
        last.files.extend(page.files);
    }
    Ok(Some(all))
}

async fn known(agent: &mut Client, volume: &str, files: bool) -> Result<Vec<Listed>> {
    let known = areas(agent, volume, files).await?;
    known.ok_or_else(|| said(&tonic::Status::unimplemented("")))
}

async fn list(agent: &mut Client, options: ListOptions) -> Result<ExitCode> {
    let all = known(agent, options.volume.as_deref().unwrap_or_default(), options.files).await?;
    match options.output {
        Format::Json => {
            print_json(&all.iter().map(|listed| as_json(listed, options.files)).collect())?;
        }
        Format::Table => {
            print(as_table(&all))?;
            for Listed { area, files } in all.iter().filter(|_| options.files) {
                print(format_args!("\n{} in {}", area.volume_id, area.directory))?;
                let mut t = table(&["path", "state", "size", "waits", "open", "inode", "bytes in"]);
                for f in files {
                    t.add_row([
                        shown(&f.path),
                        f.state.clone(),
                        bytes(f.bytes),
                        ago(f.since_ms),
                        f.opens.to_string(),
                        f.inode.to_string(),
                        if f.data.is_empty() { "the store".to_owned() } else { f.data.clone() },
                    ]);
                }
                print(t)?;
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

pub(crate) fn as_table<'l>(all: impl IntoIterator<Item = &'l Listed>) -> comfy_table::Table {
    let mut t =
        table(&["volume", "source", "mounts", "files", "bytes", "conflicts", "oldest", "last failure"]);
    for Listed { area, .. } in all {
        t.add_row([
            area.volume_id.clone(),
            area.source.clone(),
            mounts(area),
            area.files.to_string(),
            bytes(area.bytes),
            area.conflicts.to_string(),
            if area.oldest_ms == 0 { "-".to_owned() } else { ago(area.oldest_ms) },
            trouble(area),
        ]);
    }
    t
}

fn mounts(area: &pb::StagingArea) -> String {
    match (area.mounts, area.sending) {
        (0, false) if area.files == 0 => "none".to_owned(),
        (0, false) => "none: NOT SENT".to_owned(),
        (0, true) => "none, sent still".to_owned(),
        (mounts, _) => mounts.to_string(),
    }
}

fn trouble(area: &pb::StagingArea) -> String {
    match (area.problem.as_str(), area.failure.as_str()) {
        ("", "") => "-".to_owned(),
        ("", failure) => format!("{} ({})", shown(failure.as_bytes()), ago(area.failed_ms)),
        (problem, _) => problem.to_owned(),
    }
}

pub(crate) fn as_json(Listed { area, files }: &Listed, with_files: bool) -> serde_json::Value {
    let mut value = json!({
        "volumeId": area.volume_id, "source": area.source, "mounts": area.mounts, "sending": area.sending,
        "files": area.files, "bytes": area.bytes, "conflicts": area.conflicts, "oldestMs": area.oldest_ms,
        "failedMs": area.failed_ms, "failure": area.failure, "problem": area.problem,
        "described": area.described, "directory": area.directory,
    });
    if with_files {
        let files = files.iter().map(|f| {
            json!({
                // As text where it is text; the bytes say it exactly.
                "path": String::from_utf8_lossy(&f.path), "pathBase64": BASE64_STANDARD.encode(&f.path),
                "state": f.state, "bytes": f.bytes, "sinceMs": f.since_ms, "opens": f.opens,
                "inode": f.inode, "data": f.data,
            })
        });
        value["staged"] = files.collect();
    }
    value
}

async fn discard(agent: &mut Client, options: DiscardOptions) -> Result<ExitCode> {
    let paths = bytes_of(options.paths);
    if !options.yes {
        let all = known(agent, &options.volume, true).await?;
        let files = all.iter().flat_map(|listed| &listed.files);
        let wanted: Vec<&pb::StagedFile> = files.filter(|file| is_of(&file.path, &paths)).collect();
        for file in &wanted {
            print(format_args!("{}  {}  {}", file.state, bytes(file.bytes), shown(&file.path)))?;
        }
        remark(format_args!(
            "millpond: nothing was discarded: these {} files would be gone for ever. Copy them with `millpond staging export`, or \
             add --yes",
            wanted.len()
        ));
        return Ok(ExitCode::FAILURE);
    }
    let request = pb::DiscardStagingRequest { volume_id: options.volume, paths };
    let done = agent.discard_staging(request).await.map_err(|status| said(&status))?.into_inner();
    print(format_args!("{} files, {} discarded", done.files, bytes(done.bytes)))?;
    for left in &done.left {
        remark(format_args!("  {} stays: {}", shown(&left.path), left.why));
    }
    Ok(if done.left.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// As the agent has it: slashes at either end mean nothing.
fn is_of(path: &[u8], paths: &[Vec<u8>]) -> bool {
    let trim = |top: &[u8]| {
        let from = top.iter().position(|byte| *byte != b'/').unwrap_or(top.len());
        let to = top.iter().rposition(|byte| *byte != b'/').map_or(from, |last| last + 1);
        top[from..to].to_vec()
    };
    let is_below = |top: &Vec<u8>| {
        let rest = path.strip_prefix(&trim(top)[..]);
        rest.is_some_and(|rest| rest.is_empty() || rest.starts_with(b"/"))
    };
    paths.is_empty() || paths.iter().any(is_below)
}

async fn upload(agent: &mut Client, options: UploadOptions, secrets: secret::Secrets) -> Result<ExitCode> {
    let request = pb::UploadStagingRequest { volume_id: options.volume, secrets: secrets.0 };
    let mut stream = agent.upload_staging(request).await.map_err(|status| said(&status))?.into_inner();
    let bar = if options.quiet { ProgressBar::hidden() } else { ProgressBar::new(0) };
    let style = "{spinner} [{bar:30}] {bytes}/{total_bytes} {msg}";
    bar.set_style(ProgressStyle::with_template(style).context("progress style")?.progress_chars("=> "));
    let (mut last, mut most) = (pb::UploadProgress::default(), 0);
    while let Some(progress) = stream.message().await.map_err(|status| said(&status))? {
        most = most.max(progress.bytes_left);
        bar.set_length(most);
        bar.set_position(most - progress.bytes_left);
        bar.set_message(format!("{} files left", progress.files_left));
        last = progress;
    }
    bar.finish_and_clear();
    ensure!(last.done, "the agent ended before everything was sent: see its log, and run this again");
    for error in &last.errors {
        remark(format_args!("  {}", shown(error.as_bytes())));
    }
    if last.files_left == 0 {
        print("all is in the store")?;
        return Ok(ExitCode::SUCCESS);
    }
    if last.conflicts > 0 {
        remark(format_args!(
            "millpond: somebody else has changed {} of them in the store: see `millpond staging list --files`, then export and \
             discard what is here",
            last.conflicts
        ));
    }
    print(format_args!("{} files, {} are still not in the store", last.files_left, bytes(last.bytes_left)))?;
    Ok(ExitCode::FAILURE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_name_speaks_to_the_terminal() {
        assert_eq!(shown("a b/ä'\"".as_bytes()), "a b/ä'\"");
        assert_eq!(shown(b"\x1b[2J\n\xff"), "\\u{1b}[2J\\n\\xff");
        assert_eq!(shown("x\u{202e}y".as_bytes()), "x\\u{202e}y");
    }

    #[test]
    fn a_path_is_itself_or_a_directory_above() {
        let of = |path: &str, top: &str| is_of(path.as_bytes(), &[top.as_bytes().to_vec()]);
        assert!(of("a/b", "a") && of("a/b", "/a/") && of("a/b", "a/b") && is_of(b"x", &[]));
        assert!(!of("ab", "a") && !of("a", "a/b"));
    }
}
