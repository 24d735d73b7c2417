//! A tap device of the host: what is written to it the host receives, and what the host sends there is read.

use std::{
    fs::{File, OpenOptions},
    io,
    os::unix::fs::OpenOptionsExt as _,
};

use vmm_sys_util::ioctl::{ioctl_with_mut_ref, ioctl_with_ref, ioctl_with_val};

/// From linux/if_tun.h.
const TUNSETIFF: libc::c_ulong = 0x4004_54ca;
const TUNSETVNETHDRSZ: libc::c_ulong = 0x4004_54d8;
const TUNSETOFFLOAD: libc::c_ulong = 0x4004_54d0;
const FLAGS: libc::c_int = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR;
/// The header that virtio puts before a frame.
const HEADER_BYTES: libc::c_int = 12;

/// Opens a tap device, or makes one that goes when it is closed.
///
/// # Errors
/// No right to it, not a tap device, or a name that is none.
pub fn open(name: &str) -> io::Result<File> {
    let mut request = libc::ifreq {
        ifr_name: [0; libc::IFNAMSIZ],
        ifr_ifru: libc::__c_anonymous_ifr_ifru {
            ifru_flags: libc::c_short::try_from(FLAGS).expect("16 bits"),
        },
    };
    if name.is_empty() || name.len() >= libc::IFNAMSIZ || !name.bytes().all(|byte| byte.is_ascii_graphic()) {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "must be 1 to 15 letters"));
    }
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = libc::c_char::try_from(from).expect("ASCII");
    }
    let tap =
        OpenOptions::new().read(true).write(true).custom_flags(libc::O_NONBLOCK).open("/dev/net/tun")?;
    // SAFETY: TUNSETIFF reads an ifreq and writes it back, which `request` is and nobody else has.
    let named = unsafe { ioctl_with_mut_ref(&tap, TUNSETIFF, &mut request) };
    checked(named)?;
    // SAFETY: TUNSETVNETHDRSZ reads an int.
    let sized = unsafe { ioctl_with_ref(&tap, TUNSETVNETHDRSZ, &HEADER_BYTES) };
    checked(sized)?;
    // What the device's last user wanted of it outlives him: the host would send frames larger than ours.
    // SAFETY: TUNSETOFFLOAD takes a number.
    let plain = unsafe { ioctl_with_val(&tap, TUNSETOFFLOAD, 0) };
    checked(plain)?;
    Ok(tap)
}

fn checked(returned: libc::c_int) -> io::Result<()> {
    if returned < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
