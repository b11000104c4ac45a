//! The versions of what two builds of Millpond share, and which builds get along.
//!
//! A build works with what its direct neighbours wrote and say (N ± 1), so that any two releases in a row can follow
//! each other in either direction. So a change may add what the build before can do without, and nothing else; the
//! version is raised with it.
//!
//! Golden files hold what a version writes (`tests/golden` of the crate that owns the format, `testkit/src/golden.rs`):
//! a change of what is written fails a test, and so does a build that does not read what an earlier one has written.
//! Builds with the features below read them, too (`make check`).

/// For tests: builds that differ in what is shared, as two releases would.
pub const STEPS: u32 = if cfg!(feature = "far-version") {
    2
} else if cfg!(feature = "next-version") {
    1
} else {
    0
};

/// For tests: does this build say what a later version does?
pub const IS_LATER: bool = STEPS != 0;

/// Messages between agent and broker.
pub const LINK: u32 = 1 + STEPS;
/// Messages between agent and worker. Both are of one build, and make sure of it.
pub const WORKER: u32 = 4 + STEPS;
/// The agent's state directory.
pub const STATE: u32 = 1 + STEPS;
/// The shared memory of a connection.
pub const INFLIGHT: u32 = 2 + STEPS;

/// Do builds of these two versions get along?
pub fn neighbours(a: u32, b: u32) -> bool {
    a.abs_diff(b) <= 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_version_gets_along_with_its_direct_neighbours_only() {
        assert_eq!([1, 2, 3, 4, 5].map(|other| neighbours(3, other)), [false, true, true, true, false]);
        assert!(!neighbours(0, u32::MAX));
    }
}
