//! What an HDFS helper and its agent say to each other, either of which may be in somebody else's hands, and what users
//! write for HDFS: krb5.conf, core-site.xml and hdfs-site.xml, files of delegation tokens. The first byte says which.

#![no_main]

use fuzz::Bound;
use hdfs::{
    Frame, Frames, FromHelper, ToHelper, cleaned_krb5_conf, encode_before, services_of_tokens, settings,
    site_of,
};
use libfuzzer_sys::fuzz_target;
use serde::Serialize;
use serde::de::DeserializeOwned;

/// A name of a page is seven bytes of its frame, and a hundred of memory; two readers have room for some frames.
const BOUND: Bound = Bound { times: 64, besides: 1 << 20 };

fuzz_target!(|input: &[u8]| BOUND.hold(input, || {
    let Some((which, rest)) = input.split_first() else { return };
    match which % 5 {
        0 => frames::<FromHelper>(rest),
        1 => frames::<ToHelper>(rest),
        2 => krb5_conf(&String::from_utf8_lossy(rest)),
        3 => site(&String::from_utf8_lossy(rest)),
        _ => drop(services_of_tokens(rest)),
    }
}));

fn encoded<M: Serialize>(frame: &Frame<M>) -> Vec<u8> {
    let before = encode_before(&frame.message, &frame.body).expect("it was no longer than this");
    [&before[..], &frame.body].concat()
}

/// What is understood reads the same when it is sent again.
fn frames<M: Serialize + DeserializeOwned>(bytes: &[u8]) {
    let mut frames = Frames::<M>::default();
    frames.space().extend_from_slice(bytes);
    while let Ok(Some(frame)) = frames.take() {
        let sent = encoded(&frame);
        let mut again = Frames::<M>::default();
        again.space().extend_from_slice(&sent);
        let again = again.take().expect("it was just written").expect("it is whole");
        let sent_again = encoded(&again);
        assert!(sent == sent_again);
    }
}

/// What is let through names no file and no code, in whatever spelling.
fn krb5_conf(text: &str) {
    let Ok(kept) = cleaned_krb5_conf(text) else { return };
    assert_eq!(cleaned_krb5_conf(&kept).as_ref(), Ok(&kept));
    for line in kept.lines() {
        let line = line.trim_start();
        assert!(!line.starts_with("include") && !line.starts_with("module"), "{line:?}");
    }
}

fn site(text: &str) {
    let (core, hdfs) = text.split_once('\u{1}').unwrap_or((text, ""));
    let Ok(found) = settings(Some(core), Some(hdfs).filter(|text| !text.is_empty())) else { return };
    assert!(found.values().all(|value| value.len() <= 4096));
    // As it is passed on.
    assert_eq!(settings(None, Some(&site_of(&found))), Ok(found));
}
