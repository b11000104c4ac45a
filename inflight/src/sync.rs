//! Where the atomics of shared memory come from: the standard library, or the model checker that runs the same code
//! (`model`).

#[cfg(all(loom, test))]
pub(crate) use crate::model::atomic::{AtomicU32, AtomicU64};
#[cfg(not(all(loom, test)))]
pub(crate) use std::sync::atomic::{AtomicU32, AtomicU64};
