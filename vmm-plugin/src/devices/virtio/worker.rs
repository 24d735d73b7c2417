//! Thread that serves one virtio device. The thread waits until the driver notifies a queue, or
//! until the event source of the device is ready.

use std::{
    fmt, io,
    os::fd::{AsRawFd as _, RawFd},
    sync::Arc,
};

use kvm_ioctls::{IoEventAddress, VmFd};
use units::limits::DRIVER_ERRORS_LOGGED_PER_DEVICE_MAX;
use vmm_sys_util::{
    epoll::{ControlOperation, Epoll, EpollEvent, EventSet},
    eventfd::{EFD_NONBLOCK, EventFd},
};

use super::{
    GuestDriverError,
    mmio::{MmioTransport, register::QUEUE_NOTIFY},
};
use crate::{confine::threads::SeccompFilters, exit};

/// epoll token of the event source. The token of a queue is the index of the queue.
const EVENT_SOURCE_TOKEN: u64 = u64::MAX;
/// epoll events that report a closed event source.
const SOURCE_CLOSED_EVENTS: EventSet = EventSet::ERROR.union(EventSet::HANG_UP);
/// Maximum number of epoll events that one wait returns.
const EVENTS_PER_WAIT: usize = 8;

/// Worker of a virtio device. The worker runs until the process ends.
pub struct Worker {
    name: String,
    transport: Arc<MmioTransport>,
    queue_events: Vec<EventFd>,
    epoll: Epoll,
    /// File descriptor of the device's event source, and the index of the queue to process when the
    /// event source is ready.
    source: Option<(RawFd, usize)>,
    /// Number of driver errors that were logged.
    errors_logged: u32,
}

impl fmt::Debug for Worker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Worker").field("name", &self.name).finish_non_exhaustive()
    }
}

impl Worker {
    /// Creates the worker of a device whose MMIO window starts at the guest-physical address `at`.
    /// Queue notifications use ioeventfds, so that vCPUs do not wait for the device.
    ///
    /// # Errors
    /// The error returned by epoll_create1(2), epoll_ctl(2), eventfd(2) or KVM_IOEVENTFD.
    pub fn new(name: String, transport: Arc<MmioTransport>, at: u64, vm: &VmFd) -> io::Result<Self> {
        let epoll = Epoll::new()?;
        let mut queue_events = Vec::new();
        for queue in 0..u32::try_from(transport.queue_count()).expect("the index of a queue fits") {
            let queue_event = EventFd::new(EFD_NONBLOCK)?;
            vm.register_ioevent(&queue_event, &IoEventAddress::Mmio(at + QUEUE_NOTIFY), queue)
                .map_err(io::Error::from)?;
            let event = EpollEvent::new(EventSet::IN, u64::from(queue));
            epoll.ctl(ControlOperation::Add, queue_event.as_raw_fd(), event)?;
            queue_events.push(queue_event);
        }
        let source = transport.event_source();
        if let Some((descriptor, _)) = source {
            let event = EpollEvent::new(EventSet::empty(), EVENT_SOURCE_TOKEN);
            epoll.ctl(ControlOperation::Add, descriptor, event)?;
        }
        Ok(Self { name, transport, queue_events, epoll, source, errors_logged: 0 })
    }

    /// Starts the thread of the worker.
    ///
    /// # Errors
    /// The error returned by the operating system if it cannot create the thread.
    pub fn start(mut self, filters: &SeccompFilters) -> io::Result<()> {
        filters.spawn(self.transport.thread_role(), self.name.clone(), move || self.run()).map(drop)
    }

    /// Serves the device. An error of epoll ends the VM, because a guest cannot continue without
    /// one of its devices.
    fn run(&mut self) {
        loop {
            if let Err(error) = self.wait_and_process_queues() {
                exit::print(&format!("error: device {} failed: {error}", self.name));
                exit::exit_now(exit::FAILED)
            }
        }
    }

    fn wait_and_process_queues(&mut self) -> io::Result<()> {
        self.update_source_interest()?;
        let mut events = [EpollEvent::default(); EVENTS_PER_WAIT];
        let count = match self.epoll.wait(-1, &mut events) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => return Ok(()),
            other => other?,
        };
        for event in &events[..count] {
            let queue = match (event.data(), self.source) {
                (EVENT_SOURCE_TOKEN, Some(_)) if event.event_set().intersects(SOURCE_CLOSED_EVENTS) => {
                    return self.stop_polling_source();
                }
                (EVENT_SOURCE_TOKEN, Some((_, queue))) => queue,
                (queue, _) => {
                    let queue = usize::try_from(queue).expect("the index of a queue fits");
                    let _ = self.queue_events[queue].read(); // fails if already cleared
                    queue
                }
            };
            if let Err(error) = self.transport.process_queue(queue) {
                self.log_driver_error(&error);
            }
        }
        Ok(())
    }

    /// Logs a protocol violation of the driver. The number of messages per device is limited,
    /// because a hostile driver could fill the log.
    fn log_driver_error(&mut self, error: &GuestDriverError) {
        if self.errors_logged < DRIVER_ERRORS_LOGGED_PER_DEVICE_MAX {
            self.errors_logged += 1;
            let (name, reason) = (&self.name, units::chain(error));
            exit::print(&format!("virtio device {name}: stopped until reset: {reason}"));
        }
    }

    /// Stops polling a closed event source, because epoll would report it as ready forever.
    fn stop_polling_source(&mut self) -> io::Result<()> {
        let Some((descriptor, _)) = self.source.take() else { return Ok(()) };
        exit::print(&format!("virtio device {}: the host device was closed", self.name));
        self.epoll.ctl(ControlOperation::Delete, descriptor, EpollEvent::default())
    }

    /// Enables polling of the event source only while the queue has available buffers.
    fn update_source_interest(&self) -> io::Result<()> {
        let Some((descriptor, queue)) = self.source else { return Ok(()) };
        let interest = if self.transport.has_buffers(queue) { EventSet::IN } else { EventSet::empty() };
        self.epoll.ctl(ControlOperation::Modify, descriptor, EpollEvent::new(interest, EVENT_SOURCE_TOKEN))
    }
}
