//! The volumes of one scope. Each asks in its own way, and what concerns the scope as a whole follows from all of them:
//!
//! | parameter | whose it is |
//! |---|---|
//! | `source`, `path`, `endpoint`, `region`, `addressingStyle`, keys | they name the scope: volumes that differ share nothing |
//! | `storeTimeout` | a question goes on for the longest; each volume waits for its own (`Scope::within`) |
//! | `cacheLimit` | the largest; none where one volume names none; never above the operator's limit |
//! | `readahead`, `part`, `parallelParts` | each reader's, read by read; never above the operator's limits |
//! | `freshness`, `metadataTtl` | each question's; what one volume learns is known to all |
//! | `profile`, `healTimeout`, `attributes`, `uid`, `gid`, `fileMode`, `dirMode` | the mount's own: no other mount sees them |
//! | `allowHttp`, `allowedSources`, `onDelete` | checked, and done with, before a volume is here |
//! | `sessionToken` | the last one that was seen to open the source |

use super::Scope;
use crate::lock::lock;
use link::Cause;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;
use volume::Parameters;

/// What one volume wants of its scope.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Wants {
    store_timeout: Duration,
    /// Bytes.
    cache_limit: Option<u64>,
}

impl Wants {
    pub(crate) fn of(parameters: &Parameters) -> Self {
        Self { store_timeout: parameters.store_timeout, cache_limit: parameters.cache_limit }
    }
}

#[derive(Debug, Default)]
pub(super) struct Members {
    wants: BTreeMap<u64, Wants>,
    next: u64,
}

impl Members {
    fn cache_limit(&self) -> Option<u64> {
        let limits: Option<Vec<u64>> = self.wants.values().map(|wants| wants.cache_limit).collect();
        limits.and_then(|limits| limits.into_iter().max())
    }
}

/// One volume's part in its scope, for as long as it lives. What it wanted goes with it.
pub(crate) struct Member {
    scope: Arc<Scope>,
    number: u64,
}

impl Scope {
    pub(crate) fn join(self: &Arc<Self>, wants: Wants) -> Member {
        let mut members = lock(&self.members);
        let number = members.next;
        members.next += 1;
        members.wants.insert(number, wants);
        self.engine.hold_scope(&self.id, members.cache_limit());
        drop(members);
        self.source.access.wait_for(wants.store_timeout);
        Member { scope: self.clone(), number }
    }

    /// `work`, for as long as a volume waits for the store: its own `storeTimeout`, though the question may go on for others.
    /// A listing (of `dir`) that gets on is waited for.
    pub(crate) async fn within<T>(
        &self,
        own: Duration,
        dir: Option<u64>,
        work: impl Future<Output = Result<T, Cause>>,
    ) -> Result<T, Cause> {
        let begun = Instant::now();
        let got_on = || dir.and_then(|dir| lock(&self.getting_on).get(&dir).copied());
        tokio::select! {
            biased;
            done = work => done,
            () = self.source.access.give_up(own, || got_on().map_or(begun, |at| at.max(begun))) => {
                tracing::warn!(
                    source = %self.shown,
                    "no answer for the {own:?} that a volume waits (storeTimeout); others wait longer"
                );
                Err(Cause::Unavailable)
            }
        }
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        let Scope { id, engine, members, .. } = &*self.scope;
        let mut members = lock(members);
        members.wants.remove(&self.number);
        // Under the lock, so that the last word is the right one.
        match members.wants.is_empty() {
            true => engine.let_go_of_scope(id),
            false => engine.hold_scope(id, members.cache_limit()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_limit_holds_and_none_where_one_volume_has_none() {
        let limit = |limits: &[Option<u64>]| {
            let wants = |cache_limit| Wants { store_timeout: Duration::ZERO, cache_limit };
            let all = limits.iter().map(|limit| wants(*limit)).enumerate();
            Members { wants: all.map(|(k, wants)| (k as u64, wants)).collect(), next: 9 }.cache_limit()
        };
        assert_eq!(limit(&[Some(2), Some(7), Some(3)]), Some(7));
        assert_eq!(limit(&[Some(2), None, Some(3)]), None);
        assert_eq!(limit(&[Some(2)]), Some(2));
    }
}
