//! The versions of what two builds of Millpond share, and which builds get along.
//!
//! A build works with what its direct neighbours wrote and say (N ± 1), so that any two releases in a row can follow
//! each other in either direction. So a change may add what the build before can do without, and nothing else; the
//! version is raised with it.

/// For tests: builds that differ in what is shared, as two releases would.
pub const STEPS: u32 = if cfg!(feature = "far-version") {
    2
} else if cfg!(feature = "next-version") {
    1
} else {
    0
};

/// Messages between agent and broker.
pub const LINK: u32 = 1 + STEPS;
/// The agent's state directory.
pub const STATE: u32 = 1 + STEPS;
/// The shared memory of a connection.
pub const FLIGHT: u32 = 2 + STEPS;

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
