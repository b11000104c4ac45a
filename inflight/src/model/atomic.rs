//! Loom's atomics, and the bugs that are put in on purpose: where the product's code says one thing, they do another.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::fmt;
use std::panic::Location;
use std::sync::atomic::Ordering::{self, Acquire, Relaxed, Release};

/// What is wrong at one place of the product's code.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Wrong {
    /// Its ordering is Relaxed.
    Relaxed,
    /// It is no read-modify-write but a load, and then a store.
    Split,
}

/// A bug: a place of the product's code, and what is wrong there.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Bug {
    pub(crate) file: &'static str,
    pub(crate) line: u32,
    pub(crate) column: u32,
    pub(crate) wrong: Wrong,
}

impl fmt::Debug for Bug {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}:{} {:?}", self.file, self.line, self.column, self.wrong)
    }
}

thread_local! {
    static PLANTED: Cell<Option<Bug>> = const { Cell::new(None) };
    /// Every bug that could be planted where models come by.
    static POSSIBLE: RefCell<BTreeSet<Bug>> = RefCell::default();
}

/// From now on, on this thread (all of a model's threads are one of the machine's).
pub(crate) fn plant(bug: Option<Bug>) {
    PLANTED.set(bug);
}

/// Where models came by since the last call.
pub(crate) fn take_possible() -> BTreeSet<Bug> {
    POSSIBLE.take()
}

/// What is wrong where the caller's caller stands.
#[track_caller]
fn wrong(orderings: &[Ordering], splits: bool) -> Option<Wrong> {
    let at = Location::caller();
    if at.file().ends_with("models.rs") {
        return None; // a model's own
    }
    let bug = |wrong| Bug { file: at.file(), line: at.line(), column: at.column(), wrong };
    POSSIBLE.with_borrow_mut(|possible| {
        if orderings.iter().any(|ordering| *ordering != Relaxed) {
            possible.insert(bug(Wrong::Relaxed));
        }
        if splits {
            possible.insert(bug(Wrong::Split));
        }
    });
    PLANTED.get().filter(|planted| *planted == bug(planted.wrong)).map(|planted| planted.wrong)
}

/// Threads that a model has, the one that it begins with among them.
const THREADS: usize = 3;

/// Lets loom see which accesses to one word depend on each other. By itself it compares an access with the last one alone:
/// after a thread's own load it takes the thread's store to race with nobody, and leaves out the executions in which
/// another thread's earlier load comes after that store (last_dependent_access in its rt/atomic.rs). So a load also
/// writes a word of its thread's that nobody reads, and a store writes those of all threads: between writes loom sees
/// every order. Relaxed, so that it orders nothing else.
#[derive(Debug)]
struct Order([loom::sync::atomic::AtomicU8; THREADS]);

thread_local! {
    /// This execution's threads, as they came by.
    static CAME_BY: RefCell<Vec<loom::thread::ThreadId>> = const { RefCell::new(Vec::new()) };
}

/// A model's next execution begins.
pub(crate) fn begin() {
    CAME_BY.with_borrow_mut(Vec::clear);
}

impl Order {
    fn new() -> Self {
        Self(std::array::from_fn(|_| loom::sync::atomic::AtomicU8::new(0)))
    }

    fn load(&self) {
        let this = loom::thread::current().id();
        let number = CAME_BY.with_borrow_mut(|threads| {
            threads.iter().position(|thread| *thread == this).unwrap_or_else(|| {
                threads.push(this);
                threads.len() - 1
            })
        });
        self.0[number].store(0, Relaxed);
    }

    fn store(&self) {
        self.0.iter().for_each(|word| word.store(0, Relaxed));
    }
}

/// The same of either, for they share no trait.
macro_rules! on {
    ($this:expr, $order:ident, $word:ident => $does:expr) => {
        match &$this.modelled {
            Some((order, $word)) => {
                order.$order();
                $does
            }
            None => {
                let $word = &$this.unknown;
                $does
            }
        }
    };
}

macro_rules! fetch {
    ($name:ident, $value:ty, $f:expr) => {
        #[track_caller]
        pub(crate) fn $name(&self, operand: $value, ordering: Ordering) -> $value {
            match wrong(&[ordering], true) {
                Some(Wrong::Split) => {
                    let before = on!(self, load, word => word.load(Acquire));
                    on!(self, store, word => word.store($f(before, operand), Release));
                    before
                }
                Some(Wrong::Relaxed) => on!(self, store, word => word.$name(operand, Relaxed)),
                None => on!(self, store, word => word.$name(operand, ordering)),
            }
        }
    };
}

macro_rules! atomic {
    ($name:ident, $value:ty) => {
        /// Of the standard library while the model does not know the word yet (`memory`): then nothing is explored.
        #[derive(Debug)]
        #[allow(unreachable_pub, reason = "public functions name it")]
        pub struct $name {
            modelled: Option<(Order, loom::sync::atomic::$name)>,
            unknown: std::sync::atomic::$name,
        }

        #[allow(dead_code, reason = "both sizes have the same")]
        impl $name {
            pub(crate) fn modelled() -> Self {
                let word = loom::sync::atomic::$name::new(0);
                Self { modelled: Some((Order::new(), word)), unknown: Default::default() }
            }

            pub(crate) fn unknown() -> Self {
                Self { modelled: None, unknown: Default::default() }
            }

            #[track_caller]
            pub(crate) fn load(&self, ordering: Ordering) -> $value {
                let ordering = wrong(&[ordering], false).map_or(ordering, |_| Relaxed);
                on!(self, load, word => word.load(ordering))
            }

            #[track_caller]
            pub(crate) fn store(&self, value: $value, ordering: Ordering) {
                let ordering = wrong(&[ordering], false).map_or(ordering, |_| Relaxed);
                on!(self, store, word => word.store(value, ordering))
            }

            #[track_caller]
            pub(crate) fn compare_exchange(
                &self,
                current: $value,
                new: $value,
                success: Ordering,
                failure: Ordering,
            ) -> Result<$value, $value> {
                match wrong(&[success, failure], true) {
                    Some(Wrong::Split) => {
                        let before = on!(self, load, word => word.load(Acquire));
                        if before != current {
                            return Err(before);
                        }
                        on!(self, store, word => word.store(new, Release));
                        Ok(before)
                    }
                    Some(Wrong::Relaxed) => on!(self, store, word => word.compare_exchange(current, new, Relaxed, Relaxed)),
                    None => on!(self, store, word => word.compare_exchange(current, new, success, failure)),
                }
            }

            #[track_caller]
            pub(crate) fn fetch_update(
                &self,
                success: Ordering,
                failure: Ordering,
                f: impl Fn($value) -> Option<$value>,
            ) -> Result<$value, $value> {
                match wrong(&[success, failure], true) {
                    Some(Wrong::Split) => {
                        let before = on!(self, load, word => word.load(Acquire));
                        let Some(new) = f(before) else { return Err(before) };
                        on!(self, store, word => word.store(new, Release));
                        Ok(before)
                    }
                    Some(Wrong::Relaxed) => on!(self, store, word => word.fetch_update(Relaxed, Relaxed, &f)),
                    None => on!(self, store, word => word.fetch_update(success, failure, &f)),
                }
            }

            fetch!(swap, $value, |_, operand| operand);
            fetch!(fetch_add, $value, <$value>::wrapping_add);
            fetch!(fetch_or, $value, |before, operand| before | operand);
            fetch!(fetch_max, $value, <$value>::max);
        }
    };
}

atomic!(AtomicU32, u32);
atomic!(AtomicU64, u64);
