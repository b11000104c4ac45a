//! Backing ids of passthrough opens: asked for once per node id, counted, closed when no open file needs them.
//!
//! An id pins the disk blocks of its file, and a node id must be opened with the same id as long as any open of it
//! lives. What is written here lies in the crate `inflight`, for the successor; this is the index to it.

use super::node::ino_of;
use super::shown::Shown;
use crate::client::Link;
use cache::meta::View;
use inflight::{Backing, Inflight};
use link::worker::Ask;
use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard};

/// Ids without an open that are kept for the next one.
const IDLE_MAX: usize = 64;

type Waiter = Box<dyn FnOnce(Option<usize>) + Send>;

/// The table of backing ids, and the shared memory that holds what outlives this worker.
pub(super) struct Backings {
    table: Mutex<Table>,
    inflight: Arc<Inflight>,
    link: Arc<dyn Link>,
    view: View,
    shown: Shown,
}

#[derive(Default)]
struct Table {
    nodes: HashMap<u64, Node>,
    /// Node ids whose last open is gone, oldest first; some may have been opened again.
    idle: VecDeque<u64>,
}

enum Node {
    Recorded(usize),
    /// A thread asks for an id.
    Opening(Vec<Waiter>),
}

pub(super) enum Acquired {
    /// The continuation has run, or will.
    Answered,
    /// The caller has to open one and say `opened`.
    Open,
}

impl Backings {
    /// What the predecessors recorded.
    pub(super) fn recall(inflight: Arc<Inflight>, link: Arc<dyn Link>, view: View, shown: Shown) -> Self {
        let mut table = Table::default();
        for (index, backing) in inflight.backings() {
            table.nodes.insert(backing.nodeid, Node::Recorded(index));
            if backing.refs == 0 {
                table.idle.push_back(backing.nodeid);
            }
        }
        Self { table: Mutex::new(table), inflight, link, view, shown }
    }

    pub(super) fn recorded(&self, nodeid: u64) -> Option<usize> {
        match self.lock().nodes.get(&nodeid) {
            Some(Node::Recorded(index)) => Some(*index),
            _ => None,
        }
    }

    pub(super) fn acquire(&self, nodeid: u64, then: impl FnOnce(Option<usize>) + Send + 'static) -> Acquired {
        let mut table = self.lock();
        match table.nodes.get_mut(&nodeid) {
            Some(Node::Recorded(index)) => {
                let index = *index;
                drop(table);
                then(Some(index));
                Acquired::Answered
            }
            Some(Node::Opening(waiters)) => {
                waiters.push(Box::new(then));
                Acquired::Answered
            }
            None => {
                table.nodes.insert(nodeid, Node::Opening(vec![Box::new(then)]));
                Acquired::Open
            }
        }
    }

    /// Counts one open, unless a predecessor has counted this request; None: the entry is gone.
    pub(super) fn count_open(&self, nodeid: u64, index: usize, unique: u64) -> Option<Backing> {
        let _guard = self.lock(); // against closing it at the same time
        let backing = self.inflight.backing(index).filter(|backing| backing.nodeid == nodeid)?;
        if !self.inflight.has_effect(unique) {
            self.inflight.ref_backing(index);
            self.inflight.set_effect(unique);
        }
        Some(backing)
    }

    /// Records an id, before any reply uses it; 0: the opens of this node id are ordinary ones.
    pub(super) fn opened(&self, nodeid: u64, id: u32, file: u64) {
        let mut table = self.lock();
        let index = self.inflight.add_backing(nodeid, id, file);
        let waiting = table.nodes.remove(&nodeid);
        if let Some(index) = index {
            table.nodes.insert(nodeid, Node::Recorded(index));
        }
        drop(table);
        if index.is_none() && id != 0 {
            self.close_id(id);
        }
        if let Some(Node::Opening(waiters)) = waiting {
            waiters.into_iter().for_each(|waiter| waiter(index));
        }
    }

    /// One open less. `request`: the RELEASE, which may have been counted by a predecessor.
    pub(super) fn release(&self, nodeid: u64, request: Option<u64>) {
        let mut table = self.lock();
        let Some(Node::Recorded(index)) = table.nodes.get(&nodeid) else { return };
        let index = *index;
        if let Some(unique) = request {
            if self.inflight.has_effect(unique) {
                return;
            }
            self.inflight.set_effect(unique);
        }
        if self.inflight.unref_backing(index) > 0 {
            return;
        }
        table.idle.push_back(nodeid);
        drop(table);
        let ordinary = self.inflight.backing(index).is_some_and(|backing| backing.id == 0);
        if ordinary || self.is_superseded(nodeid) {
            self.close_idle(|candidate, _| candidate == nodeid);
        }
        self.close_surplus();
    }

    /// The cache dropped this file: its blocks are free once no file handle has it open.
    pub(super) fn close_of(&self, file: u64) {
        self.close_idle(|_, backing| backing.file == file);
    }

    /// Closes what is not open and will not be opened again, though the agent has not said that its file is gone: a
    /// predecessor may have died before it heard. To be called every second or so.
    pub(super) fn close_superseded(&self) {
        let idle = self.lock().idle.clone();
        let superseded: Vec<u64> = idle.into_iter().filter(|nodeid| self.is_superseded(*nodeid)).collect();
        if !superseded.is_empty() {
            self.close_idle(|nodeid, _| superseded.contains(&nodeid));
        }
    }

    fn is_superseded(&self, nodeid: u64) -> bool {
        let current = self.view.attributes(ino_of(nodeid)).ok().flatten();
        current.is_none_or(|(attributes, _)| self.shown.node_id(&attributes) != nodeid)
    }

    fn close_surplus(&self) {
        loop {
            let oldest = {
                let mut table = self.lock();
                if table.idle.len() <= IDLE_MAX {
                    return;
                }
                table.idle.pop_front()
            };
            if let Some(oldest) = oldest {
                self.close_idle(|candidate, _| candidate == oldest);
            }
        }
    }

    /// Closes the ids without an open file that `wanted` picks.
    fn close_idle(&self, wanted: impl Fn(u64, &Backing) -> bool) {
        let mut closed = Vec::new();
        {
            let mut table = self.lock();
            let inflight = &self.inflight;
            table.nodes.retain(|nodeid, node| {
                let Node::Recorded(index) = node else { return true };
                let Some(backing) = inflight.backing(*index) else { return false };
                if backing.refs > 0 || !wanted(*nodeid, &backing) {
                    return true;
                }
                inflight.remove_backing(*index); // before it is closed: no thread may hand it out again
                closed.push((*nodeid, backing.id));
                false
            });
            table.idle.retain(|nodeid| !closed.iter().any(|(gone, _)| gone == nodeid));
        }
        for (_, id) in closed {
            if id != 0 {
                self.close_id(id);
            }
        }
    }

    fn close_id(&self, id: u32) {
        // Refused: the broker closes it with the connection.
        self.link.ask(Ask::BackingClose { id }, Box::new(|_| ()));
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(|e| e.into_inner())
    }
}
