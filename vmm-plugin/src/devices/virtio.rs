//! Virtio devices behind registers in memory (VIRTIO 1.2, section 4.2). A guest's driver and a device share queues in guest
//! memory; what a guest writes there, and into the registers, is hostile input. A device that is told nonsense stops, tells
//! the driver so, and waits to be reset.

pub mod block;
mod mmio;
pub mod net;
pub mod rng;
mod worker;

use std::{io, os::fd::RawFd};

use virtio_queue::{DescriptorChain, Queue, QueueT as _};

use crate::{confine::threads::ThreadRole, memory::GuestMemory};

pub use self::{
    mmio::{MMIO_WINDOW_BYTES, MmioTransport},
    worker::Worker,
};

/// Bits that every device and driver of this version has.
const VIRTIO_F_VERSION_1: u64 = 1 << 32;
/// The sides tell each other when they want to be told.
const VIRTIO_F_EVENT_IDX: u64 = 1 << 29;

/// A run of buffers that a driver hands to a device.
pub type Chain<'a> = DescriptorChain<&'a GuestMemory>;

/// The driver did what no driver may.
#[derive(Debug, thiserror::Error)]
pub enum GuestDriverError {
    /// A queue that makes no sense.
    #[error("a queue makes no sense")]
    Queue(#[from] virtio_queue::Error),
    /// Buffers that make no sense.
    #[error("buffers make no sense")]
    Buffers(#[from] io::Error),
}

/// What a device is and does. Everything around it is the same for all.
pub trait VirtioDevice: Send {
    /// Its kind (VIRTIO 1.2, section 5).
    fn device_type(&self) -> u32;

    /// The work of its thread.
    fn role(&self) -> ThreadRole;

    /// What it can do, beyond what all can.
    fn device_features(&self) -> u64;

    /// The sizes of its queues, powers of two.
    fn queue_sizes(&self) -> &'static [u16];

    /// What the driver reads of it.
    fn config_space(&self) -> Vec<u8>;

    /// The driver has chosen some of its features.
    fn set_driver_features(&mut self, _features: u64) {}

    /// Does what one chain asks for. The number of bytes written into it, or `None` if it is to be kept for later.
    ///
    /// # Errors
    /// The chain makes no sense.
    fn process_chain(
        &mut self,
        queue: usize,
        chain: Chain<'_>,
        memory: &GuestMemory,
    ) -> Result<Option<u32>, GuestDriverError>;

    /// What the device itself waits for, and for which of its queues.
    fn event_source(&self) -> Option<(RawFd, usize)> {
        None
    }
}

/// Serves what lies in a queue. Whether the driver wants to be told.
///
/// # Errors
/// The driver did what no driver may.
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
            return Err(virtio_queue::Error::InvalidAvailRingIndex.into()); // more than the queue can hold is offered
        }
    }
}

#[cfg(test)]
mod tests;
