//! Directories that are renamed, and files of the store's, while something else goes on.

use super::super::testing::{Does, Node, SOON, until};
use super::*;
use cache::meta::ROOT;
use link::writable::Operation;
use std::fs;
use std::time::Duration;

const BYTES: &[u8] = b"bytes that the store alone has";

fn rename(name: &str, to_name: &str) -> Operation {
    Operation::Rename { parent: ROOT, name: name.into(), to: ROOT, to_name: to_name.into(), keep: false }
}

/// A copy is noted as one that goes should the rename come to nothing.
#[tokio::test(flavor = "multi_thread")]
async fn no_look_for_late_writes_takes_the_copies_of_a_rename_that_goes_on() {
    let mut node = Node::new();
    node.does.send_replace(Does::HangsAfterCopy);
    fs::create_dir_all(node.store("from/sub/deep")).unwrap();
    for name in ["from/x", "from/sub/x", "from/sub/deep/x"] {
        fs::write(node.store(name), BYTES).unwrap();
    }
    let area = node.area().await;
    let look = async {
        until(|| ["to/x", "to/sub/x", "to/sub/deep/x"].iter().all(|copy| node.store(copy).exists())).await;
        let of = area.clone();
        let mut looking = tokio::spawn(async move { of.remove_late().await });
        // It comes to its end now, or waits for that of the rename.
        let _ = tokio::time::timeout(Duration::from_millis(200), &mut looking).await;
        node.does.send_replace(Does::Takes);
        if !looking.is_finished() {
            looking.await.unwrap();
        }
    };
    let (renamed, ()) = tokio::join!(node.does(&area, rename("from", "to")), look);
    assert_eq!(renamed, Done::Done);
    assert!(area.send_all(SOON).await);
    area.end_all_moves().await;
    area.remove_late().await;
    for name in ["to/x", "to/sub/x", "to/sub/deep/x"] {
        assert_eq!(fs::read(node.store(name)).unwrap(), BYTES, "{name}");
    }
    assert!(!node.store("from").exists());
    assert!(area.state().late.is_empty());
}

/// As an administrator who makes a bucket anew, or a gateway that starts.
#[tokio::test(flavor = "multi_thread")]
async fn a_store_that_is_missing_for_a_while_has_removed_nothing() {
    let mut node = Node::new();
    node.does.send_replace(Does::Takes);
    fs::write(node.store("a"), BYTES).unwrap();
    let area = node.area().await;
    let ino = node.finds(&area, "a").await.unwrap().ino;
    node.does.send_replace(Does::Lost);
    node.does(&area, rename("a", "b")).await;
    let file = area.by_ino(ino).unwrap();
    assert!(area.send(&file).await.is_err());
    assert_eq!((area.waiting().files, area.waiting().conflicts), (1, 0));
    node.does.send_replace(Does::Takes);
    assert!(area.send_all(SOON).await);
    assert_eq!(fs::read(node.store("b")).unwrap(), BYTES);
    assert!(!node.store("a").exists());
}

/// Nobody is shown it, and it goes in time.
#[tokio::test(flavor = "multi_thread")]
async fn a_directory_in_which_another_node_makes_something_is_not_removed() {
    const MADE: &str = ".millpond-000102030405060708090a0b0c0d0e0f";
    let mut node = Node::new();
    node.does.send_replace(Does::Takes);
    for name in ["moved", "removed"] {
        fs::create_dir(node.store(name)).unwrap();
    }
    let area = node.area().await;
    node.does(&area, rename("moved", "to")).await;
    for name in ["moved", "removed"] {
        fs::write(node.store(&format!("{name}/{MADE}")), "half").unwrap();
    }
    let remove = |name: &str| Operation::RemoveDirectory { parent: ROOT, name: name.into() };
    assert_eq!(node.asks(&area, remove("removed")).await, Err(Wrong::NotEmpty));
    area.end_all_moves().await;
    // One of its own from now on: what is made there would be lost with it.
    assert!(node.finds(&area, "moved").await.is_some());
    for name in ["moved", "removed"] {
        fs::remove_file(node.store(&format!("{name}/{MADE}"))).unwrap();
        node.does(&area, remove(name)).await;
        assert!(!node.store(name).exists());
    }
    assert!(node.store("to").exists());
}
