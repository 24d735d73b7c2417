//! Connections to QEMU's sockets, which take one caller at a time: whoever waits does not wait for ever.

use std::{io, os::unix::net::UnixStream, path::Path, time::Duration};

use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect as connect_to, socket_with,
    sockopt::{Timeout, set_socket_timeout},
};

/// Connects. Connecting, and each reading and writing, takes no longer than `patience`: it ends with `WouldBlock`.
pub(super) fn connect(at: &Path, timeout: Duration) -> io::Result<UnixStream> {
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    for what in [Timeout::Send, Timeout::Recv] {
        set_socket_timeout(&socket, what, Some(timeout))?;
    }
    connect_to(&socket, &SocketAddrUnix::new(at)?)?;
    Ok(socket.into())
}
