//! What a crate shows is used: each of its public functions, constants and modules is named by another crate, by one of
//! its own programs or by a test outside it. Types and fields are left out, for a signature shows them without a name. A
//! name that two crates have counts for both.

use anyhow::{Context, Result};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use syn::visit::{self, Visit};
use syn::{Attribute, ImplItemFn, Item, ItemImpl, ItemMod, Visibility};

/// Crates without a surface of their own: generated code, and the harnesses of tests.
const LEFT_OUT: &[&str] = &["e2e", "hostile", "proto", "testkit"];

fn is_test(attributes: &[Attribute]) -> bool {
    let is_of_test = |a: &Attribute| {
        a.path().is_ident("cfg") && a.meta.require_list().is_ok_and(|l| l.tokens.to_string().contains("test"))
    };
    attributes.iter().any(is_of_test)
}

/// Names of public items.
#[derive(Default)]
struct Shown(BTreeSet<String>);

impl Shown {
    fn note(&mut self, visibility: &Visibility, name: &syn::Ident) {
        if matches!(visibility, Visibility::Public(_)) {
            self.0.insert(name.to_string());
        }
    }
}

impl<'a> Visit<'a> for Shown {
    fn visit_item(&mut self, item: &'a Item) {
        match item {
            Item::Fn(it) if !is_test(&it.attrs) => self.note(&it.vis, &it.sig.ident),
            Item::Const(it) => self.note(&it.vis, &it.ident),
            Item::Static(it) => self.note(&it.vis, &it.ident),
            // What stands in a function is the function's.
            Item::Impl(_) | Item::Mod(_) => visit::visit_item(self, item),
            _ => {}
        }
    }

    fn visit_item_mod(&mut self, module: &'a ItemMod) {
        if !is_test(&module.attrs) {
            self.note(&module.vis, &module.ident);
            visit::visit_item_mod(self, module);
        }
    }

    fn visit_item_impl(&mut self, it: &'a ItemImpl) {
        if !is_test(&it.attrs) {
            visit::visit_item_impl(self, it);
        }
    }

    fn visit_impl_item_fn(&mut self, function: &'a ImplItemFn) {
        if !is_test(&function.attrs) {
            self.note(&function.vis, &function.sig.ident);
        }
    }
}

fn rust_files(directory: &Path) -> Result<Vec<PathBuf>> {
    let (mut found, mut left) = (Vec::new(), vec![directory.to_owned()]);
    while let Some(directory) = left.pop() {
        for entry in fs::read_dir(&directory)? {
            let path = entry?.path();
            match path.is_dir() {
                true => left.push(path),
                false if path.extension().is_some_and(|e| e == "rs") => found.push(path),
                false => {}
            }
        }
    }
    Ok(found)
}

/// Of a crate: what its library consists of, and everything else.
fn split(directory: &Path) -> Result<(Vec<PathBuf>, Vec<PathBuf>)> {
    let source = directory.join("src");
    let is_inside = |path: &PathBuf| {
        let below = path.strip_prefix(&source).ok();
        below.is_some_and(|below| below != Path::new("main.rs") && !below.starts_with("bin"))
    };
    let mut all = rust_files(&source)?;
    for other in ["tests", "benches", "examples"].map(|name| directory.join(name)) {
        if other.is_dir() {
            all.extend(rust_files(&other)?);
        }
    }
    Ok(all.into_iter().partition(is_inside))
}

/// Every word of the code; comments do not count.
fn words(files: &[PathBuf]) -> Result<BTreeSet<String>> {
    let mut words = BTreeSet::new();
    for file in files {
        for line in fs::read_to_string(file)?.lines() {
            let code = line.split_once("//").map_or(line, |(code, _)| code);
            words.extend(code.split(|c: char| !c.is_alphanumeric() && c != '_').map(str::to_owned));
        }
    }
    Ok(words)
}

#[test]
fn what_a_crate_shows_is_used_by_another() -> Result<()> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().context("the crate lies in the workspace")?;
    let mut crates = BTreeMap::new();
    for (name, directory) in super::crates(root)? {
        crates.insert(name, split(&directory)?);
    }
    let mut unused = Vec::new();
    for (name, (inside, programs)) in &crates {
        if LEFT_OUT.contains(&name.as_str()) || !root.join(name).join("src/lib.rs").is_file() {
            continue;
        }
        let mut used = words(programs)?;
        for (_, (library, rest)) in crates.iter().filter(|(other, _)| *other != name) {
            used.extend(words(library)?);
            used.extend(words(rest)?);
        }
        for file in
            inside.iter().filter(|file| !file.iter().any(|part| part == "tests" || part == "tests.rs"))
        {
            let mut shown = Shown::default();
            let parsed = syn::parse_file(&fs::read_to_string(file)?)?;
            shown.visit_file(&parsed);
            let place = file.strip_prefix(root)?.display().to_string();
            unused.extend(shown.0.difference(&used).map(|item| format!("{place}: {item}")));
        }
    }
    assert!(unused.is_empty(), "public, and used by no other crate: pub(crate)?\n{}", unused.join("\n"));
    Ok(())
}
