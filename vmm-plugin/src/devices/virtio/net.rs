//! Network device (VIRTIO 1.2, section 5.1) on a tap device of the host: one queue pair, no
//! offloads.

use std::{
    fmt,
    fs::File,
    io::{self, Read as _, Write as _},
    os::fd::{AsRawFd as _, RawFd},
};

use super::{Chain, GuestDriverError, VirtioDevice};
use crate::{memory::GuestMemory, tap, thread_role::ThreadRole};

const VIRTIO_ID_NET: u32 = 1;
const RECEIVE_QUEUE: usize = 0;
const TRANSMIT_QUEUE: usize = 1;
const QUEUE_SIZES: &[u16] = &[256, 256];
const VIRTIO_NET_F_MAC: u64 = 1 << 5;
/// Maximum frame length, including the virtio-net header.
const FRAME_BYTES_MAX: usize = 65_562;
const HEADER_BYTES: usize = 12;
/// Position of `num_buffers` in the header, which the tap device does not fill in.
const NUM_BUFFERS_FIELD: std::ops::Range<usize> = 10..12;

/// A unicast MAC address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MacAddress(pub [u8; 6]);

impl fmt::Display for MacAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.map(|byte| format!("{byte:02x}")).join(":"))
    }
}

/// The text is not a unicast MAC address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a unicast MAC address, such as 52:54:00:12:34:56")]
pub struct MacAddressError;

impl std::str::FromStr for MacAddress {
    type Err = MacAddressError;

    fn from_str(text: &str) -> Result<Self, MacAddressError> {
        const GROUP_BIT: u8 = 1;
        let pairs = text.split(':').map(|pair| match pair.len() {
            2 => u8::from_str_radix(pair, 16).map_err(|_| MacAddressError),
            _ => Err(MacAddressError),
        });
        let bytes = pairs.collect::<Result<Vec<u8>, _>>()?;
        let bytes = <[u8; 6]>::try_from(bytes).map_err(|_| MacAddressError)?;
        if bytes[0] & GROUP_BIT == 0 { Ok(Self(bytes)) } else { Err(MacAddressError) }
    }
}

/// A network device.
#[derive(Debug)]
pub struct VirtioNet {
    tap: File,
    mac: MacAddress,
    /// Buffer for one frame.
    frame: Vec<u8>,
}

impl VirtioNet {
    /// Opens a tap device as the backend of a network device.
    ///
    /// # Errors
    /// The error of opening the tap device.
    pub fn open(tap_name: &str, mac: MacAddress) -> io::Result<Self> {
        Ok(Self::from_tap(tap::open(tap_name)?, mac))
    }

    /// Creates a network device on an open tap device.
    pub(super) fn from_tap(tap: File, mac: MacAddress) -> Self {
        Self { tap, mac, frame: vec![0; FRAME_BYTES_MAX] }
    }

    fn receive(&mut self, chain: Chain<'_>, memory: &GuestMemory) -> Result<Option<u32>, GuestDriverError> {
        let Ok(bytes) = self.tap.read(&mut self.frame) else { return Ok(None) }; // no frame is available, or the tap device is down
        self.frame[NUM_BUFFERS_FIELD].copy_from_slice(&1_u16.to_le_bytes());
        let mut writer = chain.writer(memory)?;
        let fits = bytes.min(writer.available_bytes()); // a longer frame is truncated: mergeable buffers are not offered
        writer.write_all(&self.frame[..fits])?;
        Ok(Some(u32::try_from(fits).expect("a frame is shorter than 64 KiB + header")))
    }

    fn transmit(&mut self, chain: Chain<'_>, memory: &GuestMemory) -> Result<Option<u32>, GuestDriverError> {
        let mut reader = chain.reader(memory)?;
        let bytes = reader.available_bytes();
        if bytes <= FRAME_BYTES_MAX {
            let frame = &mut self.frame[..bytes];
            reader.read_exact(frame)?;
            frame[..bytes.min(HEADER_BYTES)].fill(0); // the header could request offloads from the host's kernel, none of which were negotiated
            let _ = self.tap.write(frame); // frames may be lost
        }
        Ok(Some(0))
    }
}

impl VirtioDevice for VirtioNet {
    fn device_type(&self) -> u32 {
        VIRTIO_ID_NET
    }

    fn role(&self) -> ThreadRole {
        ThreadRole::Net
    }

    fn device_features(&self) -> u64 {
        VIRTIO_NET_F_MAC
    }

    fn queue_sizes(&self) -> &'static [u16] {
        QUEUE_SIZES
    }

    fn config_space(&self) -> Vec<u8> {
        self.mac.0.to_vec()
    }

    fn process_chain(
        &mut self,
        queue: usize,
        chain: Chain<'_>,
        memory: &GuestMemory,
    ) -> Result<Option<u32>, GuestDriverError> {
        match queue {
            RECEIVE_QUEUE => self.receive(chain, memory),
            TRANSMIT_QUEUE => self.transmit(chain, memory),
            _ => Ok(Some(0)),
        }
    }

    fn event_source(&self) -> Option<(RawFd, usize)> {
        Some((self.tap.as_raw_fd(), RECEIVE_QUEUE))
    }
}
