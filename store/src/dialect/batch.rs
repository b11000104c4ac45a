//! DeleteObjects: many keys in one request, in XML, and what became of each.

use super::xml::{Tag, walk};
use crate::StoreError;
use crate::observe::RetryCause;
use crate::retry::Fault;
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use md5::{Digest, Md5};
use url::Url;

/// Can XML hold this key? It has no control characters but three, and nothing that is not text.
pub(crate) fn can_hold(key: &[u8]) -> bool {
    let legal =
        |c: char| matches!(c, '\t' | '\n' | '\r') || (c >= ' ' && !matches!(c, '\u{fffe}' | '\u{ffff}'));
    std::str::from_utf8(key).is_ok_and(|key| key.chars().all(legal))
}

/// A request's body, and its digest as Content-MD5 has it: every store takes that one.
pub(crate) struct Batch {
    pub(crate) text: String,
    pub(crate) md5: String,
}

/// Of keys that XML [`can_hold`].
pub(crate) fn request(keys: &[Vec<u8>]) -> Batch {
    let mut text = "<Delete xmlns=\"http://s3.amazonaws.com/doc/2006-03-01/\">".to_owned();
    for key in keys {
        text.push_str("<Object><Key>");
        for c in String::from_utf8_lossy(key).chars() {
            match c {
                '&' => text.push_str("&amp;"),
                '<' => text.push_str("&lt;"),
                '>' => text.push_str("&gt;"),
                // A reader of XML may make a space or a line feed of it.
                '\t' | '\n' | '\r' => text.push_str(&format!("&#{};", u32::from(c))),
                c => text.push(c),
            }
        }
        text.push_str("</Key></Object>");
    }
    text.push_str("</Delete>");
    let md5 = BASE64_STANDARD.encode(Md5::digest(&text));
    Batch { text, md5 }
}

pub(crate) fn url(base: &Url) -> Url {
    let mut url = base.clone();
    url.set_query(Some("delete="));
    url
}

/// What a store says of a batch.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Said {
    pub(crate) deleted: u64,
    /// Of a bucket that keeps versions: what was deleted is hidden behind them.
    pub(crate) has_markers: bool,
    /// The first one.
    pub(crate) refused: Option<Refused>,
}

/// A key that is still there.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Refused {
    pub(crate) key: String,
    pub(crate) code: String,
}

impl Refused {
    pub(crate) fn fault(&self, what: &str) -> Fault {
        let (what, code) = (what.to_owned(), &self.code);
        let key = crate::keys::show(self.key.as_bytes());
        match code.as_str() {
            "SlowDown" | "ServiceUnavailable" | "TooManyRequests" | "OperationAborted" => {
                Fault::retry(RetryCause::Throttled, code.as_str())
            }
            "InternalError" | "RequestTimeout" => Fault::retry(RetryCause::ServerError, code.as_str()),
            "AccessDenied" => {
                let why = format!(
                    "{key} may not be deleted ({code}): these credentials may not, or the object is locked"
                );
                Fault::Fail(StoreError::Denied { what, why })
            }
            code => Fault::Fail(StoreError::Unsupported {
                what,
                why: format!("{key} cannot be deleted ({code})"),
            }),
        }
    }
}

/// A code is a word, and shown: whatever else is sent in its place is not.
fn word(text: &str) -> String {
    text.chars().filter(char::is_ascii_alphanumeric).take(64).collect()
}

pub(crate) fn answer(body: &[u8]) -> Result<Said, String> {
    let (mut said, mut key, mut code) = (Said::default(), String::new(), String::new());
    walk(body, "DeleteResult", |depth, name, tag| {
        let Tag::Closes(text) = tag else { return Ok(()) };
        match (depth, name) {
            (2, "Deleted") => said.deleted += 1,
            (2, "Error") => {
                let refused = Refused { key: std::mem::take(&mut key), code: word(&code) };
                // It is gone, which is what was wanted.
                if refused.code == "NoSuchKey" {
                    said.deleted += 1;
                } else if said.refused.is_none() {
                    said.refused = Some(refused);
                }
            }
            (3, "DeleteMarker") => said.has_markers |= text.trim() == "true",
            (3, "Key") => key = std::mem::take(text),
            (3, "Code") => code = std::mem::take(text),
            _ => {}
        }
        Ok(())
    })?;
    Ok(said)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_key_arrives_as_it_is(
            chars in proptest::collection::vec(prop_oneof![any::<char>(), Just('\n'), Just('\r'), Just('&'), Just('<')], 0..20),
        ) {
            let held = chars.into_iter().filter(|c| can_hold(c.to_string().as_bytes()));
            let key = held.collect::<String>().into_bytes();
            prop_assert!(can_hold(&key));
            let mut read = None;
            walk(request(std::slice::from_ref(&key)).text.as_bytes(), "Delete", |_, name, tag| {
                if let ("Key", Tag::Closes(text)) = (name, tag) {
                    read = Some(std::mem::take(text).into_bytes());
                }
                Ok(())
            }).unwrap();
            prop_assert_eq!(read, Some(key));
        }

        #[test]
        fn garbage_is_no_answer_and_no_panic(body in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = answer(&body);
        }
    }

    #[test]
    fn an_answer_tells_what_is_gone_hidden_and_refused() {
        let text = "<DeleteResult><Deleted><Key>a</Key><DeleteMarker>true</DeleteMarker></Deleted>\
                    <Error><Key>b</Key><Code>NoSuchKey</Code></Error>\
                    <Error><Key>c</Key><Code>Access Denied</Code><Message>AKIA</Message></Error></DeleteResult>";
        let refused = Some(Refused { key: "c".into(), code: "AccessDenied".into() });
        assert_eq!(answer(text.as_bytes()), Ok(Said { deleted: 2, has_markers: true, refused }));
        for bad in ["", "<Error><Code>InternalError</Code></Error>", "<DeleteResult><Deleted>", "<html/>"] {
            assert!(answer(bad.as_bytes()).is_err(), "{bad}");
        }
    }

    #[test]
    fn xml_holds_no_control_characters() {
        for key in [&b"a\x01"[..], b"\xff", b"\0", "\u{ffff}".as_bytes()] {
            assert!(!can_hold(key), "{key:?}");
        }
        assert!(can_hold("a/../ü \t\n\r<&>\u{7f}".as_bytes()));
    }
}
