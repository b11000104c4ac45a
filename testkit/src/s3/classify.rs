//! Which operation of S3's a request is, as `s3s` will find: by method, path, query and one header.

use super::adapter::Asked;
use http::request::Parts;
use http::{HeaderMap, Method};

pub(super) fn classify(parts: &Parts) -> Asked {
    of(&parts.method, parts.uri.path(), parts.uri.query().unwrap_or_default(), &parts.headers)
}

fn of(method: &Method, path: &str, query: &str, headers: &HeaderMap) -> Asked {
    let decode = |text: &str| percent_encoding::percent_decode_str(text).decode_utf8_lossy().into_owned();
    let pairs = query.split('&').filter(|pair| !pair.is_empty());
    let pairs = pairs.map(|pair| pair.split_once('=').unwrap_or((pair, "")));
    let query: Vec<_> = pairs.map(|(name, value)| (decode(name), decode(&value.replace('+', " ")))).collect();
    let value = |name: &str| query.iter().find(|(of, _)| of == name).map(|(_, value)| value.as_str());
    let has = |name: &str| value(name).is_some();

    let (bucket, key) = path.trim_start_matches('/').split_once('/').unwrap_or((path.trim_matches('/'), ""));
    let is_copy = headers.contains_key("x-amz-copy-source");
    let is_part = has("partNumber") && has("uploadId");
    let op = match (key, method) {
        ("", &Method::HEAD) => "HeadBucket",
        ("", &Method::PUT) => "CreateBucket",
        ("", &Method::GET) if has("uploads") => "ListMultipartUploads",
        ("", &Method::GET) if value("list-type") == Some("2") => "ListObjectsV2",
        ("", &Method::POST) if has("delete") => "DeleteObjects",
        ("", _) => "Other",
        (_, &Method::GET) if has("uploadId") => "ListParts",
        (_, &Method::GET) => "GetObject",
        (_, &Method::HEAD) => "HeadObject",
        (_, &Method::PUT) if is_part && is_copy => "UploadPartCopy",
        (_, &Method::PUT) if is_part => "UploadPart",
        (_, &Method::PUT) if is_copy => "CopyObject",
        (_, &Method::PUT) => "PutObject",
        (_, &Method::POST) if has("uploads") => "CreateMultipartUpload",
        (_, &Method::POST) if has("uploadId") => "CompleteMultipartUpload",
        (_, &Method::DELETE) if has("uploadId") => "AbortMultipartUpload",
        (_, &Method::DELETE) => "DeleteObject",
        _ => "Other",
    };
    let key = match op {
        "ListObjectsV2" | "ListMultipartUploads" => value("prefix").unwrap_or_default().to_owned(),
        "Other" => String::new(),
        _ => decode(key),
    };
    Asked { op, bucket: decode(bucket), key, query }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operations_are_told_apart_by_method_query_and_header() {
        let plain = HeaderMap::new();
        let copy: HeaderMap =
            [("x-amz-copy-source".parse().unwrap(), "b/k".parse().unwrap())].into_iter().collect();
        for (method, target, headers, expected) in [
            (Method::GET, "/b?list-type=2&prefix=a%2Fb+c", &plain, ("ListObjectsV2", "a/b c")),
            (Method::GET, "/b/?uploads&prefix=a", &plain, ("ListMultipartUploads", "a")),
            (Method::GET, "/b", &plain, ("Other", "")),
            (Method::PUT, "/b", &plain, ("CreateBucket", "")),
            (Method::HEAD, "/b/", &plain, ("HeadBucket", "")),
            (Method::POST, "/b?delete", &plain, ("DeleteObjects", "")),
            (Method::GET, "/b/k/", &plain, ("GetObject", "k/")),
            (Method::GET, "/b/k?uploadId=x", &plain, ("ListParts", "k")),
            (Method::HEAD, "/b/k", &plain, ("HeadObject", "k")),
            (Method::PUT, "/b/a%20b", &plain, ("PutObject", "a b")),
            (Method::PUT, "/b/k", &copy, ("CopyObject", "k")),
            (Method::PUT, "/b/k?partNumber=1&uploadId=x", &plain, ("UploadPart", "k")),
            (Method::PUT, "/b/k?uploadId=x&partNumber=1", &copy, ("UploadPartCopy", "k")),
            (Method::POST, "/b/k?uploads", &plain, ("CreateMultipartUpload", "k")),
            (Method::POST, "/b/k?uploadId=x", &plain, ("CompleteMultipartUpload", "k")),
            (Method::DELETE, "/b/k?uploadId=x", &plain, ("AbortMultipartUpload", "k")),
            (Method::DELETE, "/b/k", &plain, ("DeleteObject", "k")),
        ] {
            let (path, query) = target.split_once('?').unwrap_or((target, ""));
            let asked = of(&method, path, query, headers);
            assert_eq!((asked.op, asked.key.as_str()), expected, "{method} {target}");
            assert_eq!(asked.bucket, "b", "{method} {target}");
        }
    }
}
