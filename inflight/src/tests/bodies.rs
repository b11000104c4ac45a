//! Requests of any length in a memory with room for writes: their bytes survive a worker, and get to a file.

use super::*;
use fuse_abi::InHeader;

const WRITE_HEAD: usize = InHeader::BYTES + fuse_abi::WriteIn::BYTES;
const WRITE: usize = WRITE_HEAD + (1 << 20);

#[test]
fn a_memory_has_the_room_that_it_was_made_with_and_the_first_part_of_the_other() {
    for (room, stages, bytes_max) in [(Room::ReadOnly, 64, 8192), (Room::ReadWrite, 16, (1 << 20) + 4096)] {
        let fd = Inflight::create(room).unwrap();
        let inflight = Inflight::map(&fd).unwrap();
        assert_eq!(
            (inflight.room(), inflight.stages(), inflight.stage_bytes_max()),
            (room, stages, bytes_max)
        );
        assert!(inflight.room.stages_at().is_multiple_of(4096));
        let end = inflight.room.stage_at(stages - 1) + bytes_max;
        assert!(end <= room.bytes() && rustix::fs::fstat(&fd).unwrap().st_size as usize == room.bytes());
    }
    assert!(Room::ReadWrite.stages_at() >= Room::ReadOnly.bytes());
}

#[test]
fn a_write_of_a_mebibyte_is_there_for_the_successor_wherever_its_worker_dies() {
    let mut deaths = 0;
    let mut turn_ends = false;
    for accesses in 0.. {
        let inflight = with_room(Room::ReadWrite);
        let mut model = Model::default();
        let stage = inflight.acquire_stage().unwrap();
        let bytes = model.request(WRITE);
        arrive(&inflight, stage, &bytes);
        let unique = model.next;
        let turn = || {
            let header = inflight.stage_header(stage);
            let slot = inflight.put(stage, &header).unwrap();
            let mut head = [0; WRITE_HEAD];
            inflight.stage_bytes(stage, &mut head);
            inflight.commit_stage(stage, unique);
            inflight.park(slot, unique);
            assert!(!inflight.stage_is_free(stage), "its bytes are still needed");
            inflight.release_stage(stage);
            inflight.head(unique, &mut head).unwrap(); // the bytes after it are copied without another step
            reply(&inflight, &mut model, unique);
        };
        turn_ends = within(accesses, turn).is_some();
        let collected = inflight.collect_with(&mut model, Blame::Executing).unwrap();
        assert_eq!((collected.orphans, collected.lost), (model.waiting.len(), 0), "death at {accesses}");
        if turn_ends {
            break;
        }
        deaths += 1;
        if !model.waiting.is_empty() {
            // What its successor and the agent do with it.
            let mut head = [0; WRITE_HEAD];
            assert_eq!(inflight.head(unique, &mut head).unwrap().len as usize, WRITE);
            assert_eq!(head, bytes[..WRITE_HEAD]);
            let mut all = vec![0; WRITE];
            assert_eq!(inflight.head(unique, &mut all).unwrap().len as usize, WRITE);
            assert!(all == bytes, "death at {accesses}");
        }
        successor_finishes(&inflight, &mut model);
    }
    assert!(turn_ends && deaths > 30, "only {deaths} deaths");
}

#[test]
fn writes_that_wait_keep_their_buffers_and_give_them_back() {
    let inflight = with_room(Room::ReadWrite);
    let mut model = Model::default();
    let taken: Vec<u64> = std::iter::from_fn(|| take(&inflight, &mut model, WRITE)).collect();
    assert_eq!(taken.len(), inflight.stages());
    reply(&inflight, &mut model, taken[7]);
    assert!(take(&inflight, &mut model, 56).is_some(), "one is free again");
    inflight.collect_with(&mut model, Blame::Executing).unwrap();
    successor_finishes(&inflight, &mut model);
}

#[test]
fn short_and_long_requests_are_told_as_they_came() {
    let inflight = with_room(Room::ReadWrite);
    let mut model = Model::default();
    for len in [56, INLINE_BYTES, INLINE_BYTES + 1, 5000, WRITE] {
        let unique = take(&inflight, &mut model, len).unwrap();
        let bytes = model.waiting[&unique].clone();
        let mut whole = vec![0xee; len + 9];
        assert_eq!(inflight.head(unique, &mut whole).unwrap().len as usize, len);
        assert!(whole[..len] == bytes && whole[len..] == [0xee; 9]);
        for front in [0, 7, 40, 47, 56] {
            let mut out = [0xee; 64];
            let header = inflight.head(unique, &mut out[..front]).unwrap();
            assert_eq!((header.unique, header.len as usize), (unique, len));
            assert!(out[..front] == bytes[..front] && out[front..].iter().all(|b| *b == 0xee));
        }
        let mut out = vec![0; len + 8];
        inflight.head(unique, &mut out).unwrap();
        assert!(out[..len] == bytes[..] && out[len..] == [0; 8], "no more than there is");
        reply(&inflight, &mut model, unique);
        assert!(inflight.head(unique, &mut out).is_none(), "it has been answered");
    }
}

#[test]
fn a_note_that_points_elsewhere_is_refused() {
    for room in [Room::ReadOnly, Room::ReadWrite] {
        let inflight = with_room(room);
        let mut model = Model::default();
        let (stages, most) = (inflight.stages() as u32, inflight.stage_bytes_max() as u32);
        let inline = INLINE_BYTES as u32;
        for (len, place) in [
            (0, 0),
            (39, 0),
            (inline + 1, 0),
            (u32::MAX, 0),
            (39, 1),
            (most + 1, 1),
            (u32::MAX, stages),
            (600, stages + 1),
            (600, u32::MAX),
        ] {
            let unique = take(&inflight, &mut model, 600).unwrap();
            let (slot, _) = inflight.find(unique).unwrap();
            inflight.renote(slot.0, len, place);
            let mut buffer = vec![0; most as usize + 1];
            assert!(inflight.body(slot, &mut buffer).is_none(), "{len} bytes at {place}");
            assert!(inflight.head(unique, &mut buffer).is_none(), "{len} bytes at {place}");
            reply(&inflight, &mut model, unique);
        }
        // What lies in the layout is not out of bounds, but is no request of this id.
        let unique = take(&inflight, &mut model, 600).unwrap();
        let (slot, _) = inflight.find(unique).unwrap();
        inflight.renote(slot.0, most, stages);
        assert!(inflight.head(unique, &mut [0; 80]).is_none());
        assert!(
            inflight.head(unique, &mut vec![0; most as usize]).is_none(),
            "to the last byte of the memory"
        );
    }
}
