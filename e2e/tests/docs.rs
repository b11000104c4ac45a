//! Every promise in docs/semantics.md and docs/failures.md names a test, and the test exists.

use anyhow::{Context, Result, ensure};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the crate lies in the workspace").to_owned()
}

/// Rust files of a crate, with what is in them.
fn sources(dir: &Path) -> Result<Vec<(PathBuf, String)>> {
    let mut found = Vec::new();
    let mut open = vec![dir.join("src"), dir.join("tests")];
    while let Some(dir) = open.pop() {
        let Ok(entries) = std::fs::read_dir(&dir) else { continue };
        for entry in entries {
            let path = entry?.path();
            if path.is_dir() {
                open.push(path);
            } else if path.extension().is_some_and(|e| e == "rs") {
                found.push((path.clone(), std::fs::read_to_string(&path)?));
            }
        }
    }
    Ok(found)
}

/// `store::keys::some_test`; `crate::file::test` is how the documents explain it.
fn is_test_name(text: &str) -> bool {
    text != "crate::file::test"
        && text.matches("::").count() >= 2
        && text.chars().all(|c| c.is_ascii_alphanumeric() || c == '_' || c == ':')
}

fn quoted(text: &str) -> impl Iterator<Item = &str> {
    text.split('`').skip(1).step_by(2)
}

#[test]
fn every_promise_names_a_test_that_exists() -> Result<()> {
    let mut crates: BTreeMap<String, Vec<(PathBuf, String)>> = BTreeMap::new();
    let (mut promises, mut names) = (0, 0);
    for page in ["semantics.md", "failures.md"] {
        let text = std::fs::read_to_string(root().join("docs").join(page))?;
        ensure!(!text.contains("(to come)"), "{page} promises what no test holds");
        let mut numbers = BTreeSet::new();
        for (number, line) in text.lines().enumerate() {
            let at = format!("{page}:{}", number + 1);
            // A row of a table of promises begins with its number: a letter and digits.
            let first = line.strip_prefix("| ").and_then(|rest| rest.split(' ').next()).unwrap_or_default();
            let is_promise = first.len() >= 2
                && first.starts_with(|c: char| c.is_ascii_uppercase())
                && first[1..].chars().all(|c| c.is_ascii_digit());
            if is_promise {
                promises += 1;
                ensure!(numbers.insert(first), "{at}: there is another {first}");
                let cell = line.trim_end_matches('|').rsplit("| ").next().unwrap_or_default();
                ensure!(
                    cell.trim() == "same"
                        || quoted(cell).any(|name| is_test_name(name) || name.starts_with("make ")),
                    "{at}: {first} names no test"
                );
            }
            for name in quoted(line).filter(|name| is_test_name(name)) {
                names += 1;
                let parts: Vec<&str> = name.split("::").collect();
                let (test, modules) = parts.split_last().context("split gives one")?;
                let (room, modules) = modules.split_first().with_context(|| format!("{at}: {name}"))?;
                if !crates.contains_key(*room) {
                    crates.insert((*room).to_owned(), sources(&root().join(room.replace('_', "-")))?);
                }
                let holds = crates[*room].iter().any(|(path, text)| {
                    let path = path.with_extension("");
                    let components: Vec<_> = path.iter().filter_map(|c| c.to_str()).collect();
                    modules.iter().all(|module| *module == "tests" || components.contains(module))
                        && text.contains(&format!("fn {test}("))
                });
                ensure!(holds, "{at}: there is no test {name}");
            }
        }
    }
    println!("{promises} promises, {names} names of tests");
    ensure!(promises > 60, "only {promises} promises were found: has the form of the tables changed?");
    Ok(())
}

#[test]
fn every_setting_is_described_once() -> Result<()> {
    let page = "configuration.md";
    let text = std::fs::read_to_string(root().join("docs").join(page))?;
    let mut seen = BTreeSet::new();
    for (number, line) in text.lines().enumerate() {
        let Some(row) = line.strip_prefix("| `") else { continue };
        let names = row.split(" | ").next().unwrap_or_default();
        ensure!(seen.insert(names), "{page}:{}: `{names} stands twice", number + 1);
    }
    ensure!(seen.len() > 50, "only {} settings were found", seen.len());
    Ok(())
}
