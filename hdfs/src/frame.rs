//! Messages as frames of a byte stream: two lengths, the message, and the bytes that it carries.
//!
//! Whoever receives does not trust who sends: both lengths are bounded before anything is allocated, and a frame that
//! breaks a rule ends the conversation.

use crate::DATA_BYTES_MAX;
use bytes::{Buf, BufMut, Bytes, BytesMut};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::marker::PhantomData;

/// The largest is a page with the names and times of its entries, or a configuration with its secrets.
const MESSAGE_BYTES_MAX: usize = 512 << 10;
/// What is read at once.
const SPACE: usize = 256 << 10;
/// Of the message and of the body, little endian.
const LENGTHS: usize = 8;

#[derive(Debug)]
pub struct Frame<M> {
    pub message: M,
    pub body: Bytes,
}

#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum FrameError {
    #[error("a message of {0} bytes is longer than any")]
    TooLong(usize),
    #[error("a message that cannot be read")]
    Unreadable,
}

/// # Errors
/// It is longer than any message may be.
pub fn encode(message: &impl Serialize) -> Result<Bytes, FrameError> {
    encode_before(message, &[])
}

/// What comes before the bytes of `body`, which are said behind it.
///
/// # Errors
/// It is longer than any message may be.
pub fn encode_before(message: &impl Serialize, body: &[u8]) -> Result<Bytes, FrameError> {
    let head = postcard::to_stdvec(message).map_err(|_| FrameError::Unreadable)?;
    if head.len() > MESSAGE_BYTES_MAX || body.len() > DATA_BYTES_MAX {
        return Err(FrameError::TooLong(head.len().max(body.len())));
    }
    let mut frame = BytesMut::with_capacity(LENGTHS + head.len());
    frame.put_u32_le(head.len() as u32);
    frame.put_u32_le(body.len() as u32);
    frame.put_slice(&head);
    Ok(frame.freeze())
}

/// Takes bytes as they come, gives frames.
#[derive(Debug)]
pub struct Frames<M> {
    buffer: BytesMut,
    of: PhantomData<fn() -> M>,
}

impl<M> Default for Frames<M> {
    fn default() -> Self {
        Self { buffer: BytesMut::new(), of: PhantomData }
    }
}

impl<M: DeserializeOwned> Frames<M> {
    /// Where to read the next bytes to.
    pub fn space(&mut self) -> &mut BytesMut {
        // Some frames at once: of one that is there in part, this part is copied.
        self.buffer.reserve(SPACE);
        &mut self.buffer
    }

    /// None: it has not come as a whole.
    ///
    /// # Errors
    /// No frame will be readable any more.
    pub fn take(&mut self) -> Result<Option<Frame<M>>, FrameError> {
        if self.buffer.len() < LENGTHS {
            return Ok(None);
        }
        let mut lengths = &self.buffer[..LENGTHS];
        let (head, body) = (lengths.get_u32_le() as usize, lengths.get_u32_le() as usize);
        if head > MESSAGE_BYTES_MAX || body > DATA_BYTES_MAX {
            return Err(FrameError::TooLong(head.max(body)));
        }
        if self.buffer.len() < LENGTHS + head + body {
            return Ok(None);
        }
        self.buffer.advance(LENGTHS);
        let head = self.buffer.split_to(head);
        let body = self.buffer.split_to(body).freeze();
        match postcard::take_from_bytes(&head) {
            Ok((message, [])) => Ok(Some(Frame { message, body })),
            _ => Err(FrameError::Unreadable),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{FromHelper, ToHelper};
    use proptest::prelude::*;

    fn data(message: &FromHelper, body: &[u8]) -> Bytes {
        [&encode_before(message, body).unwrap()[..], body].concat().into()
    }

    #[test]
    fn frames_come_out_as_they_went_in_however_they_are_cut() {
        let sent: Vec<Bytes> = (0..20_u64)
            .map(|id| data(&FromHelper::Data { id }, &vec![id as u8; id as usize * 1000]))
            .collect();
        for step in [1, 7, 4096, 1 << 20] {
            let (mut frames, mut seen) = (Frames::<FromHelper>::default(), 0);
            for piece in sent.concat().chunks(step) {
                frames.space().extend_from_slice(piece);
                while let Some(Frame { message: FromHelper::Data { id }, body }) = frames.take().unwrap() {
                    assert_eq!((id, body.len() as u64), (seen, seen * 1000));
                    seen += 1;
                }
            }
            assert_eq!(seen, 20);
        }
    }

    #[test]
    fn a_claimed_size_allocates_nothing() {
        for claim in [[u32::MAX, 0], [0, u32::MAX], [(MESSAGE_BYTES_MAX + 1) as u32, 0]] {
            let mut frames = Frames::<FromHelper>::default();
            claim.iter().for_each(|length| frames.space().put_u32_le(*length));
            assert!(matches!(frames.take(), Err(FrameError::TooLong(_))));
            assert!(frames.buffer.capacity() < 1 << 20);
        }
        assert!(encode_before(&FromHelper::Data { id: 0 }, &vec![0; DATA_BYTES_MAX + 1]).is_err());
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic(bytes in prop::collection::vec(any::<u8>(), 0..300), head in 0..40_u32) {
            let (mut from, mut to) = (Frames::<FromHelper>::default(), Frames::<ToHelper>::default());
            for frames in [from.space(), to.space()] {
                frames.put_u32_le(head);
                frames.put_u32_le(0);
                frames.put_slice(&bytes);
            }
            while let Ok(Some(_)) = from.take() {}
            while let Ok(Some(_)) = to.take() {}
        }
    }
}
