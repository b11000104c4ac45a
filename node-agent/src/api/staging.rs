//! What `millpond staging` asks.

use super::ms;
use crate::staging::{Inspected, Looked, Readable, StagedFile, StagedState, lies_at_or_below};
use crate::volumes::Volumes;
use link::{Refusal, RefusalKind};
use proto::agent::v1 as pb;
use std::sync::Arc;
use std::time::{Duration, SystemTime};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Response, Status};
use volume::VolumeId;

type Stream<T> = Result<Response<ReceiverStream<Result<T, Status>>>, Status>;

/// Messages that wait for a client who is slow.
const QUEUE: usize = 4;
/// Of one page: a path has up to 1,024 bytes at a store, and a message at most 4 MiB.
const FILES_A_PAGE: usize = 500;
/// Between two messages of an upload.
const PROGRESS: Duration = Duration::from_millis(500);
/// A person may leave it for a night, and no longer.
const UPLOAD_LIMIT: Duration = Duration::from_secs(24 * 3600);
const ERRORS_MAX: usize = 10;

fn volume(id: &str) -> Result<VolumeId, Status> {
    VolumeId::parse(id).map_err(|error| Status::invalid_argument(error.to_string()))
}

fn status(refusal: Refusal) -> Status {
    let Refusal { kind, message } = refusal;
    match kind {
        RefusalKind::Invalid => Status::invalid_argument(message),
        RefusalKind::Denied => Status::permission_denied(message),
        RefusalKind::NotFound => Status::not_found(message),
        RefusalKind::Unavailable => Status::unavailable(message),
        RefusalKind::Conflict => Status::failed_precondition(message),
        RefusalKind::Internal => Status::internal(message),
    }
}

fn absent(id: &VolumeId) -> Status {
    Status::not_found(format!("volume {id} has no staging area on this node: see `millpond staging list`"))
}

/// As a person may write them: no slash at either end.
fn trimmed(paths: Vec<Vec<u8>>) -> Result<Vec<Vec<u8>>, Status> {
    let trim = |path: Vec<u8>| {
        let from = path.iter().position(|byte| *byte != b'/').unwrap_or(path.len());
        let to = path.iter().rposition(|byte| *byte != b'/').map_or(from, |last| last + 1);
        match path[from..to] {
            [] => Err(Status::invalid_argument("a path is empty: leave it out to mean all of the volume")),
            ref path => Ok(path.to_vec()),
        }
    };
    paths.into_iter().map(trim).collect()
}

fn shown(file: &StagedFile) -> pb::StagedFile {
    pb::StagedFile {
        path: file.path.clone(),
        inode: file.ino,
        bytes: file.size,
        state: match file.state {
            StagedState::Waiting => "waiting",
            StagedState::Conflict => "conflict",
            StagedState::Unlinked => "unlinked",
        }
        .to_owned(),
        data: file.data().unwrap_or_default(),
        since_ms: ms(file.since),
        opens: file.opens,
    }
}

fn summary(area: &Inspected) -> pb::StagingArea {
    let failure = area.failure.as_ref();
    pb::StagingArea {
        volume_id: area.volume.to_string(),
        source: area.source.clone().unwrap_or_default(),
        mounts: area.mounts as u32,
        files: area.waiting.files as u64,
        bytes: area.waiting.bytes,
        conflicts: area.waiting.conflicts as u64,
        oldest_ms: area.oldest.map_or(0, ms),
        failed_ms: failure.map_or(0, |failure| ms(failure.at)),
        failure: failure
            .map(|failure| format!("{}: {}", String::from_utf8_lossy(&failure.path), failure.why))
            .unwrap_or_default(),
        problem: area.problem.clone().unwrap_or_default(),
        described: area.is_described,
        directory: area.dir.display().to_string(),
        sending: area.is_open,
    }
}

pub(super) async fn list(volumes: &Arc<Volumes>, request: pb::ListStagingRequest) -> Stream<pb::StagingPage> {
    let limit = volumes.staging_limit();
    let ids = match request.volume_id.as_str() {
        "" => volumes.staging.volumes(limit).await.map_err(Status::unavailable)?,
        id => vec![volume(id)?],
    };
    let (sender, receiver) = mpsc::channel(QUEUE);
    let volumes = volumes.clone();
    tokio::spawn(async move {
        let one = !request.volume_id.is_empty();
        for id in ids {
            let area = match volumes.staging.inspect(&id, limit).await {
                Looked::Area(area) => area,
                Looked::Absent if one => {
                    let _ = sender.send(Err(absent(&id))).await; // nobody listens any more
                    return;
                }
                Looked::Absent => continue,
            };
            let mut page = pb::StagingPage { area: Some(summary(&area)), files: Vec::new() };
            for files in area.files.chunks(FILES_A_PAGE).filter(|_| request.files) {
                page.files = files.iter().map(shown).collect();
                if sender.send(Ok(std::mem::take(&mut page))).await.is_err() {
                    return; // nobody listens any more
                }
            }
            if page.area.is_some() && sender.send(Ok(page)).await.is_err() {
                return;
            }
        }
    });
    Ok(Response::new(ReceiverStream::new(receiver)))
}

pub(super) async fn read(volumes: &Arc<Volumes>, request: pb::ReadStagingRequest) -> Stream<pb::StagedPiece> {
    let (id, paths) = (volume(&request.volume_id)?, trimmed(request.paths)?);
    let readable = volumes.staging.readable(&id, volumes.staging_limit()).await;
    let readable = readable.map_err(Status::unavailable)?.ok_or_else(|| absent(&id))?;
    ensure_all(&readable.files, &paths)?;
    let (sender, receiver) = mpsc::channel(QUEUE);
    tokio::spawn(async move {
        let is_wanted = |file: &&StagedFile| file.state != StagedState::Unlinked && file.is_of(&paths);
        for file in readable.files.iter().filter(is_wanted) {
            if send_file(&readable, file, &sender).await.is_none() {
                return; // nobody listens any more
            }
        }
    });
    Ok(Response::new(ReceiverStream::new(receiver)))
}

/// A path that leads to nothing is a mistake, and is said before anything is done.
fn ensure_all(files: &[StagedFile], paths: &[Vec<u8>]) -> Result<(), Status> {
    let is_there = |path: &&Vec<u8>| files.iter().any(|file| lies_at_or_below(&file.path, path));
    match paths.iter().find(|path| !is_there(path)) {
        Some(path) => Err(Status::not_found(format!(
            "nothing waits at or below {:?}: paths are below the volume's source, as `millpond staging list --files` shows them",
            String::from_utf8_lossy(path)
        ))),
        None => Ok(()),
    }
}

/// None: nobody listens any more.
async fn send_file(
    readable: &Readable,
    file: &StagedFile,
    sender: &mpsc::Sender<Result<pb::StagedPiece, Status>>,
) -> Option<()> {
    use pb::staged_piece::Piece;
    let send = async |piece| sender.send(Ok(pb::StagedPiece { piece: Some(piece) })).await.ok();
    send(Piece::File(shown(file))).await?;
    let read = async {
        if !file.is_here {
            return Ok(Err("the store has its bytes: only its name, owner or time waits".to_owned()));
        }
        let mut reading = match readable.open(file.ino).await {
            Ok(reading) => reading,
            Err(why) => return Ok(Err(why)),
        };
        loop {
            match readable.next(&mut reading).await {
                Ok(Some((offset, bytes))) => {
                    send(Piece::Bytes(pb::StagedBytes { offset, bytes })).await.ok_or(())?;
                }
                Ok(None) => return Ok(readable.end(&reading).await),
                Err(why) => return Ok(Err(why)),
            }
        }
    };
    let end = match read.await {
        Ok(Ok(end)) => pb::StagedEnd {
            size: end.size,
            modified_ns: end.modified_ns,
            changed: end.changed,
            failure: String::new(),
            missing: file.missing,
        },
        Ok(Err(failure)) => pb::StagedEnd { failure, ..pb::StagedEnd::default() },
        Err(()) => return None,
    };
    send(Piece::End(end)).await
}

pub(super) async fn discard(
    volumes: &Arc<Volumes>,
    request: pb::DiscardStagingRequest,
) -> Result<Response<pb::DiscardStagingResponse>, Status> {
    let (id, paths) = (volume(&request.volume_id)?, trimmed(request.paths)?);
    let limit = volumes.staging_limit();
    match volumes.staging.inspect(&id, limit).await {
        Looked::Absent => return Err(absent(&id)),
        Looked::Area(area) => {
            if let Some(why) = area.problem {
                return Err(Status::unavailable(format!(
                    "the staging area of {id} cannot be looked into: {why}"
                )));
            }
            ensure_all(&area.files, &paths)?;
        }
    }
    // To its end, whoever waits for it.
    let (volumes, of) = (volumes.clone(), id.clone());
    let discarding = tokio::spawn(async move { volumes.staging.discard(&of, &paths, limit).await });
    let discarded = discarding.await.map_err(|e| Status::internal(e.to_string()))?;
    let discarded = discarded.map_err(|why| Status::unavailable(format!("staging area of {id}: {why}")))?;
    let left = discarded.left.into_iter().map(|(path, why)| pb::StagedLeft { path, why });
    Ok(Response::new(pb::DiscardStagingResponse {
        files: discarded.files,
        bytes: discarded.bytes,
        left: left.take(FILES_A_PAGE).collect(),
    }))
}

pub(super) async fn upload(
    volumes: &Arc<Volumes>,
    request: pb::UploadStagingRequest,
) -> Stream<pb::UploadProgress> {
    let id = volume(&request.volume_id)?;
    let secrets = request.secrets.into_iter().collect();
    let sendable = volumes.sendable(&id, &secrets).await.map_err(status)?;
    let (sender, receiver) = mpsc::channel(QUEUE);
    tokio::spawn(async move {
        let (area, begun) = (sendable.area(), SystemTime::now());
        let progress = |done: bool| {
            let waiting = area.waiting();
            let failed = area.failures_since(begun).into_iter().rev().take(ERRORS_MAX);
            let told = |path: &[u8], why: &str| format!("{}: {why}", String::from_utf8_lossy(path));
            pb::UploadProgress {
                files_left: waiting.files as u64,
                bytes_left: waiting.bytes,
                conflicts: waiting.conflicts as u64,
                done,
                errors: failed.map(|failure| told(&failure.path, &failure.why)).collect(),
            }
        };
        let sending = area.send_all(UPLOAD_LIMIT);
        tokio::pin!(sending);
        loop {
            tokio::select! {
                _ = &mut sending => break,
                () = tokio::time::sleep(PROGRESS) => {}
            }
            if sender.send(Ok(progress(false))).await.is_err() {
                return; // nobody listens any more: what is on its way is taken up by the next attempt
            }
        }
        let _ = sender.send(Ok(progress(true))).await; // nobody listens any more
    });
    Ok(Response::new(ReceiverStream::new(receiver)))
}
