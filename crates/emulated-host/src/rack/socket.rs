//! Connects to the sockets of QEMU. Connections have timeouts, because QEMU serves one client at a
//! time.

use std::{io, os::unix::net::UnixStream, path::Path, time::Duration};

use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect as connect_to, socket_with,
    sockopt::{Timeout, set_socket_timeout},
};

/// Connects to the socket at `path`. The connection attempt, and each read and write, fails with
/// `WouldBlock` after `timeout`.
pub(super) fn connect(path: &Path, timeout: Duration) -> io::Result<UnixStream> {
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    for direction in [Timeout::Send, Timeout::Recv] {
        set_socket_timeout(&socket, direction, Some(timeout))?;
    }
    connect_to(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket.into())
}
