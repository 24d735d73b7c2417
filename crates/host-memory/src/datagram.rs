//! Sends and receives datagrams with file descriptors over a Unix socket. Does not interpret the
//! content of datagrams.

use std::{
    io::{self, IoSlice, IoSliceMut},
    mem::MaybeUninit,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::Arc,
};

use rustix::{
    cmsg_space,
    io::retry_on_intr,
    net::{
        RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
        SendAncillaryMessage, SendFlags, recv, recvmsg, sendmsg,
    },
};
use units::limits::DESCRIPTORS_PER_DATAGRAM_MAX;

/// Size of the control message buffer for the descriptors of one datagram, in bytes.
const CONTROL_MESSAGE_BYTES: usize = cmsg_space!(ScmRights(DESCRIPTORS_PER_DATAGRAM_MAX));

/// Sends one datagram with at most [`DESCRIPTORS_PER_DATAGRAM_MAX`] file descriptors.
pub fn send(socket: &OwnedFd, bytes: &[u8], descriptors: &[Arc<OwnedFd>]) -> io::Result<()> {
    let descriptors: Vec<BorrowedFd<'_>> = descriptors.iter().map(|fd| fd.as_fd()).collect();
    let mut space = [MaybeUninit::uninit(); CONTROL_MESSAGE_BYTES];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() {
        let fits = control.push(SendAncillaryMessage::ScmRights(&descriptors));
        assert!(fits, "a datagram has at most {DESCRIPTORS_PER_DATAGRAM_MAX} descriptors");
    }
    retry_on_intr(|| sendmsg(socket, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL))?;
    Ok(())
}

/// Receives one datagram and returns its length. Returns `None` if the datagram did not fit into
/// the buffer and was truncated. The kernel closes descriptors that were sent with the datagram.
pub fn receive(socket: &OwnedFd, buffer: &mut [u8]) -> io::Result<Option<usize>> {
    let (_, bytes) = retry_on_intr(|| recv(socket, &mut *buffer, RecvFlags::TRUNC))?;
    Ok((bytes <= buffer.len()).then_some(bytes))
}

/// Receives one datagram with file descriptors. Returns the length of the datagram and the
/// descriptors, or `None` if bytes or descriptors were truncated.
pub fn receive_descriptors(socket: &OwnedFd, buffer: &mut [u8]) -> io::Result<Option<(usize, Vec<OwnedFd>)>> {
    let mut space = [MaybeUninit::uninit(); CONTROL_MESSAGE_BYTES];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received = retry_on_intr(|| {
        recvmsg(socket, &mut [IoSliceMut::new(buffer)], &mut control, RecvFlags::CMSG_CLOEXEC)
    })?;
    let mut descriptors = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            descriptors.extend(rights);
        }
    }
    let is_truncated = received.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC);
    Ok((!is_truncated).then_some((received.bytes, descriptors)))
}
