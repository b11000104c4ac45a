//! What the owner of a mount is told of its life, as Events.

use super::Broker;
use super::mounts_table::{Mount, State};
use super::socket::{AgentIdentity, AskError};
use super::targets::Recipe;
use crate::events::{Reason, text};
use link::RefusalKind;
use link::broker::{AgentRequest, Report, Secrets};
use std::time::Duration;
use volume::Credentials;

/// A republish answers within 2 s, whatever the source does with a new key. The agent goes on trying.
const ROTATE_LIMIT: Duration = Duration::from_secs(1);

impl Broker {
    /// As [`Mount::enter_if`], and its owner is told.
    pub(super) fn enter_if(
        &self,
        mount: &Mount,
        to: State,
        why: &str,
        holds: impl FnOnce(State, &AgentIdentity) -> bool,
    ) -> bool {
        // Success is not told of a mount that somebody has ended meanwhile.
        if to == State::Serving && self.note_if_ended(mount) {
            return false;
        }
        let entered = mount.enter_if(to, why, holds);
        // Who stops hangs up first: nothing has happened to the mount.
        if entered && !self.stopped() {
            self.tell_of(mount, to, why);
        }
        entered
    }

    fn tell_of(&self, mount: &Mount, to: State, why: &str) {
        let volume = &mount.spec.id;
        match to {
            State::Preparing | State::Adopting(_) | State::Unpublished => {}
            State::Serving => self.tell(mount, Reason::Recovered, &text::recovered(volume)),
            State::Orphaned(_) => self.degraded(mount, why),
            State::Dead => self.tell(mount, Reason::Failed, &text::ended(volume, why)),
        }
    }

    /// The agent's own words about one of its mounts.
    pub(super) fn reported(&self, mount: &Mount, report: Report) {
        let (volume, node) = (&mount.spec.id, &self.config.node_id);
        // What its agent says of a mount that has ended was meant for the time before.
        if self.note_if_ended(mount) || mount.state().is_over() {
            return;
        }
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
                self.events.note(&mount.subjects, reason, &message);
            }
            Report::SourceBack => {
                tracing::info!(mount = %mount.id, %volume, event = Reason::Recovered.name(), "its source answers again");
                self.events.note(&mount.subjects, Reason::Recovered, &text::source_back(volume));
            }
        }
    }

    fn degraded(&self, mount: &Mount, why: &str) {
        let message = text::degraded(&mount.spec.id, why, mount.heal_timeout(), &self.config.node_id);
        self.tell(mount, Reason::Degraded, &message);
    }

    /// A republish brought another secret. The mount goes on with the old one until the new one is known to work.
    pub fn rotate(&self, mount: &Mount, credentials: Credentials) {
        // No secret any more is no reason to take away the one that works.
        if credentials.is_anonymous() || credentials == mount.credentials() {
            return;
        }
        let Some(agent) = self.agents.current().filter(|a| mount.is_of(a.identity())) else { return };
        let ask = AgentRequest::Rotate { mount: mount.id, secrets: Secrets(credentials.to_secrets()) };
        match agent.ask(ask, &[], ROTATE_LIMIT) {
            Ok(_) => {
                tracing::info!(mount = %mount.id, volume = %mount.spec.id, "the changed secret is in use");
                mount.rotated(credentials);
                self.targets.add(mount.target.path(), Recipe::of(&mount.order()));
            }
            Err(AskError::Refused(refusal)) if refusal.kind != RefusalKind::Unavailable => {
                tracing::warn!(mount = %mount.id, volume = %mount.spec.id, why = %refusal, "a changed secret is not used");
                let message = text::secret_refused(&mount.spec.id, &refusal.message);
                self.events.note(&mount.subjects, Reason::Degraded, &message);
            }
            // Not known yet: the next republish asks again.
            Err(error) => {
                tracing::info!(mount = %mount.id, volume = %mount.spec.id, %error, "a changed secret is being tried");
            }
        }
    }
}
