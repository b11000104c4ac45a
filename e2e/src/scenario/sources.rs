//! Many sources, each with one file whose name and bytes are computed, and a volume of each.

use crate::node::{Node, Server, Volume};
use anyhow::{Context, Result, ensure};
use std::fs;
use std::path::Path;
use testkit::content;

const FILE_BYTES: u64 = 20_000;

pub(super) struct Sources {
    pub(super) all: Vec<Source>,
    /// Ends when this is dropped.
    _server: Server,
}

pub(super) struct Source {
    pub(super) volume: Volume,
    object: String,
}

impl Sources {
    pub(super) fn create(node: &mut Node, count: usize) -> Result<Self> {
        let server = Server::synthetic(node.places(), count as u64, FILE_BYTES, "p{n}/file")?;
        let (endpoint, width) = (server.endpoint(), count.saturating_sub(1).to_string().len());
        let mut all = Vec::new();
        for n in 0..count {
            let prefix = format!("p{n:0width$}");
            let profile = if n.is_multiple_of(2) { "large" } else { "small" };
            let more = [("profile", profile), ("endpoint", endpoint.as_str())];
            all.push(Source {
                volume: node.create(&prefix, &prefix, &more)?,
                object: format!("{prefix}/file"),
            });
        }
        Ok(Self { all, _server: server })
    }

    pub(super) fn delete(&self, node: &mut Node) -> Result<()> {
        Ok(self.all.iter().try_for_each(|source| node.delete(&source.volume))?)
    }
}

impl Source {
    /// Its file, through the mount at `target`, is what the server computes.
    pub(super) fn verify(&self, target: &Path) -> Result<()> {
        let bytes = fs::read(target.join("file")).with_context(|| self.object.clone())?;
        let wrong = content::first_wrong_byte(content::id(&self.object), 0, &bytes);
        let whole = bytes.len() as u64 == FILE_BYTES;
        ensure!(whole && wrong.is_none(), "{}: {} bytes, wrong at {wrong:?}", self.object, bytes.len());
        Ok(())
    }
}
