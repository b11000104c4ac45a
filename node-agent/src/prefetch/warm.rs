//! Brings files into the cache on request, with progress.

use crate::serve::Server;
use crate::supervisor::Mount;
use crate::volumes::Volumes;
use crate::volumes::scope::Scope;
use cache::data::ReadOptions;
use cache::meta::{self, Attributes, Lookup};
use futures::StreamExt;
use futures::stream::FuturesUnordered;
use link::Cause;
use proto::agent::v1::WarmProgress;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::mpsc;
use tonic::Status;

/// Files in flight; each may have several GETs.
const FILES_AT_ONCE: usize = 16;
const ERRORS_SHOWN: usize = 10;
const TELL_EVERY: Duration = Duration::from_millis(100);

pub(crate) type Progress = mpsc::Sender<Result<WarmProgress, Status>>;

/// Warms `paths`; ends early when the listener goes away.
pub(crate) async fn warm(volumes: &Volumes, paths: &[String], sender: Progress) {
    let mut run = Run { said: Instant::now(), state: WarmProgress::default(), sender };
    if let Err(status) = run.all(volumes, paths).await {
        let _ = run.sender.send(Err(status)).await;
    }
}

struct Run {
    said: Instant,
    state: WarmProgress,
    sender: Progress,
}

/// A file that is to be brought in.
struct Wanted {
    scope: Arc<Scope>,
    attributes: Attributes,
    options: ReadOptions,
    shown: String,
}

impl Run {
    async fn all(&mut self, volumes: &Volumes, paths: &[String]) -> Result<(), Status> {
        let mut wanted = Vec::new();
        for path in paths {
            let (mount, rest) = volumes.find(Path::new(path)).ok_or_else(|| {
                Status::not_found(format!(
                    "{path} is not below the target of a mounted volume (see `millpond status`)"
                ))
            })?;
            self.collect(&mount, &rest, path, &mut wanted).await?;
        }
        self.state.listed = true;
        self.say(true).await?;
        let mut running = FuturesUnordered::new();
        let mut waiting = wanted.into_iter();
        loop {
            while running.len() < FILES_AT_ONCE
                && let Some(next) = waiting.next()
            {
                running.push(bring_in(next));
            }
            let Some((shown, bytes, done)) = running.next().await else { break };
            match done {
                Ok(()) => {
                    self.state.files_done += 1;
                    self.state.bytes_done = self.state.bytes_done.saturating_add(bytes);
                }
                Err(why) => {
                    self.state.failed += 1;
                    if self.state.errors.len() < ERRORS_SHOWN {
                        self.state.errors.push(format!("{shown}: {why}"));
                    }
                }
            }
            self.say(false).await?;
        }
        self.state.done = true;
        self.say(true).await
    }

    /// Walks a directory breadth first, or takes the one file.
    async fn collect(
        &mut self,
        mount: &Arc<Mount>,
        rest: &Path,
        shown: &str,
        wanted: &mut Vec<Wanted>,
    ) -> Result<(), Status> {
        let scope = &mount.scope;
        let freshness = mount.spec.parameters.freshness;
        let options = Server::read_options(mount);
        let mut ino = meta::ROOT;
        let mut found: Option<Attributes> = None;
        for name in rest.components() {
            let name = name.as_os_str().as_bytes();
            scope.lookup(ino, name, freshness).await.map_err(|c| status(shown, c))?;
            match scope.names.lookup(ino, name) {
                Ok(Lookup::Found { attributes, .. }) => {
                    ino = attributes.ino;
                    found = Some(attributes);
                }
                _ => {
                    return Err(Status::not_found(format!(
                        "{shown}: no such file or directory in the source"
                    )));
                }
            }
        }
        let take = |me: &mut Self, attributes: Attributes, shown: String, wanted: &mut Vec<Wanted>| {
            me.state.files_total += 1;
            me.state.bytes_total = me.state.bytes_total.saturating_add(attributes.size);
            wanted.push(Wanted { scope: scope.clone(), attributes, options, shown });
        };
        if let Some(attributes) = found.filter(|a| a.kind != meta::Kind::Directory) {
            if attributes.kind == meta::Kind::File {
                take(self, attributes, shown.to_owned(), wanted);
            }
            return Ok(());
        }
        let mut directories = vec![(ino, shown.trim_end_matches('/').to_owned())];
        while let Some((dir, shown)) = directories.pop() {
            scope.list(dir, freshness).await.map_err(|c| status(&shown, c))?;
            let mut files = Vec::new();
            let read = scope.names.read_dir(dir, None, &mut |name, attributes| {
                let child = format!("{shown}/{}", String::from_utf8_lossy(name));
                match attributes.kind {
                    meta::Kind::Directory => directories.push((attributes.ino, child)),
                    meta::Kind::File => files.push((attributes.clone(), child)),
                    meta::Kind::Symlink => {}
                }
                true
            });
            read.map_err(|e| Status::internal(e.to_string()))?;
            for (attributes, child) in files {
                take(self, attributes, child, wanted);
            }
            self.say(false).await?;
        }
        Ok(())
    }

    async fn say(&mut self, now: bool) -> Result<(), Status> {
        if now || self.said.elapsed() >= TELL_EVERY {
            self.said = Instant::now();
            let gone = |_| Status::cancelled("the caller went away");
            self.sender.send(Ok(self.state.clone())).await.map_err(gone)?;
        }
        Ok(())
    }
}

async fn bring_in(wanted: Wanted) -> (String, u64, Result<(), String>) {
    let Wanted { scope, attributes, options, shown } = wanted;
    let done = match scope.current(&attributes, options) {
        Ok(file) => file.whole().await.map_err(|e| e.to_string()),
        Err(cause) => Err(status("", cause).message().to_owned()),
    };
    (shown, attributes.size, done)
}

fn status(shown: &str, cause: Cause) -> Status {
    let text = match cause {
        Cause::NotFound | Cause::NotADirectory => {
            return Status::not_found(format!("{shown}: not in the source"));
        }
        Cause::Denied => "the source refuses the credentials",
        Cause::Stale => "changed at the source meanwhile: try again",
        Cause::Unavailable => "the source did not answer in time: see the agent's log",
        Cause::Internal => "internal error: see the agent's log",
    };
    Status::unavailable(format!("{shown}: {text}"))
}
