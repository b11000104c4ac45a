//! The harness itself: a pod sees its volume and nothing else of the node.

use anyhow::Result;
use e2e::mountinfo;
use e2e::node::{Mounted, OneAtATime, programs};
use e2e::pod::Pod;
use e2e::tree::{Shape, Tree};
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};

#[test]
fn a_pod_sees_its_own_volume_only_and_pins_it() -> Result<()> {
    let _lock = OneAtATime::wait()?;
    let dir = tempfile::tempdir()?;
    std::fs::set_permissions(dir.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755))?;
    let (own, other) = (dir.path().join("own"), dir.path().join("other"));
    for target in [&own, &other] {
        std::fs::create_dir(target)?;
        mount("tmpfs", target, "tmpfs", MountFlags::empty(), Some(c"mode=0755"))?;
    }
    let tree = Tree::generated("", Shape { large_bytes: 2 << 20, ..Shape::LITTLE });
    tree.write(&own)?;
    std::fs::write(other.join("secret"), "x")?;
    let mounted = Mounted { id: "v".into(), target: own.clone() };
    let pod = Pod::start(&mounted, dir.path().join("pod"), programs()?, dir.path())?;

    let seen = pod.command("cat")?.arg("/proc/self/mountinfo").output()?;
    let seen = String::from_utf8(seen.stdout)?;
    assert!(!seen.contains(other.to_str().unwrap()) && seen.contains(pod.data().to_str().unwrap()), "{seen}");
    let id = pod.command("id")?.arg("-u").output()?;
    assert_eq!(String::from_utf8(id.stdout)?.trim(), "10001");
    pod.verify(&tree, 2)?.ensure_all(&tree)?;

    // Unmounted on the node, the pod still has it.
    for target in [&own, &other] {
        unmount(target, UnmountFlags::empty())?;
    }
    let application = pod.oracle(&tree, &["--alarm"])?;
    std::thread::sleep(std::time::Duration::from_millis(300));
    application.finish(std::time::Duration::from_secs(30))?.ensure_clean()?;
    pod.end()?;
    assert_eq!(mountinfo::below(dir.path())?, []);
    Ok(())
}
