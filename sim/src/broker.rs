//! The broker's process: the product's own table of mounts, with its states and their arrows, and what it holds of
//! each.

use crate::handoff::Handoff;
use crate::kernel::ConnectionId;
use anyhow::Result;
use csi_plugin::broker::compare::{Comparison, Finding, MountView, Owner, Place, Snapshot};
use csi_plugin::broker::expiry;
use csi_plugin::broker::mounts_table::{Mount, Parts, Table};
use csi_plugin::broker::renew::schedule::Schedule;
use csi_plugin::broker::socket::AgentIdentity;
use link::MountSpec;
use link::broker::{MountId, Resume};
use link::worker::Mode;
use mounts::{Connection, MountSource, Target};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};
use volume::{Credentials, Parameters, SourceUrl, VolumeId, VolumeSpec};

/// A descriptor of nothing: the simulated kernel has its own devices.
fn nothing() -> Result<OwnedFd> {
    Ok(File::open("/dev/null")?.into())
}

/// What every life of the broker and of an agent knows of a volume.
#[derive(Clone, Debug)]
pub struct Volume {
    pub spec: MountSpec,
    pub target: Arc<Target>,
}

impl Volume {
    /// The `number`th volume of a node, at a target in `directory`.
    pub fn new(number: usize, directory: &Path) -> Result<Self> {
        let name = format!("v{number}");
        let target = Target::resolve(&[directory.to_owned()], &directory.join(&name))?;
        let volume = VolumeSpec {
            id: VolumeId::parse(&name)?,
            source: SourceUrl::parse("s3://bucket")?,
            parameters: Parameters::default(),
        };
        let spec = MountSpec::new(volume, target.path().display().to_string());
        Ok(Self { spec, target: Arc::new(target) })
    }
}

/// A process of the broker. A new one knows nothing but what agents show it.
#[derive(Debug, Default)]
pub struct Broker {
    pub table: Table,
    pub connections: BTreeMap<MountId, ConnectionId>,
    pub current: Option<AgentIdentity>,
    /// When dead mounts are made anew.
    pub renewals: Schedule,
    /// Those that are: by the new mount, the volume and the dead connection.
    pub renewing: BTreeMap<MountId, (usize, ConnectionId)>,
    /// One agent takes over from another.
    pub handoff: Option<Handoff>,
    comparison: Comparison,
}

impl Broker {
    /// As the broker enters a mount that it has made, or that an agent shows.
    pub fn enlist(
        &mut self,
        id: MountId,
        volume: &Volume,
        connection: ConnectionId,
        agent: &AgentIdentity,
    ) -> Result<Arc<Mount>> {
        let spec = volume.spec.clone();
        let source = MountSource::new(spec.volume.id.as_str(), &spec.volume.digest(), Default::default());
        self.connections.insert(id, connection);
        Ok(self.table.insert(Mount::new(Parts {
            id,
            target: volume.target.clone(),
            connection: Connection { major: 0, minor: connection.0 as u32 },
            source,
            spec,
            credentials: Credentials::anonymous(),
            agent: agent.clone(),
            device: nothing()?,
            control: None,
            limit: None,
        })))
    }

    /// An agent has answered its publish.
    pub fn prepared(mount: &Mount) -> Result<()> {
        mount.keep_prepared(nothing()?, Resume::new(Mode::Kept, "0".repeat(32)));
        Ok(())
    }

    /// No volume is published: neither of two agents could take it.
    pub fn is_switching(&self) -> bool {
        self.handoff.as_ref().is_some_and(|handoff| handoff.is_switching)
    }

    pub fn remove(&mut self, id: MountId) {
        self.table.remove(id);
        self.connections.remove(&id);
        self.renewing.remove(&id);
    }

    /// Mounts whose `healTimeout` is over.
    pub fn overdue(&self, now: Instant) -> Vec<Arc<Mount>> {
        let mut all = self.table.all();
        all.retain(|mount| expiry::left(mount.state(), mount.heal_timeout(), now) == Some(Duration::ZERO));
        all
    }

    /// One look of the comparison: what is to be done. `held`: what the agent says that it holds.
    pub fn look(
        &mut self,
        connected: &[AgentIdentity],
        held: Option<BTreeSet<MountId>>,
        mounted: impl Fn(ConnectionId) -> bool,
    ) -> Vec<Finding> {
        let known = self.table.all().into_iter().map(|mount| MountView {
            id: mount.id,
            state: mount.state(),
            owner: match mount.agent() {
                agent if Some(&agent) == self.current.as_ref() => Owner::Current,
                agent if connected.contains(&agent) => Owner::Connected,
                _ => Owner::Gone,
            },
            place: match self.connections.get(&mount.id).is_some_and(|id| mounted(*id)) {
                true => Place::Target,
                false => Place::Nowhere,
            },
            refused: mount.is_refused(),
        });
        let seen = Snapshot {
            known: known.collect(),
            removed: held.iter().flatten().copied().filter(|id| self.table.was_removed(*id)).collect(),
            held,
            strays: BTreeSet::new(),
        };
        self.comparison.look(Some(&seen))
    }

    /// Agents come or go: what is under way is not compared.
    pub(crate) fn forget_look(&mut self) {
        self.comparison.look(None);
    }

    pub fn live(&self) -> Vec<Arc<Mount>> {
        let mut all = self.table.all();
        all.retain(|mount| !mount.state().is_over());
        all
    }
}
