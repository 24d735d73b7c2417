//! One datagram with descriptors beside it, in and out. What the bytes mean is not known here.

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

/// Room for the descriptors of one datagram.
const CONTROL_BYTES: usize = cmsg_space!(ScmRights(DESCRIPTORS_PER_DATAGRAM_MAX));

/// Sends one datagram.
pub fn send(socket: &OwnedFd, bytes: &[u8], descriptors: &[Arc<OwnedFd>]) -> io::Result<()> {
    let descriptors: Vec<BorrowedFd<'_>> = descriptors.iter().map(|fd| fd.as_fd()).collect();
    let mut space = [MaybeUninit::uninit(); CONTROL_BYTES];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() {
        let fits = control.push(SendAncillaryMessage::ScmRights(&descriptors));
        assert!(fits, "a datagram has at most {DESCRIPTORS_PER_DATAGRAM_MAX} descriptors");
    }
    retry_on_intr(|| sendmsg(socket, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL))?;
    Ok(())
}

/// Receives one datagram without descriptors: any that come with it are closed by the kernel. `None` if it was longer
/// than the buffer; its rest is lost.
pub fn receive(socket: &OwnedFd, buffer: &mut [u8]) -> io::Result<Option<usize>> {
    let (_, bytes) = retry_on_intr(|| recv(socket, &mut *buffer, RecvFlags::TRUNC))?;
    Ok((bytes <= buffer.len()).then_some(bytes))
}

/// Receives one datagram with its descriptors. `None` if bytes or descriptors did not fit.
pub fn receive_descriptors(socket: &OwnedFd, buffer: &mut [u8]) -> io::Result<Option<(usize, Vec<OwnedFd>)>> {
    let mut space = [MaybeUninit::uninit(); CONTROL_BYTES];
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
    let cut = received.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC);
    Ok((!cut).then_some((received.bytes, descriptors)))
}
