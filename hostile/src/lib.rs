//! What an attacker does who has taken over a worker, or the agent: programs that play one, attempt after attempt, and
//! write down what came of each. The tests of e2e start them in place of the real ones and hold what the node must bear.
//!
//! A program of this crate locks itself down, greets and serves as the real one does, because an attacker takes over a
//! process after all that. From then on it obeys no rule of ours, and uses the product's code only to speak its messages.

pub mod agent;
pub mod calls;
pub mod knowledge;
pub mod messages;
pub mod report;
pub mod server;
pub mod worker;
