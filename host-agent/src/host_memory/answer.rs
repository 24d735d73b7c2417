//! Replies of the driver as messages: split into datagrams, with a reason for each rejection.

use std::{os::fd::OwnedFd, sync::Arc};

use pool::agent::Refusal;
use prost::Message as _;
use proto::v1::{self as wire, host_memory_reply::Reply};
use units::limits::{DATAGRAM_BYTES_MAX, DESCRIPTORS_PER_DATAGRAM_MAX};

use crate::{
    driver::{Asked, Handed},
    host::{Part, Place},
};

/// Messages, each with its descriptors.
pub(super) type Answer = Vec<(wire::HostMemoryReply, Vec<Arc<OwnedFd>>)>;

/// Space of a datagram beside its regions.
const OVERHEAD_BYTES: usize = 64;

fn message(reply: Reply) -> wire::HostMemoryReply {
    wire::HostMemoryReply { reply: Some(reply) }
}

/// A no.
pub(super) fn refused(reason: &str, why: String) -> Answer {
    let refused = wire::Rejection { reason: reason.to_owned(), message: why };
    vec![(message(Reply::Rejection(refused)), Vec::new())]
}

fn refusal(asked: &Asked) -> Answer {
    let reason = match asked {
        Asked::Refused(Refusal::VmUnknown(_)) => "VM_UNKNOWN",
        Asked::Refused(Refusal::NotReady { .. } | Refusal::NotRecorded { .. }) => "VM_NOT_READY",
        Asked::Refused(Refusal::Attached { .. } | Refusal::Ended { .. }) => "VM_ATTACHED",
        Asked::Refused(Refusal::OtherUser { .. }) => "OTHER_USER",
        Asked::Refused(Refusal::OtherVm { .. }) => "OTHER_VM",
        Asked::Host(_) | Asked::Stopping => "VM_NOT_READY",
    };
    refused(reason, units::chain(asked))
}

pub(super) fn memory(asked: Result<Handed, Asked>) -> Answer {
    match asked {
        Ok(Handed { parts, pinned }) => pieces(parts, pinned),
        Err(error) => refusal(&error),
    }
}

/// As many messages as it takes, `more` on all but the last.
fn pieces(parts: Vec<Part>, pinned: bool) -> Answer {
    let mut pieces = vec![Piece::default()];
    for part in parts {
        let (region, descriptor) = region(part);
        let bytes = region.encoded_len() + OVERHEAD_BYTES;
        if !pieces.last().expect("there is one").fits(bytes) {
            pieces.push(Piece::default());
        }
        pieces.last_mut().expect("there is one").add(region, descriptor, bytes);
    }
    let last = pieces.len() - 1;
    let memory = |(at, piece): (usize, Piece)| {
        let memory = wire::Memory { regions: piece.regions, more: at < last, pinned };
        (message(Reply::Memory(memory)), piece.descriptors)
    };
    pieces.into_iter().enumerate().map(memory).collect()
}

#[derive(Default)]
struct Piece {
    regions: Vec<wire::Region>,
    descriptors: Vec<Arc<OwnedFd>>,
    bytes: usize,
}

impl Piece {
    fn fits(&self, bytes: usize) -> bool {
        let room = DATAGRAM_BYTES_MAX - OVERHEAD_BYTES;
        self.regions.len() < DESCRIPTORS_PER_DATAGRAM_MAX && self.bytes + bytes <= room
    }

    fn add(&mut self, region: wire::Region, descriptor: Option<Arc<OwnedFd>>, bytes: usize) {
        self.regions.push(region);
        self.descriptors.extend(descriptor);
        self.bytes += bytes;
    }
}

fn region(part: Part) -> (wire::Region, Option<Arc<OwnedFd>>) {
    let (path, descriptor) = match part.place {
        Place::Descriptor(descriptor) => (String::new(), Some(descriptor)),
        Place::Path(path) => (path.to_string_lossy().into_owned(), None),
        Place::VmmsOwn => (String::new(), None),
    };
    let region = wire::Region {
        slice: part.slice.map(|holding| holding.slice.0),
        emc: part.emc.to_string(),
        epoch: part.slice.map_or(0, |holding| holding.epoch.0),
        bytes: part.bytes.get(),
        offset: part.offset,
        path,
    };
    (region, descriptor)
}

#[cfg(test)]
mod tests {
    use pool::protocol::Holding;
    use units::{Epoch, SLICE, SliceId};

    use super::*;

    fn part(slice: u32, path_bytes: usize) -> Part {
        let holding = Holding { slice: SliceId(slice), epoch: Epoch(1) };
        let place = Place::Path("x".repeat(path_bytes).into());
        Part { slice: Some(holding), emc: "emc".into(), bytes: SLICE, offset: 0, place }
    }

    fn check_pieces(parts: u32, path_bytes: usize, expected: usize) {
        let answer = pieces((0..parts).map(|slice| part(slice, path_bytes)).collect(), false);
        assert_eq!(answer.len(), expected);
        let mut slices = Vec::new();
        for (at, (message, _)) in answer.iter().enumerate() {
            assert!(message.encoded_len() <= DATAGRAM_BYTES_MAX);
            let Some(Reply::Memory(memory)) = &message.reply else { panic!("it is memory") };
            assert_eq!(memory.more, at + 1 < expected);
            slices.extend(memory.regions.iter().filter_map(|region| region.slice));
        }
        assert_eq!(slices, (0..parts).collect::<Vec<_>>());
    }

    #[test]
    fn memory_reply_is_split_into_fitting_datagrams() {
        check_pieces(0, 0, 1);
        check_pieces(64, 40, 1);
        check_pieces(65, 40, 2);
        check_pieces(4096, 40, 64);
        check_pieces(64, 4000, 4);
    }

    #[test]
    fn rejections_have_reason_and_message() {
        let vm = units::Name::new("a").unwrap();
        for (asked, reason) in [
            (Asked::Refused(Refusal::VmUnknown(vm.clone())), "VM_UNKNOWN"),
            (Asked::Refused(Refusal::Attached { vm: vm.clone(), pid: 7 }), "VM_ATTACHED"),
            (Asked::Refused(Refusal::NotReady { vm, online: 1, slices: 2 }), "VM_NOT_READY"),
        ] {
            let answer = memory(Err(asked));
            let Some(Reply::Rejection(refused)) = &answer[0].0.reply else { panic!("it is a no") };
            assert_eq!(refused.reason, reason);
            assert!(refused.message.contains("VM a"), "{}", refused.message);
        }
    }
}
