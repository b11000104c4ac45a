//! A listing in XML, tag by tag: what all that are written so have in common.

use crate::keys::show;
use quick_xml::Reader;
use quick_xml::events::{BytesStart, Event};

/// Tags of tags are not part of any listing; each level costs the parser memory.
const DEPTH_MAX: usize = 16;

/// What happens to a tag.
pub(super) enum Tag<'t> {
    Opens(&'t BytesStart<'t>),
    /// With the text since the tag before.
    Closes(&'t mut String),
}

/// Calls `on` for each tag of a document whose outermost is `root`: its depth (of `root` 1), its name, what happens. An error of
/// `on` ends it.
pub(super) fn walk(
    body: &[u8],
    root: &str,
    mut on: impl FnMut(usize, &str, Tag<'_>) -> Result<(), String>,
) -> Result<(), String> {
    // Azure begins its documents with a mark of their byte order.
    let body = body.strip_prefix(b"\xef\xbb\xbf").unwrap_or(body);
    let body = std::str::from_utf8(body).map_err(|_| "an answer that is not UTF-8")?;
    let mut reader = Reader::from_str(body);
    let (mut depth, mut text, mut ended) = (0_usize, String::new(), false);
    loop {
        match reader.read_event().map_err(|e| format!("the answer is not XML: {e}"))? {
            Event::Start(start) => {
                depth += 1;
                text.clear();
                let name = start.local_name();
                match (depth, name.as_ref()) {
                    (1, other) if other != root => {
                        return Err(format!("an answer that is a {}", show(other.as_bytes())));
                    }
                    (depth, _) if depth > DEPTH_MAX => return Err("an answer of tags within tags".into()),
                    (depth, name) => on(depth, name, Tag::Opens(&start))?,
                }
            }
            // (A document that is one empty tag is none that has ended.)
            Event::Empty(tag) if depth > 0 => {
                let name = tag.local_name();
                on(depth + 1, name.as_ref(), Tag::Opens(&tag))?;
                text.clear();
                on(depth + 1, name.as_ref(), Tag::Closes(&mut text))?;
                text.clear();
            }
            Event::Text(piece) => text.push_str(&piece),
            Event::CData(piece) => text.push_str(&piece),
            Event::GeneralRef(reference) => match reference.resolve_char_ref() {
                Ok(Some(character)) => text.push(character),
                Ok(None) => text.push(named(&reference).ok_or("an answer with an unknown XML entity")?),
                Err(e) => return Err(format!("an answer with a bad character reference: {e}")),
            },
            Event::End(end) => {
                on(depth, end.local_name().as_ref(), Tag::Closes(&mut text))?;
                ended = depth == 1;
                depth = depth.saturating_sub(1);
                text.clear();
            }
            Event::Eof => break,
            _ => {}
        }
    }
    // A body that stops short can look like a short listing; a missing name is worse than an error.
    match ended {
        true => Ok(()),
        false => Err("the listing ends in the middle".into()),
    }
}

/// The entities that every document has.
pub(super) fn named(reference: &str) -> Option<char> {
    Some(match reference {
        "amp" => '&',
        "lt" => '<',
        "gt" => '>',
        "quot" => '"',
        "apos" => '\'',
        _ => return None,
    })
}
