//! Bugs that are put in on purpose, one by one: the models find each of them.

use super::atomic::{Bug, Wrong, take_possible};
use super::check::{Model, explore};
use super::models::MODELS;
use std::collections::BTreeMap;
use std::path::Path;

/// A file of the product and what stands there once, from the method's name on; what is wrong there; which model finds it.
///
/// The product has no fence. What takes its place are the two halves of each pair, of which either is left out here, and
/// the operations that are one and become two.
const BUGS: [(&str, &str, Wrong, &str); 12] = [
    // A release left out: what is published may be seen before what it stands for.
    ("table.rs", "store(word(header.unique, state), Release)", Wrong::Relaxed, "next in a slot"),
    ("operations.rs", "store(unique << 1, Release)", Wrong::Relaxed, "operation's record"),
    ("backing.rs", "store(nodeid, Release);\n        Some(index)", Wrong::Relaxed, "backing ids"),
    ("presence.rs", "fetch_or(bits.to_le(), Release)", Wrong::Relaxed, "presence bitmap"),
    // An acquire left out: the same, at the other end.
    ("presence.rs", "load(Acquire)", Wrong::Relaxed, "presence bitmap"),
    // Whoever looks twice whether it is the same request finds another's bytes in between.
    ("copy.rs", "store(u64::from_ne_bytes(word), ordering)", Wrong::Relaxed, "head and reuse"),
    ("copy.rs", "load(ordering)", Wrong::Relaxed, "head and reuse"),
    // Found by these models in the product (CHANGELOG).
    ("table.rs", "store(header.pid, Release)", Wrong::Relaxed, "mark and reuse"),
    // A compare-and-exchange, or an or, that is a load and then a store.
    (
        "table.rs",
        "compare_exchange(current, word(unique, ANSWERING), AcqRel, Relaxed)",
        Wrong::Split,
        "answer or EINTR",
    ),
    ("table.rs", "compare_exchange(waiting, operating, AcqRel, Relaxed)", Wrong::Split, "operation or EINTR"),
    ("presence.rs", "fetch_or(bits.to_le(), Release)", Wrong::Split, "presence bitmap"),
    ("execution.rs", "compare_exchange(0, unique, AcqRel, Relaxed)", Wrong::Split, "seats"),
];

fn model(name: &str) -> &'static Model {
    MODELS.iter().find(|model| model.name == name).expect("a model has this name")
}

/// Line and column, from 1, of what stands in a file once.
fn place(file: &str, text: &str) -> (u32, u32) {
    let source =
        std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("src").join(file)).unwrap();
    let mut found = source.match_indices(text).map(|(at, _)| at);
    let (Some(at), None) = (found.next(), found.next()) else { panic!("{file}: not once: {text}") };
    let line = source[..at].matches('\n').count() as u32 + 1;
    let column = source[..at].lines().last().map_or(0, str::len) as u32 + 1;
    (line, column)
}

#[test]
fn bugs_on_purpose_are_found() {
    println!();
    let mut missed = Vec::new();
    for (file, text, wrong, name) in BUGS {
        let (line, column) = place(file, text);
        take_possible();
        explore(model(name), None).unwrap();
        let is_it = |bug: &Bug| {
            bug.file.ends_with(file) && (bug.line, bug.column, bug.wrong) == (line, column, wrong)
        };
        let bug = take_possible().into_iter().find(is_it).expect("the model comes by");
        let verdict = match explore(model(name), Some(bug)) {
            Err(failure) => format!("found, {failure}"),
            Ok(executions) => {
                missed.push(bug);
                format!("MISSED in {executions} executions")
            }
        };
        let line = text.lines().next().unwrap_or(text);
        println!("bug {wrong:?} {file}: {line}\n      model {name}: {verdict}");
    }
    assert!(missed.is_empty(), "not found: {missed:#?}");
}

/// What the models are worth: each ordering and each read-modify-write that they come by is made wrong, and named where
/// no model fails.
#[test]
#[ignore = "half an hour, and no verdict: scripts/model --sweep"]
fn what_no_model_finds() {
    println!();
    let mut finders: BTreeMap<Bug, Vec<&Model>> = BTreeMap::new();
    for model in MODELS {
        take_possible();
        explore(model, None).unwrap();
        take_possible().into_iter().for_each(|bug| finders.entry(bug).or_default().push(model));
    }
    let mut found = 0;
    for (bug, models) in &finders {
        match models.iter().find_map(|model| explore(model, Some(*bug)).err().map(|_| model.name)) {
            Some(_) => found += 1,
            None => println!("bug {bug:?}: none of {} models that come by fails", models.len()),
        }
    }
    println!("bug {found} of {} found", finders.len());
}
