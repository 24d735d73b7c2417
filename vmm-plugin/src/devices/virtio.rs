//! Virtio devices behind registers in memory (VIRTIO 1.2, section 4.2). A guest's driver and a device share queues in guest
//! memory; what a guest writes there, and into the registers, is hostile input. A device that is told nonsense stops, tells
//! the driver so, and waits to be reset.

pub mod block;
pub mod net;
mod registers;
pub mod rng;
mod worker;

use std::{io, os::fd::RawFd};

use virtio_queue::{DescriptorChain, Queue, QueueT as _};

use crate::{confine::threads::Work, memory::GuestMemory};

pub use self::{
    registers::{REGISTERS_BYTES, Registers},
    worker::Worker,
};

/// Bits that every device and driver of this version has.
const VERSION_1: u64 = 1 << 32;
/// The sides tell each other when they want to be told.
const EVENT_IDX: u64 = 1 << 29;

/// A run of buffers that a driver hands to a device.
pub type Chain<'a> = DescriptorChain<&'a GuestMemory>;

/// The driver did what no driver may.
#[derive(Debug, thiserror::Error)]
pub enum Broken {
    /// A queue that makes no sense.
    #[error("a queue makes no sense")]
    Queue(#[from] virtio_queue::Error),
    /// Buffers that make no sense.
    #[error("buffers make no sense")]
    Buffers(#[from] io::Error),
}

/// What a device is and does. Everything around it is the same for all.
pub trait Device: Send {
    /// Its kind (VIRTIO 1.2, section 5).
    fn kind(&self) -> u32;

    /// The work of its thread.
    fn work(&self) -> Work;

    /// What it can do, beyond what all can.
    fn features(&self) -> u64;

    /// The sizes of its queues, powers of two.
    fn queues(&self) -> &'static [u16];

    /// What the driver reads of it.
    fn config(&self) -> Vec<u8>;

    /// The driver has chosen some of its features.
    fn chosen(&mut self, _features: u64) {}

    /// Does what one chain asks for. The number of bytes written into it, or `None` if it is to be kept for later.
    ///
    /// # Errors
    /// The chain makes no sense.
    fn serve(&mut self, queue: usize, chain: Chain<'_>, memory: &GuestMemory) -> Result<Option<u32>, Broken>;

    /// What the device itself waits for, and for which of its queues.
    fn source(&self) -> Option<(RawFd, usize)> {
        None
    }
}

/// Serves what lies in a queue. Whether the driver wants to be told.
///
/// # Errors
/// The driver did what no driver may.
pub fn serve_queue(
    device: &mut dyn Device,
    number: usize,
    queue: &mut Queue,
    memory: &GuestMemory,
) -> Result<bool, Broken> {
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
            match device.serve(number, chain, memory)? {
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
