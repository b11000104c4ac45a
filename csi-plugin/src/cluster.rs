//! The Kubernetes API server: how it is reached, how long it may take, and what its refusals mean.
//!
//! The controller asks it and waits, on threads that may block. The node only posts Events to it, and never waits.

use crate::status::Failure;
use kube::{Client, Config};
use std::time::Duration;
use tokio::runtime::Handle;

/// One question with all its retries. csi-provisioner gives a call 15 s by default.
const LIMIT: Duration = Duration::from_secs(8);
const CONNECT_LIMIT: Duration = Duration::from_secs(5);

#[derive(Clone)]
pub struct Cluster {
    client: Client,
    runtime: Handle,
}

impl std::fmt::Debug for Cluster {
    /// The client holds a token.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Cluster")
    }
}

#[derive(Debug, thiserror::Error)]
pub enum ClusterError {
    #[error("it exists already")]
    Exists,
    #[error("it does not exist")]
    Absent,
    #[error("the list's continuation has expired: list again")]
    Expired,
    #[error(
        "cannot {what}: the Kubernetes API server refused it ({why}): are CRD and RBAC of the same release installed?"
    )]
    Refused { what: &'static str, why: String },
    #[error("cannot {what}: the Kubernetes API server did not answer ({why}); the call will be repeated")]
    Away { what: &'static str, why: String },
}

impl Cluster {
    /// By the address (tests, `kubectl proxy`), or as every client does: KUBECONFIG, else from inside the cluster. Asks
    /// no server yet.
    pub async fn configure(address: Option<&str>) -> anyhow::Result<Self> {
        let mut config = match address {
            Some(address) => Config::new(address.parse()?),
            None => Config::infer().await?,
        };
        config.connect_timeout = Some(CONNECT_LIMIT);
        config.read_timeout = Some(LIMIT);
        config.write_timeout = Some(LIMIT);
        Ok(Self { client: Client::try_from(config)?, runtime: Handle::current() })
    }

    pub fn client(&self) -> Client {
        self.client.clone()
    }

    /// Blocks the calling thread, which must not be one of the runtime's own. `what` completes "cannot …".
    pub fn wait<T>(
        &self,
        what: &'static str,
        question: impl Future<Output = kube::Result<T>>,
    ) -> Result<T, ClusterError> {
        match self.runtime.block_on(async { tokio::time::timeout(LIMIT, question).await }) {
            Ok(answer) => answer.map_err(|error| classify(what, &error)),
            Err(_) => Err(ClusterError::Away { what, why: format!("nothing within {LIMIT:?}") }),
        }
    }
}

fn classify(what: &'static str, error: &kube::Error) -> ClusterError {
    let kube::Error::Api(status) = error else {
        return ClusterError::Away { what, why: crate::status::chain(error) };
    };
    match status.code {
        404 if status.reason == "NotFound" && status.details.is_some() => ClusterError::Absent,
        409 if status.reason == "AlreadyExists" => ClusterError::Exists,
        410 => ClusterError::Expired,
        429 | 500.. => ClusterError::Away { what, why: status.message.clone() },
        _ => ClusterError::Refused { what, why: status.message.clone() },
    }
}

impl From<ClusterError> for Failure {
    fn from(error: ClusterError) -> Self {
        let text = error.to_string();
        match error {
            ClusterError::Away { .. } | ClusterError::Expired => Self::Unavailable(text),
            ClusterError::Absent => Self::NotFound(text),
            ClusterError::Exists => Self::Conflict(text),
            ClusterError::Refused { .. } => Self::Internal(text),
        }
    }
}
