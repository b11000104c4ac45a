//! `shape-proxy`: a TCP proxy that makes loopback behave like a distant store: round-trip time and bandwidth.
//!
//! Each direction of each connection is a pipe with half the round-trip time as delay and its own bandwidth. A new
//! connection costs one round trip more, as a handshake would.

use anyhow::{Context, Result};
use clap::Parser;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::time::Instant;

#[derive(Debug, Clone, Parser)]
#[command(about = "A TCP proxy with round-trip time and per-connection bandwidth")]
struct Options {
    #[arg(long, default_value = "127.0.0.1:0")]
    listen: SocketAddr,
    #[arg(long)]
    to: SocketAddr,
    /// Round-trip time, milliseconds.
    #[arg(long, default_value_t = 0)]
    rtt_ms: u64,
    /// Bandwidth of one connection in each direction, megabytes (10^6) per second; 0: unlimited.
    #[arg(long, default_value_t = 0)]
    mbps: u64,
    /// Where to write the address (host:port) once the proxy listens.
    #[arg(long)]
    ready_file: Option<PathBuf>,
}

const PIECE: usize = 64 << 10;

#[tokio::main]
async fn main() -> Result<()> {
    let options = Options::parse();
    let listener =
        TcpListener::bind(options.listen).await.with_context(|| format!("listen on {}", options.listen))?;
    let address = listener.local_addr()?;
    println!("{address}");
    if let Some(path) = &options.ready_file {
        testkit::process::write_ready_file(path, &address.to_string())?;
    }
    let mut terminate = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate())?;
    loop {
        tokio::select! {
            accepted = listener.accept() => {
                if let Ok((client, _)) = accepted {
                    tokio::spawn(relay(client, options.clone()));
                }
            }
            _ = terminate.recv() => return Ok(()),
            _ = tokio::signal::ctrl_c() => return Ok(()),
        }
    }
}

async fn relay(client: TcpStream, options: Options) {
    let rtt = Duration::from_millis(options.rtt_ms);
    tokio::time::sleep(rtt).await;
    // A dropped client is how the caller learns that the target is down.
    let Ok(server) = TcpStream::connect(options.to).await else { return };
    let _ = (client.set_nodelay(true), server.set_nodelay(true));
    let (from_client, to_client) = client.into_split();
    let (from_server, to_server) = server.into_split();
    // As soon as one side breaks off, so does the other; an orderly end of one direction is passed on by `pipe`.
    let up = pipe(from_client, to_server, rtt / 2, options.mbps);
    let down = pipe(from_server, to_client, rtt / 2, options.mbps);
    let _ = tokio::try_join!(up, down);
}

/// Delay line: the reader stamps each piece with its due time, the writer waits for it and keeps to the bandwidth.
async fn pipe(
    mut from: tokio::net::tcp::OwnedReadHalf,
    mut to: tokio::net::tcp::OwnedWriteHalf,
    delay: Duration,
    mbps: u64,
) -> std::io::Result<()> {
    let in_transit = match mbps {
        0 => 64 << 20,
        _ => mbps * 1_000_000 / 1000 * delay.as_millis() as u64,
    };
    let (sender, mut receiver) = mpsc::channel::<(Instant, Vec<u8>)>(in_transit as usize / PIECE + 16);
    let read = async move {
        loop {
            let mut piece = Vec::with_capacity(PIECE);
            let count = from.read_buf(&mut piece).await?;
            if count == 0 || sender.send((Instant::now() + delay, piece)).await.is_err() {
                return Ok::<_, std::io::Error>(());
            }
        }
    };
    let write = async move {
        let mut free = Instant::now();
        while let Some((due, piece)) = receiver.recv().await {
            let now = Instant::now();
            // Time that passed unused is lost, but for one timer tick: sleeps round up to a millisecond.
            free = free.max(now.checked_sub(Duration::from_millis(2)).unwrap_or(now)).max(due);
            if free > now {
                tokio::time::sleep_until(free).await;
            }
            to.write_all(&piece).await?;
            free += Duration::from_nanos((piece.len() as u64 * 1000).checked_div(mbps).unwrap_or(0));
        }
        to.shutdown().await
    };
    tokio::try_join!(read, write).map(|_| ())
}
