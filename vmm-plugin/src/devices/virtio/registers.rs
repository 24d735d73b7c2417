//! The registers of one device, as a driver reads and writes them.

use std::{
    os::fd::RawFd,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU32, Ordering},
    },
};

use virtio_queue::{Queue, QueueT as _};
use vmm_sys_util::eventfd::EventFd;

use super::{Broken, Device, EVENT_IDX, VERSION_1, serve_queue};
use crate::{confine::threads::Work, memory::GuestMemory};

/// How large a device's window is.
pub const REGISTERS_BYTES: u32 = 0x1000;
/// Where a device's own registers begin.
const CONFIG: u64 = 0x100;
/// What the first register reads: "virt".
const MAGIC: u32 = 0x7472_6976;
const VERSION: u32 = 2;
/// "TARN", for whoever asks who made it.
const VENDOR: u32 = u32::from_le_bytes(*b"TARN");

/// The register of a queue that is written to tell the device of it.
pub(super) const QUEUE_NOTIFY: u64 = 0x50;

const INTERRUPT_QUEUE: u32 = 1;
const INTERRUPT_CONFIG: u32 = 2;

const STATUS_DRIVER_OK: u32 = 4;
const STATUS_FEATURES_OK: u32 = 8;
const STATUS_NEEDS_RESET: u32 = 64;

/// One device and the registers in front of it.
#[derive(Debug)]
pub struct Registers {
    shared: Mutex<Shared>,
    /// Apart, so that a driver that acknowledges never waits for a device at work.
    interrupts: AtomicU32,
    line: EventFd,
    memory: GuestMemory,
    kind: u32,
    config: Vec<u8>,
    sizes: &'static [u16],
}

struct Shared {
    device: Box<dyn Device>,
    queues: Vec<Queue>,
    offered: u64,
    chosen: u64,
    offered_page: u32,
    chosen_page: u32,
    queue: usize,
    status: u32,
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared").field("status", &self.status).finish_non_exhaustive()
    }
}

fn queues(sizes: &[u16]) -> Vec<Queue> {
    sizes.iter().map(|size| Queue::new(*size).expect("a device's sizes are powers of two")).collect()
}

impl Registers {
    /// Of a device that asks for attention through `line`.
    pub fn new(device: Box<dyn Device>, line: EventFd, memory: GuestMemory) -> Arc<Self> {
        let (kind, config, sizes) = (device.kind(), device.config(), device.queues());
        let offered = device.features() | VERSION_1 | EVENT_IDX;
        let shared = Shared {
            device,
            queues: queues(sizes),
            offered,
            chosen: 0,
            offered_page: 0,
            chosen_page: 0,
            queue: 0,
            status: 0,
        };
        let interrupts = AtomicU32::new(0);
        Arc::new(Self { shared: Mutex::new(shared), interrupts, line, memory, kind, config, sizes })
    }

    /// Poisoned only where tests panic: in a VMM a panic is the end of the process.
    fn lock(&self) -> MutexGuard<'_, Shared> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The work of the device's thread.
    pub(super) fn work(&self) -> Work {
        self.lock().device.work()
    }

    /// How many queues there are.
    pub(super) fn queues(&self) -> usize {
        self.sizes.len()
    }

    /// The driver reads.
    pub fn read(&self, at: u64, data: &mut [u8]) {
        if let Some(offset) = at.checked_sub(CONFIG) {
            let from = usize::try_from(offset).unwrap_or(usize::MAX).min(self.config.len());
            let there = (self.config.len() - from).min(data.len());
            data.fill(0);
            data[..there].copy_from_slice(&self.config[from..from + there]);
        } else if let Ok(data) = <&mut [u8; 4]>::try_from(data) {
            *data = self.register(at).to_le_bytes();
        }
    }

    fn register(&self, at: u64) -> u32 {
        const INTERRUPT_STATUS: u64 = 0x60;
        match at {
            0x00 => return MAGIC,
            0x04 => return VERSION,
            0x08 => return self.kind,
            0x0c => return VENDOR,
            INTERRUPT_STATUS => return self.interrupts.load(Ordering::SeqCst),
            _ => {}
        }
        let shared = self.lock();
        let queue = shared.queues.get(shared.queue);
        match at {
            0x10 if shared.offered_page < 2 => low(shared.offered >> (32 * shared.offered_page)),
            0x34 => queue.map_or(0, |queue| u32::from(queue.max_size())),
            0x44 => queue.map_or(0, |queue| u32::from(queue.ready())),
            0x70 => shared.status,
            _ => 0,
        }
    }

    /// The driver writes.
    pub fn write(&self, at: u64, data: &[u8]) {
        const INTERRUPT_ACKNOWLEDGE: u64 = 0x64;
        const STATUS: u64 = 0x70;
        let Ok(value) = <[u8; 4]>::try_from(data).map(u32::from_le_bytes) else { return };
        match at {
            INTERRUPT_ACKNOWLEDGE => drop(self.interrupts.fetch_and(!value, Ordering::SeqCst)),
            STATUS => self.set_status(value),
            _ => self.lock().set(at, value),
        }
    }

    fn set_status(&self, status: u32) {
        let mut shared = self.lock();
        if status == 0 {
            shared.queues = queues(self.sizes);
            (shared.chosen, shared.status, shared.queue) = (0, 0, 0);
            self.interrupts.store(0, Ordering::SeqCst);
            return;
        }
        let (was_up, added) = (shared.is_up(), status & !shared.status);
        shared.status |= status; // what was said is taken back by a reset, and by nothing else
        if added & STATUS_FEATURES_OK != 0 && !shared.takes_features() {
            shared.status &= !STATUS_FEATURES_OK;
        }
        if !was_up && shared.is_up() {
            shared.begin(&self.memory);
        }
    }

    /// Serves a queue, and tells the driver if it wants to be told.
    ///
    /// # Errors
    /// The driver did what no driver may: the device stops until it is reset.
    pub(super) fn serve(&self, number: usize) -> Result<(), Broken> {
        let mut shared = self.lock();
        match shared.serve(number, &self.memory) {
            Ok(true) => self.interrupt(INTERRUPT_QUEUE),
            Ok(false) => {}
            Err(broken) => {
                shared.status |= STATUS_NEEDS_RESET;
                self.interrupt(INTERRUPT_CONFIG);
                return Err(broken);
            }
        }
        Ok(())
    }

    /// What the device waits for besides its queues, and for which of them.
    pub(super) fn source(&self) -> Option<(RawFd, usize)> {
        self.lock().device.source()
    }

    /// Whether the driver is up and has put buffers into a queue that were not used yet.
    pub(super) fn has_buffers(&self, number: usize) -> bool {
        let shared = self.lock();
        let queue = shared.queues.get(number).filter(|queue| shared.is_up() && queue.ready());
        queue.is_some_and(|queue| {
            let offered = queue.avail_idx(&self.memory, Ordering::Acquire);
            offered.is_ok_and(|offered| offered.0 != queue.next_avail())
        })
    }

    fn interrupt(&self, why: u32) {
        self.interrupts.fetch_or(why, Ordering::SeqCst);
        let _ = self.line.write(1); // full means that it is told anyway
    }
}

impl Shared {
    fn is_up(&self) -> bool {
        const UP: u32 = STATUS_FEATURES_OK | STATUS_DRIVER_OK;
        self.status & (UP | STATUS_NEEDS_RESET) == UP
    }

    /// A driver of an older version would take the queues for something else.
    fn takes_features(&self) -> bool {
        self.chosen & !self.offered == 0 && self.chosen & VERSION_1 != 0
    }

    fn begin(&mut self, memory: &GuestMemory) {
        let Self { device, queues, chosen, .. } = self;
        device.chosen(*chosen);
        queues.iter_mut().for_each(|queue| queue.set_event_idx(*chosen & EVENT_IDX != 0));
        if queues.iter().any(|queue| queue.ready() && !queue.is_valid(memory)) {
            self.status |= STATUS_NEEDS_RESET;
        }
    }

    fn serve(&mut self, number: usize, memory: &GuestMemory) -> Result<bool, Broken> {
        if !self.is_up() {
            return Ok(false);
        }
        let Self { device, queues, .. } = self;
        queues.get_mut(number).map_or(Ok(false), |queue| serve_queue(device.as_mut(), number, queue, memory))
    }

    fn set(&mut self, at: u64, value: u32) {
        let running = self.status & STATUS_DRIVER_OK != 0;
        let features_fixed = self.status & STATUS_FEATURES_OK != 0;
        match at {
            0x14 => self.offered_page = value,
            0x24 => self.chosen_page = value,
            0x20 if self.chosen_page < 2 && !features_fixed => {
                let shift = 32 * self.chosen_page;
                self.chosen = self.chosen & !(u64::from(u32::MAX) << shift) | u64::from(value) << shift;
            }
            0x30 => self.queue = usize::try_from(value).unwrap_or(usize::MAX),
            _ if running => {} // what a queue is may not change any more
            _ => {
                if let Some(queue) = self.queues.get_mut(self.queue) {
                    set_queue(queue, at, value);
                }
            }
        }
    }
}

fn set_queue(queue: &mut Queue, at: u64, value: u32) {
    match at {
        0x38 => queue.set_size(u16::try_from(value).unwrap_or(0)),
        0x44 => queue.set_ready(value == 1),
        0x80 => queue.set_desc_table_address(Some(value), None),
        0x84 => queue.set_desc_table_address(None, Some(value)),
        0x90 => queue.set_avail_ring_address(Some(value), None),
        0x94 => queue.set_avail_ring_address(None, Some(value)),
        0xa0 => queue.set_used_ring_address(Some(value), None),
        0xa4 => queue.set_used_ring_address(None, Some(value)),
        _ => {}
    }
}

fn low(value: u64) -> u32 {
    u32::try_from(value & u64::from(u32::MAX)).expect("32 bits")
}
