//! What a run draws from: each thing once, in any order, then as often as it weighs.

use crate::random::Random;

#[derive(Debug)]
pub(super) struct Deck<T> {
    /// Those that have to come in any case.
    due: Vec<T>,
    weighed: Vec<(T, u64)>,
    random: Random,
}

impl<T: Copy> Deck<T> {
    /// `weighed` must not be empty.
    pub(super) fn new(weighed: Vec<(T, u64)>, seed: u64) -> Self {
        let mut random = Random(seed);
        let mut due: Vec<T> = weighed.iter().map(|(thing, _)| *thing).collect();
        for i in (1..due.len()).rev() {
            due.swap(i, random.below(i as u64 + 1) as usize);
        }
        Self { due, weighed, random }
    }

    pub(super) fn draw(&mut self) -> T {
        if let Some(thing) = self.due.pop() {
            return thing;
        }
        let mut left = self.random.below(self.weighed.iter().map(|(_, weight)| weight).sum());
        for &(thing, weight) in &self.weighed {
            match left.checked_sub(weight) {
                Some(less) => left = less,
                None => return thing,
            }
        }
        self.weighed[0].0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_comes_once_and_then_about_as_often_as_it_weighs() {
        let mut deck = Deck::new(vec![('a', 16), ('b', 4), ('c', 1)], 7);
        let mut first = [deck.draw(), deck.draw(), deck.draw()];
        first.sort_unstable();
        assert_eq!(first, ['a', 'b', 'c']);
        let drawn: Vec<char> = (0..2100).map(|_| deck.draw()).collect();
        for (thing, wanted) in [('a', 1600), ('b', 400), ('c', 100)] {
            let times = drawn.iter().filter(|&&t| t == thing).count();
            assert!((wanted / 2..wanted * 2).contains(&times), "{thing}: {times} of {wanted}");
        }
    }
}
