//! Fake host agent that provides the slices of VMs on a socket, without checking the caller.

use std::{
    fs::File,
    os::fd::OwnedFd,
    os::unix::fs::FileExt as _,
    path::{Path, PathBuf},
    sync::Arc,
};

use host_memory::datagram;
use prost::Message as _;
use proto::v1;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use super::rack::Rack;

/// Fault of the fake agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    None,
    /// Provides slices that are not zeroed.
    Dirty,
    /// Provides the grant of the previous epoch instead of the current one.
    Stale,
    /// Rejects every request.
    Rejects,
}

/// Serves requests on a separate thread until the process of the test ends.
pub fn serve(socket: &Path, emc: &Path, rack: Rack, fault: Fault) {
    let flags = SocketFlags::CLOEXEC;
    let listener = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
    rustix::net::bind(&listener, &SocketAddrUnix::new(socket).unwrap()).unwrap();
    rustix::net::listen(&listener, 128).unwrap();
    std::fs::create_dir(emc.join("slices")).unwrap();
    let slices = emc.join("slices");
    std::thread::spawn(move || {
        while let Ok(peer) = rustix::net::accept_with(&listener, flags) {
            reply(&peer, &slices, &rack, fault);
        }
    });
}

fn reply(peer: &OwnedFd, slices: &Path, rack: &Rack, fault: Fault) {
    let mut bytes = [0; 4096];
    let length = datagram::receive(peer, &mut bytes).unwrap().expect("a short request");
    let request = v1::HostMemoryRequest::decode(&bytes[..length]).unwrap();
    let Some(v1::host_memory_request::Request::Attach(attach)) = request.request else { panic!() };
    if fault == Fault::Rejects {
        let rejection = v1::Rejection { reason: "VM_NOT_READY".into(), message: "not yet".into() };
        return send(peer, v1::host_memory_reply::Reply::Rejection(rejection), Vec::new());
    }
    let files: Vec<(v1::Region, File)> = slice_grants(rack, &attach.vm, fault)
        .map(|(slice, epoch)| (region(slice, epoch), file(slices, slice, epoch, fault)))
        .collect();
    // Each message has one slice, so that a reply consists of several messages.
    let last = files.len();
    for (n, (region, file)) in (1..).zip(files) {
        let memory = v1::Memory { regions: vec![region], more: n < last, pinned: false };
        send(peer, v1::host_memory_reply::Reply::Memory(memory), vec![file]);
    }
}

fn slice_grants(rack: &Rack, vm: &str, fault: Fault) -> impl Iterator<Item = (u32, u64)> {
    let epochs_behind = u64::from(fault == Fault::Stale);
    let slots = rack.state().slots.clone();
    let owned =
        slots.into_iter().enumerate().filter(|(_, slot)| slot.owner.as_ref().is_some_and(|o| o.0 == vm));
    owned
        .map(move |(n, slot)| (u32::try_from(n).unwrap(), slot.epoch - epochs_behind))
        .collect::<Vec<_>>()
        .into_iter()
}

fn region(slice: u32, epoch: u64) -> v1::Region {
    v1::Region { slice: Some(slice), epoch, bytes: 1 << 30, emc: "e".into(), ..Default::default() }
}

fn file(slices: &Path, slice: u32, epoch: u64, fault: Fault) -> File {
    let path: PathBuf = slices.join(format!("{slice:05}.{epoch}.h0"));
    let file = File::options().read(true).write(true).create(true).truncate(false).open(path).unwrap();
    file.set_len(1 << 30).unwrap();
    if fault == Fault::Dirty {
        file.write_all_at(b"secret", 1 << 29).unwrap();
    }
    file
}

fn send(peer: &OwnedFd, reply: v1::host_memory_reply::Reply, files: Vec<File>) {
    let bytes = v1::HostMemoryReply { reply: Some(reply) }.encode_to_vec();
    let descriptors: Vec<Arc<OwnedFd>> = files.into_iter().map(|file| Arc::new(file.into())).collect();
    datagram::send(peer, &bytes, &descriptors).unwrap();
}
