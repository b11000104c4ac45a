//! What the owners of a volume were told of what waits for its store: each thing once, and its end.

use link::broker::{Report, Unsent};

/// What the owners were told last.
#[derive(Debug, Default)]
pub(super) struct Told {
    late: bool,
    conflicts: u64,
}

impl Told {
    /// What they are to be told now. `late`: the oldest of what waits has waited too long.
    pub(super) fn step(&mut self, now: &Unsent, late: bool) -> Option<Report> {
        let before = std::mem::replace(self, Self { late, conflicts: now.conflicts });
        if now.conflicts > before.conflicts {
            return Some(Report::UploadConflict(now.clone()));
        }
        match (before.late, late) {
            (false, true) => Some(Report::UploadsLate(now.clone())),
            (true, false) if now.conflicts == 0 => Some(Report::UploadsDone),
            _ if before.conflicts > 0 && now.conflicts == 0 && !late => Some(Report::UploadsDone),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_thing_is_told_once_and_its_end_when_nothing_is_left_of_it() {
        let mut told = Told::default();
        let waiting = |conflicts| Unsent { files: 3, conflicts, ..Unsent::default() };
        assert_eq!(told.step(&waiting(0), false), None);
        assert_eq!(told.step(&waiting(0), true), Some(Report::UploadsLate(waiting(0))));
        assert_eq!(told.step(&waiting(0), true), None);
        assert_eq!(told.step(&waiting(1), true), Some(Report::UploadConflict(waiting(1))));
        assert_eq!(told.step(&waiting(1), false), None, "a conflict is left");
        assert_eq!(told.step(&waiting(2), false), Some(Report::UploadConflict(waiting(2))));
        assert_eq!(told.step(&waiting(1), false), None);
        assert_eq!(told.step(&Unsent::default(), false), Some(Report::UploadsDone));
        assert_eq!(told.step(&Unsent::default(), false), None);
        told.step(&waiting(0), true);
        assert_eq!(told.step(&Unsent::default(), false), Some(Report::UploadsDone));
    }
}
