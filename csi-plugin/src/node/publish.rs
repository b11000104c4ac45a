//! NodePublishVolume: what is at the target decides what is done, in one pure function.

use super::Inner;
use super::context::{Context, subjects_of};
use crate::broker::mounts_table::State;
use crate::broker::{ALIVE_LIMIT, Order};
use crate::busy::{PATIENCE, target_key, volume_key};
use crate::events::{Reason, text};
use crate::request::access;
use crate::status::Failure;
use link::MountSpec;
use mounts::{MountEntry, MountSource, Ours, Target, probe};
use proto::csi::v1::NodePublishVolumeRequest;
use std::path::{Path, PathBuf};
use volume::{Access, Credentials, Parameters, SourceUrl, TemplateValues, VolumeId, VolumeSpec, WireSpec};

/// What the mount table says of the target.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Found {
    Nothing,
    /// Our guard without its FUSE mount, which another process has unmounted if the broker knows one here, or has it on
    /// record.
    Guard {
        volume: String,
        known: bool,
    },
    Fuse {
        source: MountSource,
        standing: Standing,
    },
    Foreign(String),
}

/// How a FUSE mount of ours does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    Serving,
    /// Its agent is gone and may come back.
    Orphaned,
    Dead,
    /// Mounted before this broker started.
    Unknown,
}

/// What to do about it.
#[derive(Debug)]
pub enum Step {
    Mount,
    /// Take away what is there, then mount.
    Replace,
    /// Mount anew in the place of the dead mount, here and in every container that has it.
    Renew,
    AlreadyThere,
    /// Ask the mount itself, in another process, then decide again.
    Ask,
    Refuse(Failure),
}

pub fn decide(found: &Found, wanted: &MountSource, target: &Path) -> Step {
    let target = target.display();
    match found {
        Found::Nothing => Step::Mount,
        Found::Guard { volume, known: true } if *volume == wanted.volume => Step::Renew,
        Found::Guard { .. } => Step::Replace,
        Found::Foreign(what) => Step::Refuse(Failure::Precondition(format!(
            "something else is mounted at {target} ({what}): unmount it first"
        ))),
        Found::Fuse { source, standing: Standing::Dead } if source.volume == wanted.volume => Step::Renew,
        Found::Fuse { standing: Standing::Dead, .. } => Step::Replace,
        Found::Fuse { standing: Standing::Unknown, .. } => Step::Ask,
        Found::Fuse { source, .. } if source.volume != wanted.volume => Step::Refuse(Failure::Precondition(
            format!("volume {} is published at {target}: unpublish it first", source.volume),
        )),
        // One that was made by a build whose digests are not ours, and of which nothing else is known, is taken for
        // what is wanted: it serves this volume at this target, and no answer but OK would ever let its pod have a new
        // secret.
        Found::Fuse { source, .. } if source.is_comparable(wanted) && source.digest != wanted.digest => {
            Step::Refuse(Failure::Conflict(format!(
                "volume {} is published at {target} with other parameters: unpublish it first, or repeat the call with the same",
                source.volume
            )))
        }
        Found::Fuse { standing: Standing::Orphaned, .. } => Step::Refuse(Failure::Unavailable(format!(
            "the agent that served {target} is gone: its successor takes the mount over; if none comes within healTimeout the mount ends and a publish mounts anew"
        ))),
        Found::Fuse { standing: Standing::Serving, .. } => Step::AlreadyThere,
    }
}

impl Inner {
    /// On a mount of this volume the answer is OK, UNAVAILABLE or (busy) ABORTED and nothing else: older kubelets take
    /// any other error on a republish as final and delete the pod's directory.
    pub(super) fn publish(&self, request: &NodePublishVolumeRequest) -> Result<(), Failure> {
        let Err(failure) = self.try_publish(request) else { return Ok(()) };
        // Another call works on it and will tell. ABORTED is not final either.
        if matches!(failure, Failure::Busy(_)) {
            return Err(failure);
        }
        let (failure, lives) = match self.existing(request) {
            Some(standing) => (Failure::Unavailable(failure.to_string()), standing != Standing::Dead),
            None => (failure, false),
        };
        // A mount that lives has reported its own troubles.
        if !lives {
            let subjects = subjects_of(&request.volume_id, &request.volume_context);
            let message = text::not_published(&request.volume_id, &failure.to_string());
            self.broker.events().note(&subjects, Reason::Failed, &message);
        }
        Err(failure)
    }

    /// Of a call for a target, which may be spelled in more than one way.
    pub(super) fn keys(&self, volume: &str, asked: &Path) -> [String; 2] {
        let target = Target::resolve(&self.broker.config.kubelet_dirs, asked);
        [volume_key(volume), target_key(target.as_ref().map_or(asked, |target| target.path()))]
    }

    /// How the mount of this volume at the target does, if there is one.
    fn existing(&self, request: &NodePublishVolumeRequest) -> Option<Standing> {
        let target = Path::new(&request.target_path);
        let target = Target::resolve(&self.broker.config.kubelet_dirs, target).ok()?;
        let stack = self.broker.kernel.stack(&target).ok()?;
        match self.look(&stack, target.path()) {
            Found::Fuse { source, standing } if source.volume == request.volume_id => Some(standing),
            Found::Guard { volume, .. } if volume == request.volume_id => Some(Standing::Dead),
            _ => None,
        }
    }

    fn try_publish(&self, request: &NodePublishVolumeRequest) -> Result<(), Failure> {
        let Parsed { order, target, single_target } = parse(request)?;
        let keys = self.keys(order.spec.volume.id.as_str(), &target);
        let _turn = self.broker.busy.enter(&keys, PATIENCE)?;
        let target = Target::resolve(&self.broker.config.kubelet_dirs, &target)?;
        let wanted = order.source();

        if single_target
            && let Some(other) = elsewhere(&self.broker.kernel.table()?, &wanted.volume, target.path())
        {
            return Err(Failure::Precondition(format!(
                "volume {} allows a single writer and is published at {}: unpublish it there first",
                wanted.volume,
                other.display()
            )));
        }
        let mut found = self.look(&self.broker.kernel.stack(&target)?, target.path());
        loop {
            match decide(&found, &wanted, target.path()) {
                Step::AlreadyThere => {
                    if let Some(mount) = self.broker.table.at(target.path()) {
                        self.broker.rotate(&mount, order.credentials);
                    }
                    return Ok(());
                }
                Step::Mount => return self.broker.bring_up(order, target),
                Step::Renew => return self.broker.renew(order, target),
                Step::Replace => {
                    // Not before the agent is there: a dead mount is still better than a missing one.
                    self.broker.agent()?;
                    tracing::info!(target_path = %target.path().display(), ?found, "a dead mount is replaced");
                    self.clear(&target)?;
                    found = Found::Nothing;
                }
                Step::Ask => {
                    let alive = self.broker.kernel.probe(&target, probe::What::Alive, ALIVE_LIMIT)?;
                    if let Found::Fuse { standing, .. } = &mut found {
                        *standing = match alive {
                            probe::Outcome::Dead => Standing::Dead,
                            probe::Outcome::Primed | probe::Outcome::Serving => Standing::Serving,
                        };
                    }
                }
                Step::Refuse(failure) => return Err(failure),
            }
        }
    }

    /// `stack`: the mounts at `path`.
    pub(super) fn look(&self, stack: &[MountEntry], path: &Path) -> Found {
        let Some(top) = stack.last() else { return Found::Nothing };
        // The caller must not hear that the volume is served before the broker has noticed its end.
        if let Some(mount) = self.broker.table.at(path) {
            self.broker.note_if_ended(&mount);
        }
        match top.ours() {
            None => Found::Foreign(format!("{} {}", top.fs_type, top.source)),
            Some(Ours::Guard { volume }) => {
                let known = self.broker.was_mounted(path, &volume);
                Found::Guard { volume, known }
            }
            Some(Ours::Fuse(source)) => {
                let known = self.broker.table.at(path).filter(|m| m.connection.minor == top.minor);
                let spec = match &known {
                    Some(mount) => Some(mount.spec.volume.clone()),
                    None => self.broker.recorded_spec(path).filter(|spec| spec.id.as_str() == source.volume),
                };
                // Its text may be of a build that computes digests otherwise.
                let same_way =
                    |spec: &WireSpec| MountSource::new(&source.volume, &spec.digest(), source.options());
                let source = match spec.map(|spec| same_way(&spec)) {
                    Some(known) if !known.is_comparable(&source) => known,
                    _ => source,
                };
                let standing = match known.map(|m| m.state()) {
                    // Preparing: cannot be seen by the call that holds the turn, unless a failed publish left it.
                    // Unpublished: its unmount has failed.
                    Some(State::Dead | State::Preparing | State::Unpublished) => Standing::Dead,
                    Some(State::Serving) => Standing::Serving,
                    Some(State::Orphaned(_) | State::Adopting(_)) => Standing::Orphaned,
                    None => Standing::Unknown,
                };
                Found::Fuse { source, standing }
            }
        }
    }

    /// Takes away everything of ours at the target, known or not.
    pub(super) fn clear(&self, target: &Target) -> Result<(), Failure> {
        if let Some(mount) = self.broker.table.at(target.path()) {
            self.broker.take_down(&mount)?;
        }
        self.abort_strays(target)?;
        self.broker.kernel.unmount(target)?;
        self.take_down_known(target)
    }

    /// What the broker knows of a target where nothing of ours is any more. An agent may have shown it just now.
    pub(super) fn take_down_known(&self, target: &Target) -> Result<(), Failure> {
        while let Some(mount) = self.broker.table.at(target.path()) {
            self.broker.take_down(&mount)?;
        }
        Ok(())
    }

    /// The connection of an earlier broker's mount: its requests must not outlive the mount.
    fn abort_strays(&self, target: &Target) -> Result<(), Failure> {
        if let Some(top) = self.broker.kernel.stack(target)?.last()
            && let Some(Ours::Fuse(source)) = top.ours()
            && let Err(error) = self.broker.kernel.abort_at(target, top.connection())
        {
            tracing::warn!(volume = %source.volume, %error, "connection of an earlier broker not aborted");
        }
        Ok(())
    }
}

/// Another place where this volume is mounted. A bind of a part of it is kubelet's, for a subPath.
fn elsewhere(table: &[MountEntry], volume: &str, here: &Path) -> Option<PathBuf> {
    let whole = |e: &MountEntry| e.root == Path::new("/");
    let ours = |e: &&MountEntry| matches!(e.ours(), Some(Ours::Fuse(s)) if s.volume == volume) && whole(e);
    table.iter().filter(ours).map(|e| e.mount_point.clone()).find(|at| at != here)
}

#[derive(Debug)]
struct Parsed {
    order: Order,
    target: PathBuf,
    single_target: bool,
}

fn parse(request: &NodePublishVolumeRequest) -> Result<Parsed, Failure> {
    if request.volume_id.is_empty() {
        return Err(Failure::missing("volume_id"));
    }
    if request.target_path.is_empty() {
        return Err(Failure::missing("target_path"));
    }
    let access = access(request.volume_capability.as_ref())?;
    let id = VolumeId::parse(&request.volume_id)?;
    let context = Context::parse(&request.volume_id, &request.volume_context)?;
    let (source, mut parameters) = Parameters::parse(context.parameters, &TemplateValues::default())?;
    let is_writable = parameters.access == Access::ReadWrite;
    // With the agent's own rights, for no secret says otherwise: those are an administrator's to give.
    if is_writable && context.inline && matches!(source, SourceUrl::Dir { .. }) {
        return Err(Failure::Denied(
            "volume attribute \"access\" is \"readWrite\", and an inline volume writes to no directory of its node: leave it out, or use a claim of a StorageClass with access \"readWrite\"".into(),
        ));
    }
    if let Some(gid) = access.mount_group {
        // What the owner may the group may, too. Nobody writes where a volume is only read, whatever its modes say.
        let owner = if is_writable { 0o700 } else { 0o500 };
        parameters.gid = gid;
        parameters.file_mode |= (parameters.file_mode & owner) >> 3;
        parameters.dir_mode |= (parameters.dir_mode & owner) >> 3;
    }
    let order = Order {
        spec: MountSpec {
            access: match is_writable && access.writes && !request.readonly {
                true => link::Access::ReadWrite,
                false => link::Access::ReadOnly,
            },
            environment: context.environment,
            subjects: context.subjects,
            ..MountSpec::new(VolumeSpec { id, source, parameters }, &request.target_path)
        },
        credentials: Credentials::from_secrets(&request.secrets)?,
        options: access.options,
    };
    Ok(Parsed { order, target: PathBuf::from(&request.target_path), single_target: access.single_target })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source(volume: &str, digest: &str) -> MountSource {
        MountSource { volume: volume.into(), digest: digest.into() }
    }

    #[test]
    fn what_is_found_decides() {
        let wanted = source("v", "1");
        let fuse = |s: &MountSource, standing| Found::Fuse { source: s.clone(), standing };
        let decide = |found: Found| decide(&found, &wanted, Path::new("/t"));
        assert!(matches!(decide(Found::Nothing), Step::Mount));
        let guard = |volume: &str, known| Found::Guard { volume: volume.into(), known };
        assert!(matches!(decide(guard("v", true)), Step::Renew));
        for other in [guard("v", false), guard("w", true), guard("w", false)] {
            assert!(matches!(decide(other), Step::Replace));
        }
        assert!(matches!(decide(Found::Foreign("x".into())), Step::Refuse(Failure::Precondition(_))));
        assert!(matches!(decide(fuse(&wanted, Standing::Serving)), Step::AlreadyThere));
        assert!(matches!(decide(fuse(&wanted, Standing::Orphaned)), Step::Refuse(Failure::Unavailable(_))));
        assert!(matches!(decide(fuse(&wanted, Standing::Unknown)), Step::Ask));
        for same in [source("v", "2"), wanted.clone()] {
            assert!(matches!(decide(fuse(&same, Standing::Dead)), Step::Renew));
        }
        assert!(matches!(decide(fuse(&source("w", "1"), Standing::Dead)), Step::Replace));
        assert!(matches!(
            decide(fuse(&source("v", "2"), Standing::Serving)),
            Step::Refuse(Failure::Conflict(_))
        ));
        // Made by a build whose digests cannot be compared with this one's.
        assert!(matches!(decide(fuse(&source("v", "v9-2"), Standing::Serving)), Step::AlreadyThere));
        assert!(matches!(
            decide(fuse(&source("w", "v9-1"), Standing::Serving)),
            Step::Refuse(Failure::Precondition(_))
        ));
        assert!(matches!(
            decide(fuse(&source("w", "1"), Standing::Serving)),
            Step::Refuse(Failure::Precondition(_))
        ));
    }
}
