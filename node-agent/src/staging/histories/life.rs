//! What is wanted of a history, and what its clients know of the agent that lives.

use super::fate::Fate;
use super::store::SimulatedStore;
use crate::staging::Area;
use std::sync::Arc;
use volume::WriteMode;

#[derive(Clone, Copy, Debug)]
pub(super) struct Plan {
    pub(super) mode: WriteMode,
    pub(super) clients: usize,
    /// Of a thousand calls of the store.
    pub(super) faults: u32,
    pub(super) holds_conditions: bool,
    pub(super) versions_of_bytes: bool,
    pub(super) loses_power: bool,
    /// The volume has files when its history begins.
    pub(super) has_files: bool,
    /// Some calls of the staging disk take longer than they may.
    pub(super) hangs: bool,
}

impl Plan {
    pub(super) fn of(seed: u64) -> Self {
        let bit = |n: u32| seed >> n & 1 == 1;
        Self {
            mode: if bit(0) { WriteMode::Back } else { WriteMode::Through },
            clients: 1 + (seed >> 1) as usize % 3,
            faults: [0, 50, 200][(seed / 7) as usize % 3],
            holds_conditions: !seed.is_multiple_of(5),
            versions_of_bytes: bit(3),
            has_files: bit(4),
            hangs: (seed / 11).is_multiple_of(3),
            loses_power: seed.is_multiple_of(3),
        }
    }
}

impl Plan {
    /// Not each request gets a proper answer.
    pub(super) fn fails(&self) -> bool {
        self.faults > 0 || self.hangs
    }
}

impl Life {
    /// What the agent knows of each file.
    pub(super) fn shown(&self) -> String {
        let text = |path: &[u8]| String::from_utf8_lossy(path).into_owned();
        let state = self.area.state();
        let mut all: Vec<String> = state
            .files
            .values()
            .map(|file| {
                let record = file.record();
                let former: Vec<_> =
                    record.former.iter().map(|f| (text(&f.path), &f.version, &f.writes)).collect();
                format!(
                    "{:?} is {} of {} bytes: local {}, clean {}, same {}, base {:?}, target {:?}, writes {:?}, former {former:?}",
                    record.path.as_deref().map(text),
                    file.ino,
                    file.size(),
                    record.local,
                    record.clean,
                    record.same,
                    record.base.as_ref().map(|base| (text(&base.path), &base.version)),
                    record.target,
                    record.writes
                )
            })
            .collect();
        let now = |path: &Option<crate::staging::record::Moved>| path.as_ref().map(|moved| text(&moved.to));
        all.extend(state.moved.iter().map(|(path, to)| format!("{} is moved to {:?}", text(path), now(to))));
        all.sort();
        all.join("\n")
    }
}

/// What is known of the agent that lives.
pub(super) struct Life {
    pub(super) area: Arc<Area>,
    pub(super) fate: Arc<Fate>,
    pub(super) store: Arc<SimulatedStore>,
    pub(super) plan: Plan,
}
