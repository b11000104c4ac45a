//! Is a user's file of delegation tokens one that a helper can be given?
//!
//! The library reads it as it starts, believes every length in it, and panics at one that is wrong; and it looks past a
//! file that it cannot read as if there were none. So the file is read here before, as Hadoop writes it
//! (`Credentials.writeTokenStorageToStream`): "HDTS", a format (0: Writables, 1: protobuf), the tokens.

/// Tokens of one file: of each NameNode of an HA pair one, and of the name service.
const TOKENS_MAX: i64 = 64;

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("it is no file of delegation tokens, as `hdfs fetchdt` writes it")]
pub struct BadTokenFile;

/// For which addresses (`host:port`, `ha-hdfs:nameservice`) it has a token of HDFS's.
///
/// # Errors
/// It is none, holds no token, or more than 64.
pub fn services(file: &[u8]) -> Result<Vec<String>, BadTokenFile> {
    let rest = file.strip_prefix(b"HDTS").ok_or(BadTokenFile)?;
    let (format, rest) = rest.split_first().ok_or(BadTokenFile)?;
    match format {
        0 => writables(rest),
        1 => protobuf(rest),
        _ => None,
    }
    .ok_or(BadTokenFile)
}

fn writables(mut rest: &[u8]) -> Option<Vec<String>> {
    let mut services = Vec::new();
    let count = number(&mut rest).filter(|count| (1..=TOKENS_MAX).contains(count))?;
    for _ in 0..count {
        let alias = block(&mut rest)?;
        std::str::from_utf8(alias).ok()?;
        let identifier = block(&mut rest)?;
        let _password = block(&mut rest)?;
        let kind = std::str::from_utf8(block(&mut rest)?).ok()?;
        let service = std::str::from_utf8(block(&mut rest)?).ok()?;
        if kind == KIND {
            identifier_of_hdfs(identifier)?;
            services.push(service.to_owned());
        }
    }
    Some(services)
}

const KIND: &str = "HDFS_DELEGATION_TOKEN";

/// Version, three texts, four numbers: the library unwraps what it reads of it.
fn identifier_of_hdfs(mut rest: &[u8]) -> Option<()> {
    take(&mut rest, 1).filter(|version| *version == [0])?;
    for _ in 0..3 {
        std::str::from_utf8(block(&mut rest)?).ok()?;
    }
    // Two times; two numbers that are an int's in Java.
    number(&mut rest)?;
    number(&mut rest)?;
    for _ in 0..2 {
        i32::try_from(number(&mut rest)?).ok().filter(|number| *number > i32::MIN && *number < i32::MAX)?;
    }
    Some(())
}

/// A message behind its length, which holds tokens (field 1); each an alias (1) and a token (2): identifier (1), password
/// (2), kind (3), service (4).
fn protobuf(mut rest: &[u8]) -> Option<Vec<String>> {
    let mut services = Vec::new();
    let length = usize::try_from(varint(&mut rest)?).ok()?;
    let mut message = take(&mut rest, length)?;
    let mut count = 0;
    while !message.is_empty() {
        let (field, entry) = delimited(&mut message)?;
        if field != 1 {
            continue;
        }
        count += 1;
        let [_alias, token, ..] = fields(entry)?;
        let [identifier, _password, kind, service] = fields(token.unwrap_or_default())?;
        if kind == Some(KIND.as_bytes()) {
            identifier_of_hdfs(identifier?)?;
            services.push(std::str::from_utf8(service?).ok()?.to_owned());
        }
    }
    (1..=TOKENS_MAX).contains(&count).then_some(services)
}

/// Fields 1 to 4 of a message, each at most once: whoever reads it may put two together.
fn fields(mut message: &[u8]) -> Option<[Option<&[u8]>; 4]> {
    let mut found = [None; 4];
    while !message.is_empty() {
        let (field, bytes) = delimited(&mut message)?;
        let place = usize::try_from(field.checked_sub(1)?).ok()?;
        if let Some(place) = found.get_mut(place)
            && place.replace(bytes).is_some()
        {
            return None;
        }
    }
    Some(found)
}

fn delimited<'b>(rest: &mut &'b [u8]) -> Option<(u64, &'b [u8])> {
    let tag = varint(rest)?;
    if tag & 7 != 2 {
        return None;
    }
    let length = usize::try_from(varint(rest)?).ok()?;
    Some((tag >> 3, take(rest, length)?))
}

fn varint(rest: &mut &[u8]) -> Option<u64> {
    let mut value = 0;
    for shift in (0..63).step_by(7) {
        let byte = take(rest, 1)?[0];
        value |= u64::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return Some(value);
        }
    }
    None
}

fn block<'b>(rest: &mut &'b [u8]) -> Option<&'b [u8]> {
    let length = usize::try_from(number(rest)?).ok()?;
    take(rest, length)
}

/// Java's WritableUtils.readVLong: one byte, or its count of bytes and they, big end first.
fn number(rest: &mut &[u8]) -> Option<i64> {
    let first = take(rest, 1)?[0] as i8;
    let (more, is_negative) = match first {
        -112.. => return Some(first.into()),
        -120..=-113 => (-112 - i32::from(first), false),
        _ => (-120 - i32::from(first), true),
    };
    let bytes = take(rest, more as usize)?;
    let value = bytes.iter().fold(0_i64, |value, byte| (value << 8) | i64::from(*byte));
    Some(if is_negative { !value } else { value })
}

fn take<'b>(rest: &mut &'b [u8], length: usize) -> Option<&'b [u8]> {
    let (taken, left) = rest.split_at_checked(length)?;
    *rest = left;
    Some(taken)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn text(of: &str) -> Vec<u8> {
        [&[u8::try_from(of.len()).unwrap()], of.as_bytes()].concat()
    }

    fn identifier() -> Vec<u8> {
        // 2026-11-27 in milliseconds, as Java writes it: six bytes.
        let date = [0x8a, 0x01, 0x9a, 0xc2, 0x00, 0x00, 0x00];
        [&[0][..], &text("alice"), &text("yarn"), &text(""), &date, &date, &[7], &[2]].concat()
    }

    fn in_writables() -> Vec<u8> {
        let identifier = identifier();
        let length = [u8::try_from(identifier.len()).unwrap()];
        let token = [&text("10.0.0.1:8020")[..], &length, &identifier, &text("secret")].concat();
        [b"HDTS\0\x01", &token[..], &text("HDFS_DELEGATION_TOKEN"), &text("10.0.0.1:8020")].concat()
    }

    fn in_protobuf() -> Vec<u8> {
        let field = |number: u8, bytes: &[u8]| {
            [&[number << 3 | 2, u8::try_from(bytes.len()).unwrap()], bytes].concat()
        };
        let token = [
            field(1, &identifier()),
            field(2, b"secret"),
            field(3, b"HDFS_DELEGATION_TOKEN"),
            field(4, b"10.0.0.1:8020"),
        ]
        .concat();
        let entry = [field(1, b"10.0.0.1:8020"), field(2, &token)].concat();
        let entry = [&[0x0a, u8::try_from(entry.len()).unwrap()], &entry[..]].concat();
        let length = entry.len();
        let length = [(length & 0x7f) as u8 | 0x80, (length >> 7) as u8];
        [b"HDTS\x01", &length[..], &entry].concat()
    }

    #[test]
    fn both_formats_of_hadoop_are_read_and_nothing_that_stops_short() {
        for file in [in_writables(), in_protobuf()] {
            assert_eq!(services(&file), Ok(vec!["10.0.0.1:8020".to_owned()]));
            for length in 0..file.len() {
                assert_eq!(services(&file[..length]), Err(BadTokenFile), "{length}");
            }
        }
        // A token within a token's entry twice, and a key's number that is none of Java's.
        let twice = in_protobuf();
        let inner = twice[7..].to_vec();
        let length = 2 * inner.len();
        let both =
            [b"HDTS\x01", &[(length & 0x7f) as u8 | 0x80, (length >> 7) as u8][..], &inner, &inner].concat();
        assert_eq!(services(&both).map(|all| all.len()), Ok(2), "two entries");
        let huge =
            [&[0][..], &text("alice"), &text(""), &text(""), &[1, 1], &[0x88, 0, 0, 0, 0, 0, 0, 0, 0], &[2]]
                .concat();
        assert_eq!(identifier_of_hdfs(&huge), Some(()), "eight bytes of nothing");
        let huge =
            [&[0][..], &text("alice"), &text(""), &text(""), &[1, 1], &[0x8b, 1, 0, 0, 0, 0], &[2]].concat();
        assert_eq!(identifier_of_hdfs(&huge), None, "more than an int");
        assert_eq!(services(b"HDTS\0\0"), Err(BadTokenFile), "no token");
        assert_eq!(services(b"HDTS\x02\0"), Err(BadTokenFile), "another format");
        assert_eq!(services(b"HDTS\0\x8f\x7f\xff\xff\xff"), Err(BadTokenFile), "a claimed number");
    }

    #[test]
    fn numbers_are_as_java_writes_them() {
        let of = |mut bytes: &[u8]| number(&mut bytes);
        assert_eq!(of(&[0]), Some(0));
        assert_eq!(of(&[0x90]), Some(-112));
        assert_eq!(of(&[0x8f, 0x80]), Some(128));
        assert_eq!(of(&[0x8e, 0x01, 0x00]), Some(256));
        assert_eq!(of(&[0x87, 0x7f]), Some(-128));
        assert_eq!(of(&[0x8f]), None);
    }

    proptest! {
        #[test]
        fn no_bytes_are_too_odd(start in 0..3_usize, bytes in proptest::collection::vec(any::<u8>(), 0..80)) {
            let _ = services(&[[&b""[..], b"HDTS\0", b"HDTS\x01"][start], &bytes[..]].concat());
        }
    }
}
