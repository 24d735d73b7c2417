//! The thread of one device: it sleeps until the driver tells it of a queue, or what it waits for itself has come.

use std::{
    fmt, io,
    os::fd::{AsRawFd as _, RawFd},
    sync::Arc,
};

use kvm_ioctls::{IoEventAddress, VmFd};
use units::limits::COMPLAINTS_PER_DEVICE_MAX;
use vmm_sys_util::{
    epoll::{ControlOperation, Epoll, EpollEvent, EventSet},
    eventfd::{EFD_NONBLOCK, EventFd},
};

use super::{
    GuestDriverError,
    mmio::{MmioTransport, register::QUEUE_NOTIFY},
};
use crate::{confine::threads::SeccompFilters, exit};

/// What the device's own source is called among its queues.
const SOURCE_TOKEN: u64 = u64::MAX;
/// How a source says that it is gone.
const SOURCE_CLOSED: EventSet = EventSet::ERROR.union(EventSet::HANG_UP);
/// How many things are seen at a time.
const EVENTS_PER_WAIT: usize = 8;

/// A device at work; it goes on until the process ends.
pub struct Worker {
    name: String,
    transport: Arc<MmioTransport>,
    kicks: Vec<EventFd>,
    epoll: Epoll,
    /// What the device waits for itself, and for which queue.
    source: Option<(RawFd, usize)>,
    /// How often its driver broke it.
    errors_logged: u32,
}

impl fmt::Debug for Worker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Worker").field("name", &self.name).finish_non_exhaustive()
    }
}

impl Worker {
    /// Of a device whose registers are at `at`: KVM wakes it when its driver tells of a queue, and no processor waits.
    ///
    /// # Errors
    /// KVM or the operating system refuses.
    pub fn new(name: String, transport: Arc<MmioTransport>, at: u64, vm: &VmFd) -> io::Result<Self> {
        let epoll = Epoll::new()?;
        let mut kicks = Vec::new();
        for queue in 0..u32::try_from(transport.queues()).expect("queues are few") {
            let kick = EventFd::new(EFD_NONBLOCK)?;
            vm.register_ioevent(&kick, &IoEventAddress::Mmio(at + QUEUE_NOTIFY), queue)
                .map_err(io::Error::from)?;
            let event = EpollEvent::new(EventSet::IN, u64::from(queue));
            epoll.ctl(ControlOperation::Add, kick.as_raw_fd(), event)?;
            kicks.push(kick);
        }
        let source = transport.event_source();
        if let Some((descriptor, _)) = source {
            let event = EpollEvent::new(EventSet::empty(), SOURCE_TOKEN);
            epoll.ctl(ControlOperation::Add, descriptor, event)?;
        }
        Ok(Self { name, transport, kicks, epoll, source, errors_logged: 0 })
    }

    /// The device works from now on.
    ///
    /// # Errors
    /// There is no thread to be had.
    pub fn start(mut self, filters: &SeccompFilters) -> io::Result<()> {
        filters.spawn(self.transport.role(), self.name.clone(), move || self.run()).map(drop)
    }

    /// A guest without its disk is none any more.
    fn run(&mut self) {
        loop {
            if let Err(error) = self.wait_and_serve() {
                exit::print(&format!("error: {} stops: {error}", self.name));
                exit::exit_now(exit::FAILED)
            }
        }
    }

    fn wait_and_serve(&mut self) -> io::Result<()> {
        self.update_source_interest()?;
        let mut events = [EpollEvent::default(); EVENTS_PER_WAIT];
        let count = match self.epoll.wait(-1, &mut events) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => return Ok(()),
            other => other?,
        };
        for event in &events[..count] {
            let queue = match (event.data(), self.source) {
                (SOURCE_TOKEN, Some(_)) if event.event_set().intersects(SOURCE_CLOSED) => {
                    return self.drop_source();
                }
                (SOURCE_TOKEN, Some((_, queue))) => queue,
                (queue, _) => {
                    let queue = usize::try_from(queue).expect("queues are few");
                    let _ = self.kicks[queue].read(); // told twice is told once
                    queue
                }
            };
            if let Err(error) = self.transport.process(queue) {
                self.log_driver_error(&error);
            }
        }
        Ok(())
    }

    /// A driver that breaks its device again and again fills nobody's log.
    fn log_driver_error(&mut self, error: &GuestDriverError) {
        if self.errors_logged < COMPLAINTS_PER_DEVICE_MAX {
            self.errors_logged += 1;
            let (name, reason) = (&self.name, units::chain(error));
            exit::print(&format!("virtio device {name}: {reason}: it stops until it is reset"));
        }
    }

    /// A source that is gone says so without end.
    fn drop_source(&mut self) -> io::Result<()> {
        let Some((descriptor, _)) = self.source.take() else { return Ok(()) };
        exit::print(&format!("virtio device {}: what it listens to is gone from this host", self.name));
        self.epoll.ctl(ControlOperation::Delete, descriptor, EpollEvent::default())
    }

    /// What has come is only of interest while there are buffers for it.
    fn update_source_interest(&self) -> io::Result<()> {
        let Some((descriptor, queue)) = self.source else { return Ok(()) };
        let interest = if self.transport.has_buffers(queue) { EventSet::IN } else { EventSet::empty() };
        self.epoll.ctl(ControlOperation::Modify, descriptor, EpollEvent::new(interest, SOURCE_TOKEN))
    }
}
