//! A panic anywhere is the death of the process, at once, with its message in the log.
//!
//! To unwind one thread would leave a mount unserved while the heartbeat goes on; the agent notices and heals a death.

use crate::log;
use std::any::Any;
use std::backtrace::{Backtrace, BacktraceStatus};
use std::panic::PanicHookInfo;

pub(crate) fn end_the_process(program: &'static str) {
    std::panic::set_hook(Box::new(move |panic| {
        log::say_at_last(program, &message(panic));
        let trace = Backtrace::capture(); // only if RUST_BACKTRACE asks for it
        if trace.status() == BacktraceStatus::Captured {
            trace.to_string().lines().for_each(|line| log::say_at_last(program, line));
        }
        // SIGABRT: what waits in the log is written first, for a bounded time (see `log`).
        std::process::abort();
    }));
}

fn message(panic: &PanicHookInfo<'_>) -> String {
    let thread = std::thread::current();
    let name = thread.name().unwrap_or("without a name");
    let place = panic.location().map(|at| format!(" at {at}")).unwrap_or_default();
    format!("thread {name:?} panicked{place}: {}", text(panic.payload()))
}

fn text(payload: &(dyn Any + Send)) -> &str {
    match (payload.downcast_ref::<&str>(), payload.downcast_ref::<String>()) {
        (Some(text), _) => text,
        (_, Some(text)) => text,
        _ => "with a value that is no text",
    }
}
