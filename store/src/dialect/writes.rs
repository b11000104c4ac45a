//! What stores that speak as S3 does are told to write. Names of headers are each store's own.

use super::xml::{Tag, walk};
use super::{BucketDialect, field, header};
use crate::Version;
use crate::keys::{encode_query, is_path};
use crate::sink::{Attributes, Condition, Leftover, Part, SinkLimits, Upload, Write, WriteId};
use http::header::{CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue, IF_MATCH, IF_NONE_MATCH};
use http::{Method, StatusCode};
use quick_xml::escape::escape;
use std::time::Duration;
use url::Url;

/// A bucket that can be written to.
pub(crate) trait Writes: BucketDialect {
    fn sink_limits(&self) -> SinkLimits;

    /// What names of an object's own headers begin with.
    fn metadata_prefix(&self) -> &'static str;

    /// What makes the store check what arrives.
    fn summed(&self, crc32c: u32) -> HeaderMap;

    /// The checksum that an answer to a write tells of what has arrived (CRC-32C).
    fn arrived(&self, headers: &HeaderMap) -> Option<u32>;

    /// What makes the store keep a checksum of an object in parts.
    fn summed_in_parts(&self) -> HeaderMap {
        HeaderMap::new()
    }

    /// What the list of an object's parts says of one of them.
    fn summed_part(&self, _crc32c: u32) -> String {
        String::new()
    }

    /// What makes a HEAD's answer tell the checksum.
    fn asks_for_sums(&self) -> HeaderMap {
        HeaderMap::new()
    }

    /// None: the version cannot be written into a header.
    fn conditions(&self, condition: &Condition) -> Option<HeaderMap> {
        let mut headers = HeaderMap::new();
        match condition {
            Condition::Any => {}
            Condition::Absent => drop(headers.insert(IF_NONE_MATCH, HeaderValue::from_static("*"))),
            Condition::Is(version) => drop(headers.insert(IF_MATCH, super::value(field::quoted(version))?)),
        }
        Some(headers)
    }

    /// What the object is to carry.
    fn carried(&self, write: &Write) -> HeaderMap {
        let prefix = self.metadata_prefix();
        let mut headers = HeaderMap::new();
        let mut put = |name: &str, text: String| {
            let name = HeaderName::try_from(format!("{prefix}{name}")).expect("names are ours, and plain");
            headers.insert(name, super::value(text).expect("numbers can be sent"));
        };
        put(WRITE, write.id.to_string());
        for (name, text) in encode(&write.attributes, Type::File) {
            put(name, text);
        }
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/octet-stream"));
        headers
    }

    /// The same of a directory.
    fn carried_by_directory(&self, write: &Write) -> HeaderMap {
        let mut headers = self.carried(write);
        if let Some((_, text)) =
            encode(&write.attributes, Type::Directory).into_iter().find(|(name, _)| *name == MODE)
        {
            let name = HeaderName::try_from(format!("{}{MODE}", self.metadata_prefix()));
            headers.insert(name.expect("as above"), super::value(text).expect("numbers can be sent"));
        }
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/x-directory"));
        headers
    }

    fn attributes(&self, headers: &HeaderMap) -> Attributes {
        decode(|name| header(headers, format!("{}{name}", self.metadata_prefix()).as_str()))
    }

    fn written_by(&self, headers: &HeaderMap) -> Option<WriteId> {
        WriteId::parse(header(headers, format!("{}{WRITE}", self.metadata_prefix()).as_str())?)
    }

    /// What a request that copies `from` says of it.
    fn copying(&self, from: &[u8], version: &Version) -> Option<HeaderMap>;

    /// What a copy says about `bytes` of it.
    fn copying_range(&self, bytes: &std::ops::Range<u64>) -> HeaderMap;

    /// What a key that opens objects is called where it opens the source of a copy.
    fn opening_source(&self, key: &HeaderMap) -> HeaderMap;

    /// The right that a writer lacks.
    fn right_to_write(&self) -> &'static str;
}

/// Whose names others read too: rclone (`mtime`) and s3fs (all four), beside ours.
const MODE: &str = "mode";
const UID: &str = "uid";
const GID: &str = "gid";
const MTIME: &str = "mtime";
const WRITE: &str = "millpond-write";

#[derive(Clone, Copy, PartialEq, Eq)]
enum Type {
    File,
    Directory,
}

const PERMISSIONS: u32 = 0o7777;

fn encode(attributes: &Attributes, of: Type) -> Vec<(&'static str, String)> {
    let Attributes { mode, uid, gid, modified_ns } = *attributes;
    let kind = match of {
        Type::File => 0o100_000,
        Type::Directory => 0o040_000,
    };
    let number = |(name, value): (&'static str, Option<u32>)| Some((name, value?.to_string()));
    let mode = mode.map(|mode| kind | mode & PERMISSIONS);
    let mut texts: Vec<_> = [(MODE, mode), (UID, uid), (GID, gid)].into_iter().filter_map(number).collect();
    if let Some(ns) = modified_ns {
        // Before 1970 the fraction counts downwards, as both readers take it.
        let sign = if ns < 0 { "-" } else { "" };
        let (seconds, rest) = (ns.unsigned_abs() / 1_000_000_000, ns.unsigned_abs() % 1_000_000_000);
        texts.push((MTIME, format!("{sign}{seconds}.{rest:09}")));
    }
    texts
}

/// What others have written counts as far as it can be understood.
fn decode<'h>(text: impl Fn(&str) -> Option<&'h str>) -> Attributes {
    let number = |name: &str| text(name)?.trim().parse().ok();
    Attributes {
        mode: number(MODE).map(|mode: u32| mode & PERMISSIONS),
        uid: number(UID),
        gid: number(GID),
        modified_ns: text(MTIME).and_then(|text| nanoseconds(text.trim())),
    }
}

/// `-12.5` → -12,500,000,000. More digits than nine are cut off.
fn nanoseconds(text: &str) -> Option<i64> {
    let (is_negative, digits) = match text.strip_prefix('-') {
        Some(digits) => (true, digits),
        None => (false, text),
    };
    let (seconds, fraction) = digits.split_once('.').unwrap_or((digits, ""));
    let plain = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
    if seconds.is_empty() || !plain(seconds) || !plain(fraction) {
        return None;
    }
    let fraction = &fraction[..fraction.len().min(9)];
    let fraction: i64 = format!("{fraction:0<9}").parse().ok()?;
    let ns = seconds.parse::<i64>().ok()?.checked_mul(1_000_000_000)?.checked_add(fraction)?;
    Some(if is_negative { -ns } else { ns })
}

/// The object's own URL with a question about its uploads.
fn asking(object: &Url, query: &str) -> Url {
    let mut url = object.clone();
    url.set_query(Some(query));
    url
}

pub(crate) fn beginning(object: &Url) -> (Method, Url) {
    (Method::POST, asking(object, "uploads="))
}

pub(crate) fn part(object: &Url, upload: &str, number: u32) -> Url {
    asking(object, &format!("partNumber={number}&uploadId={}", encode_query(upload.as_bytes())))
}

pub(crate) fn upload(object: &Url, upload: &str) -> Url {
    asking(object, &format!("uploadId={}", encode_query(upload.as_bytes())))
}

/// Uploads of keys that begin with `prefix`, after this one: its key and its name.
pub(crate) fn uploads(base: &Url, prefix: &[u8], after: Option<(&[u8], &str)>) -> Url {
    let mut query = format!("uploads=&encoding-type=url&prefix={}", encode_query(prefix));
    if let Some((key, upload)) = after {
        query.push_str(&format!("&key-marker={}", encode_query(key)));
        if !upload.is_empty() {
            query.push_str(&format!("&upload-id-marker={}", encode_query(upload.as_bytes())));
        }
    }
    asking(base, &query)
}

/// `summed`: see [`Writes::summed_part`].
pub(crate) fn completing(parts: &[Part], summed: impl Fn(u32) -> String) -> String {
    let mut text = "<CompleteMultipartUpload xmlns=\"http://s3.amazonaws.com/doc/2006-03-01/\">".to_owned();
    for Part { number, tag, crc32c, confirmed, .. } in parts {
        let tag = escape(tag.as_str());
        // Only of what the store has a checksum of, too.
        let sum = if *confirmed { summed(*crc32c) } else { String::new() };
        text.push_str(&format!(
            "<Part><ETag>&quot;{tag}&quot;</ETag>{sum}<PartNumber>{number}</PartNumber></Part>"
        ));
    }
    text + "</CompleteMultipartUpload>"
}

/// The text of the one tag of this name below the outermost.
fn one(body: &[u8], root: &str, wanted: &str) -> Result<String, String> {
    let mut found = None;
    walk(body, root, |depth, name, tag| {
        if let (2, Tag::Closes(text)) = (depth, tag)
            && name == wanted
        {
            found = Some(std::mem::take(text));
        }
        Ok(())
    })?;
    found.filter(|text| !text.is_empty()).ok_or_else(|| format!("a {root} without a {wanted}"))
}

/// No store has a longer name for an upload; it travels in each request for one.
const UPLOAD_ID_BYTES_MAX: usize = 2048;

pub(crate) fn begun(body: &[u8]) -> Result<String, String> {
    let id = one(body, "InitiateMultipartUploadResult", "UploadId")?;
    match is_upload_id(&id) {
        true => Ok(id),
        false => Err("the name of an upload that no request can carry".into()),
    }
}

fn is_upload_id(id: &str) -> bool {
    (1..=UPLOAD_ID_BYTES_MAX).contains(&id.len()) && id.bytes().all(|byte| byte.is_ascii_graphic())
}

/// What the answer to a request of this kind, of which the store keeps back whether it succeeds, tells in its body.
pub(crate) fn made(body: &[u8], root: &str) -> Result<Version, String> {
    let etag = one(body, root, "ETag")?;
    field::unquoted(&etag).ok_or_else(|| format!("a {root} with an ETag that names no version"))
}

/// As [`made`], of a completion, whatever else it tells.
pub(crate) fn is_made(body: &[u8]) -> Result<(), String> {
    walk(body, "CompleteMultipartUploadResult", |_, _, _| Ok(()))
}

/// A page of uploads under way.
pub(crate) struct UploadsPage {
    pub(crate) uploads: Vec<ListedUpload>,
    /// The last one of the page, its key and its name, where there are more.
    pub(crate) next: Option<(Vec<u8>, String)>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ListedUpload {
    pub(crate) key: Vec<u8>,
    /// The store's name for it.
    pub(crate) id: String,
    /// By the store's clock, since the epoch. None: it does not say.
    pub(crate) begun_ns: Option<i64>,
}

pub(crate) fn uploads_page(body: &[u8]) -> Result<UploadsPage, String> {
    let (mut uploads, mut truncated, mut marker) = (Vec::new(), false, String::new());
    let (mut upload, mut next_key) = (ListedUpload::default(), Vec::new());
    let mut encoded = false;
    walk(body, "ListMultipartUploadsResult", |depth, tag_name, tag| {
        let Tag::Closes(text) = tag else { return Ok(()) };
        match (depth, tag_name) {
            (2, "EncodingType") => encoded = text == "url",
            (2, "IsTruncated") => truncated = text == "true",
            (2, "NextUploadIdMarker") => marker = std::mem::take(text),
            (2, "NextKeyMarker") => next_key = text.as_bytes().to_vec(),
            (3, "Key") => upload.key = text.as_bytes().to_vec(),
            (3, "UploadId") => upload.id = std::mem::take(text),
            (3, "Initiated") => upload.begun_ns = super::date::parse_iso(text),
            (2, "Upload") => uploads.push(std::mem::take(&mut upload)),
            _ => {}
        }
        Ok(())
    })?;
    // (Some stores say the encoding behind the uploads.)
    let plain = |name: Vec<u8>| match encoded {
        true => crate::keys::decode_form(&String::from_utf8_lossy(&name)),
        false => name,
    };
    uploads.iter_mut().for_each(|upload| upload.key = plain(std::mem::take(&mut upload.key)));
    Ok(UploadsPage { uploads, next: truncated.then(|| (plain(next_key), marker)) })
}

/// Of an upload that was listed at `now_ns` by the store's clock: what a volume whose keys begin with `prefix` can do with it.
/// None: it is not below it, no request can name it, or nobody knows how old it is.
pub(crate) fn leftover(listed: ListedUpload, prefix: &[u8], now_ns: i64) -> Option<Leftover> {
    let ListedUpload { key, id, begun_ns } = listed;
    let path = key.strip_prefix(prefix).filter(|path| is_path(path))?.to_vec();
    let age_ns = u64::try_from(now_ns.checked_sub(begun_ns?)?).ok()?;
    let upload = Upload { path, id, write: WriteId::UNKNOWN };
    is_upload_id(&upload.id).then(|| Leftover { upload, age: Duration::from_nanos(age_ns) })
}

/// Does an answer of success bring an error instead? Stores send the status first where the work takes long.
pub(crate) fn is_error(status: StatusCode, body: &[u8]) -> bool {
    status.is_success() && !super::answer::parse(body).code.is_empty()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn read(attributes: &Attributes, of: Type) -> Attributes {
        let texts = encode(attributes, of);
        decode(|name| texts.iter().find(|(found, _)| *found == name).map(|(_, text)| text.as_str()))
    }

    proptest! {
        #[test]
        fn attributes_are_read_as_they_are_written(
            mode in proptest::option::of(0_u32..0o10000), uid in proptest::option::of(any::<u32>()),
            gid in proptest::option::of(any::<u32>()), modified_ns in proptest::option::of(-i64::MAX..=i64::MAX),
        ) {
            let attributes = Attributes { mode, uid, gid, modified_ns };
            prop_assert_eq!(read(&attributes, Type::File), attributes);
            prop_assert_eq!(read(&attributes, Type::Directory), attributes);
        }

        #[test]
        fn whatever_others_write_is_understood_or_left_out(text in "\\PC{0,30}") {
            decode(|_| Some(text.as_str()));
        }

        #[test]
        fn garbage_is_no_answer_and_no_panic(body in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = (begun(&body), made(&body, "CopyObjectResult"), uploads_page(&body));
        }

        #[test]
        fn whatever_a_listing_says_what_is_ended_is_below_the_prefix_and_can_be_named(
            key in "(v/){0,2}[a./]{0,6}", id in "\\PC{0,3}", begun_ns: Option<i64>, now_ns: i64,
        ) {
            let listed = ListedUpload { key: key.clone().into_bytes(), id, begun_ns };
            if let Some(Leftover { upload, age }) = leftover(listed, b"v/", now_ns) {
                prop_assert_eq!([&b"v/"[..], &upload.path].concat(), key.into_bytes());
                prop_assert!(is_path(&upload.path) && is_upload_id(&upload.id));
                prop_assert_eq!(i128::from(now_ns) - i128::from(begun_ns.unwrap()), age.as_nanos().cast_signed());
            }
        }
    }

    #[test]
    fn what_others_wrote_is_understood() {
        // s3fs, rclone, goofys-like seconds; then nonsense.
        for (name, text, expected) in [
            (MODE, "33188", Attributes { mode: Some(0o644), ..Attributes::default() }),
            (
                MTIME,
                "1500000000.123456789",
                Attributes { modified_ns: Some(1_500_000_000_123_456_789), ..Attributes::default() },
            ),
            (
                MTIME,
                "1500000000",
                Attributes { modified_ns: Some(1_500_000_000_000_000_000), ..Attributes::default() },
            ),
            (MTIME, "-1.5", Attributes { modified_ns: Some(-1_500_000_000), ..Attributes::default() }),
            (MTIME, "1.0000000019", Attributes { modified_ns: Some(1_000_000_001), ..Attributes::default() }),
            (MTIME, "99999999999999999999", Attributes::default()),
            (MTIME, "1.2.3", Attributes::default()),
            (MTIME, ".5", Attributes::default()),
            (UID, "-1", Attributes::default()),
        ] {
            assert_eq!(decode(|asked| (asked == name).then_some(text)), expected, "{name}: {text}");
        }
    }

    #[test]
    fn an_upload_is_asked_for_by_its_name() {
        let object = Url::parse("https://h/b/a%20b").unwrap();
        assert_eq!(part(&object, "x+/=", 7).as_str(), "https://h/b/a%20b?partNumber=7&uploadId=x%2B%2F%3D");
        assert_eq!(upload(&object, "u").as_str(), "https://h/b/a%20b?uploadId=u");
        let part = |number, confirmed| Part { number, bytes: 1, crc32c: 7, tag: "a\"<b".into(), confirmed };
        let body = completing(&[part(1, false), part(2, true)], |crc32c| format!("<Sum>{crc32c}</Sum>"));
        for text in [
            "<ETag>&quot;a&quot;&lt;b&quot;</ETag><PartNumber>1</PartNumber>",
            "&lt;b&quot;</ETag><Sum>7</Sum><PartNumber>2</PartNumber>",
        ] {
            assert!(body.contains(text), "{body}");
        }
    }

    #[test]
    fn answers_are_read() {
        let begun_ = b"<?xml version=\"1.0\"?><InitiateMultipartUploadResult><Bucket>b</Bucket><UploadId>u-1</UploadId></InitiateMultipartUploadResult>";
        assert_eq!(begun(begun_), Ok("u-1".into()));
        assert!(
            begun(b"<InitiateMultipartUploadResult><UploadId>a b</UploadId></InitiateMultipartUploadResult>")
                .is_err()
        );
        assert!(begun(b"<InitiateMultipartUploadResult></InitiateMultipartUploadResult>").is_err());
        let without = b"<CompleteMultipartUploadResult><ETag></ETag></CompleteMultipartUploadResult>";
        assert_eq!(is_made(without), Ok(()));
        assert!(is_made(b"").is_err() && is_made(b"<CopyObjectResult/>").is_err());
        let made_ = b"\n\n<CompleteMultipartUploadResult><ETag>&quot;abc-2&quot;</ETag></CompleteMultipartUploadResult>";
        assert_eq!(made(made_, "CompleteMultipartUploadResult"), Ok(Version("abc-2".into())));
        let error = b"  <?xml version=\"1.0\"?><Error><Code>InternalError</Code></Error>";
        assert!(is_error(StatusCode::OK, error) && !is_error(StatusCode::OK, made_));
        assert!(made(error, "CompleteMultipartUploadResult").is_err() && is_made(error).is_err());
    }

    const DAY_NS: i64 = 24 * 3600 * 1_000_000_000;

    #[test]
    fn uploads_are_read_page_by_page() {
        let page = |more: &str| {
            format!(
                "<ListMultipartUploadsResult><EncodingType>url</EncodingType>{more}\
                 <Upload><Key>v/a+b</Key><UploadId>1</UploadId><Initiated>2026-01-02T03:04:05.000Z</Initiated></Upload>\
                 <Upload><Key>v/c</Key><UploadId>2</UploadId><Owner><ID>x</ID></Owner></Upload></ListMultipartUploadsResult>"
            )
        };
        let UploadsPage { uploads, next } = uploads_page(page("").as_bytes()).unwrap();
        let begun_ns = Some(1_767_323_045_000_000_000);
        let first = ListedUpload { key: b"v/a b".to_vec(), id: "1".into(), begun_ns };
        // That the second does not say when it was begun does not make it as old as the first.
        let second = ListedUpload { key: b"v/c".to_vec(), id: "2".into(), begun_ns: None };
        assert_eq!((uploads, next), (vec![first, second], None));
        let more = "<IsTruncated>true</IsTruncated><NextKeyMarker>v/a+b</NextKeyMarker><NextUploadIdMarker>2</NextUploadIdMarker>";
        assert_eq!(
            uploads_page(page(more).as_bytes()).unwrap().next,
            Some((b"v/a b".to_vec(), "2".to_owned()))
        );
    }

    #[test]
    fn only_what_lies_below_the_prefix_and_has_an_age_is_left_over() {
        let age = |key: &str, id: &str, begun_ns| {
            let listed = ListedUpload { key: key.into(), id: id.into(), begun_ns };
            leftover(listed, b"v/", 10 * DAY_NS).map(|leftover| leftover.age)
        };
        let days = |count: u64| Some(Duration::from_secs(24 * 3600 * count));
        assert_eq!(age("v/a/b", "u", Some(DAY_NS)), days(9));
        assert_eq!(age("v/a", "u", Some(10 * DAY_NS)), days(0));
        // Begun before the store's clock was put back.
        assert_eq!(age("v/a", "u", Some(10 * DAY_NS + 1)), None);
        assert_eq!(age("v/a", "u", Some(i64::MIN)), None);
        assert_eq!(age("v/a", "u", None), None);
        for key in ["v-2/a", "v", "v/", "v//a", "v/../w/a", "v/a/..", "v/./a", "", "/v/a", "V/a"] {
            assert_eq!(age(key, "u", Some(0)), None, "{key:?}");
        }
        for id in ["", "a b", "\n", &"u".repeat(UPLOAD_ID_BYTES_MAX + 1)] {
            assert_eq!(age("v/a", id, Some(0)), None, "{id:?}");
        }
    }
}
