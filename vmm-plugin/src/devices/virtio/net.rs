//! Network device (VIRTIO 1.2, section 5.1) on a tap device of the host. The device has one queue
//! pair and no offloads.

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
/// Maximum length of a frame with its virtio-net header, in bytes.
const FRAME_BYTES_MAX: usize = 65_562;
/// Size of the virtio-net header, in bytes.
const VNET_HEADER_BYTES: usize = 12;
/// Byte range of `num_buffers` in the virtio-net header. The tap device does not set this field.
const NUM_BUFFERS_FIELD: std::ops::Range<usize> = 10..12;

/// Unicast MAC address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MacAddress(pub [u8; 6]);

impl fmt::Display for MacAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.map(|byte| format!("{byte:02x}")).join(":"))
    }
}

/// Error returned when a text is not a unicast MAC address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a unicast MAC address, such as 52:54:00:12:34:56")]
pub struct MacAddressError;

impl std::str::FromStr for MacAddress {
    type Err = MacAddressError;

    fn from_str(text: &str) -> Result<Self, MacAddressError> {
        const MULTICAST_ADDRESS_BIT: u8 = 1;
        let pairs = text.split(':').map(|pair| match pair.len() {
            2 => u8::from_str_radix(pair, 16).map_err(|_| MacAddressError),
            _ => Err(MacAddressError),
        });
        let bytes = pairs.collect::<Result<Vec<u8>, _>>()?;
        let bytes = <[u8; 6]>::try_from(bytes).map_err(|_| MacAddressError)?;
        if bytes[0] & MULTICAST_ADDRESS_BIT == 0 { Ok(Self(bytes)) } else { Err(MacAddressError) }
    }
}

/// Network device of a guest.
#[derive(Debug)]
pub struct VirtioNet {
    tap: File,
    mac: MacAddress,
    /// Buffer for one frame.
    frame: Vec<u8>,
}

impl VirtioNet {
    /// Creates a network device on the tap device with this name.
    ///
    /// # Errors
    /// The error returned by [`tap::open`].
    pub fn open(tap_name: &str, mac: MacAddress) -> io::Result<Self> {
        Ok(Self::from_tap(tap::open(tap_name)?, mac))
    }

    /// Creates a network device on an open tap device.
    pub(super) fn from_tap(tap: File, mac: MacAddress) -> Self {
        Self { tap, mac, frame: vec![0; FRAME_BYTES_MAX] }
    }

    fn receive(&mut self, chain: Chain<'_>, memory: &GuestMemory) -> Result<Option<u32>, GuestDriverError> {
        // The read fails if no frame is available or the tap device is down.
        let Ok(bytes) = self.tap.read(&mut self.frame) else { return Ok(None) };
        self.frame[NUM_BUFFERS_FIELD].copy_from_slice(&1_u16.to_le_bytes());
        let mut writer = chain.writer(memory)?;
        // A frame that exceeds the chain is truncated, because the device has no mergeable buffers.
        let written = bytes.min(writer.available_bytes());
        writer.write_all(&self.frame[..written])?;
        Ok(Some(u32::try_from(written).expect("a frame has at most FRAME_BYTES_MAX bytes")))
    }

    fn transmit(&mut self, chain: Chain<'_>, memory: &GuestMemory) -> Result<Option<u32>, GuestDriverError> {
        let mut reader = chain.reader(memory)?;
        let bytes = reader.available_bytes();
        if bytes <= FRAME_BYTES_MAX {
            let frame = &mut self.frame[..bytes];
            reader.read_exact(frame)?;
            // Offloads are not negotiated, so the header must not request offloads from the host.
            frame[..bytes.min(VNET_HEADER_BYTES)].fill(0);
            let _ = self.tap.write(frame); // a network may lose frames
        }
        Ok(Some(0))
    }
}

impl VirtioDevice for VirtioNet {
    fn device_type(&self) -> u32 {
        VIRTIO_ID_NET
    }

    fn thread_role(&self) -> ThreadRole {
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
