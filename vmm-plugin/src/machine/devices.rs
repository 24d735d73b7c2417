//! Opens the virtio devices of a guest, and attaches the devices to the VM.

use std::{io, sync::Arc};

use kvm_ioctls::VmFd;
use units::limits::DEVICES_PER_VM_MAX;

use super::{MachineError, create_irqfd, system_error};
use crate::{
    config::Config,
    devices::{
        MmioBus,
        virtio::{
            MMIO_WINDOW_BYTES, MmioTransport, VirtioDevice, Worker, block::VirtioBlock, net::VirtioNet,
            rng::VirtioRng,
        },
    },
    layout::MMIO_HOLE_START,
    memory::GuestMemory,
    platform::MmioWindow,
};

/// Guest-physical address of the first MMIO window.
const MMIO_WINDOWS_START: u64 = MMIO_HOLE_START + (256 << 20);
/// First interrupt line for virtio devices. The platform uses lower lines.
const FIRST_DEVICE_IRQ: u32 = 8;
/// Number of interrupt lines of an I/O APIC.
pub(super) const IO_APIC_PIN_COUNT: u32 = 24;

const _: () = assert!(
    DEVICES_PER_VM_MAX < (IO_APIC_PIN_COUNT - FIRST_DEVICE_IRQ) as usize,
    "each device and the RNG must have an interrupt line"
);

/// Open virtio device with its MMIO window.
pub(super) struct OpenDevice {
    name: String,
    device: Box<dyn VirtioDevice>,
    pub(super) window: MmioWindow,
}

/// Opens the virtio devices of a guest and assigns their MMIO windows and interrupt lines.
pub(super) fn open(config: &Config) -> Result<Vec<OpenDevice>, MachineError> {
    let mut devices: Vec<(String, Box<dyn VirtioDevice>)> = vec![("rng".into(), Box::new(VirtioRng))];
    for (number, disk) in config.disks.iter().enumerate() {
        devices.push((format!("disk{number}"), Box::new(VirtioBlock::open(&disk.path, disk.read_only)?)));
    }
    for (number, net) in config.nets.iter().enumerate() {
        let device = VirtioNet::open(&net.tap, net.mac).map_err(|errno| {
            let hint = match errno.kind() {
                io::ErrorKind::NotFound => "; load the kernel module tun",
                io::ErrorKind::PermissionDenied => "; create it for this user with `ip tuntap add`",
                _ => "",
            };
            MachineError::Tap { tap: net.tap.clone(), hint, errno }
        })?;
        devices.push((format!("net{number}"), Box::new(device)));
    }
    let with_window = |(number, (name, device)): (u32, (String, Box<dyn VirtioDevice>))| {
        let at = MMIO_WINDOWS_START + u64::from(number) * u64::from(MMIO_WINDOW_BYTES);
        let at = u32::try_from(at).expect("windows are below 4 GiB");
        OpenDevice {
            name,
            device,
            window: MmioWindow { address: at, bytes: MMIO_WINDOW_BYTES, line: FIRST_DEVICE_IRQ + number },
        }
    };
    Ok((0..).zip(devices).map(with_window).collect())
}

/// Creates the MMIO transport and the worker of each device.
pub(super) fn attach(
    devices: Vec<OpenDevice>,
    vm: &VmFd,
    memory: &GuestMemory,
) -> Result<(MmioBus, Vec<Worker>), MachineError> {
    let (mut windows, mut workers) = (MmioBus::default(), Vec::new());
    for OpenDevice { name, device, window } in devices {
        let transport = MmioTransport::new(device, create_irqfd(vm, window.line)?, memory.clone());
        let worker = Worker::new(name, Arc::clone(&transport), u64::from(window.address), vm);
        workers.push(worker.map_err(system_error("watch the queues of a device"))?);
        windows.0.push((window, transport));
    }
    Ok((windows, workers))
}
