//! Tells the metadata stores and the workers which cache files became whole or were dropped.
//!
//! Each commit of a store is a write of its own, so of files that became whole meanwhile a store hears in one.

use super::Volumes;
use anyhow::{Context, Result};
use cache::data::{Engine, Event, FileKey};
use std::collections::BTreeMap;
use std::sync::Arc;
use volume::ScopeId;

/// In one commit, which keeps other writers of that store waiting.
const AT_ONCE: usize = 128;

/// A thread of its own: the stores' writes block.
pub(crate) fn follow(engine: &Engine, volumes: Arc<Volumes>) -> Result<()> {
    let mut events = engine.events();
    let follow = move || {
        let mut some = Vec::new();
        while events.blocking_recv_many(&mut some, AT_ONCE) > 0 {
            for step in in_steps(some.drain(..)) {
                take(&volumes, step);
            }
        }
    };
    std::thread::Builder::new().name("events".into()).spawn(follow).context("no thread for cache events")?;
    Ok(())
}

#[derive(Debug)]
enum Step {
    /// Files, each with its root, that became whole with no other event between them.
    Whole(BTreeMap<ScopeId, Vec<(u64, u8)>>),
    Gone {
        key: Arc<FileKey>,
        file: u64,
    },
    Disk {
        root: u8,
        works: bool,
    },
}

/// The same events, in an order with the same outcome: what becomes whole is of no concern to each other.
fn in_steps(events: impl Iterator<Item = Event>) -> Vec<Step> {
    let mut steps = Vec::new();
    for event in events {
        match (event, steps.last_mut()) {
            (Event::Whole { key, file, root }, Some(Step::Whole(files))) => {
                files.entry(key.scope.clone()).or_default().push((file, root));
            }
            (Event::Whole { key, file, root }, _) => {
                steps.push(Step::Whole(BTreeMap::from([(key.scope.clone(), vec![(file, root)])])));
            }
            (Event::Gone { key, file }, _) => steps.push(Step::Gone { key, file }),
            (Event::Disk { root, works }, _) => steps.push(Step::Disk { root, works }),
        }
    }
    steps
}

fn take(volumes: &Volumes, step: Step) {
    match step {
        Step::Whole(files) => {
            for (scope, files) in files {
                let Some(scope) = volumes.scopes.get(&scope) else { continue };
                if let Err(error) = scope.became_whole(&files) {
                    tracing::warn!(?files, %error, "cache state could not be noted: readers will ask");
                }
            }
        }
        Step::Gone { key, file } => {
            for mount in volumes.mounts().iter().filter(|m| m.scope.id == key.scope) {
                mount.forget(file);
            }
            let noted = volumes.scopes.get(&key.scope).map_or(Ok(()), |s| s.became_gone(file, &key.path));
            if let Err(error) = noted {
                tracing::warn!(file, %error, "cache state could not be noted: readers will ask");
            }
        }
        Step::Disk { root, works } => disk(volumes, root, works),
    }
}

/// Workers must not go to a disk that has begun to fail or to hang, nor do without one that works again: they forget
/// what they hold of it, after the metadata store tells them no more, or again, where it lies.
fn disk(volumes: &Volumes, root: u8, works: bool) {
    for scope in volumes.scopes.all() {
        let files = scope.disk(root, works);
        for mount in volumes.mounts().iter().filter(|m| m.scope.id == scope.id) {
            files.iter().for_each(|file| mount.forget(*file));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    fn key(scope: u8) -> Arc<FileKey> {
        let scope = ScopeId::parse(&format!("{scope:032x}")).unwrap();
        Arc::new(FileKey { scope, path: b"k".to_vec(), token: "v".to_owned(), size: 1 })
    }

    #[derive(Debug, Default, PartialEq)]
    struct Outcome {
        there: BTreeSet<(ScopeId, u64)>,
        disks: Vec<(u8, bool)>,
        /// What was there as each disk failed or worked again.
        at_disks: Vec<BTreeSet<(ScopeId, u64)>>,
    }

    impl Outcome {
        fn note(&mut self, event: &Event) {
            match event {
                Event::Whole { key, file, .. } => drop(self.there.insert((key.scope.clone(), *file))),
                Event::Gone { key, file } => drop(self.there.remove(&(key.scope.clone(), *file))),
                Event::Disk { root, works } => {
                    self.disks.push((*root, *works));
                    self.at_disks.push(self.there.clone());
                }
            }
        }
    }

    proptest! {
        #[test]
        fn steps_have_the_outcome_of_the_events_one_by_one(
            events in proptest::collection::vec((0_u8..5, 0_u8..3, 0_u64..6), 0..60),
        ) {
            let event = |&(kind, scope, file): &(u8, u8, u64)| match kind {
                0..=2 => Event::Whole { key: key(scope), file, root: scope },
                3 => Event::Gone { key: key(scope), file },
                _ => Event::Disk { root: scope, works: file % 2 == 0 },
            };
            let (mut expected, mut got, mut whole_steps) = (Outcome::default(), Outcome::default(), 0);
            events.iter().for_each(|e| expected.note(&event(e)));
            for step in in_steps(events.iter().map(event)) {
                match step {
                    Step::Whole(files) => {
                        whole_steps += 1;
                        for (scope, files) in files {
                            got.there.extend(files.into_iter().map(|(file, _)| (scope.clone(), file)));
                        }
                    }
                    Step::Gone { key, file } => got.note(&Event::Gone { key, file }),
                    Step::Disk { root, works } => got.note(&Event::Disk { root, works }),
                }
            }
            prop_assert_eq!(got, expected);
            let runs = events.iter().map(|e| e.0 < 3).fold((0, false), |(n, before), whole| {
                (n + usize::from(whole && !before), whole)
            });
            prop_assert_eq!(whole_steps, runs.0, "each run of them is one step");
        }
    }
}
