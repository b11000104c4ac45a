//! The connection to the agent's operator API.

use anyhow::{Context, Result};
use hyper_util::rt::TokioIo;
use proto::agent::v1::agent_client::AgentClient;
use std::path::Path;
use std::time::Duration;
use tonic::transport::{Channel, Endpoint, Uri};

pub(crate) type Client = AgentClient<Channel>;

/// Connects, or says what to look at.
pub(crate) async fn connect(socket: &Path) -> Result<Client> {
    let path = socket.to_owned();
    let endpoint = Endpoint::from_static("http://agent").connect_timeout(Duration::from_secs(5));
    let channel = endpoint
        .connect_with_connector(tower::service_fn(move |_: Uri| {
            let path = path.clone();
            async move { tokio::net::UnixStream::connect(path).await.map(TokioIo::new) }
        }))
        .await
        .with_context(|| {
            format!(
                "no node agent answers on {}: is it running on this node, and is --api (or MILLPOND_API) right?",
                socket.display()
            )
        })?;
    Ok(AgentClient::new(channel))
}
