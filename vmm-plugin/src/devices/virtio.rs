//! Virtio devices on the MMIO transport (VIRTIO 1.2, section 4.2). Registers and queue memory are
//! hostile input: a device whose driver violates the protocol stops, reports this to the driver,
//! and waits for a reset.

pub mod block;
mod mmio;
pub mod net;
pub mod rng;
mod worker;

use std::{io, os::fd::RawFd};

use virtio_queue::{DescriptorChain, Queue, QueueT as _};

use crate::{memory::GuestMemory, thread_role::ThreadRole};

pub use self::{
    mmio::{MMIO_WINDOW_BYTES, MmioTransport},
    worker::Worker,
};

/// Feature of the current, non-legacy interface.
const VIRTIO_F_VERSION_1: u64 = 1 << 32;
/// Feature for suppressing notifications and interrupts by ring index.
const VIRTIO_F_EVENT_IDX: u64 = 1 << 29;

/// A descriptor chain of a queue.
pub type Chain<'a> = DescriptorChain<&'a GuestMemory>;

/// The driver violated the virtio protocol.
#[derive(Debug, thiserror::Error)]
pub enum GuestDriverError {
    /// A queue is invalid.
    #[error("invalid queue")]
    Queue(#[from] virtio_queue::Error),
    /// A descriptor chain is invalid.
    #[error("invalid descriptor chain")]
    Buffers(#[from] io::Error),
}

/// A device type. The transport and the worker are the same for all types.
pub trait VirtioDevice: Send {
    /// Returns the device ID (VIRTIO 1.2, section 5).
    fn device_type(&self) -> u32;

    /// Returns the role of the device's thread.
    fn role(&self) -> ThreadRole;

    /// Returns the device-specific feature bits.
    fn device_features(&self) -> u64;

    /// Returns the maximum size of each queue, powers of two.
    fn queue_sizes(&self) -> &'static [u16];

    /// Returns the content of the configuration space.
    fn config_space(&self) -> Vec<u8>;

    /// Applies the negotiated feature bits.
    fn set_driver_features(&mut self, _features: u64) {}

    /// Processes one descriptor chain. Returns the number of bytes written to it, or `None` if the
    /// chain is to stay available.
    ///
    /// # Errors
    /// [`GuestDriverError`] if the chain is invalid.
    fn process_chain(
        &mut self,
        queue: usize,
        chain: Chain<'_>,
        memory: &GuestMemory,
    ) -> Result<Option<u32>, GuestDriverError>;

    /// Returns a descriptor that the device polls, and the queue that it feeds.
    fn event_source(&self) -> Option<(RawFd, usize)> {
        None
    }
}

/// Processes all available chains of a queue. Returns whether the driver requests an interrupt.
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
    let (mut served, mut empty_rounds) = (false, 0);
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
                    return Ok(served && queue.needs_notification(memory)?);
                }
            }
            served = true;
        }
        if !queue.enable_notification(memory)? {
            return Ok(served && queue.needs_notification(memory)?);
        }
        if empty_rounds > 1 {
            return Err(virtio_queue::Error::InvalidAvailRingIndex.into()); // more chains are available than the queue can hold
        }
    }
}

#[cfg(test)]
mod tests;
