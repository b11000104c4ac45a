//! The kernel of the simulated node: FUSE connections with their requests, and the workers that read their devices.

use std::collections::BTreeMap;
use std::time::Duration;

/// Of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ConnectionId(pub u64);

/// Of a worker's process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct WorkerId(pub u64);

/// One call of an application that waits in the kernel.
#[derive(Clone, Debug)]
pub struct Request {
    pub made: Duration,
    /// The worker that has read it from the device and has not answered it. The shared table of the connection says so to
    /// the successor of a dead worker.
    pub taken: Option<WorkerId>,
    /// Kills each worker that executes it.
    pub is_poison: bool,
    pub deaths: u32,
    /// A worker that has died took it before.
    pub is_orphan: bool,
}

/// How a call came back to its application.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    Answered,
    /// EIO: no worker survives it.
    Poisoned,
    /// ENOTCONN: the connection has ended.
    Ended,
}

/// Handshake of the protocol: what must happen exactly once for each connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Init {
    Asked,
    Answered,
}

#[derive(Debug)]
pub struct Connection {
    pub init: Init,
    pub ended: bool,
    /// At its target.
    pub mounted: bool,
    pub requests: BTreeMap<u64, Request>,
    /// Workers that read the device now.
    pub readers: Vec<WorkerId>,
}

#[derive(Debug, Default)]
pub struct Kernel {
    next: u64,
    pub connections: BTreeMap<ConnectionId, Connection>,
    /// What came back to applications, with the time that it took.
    pub outcomes: Vec<(ConnectionId, Outcome, Duration)>,
}

impl Kernel {
    fn id(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    pub fn mount(&mut self) -> ConnectionId {
        let id = ConnectionId(self.id());
        let connection = Connection {
            init: Init::Asked,
            ended: false,
            mounted: true,
            requests: BTreeMap::new(),
            readers: Vec::new(),
        };
        self.connections.insert(id, connection);
        id
    }

    pub fn get(&self, id: ConnectionId) -> Option<&Connection> {
        self.connections.get(&id)
    }

    pub fn get_mut(&mut self, id: ConnectionId) -> Option<&mut Connection> {
        self.connections.get_mut(&id)
    }

    pub fn has_ended(&self, id: ConnectionId) -> bool {
        self.get(id).is_none_or(|connection| connection.ended)
    }

    /// An application's call. None: it fails at once, for the connection has ended.
    pub fn call(&mut self, id: ConnectionId, now: Duration, is_poison: bool) -> Option<u64> {
        let number = self.id();
        let connection = self.connections.get_mut(&id)?;
        if connection.ended {
            self.outcomes.push((id, Outcome::Ended, Duration::ZERO));
            return None;
        }
        connection
            .requests
            .insert(number, Request { made: now, taken: None, is_poison, deaths: 0, is_orphan: false });
        Some(number)
    }

    /// This worker reads the next request that no worker has taken.
    pub fn take(&mut self, id: ConnectionId, worker: WorkerId) -> Option<(u64, bool)> {
        let connection = self.connections.get_mut(&id).filter(|connection| !connection.ended)?;
        let (number, request) =
            connection.requests.iter_mut().find(|(_, request)| request.taken.is_none())?;
        request.taken = Some(worker);
        Some((*number, request.is_poison))
    }

    pub(crate) fn is_orphan(&self, id: ConnectionId, number: u64) -> bool {
        self.get(id).and_then(|it| it.requests.get(&number)).is_some_and(|request| request.is_orphan)
    }

    pub fn answer(&mut self, id: ConnectionId, number: u64, outcome: Outcome, now: Duration) {
        let Some(connection) = self.connections.get_mut(&id) else { return };
        if let Some(request) = connection.requests.remove(&number) {
            self.outcomes.push((id, outcome, now - request.made));
        }
    }

    /// `abort`, `umount -f`, or the last descriptor is closed: every waiting call fails.
    pub fn end(&mut self, id: ConnectionId, now: Duration) {
        let Some(connection) = self.connections.get_mut(&id) else { return };
        connection.ended = true;
        connection.readers.clear();
        let waiting = std::mem::take(&mut connection.requests);
        let failed = waiting.into_values().map(|request| (id, Outcome::Ended, now - request.made));
        self.outcomes.extend(failed);
    }

    /// A worker's process is gone: it reads no device any more. What it took stays in the connection's table.
    pub(crate) fn lose(&mut self, worker: WorkerId) {
        for connection in self.connections.values_mut() {
            connection.readers.retain(|reader| *reader != worker);
        }
    }
}
