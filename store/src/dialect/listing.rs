//! One page of keys as entries, with every key either named or reported.

use crate::keys::{is_name, show};
use crate::{Entry, Kind, PAGE_ENTRIES, Page, Version};

/// A page as the store tells it; keys are raw bytes.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Answer {
    pub(super) objects: Vec<Object>,
    pub(super) prefixes: Vec<Vec<u8>>,
    pub(super) next: Option<String>,
}

#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Object {
    pub(super) key: Vec<u8>,
    pub(super) size: u64,
    /// None: no request could name it.
    pub(super) version: Option<Version>,
    pub(super) modified_ns: i64,
}

impl Answer {
    pub(crate) fn is_empty(&self) -> bool {
        self.objects.is_empty() && self.prefixes.is_empty()
    }

    /// Where the next page starts. Stores may also answer with an empty page and this.
    pub(crate) fn next(&self) -> Option<&str> {
        self.next.as_deref()
    }

    /// Ends in "/".
    pub(crate) fn has_prefix(&self, directory: &[u8]) -> bool {
        self.prefixes.iter().any(|prefix| prefix == directory)
    }

    pub(crate) fn first_key(&self) -> Option<&[u8]> {
        self.objects.first().map(|object| object.key.as_slice())
    }

    /// Of a listing without a delimiter: all keys of the page, whether they can be shown or not, and where the next one starts.
    pub(crate) fn into_keys(self) -> Result<(Vec<Vec<u8>>, Option<String>), &'static str> {
        match self.prefixes.is_empty() {
            true => Ok((self.objects.into_iter().map(|object| object.key).collect(), self.next)),
            false => Err("a listing with common prefixes, which it was not asked for"),
        }
    }

    /// Names relative to `dir` (the listing's prefix: "" or ends in "/").
    pub(crate) fn into_page(self, dir: &[u8]) -> Page {
        let mut page = Page { next: self.next, ..Page::default() };
        for object in self.objects {
            let name = object.key.strip_prefix(dir).unwrap_or(&object.key);
            match object.version {
                // The directory's own marker: an empty object that consoles create. With content it is a file whose
                // name is empty, which no application can open.
                _ if name.is_empty() && object.size == 0 => {}
                Some(_) if object.size > volume::FILE_BYTES_MAX => {
                    page.unnameable.push(format!("{} (too large for a file)", show(&object.key)));
                }
                Some(version) if is_name(name) => page.entries.push(Entry {
                    name: name.to_vec(),
                    kind: Kind::File { size: object.size, version },
                    modified_ns: object.modified_ns,
                    permissions: None,
                }),
                _ => page.unnameable.push(show(&object.key)),
            }
        }
        for prefix in self.prefixes {
            let name = prefix.strip_prefix(dir).unwrap_or(&prefix);
            let name = name.strip_suffix(b"/").unwrap_or(name);
            if is_name(name) {
                page.entries.push(Entry {
                    name: name.to_vec(),
                    kind: Kind::Directory,
                    modified_ns: 0,
                    permissions: None,
                });
            } else {
                page.unnameable.push(show(&prefix));
            }
        }
        page
    }
}

/// As many as were asked for: what a page may hold decides how much memory listings take.
pub(super) fn is_page(entries: usize) -> Result<(), String> {
    match entries > PAGE_ENTRIES {
        true => Err(format!("a page of more than {PAGE_ENTRIES} entries, which is more than was asked for")),
        false => Ok(()),
    }
}
