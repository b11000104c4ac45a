//! Panics at places that a test chooses by their number: see `link::failpoint`.

use libc::{c_int, c_void, siginfo_t};
use link::failpoint;
use tracing::field::{Field, Visit};
use tracing::span;
use tracing_subscriber::layer::Context;
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::{Layer, filter};

/// SIGUSR2 with a number n (sigqueue(3)): this process panics at the n-th place that it passes from now on. Only where the
/// environment asks for it.
pub(crate) fn listen() {
    if !failpoint::panics_on_request() {
        return;
    }
    // SAFETY: all zeros is a valid sigaction; what matters is set below.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = arm as extern "C" fn(c_int, *mut siginfo_t, *mut c_void) as usize;
    action.sa_flags = libc::SA_SIGINFO | libc::SA_RESTART | libc::SA_ONSTACK;
    // SAFETY: the handler only stores a number.
    unsafe { libc::sigaction(libc::SIGUSR2, &action, std::ptr::null_mut()) };
}

extern "C" fn arm(_: c_int, info: *mut siginfo_t, _: *mut c_void) {
    // SAFETY: the kernel hands a valid siginfo to a handler with SA_SIGINFO.
    let n = unsafe { (*info).si_value() }.sival_ptr as usize as u32;
    failpoint::arm(n);
}

/// Every event and span, of whatever level and crate, is such a place.
pub(crate) fn places<S: tracing::Subscriber + for<'a> LookupSpan<'a>>() -> impl Layer<S> {
    Places.with_filter(filter::dynamic_filter_fn(|_, _| failpoint::is_armed()))
}

struct Places;

impl<S: tracing::Subscriber> Layer<S> for Places {
    fn on_new_span(&self, span: &span::Attributes<'_>, _: &span::Id, _: Context<'_, S>) {
        failpoint::pass(span.metadata().name());
    }
    fn on_event(&self, event: &tracing::Event<'_>, _: Context<'_, S>) {
        let mut what = Message(event.metadata().target().to_owned());
        event.record(&mut what);
        failpoint::pass(&what.0);
    }
}

/// Where it comes from and what it says.
struct Message(String);

impl Visit for Message {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        if field.name() == "message" {
            self.0 = format!("{}: {value:?}", self.0);
        }
    }
}
