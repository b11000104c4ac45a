//! Panics at places that a test chooses by their number: see the crate `failpoint`.

use libc::{c_int, c_void, siginfo_t};
use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};
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
    let flags = SaFlags::SA_RESTART | SaFlags::SA_ONSTACK;
    let action = SigAction::new(SigHandler::SigAction(arm), flags, SigSet::empty());
    // SAFETY: the handler only stores a number.
    let handled = unsafe { sigaction(Signal::SIGUSR2, &action) };
    debug_assert!(handled.is_ok(), "SIGUSR2 can be handled");
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
