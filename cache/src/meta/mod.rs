//! What a node knows of names: inode numbers, attributes, listings, absences, in a memory map that all processes read.
//!
//! One environment per scope. The agent writes it through [`Store`], a worker reads it through [`View`] without asking
//! anyone. Nothing here talks to a source, decides freshness (callers compare `seen_ms`, with [`age_ms`]) or is needed to survive: the
//! whole may be thrown away at any doubt, but for the inode numbers, whose high-water mark is kept elsewhere.

mod clock;
mod environment;
mod fence;
#[cfg(fuzzing)]
pub mod fuzz;
pub mod idle;
mod listing;
mod order;
mod place;
mod record;
mod room;
mod store;
mod types;
mod view;
mod write;

#[cfg(test)]
mod tests;

pub use clock::{ALWAYS_MS, Clock, age_ms};
pub use environment::boot_id;
pub use listing::ListingWriter;
pub use room::Room;
pub use store::Store;
pub use types::{
    Attributes, Cached, EPOCH_MAX, FIRST_INO, INO_LIMIT, Incoming, InodeNumbers, Kind, ListingState, Lookup,
    MetaError, Opened, Options, ROOT, Stats,
};
pub use view::View;
pub use write::is_name;
