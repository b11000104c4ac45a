//! From one process of the agent to the next: who owns the node's state, how the next one stands by, how the mounts pass
//! from one to the other, and how the old one leaves.

pub(crate) mod drain;
pub(crate) mod mounts;
pub(crate) mod order;
pub(crate) mod owner;
pub(crate) mod standby;
