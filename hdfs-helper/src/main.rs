//! The HDFS helper's process: one file system, one user, one socket to the agent that started it.
//!
//! The HDFS library panics at some answers, Kerberos is C code that reads what users wrote, and both block where they
//! like. Here they can: an agent takes whatever becomes of this process for an error of the store's.
//!
//! ```text
//! launch       what it does to itself before it is told anything
//! secrets      what it was told, where Kerberos' library finds it and nobody else does
//! egress       which addresses it connects to
//! lockdown     what it gives up before it talks to HDFS
//! serve        questions from the socket, answers to it
//! file_system  the client, and another one in the place of one that hangs
//! listing      directories, by page
//! reading      files, by piece
//! failure      what the library's errors mean
//! ```

#![warn(clippy::print_stdout, clippy::print_stderr)]

mod egress;
mod failure;
mod file_system;
mod launch;
mod listing;
mod lockdown;
mod reading;
mod secrets;
mod serve;

use hdfs::{Frames, FromHelper, PROTOCOL, ToHelper};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::process::ExitCode;
use std::time::Duration;

/// An agent configures what it starts at once.
const CONFIGURE_LIMIT: Duration = Duration::from_secs(30);

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            let _ = writeln!(std::io::stderr(), "hdfs-helper: {}", hdfs::words(&why)); // there is nowhere else to say it
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), String> {
    let socket = launch::begin(std::env::args().skip(1))?;
    let text = |e: std::io::Error| format!("the agent's socket: {e}");
    say(&socket, &FromHelper::Hello { protocol: PROTOCOL })?;
    socket.set_read_timeout(Some(CONFIGURE_LIMIT)).map_err(text)?;
    let (mut configure, frames) = configured(&socket)?;
    egress::enforce(egress::Rules {
        refused: std::mem::take(&mut configure.refused),
        own: std::mem::take(&mut configure.own),
        meant: std::mem::take(&mut configure.meant),
    });
    socket.set_read_timeout(None).map_err(text)?;
    let kept = match secrets::keep(&configure.identity) {
        Ok(kept) => kept,
        Err(why) => return say(&socket, &FromHelper::Unusable { why }),
    };
    let missing = lockdown::enforce()?;
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(4).enable_all().build();
    let runtime = runtime.map_err(|e| format!("no runtime: {e}"))?;
    runtime.block_on(async {
        match file_system::FileSystem::open(*configure, &kept) {
            Ok(file_system) => {
                say(&socket, &FromHelper::Ready { missing })?;
                serve::serve(socket, frames, file_system).await
            }
            Err(failure) => say(&socket, &FromHelper::Unusable { why: failure.why }),
        }
    })?;
    // Not by the way of every destructor: a thread may hang in Kerberos' library.
    std::process::exit(0);
}

fn say(mut socket: &UnixStream, message: &FromHelper) -> Result<(), String> {
    let frame = hdfs::encode(message).map_err(|e| e.to_string())?;
    socket.write_all(&frame).map_err(|e| format!("the agent does not listen: {e}"))
}

/// The first message, and the bytes that came behind it.
fn configured(mut socket: &UnixStream) -> Result<(Box<hdfs::Configure>, Frames<ToHelper>), String> {
    let mut frames = Frames::<ToHelper>::default();
    let mut buffer = [0; 4096];
    loop {
        let got = socket.read(&mut buffer).map_err(|e| format!("nobody configures this helper: {e}"))?;
        if got == 0 {
            return Err("the agent is gone before it configured this helper".into());
        }
        frames.space().extend_from_slice(&buffer[..got]);
        match frames.take().map_err(|e| e.to_string())?.map(|frame| frame.message) {
            Some(ToHelper::Configure(configure)) => return Ok((configure, frames)),
            Some(_) => return Err("something else came before the configuration".into()),
            None => {}
        }
    }
}
