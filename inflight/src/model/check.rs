//! Runs one model through all of its executions.

use super::atomic::{Bug, begin, plant};
use crate::memory;
use std::any::Any;
use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind, set_hook, take_hook};
use std::sync::Arc;
use std::sync::Once;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

pub(super) struct Model {
    pub(super) name: &'static str,
    pub(super) body: fn(),
    /// What happens in some of the executions, or the model shows nothing (`saw`).
    pub(super) outcomes: &'static [&'static str],
    /// Explored are executions in which so many times at most another thread goes on although the one before could have.
    pub(super) preemptions: Option<usize>,
}

thread_local! {
    static SEEN: RefCell<BTreeSet<&'static str>> = RefCell::default();
    /// Of the panic that ended an execution.
    static MESSAGE: RefCell<Option<String>> = RefCell::default();
    static EXPLORING: Cell<bool> = const { Cell::new(false) };
}

/// To be called where a model comes to an outcome.
pub(super) fn saw(outcome: &'static str) {
    SEEN.with_borrow_mut(|seen| seen.insert(outcome));
}

/// Words were found that the next executions begin with.
struct Again;

/// How many executions there are; or how one of them fails.
pub(super) fn explore(model: &Model, bug: Option<Bug>) -> Result<u64, String> {
    catch_messages();
    memory::forget();
    plant(bug);
    let result = loop {
        SEEN.take();
        let executions = Arc::new(AtomicU64::new(0));
        EXPLORING.set(true);
        let result = catch_unwind(AssertUnwindSafe(|| {
            let (executions, body) = (executions.clone(), model.body);
            let mut builder = loom::model::Builder::new();
            builder.preemption_bound = model.preemptions;
            builder.max_branches = 50_000;
            builder.check(move || {
                executions.fetch_add(1, Relaxed);
                begin();
                body();
                if memory::grew() {
                    resume_unwind(Box::new(Again));
                }
            });
        }));
        EXPLORING.set(false);
        let message = MESSAGE.take();
        match result {
            Err(reason) if reason.is::<Again>() || memory::grew() => {}
            Err(reason) => {
                let number = executions.load(Relaxed);
                break Err(format!("execution {number}: {}", message.unwrap_or_else(|| text(&*reason))));
            }
            Ok(()) => break Ok(executions.load(Relaxed)),
        }
    };
    plant(None);
    let seen = SEEN.take();
    match model.outcomes.iter().find(|outcome| !seen.contains(*outcome)) {
        Some(never) if bug.is_none() && result.is_ok() => Err(format!("no execution in which: {never}")),
        _ => result,
    }
}

fn text(reason: &(dyn Any + Send)) -> String {
    reason.downcast_ref::<&str>().map_or_else(|| "a panic".to_owned(), |text| (*text).to_owned())
}

/// An execution that fails says so in the verdict, and nowhere else.
fn catch_messages() {
    static INSTALLED: Once = Once::new();
    INSTALLED.call_once(|| {
        let before = take_hook();
        set_hook(Box::new(move |panic| match EXPLORING.get() {
            true => MESSAGE.with_borrow_mut(|message| {
                message.get_or_insert_with(|| {
                    let text = panic.payload_as_str().unwrap_or("a panic").replace('\n', " ");
                    let line = panic.location().map_or(0, |at| at.line());
                    format!("{text} (line {line})")
                });
            }),
            false => before(panic),
        }));
    });
}
