//! Whether a volume's directory may go with it: what its class says, what its record says, and whose directory it is.
//!
//! Nobody else's bytes are in it. That is looked at twice: before the volume is recorded, and before anything is deleted,
//! for volumes come and go in between. Of a volume that is recorded while another one's deletion begins, one sees the
//! other: each writes its record, and then reads all others.

use super::Inner;
use super::records::{Deletion, Record};
use crate::request::own_keys;
use crate::status::Failure;
use proto::csi::v1::DeleteVolumeRequest;
use std::collections::HashMap;
use volume::{
    Access, Credentials, CredentialsKind, Parameters, SourceUrl, TemplateValues, VolumeId, VolumeSpec,
};

/// `pvc-` and the uid of a claim.
const DRAWN_NAME_BYTES: usize = 40;
/// Records looked at at once.
const PAGE: usize = 500;

/// What the records' owners mean to each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Other {
    /// Whoever it is.
    Any,
    /// Who is not being deleted: of two that are, each may have the other's bytes deleted.
    Stays,
    /// Who is being deleted.
    Goes,
}

/// A record's volume, as a node would get it.
fn spec(record: &Record) -> Result<VolumeSpec, Failure> {
    let own = own_keys(&record.context);
    let own = own.into_iter().filter(|(key, _)| !key.starts_with(crate::request::INTERNAL_PREFIX));
    let (source, parameters) = Parameters::parse(own, &TemplateValues::default())?;
    Ok(VolumeSpec { id: record.id.clone(), source, parameters })
}

fn credentials(secrets: &HashMap<String, String>) -> Result<Credentials, Failure> {
    let credentials = Credentials::from_secrets(secrets)?;
    match credentials.kind() {
        CredentialsKind::Anonymous => Err(Failure::Precondition(
            "onDelete is \"delete\", and the call brings no credentials: name a secret that may delete by csi.storage.k8s.io/provisioner-secret-name and csi.storage.k8s.io/provisioner-secret-namespace in the StorageClass (of a volume that there is, by the annotations volume.kubernetes.io/provisioner-deletion-secret-name and -namespace of its PersistentVolume)".into(),
        )),
        _ => Ok(credentials),
    }
}

fn writes(record: &Record) -> bool {
    record.context.get("access").is_some_and(|access| access == "readWrite")
}

impl Inner {
    /// Before it is recorded.
    pub(super) fn check_new(
        &self,
        record: &Record,
        secrets: &HashMap<String, String>,
    ) -> Result<(), Failure> {
        if record.deletion.is_some() {
            self.erasures.check(&spec(record)?, credentials(secrets)?)?;
        }
        self.check_place(record)
    }

    /// Before it is handed out again: the one who recorded it may have died before it looked.
    pub(super) fn check_again(&self, record: &Record) -> Result<(), Failure> {
        match writes(record) {
            true => self.check_alone(record, Other::Goes),
            false => Ok(()),
        }
    }

    /// Before it is recorded, and after.
    pub(super) fn check_place(&self, record: &Record) -> Result<(), Failure> {
        match record.deletion {
            Some(_) => self.check_alone(record, Other::Any),
            None => self.check_again(record),
        }
    }

    fn check_alone(&self, record: &Record, which: Other) -> Result<(), Failure> {
        let source = source(record)?;
        let mut after: Option<VolumeId> = None;
        loop {
            let (others, more) = self.records.list(after.as_ref(), PAGE)?;
            for other in others.iter().filter(|other| other.id != record.id) {
                let counts = match which {
                    Other::Any => true,
                    Other::Stays => !other.is_going(),
                    Other::Goes => other.is_going(),
                };
                if counts && source.may_share(&self::source(other)?) {
                    return Err(shared(record, other, which));
                }
            }
            match others.last() {
                Some(last) if more => after = Some(last.id.clone()),
                _ => return Ok(()),
            }
        }
    }

    pub(super) fn delete(&self, request: &DeleteVolumeRequest) -> Result<(), Failure> {
        if request.volume_id.is_empty() {
            return Err(Failure::missing("volume_id"));
        }
        // An id that cannot be ours names no volume, which is what the caller wants.
        let Ok(id) = VolumeId::parse(&request.volume_id) else { return Ok(()) };
        let key = [format!("volume {id}")];
        let turn = self.busy.enter(&key, crate::busy::PATIENCE)?;
        let Some(record) = self.records.get(&id)? else {
            self.erasures.forget(&id);
            return Ok(());
        };
        if record.deletion.is_none() {
            return Ok(self.records.remove(&id)?);
        }
        if record.deletion == Some(Deletion::Ended) {
            drop(turn);
            return self.remove_settled(&record);
        }
        let (spec, credentials) = (spec(&record)?, credentials(&request.secrets)?);
        if spec.parameters.access != Access::ReadWrite {
            return Err(Failure::Internal(format!(
                "the record of volume {id} says that its directory is to be deleted, and the volume can only be read: it was changed by hand; remove the record to keep the directory"
            )));
        }
        // It may have been narrowed.
        if let Some(allow) = &self.allow {
            allow.check(&spec.source, &spec.parameters).map_err(|e| Failure::Denied(e.to_string()))?;
        }
        if !self.records.advance_deletion(&record, Deletion::Begun)? {
            self.erasures.forget(&id);
            return Ok(());
        }
        // What goes on in the background ends, too.
        self.check_alone(&record, Other::Stays).inspect_err(|_| self.erasures.forget(&id))?;
        // Others may ask how far it is.
        drop(turn);
        self.erasures.advance(&spec, credentials)?;
        if !self.records.advance_deletion(&record, Deletion::Ended)? {
            return Ok(());
        }
        self.remove_settled(&record)
    }

    /// Another replica may have allowed itself a page of names just before the record said that it has ended. As long as the
    /// record is there, nobody else gets the directory.
    fn remove_settled(&self, record: &Record) -> Result<(), Failure> {
        // A name that was drawn is no other volume's, nor is a directory that is named by it.
        let is_unique = record.name.len() >= DRAWN_NAME_BYTES
            && record.context.get("source").is_some_and(|source| source.contains(&record.name));
        if self.records.are_shared() && !is_unique {
            self.erasures.settle(&record.id)?;
        }
        let _turn = self.busy.enter(&[format!("volume {}", record.id)], crate::busy::PATIENCE)?;
        self.records.remove(&record.id)?;
        self.erasures.forget(&record.id);
        Ok(())
    }
}

fn source(record: &Record) -> Result<SourceUrl, Failure> {
    let text = record.context.get("source").map(String::as_str).unwrap_or_default();
    SourceUrl::parse(text).map_err(|error| {
        Failure::Precondition(format!(
            "it cannot be told where volume {} lies ({error}): the controller's version may be older than the one that recorded it",
            record.id
        ))
    })
}

fn shared(record: &Record, other: &Record, which: Other) -> Failure {
    let place = |of: &Record| of.context.get("source").cloned().unwrap_or_default();
    let claim = |of: &Record| {
        let key = |key: &str| of.context.get(key).cloned();
        let of_claim = key(crate::request::PVC_NAMESPACE).zip(key(crate::request::PVC_NAME));
        of_claim.map(|(namespace, name)| format!(" of claim {namespace}/{name}")).unwrap_or_default()
    };
    let (mine, theirs, claim) = (place(record), place(other), claim(other));
    let (id, other) = (&record.id, &other.id);
    match which {
        Other::Goes => Failure::Unavailable(format!(
            "{mine} shares objects with {theirs}, which is being deleted with volume {other}{claim}: the call will be repeated"
        )),
        Other::Any => Failure::Precondition(format!(
            "onDelete is \"delete\", and {mine} shares objects with {theirs}, which is volume {other}{claim}: choose another source or path"
        )),
        Other::Stays => Failure::Precondition(format!(
            "the directory {mine} of volume {id} is not deleted as long as there is volume {other}{claim}, which is {theirs}: delete that first, or keep the directory by removing the record of volume {id}"
        )),
    }
}
