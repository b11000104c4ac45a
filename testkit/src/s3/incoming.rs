//! The request's body on its way in: counted, and broken off or held up where the fault script says so.
//!
//! It is here before anything is executed or refused. A real store may answer while it still reads; but a client that
//! is still writing then sees the answer or a broken connection, as it happens, and tests want the same each time.

use super::body::Socket;
use super::stats::Counters;
use crate::faults::{Decision, Faults};
use hyper::body::{Body, Bytes, Incoming};
use std::future::poll_fn;
use std::io;
use std::pin::Pin;

/// Err: the client went away, or the script resets the connection.
pub(super) async fn receive(
    body: Incoming,
    op: &str,
    decision: &Decision,
    faults: &Faults,
    counters: &Counters,
    socket: Socket,
) -> io::Result<Bytes> {
    let is_data = matches!(op, "PutObject" | "UploadPart");
    let length = body.size_hint().exact().unwrap_or(0);
    let place = (length as f64 * decision.place) as usize;
    let mut stalls = decision.stall_upload;
    let mut body = Frames(body);
    let mut bytes = Vec::with_capacity(length as usize);
    loop {
        if decision.reset_upload && bytes.len() >= place {
            socket.reset_on_close();
            return Err(io::Error::other("scripted reset"));
        }
        if let Some(time) = stalls.take_if(|_| bytes.len() >= length as usize / 2) {
            faults.stall(time).await;
        }
        match body.next().await? {
            // As it came, without a copy.
            Some(data) if data.len() as u64 == length && bytes.is_empty() => {
                count(counters, is_data, &data);
                return Ok(data);
            }
            Some(data) => {
                count(counters, is_data, &data);
                bytes.extend_from_slice(&data);
            }
            None => return Ok(bytes.into()),
        }
    }
}

fn count(counters: &Counters, is_data: bool, data: &Bytes) {
    if is_data {
        counters.lock().bytes_put += data.len() as u64;
    }
}

struct Frames(Incoming);

impl Frames {
    async fn next(&mut self) -> io::Result<Option<Bytes>> {
        loop {
            let frame = poll_fn(|context| Pin::new(&mut self.0).poll_frame(context)).await;
            let Some(frame) = frame.transpose().map_err(io::Error::other)? else { return Ok(None) };
            if let Ok(data) = frame.into_data() {
                return Ok(Some(data));
            }
        }
    }
}

/// All of a short body.
pub(super) async fn short(body: Incoming) -> io::Result<Vec<u8>> {
    let (mut body, mut bytes) = (Frames(body), Vec::new());
    while let Some(data) = body.next().await? {
        bytes.extend_from_slice(&data);
        if bytes.len() > 1 << 20 {
            return Err(io::Error::other("longer than 1 MiB"));
        }
    }
    Ok(bytes)
}
