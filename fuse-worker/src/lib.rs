//! One process per mounted volume that answers the kernel's FUSE requests, and may be killed at any instruction.
//!
//! Everything that must survive it lies in the crate `inflight`, which the agent holds. It never sends a notification to the
//! kernel, never touches its own mount, and no thread that reads the device ever waits for the store.
//!
//! ```text
//!  kernel ⇄ transport ⇄ fuser ⇄ adapter → fs → names: cache::meta        (no other process)
//!               ▲                          │ → cache file: pread          (no other process)
//!               └──────── reply ◄──────────┴ → client → agent → pool      (a miss)
//! ```

#![warn(clippy::print_stdout, clippy::print_stderr)]

mod adapter;
pub mod client;
pub mod errno;
pub mod fs;
#[cfg(fuzzing)]
pub mod fuzz;
pub mod init;
pub mod launch;
pub mod lockdown;
pub mod pool;
pub mod reply;
pub mod session;
pub mod transport;
