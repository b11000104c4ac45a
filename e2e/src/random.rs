//! Choices by a seed. (The bytes of generated files are `testkit::content`.)

/// A small deterministic generator for choices that need no quality; every test prints its seed.
#[derive(Clone, Debug)]
pub struct Random(pub u64);

impl Random {
    pub fn draw(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        // The finaliser of splitmix64.
        let x = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }
    /// Uniform enough in `0..limit`; 0 for a limit of 0.
    pub fn below(&mut self, limit: u64) -> u64 {
        if limit == 0 { 0 } else { self.draw() % limit }
    }
    pub fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }
}
