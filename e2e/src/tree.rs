//! What a volume is supposed to show: the files of a tree and what each must contain.

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use testkit::content;

/// Handed to the oracle as JSON.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Tree {
    /// Sorted by path.
    pub files: Vec<TreeFile>,
    pub truth: Truth,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TreeFile {
    /// Relative, without leading slash.
    pub path: String,
    pub size: u64,
}

/// Where the right bytes come from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Truth {
    /// [`testkit::content`] of `prefix` + path.
    Generated { prefix: String },
    /// The same file below this directory (real data that was copied or linked into a bucket).
    Copy { root: PathBuf },
}

/// A generated tree: `directories` × `files` small ones, `large` large ones beside them.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    pub directories: usize,
    pub files: usize,
    pub small_bytes: u64,
    pub large: usize,
    pub large_bytes: u64,
}

impl Shape {
    /// A few megabytes: enough for every kind of call, cheap enough for every test.
    pub const LITTLE: Self =
        Self { directories: 4, files: 10, small_bytes: 100_000, large: 2, large_bytes: 6 << 20 };
}

impl Tree {
    /// Names and sizes only; [`Tree::write`] makes the files.
    pub fn generated(prefix: &str, shape: Shape) -> Self {
        let mut files = Vec::new();
        for d in 0..shape.directories {
            for f in 0..shape.files {
                // Sizes around the nominal one, so that ends of files fall on all sorts of offsets.
                let size = shape.small_bytes - shape.small_bytes * (f as u64 % 7) / 20;
                files.push(TreeFile { path: format!("d{d:03}/f{f:05}"), size });
            }
        }
        for l in 0..shape.large {
            files.push(TreeFile { path: format!("large{l}"), size: shape.large_bytes + l as u64 * 4097 });
        }
        files.sort_by(|a, b| a.path.cmp(&b.path));
        Self { files, truth: Truth::Generated { prefix: prefix.to_owned() } }
    }

    /// A real directory as the truth; symlinks and special files are left out.
    pub fn scan(root: &Path) -> Result<Self> {
        let mut files = Vec::new();
        let mut open = vec![PathBuf::new()];
        while let Some(dir) = open.pop() {
            for entry in std::fs::read_dir(root.join(&dir))? {
                let entry = entry?;
                let Ok(name) = entry.file_name().into_string() else { continue };
                let (path, meta) = (dir.join(name), entry.metadata()?);
                if meta.is_dir() {
                    open.push(path);
                } else if meta.is_file() {
                    files.push(TreeFile { path: path.to_string_lossy().into_owned(), size: meta.len() });
                }
            }
        }
        files.sort_by(|a, b| a.path.cmp(&b.path));
        Ok(Self { files, truth: Truth::Copy { root: root.to_owned() } })
    }

    /// Writes the files of a generated tree below `root`.
    pub fn write(&self, root: &Path) -> Result<()> {
        let Truth::Generated { prefix } = &self.truth else {
            anyhow::bail!("only a generated tree can be written")
        };
        let mut buffer = vec![0; 1 << 20];
        for file in &self.files {
            let path = root.join(&file.path);
            std::fs::create_dir_all(path.parent().context("a file has a directory")?)?;
            let mut out = File::create(&path).with_context(|| path.display().to_string())?;
            let id = content::id(format!("{prefix}{}", file.path));
            let mut at = 0;
            while at < file.size {
                let n = (file.size - at).min(1 << 20) as usize;
                content::fill(id, at, &mut buffer[..n]);
                out.write_all(&buffer[..n])?;
                at += n as u64;
            }
        }
        Ok(())
    }

    pub fn save(&self, path: &Path) -> Result<()> {
        Ok(std::fs::write(path, serde_json::to_vec(self)?)?)
    }

    pub fn load(path: &Path) -> Result<Self> {
        let text = std::fs::read(path).with_context(|| path.display().to_string())?;
        let tree: Self = serde_json::from_slice(&text)?;
        ensure!(!tree.files.is_empty(), "{}: a tree without files proves nothing", path.display());
        Ok(tree)
    }

    pub fn bytes(&self) -> u64 {
        self.files.iter().map(|f| f.size).sum()
    }

    /// Directory ("" is the root) → names directly in it.
    pub fn directories(&self) -> BTreeMap<String, BTreeSet<String>> {
        let mut all: BTreeMap<String, BTreeSet<String>> = BTreeMap::from([(String::new(), BTreeSet::new())]);
        for file in &self.files {
            let mut rest = file.path.as_str();
            loop {
                let (dir, name) = rest.rsplit_once('/').unwrap_or(("", rest));
                if !all.entry(dir.to_owned()).or_default().insert(name.to_owned()) || dir.is_empty() {
                    break;
                }
                rest = dir;
            }
        }
        all
    }

    /// The part of the tree that `keep` chooses.
    pub fn only(&self, keep: impl Fn(&TreeFile) -> bool) -> Self {
        Self { files: self.files.iter().filter(|f| keep(f)).cloned().collect(), truth: self.truth.clone() }
    }

    /// What a mount of this directory of it shows; "" is all of it.
    pub fn below(&self, directory: &str) -> Self {
        if directory.is_empty() {
            return self.clone();
        }
        let below = format!("{directory}/");
        let file =
            |f: &TreeFile| Some(TreeFile { path: f.path.strip_prefix(&below)?.to_owned(), size: f.size });
        let truth = match &self.truth {
            Truth::Generated { prefix } => Truth::Generated { prefix: format!("{prefix}{below}") },
            Truth::Copy { root } => Truth::Copy { root: root.join(directory) },
        };
        Self { files: self.files.iter().filter_map(file).collect(), truth }
    }

    /// Are these all the bytes of this file?
    pub fn is_whole(&self, file: &TreeFile, bytes: &[u8]) -> Result<bool> {
        Ok(bytes.len() as u64 == file.size && self.reference(file)?.first_difference(0, bytes).is_none())
    }

    pub fn reference(&self, file: &TreeFile) -> Result<Reference> {
        Ok(match &self.truth {
            Truth::Generated { prefix } => {
                Reference::Generated(content::id(format!("{prefix}{}", file.path)))
            }
            Truth::Copy { root } => Reference::Copy(File::open(root.join(&file.path))?),
        })
    }
}

/// The right bytes of one file.
#[derive(Debug)]
pub enum Reference {
    Generated(u64),
    Copy(File),
}

impl Reference {
    /// Offset of the first wrong byte.
    pub fn first_difference(&self, offset: u64, bytes: &[u8]) -> Option<u64> {
        match self {
            Self::Generated(id) => content::first_wrong_byte(*id, offset, bytes),
            Self::Copy(file) => {
                let mut right = vec![0; bytes.len()];
                if file.read_exact_at(&mut right, offset).is_err() {
                    return Some(offset);
                }
                right.iter().zip(bytes).position(|(a, b)| a != b).map(|k| offset + k as u64)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_written_tree_is_found_again_and_checks() {
        let dir = tempfile::tempdir().unwrap();
        let shape = Shape { directories: 2, files: 3, small_bytes: 5000, large: 1, large_bytes: 70_000 };
        let tree = Tree::generated("t/", shape);
        tree.write(dir.path()).unwrap();
        let scanned = Tree::scan(dir.path()).unwrap();
        assert_eq!(scanned.files, tree.files);
        let directories = tree.directories();
        assert_eq!(directories[""], BTreeSet::from(["d000".into(), "d001".into(), "large0".into()]));
        assert_eq!(directories["d001"].len(), 3);
        for file in &tree.files {
            let bytes = std::fs::read(dir.path().join(&file.path)).unwrap();
            assert_eq!(tree.reference(file).unwrap().first_difference(0, &bytes), None);
            assert_eq!(scanned.reference(file).unwrap().first_difference(0, &bytes), None);
            assert!(tree.is_whole(file, &bytes).unwrap() && !tree.is_whole(file, &bytes[1..]).unwrap());
        }
        for whole in [tree, scanned] {
            let part = whole.below("d001");
            assert_eq!(part.files.len(), 3);
            let bytes = std::fs::read(dir.path().join("d001").join(&part.files[0].path)).unwrap();
            assert!(part.is_whole(&part.files[0], &bytes).unwrap());
        }
    }
}
