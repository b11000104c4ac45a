//! What a web server tells about a directory, as items: nginx's JSON, the pages of nginx, Apache and their like, WebDAV, and a
//! list of URLs for trees that have no index.

use super::{Object, date, field, web, xml};
use crate::Version;
use crate::keys::is_name;
use html5gum::{HtmlString, Token, Tokenizer};
use percent_encoding::percent_decode;
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};

/// In which form directories are told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    /// `autoindex_format json`: times and sizes are whole, so that they are the versions.
    Json,
    /// Links. What they lead to is asked one by one, for pages round sizes and times.
    Html,
    /// PROPFIND.
    Dav,
    /// A list of URLs, for all directories at once.
    Manifest,
}

/// What a name in a directory is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Item {
    Directory,
    File(Told),
}

/// What a directory tells of a file in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Told {
    /// Nothing but that it is there.
    Name,
    /// As much as its own answer would.
    All { size: u64, version: Version, modified_ns: i64 },
    /// That it is none that could be read: it has no version, or a size that no file has.
    Unusable,
}

/// By name. A directory wins over a file of the same name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Items {
    pub(crate) named: BTreeMap<Vec<u8>, Item>,
    /// What is there and has no POSIX name.
    pub(crate) unnameable: Vec<Vec<u8>>,
}

impl Items {
    fn add(&mut self, name: Vec<u8>, item: Item) -> Result<(), String> {
        if self.named.len() + self.unnameable.len() >= ITEMS_MAX {
            return Err(format!("a directory of more than {ITEMS_MAX} names: spread them over several"));
        }
        if !is_name(&name) {
            self.unnameable.push(name);
        } else if item == Item::Directory || !self.named.contains_key(&name) {
            self.named.insert(name, item);
        }
        Ok(())
    }
}

/// It is held in memory as a whole, for no web server tells a directory in parts.
pub(crate) const ITEMS_MAX: usize = 100_000;

impl Told {
    pub(crate) fn of(object: Option<Object>) -> Self {
        match object {
            Some(Object { size, version, modified_ns }) => Self::All { size, version, modified_ns },
            None => Self::Unusable,
        }
    }
}

/// A row of nginx's.
#[derive(Deserialize)]
struct Row {
    name: String,
    #[serde(rename = "type")]
    kind: String,
    #[serde(default)]
    mtime: Option<String>,
    #[serde(default)]
    size: Option<u64>,
}

/// nginx writes names as they are, and they need not be UTF-8.
pub(crate) fn json(body: &[u8]) -> Result<Items, String> {
    let text = String::from_utf8_lossy(body);
    let rows: Vec<Row> =
        serde_json::from_str(&text).map_err(|e| format!("the index is none in nginx's JSON: {e}"))?;
    let mut items = Items::default();
    for Row { name, kind, mtime, size } in rows {
        let time = mtime.as_deref().and_then(date::parse_http);
        let item = match (kind.as_str(), size, time) {
            ("directory", ..) => Item::Directory,
            ("file", Some(size), Some(time)) => {
                Item::File(Told::of(web::object(size, web::by_time(time, size), time)))
            }
            ("file", ..) => Item::File(Told::Name),
            _ => continue,
        };
        // A character that stands for what was no UTF-8: nothing could be asked for by that name.
        match name.contains('\u{fffd}') {
            true => items.unnameable.push(name.into_bytes()),
            false => items.add(name.into_bytes(), item)?,
        }
    }
    Ok(items)
}

/// The links of a page to what lies in the directory itself (`path`, as it is called at the server, not encoded, with a slash at
/// either end).
pub(crate) fn html(body: &[u8], path: &[u8]) -> Result<Items, String> {
    let (mut items, mut title, mut in_title) = (Items::default(), Vec::new(), false);
    let href = HtmlString(b"href".to_vec());
    for token in Tokenizer::new(body).flatten() {
        match token {
            Token::StartTag(tag) if **tag.name == *b"title" => in_title = title.is_empty(),
            Token::EndTag(tag) if **tag.name == *b"title" => in_title = false,
            Token::String(text) if in_title && title.len() < TITLE_BYTES_MAX => {
                title.extend_from_slice(&text)
            }
            Token::StartTag(tag) if **tag.name == *b"a" => {
                let Some(link) = tag.attributes.get(&href) else { continue };
                if let Some((name, is_directory)) = child(link, path) {
                    items.add(name, if is_directory { Item::Directory } else { Item::File(Told::Name) })?;
                }
            }
            _ => {}
        }
    }
    // Links are on every page: on one that asks for a password, too, and on the server's welcome.
    let title = String::from_utf8_lossy(&title).to_lowercase();
    if !["index of", "directory"].iter().any(|words| title.contains(words)) {
        let title: String = title.trim().chars().filter(|c| !c.is_control()).take(60).collect();
        return Err(format!(
            "the answer is no index of a directory but a page with the title {title:?}: let the server make indexes (nginx: \
             autoindex on, Apache: Options +Indexes), remove index.html, or list the files in a 'manifest'"
        ));
    }
    Ok(items)
}

const TITLE_BYTES_MAX: usize = 4096;

/// The name that a link gives to something in the directory, and whether it is a directory. None: it leads elsewhere.
fn child(link: &[u8], path: &[u8]) -> Option<(Vec<u8>, bool)> {
    let link = link.trim_ascii();
    let link = link.split(|byte| *byte == b'#').next().unwrap_or_default();
    // Links that sort, and what a server computes.
    if link.is_empty() || link.contains(&b'?') {
        return None;
    }
    let colon = link.iter().position(|byte| *byte == b':');
    let slash = link.iter().position(|byte| *byte == b'/').unwrap_or(link.len());
    let below = if link.starts_with(b"//") || colon.is_some_and(|colon| colon < slash) {
        // Of which host it is does not matter: nothing is ever asked of another one.
        let rest = &link[colon.map_or(0, |colon| colon + 1)..];
        let host = rest.strip_prefix(b"//")?;
        let begin = host.iter().position(|byte| *byte == b'/')?;
        &host[begin..]
    } else {
        link
    };
    let mut decoded: Vec<Vec<u8>> =
        below.split(|byte| *byte == b'/').map(|segment| percent_decode(segment).collect()).collect();
    if below.starts_with(b"/") {
        let above: Vec<&[u8]> = path.split(|byte| *byte == b'/').collect();
        // The last of a path that ends in a slash is empty.
        let above = &above[..above.len() - 1];
        if decoded.len() <= above.len() || decoded.iter().zip(above).any(|(one, other)| one != other) {
            return None;
        }
        decoded.drain(..above.len());
    } else {
        while decoded.first().is_some_and(|first| first == b".") {
            decoded.remove(0);
        }
    }
    match &decoded[..] {
        [name] if !is_up(name) => Some((name.clone(), false)),
        [name, end] if !is_up(name) && end.is_empty() => Some((name.clone(), true)),
        _ => None,
    }
}

/// The directory itself, or the one above it.
fn is_up(name: &[u8]) -> bool {
    matches!(name, b"" | b"." | b"..")
}

/// What WebDAV tells: of the directory or file that was asked for, and of what lies in it.
#[derive(Debug, Default)]
pub(crate) struct Multistatus {
    /// None: nothing is told about it.
    pub(crate) own: Option<Item>,
    pub(crate) below: Items,
}

/// `path`: as in [`html`], or without the last slash where it is of a file.
pub(crate) fn multistatus(body: &[u8], path: &[u8]) -> Result<Multistatus, String> {
    let path = path.strip_suffix(b"/").unwrap_or(path);
    let mut all = Multistatus::default();
    let (mut href, mut told, mut props) = (None, Props::default(), Props::default());
    xml::walk(body, "multistatus", |depth, name, tag| {
        match (depth, name, tag) {
            (2, "response", xml::Tag::Opens(_)) => (href, told) = (None, Props::default()),
            (3, "href", xml::Tag::Closes(text)) => href = Some(std::mem::take(text)),
            (3, "propstat", xml::Tag::Opens(_)) => props = Props { is_found: true, ..Props::default() },
            // Without one it counts.
            (4, "status", xml::Tag::Closes(text)) => props.is_found = text.split(' ').nth(1) == Some("200"),
            (6, "collection", xml::Tag::Opens(_)) => props.is_directory = true,
            (5, "getcontentlength", xml::Tag::Closes(text)) => props.size = field::size(text),
            (5, "getlastmodified", xml::Tag::Closes(text)) => props.time = date::parse_http(text),
            (5, "getetag", xml::Tag::Closes(text)) => props.etag = Some(std::mem::take(text)),
            (3, "propstat", xml::Tag::Closes(_)) if props.is_found => told = std::mem::take(&mut props),
            (2, "response", xml::Tag::Closes(_)) => {
                let href = href.take().ok_or("an entry of the index that says no href")?;
                let item = std::mem::take(&mut told).item();
                match of(href.trim().as_bytes(), path) {
                    Of::Own => all.own = Some(item),
                    Of::Below(name) => all.below.add(name, item)?,
                    Of::Other => {}
                }
            }
            _ => {}
        }
        Ok(())
    })?;
    Ok(all)
}

#[derive(Default)]
struct Props {
    is_found: bool,
    is_directory: bool,
    size: Option<u64>,
    time: Option<i64>,
    etag: Option<String>,
}

impl Props {
    fn item(self) -> Item {
        if self.is_directory {
            return Item::Directory;
        }
        let Some(size) = self.size else { return Item::File(Told::Name) };
        let etag = self.etag.as_deref().and_then(web::by_etag);
        let version = etag.or_else(|| self.time.and_then(|time| web::by_time(time, size)));
        Item::File(Told::of(web::object(size, version, self.time.unwrap_or(0))))
    }
}

enum Of {
    Own,
    Below(Vec<u8>),
    Other,
}

fn of(href: &[u8], path: &[u8]) -> Of {
    // It may be a whole URL. Of which host it is does not matter, as with links.
    let href = match href.starts_with(b"/") {
        true => href,
        false => {
            let host = href.windows(3).position(|three| three == b"://").map(|at| &href[at + 3..]);
            let begin = host.and_then(|host| host.iter().position(|byte| *byte == b'/'));
            match (host, begin) {
                (Some(host), Some(begin)) => &host[begin..],
                _ => return Of::Other,
            }
        }
    };
    let href = href.strip_suffix(b"/").unwrap_or(href);
    let above: Vec<&[u8]> = path.split(|byte| *byte == b'/').collect();
    let segments: Vec<Vec<u8>> =
        href.split(|byte| *byte == b'/').map(|segment| percent_decode(segment).collect()).collect();
    if segments.len() < above.len() || segments.iter().zip(&above).any(|(one, other)| one != other) {
        return Of::Other;
    }
    match &segments[above.len()..] {
        [] => Of::Own,
        [name] if !is_up(name) => Of::Below(name.clone()),
        _ => Of::Other,
    }
}

/// All directories of a source, by a list of its files: each name once, so that it is no larger than the list that it was made from.
#[derive(Debug, Default)]
pub(crate) struct Manifest {
    /// None: a file.
    named: BTreeMap<Vec<u8>, Option<Manifest>>,
    unnameable: BTreeSet<Vec<u8>>,
}

impl Manifest {
    /// The directory `path` ("" or "a/b").
    pub(crate) fn directory(&self, path: &[u8]) -> Option<&Self> {
        let names = path.split(|byte| *byte == b'/').filter(|name| !name.is_empty());
        names.into_iter().try_fold(self, |tree, name| tree.named.get(name)?.as_ref())
    }

    pub(crate) fn items(&self) -> Items {
        Items {
            named: self.named.iter().map(|(name, below)| (name.clone(), Self::item(below))).collect(),
            unnameable: self.unnameable.iter().cloned().collect(),
        }
    }

    /// How many there are, at every depth.
    pub(crate) fn names(&self) -> usize {
        let below = self.named.values().flatten().map(Self::names);
        self.named.len() + self.unnameable.len() + below.sum::<usize>()
    }

    /// What is called so in it.
    pub(crate) fn get(&self, name: &[u8]) -> Option<Item> {
        self.named.get(name).map(Self::item)
    }

    fn item(below: &Option<Self>) -> Item {
        if below.is_some() { Item::Directory } else { Item::File(Told::Name) }
    }

    fn add(&mut self, path: &[Vec<u8>]) {
        let Some((name, rest)) = path.split_first() else { return };
        if !is_name(name) {
            self.unnameable.insert(name.clone());
            return;
        }
        let below = self.named.entry(name.clone()).or_default();
        if !rest.is_empty() {
            below.get_or_insert_default().add(rest);
        }
    }
}

/// A list of URLs, as Google's Storage Transfer Service takes it: a line of its own says so, then one URL a line, and behind a tab
/// what is not needed here. `base` is the source's own URL, which all must begin with; URLs may be relative to it.
pub(crate) fn manifest(body: &[u8], base: &str) -> Result<Manifest, String> {
    let text = std::str::from_utf8(body).map_err(|_| "a manifest that is not UTF-8")?;
    let mut lines = text.lines().enumerate();
    if lines.next().map(|(_, first)| first.trim()) != Some(FIRST_LINE) {
        return Err(format!("a manifest whose first line is not {FIRST_LINE}"));
    }
    let (mut tree, mut count) = (Manifest::default(), 0);
    for (k, line) in lines {
        let url = line.split('\t').next().unwrap_or_default().trim();
        if url.is_empty() {
            continue;
        }
        let bad = |why: &str| {
            let shown: String = url.chars().filter(|c| !c.is_control()).take(200).collect();
            format!("line {} of the manifest, {shown:?}, {why}", k + 1)
        };
        let below = match url.strip_prefix(base) {
            Some(below) => below,
            None if !url.contains("://") && !url.starts_with('/') => url,
            None => return Err(bad(&format!("is not below {base}"))),
        };
        if below.contains(['?', '#']) {
            return Err(bad("has a query or fragment"));
        }
        let path: Vec<Vec<u8>> =
            below.split('/').map(|segment| percent_decode(segment.as_bytes()).collect()).collect();
        if path.len() > DEPTH_MAX || path.iter().any(|segment| is_up(segment)) {
            return Err(bad("is no path of a file"));
        }
        count += path.len();
        if count > ITEMS_MAX {
            return Err(format!("a manifest of more than {ITEMS_MAX} names: make several volumes of it"));
        }
        tree.add(&path);
    }
    Ok(tree)
}

const FIRST_LINE: &str = "TsvHttpData-1.0";
const DEPTH_MAX: usize = 64;

#[cfg(test)]
mod tests {
    use super::*;

    fn names(items: &Items) -> Vec<(String, bool)> {
        let text = |name: &Vec<u8>| String::from_utf8_lossy(name).into_owned();
        items.named.iter().map(|(name, item)| (text(name), *item == Item::Directory)).collect()
    }

    #[test]
    fn nginxs_json_tells_sizes_times_and_directories() {
        let items = json(
            br#"[
{ "name":"d\u00e9", "type":"directory", "mtime":"Wed, 21 Oct 2015 07:28:00 GMT" },
{ "name":"f", "type":"file", "mtime":"Wed, 21 Oct 2015 07:28:00 GMT", "size":7 },
{ "name":"huge", "type":"file", "mtime":"Wed, 21 Oct 2015 07:28:00 GMT", "size":18446744073709551615 },
{ "name":"no time", "type":"file", "size":7 },
{ "name":"pipe", "type":"other", "mtime":"Wed, 21 Oct 2015 07:28:00 GMT" },
{ "name":"a/b", "type":"file", "size":7 }
]"#,
        )
        .unwrap();
        assert_eq!(
            names(&items),
            [("dé".into(), true), ("f".into(), false), ("huge".into(), false), ("no time".into(), false)]
        );
        let version = Version("1445412480-7".into());
        let all = Told::All { size: 7, version, modified_ns: 1_445_412_480_000_000_000 };
        assert_eq!(items.named[&b"f"[..]], Item::File(all));
        assert_eq!(items.named[&b"huge"[..]], Item::File(Told::Unusable));
        assert_eq!(items.named[&b"no time"[..]], Item::File(Told::Name));
        assert_eq!(items.unnameable, [b"a/b".to_vec()]);
        assert!(!json(b"[{\"name\":\"\xff\",\"type\":\"file\"}]").unwrap().unnameable.is_empty());
        for wrong in ["", "{}", "[", "[{\"name\":7}]", "<html>"] {
            assert!(json(wrong.as_bytes()).is_err(), "{wrong}");
        }
    }

    #[test]
    fn links_into_the_directory_are_its_names_and_no_others() {
        let page = |links: &[&str]| {
            let links: String = links.iter().map(|link| format!("<a href=\"{link}\">x</a>\n")).collect();
            format!("<html><head><title>Index of /data/a b/</title></head><body>{links}</body></html>")
        };
        let text = page(&[
            "../",
            "?C=N;O=D",
            "/data/",
            "/data/a%20b/?C=M",
            "plain",
            "sub/",
            "./dot",
            "a%20b",
            "a&amp;b",
            "per%25cent",
            "question%3F",
            "colon%3Ax",
            "./c:d",
            "/data/a%20b/absolute",
            "https://other.example/data/a%20b/whole/",
            "//h/data/a%20b/host",
            "deeper/than/that",
            "/elsewhere/x",
            "https://example.com/",
            "mailto:a@b",
            "javascript:void(0)",
            "%2e%2e",
            "a%2Fb",
            "x#y",
            "#top",
            "",
            "no%FF",
        ]);
        let items = html(text.as_bytes(), b"/data/a b/").unwrap();
        let found = names(&items);
        let files: Vec<_> = found.iter().filter(|(_, dir)| !dir).map(|(name, _)| name.as_str()).collect();
        assert_eq!(
            files,
            [
                "a b",
                "a&b",
                "absolute",
                "c:d",
                "colon:x",
                "dot",
                "host",
                "per%cent",
                "plain",
                "question?",
                "x"
            ]
        );
        let directories: Vec<_> =
            found.iter().filter(|(_, dir)| *dir).map(|(name, _)| name.as_str()).collect();
        assert_eq!(directories, ["sub", "whole"]);
        assert_eq!(items.unnameable, [b"a/b".to_vec(), b"no\xff".to_vec()]);
        // At the top of a server.
        let top = page(&["/x", "y/", "/"]);
        assert_eq!(names(&html(top.as_bytes(), b"/").unwrap()), [("x".into(), false), ("y".into(), true)]);
    }

    #[test]
    fn a_page_that_is_no_index_is_refused_by_its_title() {
        for page in [
            "<title>Log in</title><a href='x'>x</a>",
            "<html><body><a href='x'>x</a>",
            "",
            "<title>Welcome to nginx!</title>",
            "<title></title><title>Index of /</title>",
        ] {
            let error = html(page.as_bytes(), b"/");
            // An empty title is none: what stands in the next one counts.
            assert_eq!(error.is_err(), !page.contains("Index of"), "{page}");
        }
        let error = html(b"<title>Log\x07 in</title>", b"/").unwrap_err();
        assert!(error.contains("\"log in\"") && error.contains("autoindex"), "{error}");
        for title in ["Index of /x/", "Directory listing for /x/", "INDEX OF /"] {
            assert!(html(format!("<title>{title}</title>").as_bytes(), b"/").is_ok());
        }
    }

    #[test]
    fn webdav_tells_the_directory_and_what_lies_in_it() {
        let body = br#"<?xml version="1.0" encoding="utf-8"?>
<D:multistatus xmlns:D="DAV:" xmlns:ns0="DAV:">
<D:response><D:href>/data/a%20b/</D:href><D:propstat><D:prop><lp1:resourcetype><D:collection/></lp1:resourcetype></D:prop>
<D:status>HTTP/1.1 200 OK</D:status></D:propstat></D:response>
<D:response><D:href>/data/a%20b/f%26</D:href><D:propstat><D:prop><lp1:resourcetype/><lp1:getcontentlength>7</lp1:getcontentlength>
<lp1:getlastmodified>Wed, 21 Oct 2015 07:28:00 GMT</lp1:getlastmodified><lp1:getetag>"e&amp;1"</lp1:getetag></D:prop>
<D:status>HTTP/1.1 200 OK</D:status></D:propstat>
<D:propstat><D:prop><lp1:getcontentlength>9</lp1:getcontentlength></D:prop><D:status>HTTP/1.1 404 Not Found</D:status></D:propstat></D:response>
<D:response><D:href>https://h/data/a%20b/weak</D:href><D:propstat><D:prop><getcontentlength>8</getcontentlength>
<getlastmodified>Wed, 21 Oct 2015 07:28:00 GMT</getlastmodified><getetag>W/"e"</getetag></D:prop></D:propstat></D:response>
<D:response><D:href>/data/a%20b/sub</D:href><D:propstat><D:prop><resourcetype><collection/></resourcetype></D:prop></D:propstat></D:response>
<D:response><D:href>/elsewhere/x</D:href></D:response>
<D:response><D:href>/data/a%20b/sub/deeper</D:href></D:response>
</D:multistatus>"#;
        let all = multistatus(body, b"/data/a b/").unwrap();
        assert_eq!(all.own, Some(Item::Directory));
        assert_eq!(names(&all.below), [("f&".into(), false), ("sub".into(), true), ("weak".into(), false)]);
        let modified_ns = 1_445_412_480_000_000_000;
        let told = |size, version: &str| {
            Item::File(Told::All { size, version: Version(version.into()), modified_ns })
        };
        assert_eq!(all.below.named[&b"f&"[..]], told(7, "\"e&1\""));
        assert_eq!(all.below.named[&b"weak"[..]], told(8, "1445412480-8"));
        let file = multistatus(body, b"/data/a b/f&").unwrap();
        assert_eq!(file.own, Some(told(7, "\"e&1\"")));
        for wrong in
            ["", "<html></html>", "<multistatus>", "<multistatus><response></response></multistatus>"]
        {
            assert!(multistatus(wrong.as_bytes(), b"/").is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_manifest_is_a_tree_below_the_source_and_nothing_else() {
        let base = "https://h/sets/a%20b/";
        let of = |lines: &str| manifest(format!("TsvHttpData-1.0\n{lines}").as_bytes(), base);
        let tree = of("https://h/sets/a%20b/x/y%26\t12\tmd5\r\nz\n\nx/u/v\n").unwrap();
        let at = |dir: &str| names(&tree.directory(dir.as_bytes()).unwrap().items());
        assert_eq!(at(""), [("x".into(), true), ("z".into(), false)]);
        assert_eq!(at("x"), [("u".into(), true), ("y&".into(), false)]);
        assert_eq!(at("x/u"), [("v".into(), false)]);
        assert_eq!((tree.get(b"x"), tree.names()), (Some(Item::Directory), 5));
        assert!(tree.directory(b"z").is_none() && tree.directory(b"x/nothing").is_none());
        // A directory wins, whichever comes first.
        for lines in ["b\nb/c\n", "b/c\nb\n"] {
            assert_eq!(of(lines).unwrap().get(b"b"), Some(Item::Directory));
        }
        assert_eq!(of("a%2Fb\na%2Fb/c\n").unwrap().items().unnameable, [b"a/b".to_vec()]);
        for (wrong, words) in [
            ("https://other/x\n", "line 2"),
            ("a\n/sets/x\n", "line 3"),
            ("../x\n", "no path"),
            ("x/\n", "no path"),
            ("x?sig=1\n", "query"),
        ] {
            let error = of(wrong).unwrap_err();
            assert!(error.contains(words), "{wrong}: {error}");
        }
        assert!(manifest(b"https://h/x\n", base).is_err() && manifest(b"", base).is_err());
        assert!(of(&"a/b/c\n".repeat(ITEMS_MAX)).unwrap_err().contains("several volumes"));
    }
}
