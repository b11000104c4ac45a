//! Names and attributes: from the metadata store where they are known and fresh, through the agent where they are not.

use super::counters::Counters;
use crate::client::{Answer, Link};
use crate::reply::Reply;
use cache::meta::View;
use link::worker::Ask;
use std::sync::Arc;

/// A view of the store, and the agent that fills it. Each part that needs one has its own.
#[derive(Clone)]
pub(super) struct Metadata {
    view: View,
    link: Arc<dyn Link>,
    counters: Arc<Counters>,
}

impl Metadata {
    pub(super) fn new(view: View, link: Arc<dyn Link>, counters: Arc<Counters>) -> Self {
        Self { view, link, counters }
    }

    /// What the agent has stored.
    pub(super) fn view(&self) -> &View {
        &self.view
    }

    /// Has the agent store the answer to a question, and goes on or fails the request.
    pub(super) fn ask(&self, question: Ask, reply: Reply, then: impl FnOnce(Reply) + Send + 'static) {
        self.counters.metadata_misses.add(1);
        self.link.ask(
            question,
            Box::new(move |answer: Answer| match answer {
                Ok(_) => then(reply),
                Err(cause) => reply.fail(cause),
            }),
        );
    }

    /// Answered without asking, unless `asked`.
    pub(super) fn count_hit(&self, asked: bool) {
        self.counters.metadata_hits.add(u64::from(!asked));
    }
}
