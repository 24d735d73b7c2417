//! Virtio devices on the MMIO transport (VIRTIO 1.2, section 4.2). The driver may be hostile. If
//! the driver violates the protocol, the device sets DEVICE_NEEDS_RESET and stops until a reset.

pub mod block;
mod mmio;
pub mod net;
pub mod rng;
mod worker;

use std::{io, os::fd::RawFd};

use virtio_queue::{DescriptorChain, Queue, QueueT as _};

use crate::{memory::GuestMemory, thread_role::ThreadRole};

pub use self::{
    mmio::{MMIO_WINDOW_BYTES, MmioTransport, QuiescedDevice},
    worker::Worker,
};

/// Feature bit of the non-legacy interface (VIRTIO 1.0 or newer).
const VIRTIO_F_VERSION_1: u64 = 1 << 32;
/// Feature bit for suppressing notifications and interrupts by ring index.
const VIRTIO_F_EVENT_IDX: u64 = 1 << 29;

/// Descriptor chain of a queue, in guest memory.
pub type Chain<'a> = DescriptorChain<&'a GuestMemory>;

/// Error returned when the driver violates the virtio protocol.
#[derive(Debug, thiserror::Error)]
pub enum GuestDriverError {
    /// The configuration or the rings of a queue are invalid.
    #[error("invalid queue")]
    Queue(#[from] virtio_queue::Error),
    /// A descriptor chain is invalid, such as a chain that is too short.
    #[error("invalid descriptor chain")]
    Buffers(#[from] io::Error),
}

/// Type-specific part of a virtio device. All types share the transport and the worker.
pub trait VirtioDevice: Send {
    /// Returns the virtio device ID of the type (VIRTIO 1.2, section 5).
    fn device_type(&self) -> u32;

    /// Returns the role of the thread that serves the device.
    fn thread_role(&self) -> ThreadRole;

    /// Returns the feature bits that are specific to the device type.
    fn device_features(&self) -> u64;

    /// Returns the maximum size of each queue, a power of two.
    fn queue_sizes(&self) -> &'static [u16];

    /// Returns the content of the device-specific configuration space.
    fn config_space(&self) -> Vec<u8>;

    /// Applies the feature bits that the driver accepted.
    fn set_driver_features(&mut self, _features: u64) {}

    /// Processes one descriptor chain. Returns the number of bytes written to the chain. Returns
    /// `None` if the device cannot use the chain yet; the chain then stays available.
    ///
    /// # Errors
    /// [`GuestDriverError`] if the chain is invalid.
    fn process_chain(
        &mut self,
        queue: usize,
        chain: Chain<'_>,
        memory: &GuestMemory,
    ) -> Result<Option<u32>, GuestDriverError>;

    /// Returns a file descriptor that the worker polls, and the index of the queue to process when
    /// the descriptor is readable.
    fn event_source(&self) -> Option<(RawFd, usize)> {
        None
    }
}

/// Processes all available descriptor chains of a queue. Returns whether the driver requests an
/// interrupt.
///
/// # Errors
/// [`GuestDriverError`] if the driver violated the protocol.
pub fn process_queue(
    device: &mut dyn VirtioDevice,
    number: usize,
    queue: &mut Queue,
    memory: &GuestMemory,
) -> Result<bool, GuestDriverError> {
    if !queue.ready() {
        return Ok(false);
    }
    let (mut has_used_chain, mut empty_rounds) = (false, 0);
    loop {
        queue.disable_notification(memory)?;
        empty_rounds += 1;
        while let Some(chain) = queue.pop_descriptor_chain(memory) {
            empty_rounds = 0;
            let head = chain.head_index();
            match device.process_chain(number, chain, memory)? {
                Some(bytes) => queue.add_used(memory, head, bytes)?,
                None => {
                    let back = queue.next_avail().wrapping_sub(1);
                    queue.set_next_avail(back);
                    queue.enable_notification(memory)?;
                    return Ok(has_used_chain && queue.needs_notification(memory)?);
                }
            }
            has_used_chain = true;
        }
        if !queue.enable_notification(memory)? {
            return Ok(has_used_chain && queue.needs_notification(memory)?);
        }
        if empty_rounds > 1 {
            // The driver's available index is ahead by more than the queue size.
            return Err(virtio_queue::Error::InvalidAvailRingIndex.into());
        }
    }
}

#[cfg(test)]
mod tests;
