//! The thread of one device: it sleeps until the driver tells it of a queue, or what it waits for itself has come.

use std::{
    io,
    os::fd::{AsRawFd as _, RawFd},
    sync::Arc,
};

use kvm_ioctls::{IoEventAddress, VmFd};
use vmm_sys_util::{
    epoll::{ControlOperation, Epoll, EpollEvent, EventSet},
    eventfd::{EFD_NONBLOCK, EventFd},
};

use super::registers::{QUEUE_NOTIFY, Registers};

/// What the device's own source is called among its queues.
const SOURCE: u64 = u64::MAX;
/// How many things are seen at a time.
const SEEN_AT_ONCE: usize = 8;

/// A device at work; it goes on until the process ends.
struct Worker {
    registers: Arc<Registers>,
    kicks: Vec<EventFd>,
    epoll: Epoll,
    /// What the device waits for itself, and for which queue.
    source: Option<(RawFd, usize)>,
}

/// Starts a device whose registers are at `at`: KVM wakes it when its driver tells of a queue, and no processor waits.
///
/// # Errors
/// KVM or the operating system refuses.
pub fn start(name: &str, registers: Arc<Registers>, at: u64, vm: &VmFd) -> io::Result<()> {
    let epoll = Epoll::new()?;
    let mut kicks = Vec::new();
    for queue in 0..u32::try_from(registers.queues()).expect("queues are few") {
        let kick = EventFd::new(EFD_NONBLOCK)?;
        vm.register_ioevent(&kick, &IoEventAddress::Mmio(at + QUEUE_NOTIFY), queue)
            .map_err(io::Error::from)?;
        epoll.ctl(
            ControlOperation::Add,
            kick.as_raw_fd(),
            EpollEvent::new(EventSet::IN, u64::from(queue)),
        )?;
        kicks.push(kick);
    }
    let source = registers.source();
    if let Some((descriptor, _)) = source {
        epoll.ctl(ControlOperation::Add, descriptor, EpollEvent::new(EventSet::empty(), SOURCE))?;
    }
    let mut worker = Worker { registers, kicks, epoll, source };
    std::thread::Builder::new().name(name.to_owned()).spawn(move || worker.run()).map(drop)
}

impl Worker {
    fn run(&mut self) {
        loop {
            if let Err(error) = self.wait_and_serve() {
                eprintln!("a virtio device stops: {error}");
                return;
            }
        }
    }

    fn wait_and_serve(&mut self) -> io::Result<()> {
        self.listen_to_source()?;
        let mut seen = [EpollEvent::default(); SEEN_AT_ONCE];
        let count = match self.epoll.wait(-1, &mut seen) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => return Ok(()),
            other => other?,
        };
        for event in &seen[..count] {
            let (queue, source) = match (event.data(), self.source) {
                (SOURCE, Some((_, queue))) => (queue, true),
                (queue, _) => (usize::try_from(queue).unwrap_or(usize::MAX), false),
            };
            if !source {
                let _ = self.kicks[queue].read(); // told twice is told once
            }
            self.registers.serve(queue);
        }
        Ok(())
    }

    /// What has come is only of interest while there are buffers for it.
    fn listen_to_source(&self) -> io::Result<()> {
        let Some((descriptor, queue)) = self.source else { return Ok(()) };
        let wanted = if self.registers.has_buffers(queue) { EventSet::IN } else { EventSet::empty() };
        self.epoll.ctl(ControlOperation::Modify, descriptor, EpollEvent::new(wanted, SOURCE))
    }
}
