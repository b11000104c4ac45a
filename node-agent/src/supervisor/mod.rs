//! The lives of the workers: spawned ahead, put to work, watched, buried and succeeded.
//!
//! ```text
//!              spawn                Assign, Answered, Go
//!   (nobody) ────────► standby ─────────────────────────► serving ──┐
//!      ▲                                                            │ exit, signal, hang
//!      │ backoff (policy.rs)                                        ▼
//!      └──────────────── collect what the kernel still waits for ◄─ dead
//!                                    │ nobody serves within healTimeout
//!                                    ▼
//!                                 failed: the broker aborts the connection
//! ```

mod mount;
mod policy;
mod rehearsal;
mod spawn;
mod worker_log;

pub(crate) use mount::{Answer, Left, Mount, MountState, Parts, Phase, Surroundings};
pub(crate) use policy::End;
pub(crate) use rehearsal::rehearse;
pub(crate) use spawn::{SpawnOptions, Spawner};
