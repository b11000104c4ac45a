//! What the owner of a mount learns of its life, as Events and as the mount's condition.

use super::mounts_table::{Mount, State};
use crate::events::{Events, Reason, text};
use link::broker::{Away, Report, Usage};
use std::time::Duration;

#[derive(Debug)]
pub(super) struct Notices {
    pub(super) events: Events,
    pub(super) node_id: String,
}

impl Notices {
    /// An Event on the mount's pod and claim, which is its condition from now on.
    pub(super) fn tell(&self, mount: &Mount, reason: Reason, message: &str) {
        mount.condition.note(reason, message);
        self.events.note(&mount.spec.subjects, reason, message);
    }

    /// It has entered this state.
    pub(super) fn tell_of(&self, mount: &Mount, to: State, why: &str) {
        let volume = mount.volume();
        match to {
            State::Preparing | State::Adopting(_) | State::Unpublished => {}
            State::Serving => self.tell(mount, Reason::Recovered, &text::recovered(volume)),
            State::Orphaned(_) => self.degraded(mount, why),
            State::Dead => self.tell(mount, Reason::Failed, &text::ended(volume, why)),
        }
    }

    /// The agent's own words about one of its mounts.
    pub(super) fn report(&self, mount: &Mount, report: Report) {
        let (volume, node) = (mount.volume(), &self.node_id);
        match report {
            Report::Healed { cause, took_us } => {
                let message = text::healed(volume, &cause, Duration::from_micros(took_us), node);
                self.tell(mount, Reason::Healed, &message);
            }
            Report::Degraded { why } => self.degraded(mount, &why),
            Report::Recovered => {
                self.tell(mount, Reason::Recovered, &text::recovered(volume));
            }
            Report::Poisoned { operation, deaths: _ } => {
                let message = text::poisoned(volume, &operation, node);
                self.tell(mount, Reason::RequestFailed, &message);
            }
            // Events only: what its condition says is asked for (`AgentAnswer::Usage`).
            Report::SourceAway { why, stale } => {
                let (reason, message) = match stale {
                    true => (Reason::ServingStale, text::serving_stale(volume.as_str(), &why)),
                    false => (Reason::Degraded, text::source_away(volume.as_str(), &why)),
                };
                // Without Kubernetes this is where it is said.
                tracing::warn!(mount = %mount.id, %volume, event = reason.name(), why, "its source gives no answer");
                self.events.note(&mount.spec.subjects, reason, &message);
            }
            Report::SourceBack => {
                tracing::info!(mount = %mount.id, %volume, event = Reason::Recovered.name(), "its source answers again");
                self.events.note(&mount.spec.subjects, Reason::Recovered, &text::source_back(volume));
            }
            Report::UploadsLate(unsent) => {
                self.tell_of_uploads(
                    mount,
                    Reason::UploadsLate,
                    &text::uploads_late(volume.as_str(), &unsent, node),
                );
            }
            Report::UploadConflict(unsent) => {
                let message = text::upload_conflict(volume.as_str(), &unsent, node);
                self.tell_of_uploads(mount, Reason::UploadConflict, &message);
            }
            Report::UploadsDone => {
                tracing::info!(mount = %mount.id, %volume, event = Reason::UploadsDone.name(), "all that was written is in its store");
                self.events.note(
                    &mount.spec.subjects,
                    Reason::UploadsDone,
                    &text::uploads_done(volume, node),
                );
            }
        }
    }

    /// What was written to it and is not in its store. Its condition is asked for, as that of its source.
    pub(super) fn tell_of_uploads(&self, mount: &Mount, reason: Reason, message: &str) {
        tracing::warn!(mount = %mount.id, volume = %mount.volume(), event = reason.name(), "{message}");
        self.events.note(&mount.spec.subjects, reason, message);
    }

    fn degraded(&self, mount: &Mount, why: &str) {
        let message = text::degraded(mount.volume(), why, mount.heal_timeout(), &self.node_id);
        self.tell(mount, Reason::Degraded, &message);
    }
}

/// What is wrong with its source, or with what was written to it, as the agent says that serves it: a level, so no report of
/// it can be lost.
pub(super) fn source_trouble(volume: &str, usage: &Usage, node: &str) -> Option<String> {
    let away = usage.away.as_ref().map(|Away { why, stale }| match stale {
        true => text::serving_stale(volume, why),
        false => text::source_away(volume, why),
    });
    away.or_else(|| {
        usage.unsent.as_ref().map(|unsent| match unsent.conflicts {
            0 => text::uploads_late(volume, unsent, node),
            _ => text::upload_conflict(volume, unsent, node),
        })
    })
}
