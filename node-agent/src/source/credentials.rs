//! The source of a scope and what it is asked with, which may be exchanged while volumes are mounted.

use crate::lock::lock;
use crate::source::health::Health;
use std::ops::Deref;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use store::{Access, ExpiryObserver, Source, StoreError};
use volume::Credentials;

/// Shared by all that read from the scope.
pub(crate) struct CredentialedSource {
    source: Arc<dyn Source>,
    pub(crate) access: Arc<Access>,
    /// The keys are newer than those that name the scope. Exchanged with them, under its lock: whether a pod of another
    /// namespace may join depends on it.
    rotated: Mutex<bool>,
}

impl CredentialedSource {
    /// `open` gets what the source is to be asked with. `store_timeout`: the first volume's. `shown`: for
    /// people.
    pub(crate) fn new(
        open: impl FnOnce(Arc<Access>) -> Result<Arc<dyn Source>, StoreError>,
        credentials: Credentials,
        store_timeout: Duration,
        shown: String,
        health: Arc<Health>,
    ) -> Result<Self, StoreError> {
        let access = Access::renewable(credentials, store_timeout, Box::new(Expiry { shown, health }));
        let source = open(access.clone())?;
        Ok(Self { source, access, rotated: Mutex::new(false) })
    }

    /// Without its scope.
    pub(crate) fn handle(&self) -> Arc<dyn Source> {
        self.source.clone()
    }

    /// Of the same identity: key and secret are those that name this scope.
    pub(crate) fn replace(&self, credentials: Credentials) {
        self.exchange(credentials, false);
    }

    /// Keys that took the place of those that name this scope.
    pub(crate) fn rotate(&self, credentials: Credentials) {
        self.exchange(credentials, true);
    }

    fn exchange(&self, credentials: Credentials, are_newer: bool) {
        let mut rotated = lock(&self.rotated);
        self.access.replace(credentials);
        *rotated = are_newer;
    }

    pub(crate) fn note_rotated(&self) {
        *lock(&self.rotated) = true;
    }

    pub(crate) fn is_rotated(&self) -> bool {
        *lock(&self.rotated)
    }
}

impl Deref for CredentialedSource {
    type Target = dyn Source;

    fn deref(&self) -> &Self::Target {
        &*self.source
    }
}

/// An expired token is to readers what a store is that does not answer.
struct Expiry {
    shown: String,
    health: Arc<Health>,
}

impl ExpiryObserver for Expiry {
    fn expired(&self, error: &StoreError) {
        tracing::warn!(source = %self.shown, %error, "waiting for a renewed secret");
        self.health.fails(&error.to_string());
    }

    fn works_again(&self) {
        self.health.works();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Scripted;

    #[test]
    fn two_exchanges_at_once_leave_keys_and_what_is_known_of_them_together() {
        let runtime = tokio::runtime::Runtime::new().unwrap();
        let _entered = runtime.enter();
        let scope = Scripted::new(0).scope();
        let keys =
            |id: &str| Credentials::from_secrets([("accessKeyId", id), ("secretAccessKey", "s")]).unwrap();
        for _ in 0..5000 {
            std::thread::scope(|threads| {
                threads.spawn(|| scope.source.replace(keys("old")));
                threads.spawn(|| scope.source.rotate(keys("new")));
            });
            assert_eq!(scope.source.is_rotated(), scope.source.access.has(&keys("new")));
        }
    }
}
