//! The source of a scope and what it is asked with, which may be exchanged while volumes are mounted.

use crate::source::health::Health;
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use store::{Access, ExpiryObserver, Source, StoreError};
use volume::Credentials;

/// Shared by all who read from the scope.
pub(crate) struct CredentialedSource {
    source: Arc<dyn Source>,
    pub(crate) access: Arc<Access>,
    /// The keys are newer than those that name the scope.
    rotated: AtomicBool,
}

impl CredentialedSource {
    /// `open` gets what the source is to be asked with. `patience`: the first volume's `storeTimeout`. `shown`: for
    /// people.
    pub(crate) fn new(
        open: impl FnOnce(Arc<Access>) -> Result<Arc<dyn Source>, StoreError>,
        credentials: Credentials,
        patience: Duration,
        shown: String,
        health: Arc<Health>,
    ) -> Result<Self, StoreError> {
        let access = Access::renewable(credentials, patience, Box::new(Expiry { shown, health }));
        let source = open(access.clone())?;
        Ok(Self { source, access, rotated: AtomicBool::new(false) })
    }

    /// Without its scope.
    pub(crate) fn handle(&self) -> Arc<dyn Source> {
        self.source.clone()
    }

    /// Of the same identity: key and secret are those that name this scope.
    pub(crate) fn replace(&self, credentials: Credentials) {
        self.access.replace(credentials);
        self.rotated.store(false, Ordering::Release);
    }

    /// Keys that took the place of those that name this scope.
    pub(crate) fn rotate(&self, credentials: Credentials) {
        self.note_rotated(); // first: what they bring in is not to be seen by a volume that does not know them
        self.access.replace(credentials);
    }

    pub(crate) fn note_rotated(&self) {
        self.rotated.store(true, Ordering::Release);
    }

    pub(crate) fn is_rotated(&self) -> bool {
        self.rotated.load(Ordering::Acquire)
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

    fn renewed(&self) {
        self.health.works();
    }
}
