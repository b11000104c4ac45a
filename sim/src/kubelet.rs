//! kubelet: publishes and unpublishes volumes, and repeats what has failed.

use crate::kernel::{ConnectionId, Init};
use crate::world::{Ev, Reason, World};
use anyhow::Result;
use csi_plugin::broker::mounts_table::State;
use rand::RngExt;

/// What it knows of one volume.
#[derive(Clone, Debug, Default)]
pub(crate) struct Kubelet {
    /// A pod wants it.
    pub is_wanted: bool,
    /// A call is under way.
    pub is_busy: bool,
    /// The call is the broker's own: it makes a dead mount anew.
    pub is_renewed: bool,
    /// What was mounted last at its target.
    pub at: Option<ConnectionId>,
    /// What the pod has.
    pub connection: Option<ConnectionId>,
}

impl World {
    /// Its turn: begins what the pod wants, or repeats it.
    pub(crate) fn kubelet(&mut self, volume: usize) -> Result<()> {
        self.after_ms(200..2000, Ev::Kubelet(volume));
        let change = self.has_faults() && self.rng.random_range(0..12) == 0;
        let kubelet = &mut self.kubelets[volume];
        // An unpublish does not wait for what is made anew.
        if kubelet.is_busy && !kubelet.is_renewed {
            return Ok(());
        }
        if change {
            kubelet.is_wanted = !kubelet.is_wanted;
        }
        match kubelet.is_wanted {
            true if kubelet.is_busy => Ok(()),
            true => self.publish(volume),
            false => self.unpublish(volume),
        }
    }

    /// As NodePublishVolume: what is at the target decides.
    fn publish(&mut self, volume: usize) -> Result<()> {
        let Some(broker) = &self.broker else { return Ok(()) };
        let known = broker.table.at(self.volumes[volume].target.path());
        let mounted = self.mounted(volume);
        match (known, mounted) {
            (Some(mount), _) => match mount.state() {
                State::Dead if self.dead_at(volume).is_some() => drop(self.renew(volume)?),
                State::Dead | State::Preparing | State::Unpublished => {
                    if broker.current.is_some() {
                        self.take_down(&mount, Reason::NotPublished)?;
                    }
                }
                State::Serving => {
                    self.kubelets[volume].connection = mounted;
                }
                State::Orphaned(_) | State::Adopting(_) => {}
            },
            // Of an earlier broker: the agent may show it yet.
            (None, Some(connection)) => {
                if self.kernel.has_ended(connection) {
                    self.renew(volume)?;
                } else if self.kernel.get(connection).is_some_and(|it| it.init == Init::Answered) {
                    self.kubelets[volume].connection = Some(connection);
                }
            }
            (None, None) => self.bring_up(volume)?,
        }
        Ok(())
    }

    fn unpublish(&mut self, volume: usize) -> Result<()> {
        self.leave(volume)?;
        let target = self.volumes[volume].target.clone();
        while let Some(mount) = self.broker.as_ref().and_then(|broker| broker.table.at(target.path())) {
            self.take_down(&mount, Reason::Unpublished)?;
        }
        if let Some(connection) = self.mounted(volume) {
            self.end(connection, Reason::Unpublished);
            self.clear(connection);
        }
        self.kubelets[volume].connection = None;
        Ok(())
    }

    /// What the mount table has at its target.
    fn mounted(&self, volume: usize) -> Option<ConnectionId> {
        self.kubelets[volume].at.filter(|at| self.kernel.get(*at).is_some_and(|it| it.mounted))
    }

    fn clear(&mut self, connection: ConnectionId) {
        if let Some(it) = self.kernel.get_mut(connection) {
            it.mounted = false;
        }
    }
}
