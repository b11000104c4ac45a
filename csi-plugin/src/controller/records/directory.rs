//! Records as files of one directory: for a node without Kubernetes, and for tests.

use super::{Deletion, FORMAT, Record, RecordError, Records};
use rustix::fs::{CWD, RenameFlags};
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use volume::VolumeId;

const SUFFIX: &str = ".json";

/// One file per volume, published by rename.
#[derive(Debug)]
pub struct Directory {
    path: PathBuf,
}

impl Directory {
    pub fn open(path: PathBuf) -> Result<Self, RecordError> {
        fs::create_dir_all(&path).map_err(|source| RecordError::Io { path: path.clone(), source })?;
        Ok(Self { path })
    }

    fn file(&self, id: &VolumeId) -> PathBuf {
        self.path.join(format!("{id}{SUFFIX}"))
    }

    /// False: there is one, and it is not to be replaced.
    fn write(&self, record: &Record, how: RenameFlags) -> Result<bool, RecordError> {
        let path = self.file(&record.id);
        let wrap = |source| RecordError::Io { path: path.clone(), source };
        // A leading dot is no id, so a torn file of an earlier run is never taken for a record.
        let draft = self.path.join(format!(".{}.{}", record.id, std::process::id()));
        let mut file = File::create(&draft).map_err(wrap)?;
        let text = serde_json::to_vec_pretty(record).map_err(|e| wrap(e.into()))?;
        file.write_all(&text).and_then(|()| file.sync_all()).map_err(wrap)?;
        match rustix::fs::renameat_with(CWD, &draft, CWD, &path, how) {
            Ok(()) => {}
            Err(rustix::io::Errno::EXIST) => {
                fs::remove_file(&draft).map_err(wrap)?;
                return Ok(false);
            }
            Err(e) => return Err(wrap(e.into())),
        }
        self.sync()?;
        Ok(true)
    }

    fn sync(&self) -> Result<(), RecordError> {
        let wrap = |source| RecordError::Io { path: self.path.clone(), source };
        File::open(&self.path).and_then(|d| d.sync_all()).map_err(wrap)
    }
}

fn read(path: &Path) -> Result<Option<Record>, RecordError> {
    let malformed = |why: String| RecordError::Malformed { path: path.to_owned(), why };
    let text = match fs::read(path) {
        Ok(text) => text,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(source) => return Err(RecordError::Io { path: path.to_owned(), source }),
    };
    let record: Record = serde_json::from_slice(&text).map_err(|e| malformed(e.to_string()))?;
    if record.format != FORMAT {
        return Err(malformed(format!("format {} instead of {FORMAT}", record.format)));
    }
    Ok(Some(record))
}

impl Records for Directory {
    fn get(&self, id: &VolumeId) -> Result<Option<Record>, RecordError> {
        read(&self.file(id))
    }

    fn insert(&self, record: &Record) -> Result<bool, RecordError> {
        self.write(record, RenameFlags::NOREPLACE)
    }

    /// Nothing removes records of a directory but a DeleteVolume, which has its turn.
    fn hand_out_again(&self, _: &Record) -> Result<bool, RecordError> {
        Ok(true)
    }

    /// Its DeleteVolume has its turn, so that it cannot go meanwhile.
    fn advance_deletion(&self, record: &Record, to: Deletion) -> Result<bool, RecordError> {
        self.write(&Record { deletion: Some(to), ..record.clone() }, RenameFlags::empty())
    }

    fn are_shared(&self) -> bool {
        false
    }

    fn remove(&self, id: &VolumeId) -> Result<(), RecordError> {
        let path = self.file(id);
        match fs::remove_file(&path) {
            Ok(()) => self.sync(),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
            Err(source) => Err(RecordError::Io { path, source }),
        }
    }

    fn list(&self, after: Option<&VolumeId>, max: usize) -> Result<(Vec<Record>, bool), RecordError> {
        let wrap = |source| RecordError::Io { path: self.path.clone(), source };
        let mut ids = Vec::new();
        for entry in fs::read_dir(&self.path).map_err(wrap)? {
            let name = entry.map_err(wrap)?.file_name();
            let id = name.to_str().and_then(|n| n.strip_suffix(SUFFIX)).and_then(|n| VolumeId::parse(n).ok());
            ids.extend(id.filter(|id| after.is_none_or(|after| id > after)));
        }
        ids.sort();
        let more = ids.len() > max;
        ids.truncate(max);
        let mut records = Vec::with_capacity(ids.len());
        for id in &ids {
            records.extend(self.get(id)?); // deleted meanwhile: not there
        }
        Ok((records, more))
    }
}

#[cfg(test)]
mod tests {
    use super::super::id_of;
    use super::*;
    use std::collections::BTreeMap;

    /// `MillpondVolume` objects hold the same in their `spec`.
    #[test]
    fn a_record_is_that_of_the_golden_file() {
        let dir = tempfile::tempdir().unwrap();
        let records = Directory::open(dir.path().into()).unwrap();
        let context =
            [("source", "s3://bucket/a"), ("uid", "1000")].map(|(k, v)| (k.to_owned(), v.to_owned()));
        let request = "00112233445566778899aabbccddeeff".to_owned();
        let record = Record::new("a name", 1 << 40, context.into(), request);
        let file = records.file(&record.id);
        let same = |record: &Record, name| {
            assert!(records.insert(record).unwrap());
            let text = fs::read_to_string(&file).unwrap() + "\n";
            let text = crate::golden::same(crate::GOLDEN, name, &text);
            fs::write(&file, &text).unwrap();
            assert_eq!(records.get(&record.id).unwrap().as_ref(), Some(record));
            text
        };
        // The first controllers wrote no digest of the request.
        same(&Record { request: None, ..record.clone() }, "volume-record-1.json");
        records.remove(&record.id).unwrap();
        let text = same(&record, "volume-record-1-request.json");
        records.remove(&record.id).unwrap();
        let planned = Record { deletion: Some(Deletion::Planned), ..record.clone() };
        same(&planned, "volume-record-1-deletion.json");
        assert!(records.advance_deletion(&planned, Deletion::Begun).unwrap());
        let begun = records.get(&record.id).unwrap().unwrap();
        assert_eq!(begun, Record { deletion: Some(Deletion::Begun), ..record.clone() });
        let golden = fs::read_to_string(&file).unwrap() + "\n";
        crate::golden::same(crate::GOLDEN, "volume-record-1-deletion-begun.json", &golden);
        // What a later version adds is ignored, and a later format is refused by name.
        fs::write(&file, text.replacen('{', "{\"later\":1,", 1)).unwrap();
        assert_eq!(records.get(&record.id).unwrap(), Some(record.clone()));
        fs::write(&file, text.replace("\"format\": 1", "\"format\": 2")).unwrap();
        let refused = records.get(&record.id).unwrap_err().to_string();
        assert!(refused.contains("format 2 instead of 1"), "{refused}");
    }

    #[test]
    fn records_survive_and_are_listed_in_order() {
        let dir = tempfile::tempdir().unwrap();
        let records = Directory::open(dir.path().join("v")).unwrap();
        for name in ["c", "a", "b b"] {
            assert!(records.insert(&Record::new(name, 5, BTreeMap::new(), String::new())).unwrap());
        }
        assert!(!records.insert(&Record::new("a", 6, BTreeMap::new(), String::new())).unwrap());
        fs::write(dir.path().join("v/.a.1"), b"torn").unwrap();

        let again = Directory::open(dir.path().join("v")).unwrap();
        assert_eq!(again.get(&id_of("a")).unwrap().unwrap().capacity_bytes, 5);
        let (first, more) = again.list(None, 2).unwrap();
        assert!(more);
        let (rest, more) = again.list(Some(&first[1].id), 2).unwrap();
        assert!(!more);
        let names: Vec<_> = first.iter().chain(&rest).map(|r| r.name.as_str()).collect();
        assert_eq!(names, ["a", "c", "b b"]);
        again.remove(&id_of("a")).unwrap();
        again.remove(&id_of("a")).unwrap();
        assert_eq!(again.get(&id_of("a")).unwrap(), None);
    }

    #[test]
    fn a_damaged_record_is_reported_and_kept() {
        let dir = tempfile::tempdir().unwrap();
        let records = Directory::open(dir.path().to_owned()).unwrap();
        fs::write(dir.path().join("x.json"), b"{").unwrap();
        assert!(matches!(records.get(&id_of("x")), Err(RecordError::Malformed { .. })));
        assert!(!records.insert(&Record::new("x", 0, BTreeMap::new(), String::new())).unwrap());
    }
}
