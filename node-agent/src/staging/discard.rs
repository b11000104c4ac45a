//! Drops what waits, where a person wants that. The store's word counts from then on.

use super::area::Area;
use super::closed::Closed;
use super::file::File;
use super::inspect::on_disk;
use super::late::late_of;
use super::record::Former;
use super::registry::Staging;
use super::staged::StagedFile;
use futures::StreamExt;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;
use volume::VolumeId;

/// How long whoever uses a file is waited for.
const PATIENCE: Duration = Duration::from_secs(10);
const LOOK: Duration = Duration::from_millis(20);
/// How long the answer waits until the store's word is known, and of how many names at once it is asked.
const LOOK_LIMIT: Duration = Duration::from_secs(5);
const LOOKS_AT_ONCE: usize = 8;

/// What was dropped, and what stays and why.
#[derive(Debug, Default)]
pub(crate) struct Discarded {
    pub(crate) files: u64,
    pub(crate) bytes: u64,
    pub(crate) left: Vec<(Vec<u8>, String)>,
}

impl Discarded {
    fn note(&mut self, file: &StagedFile) {
        self.files += 1;
        self.bytes = self.bytes.saturating_add(if file.is_here { file.size } else { 0 });
    }
}

/// Why a file cannot be dropped now.
#[derive(Debug, PartialEq, Eq)]
enum Left {
    Open,
    Busy,
    Disk,
}

impl Left {
    fn text(&self) -> String {
        match self {
            Self::Open => "a program has it open: end it, or discard this again when it is closed".into(),
            Self::Busy => format!("it is in use, and was still after {} s: try again", PATIENCE.as_secs()),
            Self::Disk => {
                "the staging disk did not take the change: see the agent's log, and try again".into()
            }
        }
    }
}

impl Area {
    /// Drops what waits of this file. With the names that the store is to be asked about; None: nothing waited any more.
    async fn discard(&self, ino: u64) -> Result<Option<Vec<Vec<u8>>>, Left> {
        let _wanted = self.discards.begin(ino);
        let end = Instant::now() + PATIENCE;
        let taken = loop {
            let Some(file) = self.by_ino(ino) else { return Ok(None) };
            let left = end.saturating_duration_since(Instant::now());
            match tokio::time::timeout(left, self.take_out(file)).await {
                Ok(Err(Left::Busy)) if !left.is_zero() => tokio::time::sleep(LOOK).await,
                Ok(taken) => break taken?,
                Err(_) => return Err(Left::Busy),
            }
        };
        match taken {
            Some((file, names)) => self.put_aside(file, names).await.map(Some),
            None => Ok(None),
        }
    }

    /// Takes it from memory, so that nobody finds it any more, if nobody has it. With the names that it had or has at the
    /// store. None: nothing of it waits any more.
    async fn take_out(&self, file: Arc<File>) -> Result<Option<(Arc<File>, Vec<Vec<u8>>)>, Left> {
        let record = file.record();
        let former = record.former.iter().map(|former| former.path.clone());
        let names: Vec<Vec<u8>> = record.path.iter().cloned().chain(former).collect();
        let paths: Vec<&[u8]> = names.iter().map(Vec::as_slice).collect();
        // Nobody makes, removes or renames it meanwhile, and nobody sends it.
        let _held = self.locks.take(&paths).await;
        let mut ongoing = file.turn().await;
        let objects: Vec<Former> = {
            let mut state = self.state();
            let now = file.record();
            if !now.waits() {
                return Ok(None);
            }
            if state.is_open(file.ino) {
                return Err(Left::Open);
            }
            // Ours, and the area's. Whoever holds another one would go on with what is dropped here.
            if now.path != record.path || now.former != record.former || Arc::strong_count(&file) > 2 {
                return Err(Left::Busy);
            }
            self.dropping.send_modify(|dropping| _ = dropping.insert(file.ino));
            state.remove(file.ino);
            now.object().into_iter().chain(now.former).collect()
        };
        let begun = std::mem::take(&mut *ongoing);
        drop(ongoing);
        if let Some(area) = self.me.upgrade() {
            // The store may be away.
            tokio::spawn(async move {
                let mut begun = begun;
                area.abandon(&mut begun).await;
                for Former { path, writes, version, .. } in objects {
                    let _ = area.withdraw(&path, &writes, version.as_deref()).await; // it has been logged
                }
            });
        }
        Ok(Some((file, names)))
    }

    async fn put_aside(&self, file: Arc<File>, names: Vec<Vec<u8>>) -> Result<Vec<Vec<u8>>, Left> {
        // What the store was asked for may come to pass when nobody knows of the file any more. It is ours all the same.
        let late = late_of(&file.record());
        // A record that came back without its bytes would be sent as an empty file.
        let forgotten = tokio::time::timeout(self.disk.limit(), self.forget(file, late, true)).await; // its job has all that follows
        forgotten.ok().and_then(Result::ok).ok_or(Left::Disk)?;
        for path in &names {
            self.failures.over(path);
            if let Ok(Some(above)) = self.above(path) {
                self.times.names_changed(above);
            }
        }
        Ok(names)
    }
}

impl Staging {
    /// Drops of this volume what waits of these files, or of all. `limit`: of the disk.
    pub(crate) async fn discard(
        &self,
        id: &VolumeId,
        paths: &[Vec<u8>],
        limit: Duration,
    ) -> Result<Discarded, String> {
        let turn = self.turn(id).await;
        if let Some(area) = self.open_area(id) {
            drop(turn);
            return Ok(discard_of(&area, paths).await);
        }
        // Nobody opens it meanwhile.
        let (dir, paths) = (self.dir.join(id.as_str()), paths.to_vec());
        let may_come = self.may_come();
        let discarded = on_disk(limit, move || {
            let mut discarded = Discarded::default();
            let Some(closed) = Closed::open(&dir)? else { return Ok(discarded) };
            let mut inos = Vec::new();
            for file in closed.files_that_wait().into_iter().filter(|file| file.is_of(&paths)) {
                match may_come.filter(|_| file.opens > 0) {
                    Some(left) => discarded.left.push((file.path, not_yet(left))),
                    None => {
                        discarded.note(&file);
                        inos.push(file.ino);
                    }
                }
            }
            closed.discard(&inos).map(|()| discarded)
        });
        let discarded = discarded.await.and_then(|discarded| discarded);
        drop(turn);
        discarded
    }
}

fn not_yet(left: Duration) -> String {
    format!(
        "a program had it open when this agent started, and its mount may still come to it: try again in {} s",
        left.as_secs() + 1
    )
}

async fn discard_of(area: &Arc<Area>, paths: &[Vec<u8>]) -> Discarded {
    let (mut discarded, mut names) = (Discarded::default(), Vec::new());
    for file in area.files_that_wait().into_iter().filter(|file| file.is_of(paths)) {
        match area.discard(file.ino).await {
            Ok(Some(of_it)) => {
                discarded.note(&file);
                names.extend(of_it);
            }
            Ok(None) => {} // the store has it by now
            Err(left) => discarded.left.push((file.path, left.text())),
        }
    }
    tracing::warn!(volume = %area.volume, files = discarded.files, bytes = discarded.bytes, "staged files were discarded by a person");
    // Until the store has answered, which may be away, what was known of these names before is shown.
    let looking = area.clone();
    let looked = tokio::spawn(async move {
        let names = futures::stream::iter(names);
        names.for_each_concurrent(LOOKS_AT_ONCE, async |path| looking.look_again(&path).await).await;
    });
    let _ = tokio::time::timeout(LOOK_LIMIT, looked).await; // it goes on
    discarded
}
