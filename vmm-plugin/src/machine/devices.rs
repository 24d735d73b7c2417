//! The devices a guest is to have: opened first, so that a wrong one is found early, and started last.

use std::{io, sync::Arc};

use kvm_ioctls::VmFd;
use units::limits::DEVICES_PER_VM_MAX;

use super::{MachineError, line, system_error};
use crate::{
    config::Config,
    devices::{
        Windows,
        virtio::{Device, REGISTERS_BYTES, Registers, Worker, block::Block, net::Net, rng::Rng},
    },
    layout::HOLE_START,
    memory::GuestMemory,
    platform::Window,
};

/// Where the windows begin.
const WINDOWS_START: u64 = HOLE_START + (256 << 20);
/// The first interrupt line that is of no use to the platform itself.
const FIRST_LINE: u32 = 8;
/// As many as an I/O APIC has.
pub(super) const LINES: u32 = 24;

const _: () =
    assert!(DEVICES_PER_VM_MAX < (LINES - FIRST_LINE) as usize, "a line for each, and one for the rng");

/// A device that is open, and where it will be.
pub(super) struct Planned {
    name: String,
    device: Box<dyn Device>,
    pub(super) window: Window,
}

/// Opens what the guest is to have.
pub(super) fn plan(config: &Config) -> Result<Vec<Planned>, MachineError> {
    let mut devices: Vec<(String, Box<dyn Device>)> = vec![("rng".into(), Box::new(Rng))];
    for (number, disk) in config.disks.iter().enumerate() {
        devices.push((format!("disk{number}"), Box::new(Block::open(&disk.path, disk.read_only)?)));
    }
    for (number, net) in config.nets.iter().enumerate() {
        let card = Net::open(&net.tap, net.mac).map_err(|errno| {
            let hint = match errno.kind() {
                io::ErrorKind::NotFound => "; is the module tun loaded?",
                io::ErrorKind::PermissionDenied => "; make it with `ip tuntap add` for this user first",
                _ => "",
            };
            MachineError::Tap { tap: net.tap.clone(), hint, errno }
        })?;
        devices.push((format!("net{number}"), Box::new(card)));
    }
    let place = |(number, (name, device)): (u32, (String, Box<dyn Device>))| {
        let at = WINDOWS_START + u64::from(number) * u64::from(REGISTERS_BYTES);
        let at = u32::try_from(at).expect("below 4 GiB");
        Planned { name, device, window: Window { at, bytes: REGISTERS_BYTES, line: FIRST_LINE + number } }
    };
    Ok((0..).zip(devices).map(place).collect())
}

/// Puts registers in front of devices, and somebody who will do their work.
pub(super) fn place(
    planned: Vec<Planned>,
    vm: &VmFd,
    memory: &GuestMemory,
) -> Result<(Windows, Vec<Worker>), MachineError> {
    let (mut windows, mut workers) = (Windows::default(), Vec::new());
    for Planned { name, device, window } in planned {
        let registers = Registers::new(device, line(vm, window.line)?, memory.clone());
        let worker = Worker::new(name, Arc::clone(&registers), u64::from(window.at), vm);
        workers.push(worker.map_err(system_error("listen to a device"))?);
        windows.0.push((window, registers));
    }
    Ok((windows, workers))
}
