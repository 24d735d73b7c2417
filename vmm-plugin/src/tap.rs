//! Opens tap devices of the host. A virtio-net header precedes each frame. `devices::virtio::net`
//! sends and receives the frames.

use std::{
    fs::{File, OpenOptions},
    io,
    os::unix::fs::OpenOptionsExt as _,
};

use vmm_sys_util::ioctl::{ioctl_with_mut_ref, ioctl_with_ref, ioctl_with_val};

/// Numbers of ioctls, from linux/if_tun.h.
const TUNSETIFF: libc::c_ulong = 0x4004_54ca;
const TUNSETVNETHDRSZ: libc::c_ulong = 0x4004_54d8;
const TUNSETOFFLOAD: libc::c_ulong = 0x4004_54d0;
const TAP_FLAGS: libc::c_int = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR;
/// Size of `virtio_net_hdr_mrg_rxbuf`, which precedes each frame, in bytes.
const VNET_HEADER_BYTES: libc::c_int = 12;

/// Opens a tap device by name. If the device does not exist, the kernel creates a device that is
/// removed on close.
///
/// # Errors
/// `InvalidInput` if `name` is not 1 to 15 printable ASCII characters, and the error of the system
/// call that failed.
pub fn open(name: &str) -> io::Result<File> {
    let mut request = libc::ifreq {
        ifr_name: [0; libc::IFNAMSIZ],
        ifr_ifru: libc::__c_anonymous_ifr_ifru {
            ifru_flags: libc::c_short::try_from(TAP_FLAGS).expect("the flags have 16 bits"),
        },
    };
    if name.is_empty() || name.len() >= libc::IFNAMSIZ || !name.bytes().all(|byte| byte.is_ascii_graphic()) {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "must be 1 to 15 printable ASCII characters",
        ));
    }
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = libc::c_char::try_from(from).expect("the name is ASCII");
    }
    let tap =
        OpenOptions::new().read(true).write(true).custom_flags(libc::O_NONBLOCK).open("/dev/net/tun")?;
    // SAFETY: TUNSETIFF reads and writes an ifreq. `request` is an ifreq that is borrowed mutably.
    let named = unsafe { ioctl_with_mut_ref(&tap, TUNSETIFF, &mut request) };
    check_ioctl(named)?;
    // SAFETY: TUNSETVNETHDRSZ reads an int, which is the type of VNET_HEADER_BYTES.
    let sized = unsafe { ioctl_with_ref(&tap, TUNSETVNETHDRSZ, &VNET_HEADER_BYTES) };
    check_ioctl(sized)?;
    // A persistent tap device may still have offloads enabled by its previous user. With offloads,
    // the host would send larger frames than the network device accepts.
    // SAFETY: TUNSETOFFLOAD takes an integer.
    let offloads = unsafe { ioctl_with_val(&tap, TUNSETOFFLOAD, 0) };
    check_ioctl(offloads)?;
    Ok(tap)
}

fn check_ioctl(returned: libc::c_int) -> io::Result<()> {
    if returned < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
