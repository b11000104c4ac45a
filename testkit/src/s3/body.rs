//! The answer's body on its way out: counted, and broken where the fault script says so.

use super::stats::Counters;
use crate::faults::{Decision, Faults};
use hyper::body::{Body, Bytes, Frame, SizeHint};
use std::future::Future;
use std::io;
use std::os::fd::{BorrowedFd, RawFd};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

/// The socket of one connection, for the one thing that hyper has no call for: a reset.
#[derive(Clone, Copy, Debug)]
pub(super) struct Socket(pub(super) RawFd);

impl Socket {
    /// Closing the connection will send RST instead of FIN.
    pub(super) fn reset_on_close(self) {
        // SAFETY: the service and the bodies that call this are owned by the connection's future, as is the stream
        // that owns the descriptor; hyper drops the stream last.
        let fd = unsafe { BorrowedFd::borrow_raw(self.0) };
        let _ = rustix::net::sockopt::set_socket_linger(fd, Some(Duration::ZERO));
    }
}

enum Act {
    Reset,
    Close,
    Stall(Option<Duration>),
}

pub(super) struct Answer {
    inner: s3s::Body,
    counters: Arc<Counters>,
    get: bool,
    faults: Faults,
    socket: Socket,
    sent: u64,
    /// Bytes after which `act` happens.
    act: Option<(u64, Act)>,
    /// The body ends here, whatever the inner one still has.
    limit: u64,
    stalling: Option<Pin<Box<dyn Future<Output = ()> + Send>>>,
    left_over: Bytes,
    flushed: bool,
}

/// hyper throws away what it has not yet written when a body fails. Long enough that it writes, and the client reads.
const FLUSH: Duration = Duration::from_millis(10);

impl Answer {
    pub(super) fn new(
        inner: s3s::Body,
        length: Option<u64>,
        get: bool,
        decision: &Decision,
        faults: &Faults,
        socket: Socket,
        counters: Arc<Counters>,
    ) -> Self {
        let known = length.unwrap_or(0);
        let place = (known as f64 * decision.place) as u64;
        let act = if decision.reset_body {
            Some((place, Act::Reset))
        } else if decision.truncate {
            Some((place, Act::Close))
        } else {
            decision.stall_body.map(|time| (place, Act::Stall(time)))
        };
        // The caller has put the shorter length into the header.
        let limit = if decision.wrong_length { known.saturating_sub(1) } else { u64::MAX };
        Self {
            inner,
            counters,
            get,
            faults: faults.clone(),
            socket,
            sent: 0,
            act: act.filter(|_| known > 0),
            limit,
            stalling: None,
            left_over: Bytes::new(),
            flushed: false,
        }
    }

    fn count(&mut self, bytes: u64) {
        self.sent += bytes;
        let mut stats = self.counters.lock();
        stats.bytes_sent += bytes;
        if self.get {
            stats.bytes_get += bytes;
        }
    }
}

impl Drop for Answer {
    fn drop(&mut self) {
        self.counters.lock().in_flight -= 1;
    }
}

impl Body for Answer {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, io::Error>>> {
        let this = &mut *self;
        loop {
            if let Some(stall) = &mut this.stalling {
                if stall.as_mut().poll(context).is_pending() {
                    return Poll::Pending;
                }
                this.stalling = None;
            }
            if this.sent >= this.limit {
                return Poll::Ready(None);
            }
            match &this.act {
                Some((place, Act::Reset | Act::Close)) if this.sent >= *place && !this.flushed => {
                    this.flushed = true;
                    this.stalling = Some(Box::pin(tokio::time::sleep(FLUSH)));
                    continue;
                }
                Some((place, act)) if this.sent >= *place => match act {
                    Act::Reset => {
                        this.socket.reset_on_close();
                        return Poll::Ready(Some(Err(io::Error::other("scripted reset"))));
                    }
                    Act::Close => return Poll::Ready(Some(Err(io::Error::other("scripted truncation")))),
                    Act::Stall(time) => {
                        let (faults, time) = (this.faults.clone(), *time);
                        this.stalling = Some(Box::pin(async move { faults.stall(time).await }));
                        this.act = None;
                        continue;
                    }
                },
                _ => {}
            }
            let mut piece = std::mem::take(&mut this.left_over);
            if piece.is_empty() {
                match Pin::new(&mut this.inner).poll_frame(context) {
                    Poll::Pending => return Poll::Pending,
                    Poll::Ready(None) => return Poll::Ready(None),
                    Poll::Ready(Some(Err(e))) => return Poll::Ready(Some(Err(io::Error::other(e)))),
                    Poll::Ready(Some(Ok(frame))) => match frame.into_data() {
                        Ok(data) => piece = data,
                        Err(frame) => return Poll::Ready(Some(Ok(frame))),
                    },
                }
            }
            // Up to the next thing that happens; the rest of the piece waits.
            let stop = this.act.as_ref().map_or(u64::MAX, |(place, _)| *place).min(this.limit);
            let room = usize::try_from(stop - this.sent).unwrap_or(usize::MAX).min(piece.len());
            this.left_over = piece.split_off(room);
            if !piece.is_empty() {
                this.count(piece.len() as u64);
                return Poll::Ready(Some(Ok(Frame::data(piece))));
            }
        }
    }

    // Known lengths are in the Content-Length header already; a hint that a fault makes untrue would let hyper
    // correct the very lie that a test asked for.
    fn size_hint(&self) -> SizeHint {
        SizeHint::default()
    }
}
