//! A VMM's side of HostMemory: asks the agent of this host for the memory of one VM and takes the descriptors. What is done
//! with them is the stand-in's business.

use std::{
    fs::File,
    io::{self, IoSlice, IoSliceMut},
    mem::MaybeUninit,
    os::fd::OwnedFd,
    path::Path,
};

use prost::Message as _;
use proto::v1::{self, host_memory_reply::Reply, host_memory_request::Request};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendFlags,
    SocketAddrUnix, SocketFlags, SocketType,
};
use units::limits::{
    DATAGRAM_BYTES_MAX, DESCRIPTORS_PER_DATAGRAM_MAX, REPLAY_STAND_IN_WITHIN, SLICES_PER_VM_MAX,
};

/// One run of a VM's memory, and the file behind it.
#[derive(Debug)]
pub(super) struct Piece {
    pub(super) region: v1::Region,
    pub(super) file: File,
}

/// Why there is no memory.
#[derive(Debug, thiserror::Error)]
pub(super) enum AttachError {
    /// The socket does not do what it should.
    #[error("{tried} the agent's socket")]
    Socket {
        /// "connect to", "ask at", "hear from".
        tried: &'static str,
        /// What the system said.
        #[source]
        errno: io::Error,
    },
    /// The agent said no.
    #[error("{reason}: {message}")]
    Refused {
        /// Machine-readable.
        reason: String,
        /// For people.
        message: String,
    },
    /// The agent broke a promise of its protocol.
    #[error("the agent answered out of turn: {0}")]
    Protocol(&'static str),
}

/// The memory of a VM whose process is the calling one from now on.
pub(super) fn attach(socket: &Path, vm: &str) -> Result<Vec<Piece>, AttachError> {
    let agent = connect(socket).map_err(socket_error("connect to"))?;
    let request = v1::Attach { vm: vm.to_owned(), form: v1::MemoryForm::Descriptors.into() };
    let request = v1::HostMemoryRequest { request: Some(Request::Attach(request)) }.encode_to_vec();
    let mut none = SendAncillaryBuffer::default();
    rustix::net::sendmsg(&agent, &[IoSlice::new(&request)], &mut none, SendFlags::NOSIGNAL)
        .map_err(|errno| socket_error("ask at")(errno.into()))?;
    let mut pieces = Vec::new();
    // As many messages as there are slices, local memory beside them: an agent that sends more is at fault.
    for _ in 0..=SLICES_PER_VM_MAX {
        if !receive(&agent, &mut pieces)? {
            return Ok(pieces);
        }
    }
    Err(AttachError::Protocol("its answer does not come to an end"))
}

fn socket_error(tried: &'static str) -> impl Fn(io::Error) -> AttachError {
    move |errno| AttachError::Socket { tried, errno }
}

fn connect(path: &Path) -> io::Result<OwnedFd> {
    let socket =
        rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    let patience = Some(REPLAY_STAND_IN_WITHIN.as_duration());
    rustix::net::sockopt::set_socket_timeout(&socket, rustix::net::sockopt::Timeout::Recv, patience)?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket)
}

/// One message; whether more follow.
fn receive(agent: &OwnedFd, pieces: &mut Vec<Piece>) -> Result<bool, AttachError> {
    let mut bytes = vec![0; DATAGRAM_BYTES_MAX];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_PER_DATAGRAM_MAX))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let received = rustix::net::recvmsg(
        agent,
        &mut [IoSliceMut::new(&mut bytes)],
        &mut ancillary,
        RecvFlags::CMSG_CLOEXEC,
    );
    let received = received.map_err(|errno| socket_error("hear from")(errno.into()))?.bytes;
    let rights = ancillary.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(descriptors) => Some(descriptors),
        _ => None,
    });
    let descriptors: Vec<OwnedFd> = rights.flatten().collect();
    let reply = v1::HostMemoryReply::decode(&bytes[..received]);
    let reply = reply.map_err(|_| AttachError::Protocol("no message of ours"))?;
    let memory = match reply.reply {
        Some(Reply::Memory(memory)) => memory,
        Some(Reply::Refused(v1::Refused { reason, message })) => {
            return Err(AttachError::Refused { reason, message });
        }
        Some(Reply::Noted(_)) | None => return Err(AttachError::Protocol("neither memory nor a refusal")),
    };
    if memory.regions.len() != descriptors.len() {
        return Err(AttachError::Protocol("not one descriptor for each region"));
    }
    let files = descriptors.into_iter().map(File::from);
    pieces.extend(memory.regions.into_iter().zip(files).map(|(region, file)| Piece { region, file }));
    Ok(memory.more)
}
