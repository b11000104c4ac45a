//! The driver in this process, over a pretended kernel and a pretended API server. One program, because each would link
//! all of it again.

#![allow(clippy::unwrap_used, unreachable_pub)]

mod access;
#[allow(dead_code)]
#[path = "../common/mod.rs"]
mod common;
mod controller;
mod deletion;
mod ended;
mod frozen;
mod kubernetes;
mod lost_answers;
mod manifests;
mod node;
mod order;
mod renewals;
mod requests;
mod uploads;
mod versions;
