//! What fsync(2) and close(2) wait for.

use super::Outcome;
use super::area::Area;
use super::file::File;
use link::writable::{Done, Wrong};
use std::sync::Arc;
use std::sync::atomic::Ordering::Acquire;

impl Area {
    pub(super) async fn sync(&self, ino: u64, closing: bool) -> Outcome {
        let Some(file) = self.by_ino(ino) else {
            // A directory, or a file that nobody has changed.
            if !closing {
                self.sync_disk().await?;
            }
            return Ok(Done::Done);
        };
        if file.record().clean || closing && file.record().path.is_none() {
            return Ok(Done::Done);
        }
        if self.is_through() {
            self.send(&file).await?;
        } else if !file.is_synced() {
            // A close comes after nearly every fsync.
            let (at, content) = loop {
                let (at, brought) = (file.changes(), file.rest.brought());
                self.write_out(&file).await?;
                let content = file.content.write().await;
                match brought {
                    // It was sent meanwhile, and so blocks have come that were not written out.
                    Some(_) if file.rest.brought().is_none() => {}
                    Some(brought) => {
                        file.rest.change(|elsewhere| elsewhere.note_safe(brought));
                        break (at, content);
                    }
                    None => break (at, content),
                }
            };
            let mut record = file.noted(file.record());
            record.durable = record.local && file.is_written_out(file.sent());
            self.put_record(&file, record).await?;
            drop(content);
            self.sync_disk().await?;
            file.note_synced(at);
        }
        Ok(Done::Done)
    }

    /// Its bytes, so that no loss of power takes them.
    pub(super) async fn write_out(&self, file: &Arc<File>) -> Result<(), Wrong> {
        let content = file.content.write().await;
        let (at, data) = (file.changes(), content.clone());
        // Writers wait only where all of it is to be written anew.
        let alone = file.doubt.has_failed.load(Acquire).then_some(content);
        if let Some(data) = data {
            let unwritten = file.unwritten();
            self.write_out_data(file, data, alone.is_some()).await?;
            file.note_written_out(at, unwritten);
        }
        Ok(())
    }
}
