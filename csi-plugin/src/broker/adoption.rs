//! Agents that come after one another: what the broker keeps is given to the agent's successor. What the agent keeps
//! for the broker's successor is in `hold`.

use super::agents::Agents;
use super::lifecycle::Lifecycle;
use super::messages::{Adoption, adoption};
use super::mounts_table::{Mount, State};
use super::socket::{AgentIdentity, AgentLink, AskError};
use link::broker::{AgentAnswer, AgentEnd, AgentRequest};
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, PoisonError, TryLockError};
use std::time::{Duration, Instant};

/// Mounts that are given to a new agent at the same time: most of the time each waits for the start of its worker.
const ADOPTERS: usize = 8;
/// One that is drained may be the last to hold mounts that this broker, a new one, has not been shown yet.
const SHOW_AND_EXIT_LIMIT: Duration = Duration::from_secs(20);

/// What has become of the mounts that were to be given to an agent.
#[derive(Default)]
pub(super) struct Given {
    /// How many it serves now. It says of each when it has seen that it does.
    pub(super) taken: usize,
    /// Why it did not take the first of the others.
    pub(super) refused: Option<String>,
}

/// Does it for some of them at a time; the results are in the order of the items.
pub(super) fn for_each<T: Sync, R: Send>(items: &[T], each: impl Fn(&T) -> R + Sync) -> Vec<R> {
    for_each_by(items, |_| 0, each)
}

/// As [`for_each`]. `next` chooses one of those that are left, which it gets in their order: a place in that list.
fn for_each_by<T: Sync, R: Send>(
    items: &[T],
    next: impl Fn(&[&T]) -> usize + Sync,
    each: impl Fn(&T) -> R + Sync,
) -> Vec<R> {
    let left: Mutex<Vec<usize>> = Mutex::new((0..items.len()).collect());
    let take = || {
        let mut left = left.lock().unwrap_or_else(PoisonError::into_inner);
        let choice: Vec<&T> = left.iter().map(|index| &items[*index]).collect();
        (!choice.is_empty()).then(|| left.remove(next(&choice).min(choice.len() - 1)))
    };
    let work = || {
        let mut done = Vec::new();
        while let Some(index) = take() {
            done.push((index, each(&items[index])));
        }
        done
    };
    let mut all: Vec<(usize, R)> = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..ADOPTERS.min(items.len())).map(|_| scope.spawn(work)).collect();
        workers.into_iter().flat_map(|w| w.join().unwrap_or_default()).collect()
    });
    all.sort_by_key(|(index, _)| *index);
    all.into_iter().map(|(_, result)| result).collect()
}

/// Those of `earlier` that must have ended before `agent` gets their mounts, each once.
fn to_see_off(
    earlier: impl Iterator<Item = AgentIdentity>,
    agent: &AgentIdentity,
    spare: Option<&AgentIdentity>,
) -> Vec<AgentIdentity> {
    let mut all: Vec<AgentIdentity> = Vec::new();
    for one in earlier {
        // A process that executed itself anew has ended its earlier life with that.
        if spare != Some(&one) && !one.is_process_of(agent) && !all.contains(&one) {
            all.push(one);
        }
    }
    all
}

/// Gives an agent what another one has left.
#[derive(Debug)]
pub(super) struct Adopter {
    pub(super) lifecycle: Arc<Lifecycle>,
    pub(super) agents: Arc<Agents>,
    /// How long an agent may take for one mount.
    pub(super) limit: Duration,
    /// Held while mounts are given to an agent: two threads that do that would give it one mount twice.
    pub(super) giving: Mutex<()>,
}

impl Adopter {
    pub(super) fn is_giving(&self) -> bool {
        matches!(self.giving.try_lock(), Err(TryLockError::WouldBlock))
    }

    /// Until mounts that are being given to an agent have been given.
    pub(super) fn await_given(&self) {
        drop(self.giving.lock().unwrap_or_else(PoisonError::into_inner));
    }

    /// As [`Self::hand_all_over`], with no agent to go back to.
    pub(super) fn give_all(&self, agent: &AgentLink) {
        let given = self.hand_all_over(agent, None);
        if let Some(why) = given.refused {
            tracing::error!(given = given.taken, why, "not every mount has an agent again");
        }
    }

    /// An agent is there: the mounts of its predecessor become its own, and those of its own that it does not serve are
    /// given to it again. Blocks until it has them all. `spare` is drained for it: it lives, and serves nothing.
    pub(super) fn hand_all_over(&self, agent: &AgentLink, spare: Option<&AgentIdentity>) -> Given {
        let _giving = self.giving.lock().unwrap_or_else(PoisonError::into_inner);
        let mut orphans = self.lifecycle.table.all();
        // No agent can serve a connection that a third party has ended.
        orphans.retain(|mount| !self.lifecycle.note_if_ended(mount));
        orphans.retain(|mount| match mount.state() {
            State::Orphaned(_) => true,
            // The predecessor's connection has ended, and the broker has not noted it yet.
            State::Serving => !mount.is_of(agent.identity()),
            State::Preparing | State::Adopting(_) | State::Dead | State::Unpublished => false,
        });
        for agent in to_see_off(orphans.iter().map(|mount| mount.agent()), agent.identity(), spare) {
            match self.agents.slots.is_drained(&agent) {
                true => agent.see_off_within(SHOW_AND_EXIT_LIMIT),
                false => agent.see_off(),
            }
        }
        let taken = for_each_by(
            &orphans,
            |left| self.most_urgent(left),
            |mount| self.hand_over(agent, mount, spare.is_some()),
        );
        let mut given = Given::default();
        for taken in taken {
            match taken {
                Ok(true) => given.taken += 1,
                Ok(false) => {}
                Err(why) => {
                    given.refused.get_or_insert(why);
                }
            }
        }
        given
    }

    /// The one at which a program waits already: of a thousand volumes most are idle, and nobody notices how late those come.
    fn most_urgent(&self, left: &[&Arc<Mount>]) -> usize {
        let devices: Vec<_> = left.iter().map(|mount| mount.device()).collect();
        let (places, held): (Vec<usize>, Vec<_>) = devices
            .iter()
            .enumerate()
            .filter_map(|(place, device)| Some((place, device.as_ref()?.as_fd())))
            .unzip();
        let waiting = self.lifecycle.kernel.have_requests(&held);
        places.into_iter().zip(waiting).find(|(_, waits)| *waits).map_or(0, |(place, _)| place)
    }

    /// False: there was nothing to hand over any more.
    fn hand_over(&self, agent: &AgentLink, mount: &Mount, handed_over: bool) -> Result<bool, String> {
        // It may ask about the mount before it answers.
        let Some((since, before)) = mount.begin_adoption(agent.identity(), Instant::now()) else {
            return Ok(false);
        };
        let still = |state: State, _: &AgentIdentity| state == State::Adopting(since);
        let ended = if handed_over { AgentEnd::Asked } else { self.agents.ends.of(&before) };
        let Some(Adoption { adopt, device, inflight }) = adoption(mount, since, ended) else {
            // It ends just now: the agent was asked nothing.
            self.lifecycle.enter_if(mount, State::Orphaned(since), "there was nothing to give", still);
            return Ok(false);
        };
        let adopt = AgentRequest::Adopt(Box::new(adopt));
        let adopted = agent.ask(adopt, &[device.as_fd(), inflight.as_fd()], self.limit);
        // No agent serves it in the cases below: it ends with its healTimeout, unless this one takes it
        // later (`compare`) or another one comes.
        let why = match adopted {
            Ok((AgentAnswer::Done, _)) => {
                self.lifecycle.enter_if(mount, State::Serving, "a new agent serves it", still);
                failpoint::hit("broker.adopted-one");
                "the new agent is gone, too".to_owned()
            }
            Ok(_) => "the new agent answered with something else".to_owned(),
            Err(AskError::Gone) => "the new agent is gone, too".to_owned(),
            Err(error) => {
                if matches!(error, AskError::Refused(_)) {
                    mount.note_refused();
                }
                tracing::error!(mount = %mount.id, volume = %mount.volume(), %error, "the new agent does not take this mount: it is asked again, until healTimeout");
                format!("the new agent refused it: {error}")
            }
        };
        match mount.state() {
            // Unpublished, or ended, while the agent was asked: the agent may have adopted it after the order to let
            // go.
            over if over.is_over() => {
                tracing::info!(mount = %mount.id, volume = %mount.volume(), "a mount ended while it was handed over: the agent is asked to let go of it");
                agent.relieve(mount.id, "it ended while it was handed over");
                return Ok(false);
            }
            // The thread that noted the agent's end may have done so before it served.
            State::Serving if agent.is_connected() => return Ok(true),
            _ => {}
        }
        self.lifecycle.enter_if(mount, State::Orphaned(since), &why, |state, of| {
            of == agent.identity() && matches!(state, State::Adopting(_) | State::Serving)
        });
        self.lifecycle.wake_expiry();
        Err(format!("volume {} ({}): {why}", mount.volume(), mount.id))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_agent_before_is_seen_off_once_and_neither_the_spare_nor_the_new_one() {
        let agent = |pid: i32, life: u64| AgentIdentity { pid, started: Some(7), life };
        let (a, b, spare, new) = (agent(1, 1), agent(2, 1), agent(3, 1), agent(4, 2));
        let earlier = [&a, &b, &a, &spare, &agent(4, 1), &b].map(Clone::clone);
        let seen_off = |spare| to_see_off(earlier.iter().cloned(), &new, spare);
        assert_eq!(seen_off(Some(&spare)), [a.clone(), b.clone()]);
        assert_eq!(seen_off(None), [a, b, spare.clone()]);
    }

    #[test]
    fn each_item_is_done_once_and_results_are_in_the_order_of_the_items() {
        for count in [0, 1, ADOPTERS, 1000] {
            let items: Vec<usize> = (0..count).collect();
            let doubled: Vec<usize> = items.iter().map(|n| n * 2).collect();
            assert_eq!(for_each(&items, |n| n * 2), doubled);
            assert_eq!(for_each_by(&items, |left| left.len() - 1, |n| n * 2), doubled);
            assert_eq!(for_each_by(&items, |_| usize::MAX, |n| n * 2), doubled, "a choice that is none");
        }
    }
}
