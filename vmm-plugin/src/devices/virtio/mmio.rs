//! The virtio-mmio transport of one device (VIRTIO 1.2, section 4.2). The driver controls the
//! device by reading and writing the registers of the transport.

use std::{
    os::fd::RawFd,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, TryLockError,
        atomic::{AtomicU32, Ordering},
    },
    time::Instant,
};

use units::limits::REHOME_DEVICES_CHECK_INTERVAL;
use virtio_queue::{Queue, QueueT as _};
use vmm_sys_util::eventfd::EventFd;

use super::{GuestDriverError, VIRTIO_F_EVENT_IDX, VIRTIO_F_VERSION_1, VirtioDevice, process_queue};
use crate::{memory::GuestMemory, thread_role::ThreadRole};

/// Size of a device's MMIO window, in bytes.
pub const MMIO_WINDOW_BYTES: u32 = 0x1000;

/// Register offsets (VIRTIO 1.2, section 4.2.2), in bytes.
pub(super) mod register {
    pub(in super::super) const MAGIC_VALUE: u64 = 0x00;
    pub(in super::super) const VERSION: u64 = 0x04;
    pub(in super::super) const DEVICE_ID: u64 = 0x08;
    pub(in super::super) const VENDOR_ID: u64 = 0x0c;
    pub(in super::super) const DEVICE_FEATURES: u64 = 0x10;
    pub(in super::super) const DEVICE_FEATURES_SEL: u64 = 0x14;
    pub(in super::super) const DRIVER_FEATURES: u64 = 0x20;
    pub(in super::super) const DRIVER_FEATURES_SEL: u64 = 0x24;
    pub(in super::super) const QUEUE_SEL: u64 = 0x30;
    pub(in super::super) const QUEUE_NUM_MAX: u64 = 0x34;
    pub(in super::super) const QUEUE_NUM: u64 = 0x38;
    pub(in super::super) const QUEUE_READY: u64 = 0x44;
    pub(in super::super) const QUEUE_NOTIFY: u64 = 0x50;
    pub(in super::super) const INTERRUPT_STATUS: u64 = 0x60;
    pub(in super::super) const INTERRUPT_ACK: u64 = 0x64;
    pub(in super::super) const STATUS: u64 = 0x70;
    pub(in super::super) const QUEUE_DESC_LOW: u64 = 0x80;
    pub(in super::super) const QUEUE_DESC_HIGH: u64 = 0x84;
    pub(in super::super) const QUEUE_DRIVER_LOW: u64 = 0x90;
    pub(in super::super) const QUEUE_DRIVER_HIGH: u64 = 0x94;
    pub(in super::super) const QUEUE_DEVICE_LOW: u64 = 0xa0;
    pub(in super::super) const QUEUE_DEVICE_HIGH: u64 = 0xa4;
    /// Start of the device-specific configuration space.
    pub(in super::super) const CONFIG: u64 = 0x100;
}

/// Value of the MagicValue register: "virt".
const MAGIC_VALUE: u32 = 0x7472_6976;
/// Value of the Version register: 2 identifies a non-legacy device.
const VERSION: u32 = 2;
const VENDOR_ID: u32 = u32::from_le_bytes(*b"TARN");

/// Bit of InterruptStatus: the device has used a buffer.
const INTERRUPT_USED_BUFFER: u32 = 1;
/// Bit of InterruptStatus: the configuration or the status of the device has changed.
const INTERRUPT_CONFIG_CHANGE: u32 = 2;

/// Device status bits (VIRTIO 1.2, section 2.1).
pub(super) mod status {
    pub(in super::super) const DRIVER_OK: u32 = 4;
    pub(in super::super) const FEATURES_OK: u32 = 8;
    pub(in super::super) const DEVICE_NEEDS_RESET: u32 = 64;
}

/// Device with its virtio-mmio registers.
#[derive(Debug)]
pub struct MmioTransport {
    state: Mutex<DeviceState>,
    /// Pending interrupts (InterruptStatus). Stored outside the lock, so that the driver can
    /// acknowledge an interrupt while the device is busy.
    interrupts: AtomicU32,
    line: EventFd,
    memory: GuestMemory,
    device_type: u32,
    config_space: Vec<u8>,
    queue_sizes: &'static [u16],
}

/// Guard of a device that processes no requests while the guard exists.
#[derive(Debug)]
pub struct QuiescedDevice<'a> {
    _state: MutexGuard<'a, DeviceState>,
}

struct DeviceState {
    device: Box<dyn VirtioDevice>,
    queues: Vec<Queue>,
    device_features: u64,
    driver_features: u64,
    device_features_sel: u32,
    driver_features_sel: u32,
    queue_sel: usize,
    status: u32,
}

impl std::fmt::Debug for DeviceState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DeviceState").field("status", &self.status).finish_non_exhaustive()
    }
}

fn create_queues(queue_sizes: &[u16]) -> Vec<Queue> {
    queue_sizes.iter().map(|size| Queue::new(*size).expect("queue sizes are powers of two")).collect()
}

impl MmioTransport {
    /// Creates the transport of a device. Writes to the irqfd `line` raise interrupts.
    pub fn new(device: Box<dyn VirtioDevice>, line: EventFd, memory: GuestMemory) -> Arc<Self> {
        let (device_type, config_space, queue_sizes) =
            (device.device_type(), device.config_space(), device.queue_sizes());
        let device_features = device.device_features() | VIRTIO_F_VERSION_1 | VIRTIO_F_EVENT_IDX;
        let state = DeviceState {
            device,
            queues: create_queues(queue_sizes),
            device_features,
            driver_features: 0,
            device_features_sel: 0,
            driver_features_sel: 0,
            queue_sel: 0,
            status: 0,
        };
        let interrupts = AtomicU32::new(0);
        Arc::new(Self {
            state: Mutex::new(state),
            interrupts,
            line,
            memory,
            device_type,
            config_space,
            queue_sizes,
        })
    }

    /// Locks the device. A lock is poisoned only in tests, because outside tests a panic ends the
    /// process.
    fn lock(&self) -> MutexGuard<'_, DeviceState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until the device processes no requests. Returns `None` if it is busy at the deadline.
    pub(crate) fn quiesce(&self, deadline: Instant) -> Option<QuiescedDevice<'_>> {
        loop {
            match self.state.try_lock() {
                Ok(state) => return Some(QuiescedDevice { _state: state }),
                Err(TryLockError::Poisoned(poisoned)) => {
                    return Some(QuiescedDevice { _state: poisoned.into_inner() });
                }
                Err(TryLockError::WouldBlock) if Instant::now() >= deadline => return None,
                Err(TryLockError::WouldBlock) => {
                    std::thread::sleep(REHOME_DEVICES_CHECK_INTERVAL.as_duration());
                }
            }
        }
    }

    /// Returns the role of the thread that serves the device.
    pub(super) fn thread_role(&self) -> ThreadRole {
        self.lock().device.thread_role()
    }

    /// Returns the number of queues of the device.
    pub(super) fn queue_count(&self) -> usize {
        self.queue_sizes.len()
    }

    /// Handles a driver read at an offset in the MMIO window. Register reads of other than 4 bytes
    /// are ignored.
    pub fn read(&self, offset: u64, data: &mut [u8]) {
        if let Some(offset) = offset.checked_sub(register::CONFIG) {
            let from = usize::try_from(offset).unwrap_or(usize::MAX).min(self.config_space.len());
            let readable = (self.config_space.len() - from).min(data.len());
            data.fill(0);
            data[..readable].copy_from_slice(&self.config_space[from..from + readable]);
        } else if let Ok(data) = <&mut [u8; 4]>::try_from(data) {
            *data = self.read_register(offset).to_le_bytes();
        }
    }

    fn read_register(&self, offset: u64) -> u32 {
        match offset {
            register::MAGIC_VALUE => return MAGIC_VALUE,
            register::VERSION => return VERSION,
            register::DEVICE_ID => return self.device_type,
            register::VENDOR_ID => return VENDOR_ID,
            register::INTERRUPT_STATUS => return self.interrupts.load(Ordering::SeqCst),
            _ => {}
        }
        let state = self.lock();
        let queue = state.queues.get(state.queue_sel);
        match offset {
            register::DEVICE_FEATURES if state.device_features_sel < 2 => {
                low_32_bits(state.device_features >> (32 * state.device_features_sel))
            }
            register::QUEUE_NUM_MAX => queue.map_or(0, |queue| u32::from(queue.max_size())),
            register::QUEUE_READY => queue.map_or(0, |queue| u32::from(queue.ready())),
            register::STATUS => state.status,
            _ => 0,
        }
    }

    /// Handles a driver write at an offset in the MMIO window. Writes of other than 4 bytes are
    /// ignored.
    pub fn write(&self, offset: u64, data: &[u8]) {
        let Ok(value) = <[u8; 4]>::try_from(data).map(u32::from_le_bytes) else { return };
        match offset {
            register::INTERRUPT_ACK => drop(self.interrupts.fetch_and(!value, Ordering::SeqCst)),
            register::STATUS => self.set_status(value),
            _ => self.lock().write_register(offset, value),
        }
    }

    fn set_status(&self, status: u32) {
        let mut state = self.lock();
        if status == 0 {
            state.queues = create_queues(self.queue_sizes);
            (state.driver_features, state.status, state.queue_sel) = (0, 0, 0);
            self.interrupts.store(0, Ordering::SeqCst);
            return;
        }
        let (was_active, added) = (state.is_active(), status & !state.status);
        state.status |= status; // only a reset clears status bits
        if added & status::FEATURES_OK != 0 && !state.accepts_features() {
            state.status &= !status::FEATURES_OK;
        }
        if !was_active && state.is_active() {
            state.activate(&self.memory);
        }
    }

    /// Processes a queue, and raises an interrupt if the driver requests interrupts.
    ///
    /// # Errors
    /// [`GuestDriverError`] if the driver violated the protocol. The device then stops until a
    /// reset.
    pub(super) fn process_queue(&self, number: usize) -> Result<(), GuestDriverError> {
        let mut state = self.lock();
        match state.process(number, &self.memory) {
            Ok(true) => self.raise_interrupt(INTERRUPT_USED_BUFFER),
            Ok(false) => {}
            Err(error) => {
                state.status |= status::DEVICE_NEEDS_RESET;
                self.raise_interrupt(INTERRUPT_CONFIG_CHANGE);
                return Err(error);
            }
        }
        Ok(())
    }

    /// Returns the event source of the device: a file descriptor, and the index of the queue to
    /// process when the descriptor is readable.
    pub(super) fn event_source(&self) -> Option<(RawFd, usize)> {
        self.lock().device.event_source()
    }

    /// Returns whether the device is active and a queue has available buffers.
    pub(super) fn has_buffers(&self, number: usize) -> bool {
        let state = self.lock();
        let queue = state.queues.get(number).filter(|queue| state.is_active() && queue.ready());
        queue.is_some_and(|queue| {
            let avail_index = queue.avail_idx(&self.memory, Ordering::Acquire);
            avail_index.is_ok_and(|index| index.0 != queue.next_avail())
        })
    }

    fn raise_interrupt(&self, reason: u32) {
        self.interrupts.fetch_or(reason, Ordering::SeqCst);
        let _ = self.line.write(1); // a full eventfd counter still raises the interrupt
    }
}

impl DeviceState {
    fn is_active(&self) -> bool {
        const ACTIVE_STATUS: u32 = status::FEATURES_OK | status::DRIVER_OK;
        self.status & (ACTIVE_STATUS | status::DEVICE_NEEDS_RESET) == ACTIVE_STATUS
    }

    /// Returns whether the device accepts the driver's features. VERSION_1 is required, because a
    /// driver without it would use the legacy queue layout.
    fn accepts_features(&self) -> bool {
        self.driver_features & !self.device_features == 0 && self.driver_features & VIRTIO_F_VERSION_1 != 0
    }

    fn activate(&mut self, memory: &GuestMemory) {
        let Self { device, queues, driver_features, .. } = self;
        device.set_driver_features(*driver_features);
        queues.iter_mut().for_each(|queue| queue.set_event_idx(*driver_features & VIRTIO_F_EVENT_IDX != 0));
        if queues.iter().any(|queue| queue.ready() && !queue.is_valid(memory)) {
            self.status |= status::DEVICE_NEEDS_RESET;
        }
    }

    fn process(&mut self, number: usize, memory: &GuestMemory) -> Result<bool, GuestDriverError> {
        if !self.is_active() {
            return Ok(false);
        }
        let Self { device, queues, .. } = self;
        queues
            .get_mut(number)
            .map_or(Ok(false), |queue| process_queue(device.as_mut(), number, queue, memory))
    }

    fn write_register(&mut self, offset: u64, value: u32) {
        let is_driver_ok = self.status & status::DRIVER_OK != 0;
        let are_features_fixed = self.status & status::FEATURES_OK != 0;
        match offset {
            register::DEVICE_FEATURES_SEL => self.device_features_sel = value,
            register::DRIVER_FEATURES_SEL => self.driver_features_sel = value,
            register::DRIVER_FEATURES if self.driver_features_sel < 2 && !are_features_fixed => {
                let shift = 32 * self.driver_features_sel;
                self.driver_features =
                    self.driver_features & !(u64::from(u32::MAX) << shift) | u64::from(value) << shift;
            }
            register::QUEUE_SEL => self.queue_sel = usize::try_from(value).unwrap_or(usize::MAX),
            _ if is_driver_ok => {} // queue registers are read-only while the driver is active
            _ => {
                if let Some(queue) = self.queues.get_mut(self.queue_sel) {
                    write_queue_register(queue, offset, value);
                }
            }
        }
    }
}

fn write_queue_register(queue: &mut Queue, offset: u64, value: u32) {
    match offset {
        register::QUEUE_NUM => queue.set_size(u16::try_from(value).unwrap_or(0)),
        register::QUEUE_READY => queue.set_ready(value == 1),
        register::QUEUE_DESC_LOW => queue.set_desc_table_address(Some(value), None),
        register::QUEUE_DESC_HIGH => queue.set_desc_table_address(None, Some(value)),
        register::QUEUE_DRIVER_LOW => queue.set_avail_ring_address(Some(value), None),
        register::QUEUE_DRIVER_HIGH => queue.set_avail_ring_address(None, Some(value)),
        register::QUEUE_DEVICE_LOW => queue.set_used_ring_address(Some(value), None),
        register::QUEUE_DEVICE_HIGH => queue.set_used_ring_address(None, Some(value)),
        _ => {}
    }
}

fn low_32_bits(value: u64) -> u32 {
    u32::try_from(value & u64::from(u32::MAX)).expect("the value is masked to 32 bits")
}
