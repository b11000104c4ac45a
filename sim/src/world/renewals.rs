//! The broker makes dead mounts anew.

use super::steps::Process;
use super::{PUBLISH_LIMIT, Question, Reason, World};
use crate::kernel::ConnectionId;
use anyhow::{Result, ensure};
use csi_plugin::broker::mounts_table::State;
use link::broker::MountId;
use std::path::{Path, PathBuf};

impl World {
    fn volume_at(&self, target: &Path) -> Option<usize> {
        self.volumes.iter().position(|volume| volume.target.path() == target)
    }

    /// Begins what there is to do, if a look is due.
    pub(super) fn look_for_dead(&mut self) -> Result<()> {
        let now = self.queue.now();
        let Some(broker) = &mut self.broker else { return Ok(()) };
        if !broker.renewals.take_due(now) || broker.current.is_none() {
            return Ok(());
        }
        let is_switching = broker.is_switching();
        broker.renewals.looked(!is_switching, now);
        if is_switching {
            return Ok(());
        }
        let mut targets = Vec::new();
        for volume in 0..self.volumes.len() {
            if self.dead_at(volume).is_some() {
                targets.push(self.volumes[volume].target.path().to_owned());
            }
        }
        let Some(broker) = &mut self.broker else { return Ok(()) };
        let begun: Vec<(PathBuf, usize)> = broker.renewals.begin(&targets, now);
        for (target, _) in begun {
            let Some(volume) = self.volume_at(&target) else { continue };
            // A call of kubelet may be at it.
            if !self.renew(volume)?
                && let Some(broker) = &mut self.broker
            {
                broker.renewals.finish(&target, false, now);
            }
        }
        Ok(())
    }

    /// The dead mount of ours at the target of this volume that no agent is known to serve.
    pub(crate) fn dead_at(&self, volume: usize) -> Option<ConnectionId> {
        let connection = self.kubelets[volume].at?;
        let broker = self.broker.as_ref()?;
        let is_dead = self.kernel.get(connection).is_some_and(|it| it.mounted && it.ended);
        let of_it = broker.connections.iter().find(|(_, known)| **known == connection);
        let known = of_it.and_then(|(id, _)| broker.table.get(*id));
        (is_dead && known.is_none_or(|mount| mount.state() == State::Dead)).then_some(connection)
    }

    /// False: not now.
    pub(crate) fn renew(&mut self, volume: usize) -> Result<bool> {
        let Some(dead) = self.dead_at(volume).filter(|_| !self.kubelets[volume].is_busy) else {
            return Ok(false);
        };
        let id = MountId(self.id());
        let Some(broker) = self.broker.as_mut().filter(|broker| !broker.is_switching()) else {
            return Ok(false);
        };
        let Some(agent) = broker.current.clone() else { return Ok(false) };
        if self.dies_at("broker.renewal-noted", Process::Broker) {
            return Ok(true);
        }
        let Some(broker) = &mut self.broker else { return Ok(true) };
        // Nowhere yet.
        let connection = self.kernel.mount();
        if let Some(it) = self.kernel.get_mut(connection) {
            it.mounted = false;
        }
        broker.enlist(id, &self.volumes[volume], connection, &agent)?;
        broker.renewing.insert(id, (volume, dead));
        self.kubelets[volume].is_busy = true;
        self.kubelets[volume].is_renewed = true;
        self.ask(id, volume, Question::Publish, PUBLISH_LIMIT);
        Ok(true)
    }

    /// The agent serves it: it goes where the dead one is. False: it was no renewal.
    pub(super) fn put(&mut self, mount: MountId) -> Result<bool> {
        let is_renewal = self.broker.as_ref().is_some_and(|broker| broker.renewing.contains_key(&mount));
        if is_renewal && self.dies_at("broker.renewal-served", Process::Broker) {
            return Ok(true);
        }
        let Some(broker) = &mut self.broker else { return Ok(false) };
        let Some((volume, dead)) = broker.renewing.remove(&mount) else { return Ok(false) };
        let new = broker.connections.get(&mount).copied();
        let before =
            broker.connections.iter().find(|(_, connection)| **connection == dead).map(|(id, _)| *id);
        let is_there = self.kernel.get(dead).is_some_and(|it| it.mounted);
        ensure!(is_there, "{mount} was made anew for a target that is unpublished");
        if let Some(before) = before {
            let known = self.broker.as_ref().and_then(|broker| broker.table.get(before));
            if let Some(known) = known {
                self.take_down(&known, Reason::ByOthers)?;
            }
        }
        for (connection, mounted) in [(Some(dead), false), (new, true)] {
            if let Some(it) = connection.and_then(|connection| self.kernel.get_mut(connection)) {
                it.mounted = mounted;
            }
        }
        self.kubelets[volume].at = new;
        self.kubelets[volume].connection = new;
        if self.dies_at("broker.renewal-put", Process::Broker) {
            return Ok(true);
        }
        self.summary.renewals += 1;
        self.finish_renewal(volume, true);
        self.dies_at("broker.renewed", Process::Broker);
        Ok(true)
    }

    /// It was not made anew: the dead mount is where it was.
    pub(super) fn not_renewed(&mut self, mount: MountId) {
        let Some(broker) = &mut self.broker else { return };
        if let Some((volume, _)) = broker.renewing.remove(&mount) {
            self.finish_renewal(volume, false);
        }
    }

    fn finish_renewal(&mut self, volume: usize, done: bool) {
        let now = self.queue.now();
        let target = self.volumes[volume].target.path().to_owned();
        if std::mem::take(&mut self.kubelets[volume].is_renewed) {
            self.kubelets[volume].is_busy = false;
        }
        if let Some(broker) = &mut self.broker {
            broker.renewals.finish(&target, done, now);
        }
    }

    /// What is made anew at a target that shall go ends now, whatever its agent answers.
    pub(crate) fn leave(&mut self, volume: usize) -> Result<()> {
        let Some(broker) = &self.broker else { return Ok(()) };
        let making: Vec<MountId> =
            broker.renewing.iter().filter(|(_, (of, _))| *of == volume).map(|(id, _)| *id).collect();
        for id in making {
            self.not_renewed(id);
            let known = self.broker.as_ref().and_then(|broker| broker.table.get(id));
            if let Some(known) = known {
                self.take_down(&known, Reason::NotPublished)?;
            }
        }
        Ok(())
    }
}
