//! Files that import each other can only be understood together: no crate has such a circle, but for those that stand
//! here. A room's first file puts its parts together, and may name them; they may use what it defines for all of them.

use anyhow::{Context, Result};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use syn::visit::{self, Visit};
use syn::{Attribute, Item, ItemUse, UseTree, Visibility};

/// Circles that there are. One that goes is taken out here. `cache`: the cache data room is rebuilt with the slabs.
const KNOWN: &[(&str, &[&str])] = &[
    (
        "cache",
        &[
            "data::bypass",
            "data::engine",
            "data::evict",
            "data::fetch",
            "data::file",
            "data::index",
            "data::journal",
            "data::layout",
            "data::observe",
            "data::read",
            "data::recover",
            "data::root",
            "data::write",
        ],
    ),
    ("cache", &["meta::listing", "meta::store"]),
    ("e2e", &["cluster::checks::deletion", "cluster::checks::holders"]),
    ("e2e", &["cluster::store_pod", "cluster::suite"]),
    ("e2e", &["node", "pod"]),
    ("e2e", &["scenario::torture::disk", "scenario::torture::ended", "scenario::torture::killer"]),
    ("fuse-worker", &["client", "transport::device", "transport::interrupts"]),
    ("sim", &["kubelet", "world"]),
];

/// Of a crate, from its root: empty is the root itself.
type Module = Vec<String>;

/// A file's own view of the crate.
#[derive(Default)]
struct File {
    /// Paths that it names, as written.
    paths: Vec<Vec<String>>,
    /// What it passes on by `pub use`, by the name under which it does.
    passed_on: BTreeMap<String, Vec<String>>,
}

fn is_test(attributes: &[Attribute]) -> bool {
    let is_of_test = |a: &Attribute| {
        a.path().is_ident("cfg") && a.meta.require_list().is_ok_and(|l| l.tokens.to_string() == "test")
    };
    attributes.iter().any(is_of_test)
}

/// Every path below `tree`, with the name that it is known by.
fn spread(tree: &UseTree, mut before: Vec<String>, into: &mut Vec<(String, Vec<String>)>) {
    match tree {
        UseTree::Path(path) => {
            before.push(path.ident.to_string());
            spread(&path.tree, before, into);
        }
        UseTree::Group(group) => group.items.iter().for_each(|tree| spread(tree, before.clone(), into)),
        UseTree::Name(name) => {
            let name = name.ident.to_string();
            if name == "self" {
                into.push((before.last().cloned().unwrap_or_default(), before));
            } else {
                before.push(name.clone());
                into.push((name, before));
            }
        }
        UseTree::Rename(rename) => {
            before.push(rename.ident.to_string());
            into.push((rename.rename.to_string(), before));
        }
        _ => into.push(("*".into(), before)),
    }
}

impl<'a> Visit<'a> for File {
    fn visit_item(&mut self, item: &'a Item) {
        let attributes = match item {
            Item::Mod(it) => &it.attrs,
            Item::Fn(it) => &it.attrs,
            Item::Use(it) => &it.attrs,
            Item::Impl(it) => &it.attrs,
            _ => return visit::visit_item(self, item),
        };
        if !is_test(attributes) {
            visit::visit_item(self, item);
        }
    }

    fn visit_item_use(&mut self, item: &'a ItemUse) {
        let mut all = Vec::new();
        spread(&item.tree, Vec::new(), &mut all);
        match item.vis {
            Visibility::Inherited => self.paths.extend(all.into_iter().map(|(_, path)| path)),
            _ => self.passed_on.extend(all),
        }
    }

    fn visit_path(&mut self, path: &'a syn::Path) {
        self.paths.push(path.segments.iter().map(|segment| segment.ident.to_string()).collect());
        visit::visit_path(self, path);
    }
}

struct Crate(BTreeMap<Module, File>);

impl Crate {
    fn read(source: &Path) -> Result<Self> {
        let mut files = BTreeMap::new();
        let mut left: Vec<PathBuf> = vec![source.to_owned()];
        while let Some(directory) = left.pop() {
            for entry in fs::read_dir(&directory)? {
                let path = entry?.path();
                let name = path.file_stem().and_then(|name| name.to_str()).unwrap_or_default().to_owned();
                if matches!(name.as_str(), "tests" | "testing" | "main" | "bin") {
                    continue;
                }
                if path.is_dir() {
                    left.push(path);
                } else if path.extension().is_some_and(|e| e == "rs") {
                    let mut module: Module = directory
                        .strip_prefix(source)?
                        .iter()
                        .map(|part| part.to_string_lossy().into_owned())
                        .collect();
                    if !matches!(name.as_str(), "mod" | "lib") {
                        module.push(name);
                    }
                    let text = fs::read_to_string(&path)?;
                    let parsed =
                        syn::parse_file(&text).with_context(|| format!("cannot parse {}", path.display()))?;
                    let mut file = File::default();
                    file.visit_file(&parsed);
                    files.insert(module, file);
                }
            }
        }
        Ok(Self(files))
    }

    /// The file that `path` leads to, as written in `from`, if it is one of this crate.
    fn target(&self, from: &Module, path: &[String], depth: usize) -> Option<Module> {
        let mut at = from.clone();
        let mut rest = path;
        match path.first()?.as_str() {
            "crate" => (at, rest) = (Vec::new(), &path[1..]),
            "self" => rest = &path[1..],
            "super" => {
                while rest.first().is_some_and(|first| first == "super") {
                    at.pop();
                    rest = &rest[1..];
                }
            }
            // What this file passes on itself, or a module below it.
            first if self.0.get(from)?.passed_on.contains_key(first) => {}
            first => {
                at.push(first.to_owned());
                if !self.0.contains_key(&at) {
                    return None;
                }
                rest = &path[1..];
            }
        }
        while let [first, more @ ..] = rest {
            at.push(first.clone());
            if !self.0.contains_key(&at) {
                at.pop();
                break;
            }
            rest = more;
        }
        // Passed on from elsewhere: that file is meant.
        if let Some(name) = rest.first()
            && let Some(origin) = self.0.get(&at)?.passed_on.get(name)
            && depth < 8
        {
            return self.target(&at, origin, depth + 1).or(Some(at));
        }
        Some(at)
    }

    /// Sets of files that lead to each other.
    fn circles(&self) -> Vec<BTreeSet<String>> {
        let imports: BTreeMap<&Module, BTreeSet<Module>> = self
            .0
            .iter()
            .map(|(module, file)| {
                let targets = file.paths.iter().filter_map(|path| self.target(module, path, 0));
                (module, targets.filter(|target| !target.starts_with(module)).collect())
            })
            .collect();
        let reached = |from: &Module| {
            let (mut seen, mut left) = (BTreeSet::new(), vec![from.clone()]);
            while let Some(at) = left.pop() {
                for next in imports.get(&at).into_iter().flatten() {
                    if seen.insert(next.clone()) {
                        left.push(next.clone());
                    }
                }
            }
            seen
        };
        let all: BTreeMap<&Module, BTreeSet<Module>> =
            self.0.keys().map(|module| (module, reached(module))).collect();
        let name = |module: &Module| match module.is_empty() {
            true => "lib".to_owned(),
            false => module.join("::"),
        };
        let circles: BTreeSet<BTreeSet<String>> = all
            .iter()
            .filter(|(module, reached)| reached.contains(**module))
            .map(|(module, reached)| {
                let back = reached.iter().filter(|other| all[other].contains(*module));
                back.map(name).collect()
            })
            .collect();
        circles.into_iter().collect()
    }
}

#[test]
fn no_two_files_import_each_other() -> Result<()> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().context("the crate lies in the workspace")?;
    let mut found = BTreeSet::new();
    for (name, directory) in super::crates(root)? {
        for circle in Crate::read(&directory.join("src"))?.circles() {
            found.insert((name.clone(), circle));
        }
    }
    let known: BTreeSet<(String, BTreeSet<String>)> = KNOWN
        .iter()
        .map(|(name, files)| ((*name).to_owned(), files.iter().map(|f| (*f).to_owned()).collect()))
        .collect();
    let new: Vec<_> = found.difference(&known).collect();
    let gone: Vec<_> = known.difference(&found).collect();
    assert!(new.is_empty(), "files that import each other:\n{new:#?}");
    assert!(gone.is_empty(), "no longer there, take them out of KNOWN:\n{gone:#?}");
    Ok(())
}
