//! Uploads in parts that are under way below a prefix, as a bucket lists them.

use super::client::{Ask, Client, Opens, content, read_all};
use crate::StoreError;
use crate::access::{Access, Question};
use crate::dialect::writes::{self, UploadsPage, Writes};
use crate::dialect::{header, parse_http};
use crate::observe::RetryCause;
use crate::retry::Fault;
use crate::sink::Leftover;
use futures::FutureExt;
use http::Method;
use http::header::{DATE, HeaderMap};
use std::sync::Arc;
use std::time::Duration;

/// A page of 1,000 uploads, whose names may be as long as their keys.
const PAGE_BYTES_MAX: usize = 8 << 20;
/// Looked at in one go. What is behind them is found once they are over.
const PAGES_MAX: usize = 100;
/// Told at once, however many a store says there are.
const LEFTOVERS_MAX: usize = 1000;

pub(super) struct Listed {
    pub(super) page: UploadsPage,
    /// What the store's clock showed, since the epoch. None: it does not say.
    now_ns: Option<i64>,
}

/// The page behind the upload `after`: its key and its name.
pub(super) async fn page(
    client: &Client,
    store: &dyn Writes,
    prefix: &[u8],
    after: Option<(&[u8], &str)>,
    question: Question,
) -> Result<Listed, StoreError> {
    let what = client.what(prefix);
    let url = writes::uploads(&store.place().base, prefix, after);
    let attempt = async |patience| {
        let headers = HeaderMap::new();
        let ask = Ask { method: Method::GET, url: &url, headers, takes: content, opens: Opens::Nothing };
        let response = client.send(ask, &what, patience).await?;
        let now_ns = header(response.headers(), DATE).and_then(parse_http);
        let body = read_all(response, PAGE_BYTES_MAX, patience).await?;
        let page = writes::uploads_page(&body).map_err(|why| Fault::retry(RetryCause::Malformed, why))?;
        Ok((Listed { page, now_ns }, body.len() as u64))
    };
    client.ask("list", &what, question, |patience| attempt(patience).boxed()).await
}

/// See [`crate::Sink::leftovers`].
pub(super) async fn older(
    client: &Client,
    store: &dyn Writes,
    prefix: &[u8],
    access: &Arc<Access>,
    age: Duration,
) -> Result<Vec<Leftover>, StoreError> {
    let (mut found, mut after) = (Vec::new(), None::<(Vec<u8>, String)>);
    if prefix.is_empty() {
        return Ok(found);
    }
    for _ in 0..PAGES_MAX {
        let marker = after.as_ref().map(|(key, id)| (key.as_slice(), id.as_str()));
        let Listed { page: UploadsPage { uploads, next }, now_ns } =
            page(client, store, prefix, marker, access.question()).await?;
        // The time of this node would say something else of each.
        let Some(now_ns) = now_ns else { return Ok(Vec::new()) };
        let all = uploads.into_iter().filter_map(|listed| writes::leftover(listed, prefix, now_ns));
        found.extend(all.filter(|leftover| leftover.age >= age));
        if found.len() >= LEFTOVERS_MAX {
            found.truncate(LEFTOVERS_MAX);
            break;
        }
        match next {
            None => break,
            // Uploads of one key come in the order in which they were begun, not of their names.
            Some(next)
                if after
                    .as_ref()
                    .is_none_or(|last| next.0 > last.0 || next.0 == last.0 && next.1 != last.1) =>
            {
                after = Some(next);
            }
            Some(_) => {
                let why = "the listing of its uploads goes round in circles";
                return Err(StoreError::malformed(&client.what(prefix), why));
            }
        }
    }
    Ok(found)
}
