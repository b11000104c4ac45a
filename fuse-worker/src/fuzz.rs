//! A worker's session without agent and kernel: for the fuzz target `fuse_requests`.

use crate::adapter::Adapter;
use crate::client::Link;
use crate::fs::Fs;
use crate::init::Offer;
use crate::transport::{self, Session, Transport};
use fuser::SessionACL;
use inflight::Inflight;
use link::worker::{DisabledFeatures, Mode};
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// Serves `device` with one thread, as `session::run` does after Go; the INIT request is in `inflight`. Once per process,
/// which must have the worker's own `read` and `writev`, and which is aborted if the session ends.
pub fn serve(
    inflight: &Arc<Inflight>,
    device: OwnedFd,
    mode: Mode,
    link: Arc<dyn Link>,
    fs: impl FnOnce(Offer) -> Arc<Fs>,
) {
    let init = inflight.init().expect("an INIT request is recorded");
    let offer = Offer::choose(&init, mode, &DisabledFeatures::default());
    let Session { null, transport } =
        Transport::arm(inflight.clone(), device, &DisabledFeatures::default()).expect("the first session");
    let adapter = Adapter { fs: fs(offer), transport: transport.clone(), offer };
    let mut config = fuser::Config::default();
    config.acl = SessionACL::All;
    config.n_threads = Some(1);
    let session =
        fuser::Session::from_fd(adapter, null, SessionACL::All, config).expect("INIT is understood");
    assert!(transport.init_reply().is_some(), "read and writev are the worker's own");
    std::thread::spawn(move || transport::run_interrupts(transport, link));
    std::thread::spawn(move || {
        let ended = session.run();
        eprintln!("the session ended: {ended:?}");
        std::process::abort();
    });
}
