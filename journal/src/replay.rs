//! Reads a journal's file: what is in it, and where the sound part ends.

use crate::disk::File;
use crate::error::{JournalError, while_it};
use crate::frame::{FRAMES, HEAD, Header, Mark, changes, frame_len, is_sound};
use crate::table::Table;
use std::io;

/// So much is read at once, or a frame if that is more.
const WINDOW: u64 = 64 << 10;

pub(crate) struct Replayed {
    pub(crate) table: Table,
    pub(crate) header: Header,
    pub(crate) mark: Mark,
    /// The sequence number of the next frame.
    pub(crate) next: u64,
    /// Of the sound frames.
    pub(crate) end: u64,
    /// What is behind them, torn.
    pub(crate) torn: u64,
}

/// Changes nothing that is in the file. Sound frames behind the mark are written once more, as they are: an fsync that
/// failed may have left them in the page cache, marked as clean, and not on the disk; the next one would tell nothing.
pub(crate) fn replay(file: &dyn File, format: u32) -> Result<Replayed, JournalError> {
    let size = file.size().map_err(while_it("learn its size"))?;
    let mut reader = Reader { file, size, start: 0, window: Vec::new() };
    let page = reader.bytes(0, FRAMES as u64).map_err(while_it("be read"))?;
    let (header, mark) = Header::parse(page.ok_or(JournalError::Damaged { at: size })?, format)?;
    let (mut table, mut next, mut end) = (Table::default(), header.first, FRAMES as u64);
    while let Some(frame) = reader.frame(end, next).map_err(while_it("be read"))? {
        // Its checksum is right: the disk has kept what was written, so that this is no tear.
        for change in changes(frame).ok_or(JournalError::Damaged { at: end })? {
            table.apply(&change);
        }
        let frame_end = end + frame.len() as u64;
        if frame_end > mark.durable {
            file.write_all(frame, end).map_err(while_it("be written"))?;
        }
        (end, next) = (frame_end, next.wrapping_add(1));
    }
    if end < mark.durable {
        return Err(JournalError::Damaged { at: end });
    }
    Ok(Replayed { table, header, mark, next, end, torn: size - end })
}

struct Reader<'a> {
    file: &'a dyn File,
    size: u64,
    /// Of the window, in the file.
    start: u64,
    window: Vec<u8>,
}

impl Reader<'_> {
    /// None: the file ends before. Nothing is allocated for bytes that the file does not have.
    fn bytes(&mut self, at: u64, len: u64) -> io::Result<Option<&[u8]>> {
        if self.size.checked_sub(at).is_none_or(|left| left < len) {
            return Ok(None);
        }
        if at + len > self.start + self.window.len() as u64 {
            self.start = at;
            self.window.resize(len.max(WINDOW).min(self.size - at) as usize, 0);
            self.file.read_exact(&mut self.window, at)?;
        }
        let from = (at - self.start) as usize;
        Ok(Some(&self.window[from..from + len as usize]))
    }

    /// None: what is here is not the frame with this number, whole.
    fn frame(&mut self, at: u64, sequence: u64) -> io::Result<Option<&[u8]>> {
        let Some(len) = self.bytes(at, HEAD as u64)?.and_then(frame_len) else { return Ok(None) };
        let frame = self.bytes(at, len as u64)?;
        Ok(frame.filter(|frame| is_sound(frame, sequence)))
    }
}
