//! The mount that does nothing but pass reads on. Needs root and /dev/fuse.
#![allow(clippy::unwrap_used)] // Helpers of tests are tests too; clippy only knows #[test] functions.

use std::fs::File;
use std::os::unix::fs::FileExt;
use testkit::content;
use testkit::passthrough::{Mounted, NAME};

#[test]
fn every_read_of_every_open_is_that_of_the_file_itself() {
    let dir = std::env::temp_dir().join(format!("testkit-passthrough-{}", std::process::id()));
    let (file, at) = (dir.join("backing"), dir.join("at"));
    std::fs::create_dir_all(&dir).unwrap();
    std::fs::write(&file, content::bytes(1, 0..100_000)).unwrap();
    std::fs::create_dir(&at).unwrap();
    let mounted = Mounted::mount(&file, &at).unwrap();
    let open: Vec<File> = (0..8).map(|_| File::open(at.join(NAME)).unwrap()).collect();
    for shown in &open {
        let mut read = vec![0; 70_000];
        shown.read_exact_at(&mut read, 30_000).unwrap();
        assert_eq!(content::first_wrong_byte(1, 30_000, &read), None);
    }
    assert_eq!(std::fs::metadata(at.join(NAME)).unwrap().len(), 100_000);
    drop(open);
    mounted.unmount().unwrap();
    assert!(!at.join(NAME).exists());
    std::fs::remove_dir_all(&dir).unwrap();
}
