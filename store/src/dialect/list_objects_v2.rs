//! A page of ListObjectsV2, as S3 and OSS write it: XML.

use super::listing::{Answer, Object, is_page};
use super::xml::{Tag, walk};
use super::{date, field};
use crate::keys::decode_form;

/// What the current text belongs to.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Within {
    Result,
    Contents,
    CommonPrefixes,
}

pub(super) fn parse(body: &[u8]) -> Result<Answer, String> {
    Ok(page(body)?.0)
}

/// Also whether it said that its keys were encoded for a URL; they are not any more.
pub(super) fn page(body: &[u8]) -> Result<(Answer, bool), String> {
    let (mut answer, mut object) = (Answer::default(), Object::default());
    let (mut truncated, mut url, mut within) = (false, false, Within::Result);
    walk(body, "ListBucketResult", |depth, name, tag| {
        let text = match (tag, depth, name) {
            (Tag::Closes(text), ..) => text,
            (Tag::Opens(_), 2, "Contents") => {
                (within, object) = (Within::Contents, Object::default());
                return Ok(());
            }
            (Tag::Opens(_), 2, "CommonPrefixes") => {
                within = Within::CommonPrefixes;
                return Ok(());
            }
            (Tag::Opens(_), ..) => return Ok(()),
        };
        match (depth, within, name) {
            (2, Within::Contents, _) => {
                answer.objects.push(std::mem::take(&mut object));
                within = Within::Result;
                is_page(answer.objects.len())?;
            }
            (2, Within::CommonPrefixes, _) => within = Within::Result,
            (2, Within::Result, "IsTruncated") => truncated = text.trim() == "true",
            (2, Within::Result, "NextContinuationToken") => answer.next = Some(std::mem::take(text)),
            (2, Within::Result, "EncodingType") => url = text.trim() == "url",
            (3, Within::Contents, "Key") => object.key = std::mem::take(text).into_bytes(),
            (3, Within::Contents, "Size") => {
                object.size = field::size(text).ok_or("a listing with a size that is no number")?;
            }
            (3, Within::Contents, "ETag") => object.version = field::unquoted(text.trim()),
            (3, Within::Contents, "LastModified") => object.modified_ns = date::parse_iso(text).unwrap_or(0),
            (3, Within::CommonPrefixes, "Prefix") => {
                answer.prefixes.push(std::mem::take(text).into_bytes());
                is_page(answer.prefixes.len())?;
            }
            _ => {}
        }
        Ok(())
    })?;
    match (truncated, &answer.next) {
        (true, None) => return Err("the listing is truncated but has no continuation token".into()),
        (false, Some(_)) => answer.next = None,
        _ => {}
    }
    if url {
        // The element may come after the keys that it speaks of.
        let keys = answer.objects.iter_mut().map(|object| &mut object.key).chain(&mut answer.prefixes);
        for key in keys {
            if key.iter().any(|byte| matches!(byte, b'%' | b'+')) {
                *key = decode_form(std::str::from_utf8(key).map_err(|_| "a listing not in UTF-8")?);
            }
        }
    }
    Ok((answer, url))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Kind, PAGE_ENTRIES, Page};

    fn page(inner: &str) -> Page {
        let text = format!("<?xml version=\"1.0\"?><ListBucketResult xmlns=\"x\">{inner}</ListBucketResult>");
        parse(text.as_bytes()).unwrap().into_page(b"d/")
    }

    fn object(key: &str, size: impl std::fmt::Display) -> String {
        format!(
            "<Contents><Key>{key}</Key><LastModified>2015-10-21T07:28:00.000Z</LastModified><ETag>&quot;e&quot;</ETag><Size>{size}</Size><Owner><ID>7</ID></Owner></Contents>"
        )
    }

    #[test]
    fn odd_keys_are_named_or_reported_and_hide_nothing() {
        let text = [
            "<EncodingType>url</EncodingType><IsTruncated>false</IsTruncated>".to_owned(),
            object("d/", 0),
            object("d/a%2Fb+c%2Bd", 1),
            object("d/..", 2),
            object("d/%FF", 3),
            object(&format!("d/{}", "x".repeat(256)), 4),
            object("d/line%0Abreak", 5),
            "<CommonPrefixes><Prefix>d//</Prefix></CommonPrefixes>".into(),
            "<CommonPrefixes><Prefix>d/./</Prefix></CommonPrefixes>".into(),
            "<CommonPrefixes><Prefix>d/sub/</Prefix></CommonPrefixes>".into(),
        ];
        let page = page(&text.concat());
        let names: Vec<_> = page.entries.iter().map(|entry| String::from_utf8_lossy(&entry.name)).collect();
        assert_eq!(names, ["line\nbreak", "sub"]);
        assert_eq!(page.entries[0].modified_ns, 1_445_412_480_000_000_000);
        assert_eq!(page.unnameable.len(), 6, "{:?}", page.unnameable);
        assert_eq!(page.unnameable[0], "d/a/b c+d");
    }

    #[test]
    fn a_marker_with_content_is_not_passed_over() {
        assert_eq!(page(&object("d/", 9)).unnameable, ["d/"]);
    }

    #[test]
    fn a_store_that_does_not_encode_is_taken_literally() {
        let page = page(&object("d/a&amp;b%20c+&#233;", 1));
        assert_eq!(page.entries[0].name, "a&b%20c+é".as_bytes());
    }

    #[test]
    fn sizes_that_no_file_has_are_reported_and_hide_nothing() {
        let largest = volume::FILE_BYTES_MAX;
        let text = [
            "<IsTruncated>false</IsTruncated>".to_owned(),
            object("d/a", largest + 1),
            object("d/b", largest),
            object("d/c", u64::MAX),
            object("d/d", "99999999999999999999999999999"),
            object("d/e", 7),
        ];
        let page = page(&text.concat());
        let sizes: Vec<_> = page.entries.iter().map(|e| (&e.name[..], &e.kind)).collect();
        assert!(
            matches!(&sizes[..], [(b"b", Kind::File { size, .. }), (b"e", Kind::File { size: 7, .. })] if *size == largest),
            "{sizes:?}"
        );
        let reported = ["d/a", "d/c", "d/d"].map(|key| format!("{key} (too large for a file)"));
        assert_eq!(page.unnameable, reported);
        assert!(parse(b"<ListBucketResult><Contents><Size>-1</Size></Contents></ListBucketResult>").is_err());
    }

    #[test]
    fn what_a_page_holds_is_bounded() {
        let text =
            |n: usize, inner: &str| format!("<ListBucketResult>{}</ListBucketResult>", inner.repeat(n));
        for inner in ["<Contents/>", "<CommonPrefixes><Prefix>p/</Prefix></CommonPrefixes>"] {
            // An empty tag is no entry; a pair is one.
            let inner = inner.replace("<Contents/>", "<Contents></Contents>");
            assert!(parse(text(PAGE_ENTRIES, &inner).as_bytes()).is_ok());
            let error = parse(text(PAGE_ENTRIES + 1, &inner).as_bytes()).unwrap_err();
            assert!(error.contains("more than was asked for"), "{error}");
        }
        // Some stores count the two apart.
        let pair = "<Contents></Contents><CommonPrefixes><Prefix>p/</Prefix></CommonPrefixes>";
        assert!(parse(text(PAGE_ENTRIES, pair).as_bytes()).is_ok());
        assert!(parse(text(PAGE_ENTRIES + 1, pair).as_bytes()).is_err());
        assert!(parse(text(1, &"<a>".repeat(1000)).as_bytes()).is_err());
        let long = page(&object(&format!("d/{}", "x".repeat(10 << 20)), 1));
        assert!(long.entries.is_empty() && long.unnameable[0].len() < 2000, "{}", long.unnameable[0].len());
        // A version that no request could name again is none.
        let etag =
            format!("<Contents><Key>d/v</Key><ETag>{}</ETag><Size>1</Size></Contents>", "e".repeat(4096));
        assert_eq!(page(&etag).unnameable, ["d/v"]);
    }

    #[test]
    fn half_a_listing_is_an_error() {
        for text in [
            "<ListBucketResult><Contents><Key>a</Key></Contents>",
            "<ListBucketResult><IsTruncated>true</IsTruncated></ListBucketResult>",
            "<html><body>login</body></html>",
            "",
        ] {
            assert!(parse(text.as_bytes()).is_err(), "{text}");
        }
    }
}
