//! Which files somebody is about to discard, so that an upload which nobody waits for gives way.

use std::collections::HashSet;
use tokio::sync::watch;

/// Files that somebody is about to discard: nobody begins to send them.
#[derive(Debug, Default)]
pub(super) struct Discards(watch::Sender<HashSet<u64>>);

impl Discards {
    /// Returns when somebody is about to.
    pub(super) async fn begun(&self, ino: u64) {
        let mut wanted = self.0.subscribe();
        if wanted.wait_for(|wanted| wanted.contains(&ino)).await.is_err() {
            std::future::pending::<()>().await; // it lives as long as we do
        }
    }

    pub(super) fn is_begun(&self, ino: u64) -> bool {
        self.0.borrow().contains(&ino)
    }

    /// From now on, as long as the answer lives.
    pub(super) fn begin(&self, ino: u64) -> Discard<'_> {
        self.0.send_modify(|wanted| _ = wanted.insert(ino));
        Discard { discards: self, ino }
    }
}

pub(super) struct Discard<'d> {
    discards: &'d Discards,
    ino: u64,
}

impl Drop for Discard<'_> {
    fn drop(&mut self) {
        self.discards.0.send_modify(|wanted| _ = wanted.remove(&self.ino));
    }
}
