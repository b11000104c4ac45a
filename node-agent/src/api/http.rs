//! The metrics page and the health check, over plain HTTP.
//!
//! Every pod of the cluster may reach this port, and answering costs the agent work without a limit: so there are
//! few connections at once, each ends in time, and a page is rendered once a second for all that ask.

use bytes::Bytes;
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode, header};
use hyper_util::rt::TokioIo;
use std::convert::Infallible;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::net::TcpListener;
use tokio::sync::Mutex;
use tokio::task::{AbortHandle, Id, JoinSet};

/// What one connection may take, and how many there are.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// At once. One more, and the oldest of the client with most of them is cut off.
    pub connections: usize,
    /// To the end of a request's head, from its beginning or since the answer before.
    pub head: Duration,
    /// From its beginning to its end, whatever it does: a client that dawdles.
    pub connection: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self { connections: 64, head: Duration::from_secs(5), connection: Duration::from_secs(30) }
    }
}

/// A page as old as this is rendered anew.
const PAGE_AGE: Duration = Duration::from_secs(1);
/// Read ahead of a request, at most.
const BUFFER: usize = 16 << 10;

/// The metrics page: rendered for one client, kept for those that ask soon after.
pub(crate) struct Page {
    render: Arc<dyn Fn() -> String + Send + Sync>,
    /// The thread that renders holds it, and the others wait for what comes of it. That is the thread, not the
    /// connection which wanted the page first: its client may hang up.
    last: Arc<Mutex<Option<(Instant, Bytes)>>>,
    age: Duration,
}

impl Page {
    /// `render` may read files: it has a thread that may block.
    pub(crate) fn new(render: Arc<dyn Fn() -> String + Send + Sync>) -> Arc<Self> {
        Arc::new(Self { render, last: Arc::default(), age: PAGE_AGE })
    }

    async fn get(&self) -> Option<Bytes> {
        let mut last = self.last.clone().lock_owned().await;
        if let Some((_, page)) = last.as_ref().filter(|(at, _)| at.elapsed() < self.age) {
            return Some(page.clone());
        }
        let render = self.render.clone();
        let rendering = move || {
            let page = Bytes::from(render());
            *last = Some((Instant::now(), page.clone()));
            page
        };
        tokio::task::spawn_blocking(rendering).await.ok()
    }
}

/// Who is connected, in the order of arrival.
#[derive(Default)]
struct Guests(Vec<(Id, IpAddr, AbortHandle)>);

impl Guests {
    /// Which client to cut off so that there is a place: a client from elsewhere, or one that asked last, is not kept
    /// out by one that takes all places.
    fn surplus(&mut self, places: usize) -> Option<AbortHandle> {
        if self.0.len() < places {
            return None;
        }
        let count = |peer: &IpAddr| self.0.iter().filter(|(_, other, _)| other == peer).count();
        let most = self.0.iter().map(|(_, peer, _)| count(peer)).max()?;
        let oldest = self.0.iter().position(|(_, peer, _)| count(peer) == most)?;
        Some(self.0.remove(oldest).2)
    }

    fn left(&mut self, id: Id) {
        self.0.retain(|(guest, _, _)| *guest != id);
    }
}

/// Serves until the task is dropped, and cuts off every client that is connected then.
pub(crate) async fn serve(listener: TcpListener, page: Arc<Page>, limits: Limits) {
    let (mut guests, mut connections) = (Guests::default(), JoinSet::new());
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            Some(ended) = connections.join_next_with_id() => {
                guests.left(ended.map_or_else(|error| error.id(), |(id, ())| id));
                continue;
            }
        };
        let (stream, peer) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                tracing::warn!(%error, "metrics connection could not be accepted");
                tokio::time::sleep(Duration::from_millis(200)).await;
                continue;
            }
        };
        if let Some(surplus) = guests.surplus(limits.connections) {
            surplus.abort();
        }
        let page = page.clone();
        let task = connections.spawn(async move {
            let answer = service_fn(move |request| {
                let page = page.clone();
                async move { Ok::<_, Infallible>(answer(&request, &page).await) }
            });
            let connection = hyper::server::conn::http1::Builder::new()
                .timer(hyper_util::rt::TokioTimer::new())
                .header_read_timeout(limits.head)
                .max_buf_size(BUFFER)
                .serve_connection(TokioIo::new(stream), answer);
            // Both kinds of end are the client's affair: a broken connection, and one that takes too long.
            let _ = tokio::time::timeout(limits.connection, connection).await;
        });
        guests.0.push((task.id(), peer.ip(), task));
    }
}

async fn answer(request: &Request<Incoming>, page: &Page) -> Response<Full<Bytes>> {
    const OPENMETRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    let text = |status, text: &'static str| (status, "text/plain", Bytes::from_static(text.as_bytes()));
    let (status, kind, body) = match (request.method(), request.uri().path()) {
        (&Method::GET, "/metrics") => match page.get().await {
            Some(page) => (StatusCode::OK, OPENMETRICS, page),
            None => text(
                StatusCode::INTERNAL_SERVER_ERROR,
                "the page could not be rendered: see the agent's log\n",
            ),
        },
        (&Method::GET, "/healthz") => text(StatusCode::OK, "ok\n"),
        _ => text(StatusCode::NOT_FOUND, "try /metrics or /healthz\n"),
    };
    let mut response = Response::new(Full::new(body));
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONTENT_TYPE, header::HeaderValue::from_static(kind));
    response
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{Ipv4Addr, SocketAddr};
    use std::sync::atomic::{AtomicUsize, Ordering};
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::{TcpSocket, TcpStream};

    const SOON: Duration = Duration::from_secs(20);

    struct Served {
        address: SocketAddr,
        rendered: Arc<AtomicUsize>,
        task: tokio::task::JoinHandle<()>,
    }

    async fn served(limits: Limits, page_bytes: usize, age: Duration) -> Served {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (address, rendered) = (listener.local_addr().unwrap(), Arc::new(AtomicUsize::new(0)));
        let counting = rendered.clone();
        let render = Arc::new(move || {
            counting.fetch_add(1, Ordering::Relaxed);
            "x".repeat(page_bytes)
        });
        let page = Arc::new(Page { render, last: Arc::default(), age });
        Served { address, rendered, task: tokio::spawn(serve(listener, page, limits)) }
    }

    impl Served {
        async fn connect(&self, from: [u8; 4]) -> TcpStream {
            let socket = TcpSocket::new_v4().unwrap();
            socket.set_recv_buffer_size(4096).unwrap();
            socket.bind(SocketAddr::new(Ipv4Addr::from(from).into(), 0)).unwrap();
            socket.connect(self.address).await.unwrap()
        }

        async fn scrape(&self, from: [u8; 4]) -> String {
            let mut stream = self.connect(from).await;
            let asked =
                format!("GET /metrics HTTP/1.1\r\nhost: {}\r\nconnection: close\r\n\r\n", self.address);
            stream.write_all(asked.as_bytes()).await.unwrap();
            let mut text = String::new();
            tokio::time::timeout(SOON, stream.read_to_string(&mut text)).await.unwrap().unwrap();
            text
        }
    }

    /// How much came before the other side hung up.
    async fn until_cut_off(stream: &mut TcpStream) -> usize {
        let (mut bytes, mut buffer) = (0, vec![0; 64 << 10]);
        loop {
            match tokio::time::timeout(SOON, stream.read(&mut buffer)).await.expect("it is cut off") {
                Ok(0) | Err(_) => return bytes,
                Ok(n) => bytes += n,
            }
        }
    }

    const PROMETHEUS: [u8; 4] = [127, 0, 0, 1];
    const STRANGER: [u8; 4] = [127, 0, 0, 2];

    #[tokio::test(flavor = "multi_thread")]
    async fn hundreds_of_idle_connections_keep_no_scrape_out_and_are_few() {
        let patient = Limits { connections: 16, head: 100 * SOON, connection: 100 * SOON };
        for scraper in [PROMETHEUS, STRANGER] {
            let served = served(patient, 10, Duration::ZERO).await;
            let mut idle = Vec::new();
            for _ in 0..400 {
                idle.push(served.connect(STRANGER).await);
            }
            // Also one that has taken all places by itself.
            assert!(served.scrape(scraper).await.starts_with("HTTP/1.1 200"), "{scraper:?}");
            let (mut buffer, mut gone) = ([0; 1], 0);
            for stream in &mut idle[..400 - 16] {
                let read = tokio::time::timeout(SOON, stream.read(&mut buffer)).await.expect("cut off");
                gone += usize::from(matches!(read, Ok(0) | Err(_)));
            }
            assert_eq!(gone, 400 - 16, "as many as there are places are left");
            served.task.abort();
        }
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn whoever_takes_most_places_gives_one_up() {
        let patient = Limits { connections: 8, head: 100 * SOON, connection: 100 * SOON };
        let served = served(patient, 10, Duration::ZERO).await;
        let mut first = served.connect(PROMETHEUS).await;
        let mut strangers = Vec::new();
        for _ in 0..100 {
            strangers.push(served.connect(STRANGER).await);
        }
        until_cut_off(&mut strangers[0]).await;
        // The oldest of all is still served.
        first.write_all(b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
        let mut answer = [0; 12];
        tokio::time::timeout(SOON, first.read_exact(&mut answer)).await.unwrap().unwrap();
        assert_eq!(&answer, b"HTTP/1.1 200");
        served.task.abort();
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_page_is_rendered_once_for_all_who_ask_soon() {
        let page_age = Duration::from_secs(3600);
        let served = Arc::new(served(Limits::default(), 1000, page_age).await);
        let mut scrapes = JoinSet::new();
        for _ in 0..200 {
            let served = served.clone();
            scrapes.spawn(async move { served.scrape(PROMETHEUS).await });
            if scrapes.len() >= 20 {
                scrapes.join_next().await.unwrap().unwrap();
            }
        }
        while let Some(scraped) = scrapes.join_next().await {
            let page = scraped.unwrap();
            assert!(page.starts_with("HTTP/1.1 200") && page.ends_with("xxx"), "{page}");
        }
        assert_eq!(served.rendered.load(Ordering::Relaxed), 1);
        served.task.abort();
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn whoever_hangs_up_before_its_page_is_there_has_no_other_rendered() {
        let rendered = Arc::new(AtomicUsize::new(0));
        let (open, gate) = std::sync::mpsc::channel::<()>();
        let (counting, gate) = (rendered.clone(), std::sync::Mutex::new(gate));
        let render = Arc::new(move || {
            if counting.fetch_add(1, Ordering::SeqCst) == 0 {
                let _ = gate.lock().unwrap().recv(); // until it is opened
            }
            "page".to_owned()
        });
        let page = Page { render, last: Default::default(), age: Duration::from_secs(3600) };
        let mut first = Box::pin(page.get());
        assert!(futures::poll!(&mut first).is_pending());
        drop(first);
        // These come while it is being rendered, and go again.
        for _ in 0..20 {
            let mut asking = Box::pin(page.get());
            let _ = futures::poll!(&mut asking);
        }
        let mut last = Box::pin(page.get());
        let _ = futures::poll!(&mut last);
        open.send(()).unwrap();
        assert_eq!(last.await.unwrap(), "page");
        assert_eq!(rendered.load(Ordering::SeqCst), 1);
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_page_that_is_old_is_rendered_anew() {
        let served = served(Limits::default(), 10, Duration::ZERO).await;
        for n in 1..=3 {
            served.scrape(PROMETHEUS).await;
            assert_eq!(served.rendered.load(Ordering::Relaxed), n);
        }
        served.task.abort();
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_request_that_never_ends_and_an_answer_that_is_never_read_are_cut_off() {
        let short = Duration::from_millis(300);
        let hasty = Limits { head: short, connection: 100 * SOON, ..Limits::default() };
        let slow_head = served(hasty, 10, Duration::ZERO).await;
        let mut silent = slow_head.connect(STRANGER).await;
        let mut slow = slow_head.connect(STRANGER).await;
        slow.write_all(b"GET /metrics HTTP/1.1\r\nx: ").await.unwrap();
        // One byte after the other, for as long as it is let.
        let dripping = async {
            while slow.write_all(b"y").await.is_ok() {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        tokio::time::timeout(SOON, dripping).await.expect("it is cut off");
        until_cut_off(&mut silent).await;

        let brief = Limits { head: 100 * SOON, connection: short, ..Limits::default() };
        let large = 64 << 20;
        let slow_reader = served(brief, large, Duration::ZERO).await;
        let mut reader = slow_reader.connect(STRANGER).await;
        reader.write_all(b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
        // Until the server has given up, nothing is read; then what was on its way.
        let mut ended = false;
        for _ in 0..1000 {
            tokio::time::sleep(Duration::from_millis(20)).await;
            ended = reader.write_all(b"x").await.is_err();
            if ended {
                break;
            }
        }
        assert!(ended, "it waits for ever");
        assert!(until_cut_off(&mut reader).await < large);
        slow_head.task.abort();
        slow_reader.task.abort();
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_head_without_end_takes_no_memory() {
        let served = served(Limits::default(), 10, Duration::ZERO).await;
        let mut stream = served.connect(STRANGER).await;
        stream.write_all(b"GET /metrics HTTP/1.1\r\nx: ").await.unwrap();
        let mut sent = 0;
        while sent < 64 << 20 && stream.write_all(&[b'y'; 4096]).await.is_ok() {
            sent += 4096;
        }
        assert!(sent < 64 << 20, "it was listened to for ever");
        served.task.abort();
    }
}
