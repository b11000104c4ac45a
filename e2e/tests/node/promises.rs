//! What docs/semantics.md promises of names, attributes, freshness and versions, seen by a program on a whole node.

use anyhow::{Context, Result, ensure};
use e2e::clock::wait_until;
use e2e::node::{AgentOptions, BUCKET, Mounted, Node};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, SystemTime};
use testkit::content;
use testkit::s3::Server;

const PATIENCE: Duration = Duration::from_secs(60);

/// A node with defaults, and a store of the test's own: keys are any strings, a change is complete when `put` returns.
pub(crate) fn node_and_store() -> Result<(Node, Server)> {
    let node = Node::start(AgentOptions::default())?;
    let store = node.runtime().block_on(Server::memory(BUCKET))?;
    Ok((node, store))
}

pub(crate) fn volume(
    node: &mut Node,
    store: &Server,
    name: &str,
    prefix: &str,
    more: &[(&str, &str)],
) -> Result<Mounted> {
    let endpoint = store.endpoint();
    node.volume(name, prefix, &[&[("endpoint", endpoint.as_str())], more].concat())
}

/// A volume of a directory below the node's allowed root.
fn directory_volume(node: &mut Node, name: &str, dir: &Path, more: &[(&str, &str)]) -> Result<Mounted> {
    let source = format!("file://{}", dir.display());
    let mut parameters = node.parameters("", &[&[("source", source.as_str())], more].concat());
    parameters.retain(|key, _| key != "endpoint" && key != "allowHttp");
    let volume = node.create_with(name, &parameters)?;
    let target = node.target(&volume, name)?;
    let mut request = node.publish_request(&volume, &target);
    request.secrets.clear();
    node.plugin().publish(request)?;
    Ok(Mounted { id: volume.id, target })
}

pub(crate) fn names(dir: &Path) -> io::Result<BTreeSet<OsString>> {
    fs::read_dir(dir)?.map(|entry| Ok(entry?.file_name())).collect()
}

fn attribute(path: &Path, name: &str) -> Result<String> {
    let mut value = [0; 4096];
    let length = rustix::fs::getxattr(path, format!("user.millpond.{name}"), &mut value)
        .with_context(|| format!("{name} of {}", path.display()))?;
    Ok(std::str::from_utf8(&value[..length])?.to_owned())
}

pub(crate) fn errno<T>(result: io::Result<T>) -> Option<i32> {
    result.err().and_then(|e| e.raw_os_error())
}

#[test]
fn odd_keys_are_shown_as_the_table_says() -> Result<()> {
    let (mut node, store) = node_and_store()?;
    let (longest, too_long) = ("n".repeat(255), "n".repeat(256));
    let named = [
        "plain",
        "white space",
        "100%",
        "%2F",
        "a+b",
        "#?&",
        "\"'",
        "new\nline",
        "\u{1}",
        "grüße",
        "😀",
        "...",
        longest.as_str(),
        "a/b",
        "x/z",
        "d/r",
        "e/f",
    ];
    for key in named {
        store.put(BUCKET, key, key.to_owned())?;
    }
    for key in ["a", "x//y", "x//w", "/lead", ".", "..", "d/./p", "d/../q", too_long.as_str(), "m/", "e/"] {
        store.put(BUCKET, key, if key == "m/" { "" } else { "hidden" })?;
    }
    for profile in ["large", "small"] {
        let mounted = volume(&mut node, &store, profile, "", &[("profile", profile)])?;
        let mut shown: BTreeMap<&str, BTreeSet<OsString>> = BTreeMap::from([("m", BTreeSet::new())]);
        shown.entry("").or_default().insert("m".into());
        for key in named {
            let (dir, name) = key.rsplit_once('/').unwrap_or(("", key));
            shown.entry(dir).or_default().insert(name.into());
            if !dir.is_empty() {
                shown.entry("").or_default().insert(dir.into());
            }
        }
        for (dir, expected) in shown {
            assert_eq!(names(&mounted.target.join(dir))?, expected, "of {dir:?}, profile {profile}");
        }
        for key in named {
            let read = fs::read(mounted.target.join(key)).with_context(|| format!("{key:?}"))?;
            assert_eq!(read, key.as_bytes(), "{key:?}");
        }
        // `a`, `/lead`, `.`, `..` and the long one.
        for (dir, hidden) in [("", "5"), ("x", "1"), ("d", "2"), ("e", "1"), ("m", "0"), ("a", "0")] {
            assert_eq!(attribute(&mounted.target.join(dir), "hidden_keys")?, hidden, "of {dir:?}");
        }
        assert_eq!(errno(fs::metadata(mounted.target.join(&too_long))), Some(libc::ENAMETOOLONG));
        assert_eq!(errno(fs::metadata(mounted.target.join("x/y"))), Some(libc::ENOENT));
        assert_eq!(errno(fs::metadata(mounted.target.join("plain/x"))), Some(libc::ENOTDIR));
    }
    node.finish()
}

#[test]
fn a_directory_source_shows_names_as_bytes_and_links_as_links() -> Result<()> {
    let mut node = Node::start(AgentOptions::default())?;
    let dir = node.places().buckets().join("plain-directory");
    fs::create_dir_all(dir.join("sub"))?;
    let odd = OsString::from_vec(b"not\xff\xfeutf8 \xc3".to_vec());
    for (path, body) in
        [(dir.join(&odd), "odd"), (dir.join("sub").join(&odd), "odd below"), (dir.join("f"), "f")]
    {
        fs::write(path, body)?;
    }
    let links = [("relative", "sub/../f"), ("dangling", "nowhere"), ("outside", "/etc/hostname")];
    for (name, to) in links {
        std::os::unix::fs::symlink(to, dir.join(name))?;
    }
    let to_odd = dir.join(OsStr::from_bytes(b"to\xff"));
    std::os::unix::fs::symlink(&odd, &to_odd)?;
    for profile in ["large", "small"] {
        let mounted = directory_volume(&mut node, profile, &dir, &[("profile", profile)])?;
        for below in ["", "sub"] {
            assert_eq!(names(&mounted.target.join(below))?, names(&dir.join(below))?, "profile {profile}");
        }
        assert_eq!(fs::read(mounted.target.join(&odd))?, b"odd");
        assert_eq!(fs::read(mounted.target.join("sub").join(&odd))?, b"odd below");
        for (name, to) in links {
            assert_eq!(fs::read_link(mounted.target.join(name))?, Path::new(to), "profile {profile}");
        }
        assert_eq!(
            fs::read_link(mounted.target.join(to_odd.file_name().context("a name")?))?,
            Path::new(&odd)
        );
        assert_eq!(fs::read(mounted.target.join("relative"))?, b"f");
        assert_eq!(attribute(&mounted.target, "hidden_keys")?, "0");
        node.plugin().unpublish(&mounted.id, &mounted.target)?;
    }
    node.finish()
}

#[test]
fn times_and_sizes_are_what_is_known_of_the_source() -> Result<()> {
    let (mut node, store) = node_and_store()?;
    let before = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH)?.as_secs() as i64;
    for key in ["set/d/one", "set/d/two", "set/three"] {
        store.put(BUCKET, key, vec![7; 10_000])?;
    }
    let mounted = volume(&mut node, &store, "v", "set", &[])?;
    let dir = fs::metadata(mounted.target.join("d"))?;
    assert_eq!((dir.mtime(), dir.mtime_nsec()), (0, 0), "a directory of an object store has no time");
    let root = fs::metadata(&mounted.target)?.mtime();
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH)?.as_secs() as i64;
    assert!((before..=now).contains(&root), "the root's time is {root}, first seen {before} to {now}");

    let space = || rustix::fs::statvfs(&mounted.target);
    let bytes = |known: &rustix::fs::StatVfs| known.f_blocks * known.f_frsize;
    names(&mounted.target)?;
    let little = space()?;
    names(&mounted.target.join("d"))?;
    let all = space()?;
    for known in [&little, &all] {
        assert_eq!((known.f_bfree, known.f_bavail, known.f_ffree), (0, 0, 0), "nothing is free");
    }
    assert!((10_000..30_000).contains(&bytes(&little)), "{} bytes", bytes(&little));
    assert!((30_000..45_000).contains(&bytes(&all)), "{} bytes", bytes(&all));
    assert!(all.f_files >= 4, "{} names", all.f_files);
    node.finish()
}

#[test]
fn owner_and_mode_are_the_volumes_and_the_kernel_enforces_them() -> Result<()> {
    let (mut node, store) = node_and_store()?;
    store.put(BUCKET, "set/d/f", "bytes")?;
    let modes = [("fileMode", "0400"), ("dirMode", "0500"), ("gid", "77")];
    // Pods run as 10001.
    for (uid, readable) in [("10001", true), ("10002", false)] {
        let mounted = volume(&mut node, &store, uid, "set", &[&[("uid", uid)], &modes[..]].concat())?;
        for (path, mode) in [("d/f", 0o100_400), ("d", 0o040_500), ("", 0o040_500)] {
            let seen = fs::metadata(mounted.target.join(path))?;
            assert_eq!(
                (seen.uid().to_string().as_str(), seen.gid(), seen.mode()),
                (uid, 77, mode),
                "{path:?}"
            );
        }
        let pod = node.pod(&mounted)?;
        let read = pod.command("cat")?.arg(pod.data().join("d/f")).output()?;
        let said = String::from_utf8_lossy(&read.stderr).into_owned();
        assert_eq!((read.status.success(), &read.stdout[..] == b"bytes"), (readable, readable), "{said}");
        assert!(readable || said.contains("Permission denied"), "{said}");
    }
    node.finish()
}

#[test]
fn owner_and_mode_are_the_sources_if_the_volume_wants_them() -> Result<()> {
    use std::os::unix::fs::{PermissionsExt, chown};
    let (mut node, store) = node_and_store()?;
    let dir = node.places().buckets().join("owned");
    fs::create_dir(&dir)?;
    let put = |name: &str, uid: u32, mode: u32| -> Result<()> {
        let path = dir.join(name);
        fs::write(&path, "bytes")?;
        chown(&path, Some(uid), Some(50))?;
        Ok(fs::set_permissions(&path, fs::Permissions::from_mode(mode))?)
    };
    // Pods run as 10001, which the source's owner is not. What may be executed there with other rights may not here.
    put("readable", 1234, 0o104_755)?;
    put("closed", 1234, 0o644)?;
    let wanted = [("attributes", "source"), ("metadataTtl", "1s"), ("uid", "7"), ("fileMode", "0400")];
    let mounted = directory_volume(&mut node, "owned", &dir, &wanted)?;
    let seen = |name: &str| -> Result<_> {
        let seen = fs::metadata(mounted.target.join(name))?;
        Ok((seen.uid(), seen.gid(), seen.mode()))
    };
    ensure!(seen("readable")? == (1234, 50, 0o100_755), "{:?}", seen("readable"));
    let pod = node.pod(&mounted)?;
    let read = || -> Result<bool> {
        Ok(pod.command("cat")?.arg(pod.data().join("closed")).output()?.status.success())
    };
    ensure!(read()?, "all may read it");
    fs::set_permissions(dir.join("closed"), fs::Permissions::from_mode(0o600))?;
    ensure!(
        wait_until(PATIENCE, || seen("closed").is_ok_and(|(.., mode)| mode == 0o100_600)),
        "{:?}",
        seen("closed")
    );
    ensure!(!read()?, "the kernel lets in whom the source does not");
    drop(pod);
    node.unpublish(&mounted)?;
    // Other sources tell none, and say so.
    let parameters = node.parameters("set", &[("endpoint", &store.endpoint()), ("attributes", "source")]);
    let refused = node.create_with("s3", &parameters).unwrap_err();
    ensure!(refused.message().contains("tell no owner and mode"), "{refused:?}");
    node.finish()
}

#[test]
fn writing_of_any_kind_is_erofs() -> Result<()> {
    let (mut node, store) = node_and_store()?;
    store.put(BUCKET, "set/f", "bytes")?;
    let mounted = volume(&mut node, &store, "v", "set", &[("fileMode", "0666"), ("dirMode", "0777")])?;
    let (f, new) = (mounted.target.join("f"), mounted.target.join("new"));
    let calls = [
        ("open for writing", errno(File::options().write(true).open(&f))),
        ("open for appending", errno(File::options().append(true).open(&f))),
        (
            "truncate",
            errno(
                rustix::fs::open(&f, rustix::fs::OFlags::WRONLY | rustix::fs::OFlags::TRUNC, 0o644.into())
                    .map_err(Into::into),
            ),
        ),
        ("create", errno(File::create(&new))),
        ("mkdir", errno(fs::create_dir(&new))),
        ("symlink", errno(std::os::unix::fs::symlink("f", &new))),
        ("link", errno(fs::hard_link(&f, &new))),
        ("rename", errno(fs::rename(&f, &new))),
        ("unlink", errno(fs::remove_file(&f))),
        ("chmod", errno(fs::set_permissions(&f, std::os::unix::fs::PermissionsExt::from_mode(0o600)))),
        (
            "setxattr",
            errno(
                rustix::fs::setxattr(&f, "user.x", b"1", rustix::fs::XattrFlags::empty()).map_err(Into::into),
            ),
        ),
    ];
    for (call, got) in calls {
        assert_eq!(got, Some(libc::EROFS), "{call}");
    }
    assert_eq!(fs::read(&f)?, b"bytes");
    node.finish()
}

#[test]
fn getfattr_tells_where_a_file_comes_from() -> Result<()> {
    let (mut node, store) = node_and_store()?;
    let body = content::bytes(1, 0..3_000_000);
    let etag = store.put(BUCKET, "set/d/f", body.clone())?.etag;
    store.put(BUCKET, "set/d/small", "seven b")?;
    for profile in ["large", "small"] {
        let more = [("profile", profile), ("freshness", if profile == "large" { "strict" } else { "ttl" })];
        let mounted = volume(&mut node, &store, profile, "set", &more)?;
        let (f, d) = (mounted.target.join("d/f"), mounted.target.join("d"));
        node.agent().evict_all()?;
        let small = mounted.target.join("d/small");
        store.reset_stats();
        for path in [&f, &small, &f, &small] {
            assert_eq!(attribute(path, "cached_bytes")?, "0", "profile {profile}: looking fetched something");
        }
        assert_eq!(store.stats().of("GetObject"), 0, "{:?}", store.stats());
        assert_eq!(fs::read(&small)?, b"seven b");
        assert_eq!(attribute(&small, "cached_bytes")?, "7", "profile {profile}");
        assert_eq!(fs::read(&f)?, body);
        assert_eq!(attribute(&f, "cached_bytes")?, "3000000", "profile {profile}");
        assert_eq!((attribute(&f, "etag")?, attribute(&f, "version")?), (etag.clone(), "1".to_owned()));
        let source = format!("s3://{BUCKET}/set/d");
        assert_eq!((attribute(&f, "source")?, attribute(&d, "source")?), (format!("{source}/f"), source));
    }
    let mounted = volume(&mut node, &store, "again", "set", &[("freshness", "strict")])?;
    let etag = store.put(BUCKET, "set/d/f", "other")?.etag;
    let f = mounted.target.join("d/f");
    assert_eq!(fs::read(&f)?, b"other");
    assert_eq!((attribute(&f, "etag")?, attribute(&f, "version")?), (etag, "2".to_owned()));
    node.finish()
}

#[test]
fn shared_and_private_mappings_show_the_bytes() -> Result<()> {
    let (mut node, store) = node_and_store()?;
    let size = 3 * 1024 * 1024 + 17;
    let body = content::bytes(2, 0..size as u64);
    store.put(BUCKET, "set/f", body.clone())?;
    for profile in ["large", "small"] {
        let mounted = volume(&mut node, &store, profile, "set", &[("profile", profile)])?;
        // Cold, then whole in the cache and opened anew.
        for round in ["cold", "warm"] {
            if round == "cold" {
                node.agent().evict_all()?;
            }
            let file = File::open(mounted.target.join("f"))?;
            let map = |protection, flags| {
                // SAFETY: a new mapping at an address that the kernel chooses touches no existing memory.
                unsafe { mmap(std::ptr::null_mut(), size, protection, flags, &file, 0) }
            };
            let shared = map(ProtFlags::READ, MapFlags::SHARED)?;
            let private = map(ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE)?;
            // SAFETY: both were mapped above with this length and are unmapped below; nothing else writes them.
            let (seen, own) = unsafe {
                let seen = std::slice::from_raw_parts(shared.cast::<u8>(), size);
                (seen, std::slice::from_raw_parts_mut(private.cast::<u8>(), size))
            };
            assert!(seen == body && *own == body, "profile {profile}, {round}");
            own[4096..8192].fill(0xee);
            assert!(
                seen == body && own[..4096] == body[..4096] && own[4096] == 0xee,
                "a private page is one's own"
            );
            assert_eq!(
                errno(map(ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED).map_err(Into::into)),
                Some(libc::EACCES)
            );
            for address in [shared, private] {
                // SAFETY: mapped above; the slices are not used any more.
                unsafe { munmap(address, size)? };
            }
        }
    }
    node.finish()
}
