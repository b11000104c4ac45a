//! OSS's side of a request: its signature is checked as Alibaba Cloud documents version 4 of it, independently of any client's
//! library; then the request goes on as one of S3's without a signature. Listings and errors are alike in both.

use super::Rights;
use super::access::Guard;
use hmac::{Hmac, KeyInit, Mac};
use http::{HeaderMap, Method, StatusCode, request};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_decode_str, utf8_percent_encode};
use sha2::{Digest, Sha256};
use std::time::{Duration, UNIX_EPOCH};

/// How an OSS server of the testkit is.
#[derive(Clone, Debug)]
pub struct Oss {
    pub region: String,
}

/// Status, code, message.
pub(super) type Denied = (StatusCode, &'static str, &'static str);

const ALGORITHM: &str = "OSS4-HMAC-SHA256";
const SKEW_MAX: Duration = Duration::from_secs(15 * 60);
const STRICT: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~');
const STRICT_PATH: &AsciiSet = &STRICT.remove(b'/');

impl Oss {
    /// Checks who asks and what for, and takes away all that S3 does not know.
    pub(super) fn admit(&self, parts: &mut request::Parts, guard: &Guard, op: &str) -> Result<(), Denied> {
        let rights = match header(&parts.headers, "authorization") {
            None if guard.anonymous => Rights::All,
            None => return Err((StatusCode::FORBIDDEN, "AccessDenied", "anonymous access is off")),
            Some(authorization) => self.signed(parts, authorization, guard)?,
        };
        let allowed = rights.allow(op);
        if !allowed {
            return Err((StatusCode::FORBIDDEN, "AccessDenied", "you have no right to access this object"));
        }
        let theirs: Vec<_> =
            parts.headers.keys().filter(|name| name.as_str().starts_with("x-oss-")).cloned().collect();
        for name in theirs {
            parts.headers.remove(name);
        }
        parts.headers.remove("authorization");
        Ok(())
    }

    /// S3's listing in OSS's words, those that Alibaba Cloud's own client understands: tags of no namespace; a space as %20, for
    /// a plus is none to it; the tokens encoded as the keys are.
    pub(super) fn listing(&self, of_s3: &str) -> String {
        let plain = of_s3.replacen(" xmlns=\"http://s3.amazonaws.com/doc/2006-03-01/\"", "", 1);
        if !plain.contains("<EncodingType>url</EncodingType>") {
            return plain;
        }
        let mut text = plain.replace('+', "%20");
        for tag in ["<ContinuationToken>", "<NextContinuationToken>"] {
            if let Some((before, after)) = text.split_once(tag)
                && let Some((token, after)) = after.split_once('<')
            {
                text = format!("{before}{tag}{}<{after}", utf8_percent_encode(token, STRICT));
            }
        }
        text
    }

    fn signed(&self, parts: &request::Parts, authorization: &str, guard: &Guard) -> Result<Rights, Denied> {
        let malformed = (StatusCode::BAD_REQUEST, "InvalidArgument", "the Authorization header is malformed");
        let fields = authorization.strip_prefix(ALGORITHM).ok_or(malformed)?;
        let field = |name: &str| {
            let of = |pair: &'_ str| pair.trim().strip_prefix(name)?.strip_prefix('=').map(str::to_owned);
            fields.split(',').find_map(of)
        };
        let credential = field("Credential").ok_or(malformed)?;
        let signature = field("Signature").ok_or(malformed)?;
        let additional = field("AdditionalHeaders").unwrap_or_default();
        let [id, day, region, "oss", "aliyun_v4_request"] = credential.split('/').collect::<Vec<_>>()[..]
        else {
            return Err(malformed);
        };
        if region != self.region {
            return Err((
                StatusCode::BAD_REQUEST,
                "InvalidArgument",
                "invalid signing region in Authorization header",
            ));
        }
        let key = guard.keys.iter().find(|key| key.id == id);
        let key =
            key.ok_or((StatusCode::FORBIDDEN, "InvalidAccessKeyId", "the access key id does not exist"))?;
        let time = header(&parts.headers, "x-oss-date").ok_or(malformed)?;
        let sent = seconds(time).ok_or(malformed)?;
        let now = guard.now().duration_since(UNIX_EPOCH).unwrap_or_default();
        if !time.starts_with(day) || now.abs_diff(Duration::from_secs(sent)) > SKEW_MAX {
            let why = "the difference between the request time and the current time is too large";
            return Err((StatusCode::FORBIDDEN, "RequestTimeTooSkewed", why));
        }
        let scope = format!("{day}/{region}/oss/aliyun_v4_request");
        let to_sign =
            format!("{ALGORITHM}\n{time}\n{scope}\n{}", hex(&Sha256::digest(canonical(parts, &additional))));
        let day = hmac(format!("aliyun_v4{}", key.secret).as_bytes(), day);
        let signing = hmac(&hmac(&hmac(&day, region), "oss"), "aliyun_v4_request");
        if hex(&hmac(&signing, &to_sign)) != signature {
            let why = "the request signature we calculated does not match the signature you provided";
            return Err((StatusCode::FORBIDDEN, "SignatureDoesNotMatch", why));
        }
        if key.token.is_some() && key.token.as_deref() != header(&parts.headers, "x-oss-security-token") {
            return Err((StatusCode::FORBIDDEN, "SecurityTokenExpired", "the security token has expired"));
        }
        Ok(key.rights)
    }
}

/// Method, path, query, headers and what is signed of the body, each in the one spelling that both sides compute.
fn canonical(parts: &request::Parts, additional: &str) -> String {
    let decode = |text: &str| percent_decode_str(text).decode_utf8_lossy().into_owned();
    let strict = |text: &str| utf8_percent_encode(text, STRICT).to_string();
    let path = utf8_percent_encode(&decode(parts.uri.path()), STRICT_PATH).to_string();
    let query = parts.uri.query().unwrap_or_default();
    let mut pairs: Vec<(String, String)> = query
        .split('&')
        .filter(|pair| !pair.is_empty())
        .map(|pair| pair.split_once('=').unwrap_or((pair, "")))
        .map(|(name, value)| (strict(&decode(name)), strict(&decode(value))))
        .collect();
    pairs.sort();
    let pair = |(name, value): &(String, String)| match value.is_empty() {
        true => name.clone(),
        false => format!("{name}={value}"),
    };
    let query: Vec<String> = pairs.iter().map(pair).collect();
    let is_signed = |name: &str| {
        name.starts_with("x-oss-")
            || matches!(name, "content-type" | "content-md5")
            || additional.split(';').any(|more| more == name)
    };
    let mut headers: Vec<(String, String)> = parts
        .headers
        .iter()
        .filter(|(name, _)| is_signed(name.as_str()))
        .map(|(name, value)| (name.to_string(), String::from_utf8_lossy(value.as_bytes()).trim().to_owned()))
        .collect();
    headers.sort();
    let headers: String = headers.iter().map(|(name, value)| format!("{name}:{value}\n")).collect();
    let payload = header(&parts.headers, "x-oss-content-sha256").unwrap_or("UNSIGNED-PAYLOAD");
    let method: &Method = &parts.method;
    format!("{method}\n{path}\n{}\n{headers}\n{additional}\n{payload}", query.join("&"))
}

fn header<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    headers.get(name)?.to_str().ok()
}

pub(super) fn hmac(key: &[u8], text: &str) -> Vec<u8> {
    let mut mac = Hmac::<Sha256>::new_from_slice(key).expect("HMAC takes keys of any length");
    mac.update(text.as_bytes());
    mac.finalize().into_bytes().to_vec()
}

pub(super) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// `20261126T054500Z` → since the epoch.
fn seconds(time: &str) -> Option<u64> {
    let digits = time.strip_suffix('Z')?.split_once('T')?;
    let number =
        |text: &str| -> Option<i64> { text.bytes().all(|b| b.is_ascii_digit()).then(|| text.parse().ok())? };
    let ((8, 6), (date, clock)) = ((digits.0.len(), digits.1.len()), digits) else { return None };
    let (year, month, day) = (number(&date[..4])?, number(&date[4..6])?, number(&date[6..])?);
    // Days from civil: the year begins in March, so that the leap day is its last.
    let (y, m) = if month <= 2 { (year - 1, month + 9) } else { (year, month - 3) };
    let days = 365 * y + y / 4 - y / 100 + y / 400 + (153 * m + 2) / 5 + day - 1 - 719_468;
    let of_day = number(&clock[..2])? * 3600 + number(&clock[2..4])? * 60 + number(&clock[4..])?;
    u64::try_from(days * 86_400 + of_day).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_seconds_since_the_epoch() {
        for (text, expected) in [
            ("19700101T000000Z", Some(0)),
            ("20000229T120000Z", Some(951_825_600)),
            ("20261126T054500Z", Some(1_795_671_900)),
            ("20261126T0545Z", None),
            ("x", None),
        ] {
            assert_eq!(seconds(text), expected, "{text}");
        }
    }
}
