//! What the agent fetches before a reader asks for it, and what a reader waits for because another one fetches it.

pub mod ledger;
pub(crate) mod open_gate;
pub(crate) mod siblings;
pub(crate) mod warm;
