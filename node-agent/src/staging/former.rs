//! Removes what the store has under names that files had before.

use super::area::Area;
use super::conditions::is_of;
use super::file::File;
use super::late::GivenUp;
use super::locks::parent;
use super::record::{Former, Record};
use link::writable::Wrong;
use std::sync::Arc;
use store::{Condition, StoreError, Version};

/// How often it is tried to remove an object in whose place a write that was given up comes in between.
const TRIES: u32 = 3;

impl Area {
    /// Its former names go.
    pub(super) async fn remove_former(&self, file: &Arc<File>) -> Result<(), Wrong> {
        while let Some(object) = superfluous(&file.record()) {
            self.keep_dir(parent(&object.path)).await?;
            self.sync_disk().await?; // as before all that the store is asked for
            failpoint::hit("agent.staging.delete");
            let is_theirs = self.remove_object(&object).await?;
            failpoint::hit("agent.staging.deleted");
            self.failures.over(&object.path);
            self.unplace(&object.path).await?;
            if is_theirs {
                tracing::warn!(
                    volume = %self.volume, path = %String::from_utf8_lossy(&object.path),
                    "what was removed or renamed here has been changed by somebody else meanwhile: theirs stays"
                );
                self.look_again(&object.path).await;
            }
            // What was changed since it was sent is not in the store because a former name is gone.
            let seen = if file.record().path.is_some() { file.sent() } else { file.changes() };
            let gone = |record: &mut Record| {
                record.former.retain(|former| *former != object);
                let is_removed = Some(!is_theirs);
                (GivenUp { path: object.path, writes: object.writes, is_removed }, true)
            };
            self.note_sent(file, seen, gone).await?;
        }
        Ok(())
    }

    /// True: somebody else has put something else there. It is theirs, and seen again from the next look on.
    async fn remove_object(&self, object: &Former) -> Result<bool, Wrong> {
        // Some servers take away whatever is there.
        let is_certain = object.writes.is_empty() && self.able().await?.is_at_delete;
        let version = match is_certain {
            true => object.version.clone(),
            // Asked of the store, and not seen how it ended.
            false => {
                self.withdraw(&object.path, &object.writes, object.version.as_deref()).await?;
                let seen = self.sink.look(&object.path).await;
                let seen = seen.map_err(|e| self.store_wrong("look", &object.path, &e))?;
                match seen {
                    Some(seen) if is_of(&seen, &object.writes) => Some(seen.version.0),
                    Some(seen) if object.version.as_ref() == Some(&seen.version.0) => Some(seen.version.0),
                    Some(seen) if self.is_of_no_record(&object.path, &seen) => Some(seen.version.0),
                    Some(_) => return Ok(true),
                    None => None,
                }
            }
        };
        let mut version = version;
        for _ in 0..TRIES {
            let Some(is) = version.take() else { return Ok(false) };
            match self.sink.delete(&object.path, &Condition::Is(Version(is))).await {
                Ok(()) | Err(StoreError::NotFound { .. }) => return Ok(false),
                Err(StoreError::Conflict { .. } | StoreError::Stale { .. }) => {}
                Err(error) => return Err(self.store_wrong("removal", &object.path, &error)),
            }
            let seen = self.sink.look(&object.path).await;
            let seen = seen.map_err(|e| self.store_wrong("look", &object.path, &e))?;
            // A write that was given up may have come in between.
            match seen {
                Some(seen) if self.is_of_no_record(&object.path, &seen) => version = Some(seen.version.0),
                Some(_) => return Ok(true),
                None => return Ok(false),
            }
        }
        Ok(true)
    }
}

/// A former name that can go: the file has no name any more, or the store has it under its present one.
fn superfluous(record: &Record) -> Option<Former> {
    let base = record.base.as_ref().map(|base| &base.path);
    let is_in_place = record.path.as_ref().is_none_or(|path| base == Some(path));
    let is_needed = |former: &&Former| record.path.is_some() && base == Some(&former.path);
    record.former.iter().find(|former| is_in_place && !is_needed(former)).cloned()
}

/// What was written to a name that the file does not have any more.
/// Returns the writes to it.
pub(super) fn note_former(
    record: &mut Record,
    path: Vec<u8>,
    version: String,
    made_by: String,
) -> Vec<String> {
    let before = record.former.extract_if(.., |former| former.path == path);
    let writes = before.flat_map(|former| former.writes).collect();
    let (version, made_by) = (Some(version), Some(made_by));
    record.former.push(Former { path, version, made_by, writes: Vec::new() });
    writes
}
