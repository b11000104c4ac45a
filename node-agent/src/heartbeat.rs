//! The agent's sign of life to the broker: said by a thread that has first been through what everything else goes
//! through. An agent whose tables are locked for ever, or whose runtime turns no more, falls silent and is succeeded.

use crate::privileged::Privileged;
use crate::supervisor::Spawner;
use crate::volumes::Volumes;
use link::broker::BrokerRequest;
use link::budget;
use std::sync::Arc;
use std::time::Duration;
use tokio::runtime::Handle;

const EVERY: Duration = budget::AGENT_BEAT.time;

/// The thread ends with the process. `volumes`: None as long as another agent serves them.
pub(crate) fn start(
    volumes: impl Fn() -> Option<Arc<Volumes>> + Send + 'static,
    spawner: Arc<Spawner>,
    privileged: Arc<dyn Privileged>,
    runtime: Handle,
) -> std::io::Result<()> {
    let beat = move || {
        loop {
            std::thread::sleep(EVERY);
            for mount in volumes().iter().flat_map(|volumes| volumes.mounts()) {
                mount.state();
            }
            spawner.standing_by();
            // On a thread of the runtime, with its timer, and with an answer that the link's thread brings.
            let broker = privileged.clone();
            let said = runtime.spawn(async move { broker.ask(BrokerRequest::Beat, Vec::new()).await });
            if let Ok(Err(refusal)) = runtime.block_on(said) {
                tracing::debug!(%refusal, "no sign of life to the broker");
            }
        }
    };
    std::thread::Builder::new().name("beat".into()).spawn(beat).map(drop)
}
