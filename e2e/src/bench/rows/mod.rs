//! The rows, by what they are measured on. Each file plays its rows in rounds, one subject after the other.

pub(super) mod checkpoint;
pub(super) mod first_byte;
pub(super) mod large;
pub(super) mod listing;
pub(super) mod model;
pub(super) mod programs;
pub(super) mod publish;
pub(super) mod random;
pub(super) mod saves;
pub(super) mod small;
mod written;
