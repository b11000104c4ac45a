//! Which requests the agent executes at this moment, so that its death counts against them, as a worker's does.
//!
//! A request waits for the agent, and the agent for the store, nearly all of the time: a thousand may wait when an
//! agent is killed, and none of them has done it. Only while a thread of the agent's runs on behalf of a request does
//! the request's id stand in a *seat* in the connection's memory:
//!
//! ```text
//!            a thread runs for it          that thread aborts
//!  no seat ─────────────────────► seated ─────────────────────► guilty
//!     ▲                              │
//!     └──────────────────────────────┘ it waits, or is done
//! ```
//!
//! What an agent leaves in the seats is read by the one that takes over, in `collect`. A build that knows no seats
//! leaves them as they are: an id in them is never given out again, so at worst one death is counted late.

use super::{Inflight, SEATS_AT};
use crate::sync::AtomicU64;
use fuse_abi::header::INT_REQ_BIT;
use std::cell::{Cell, RefCell};
use std::future::Future;
use std::pin::Pin;
use std::ptr;
use std::sync::atomic::{
    AtomicUsize,
    Ordering::{AcqRel, Relaxed, Release},
};
use std::sync::{Arc, Once};
use std::task::{Context, Poll};

/// As many threads may run for one connection at once; a request for which there is no seat is not found out.
pub(super) const SEATS: usize = 32;
/// Two threads share a cache line at most.
pub(super) const SEAT_BYTES: usize = 32;
/// No id of a request has it.
const GUILTY: u64 = INT_REQ_BIT;

thread_local! {
    static CURRENT: RefCell<Option<Behalf>> = const { RefCell::new(None) };
    /// For the signal handler, which may not touch more than this.
    static SEAT: Cell<*const AtomicU64> = const { Cell::new(ptr::null()) };
}

/// The request on whose behalf something is done.
#[derive(Clone, Debug)]
pub struct Behalf {
    inflight: Arc<Inflight>,
    unique: u64,
}

impl Behalf {
    /// None: of no request, but of a worker's own question.
    pub fn of(inflight: &Arc<Inflight>, unique: u64) -> Option<Self> {
        (unique != 0 && unique & GUILTY == 0).then(|| Self { inflight: inflight.clone(), unique })
    }

    #[cfg(test)]
    #[cfg(not(loom))]
    pub(super) fn unique(&self) -> u64 {
        self.unique
    }

    /// For whom this thread runs.
    pub fn current() -> Option<Self> {
        CURRENT.with_borrow(Clone::clone)
    }

    pub(super) fn run<T>(&self, work: impl FnOnce() -> T) -> T {
        let seated = Seated::take(self);
        let done = work();
        drop(seated);
        done
    }
}

/// A future whose every step is made on behalf of `behalf`; while it waits, no thread executes a request for it.
pub fn on_behalf<F: Future + Send + 'static>(behalf: Option<Behalf>, future: F) -> OnBehalf<F::Output> {
    OnBehalf { behalf, future: Box::pin(future) }
}

/// A future that goes on, elsewhere, for whom this thread runs.
pub fn carry<F: Future + Send + 'static>(future: F) -> OnBehalf<F::Output> {
    on_behalf(Behalf::current(), future)
}

/// The same for a job of another thread.
pub fn carry_job<T>(job: impl FnOnce() -> T) -> impl FnOnce() -> T {
    let behalf = Behalf::current();
    move || match behalf {
        Some(behalf) => behalf.run(job),
        None => job(),
    }
}

pub struct OnBehalf<T> {
    behalf: Option<Behalf>,
    future: Pin<Box<dyn Future<Output = T> + Send>>,
}

impl<T> Future for OnBehalf<T> {
    type Output = T;
    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<T> {
        let Self { behalf, future } = self.get_mut();
        match behalf {
            Some(behalf) => behalf.run(|| future.as_mut().poll(context)),
            None => future.as_mut().poll(context),
        }
    }
}

/// This thread's place at one request; what it did before goes on when this is dropped.
struct Seated {
    before: Option<Behalf>,
    seat_before: *const AtomicU64,
    /// Keeps the memory that `SEAT` points into.
    behalf: Behalf,
    seat: Option<usize>,
}

impl Seated {
    fn take(behalf: &Behalf) -> Self {
        let behalf = behalf.clone();
        let seat = behalf.inflight.sit(behalf.unique);
        let word = seat.map_or(ptr::null(), |seat| ptr::from_ref(behalf.inflight.seat(seat)));
        let before = CURRENT.replace(Some(behalf.clone()));
        Self { before, seat_before: SEAT.replace(word), behalf, seat }
    }
}

impl Drop for Seated {
    fn drop(&mut self) {
        SEAT.set(self.seat_before);
        CURRENT.set(self.before.take());
        if let Some(seat) = self.seat {
            self.behalf.inflight.seat(seat).store(0, Release);
        }
    }
}

/// From now on an abort of this process (a panic that is not survived, an allocation that fails) is marked as the doing
/// of the request for which the aborting thread runs.
pub fn mark_aborts() {
    static INSTALLED: Once = Once::new();
    /// The handler of aborts before ours: the last words of the log.
    static PREVIOUS: AtomicUsize = AtomicUsize::new(libc::SIG_DFL);
    INSTALLED.call_once(|| {
        extern "C" fn mark(signal: libc::c_int) {
            let seat = SEAT.get();
            if !seat.is_null() {
                // SAFETY: it points into memory that this thread's `Seated` keeps mapped; an atomic operation is
                // async-signal-safe.
                unsafe { (*seat).fetch_or(GUILTY, Relaxed) };
            }
            match PREVIOUS.load(Relaxed) {
                libc::SIG_DFL | libc::SIG_IGN => {
                    // SAFETY: raise(3) is async-signal-safe. The handler is reset already (SA_RESETHAND): the signal
                    // ends the process when this returns, also one that another process has sent.
                    unsafe { libc::raise(signal) };
                }
                previous => {
                    // SAFETY: sigaction(2) gave it as a handler that takes the signal's number alone. It is what waits
                    // for the log, and ends the process.
                    let previous: extern "C" fn(libc::c_int) = unsafe { std::mem::transmute(previous) };
                    previous(signal);
                }
            }
        }
        let handler: extern "C" fn(libc::c_int) = mark;
        // SAFETY: a zeroed sigaction is one without flags and with an empty mask; the handler does what a handler may.
        let installed = unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = handler as libc::sighandler_t;
            action.sa_flags = libc::SA_RESETHAND;
            let mut before: libc::sigaction = std::mem::zeroed();
            // Known before the handler can run: a thread that aborts in between is not marked.
            let asked = libc::sigaction(libc::SIGABRT, ptr::null(), &mut before);
            if asked == 0 && before.sa_flags & libc::SA_SIGINFO == 0 {
                PREVIOUS.store(before.sa_sigaction, Relaxed);
            }
            libc::sigaction(libc::SIGABRT, &action, ptr::null_mut())
        };
        debug_assert_eq!(installed, 0, "SIGABRT can be handled");
    });
}

impl Inflight {
    pub(super) fn sit(&self, unique: u64) -> Option<usize> {
        static THREADS: AtomicUsize = AtomicUsize::new(0);
        thread_local! { static FIRST: usize = THREADS.fetch_add(1, Relaxed) % SEATS; }
        let first = FIRST.with(|first| *first);
        (0..SEATS)
            .map(|k| (first + k) % SEATS)
            .find(|&seat| self.seat(seat).compare_exchange(0, unique, AcqRel, Relaxed).is_ok())
    }

    pub(super) fn seat(&self, seat: usize) -> &AtomicU64 {
        assert!(seat < SEATS, "callers got the number from sit");
        self.memory.u64(SEATS_AT + seat * SEAT_BYTES)
    }

    /// What the agent that is gone was executing does not count: it was asked to end.
    pub fn vacate(&self) {
        (0..SEATS).for_each(|seat| self.seat(seat).store(0, Release));
    }

    /// As the signal handler does.
    #[cfg(test)]
    #[cfg(not(loom))]
    pub(super) fn confess(&self, unique: u64) {
        let seat = (0..SEATS).find(|&seat| self.seat(seat).load(Relaxed) == unique).expect("it is executed");
        self.seat(seat).fetch_or(GUILTY, Relaxed);
    }

    /// For whom the agent that is gone was running, with the guilty ones, if there are any, alone; the seats are free.
    pub(super) fn take_seats(&self) -> (Vec<u64>, bool) {
        let seated: Vec<u64> =
            (0..SEATS).map(|seat| self.seat(seat).swap(0, AcqRel)).filter(|word| *word != 0).collect();
        let guilty: Vec<u64> =
            seated.iter().filter(|word| *word & GUILTY != 0).map(|word| word & !GUILTY).collect();
        match guilty.is_empty() {
            true => (seated, false),
            false => (guilty, true),
        }
    }
}
