//! A worker is introduced to a connection; and, for an agent that may take over, tried on one that another agent serves.

use super::spawn::{Spawner, Worker};
use crate::child_log::words;
use inflight::Inflight;
use link::budget;
use link::worker::{Assign, FromWorker, Mode, ToWorker, recv};
use link::{MAX_FDS, MAX_MESSAGE, PacketError};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

/// From Assign to Answered.
const ANSWER_LIMIT: Duration = budget::WORKER_ANSWERS.time;

/// Gives a connection to a worker and waits for its INIT answer.
pub(super) fn introduce(
    worker: &Worker,
    assign: Assign,
    device: BorrowedFd<'_>,
    shared: BorrowedFd<'_>,
    roots: &[OwnedFd],
) -> Result<(Vec<u8>, Mode), String> {
    let text = |e: PacketError| e.to_string();
    let mut fds = vec![device, shared];
    let (now, later) = roots.split_at(roots.len().min(MAX_FDS - 2));
    fds.extend(now.iter().map(AsFd::as_fd));
    worker.send(&ToWorker::Assign(Box::new(assign)), &fds).map_err(text)?;
    for some in later.chunks(MAX_FDS) {
        let fds: Vec<BorrowedFd<'_>> = some.iter().map(AsFd::as_fd).collect();
        worker.send(&ToWorker::Roots, &fds).map_err(text)?;
    }
    worker.socket.set_recv_timeout(Some(ANSWER_LIMIT)).map_err(|e| e.to_string())?;
    let mut buffer = vec![0; MAX_MESSAGE];
    match recv::<FromWorker>(&worker.socket, &mut buffer).map_err(text)?.0 {
        FromWorker::Answered { init_reply, mode } => Ok((init_reply, mode)),
        FromWorker::Failed { why } => Err(words(&why)),
        other => Err(words(&format!("expected Answered, got {other:?}"))),
    }
}

/// Could a worker of this build take this connection up? One of them goes as far as it can without reading a request: it
/// reads the metadata store, tests the device, and answers INIT, in shared memory of its own. Then it is killed.
pub(crate) fn dry_run(
    spawner: &Spawner,
    assign: Assign,
    device: BorrowedFd<'_>,
    shared: BorrowedFd<'_>,
) -> Result<(), String> {
    let text = |e: &dyn std::fmt::Display| e.to_string();
    let real = Inflight::map(shared).map_err(|e| text(&e))?;
    let init = real.init().ok_or("its shared memory holds no INIT request")?;
    let reply = real.init_reply().ok_or("its shared memory holds no INIT reply")?;
    let copy = Inflight::create(real.room()).map_err(|e| text(&e))?;
    let inflight = Inflight::map(&copy).map_err(|e| text(&e))?;
    inflight.set_init(&init).and_then(|()| inflight.set_init_reply(&reply)).map_err(|e| text(&e))?;
    let worker = spawner.take().map_err(|e| text(&e))?;
    let assign = Assign { takeover: true, roots: 0, ..assign };
    introduce(&worker, assign, device, copy.as_fd(), &[]).map(drop)
}
