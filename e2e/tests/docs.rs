//! What the documents name exists: the tests of promises in semantics.md and failures.md, the functions of the walks in
//! architecture.md.

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

/// Titles of the walks, and their hops: file and function.
fn walks(text: &str) -> Vec<(String, Vec<(String, String)>)> {
    let chapter = text.split("\n## Three walks\n").nth(1).unwrap_or_default();
    let chapter = chapter.split("\n## ").next().unwrap_or_default();
    let hop = |line: &str| {
        let (number, rest) = line.split_once(". `")?;
        number.parse::<u32>().ok()?;
        let (file, function) = rest.split_once('`')?.0.split_once(": ")?;
        Some((file.to_owned(), function.to_owned()))
    };
    let walk = |part: &str| {
        let title = part.lines().next().unwrap_or_default().to_owned();
        (title, part.lines().filter_map(hop).collect())
    };
    chapter.split("\n### ").skip(1).map(walk).collect()
}

#[test]
fn each_hop_of_a_walk_is_a_function_that_exists() -> Result<()> {
    let walks = walks(&std::fs::read_to_string(root().join("docs/architecture.md"))?);
    ensure!(walks.len() == 3, "docs/architecture.md has {} walks", walks.len());
    for (title, hops) in walks {
        ensure!((3..=10).contains(&hops.len()), "{title:?} has {} hops", hops.len());
        for (file, function) in hops {
            let text =
                std::fs::read_to_string(root().join(&file)).with_context(|| format!("{title:?}: {file}"))?;
            let defines = ["(", "<"].iter().any(|next| text.contains(&format!("fn {function}{next}")));
            ensure!(
                defines,
                "{title:?}: {file} has no function {function}: adjust the walk to where the code goes now"
            );
        }
    }
    Ok(())
}

#[test]
fn every_file_that_the_docs_name_exists() -> Result<()> {
    let mut named = 0;
    for entry in std::fs::read_dir(root().join("docs"))? {
        let page = entry?.path();
        let text = std::fs::read_to_string(&page)?;
        for path in text.split('`').skip(1).step_by(2).filter(|it| it.ends_with(".rs") && it.contains('/')) {
            ensure!(root().join(path).is_file(), "{}: there is no {path}", page.display());
            named += 1;
        }
    }
    ensure!(named > 30, "only {named} files are named: are they still written so?");
    Ok(())
}

#[test]
fn a_commit_says_what_was_wrong_what_is_done_and_how_it_is_known() -> Result<()> {
    let directory = tempfile::tempdir()?;
    let check = |message: &str| -> Result<String> {
        let file = directory.path().join("message");
        std::fs::write(&file, message)?;
        let output =
            std::process::Command::new(root().join("scripts/hooks/commit-msg")).arg(&file).output()?;
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        ensure!(output.status.success() == said.is_empty(), "{message:?}: {output:?}");
        Ok(said)
    };
    let body = "\n\nProblem: a\nChange: b\nValidation: c\n# a comment of git's\n";
    for good in [format!("Subject{body}"), "Merge branch 'x'\n".into(), "fixup! Subject\n".into()] {
        ensure!(check(&good)?.is_empty(), "{good:?}");
    }
    let long = "x".repeat(73);
    for (bad, why) in [
        (format!("{long}{body}"), "73 characters"),
        (format!("Subject.{body}"), "full stop"),
        (format!("Subject\nmore{body}"), "second line"),
        (format!("Subject{}", body.replace("Validation", "Tested")), "'Validation:'"),
        ("Subject\n".into(), "'Problem:'"),
        ("# nothing\n".into(), "empty"),
    ] {
        ensure!(check(&bad)?.contains(why), "{bad:?} is not refused for {why:?}");
    }
    Ok(())
}
