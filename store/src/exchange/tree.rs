//! A tree of files on a web server as a source. What such a server tells about a directory has many forms
//! ([`crate::dialect::index`]); which it is, is found out.

use super::client::{Ask, Client, Opens, Whole, content};
use super::{Prefix, body};
use crate::access::{Access, Question};
use crate::dialect::index::{self, Form, Item, Items, Told};
use crate::dialect::web::{REDIRECTS, Web};
use crate::dialect::{Dialect, header};
use crate::dispatch::Lane;
use crate::keys::{decode_form, encode_query, is_path, show};
use crate::limits::Limits;
use crate::observe::{Observer, RetryCause};
use crate::retry::Fault;
use crate::{ByteStream, Entry, Examined, Kind, PAGE_ENTRIES, Page, Source, StoreError, Version};
use async_trait::async_trait;
use futures::{FutureExt, StreamExt, TryStreamExt};
use http::header::{
    ACCEPT, CONTENT_LENGTH, CONTENT_TYPE, ETAG, HeaderMap, HeaderName, HeaderValue, IF_MODIFIED_SINCE,
    IF_NONE_MATCH, LAST_MODIFIED,
};
use http::{Method, StatusCode};
use std::ops::{Bound, Range};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::time::Instant;
use url::Url;

pub(crate) struct Tree {
    client: Arc<Client>,
    web: Arc<Web>,
    prefix: Prefix,
    /// Its path below the source.
    manifest: Option<String>,
    access: Arc<Access>,
    /// None: nobody has asked yet, or the server has become another one.
    form: Mutex<Option<Form>>,
    /// By this number it keeps directories of which the next page will be asked for, for no server tells one in parts; and the
    /// manifest.
    number: u64,
}

/// With what asks for it only if it has changed.
struct Listed {
    asks: HeaderMap,
    tree: Arc<index::Manifest>,
}

/// No directory is called so.
const MANIFEST: &[u8] = b"/";

impl Drop for Tree {
    fn drop(&mut self) {
        self.client.limits().kept().forget(self.number);
    }
}

/// Files that are asked about at once, for one page of a directory that tells only names.
const LOOKS_AT_ONCE: usize = 16;

const DEPTH: HeaderName = HeaderName::from_static("depth");

impl std::fmt::Debug for Tree {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Tree({})", self.client.what(self.prefix.0.as_bytes()))
    }
}

impl Tree {
    pub(crate) fn open(
        (origin, prefix): (&str, &str),
        manifest: Option<&str>,
        extra: HeaderMap,
        access: Arc<Access>,
        readers: &str,
        limits: Arc<Limits>,
        observer: Arc<dyn Observer>,
    ) -> Result<Self, StoreError> {
        let web = Arc::new(Web::new(origin)?);
        let client = Arc::new(Client::new(web.clone(), extra, access.clone(), readers, limits, observer)?);
        let (prefix, manifest) = (Prefix(prefix.to_owned()), manifest.map(str::to_owned));
        let number = client.limits().kept().source();
        Ok(Self { client, web, prefix, manifest, access, form: Mutex::default(), number })
    }

    fn known(&self) -> Option<Form> {
        *self.form.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// For questions about one path.
    async fn form(&self, question: impl Fn() -> Question) -> Result<Form, StoreError> {
        if let Some(form) = self.known() {
            return Ok(form);
        }
        let form = self.probe(&question).await?;
        match form {
            Form::Dav | Form::Manifest => self.is_of(form),
            // Which of the two decides how versions are told.
            Form::Json | Form::Html => drop(self.items_as(form, b"", &question).await?),
        }
        Ok(self.known().unwrap_or(form))
    }

    fn is_of(&self, form: Form) {
        self.web.tell_versions_by_time(form == Form::Json);
        *self.form.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) = Some(form);
    }

    /// Of pages and JSON it is the first index that tells which.
    async fn probe(&self, question: impl Fn() -> Question) -> Result<Form, StoreError> {
        if self.manifest.is_some() {
            return Ok(Form::Manifest);
        }
        let root = self.prefix.directory(b"");
        // Who does not know the method says so in many ways.
        let answered: fn(&Url, StatusCode, &HeaderMap) -> bool = |_, status, headers| match status {
            StatusCode::REQUEST_TIMEOUT | StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE => {
                false
            }
            StatusCode::UNAUTHORIZED => !Web::has_expired(headers),
            _ => true,
        };
        let said = self.whole(&root, propfind(), "0", answered, question()).await?;
        let is_dav =
            said.status == StatusCode::MULTI_STATUS && index::multistatus(&said.body, &path(&root)).is_ok();
        Ok(if is_dav { Form::Dav } else { Form::Html })
    }

    /// It may speak something else by now.
    fn doubt(&self, error: StoreError) -> StoreError {
        if matches!(error, StoreError::Malformed { .. }) {
            *self.form.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) = None;
        }
        error
    }

    /// An answer with its whole body. `depth`: "" but for PROPFIND.
    async fn whole(
        &self,
        key: &[u8],
        method: Method,
        depth: &'static str,
        takes: fn(&Url, StatusCode, &HeaderMap) -> bool,
        question: Question,
    ) -> Result<Whole, StoreError> {
        let (what, url) = (self.client.what(key), self.web.object(key));
        let op = if depth == "0" { "head" } else { "list" };
        let (method, url) = (&method, &url);
        let attempt = |patience| {
            let mut headers =
                HeaderMap::from_iter([(ACCEPT, HeaderValue::from_static("application/json, text/html"))]);
            if !depth.is_empty() {
                headers = HeaderMap::from_iter([(DEPTH, HeaderValue::from_static(depth))]);
            }
            self.ask_whole(
                Ask { method: method.clone(), url, headers, takes, opens: Opens::Nothing },
                &what,
                patience,
            )
            .boxed()
        };
        self.client.ask(op, &what, question, attempt).await
    }

    async fn ask_whole(&self, ask: Ask<'_>, what: &str, patience: Duration) -> Result<(Whole, u64), Fault> {
        let whole = self.client.whole(ask, what, patience).await?;
        let bytes = whole.body.len() as u64;
        Ok((whole, bytes))
    }

    /// Everything in one directory.
    async fn items(&self, dir: &[u8], question: impl Fn() -> Question) -> Result<Arc<Items>, StoreError> {
        let form = match self.known() {
            Some(form) => form,
            None if dir.is_empty() => self.probe(&question).await?,
            None => self.form(&question).await?,
        };
        self.items_as(form, dir, question).await
    }

    async fn items_as(
        &self,
        form: Form,
        dir: &[u8],
        question: impl Fn() -> Question,
    ) -> Result<Arc<Items>, StoreError> {
        let key = self.prefix.directory(dir);
        let what = self.client.what(&key);
        let (form, items) = match form {
            Form::Manifest => {
                let tree = self.manifest(question()).await?;
                let items = tree.directory(dir).map(index::Manifest::items);
                (form, Ok(items.ok_or_else(|| StoreError::not_found(&what))?))
            }
            Form::Dav => {
                let said = self.whole(&key, propfind(), "1", is_multistatus, question()).await;
                let said = said.map_err(|e| self.missing_root(dir, self.doubt(e)))?;
                let items = index::multistatus(&said.body, &path(&key)).and_then(|all| match all.own {
                    Some(Item::Directory) => Ok(all.below),
                    _ => Err("the index does not tell the directory itself".to_owned()),
                });
                (form, items)
            }
            Form::Json | Form::Html => {
                let said = self.whole(&key, Method::GET, "", content, question()).await;
                let said = said.map_err(|e| self.missing_root(dir, self.doubt(e)))?;
                // A server's settings may change, with or without ours.
                match is_json(&said.headers) {
                    true => (Form::Json, index::json(&said.body)),
                    false => (Form::Html, index::html(&said.body, &path(&key))),
                }
            }
        };
        let items = items.inspect(|_| self.is_of(form));
        items.map(Arc::new).map_err(|why| StoreError::malformed(&what, why))
    }

    /// The source itself is never an empty directory because a server has lost it.
    fn missing_root(&self, dir: &[u8], error: StoreError) -> StoreError {
        match error {
            StoreError::NotFound { what, .. } if dir.is_empty() => StoreError::malformed(
                &what,
                "the server has no such directory (HTTP 404): check 'source' and 'path'",
            ),
            other => other,
        }
    }

    /// All directories. What has not changed is not sent again.
    async fn manifest(&self, question: Question) -> Result<Arc<index::Manifest>, StoreError> {
        let key = self.prefix.key(self.manifest.as_deref().unwrap_or_default().as_bytes());
        let (what, url) = (self.client.what(&key), self.web.object(&key));
        let kept = self.client.limits().kept().get::<Listed>(self.number, MANIFEST);
        let takes: fn(&Url, StatusCode, &HeaderMap) -> bool =
            |_, status, _| matches!(status, StatusCode::OK | StatusCode::NOT_MODIFIED);
        let url = &url;
        let attempt = |patience| {
            let headers = kept.as_ref().map(|kept| kept.asks.clone()).unwrap_or_default();
            self.ask_whole(
                Ask { method: Method::GET, url, headers, takes, opens: Opens::Nothing },
                &what,
                patience,
            )
            .boxed()
        };
        let said = self.client.ask("list", &what, question, attempt).await?;
        if said.status == StatusCode::NOT_MODIFIED {
            let tree = kept.map(|kept| kept.tree.clone());
            return tree.ok_or_else(|| {
                StoreError::malformed(&what, "what was never sent is said not to have changed")
            });
        }
        let base = self.web.object(self.prefix.0.as_bytes());
        let tree =
            index::manifest(&said.body, base.as_str()).map_err(|why| StoreError::malformed(&what, why))?;
        let tree = Arc::new(tree);
        let asks = match (said.headers.get(ETAG), said.headers.get(LAST_MODIFIED)) {
            (Some(etag), _) => Some((IF_NONE_MATCH, etag.clone())),
            (None, Some(time)) => Some((IF_MODIFIED_SINCE, time.clone())),
            (None, None) => None,
        };
        let asks = asks.filter(|_| self.web.is_settled(&said.headers));
        if let Some(ask) = asks {
            let listed = Listed { asks: HeaderMap::from_iter([ask]), tree: tree.clone() };
            self.client.limits().kept().put(self.number, MANIFEST, tree.names(), Arc::new(listed));
        }
        Ok(tree)
    }

    /// What the server says of one path. None: it is not there.
    async fn look(&self, key: &[u8], question: Question) -> Result<Option<Item>, StoreError> {
        let (what, url) = (self.client.what(key), self.web.object(key));
        let url = &url;
        let attempt = async |patience| {
            let ask = Ask {
                method: Method::HEAD,
                url,
                headers: HeaderMap::new(),
                takes: is_there,
                opens: Opens::Nothing,
            };
            let said = self.client.send(ask, &what, patience).await?;
            if REDIRECTS.contains(&said.status()) {
                return Ok((Item::Directory, 0));
            }
            let mut headers = said.headers().clone();
            if !headers.contains_key(CONTENT_LENGTH) {
                // Apache tells no length of an empty file, unless it is sent.
                let ask = Ask {
                    method: Method::GET,
                    url,
                    headers: HeaderMap::new(),
                    takes: content,
                    opens: Opens::Nothing,
                };
                headers = self.client.send(ask, &what, patience).await?.headers().clone();
                if header(&headers, CONTENT_LENGTH) != Some("0") {
                    return Ok((Item::File(Told::Unusable), 0));
                }
            }
            let seen =
                self.web.seen(&headers, &[]).map_err(|why| Fault::retry(RetryCause::Malformed, why))?;
            Ok((Item::File(Told::of(seen)), 0))
        };
        match self.client.ask("head", &what, question, |patience| attempt(patience).boxed()).await {
            Ok(item) => Ok(Some(item)),
            Err(StoreError::NotFound { .. }) => Ok(None),
            Err(e) => Err(e),
        }
    }

    /// The same, where WebDAV says more than HEAD: what is a directory, and what a page that stands for one.
    async fn find(&self, key: &[u8], question: Question) -> Result<Option<Item>, StoreError> {
        let said = match self.whole(key, propfind(), "0", is_told, question).await {
            Ok(said) => said,
            Err(StoreError::NotFound { .. }) => return Ok(None),
            Err(e) => return Err(self.doubt(e)),
        };
        if REDIRECTS.contains(&said.status) {
            return Ok(Some(Item::Directory));
        }
        let what = self.client.what(key);
        let all =
            index::multistatus(&said.body, &path(key)).map_err(|why| StoreError::malformed(&what, why))?;
        all.own
            .map(Some)
            .ok_or_else(|| StoreError::malformed(&what, "the answer does not tell what was asked about"))
    }

    async fn item(&self, at: &[u8], question: impl Fn() -> Question) -> Result<Option<Item>, StoreError> {
        let key = self.prefix.key(at);
        match self.form(&question).await? {
            Form::Dav => match self.find(&key, question()).await? {
                Some(Item::File(Told::Name)) => self.look(&key, question()).await,
                found => Ok(found),
            },
            Form::Manifest => {
                let (dir, name) = match at.iter().rposition(|byte| *byte == b'/') {
                    Some(slash) => (&at[..slash], &at[slash + 1..]),
                    None => (&b""[..], at),
                };
                let tree = self.manifest(question()).await?;
                match tree.directory(dir).and_then(|tree| tree.get(name)) {
                    Some(Item::File(_)) => self.look(&key, question()).await,
                    found => Ok(found),
                }
            }
            Form::Json | Form::Html => self.look(&key, question()).await,
        }
    }

    /// Of one page: what only a name is known of is asked about.
    async fn told(&self, dir: &[u8], name: &[u8], item: &Item) -> Result<Shown, StoreError> {
        let at = [dir, if dir.is_empty() { b"" } else { b"/" }, name].concat();
        let looked;
        let item = match item {
            Item::File(Told::Name) => match self.look(&self.prefix.key(&at), self.access.question()).await {
                // Gone in between.
                Ok(None) => return Ok(Shown::Nothing),
                Ok(Some(item)) => {
                    looked = item;
                    &looked
                }
                Err(StoreError::Denied { .. }) => {
                    return Ok(Shown::Hidden(format!("{} (may not be read)", show(&at))));
                }
                // It leads elsewhere.
                Err(StoreError::Invalid { why, .. }) => {
                    return Ok(Shown::Hidden(format!("{} ({why})", show(&at))));
                }
                Err(e) => return Err(e),
            },
            told => told,
        };
        Ok(match entry(name, item) {
            Some(entry) => Shown::Entry(entry),
            None => Shown::Hidden(format!(
                "{} (the server tells no length, or neither a strong ETag nor a time, or a length that no file has)",
                show(&at)
            )),
        })
    }
}

enum Shown {
    Entry(Entry),
    Hidden(String),
    Nothing,
}

fn entry(name: &[u8], item: &Item) -> Option<Entry> {
    let name = name.to_vec();
    match item {
        Item::Directory => Some(Entry { name, kind: Kind::Directory, modified_ns: 0, permissions: None }),
        Item::File(Told::All { size, version, modified_ns }) => {
            let kind = Kind::File { size: *size, version: version.clone() };
            Some(Entry { name, kind, modified_ns: *modified_ns, permissions: None })
        }
        Item::File(Told::Name | Told::Unusable) => None,
    }
}

fn propfind() -> Method {
    Method::from_bytes(b"PROPFIND").expect("these are letters")
}

/// As it is called at the server.
fn path(key: &[u8]) -> Vec<u8> {
    [b"/", key].concat()
}

fn is_json(headers: &HeaderMap) -> bool {
    header(headers, CONTENT_TYPE).is_some_and(|kind| kind.trim_start().starts_with("application/json"))
}

fn is_there(url: &Url, status: StatusCode, headers: &HeaderMap) -> bool {
    content(url, status, headers) || (REDIRECTS.contains(&status) && Web::adds_slash(url, headers))
}

fn is_multistatus(_: &Url, status: StatusCode, _: &HeaderMap) -> bool {
    status == StatusCode::MULTI_STATUS
}

fn is_told(url: &Url, status: StatusCode, headers: &HeaderMap) -> bool {
    is_multistatus(url, status, headers) || (REDIRECTS.contains(&status) && Web::adds_slash(url, headers))
}

#[async_trait]
impl Source for Tree {
    fn is_queued(&self) -> bool {
        self.client.place().is_queued(Lane::Metadata)
    }

    fn others_move(&self) -> bool {
        self.client.place().others_move()
    }

    async fn list(&self, dir: &[u8], token: Option<&str>) -> Result<Page, StoreError> {
        if !dir.is_empty() && !is_path(dir) {
            return Err(StoreError::not_found(&self.client.what(&self.prefix.directory(dir))));
        }
        let kept = token.and_then(|_| self.client.limits().kept().take::<Items>(self.number, dir));
        let items = match kept {
            Some(items) => items,
            None => self.items(dir, || self.access.question()).await?,
        };
        let after = token.map(decode_form);
        let from = after.as_deref().map_or(Bound::Unbounded, Bound::Excluded);
        let mut names = items.named.range::<[u8], _>((from, Bound::Unbounded));
        let here: Vec<(&Vec<u8>, &Item)> = names.by_ref().take(PAGE_ENTRIES).collect();
        let more = names.next().is_some();
        let told = here.iter().map(|(name, item)| self.told(dir, name, item));
        let mut told = futures::stream::iter(told.collect::<Vec<_>>()).buffered(LOOKS_AT_ONCE);
        let (whole, begun) = (self.access.question(), Instant::now());
        let mut page = Page::default();
        if token.is_none() {
            page.unnameable = items.unnameable.iter().map(|name| show(name)).collect();
        }
        let mut last = None;
        for (name, _) in &here {
            // A slow server tells a part of it in time, and another with the next page.
            let shown = match whole.in_time(told.next()).await {
                Some(Some(Ok(shown))) => shown,
                _ if last.is_some() => break,
                Some(Some(Err(e))) => return Err(e),
                Some(None) | None => {
                    let (what, waited) = (self.client.what(&self.prefix.directory(dir)), begun.elapsed());
                    let cause = "its files are looked at one by one, and not one was in time".to_owned();
                    return Err(StoreError::Unavailable {
                        what,
                        waited,
                        queued: Duration::ZERO,
                        attempts: 1,
                        cause,
                    });
                }
            };
            match shown {
                Shown::Entry(entry) => page.entries.push(entry),
                Shown::Hidden(text) => page.unnameable.push(text),
                Shown::Nothing => {}
            }
            last = Some(*name);
        }
        drop(told);
        let more = more || here.last().map(|(name, _)| *name) != last;
        page.next = last.filter(|_| more).map(|name| encode_query(name));
        if more {
            let names = items.named.len() + items.unnameable.len();
            self.client.limits().kept().put(self.number, dir, names, items);
        }
        Ok(page)
    }

    async fn head(&self, path: &[u8]) -> Result<Option<Entry>, StoreError> {
        if !is_path(path) {
            return Ok(None);
        }
        let name = path.rsplit(|byte| *byte == b'/').next().unwrap_or(path);
        let item = self.item(path, || self.access.question()).await?;
        Ok(item.and_then(|item| entry(name, &item)))
    }

    async fn get(&self, path: &[u8], version: &Version, range: Range<u64>) -> Result<ByteStream, StoreError> {
        let key = self.prefix.key(path);
        if !is_path(path) {
            return Err(StoreError::not_found(&self.client.what(&key)));
        }
        body::open(self.client.clone(), &key, version, range, self.access.question()).await
    }

    async fn check(&self, limit: Duration) -> Result<(), StoreError> {
        let started = Instant::now();
        let ask = || self.access.probe(limit.saturating_sub(started.elapsed()));
        let items = self.items(b"", ask).await?;
        let file =
            items.named.iter().find(|(_, item)| matches!(item, Item::File(Told::Name | Told::All { .. })));
        // The right to list and to read, and the ability to serve a range: found out now, not at the pod's first read.
        let Some((name, _)) = file else { return Ok(()) };
        let looked = self.look(&self.prefix.key(name), ask()).await.map_err(|e| match e {
            StoreError::Denied { what, why } => StoreError::Denied {
                what: self.client.what(self.prefix.0.as_bytes()),
                why: format!("the directory can be listed but {what} not be read: {why}"),
            },
            other => other,
        });
        if let Some(Item::File(Told::All { size, version, .. })) = looked?
            && size > 1
        {
            let mut body =
                body::open(self.client.clone(), &self.prefix.key(name), &version, 0..1, ask()).await?;
            while body.try_next().await?.is_some() {}
        }
        Ok(())
    }

    async fn examine(&self, limit: Duration) -> Vec<Examined> {
        super::examine(&self.client, limit, self.check(limit)).await
    }
}
