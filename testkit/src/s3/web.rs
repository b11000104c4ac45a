//! A web server as a source has it: files at their path, directories as an index. Whoever asks says a name and a password, or a
//! token.

use super::access::Guard;
use super::adapter::{Adapter, Asked, Denied, decoded, value};
use super::bucket::Listing;
use super::meta::Meta;
use super::{Key, Rights};
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use http::request::Parts;
use http::{HeaderMap, Method, StatusCode};
use httpdate::fmt_http_date as http_time;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use serde_json::json;
use std::time::UNIX_EPOCH;

/// What its directories look like.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Index {
    /// nginx's pages.
    Html,
    /// nginx's `autoindex_format json`.
    Json,
    /// WebDAV.
    Dav,
    /// None: it serves files.
    None,
}

/// How a web server of the testkit is. Of a [`Key`] `id` and `secret` are name and password, and `token` is a bearer's.
#[derive(Clone, Debug)]
pub struct Web {
    pub index: Index,
}

const ESCAPED: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~').remove(b'/');
const PROPFIND: &str = "PROPFIND";

/// The version that a client makes of time and length.
pub fn time_and_length(meta: &Meta) -> String {
    let seconds = meta.modified.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    format!("{seconds}-{}", meta.size)
}

impl Adapter for Web {
    fn asked(&self, method: &Method, path: &str, _: &str) -> Asked {
        let path = path.strip_prefix('/').unwrap_or(path);
        let (bucket, key) = path.split_once('/').unwrap_or((path, ""));
        let is_directory = path.ends_with('/');
        let dav = self.index == Index::Dav && method.as_str() == PROPFIND;
        let op = match (method, is_directory) {
            (&Method::GET, true) if matches!(self.index, Index::Html | Index::Json) => "ListObjectsV2",
            (_, true) if dav => "ListObjectsV2",
            (_, false) if dav => "HeadObject",
            (&Method::GET, false) => "GetObject",
            (&Method::HEAD, false) => "HeadObject",
            _ => "",
        };
        let query = if op == "ListObjectsV2" { vec![("delimiter".into(), "/".into())] } else { Vec::new() };
        let query = if dav { [query, vec![(PROPFIND.into(), String::new())]].concat() } else { query };
        Asked { op, bucket: decoded(bucket), key: decoded(key), query }
    }

    fn is_tree(&self) -> bool {
        true
    }

    fn status(&self, asked: &Asked) -> StatusCode {
        if asked.value(PROPFIND).is_some() { StatusCode::MULTI_STATUS } else { StatusCode::OK }
    }

    fn who(&self, parts: &Parts, _: &Asked, guard: &Guard) -> Result<Rights, Denied> {
        let Guard { keys, anonymous, .. } = guard;
        let denied: fn() -> Denied = || (StatusCode::UNAUTHORIZED, "Unauthorized", String::new());
        let says = parts.headers.get("authorization").and_then(|value| value.to_str().ok());
        let Some(says) = says else { return if *anonymous { Ok(Rights::All) } else { Err(denied()) } };
        let is = |key: &&Key| match (&key.token, says.split_once(' ')) {
            (Some(token), Some(("Bearer", said))) => token == said,
            (None, Some(("Basic", said))) => {
                BASE64_STANDARD.encode(format!("{}:{}", key.id, key.secret)) == said
            }
            _ => false,
        };
        let invalid: fn() -> Denied = || (StatusCode::UNAUTHORIZED, INVALID_TOKEN, String::new());
        let refused = if says.starts_with("Bearer ") { invalid } else { denied };
        keys.iter().find(is).map(|key| key.rights).ok_or_else(refused)
    }

    fn listing(&self, asked: &Asked, page: Listing) -> (HeaderMap, String) {
        let path = format!("/{}/{}", asked.bucket, asked.key);
        let name = |key: &str| key.strip_prefix(&asked.key).unwrap_or(key).to_owned();
        let directories = page.prefixes.iter().map(|prefix| (name(prefix), None));
        let files = page.objects.iter().map(|(key, meta)| (name(key), Some(meta)));
        let rows: Vec<_> = directories.chain(files).collect();
        match self.index {
            Index::Json => {
                let row = |(name, meta): &(String, Option<&Meta>)| match meta {
                    None => json!({ "name": name.trim_end_matches('/'), "type": "directory", "mtime": NOON }),
                    Some(meta) => {
                        json!({ "name": name, "type": "file", "mtime": http_time(meta.modified), "size": meta.size })
                    }
                };
                let rows: Vec<_> = rows.iter().map(row).collect();
                (kind("application/json"), json!(rows).to_string())
            }
            Index::Dav => {
                let own =
                    format!("<D:response><D:href>{}</D:href>{}</D:response>", escaped(&path), props(None));
                let below = rows.iter().map(|(name, meta)| {
                    let href = escaped(&format!("{path}{name}"));
                    format!("<D:response><D:href>{href}</D:href>{}</D:response>", props(*meta))
                });
                (
                    kind("text/xml; charset=\"utf-8\""),
                    multistatus(&[own].into_iter().chain(below).collect::<String>()),
                )
            }
            Index::Html | Index::None => {
                let row = |(name, meta): &(String, Option<&Meta>)| {
                    let shown: String = html(name).chars().take(50).collect();
                    // A relative link that has a colon before a slash would be one to somewhere else.
                    let link = escaped(name);
                    let size = meta.map_or("-".to_owned(), |meta| meta.size.to_string());
                    format!("<a href=\"{link}\">{shown}</a> 21-Oct-2015 07:28 {size:>20}\r\n")
                };
                let rows: String = rows.iter().map(row).collect();
                let title = html(&path);
                let page = format!(
                    "<html>\r\n<head><title>Index of {title}</title></head>\r\n<body>\r\n<h1>Index of {title}</h1><hr><pre>\
                     <a href=\"../\">../</a>\r\n{rows}</pre><hr></body>\r\n</html>\r\n"
                );
                (kind("text/html"), page)
            }
        }
    }

    fn about(&self, asked: &Asked, meta: &Meta) -> (HeaderMap, String) {
        if asked.value(PROPFIND).is_some() {
            let href = escaped(&format!("/{}/{}", asked.bucket, asked.key));
            let own = format!("<D:response><D:href>{href}</D:href>{}</D:response>", props(Some(meta)));
            return (kind("text/xml; charset=\"utf-8\""), multistatus(&own));
        }
        let mut headers = described(meta);
        headers.insert("content-length", meta.size.into());
        (headers, String::new())
    }

    fn version(&self, parts: &Parts, _: &Asked, meta: &Meta) -> Result<HeaderMap, Denied> {
        let header = |name: &str| parts.headers.get(name).and_then(|value| value.to_str().ok());
        let other = header("if-match").is_some_and(|wanted| wanted != format!("\"{}\"", meta.etag));
        // A GET that asks for nothing that it has already seen.
        if header("if-none-match").is_some_and(|seen| seen == format!("\"{}\"", meta.etag)) {
            return Err((StatusCode::NOT_MODIFIED, "Not Modified", String::new()));
        }
        let later = header("if-unmodified-since").is_some_and(|wanted| wanted != http_time(meta.modified));
        match other || later {
            true => Err((StatusCode::PRECONDITION_FAILED, "Precondition Failed", String::new())),
            false => Ok(described(meta)),
        }
    }

    fn no_bucket(&self) -> Denied {
        self.no_object()
    }
    fn no_object(&self) -> Denied {
        (StatusCode::NOT_FOUND, "Not Found", String::new())
    }
    fn denied(&self) -> Denied {
        (StatusCode::FORBIDDEN, "Forbidden", String::new())
    }
    fn beyond(&self) -> Denied {
        (StatusCode::RANGE_NOT_SATISFIABLE, "Requested Range Not Satisfiable", String::new())
    }

    fn error(&self, (status, words, _): &Denied) -> (HeaderMap, String) {
        let title = format!("{} {words}", status.as_u16());
        if *status == StatusCode::NOT_MODIFIED {
            return (HeaderMap::new(), String::new());
        }
        let mut headers = kind("text/html");
        match *words {
            INVALID_TOKEN => {
                headers
                    .insert("www-authenticate", value("Bearer realm=\"testkit\", error=\"invalid_token\""));
            }
            "Unauthorized" => {
                headers.insert("www-authenticate", value("Basic realm=\"testkit\""));
            }
            _ => {}
        }
        (headers, format!("<html><head><title>{title}</title></head><body><h1>{title}</h1></body></html>"))
    }

    /// It knows no pages.
    fn page(&self, _: &Asked) -> (Option<String>, usize) {
        (None, usize::MAX)
    }
}

const INVALID_TOKEN: &str = "Invalid Token";
const NOON: &str = "Wed, 21 Oct 2015 12:00:00 GMT";

fn kind(of: &str) -> HeaderMap {
    [(http::header::CONTENT_TYPE, value(of))].into_iter().collect()
}

fn described(meta: &Meta) -> HeaderMap {
    let mut headers = kind("application/octet-stream");
    headers.insert("etag", value(&format!("\"{}\"", meta.etag)));
    headers.insert("last-modified", value(&http_time(meta.modified)));
    headers.insert("accept-ranges", value("bytes"));
    headers
}

fn escaped(path: &str) -> String {
    utf8_percent_encode(path, ESCAPED).to_string()
}

fn html(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

fn multistatus(responses: &str) -> String {
    format!(
        "<?xml version=\"1.0\" encoding=\"utf-8\"?>\n<D:multistatus xmlns:D=\"DAV:\">\n{responses}</D:multistatus>\n"
    )
}

/// None: of a directory.
fn props(meta: Option<&Meta>) -> String {
    let props = match meta {
        None => "<D:resourcetype><D:collection/></D:resourcetype>".to_owned(),
        Some(meta) => format!(
            "<D:resourcetype/><D:getcontentlength>{}</D:getcontentlength><D:getlastmodified>{}</D:getlastmodified>\
             <D:getetag>\"{}\"</D:getetag>",
            meta.size,
            http_time(meta.modified),
            meta.etag
        ),
    };
    format!("<D:propstat><D:prop>{props}</D:prop><D:status>HTTP/1.1 200 OK</D:status></D:propstat>")
}
