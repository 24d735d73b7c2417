//! Conversion of replies of the driver to messages. Large replies are split into several datagrams,
//! and each error becomes a rejection with a reason.

use std::{os::fd::OwnedFd, sync::Arc};

use pool::agent::Refusal;
use prost::Message as _;
use proto::v1::{self as wire, host_memory_reply::Reply};
use units::limits::{DATAGRAM_BYTES_MAX, DESCRIPTORS_PER_DATAGRAM_MAX};

use crate::{
    driver::{DriverError, VmMemory},
    host::{MemoryRegion, RegionBacking},
};

/// Messages of a reply, each with its file descriptors.
pub(super) type ReplyMessages = Vec<(wire::HostMemoryReply, Vec<Arc<OwnedFd>>)>;

/// Upper bound of the encoding overhead of a datagram, and of each region in it, in bytes.
const OVERHEAD_BYTES: usize = 64;

fn to_message(reply: Reply) -> wire::HostMemoryReply {
    wire::HostMemoryReply { reply: Some(reply) }
}

/// Creates a rejection with a machine-readable reason and a message.
pub(super) fn rejection(reason: &str, text: String) -> ReplyMessages {
    let rejection = wire::Rejection { reason: reason.to_owned(), message: text };
    vec![(to_message(Reply::Rejection(rejection)), Vec::new())]
}

fn to_rejection(error: &DriverError) -> ReplyMessages {
    let reason = match error {
        DriverError::Refused(Refusal::VmUnknown(vm) | Refusal::OtherUser { vm, .. }) => {
            // The same message for both: a caller must not learn that another user's VM exists.
            return rejection("VM_UNKNOWN", format!("no VM {vm} on this host that the caller may use"));
        }
        DriverError::Refused(Refusal::NotReady { .. } | Refusal::NotRecorded { .. }) => "VM_NOT_READY",
        DriverError::Refused(Refusal::Attached { .. } | Refusal::Ended { .. }) => "VM_ATTACHED",
        DriverError::Refused(Refusal::OtherVm { .. }) => "OTHER_VM",
        DriverError::Refused(Refusal::NoDesiredState { .. }) => "NO_DESIRED_STATE",
        DriverError::Host(_) | DriverError::Stopping => "VM_NOT_READY",
    };
    rejection(reason, units::chain(error))
}

pub(super) fn memory_messages(result: Result<VmMemory, DriverError>) -> ReplyMessages {
    match result {
        Ok(VmMemory { regions, pinned }) => split_into_messages(regions, pinned),
        Err(error) => to_rejection(&error),
    }
}

/// Splits regions into messages that fit into a datagram. All messages except the last have `more`
/// set.
fn split_into_messages(regions: Vec<MemoryRegion>, pinned: bool) -> ReplyMessages {
    let mut messages = vec![MemoryMessage::default()];
    for region in regions {
        let (region, descriptor) = to_wire_region(region);
        let bytes = region.encoded_len() + OVERHEAD_BYTES;
        if !messages.last().expect("there is at least one message").fits(bytes) {
            messages.push(MemoryMessage::default());
        }
        messages.last_mut().expect("there is at least one message").add(region, descriptor, bytes);
    }
    let last = messages.len() - 1;
    let memory = |(at, part): (usize, MemoryMessage)| {
        let memory = wire::Memory { regions: part.regions, more: at < last, pinned };
        (to_message(Reply::Memory(memory)), part.descriptors)
    };
    messages.into_iter().enumerate().map(memory).collect()
}

#[derive(Default)]
struct MemoryMessage {
    regions: Vec<wire::Region>,
    descriptors: Vec<Arc<OwnedFd>>,
    bytes: usize,
}

impl MemoryMessage {
    fn fits(&self, bytes: usize) -> bool {
        let space = DATAGRAM_BYTES_MAX - OVERHEAD_BYTES;
        self.regions.len() < DESCRIPTORS_PER_DATAGRAM_MAX && self.bytes + bytes <= space
    }

    fn add(&mut self, region: wire::Region, descriptor: Option<Arc<OwnedFd>>, bytes: usize) {
        self.regions.push(region);
        self.descriptors.extend(descriptor);
        self.bytes += bytes;
    }
}

fn to_wire_region(region: MemoryRegion) -> (wire::Region, Option<Arc<OwnedFd>>) {
    let (path, descriptor) = match region.backing {
        RegionBacking::Descriptor(descriptor) => (String::new(), Some(descriptor)),
        RegionBacking::Path(path) => (path.to_string_lossy().into_owned(), None),
        RegionBacking::VmmAllocated => (String::new(), None),
    };
    let converted = wire::Region {
        slice: region.slice.map(|holding| holding.slice.0),
        emc: region.emc.to_string(),
        epoch: region.slice.map_or(0, |holding| holding.epoch.0),
        bytes: region.bytes.get(),
        offset: region.offset,
        path,
        spare_bytes: region.spare.get(),
    };
    (converted, descriptor)
}

#[cfg(test)]
mod tests {
    use pool::protocol::Holding;
    use units::{Epoch, SLICE, SliceId};

    use super::*;

    fn part(slice: u32, path_bytes: usize) -> MemoryRegion {
        let holding = Holding { slice: SliceId(slice), epoch: Epoch(1) };
        let backing = RegionBacking::Path("x".repeat(path_bytes).into());
        let spare = units::Bytes::ZERO;
        MemoryRegion { slice: Some(holding), emc: "emc".into(), bytes: SLICE, offset: 0, spare, backing }
    }

    fn check_split(parts: u32, path_bytes: usize, expected: usize) {
        let reply = split_into_messages((0..parts).map(|slice| part(slice, path_bytes)).collect(), false);
        assert_eq!(reply.len(), expected);
        let mut slices = Vec::new();
        for (at, (message, _)) in reply.iter().enumerate() {
            assert!(message.encoded_len() <= DATAGRAM_BYTES_MAX);
            let Some(Reply::Memory(memory)) = &message.reply else { panic!("not memory") };
            assert_eq!(memory.more, at + 1 < expected);
            slices.extend(memory.regions.iter().filter_map(|region| region.slice));
        }
        assert_eq!(slices, (0..parts).collect::<Vec<_>>());
    }

    #[test]
    fn memory_reply_is_split_into_fitting_datagrams() {
        check_split(0, 0, 1);
        check_split(64, 40, 1);
        check_split(65, 40, 2);
        check_split(4096, 40, 64);
        check_split(64, 4000, 4);
    }

    fn other_user_refusal(vm: units::Name) -> Refusal {
        let [user, caller] = [2001, 2002].map(|uid| units::UserId::new(uid).unwrap());
        Refusal::OtherUser { vm, user, caller, hint: "" }
    }

    #[test]
    fn vm_of_other_user_is_rejected_like_unknown_vm() {
        let vm = units::Name::new("a").unwrap();
        let reply = |refusal| memory_messages(Err(DriverError::Refused(refusal))).remove(0).0;
        assert_eq!(reply(other_user_refusal(vm.clone())), reply(Refusal::VmUnknown(vm)));
    }

    #[test]
    fn rejections_have_reason_and_message() {
        let vm = units::Name::new("a").unwrap();
        for (error, reason) in [
            (DriverError::Refused(Refusal::VmUnknown(vm.clone())), "VM_UNKNOWN"),
            (DriverError::Refused(other_user_refusal(vm.clone())), "VM_UNKNOWN"),
            (DriverError::Refused(Refusal::Attached { vm: vm.clone(), pid: 7 }), "VM_ATTACHED"),
            (
                DriverError::Refused(Refusal::NoDesiredState { vm: vm.clone(), is_connected: false }),
                "NO_DESIRED_STATE",
            ),
            (DriverError::Refused(Refusal::NotReady { vm, online: 1, slices: 2 }), "VM_NOT_READY"),
        ] {
            let reply = memory_messages(Err(error));
            let Some(Reply::Rejection(rejection)) = &reply[0].0.reply else { panic!("not a rejection") };
            assert_eq!(rejection.reason, reason);
            assert!(rejection.message.contains("VM a"), "{}", rejection.message);
        }
    }
}
