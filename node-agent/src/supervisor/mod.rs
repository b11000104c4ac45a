//! The lives of the workers: spawned ahead, put to work, watched, reaped and succeeded.
//!
//! ```text
//!              spawn                Assign, Answered, Go
//!   (none) ──────────► standby ─────────────────────────► serving ──┐
//!      ▲                                                            │ exit, signal, hang
//!      │ backoff (policy.rs)                                        ▼
//!      └──────────────── collect what the kernel still waits for ◄─ dead
//!                                    │ no worker serves within healTimeout
//!                                    ▼
//!                                 failed: the broker aborts the connection
//! ```

mod confine;
mod connection;
mod handshake;
mod heal_probe;
pub mod heals;
pub mod machine;
mod mount;
pub(crate) mod oom;
mod policy;
mod spawn;
mod worker_loop;

pub(crate) use confine::confine;
pub(crate) use connection::Descriptors;
pub(crate) use handshake::dry_run;
pub(crate) use heal_probe::{note_renewal, prove_held};
pub use machine::Phase;
pub(crate) use mount::{Answer, Left, Mount, MountContext, MountState, Parts};
pub use policy::End;
pub(crate) use spawn::{SpawnOptions, Spawner};
pub(crate) use worker_loop::supervise;
