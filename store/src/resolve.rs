//! Names of hosts become addresses: each name looked up once at a time, and not too many of them at once.
//!
//! A look-up is a call of the C library's in a thread that cannot be cancelled, and where the name server does not
//! answer it takes far longer than a question waits for it. So those that ask for one name share one thread, however
//! often they give up and ask again, and all look-ups together leave most of the runtime's threads to others.

use futures::FutureExt;
use futures::future::{BoxFuture, Shared};
use reqwest::dns::{Addrs, Name, Resolve, Resolving};
use std::collections::HashMap;
use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::Semaphore;

/// Threads; a node has no more pods than this, and the runtime four times as many.
const AT_ONCE: usize = 128;

type Found = Result<Vec<SocketAddr>, (io::ErrorKind, String)>;
type LookUp = dyn Fn(&str) -> io::Result<Vec<SocketAddr>> + Send + Sync;
type Running = Shared<BoxFuture<'static, Found>>;

/// Cheap to clone; all clones share their look-ups.
#[derive(Clone)]
pub(crate) struct Names {
    look_up: Arc<LookUp>,
    running: Arc<Mutex<HashMap<String, Running>>>,
    threads: Arc<Semaphore>,
}

impl std::fmt::Debug for Names {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Names").finish_non_exhaustive()
    }
}

impl Names {
    /// Over the machine's own resolver.
    pub(crate) fn of_the_machine() -> Self {
        Self::over(|host| Ok((host, 0).to_socket_addrs()?.collect()))
    }

    fn over(look_up: impl Fn(&str) -> io::Result<Vec<SocketAddr>> + Send + Sync + 'static) -> Self {
        let threads = Arc::new(Semaphore::new(AT_ONCE));
        Self { look_up: Arc::new(look_up), running: Arc::default(), threads }
    }

    /// Addresses of a host, without a port. Goes on when its caller is gone: others may wait for it.
    pub(crate) async fn look_up(&self, host: &str) -> io::Result<Vec<SocketAddr>> {
        let run = {
            let mut running = self.lock();
            match running.get(host) {
                Some(run) => run.clone(),
                None => {
                    let run = self.start(host.to_owned());
                    running.insert(host.to_owned(), run.clone());
                    run
                }
            }
        };
        run.await.map_err(|(kind, why)| io::Error::new(kind, why))
    }

    fn start(&self, host: String) -> Running {
        let me = self.clone();
        let work = tokio::spawn(async move {
            let _permit = me.threads.clone().acquire_owned().await;
            let (look_up, name) = (me.look_up.clone(), host.clone());
            let found = tokio::task::spawn_blocking(move || look_up(&name)).await;
            me.lock().remove(&host);
            found.unwrap_or_else(|e| Err(io::Error::other(e))).map_err(|e| (e.kind(), e.to_string()))
        });
        work.map(|found| found.unwrap_or_else(|e| Err((io::ErrorKind::Other, e.to_string()))))
            .boxed()
            .shared()
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, Running>> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Resolve for Names {
    fn resolve(&self, name: Name) -> Resolving {
        let names = self.clone();
        Box::pin(async move {
            let found = names.look_up(name.as_str()).await?;
            Ok(Box::new(found.into_iter()) as Addrs)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::mpsc;
    use std::time::Duration;

    #[tokio::test(flavor = "multi_thread")]
    async fn a_name_that_hangs_takes_one_thread_and_no_other_name_waits_for_it() {
        let (thaw, frozen) = mpsc::channel::<()>();
        let (frozen, calls) = (Mutex::new(frozen), Arc::new(AtomicUsize::new(0)));
        let counted = calls.clone();
        let names = Names::over(move |host| {
            if host == "hangs" {
                counted.fetch_add(1, Ordering::SeqCst);
                let _ = frozen.lock().unwrap().recv();
            }
            Ok(vec![([127, 0, 0, 1], 0).into()])
        });
        for _ in 0..1000 {
            let waits = tokio::time::timeout(Duration::ZERO, names.look_up("hangs"));
            assert!(waits.await.is_err());
        }
        let other = tokio::time::timeout(Duration::from_secs(20), names.look_up("answers"));
        assert_eq!(other.await.unwrap().unwrap().len(), 1);
        let mut waits = Box::pin(names.look_up("hangs"));
        assert!((&mut waits).now_or_never().is_none());
        thaw.send(()).unwrap();
        assert_eq!(waits.await.unwrap().len(), 1);
        assert_eq!(calls.load(Ordering::SeqCst), 1);
        // It is looked up anew the next time, for it may have changed.
        thaw.send(()).unwrap();
        names.look_up("hangs").await.unwrap();
        assert_eq!(calls.load(Ordering::SeqCst), 2);
    }

    #[tokio::test]
    async fn a_name_that_does_not_exist_is_an_error() {
        let names = Names::over(|_| Err(io::ErrorKind::NotFound.into()));
        assert_eq!(names.look_up("x").await.unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}
