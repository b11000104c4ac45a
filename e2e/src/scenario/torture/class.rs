//! What the killer can do, and how often it does it.

/// A class of faults. Broker and agents are never killed together: that is another promise.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, clap::ValueEnum)]
pub enum Class {
    /// One worker, sometimes also the one that takes over.
    Worker,
    /// Several workers at once.
    Workers,
    Agent,
    Broker,
    /// The agent while a worker is being replaced.
    AgentAndWorker,
    /// A worker while the broker is away, or the broker while a worker is being replaced.
    BrokerAndWorker,
    /// SIGTERM, here and below: a successor starts when the process has exited.
    AgentTerm,
    BrokerTerm,
    BothTerm,
    /// An agent of the other version takes over from the one that serves.
    HandOver,
    /// The same, and one of those that take part is killed meanwhile.
    HandOverAndDeath,
    /// A worker, again and again, while thousands of requests wait for a frozen store.
    Crowd,
    /// Another process fills the memory that a worker may have, and the kernel chooses the worker. Only where groups of
    /// memory can be made.
    WorkerOom,
    /// A panic in some thread, at a random one of the places that it passes, here and below.
    WorkerPanic,
    AgentPanic,
    BrokerPanic,
    /// SIGSTOP. Only with a hang limit, here and below: the programs' own is longer than an oracle's patience.
    WorkerHang,
    AgentHang,
    /// Another process ends a mount (`umount -f`, an abort), alone or while others die. It is of volumes that no other
    /// class touches: what was open on it is lost.
    MountEnded,
    /// One of two cache disks stops answering for a while, alone or while others die. Only with a hang limit, too.
    DiskHang,
    /// Every HDFS helper. Only where the store is one.
    Helpers,
}

impl Class {
    pub const ALL: [Self; 21] = [
        Self::Worker,
        Self::Workers,
        Self::Agent,
        Self::Broker,
        Self::AgentAndWorker,
        Self::BrokerAndWorker,
        Self::AgentTerm,
        Self::BrokerTerm,
        Self::BothTerm,
        Self::HandOver,
        Self::HandOverAndDeath,
        Self::Crowd,
        Self::WorkerOom,
        Self::WorkerPanic,
        Self::AgentPanic,
        Self::BrokerPanic,
        Self::WorkerHang,
        Self::AgentHang,
        Self::MountEnded,
        Self::DiskHang,
        Self::Helpers,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Self::Worker => "worker",
            Self::Workers => "workers",
            Self::Agent => "agent",
            Self::Broker => "broker",
            Self::AgentAndWorker => "agent+worker",
            Self::BrokerAndWorker => "broker+worker",
            Self::AgentTerm => "agent TERM",
            Self::BrokerTerm => "broker TERM",
            Self::BothTerm => "both TERM",
            Self::HandOver => "hand-over",
            Self::HandOverAndDeath => "hand-over+death",
            Self::Crowd => "worker, crowd",
            Self::WorkerOom => "worker OOM",
            Self::WorkerPanic => "worker panic",
            Self::AgentPanic => "agent panic",
            Self::BrokerPanic => "broker panic",
            Self::WorkerHang => "worker STOP",
            Self::AgentHang => "agent STOP",
            Self::MountEnded => "mount ended",
            Self::DiskHang => "disk hang",
            Self::Helpers => "helpers",
        }
    }

    pub fn is_panic(self) -> bool {
        matches!(self, Self::WorkerPanic | Self::AgentPanic | Self::BrokerPanic)
    }

    pub fn is_hang(self) -> bool {
        matches!(self, Self::WorkerHang | Self::AgentHang)
    }

    /// A process dies by it, and its successor does what it can: only then does it say something how long calls wait.
    pub(super) fn is_death(self) -> bool {
        !self.is_hang() && !matches!(self, Self::Crowd | Self::MountEnded | Self::DiskHang)
    }

    /// How often, beside the others: in 10,000 faults about 240 of most classes, and as many deaths in crowds, which take
    /// seconds each, as ends of mounts and disks that hang do.
    pub(super) fn weight(self) -> u64 {
        match self {
            Self::Worker => 64,
            Self::Workers | Self::Helpers => 32,
            // Most of it is in what happens besides.
            Self::MountEnded => 9,
            Self::DiskHang => 2,
            Self::Crowd => 1,
            _ => 3,
        }
    }
}
