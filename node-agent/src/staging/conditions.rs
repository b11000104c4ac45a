//! What must be at a name for it to be written, and whose it is where the store has something else there.

use super::area::Area;
use super::file::File;
use super::names::PROBE_KEY;
use super::record::{Object, Record};
use link::Cause;
use link::writable::Wrong;
use std::sync::Arc;
use std::sync::atomic::Ordering::{AcqRel, Acquire};
use store::{Abilities, Condition, Seen, StoreError, Version, Write, WriteId, Written};

/// What the name of a file begins with on which a node tries what the store can do. No listing shows it.
pub(super) const PROBE: &str = ".millpond-probe-";
/// How often it is tried what a store can do, where something comes in between.
const PROBES: u32 = 5;

impl Area {
    /// What must be at `path` for it to be written. Where the store does not hold it, it is looked at before: a conflict that the
    /// store would not see is told as its own would be.
    pub(super) async fn condition_of(
        &self,
        target: Option<&str>,
        path: &[u8],
    ) -> Result<Result<Condition, StoreError>, Wrong> {
        let able = self.able().await?;
        let wanted = wanted(target);
        let holds = match &wanted {
            Condition::Absent => able.absent && able.absent_in_parts,
            _ => able.is && able.is_in_parts,
        };
        if holds || self.sink.limits().parts_max == 0 {
            return Ok(Ok(wanted));
        }
        let seen = self.sink.look(path).await.map_err(|e| self.store_wrong("look", path, &e))?;
        let is_so = match (&wanted, &seen) {
            (Condition::Absent, None) => true,
            (Condition::Is(version), Some(seen)) => *version == seen.version,
            _ => false,
        };
        // It is told all the same: some servers hold it for objects in one piece alone.
        let able_at_all = match wanted {
            Condition::Absent => able.absent,
            _ => able.is,
        };
        Ok(match is_so {
            true if able_at_all => Ok(wanted),
            true => Ok(Condition::Any),
            false => Err(StoreError::Conflict {
                what: String::from_utf8_lossy(path).into_owned(),
                found: seen.map(|seen| seen.version),
            }),
        })
    }

    /// What this store does with conditions: tried once, on a file of our own.
    pub(super) async fn able(&self) -> Result<Abilities, Wrong> {
        let probed = self.able.get_or_try_init(|| async {
            let path = self.probe_path().await?;
            let mut tried = 0;
            loop {
                tried += 1;
                match store::probe(&*self.sink, path.as_bytes(), || self.draw()).await {
                    // A request of a probe before, whose agent has died, has come in between.
                    Err(StoreError::Conflict { .. } | StoreError::NotFound { .. }) if tried < PROBES => {}
                    found => {
                        return found.map_err(|e| match self.store_wrong("probe", path.as_bytes(), &e) {
                            // Nobody's file is in conflict: whoever waits tries again.
                            Wrong::Conflict => Wrong::Cause(Cause::Unavailable),
                            wrong => wrong,
                        });
                    }
                }
            }
        });
        probed.await.copied()
    }

    /// Of this node alone: two that try on one file disturb each other.
    async fn probe_path(&self) -> Result<String, Wrong> {
        let known = self.state().probe.clone();
        if let Some(path) = known {
            return Ok(path);
        }
        let path = format!("{PROBE}{}", self.draw());
        let (entry, noted) = ((PROBE_KEY.to_vec(), Some(path.clone().into_bytes())), path.clone());
        self.commit(vec![entry], move |state| state.probe = Some(noted)).await?;
        Ok(path)
    }

    /// An agent that is gone, or an attempt that has failed, has asked for a write: has it come to pass?
    pub(super) async fn settle(&self, file: &Arc<File>, path: &[u8]) -> Result<(), Wrong> {
        let record = file.record();
        self.withdraw(path, &record.writes, record.target.as_deref()).await?;
        let seen = self.sink.look(path).await.map_err(|e| self.store_wrong("look", path, &e))?;
        let is_late = seen.as_ref().is_some_and(|seen| self.is_of_no_record(path, seen));
        self.change_record(file, |record| {
            record.unsettled = false;
            adopt(file, record, path, seen, is_late);
        })
        .await
    }

    /// What these writes to `path` have left, where there was `target` before them. They may have come to pass.
    pub(super) async fn withdraw(
        &self,
        path: &[u8],
        writes: &[String],
        target: Option<&str>,
    ) -> Result<(), Wrong> {
        let condition = wanted(target);
        for id in writes.iter().filter_map(|write| WriteId::parse(write)) {
            let withdrawn = self.sink.withdraw(path, id, Some(&condition)).await;
            withdrawn.map_err(|e| self.store_wrong("removal", path, &e))?;
        }
        Ok(())
    }

    /// As [`store::Sink::copy`]: where the store does not hold it, it is looked before whether its source is that object.
    pub(super) async fn copy_object(
        &self,
        from: &Object,
        to: &[u8],
        write: &Write,
        condition: &Condition,
    ) -> Result<Result<Written, StoreError>, Wrong> {
        if !self.able().await?.is_at_copy {
            let seen = self.sink.look(&from.path).await;
            let seen = seen.map_err(|e| self.store_wrong("look", &from.path, &e))?;
            if seen.is_none_or(|seen| seen.version != from.version()) {
                return Ok(Err(StoreError::Stale { what: String::from_utf8_lossy(&from.path).into_owned() }));
            }
        }
        Ok(self.sink.copy(&from.path, &from.version(), from.size, to, write, condition).await)
    }

    /// Nothing was seen at `path`. Of a bucket that is missing nobody has removed anything.
    pub(super) async fn store_is_there(&self, path: &[u8]) -> Result<(), Wrong> {
        let listed = self.scope.source.list(b"", None).await;
        listed.map(drop).map_err(|e| self.store_wrong("look", path, &e))
    }

    /// The store did not take it. Ok: it is to be tried again.
    pub(super) async fn refused(
        &self,
        file: &Arc<File>,
        path: &[u8],
        error: &StoreError,
    ) -> Result<(), Wrong> {
        if !matches!(error, StoreError::Conflict { .. }) {
            return Err(self.store_wrong("upload", path, error));
        }
        let seen = self.sink.look(path).await.map_err(|e| self.store_wrong("look", path, &e))?;
        if seen.is_none() {
            self.store_is_there(path).await?;
        }
        let is_late = seen.as_ref().is_some_and(|seen| self.is_of_no_record(path, seen));
        let mut is_ours = false;
        self.change_record(file, |record| {
            record.unsettled = false;
            is_ours = adopt(file, record, path, seen, is_late);
            record.conflict = !is_ours;
        })
        .await?;
        if is_ours {
            return Ok(());
        }
        tracing::error!(
            volume = %self.volume, path = %String::from_utf8_lossy(path), inode = file.ino,
            "somebody else has changed it in the store since it was seen here: what was written here is kept in the staging area"
        );
        Err(self.store_wrong("upload", path, error))
    }

    /// The object with the bytes of a file, of which none are here or not all, may be another one by now, which a write of ours has made of
    /// it and whose answer did not come. False: it is not. To be called by whoever holds `sending`.
    pub(super) async fn rebase(&self, file: &Arc<File>) -> Result<bool, Wrong> {
        let record = file.record();
        let leans = |record: &Record| !record.local || !file.rest.is_empty();
        let Some(base) = record.base.clone().filter(|_| leans(&record)) else { return Ok(false) };
        let seen = self.sink.look(&base.path).await.map_err(|e| self.store_wrong("look", &base.path, &e))?;
        let Some(seen) = seen.filter(|seen| seen.version != base.version()) else { return Ok(false) };
        let is_late = self.is_of_no_record(&base.path, &seen);
        let mut is_ours = false;
        let change = |record: &mut Record| {
            let is_there = record.path.as_ref() == Some(&base.path);
            let is_leaning = leans(record);
            let former = record.former.iter_mut().find(|former| former.path == base.path && !is_there);
            let writes = former.as_ref().map_or(&record.writes, |former| &former.writes);
            // One that was given up may have other bytes than those that are here in part.
            let is_known = is_late && !record.local || (is_there || former.is_some()) && is_of(&seen, writes);
            is_ours = is_known && is_leaning && record.base.as_ref() == Some(&base);
            if !is_ours {
                return;
            }
            let (version, made_by) = (Some(seen.version.0.clone()), seen.write.map(|id| id.to_string()));
            match former {
                Some(former) => (former.version, former.made_by) = (version, made_by),
                None if is_there => (record.target, record.made_by) = (version, made_by),
                None => {}
            }
            record.base = Some(Object { path: base.path, version: seen.version.0, size: seen.size });
            if !record.local {
                file.set_stored_size(seen.size);
            }
        };
        self.change_record(file, change).await?;
        Ok(is_ours)
    }

    /// The same where somebody could not read what he was told, once each. Where the store does not say, what is known is read:
    /// it may be in the cache.
    pub(super) async fn rebase_after_stale(&self, file: &Arc<File>) {
        let stale = self.stale.load(Acquire);
        if file.looked.swap(stale, AcqRel) == stale {
            return;
        }
        let _silent = file.turn().await;
        let _ = self.rebase(file).await; // whoever finds it stale again has it asked again
    }
}

/// What is at `path` is what one of our writes has made, whose answer did not come (`is_late`: one that was given up): the file
/// goes on from there. False: it is not.
fn adopt(file: &File, record: &mut Record, path: &[u8], seen: Option<Seen>, is_late: bool) -> bool {
    if record.path.as_deref() != Some(path) {
        return true; // renamed or unlinked meanwhile: its former name is looked at by itself
    }
    let is_asked = seen.as_ref().is_some_and(|seen| is_of(seen, &record.writes));
    let Some(seen) = seen.filter(|_| is_late || is_asked) else { return false };
    if let Some(base) = record.base.as_mut().filter(|base| record.same && base.path == path) {
        if is_asked || !record.local {
            // The object that had its bytes has been replaced by one that has them, or (late, and not held off by the store) by
            // what is all that there is.
            (base.version, base.size) = (seen.version.0.clone(), seen.size);
            if !record.local {
                file.set_stored_size(seen.size);
            }
        } else {
            record.same = false; // the bytes are here
        }
    }
    record.target = Some(seen.version.0);
    record.made_by = seen.write.map(|id| id.to_string());
    true
}

/// What is to be at a name where there was this version of an object, or nothing.
fn wanted(target: Option<&str>) -> Condition {
    target.map_or(Condition::Absent, |version| Condition::Is(Version(version.to_owned())))
}

/// One of these writes has made it.
pub(super) fn is_of(seen: &Seen, writes: &[String]) -> bool {
    seen.write.is_some_and(|id| writes.contains(&id.to_string()))
}
