//! Questions from the socket, answers to it. Everything that waits here is bounded: answers by a short queue, the bytes
//! of a read by what its reader has granted.

use crate::failure::{failure, of};
use crate::file_system::{FileSystem, apart};
use crate::listing::{Listings, told};
use crate::reading::{Readers, Reading};
use bytes::{Buf, Bytes};
use hdfs::{
    Answer, DATA_BYTES_MAX, Failure, FailureKind, Frames, FromHelper, QUESTIONS_MAX, Question, ToHelper,
};
use std::collections::HashMap;
use std::os::unix::net::UnixStream as Socket;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::sync::{Semaphore, mpsc};
use tokio::task::AbortHandle;

/// Frames that wait for the agent to read.
const QUEUE: usize = 16;

struct Serving {
    fs: Arc<FileSystem>,
    listings: Listings,
    readers: Arc<Readers>,
    running: Mutex<HashMap<u64, Running>>,
    out: mpsc::Sender<(Bytes, Bytes)>,
}

struct Running {
    task: Option<AbortHandle>,
    granted: Arc<Semaphore>,
}

/// Until the agent closes its end.
pub(crate) async fn serve(
    socket: Socket,
    mut frames: Frames<ToHelper>,
    fs: Arc<FileSystem>,
) -> Result<(), String> {
    let text = |e: std::io::Error| format!("the agent's socket: {e}");
    socket.set_nonblocking(true).map_err(text)?;
    let (mut from, mut to) = UnixStream::from_std(socket).map_err(text)?.into_split();
    let (out, mut queue) = mpsc::channel::<(Bytes, Bytes)>(QUEUE);
    let writing = tokio::spawn(async move {
        while let Some((head, body)) = queue.recv().await {
            if to.write_all_buf(&mut head.chain(body)).await.is_err() {
                return; // the agent is gone, which the reading end is told, too
            }
        }
    });
    let (listings, readers, running) = Default::default();
    let serving = Arc::new(Serving { fs, listings, readers, running, out });
    loop {
        while let Some(frame) = frames.take().map_err(|e| format!("from the agent: {e}"))? {
            serving.take(frame.message)?;
        }
        match from.read_buf(frames.space()).await {
            Ok(0) => break,
            Ok(_) => {}
            Err(e) => return Err(text(e)),
        }
    }
    writing.abort();
    Ok(())
}

impl Serving {
    fn take(self: &Arc<Self>, message: ToHelper) -> Result<(), String> {
        match message {
            ToHelper::Configure(_) => return Err("a second configuration".into()),
            ToHelper::More { id, bytes } => {
                if let Some(running) = self.running().get(&id) {
                    running.granted.add_permits(bytes as usize);
                }
            }
            ToHelper::Cancel { id } => {
                let running = self.running().remove(&id);
                running.and_then(|running| running.task).iter().for_each(AbortHandle::abort);
            }
            ToHelper::Ask { id, patience_ms, question } => {
                let mut running = self.running();
                if running.len() == QUESTIONS_MAX || running.contains_key(&id) {
                    return Err("more questions than there are slots".into());
                }
                let window = if let Question::Read { window, .. } = &question { *window } else { 0 };
                let granted = Arc::new(Semaphore::new(window as usize));
                running.insert(id, Running { task: None, granted: granted.clone() });
                let (me, patience) = (self.clone(), Duration::from_millis(patience_ms.into()));
                let task = tokio::spawn(async move { me.run(id, question, patience, granted).await });
                if let Some(running) = running.get_mut(&id) {
                    running.task = Some(task.abort_handle());
                }
            }
        }
        Ok(())
    }

    async fn run(&self, id: u64, question: Question, patience: Duration, granted: Arc<Semaphore>) {
        let answer = self.answer(id, question, patience, &granted).await;
        if answer.as_ref().is_err_and(|why| why.kind == FailureKind::Silent) {
            self.listings.forget();
        }
        self.running().remove(&id);
        self.say(&FromHelper::Answer { id, answer }, Bytes::new()).await;
    }

    async fn answer(
        &self,
        id: u64,
        question: Question,
        patience: Duration,
        granted: &Semaphore,
    ) -> Result<Answer, Failure> {
        match question {
            Question::Stat { path } => {
                let lent = self.fs.lend();
                let client = lent.client.clone();
                let found = apart(patience, async move { client.get_file_info(&path).await }).await;
                let found = found.inspect_err(|why| {
                    if why.kind == FailureKind::Silent {
                        self.fs.doubt(lent.generation);
                    }
                })?;
                match found.as_ref().map(told).map_err(of) {
                    Ok(status) => Ok(Answer::Status(Some(status))),
                    Err(Failure { kind: FailureKind::NotFound, .. }) => Ok(Answer::Status(None)),
                    Err(why) => Err(why),
                }
            }
            Question::List { path, start } => {
                self.listings.page(&self.fs, &path, start, patience).await.map(Answer::Page)
            }
            Question::Read { path, version, start, end, window } => {
                let piece_max = DATA_BYTES_MAX.min(window as usize);
                if piece_max == 0 {
                    return Err(failure(FailureKind::Invalid, "a read that nothing may be sent of"));
                }
                let (fs, readers) = (self.fs.clone(), self.readers.clone());
                let reading = Reading { fs, readers, path, version, patience };
                let mut rest = reading.begin(start..end).await?;
                while let Some(piece) = reading.next(&mut rest).await? {
                    self.send(id, piece, piece_max, granted).await;
                }
                Ok(Answer::End)
            }
        }
    }

    async fn send(&self, id: u64, mut piece: Bytes, piece_max: usize, granted: &Semaphore) {
        while !piece.is_empty() {
            let part = piece.split_to(piece.len().min(piece_max));
            // Never closed.
            if let Ok(permits) = granted.acquire_many(part.len() as u32).await {
                permits.forget();
            }
            self.say(&FromHelper::Data { id }, part).await;
        }
    }

    async fn say(&self, message: &FromHelper, body: Bytes) {
        // Pages and pieces are cut to what a frame can hold.
        let head = hdfs::encode_before(message, &body).expect("bounded where it is made");
        let _ = self.out.send((head, body)).await; // the agent is gone: so are we, soon
    }

    fn running(&self) -> std::sync::MutexGuard<'_, HashMap<u64, Running>> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
