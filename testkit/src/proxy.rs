//! An HTTP proxy: tunnels by CONNECT, and requests for `http://` passed on. It alone knows where names lead.

use anyhow::{Context, Result};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;

/// Everything that it is asked for leads to one address; ends when it is dropped.
pub struct Proxy {
    pub address: SocketAddr,
    asked: Arc<Mutex<Vec<String>>>,
    acceptor: JoinHandle<()>,
}

impl Proxy {
    /// On the current tokio runtime. `to`: None: it lets nothing through.
    pub async fn start(to: Option<SocketAddr>) -> Result<Self> {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.context("listen")?;
        let address = listener.local_addr()?;
        let asked: Arc<Mutex<Vec<String>>> = Arc::default();
        let noting = asked.clone();
        let acceptor = tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                tokio::spawn(pass_on(client, to, noting.clone()));
            }
        });
        Ok(Self { address, asked, acceptor })
    }

    /// First lines of what it was asked, each once.
    pub fn asked(&self) -> Vec<String> {
        let mut asked = self.asked.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).clone();
        asked.sort();
        asked.dedup();
        asked
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.acceptor.abort();
    }
}

const HEAD_BYTES_MAX: usize = 16 << 10;

/// Errors are for the two ends: they see their connection close.
async fn pass_on(
    mut client: TcpStream,
    to: Option<SocketAddr>,
    asked: Arc<Mutex<Vec<String>>>,
) -> std::io::Result<()> {
    let (mut head, mut piece) = (Vec::new(), [0; 4096]);
    while !head.windows(4).any(|end| end == b"\r\n\r\n") && head.len() < HEAD_BYTES_MAX {
        match client.read(&mut piece).await? {
            0 => return Ok(()),
            read => head.extend_from_slice(&piece[..read]),
        }
    }
    let text = String::from_utf8_lossy(&head);
    let line = text.lines().next().unwrap_or_default().to_owned();
    let is_tunnel = line.starts_with("CONNECT ");
    asked.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).push(line);
    let Some(to) = to else {
        let refusal = b"HTTP/1.1 403 Forbidden\r\ncontent-length: 0\r\nconnection: close\r\n\r\n";
        return client.write_all(refusal).await;
    };
    let mut server = TcpStream::connect(to).await?;
    match is_tunnel {
        true => client.write_all(b"HTTP/1.1 200 Connection established\r\n\r\n").await?,
        false => server.write_all(&head).await?,
    }
    tokio::io::copy_bidirectional(&mut client, &mut server).await?;
    Ok(())
}
