//! Runs that tests, `node-suite` and benchmarks share: short in a test, long on demand, the same code in a guest.

pub mod away;
pub mod burst;
pub mod cycles;
mod deck;
pub mod ended;
pub mod faults;
pub mod frozen;
pub mod hadoop;
pub mod handovers;
pub mod kills;
pub mod listing;
pub mod memory;
pub mod noisy;
pub mod renewals;
pub mod resets;
pub mod resources;
pub mod scale;
pub mod scopes;
mod sources;
pub mod torture;
