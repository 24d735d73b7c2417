//! A guest put together and run: everything that can be wrong is found, and everything that is needed is open, before the first
//! thread starts.

mod devices;
mod run;
mod vcpus;

use std::{io, path::Path, sync::Arc};

use kvm_bindings::{
    KVM_IRQ_ROUTING_IRQCHIP, KVM_IRQCHIP_IOAPIC, KvmIrqRouting, kvm_irq_routing_entry,
    kvm_irq_routing_entry__bindgen_ty_1, kvm_irq_routing_irqchip,
};
use kvm_ioctls::{Cap, Kvm, VmFd};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use crate::{
    boot::{self, BootError},
    config::Config,
    confine::{ConfineError, PreparedConfinement},
    control::{self, Control, socket::SocketError},
    devices::{
        PortIo,
        serial::Serial,
        virtio::{Worker, block::DiskError},
    },
    layout::{Layout, MMIO_HOLE_END, ShapeError},
    memory::{Memory, MemoryError, fault},
    platform::{POWER_BUTTON_LINE, SERIAL_LINE, Window},
    source::{self, Source, SourceError},
    vcpu::{Gate, Vcpu, VcpuContext, VcpuError},
};

pub use self::run::run;

/// Three pages that KVM needs for itself on Intel's processors, in the window of the devices.
const KVM_TSS_ADDRESS: usize = 0xfffb_d000;
/// What KVM must be able to do.
const REQUIRED_CAPABILITIES: [(Cap, &str); 3] = [
    (Cap::Irqchip, "an interrupt controller in the kernel"),
    (Cap::UserMemory, "user memory"),
    (Cap::Irqfd, "irqfd"),
];

/// Why there is no guest.
#[derive(Debug, thiserror::Error)]
pub enum MachineError {
    /// KVM cannot be used.
    #[error("/dev/kvm: cannot {doing}{hint}")]
    Kvm {
        /// What was tried.
        doing: &'static str,
        /// What may help.
        hint: &'static str,
        /// Why not.
        #[source]
        errno: io::Error,
    },
    /// KVM lacks something.
    #[error("/dev/kvm: this kernel's KVM lacks {0}")]
    MissingCapability(&'static str),
    /// It runs already, or cannot be found when it runs.
    #[error(transparent)]
    Socket(#[from] SocketError),
    /// A guest cannot be like that.
    #[error(transparent)]
    Shape(#[from] ShapeError),
    /// No memory.
    #[error(transparent)]
    Source(#[from] SourceError),
    /// No memory.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// Nothing to boot.
    #[error(transparent)]
    Boot(#[from] BootError),
    /// No processors.
    #[error(transparent)]
    Vcpu(#[from] VcpuError),
    /// No such disk.
    #[error(transparent)]
    Disk(#[from] DiskError),
    /// No such network device.
    #[error("net: cannot use the tap device {tap:?}{hint}")]
    Tap {
        /// Which one.
        tap: String,
        /// What may help.
        hint: &'static str,
        /// Why not.
        #[source]
        errno: io::Error,
    },
    /// The console cannot be used.
    #[error("serial: cannot {doing}")]
    Console {
        /// What was tried.
        doing: String,
        /// Why not.
        #[source]
        errno: io::Error,
    },
    /// It cannot be confined.
    #[error(transparent)]
    Confine(#[from] ConfineError),
    /// The operating system refuses.
    #[error("cannot {doing}")]
    System {
        /// What was tried.
        doing: &'static str,
        /// Why not.
        #[source]
        errno: io::Error,
    },
}

/// A guest that can be started, and the confinement that it is started in.
#[derive(Debug)]
pub struct Machine {
    confinement: PreparedConfinement,
    guest: GuestParts,
}

/// The parts of a guest. Processors are dropped before the VM, and the VM before its memory.
#[derive(Debug)]
struct GuestParts {
    vcpus: Vec<Vcpu>,
    workers: Vec<Worker>,
    control: Control,
    resources: GuestResources,
}

/// What stays as long as a guest does.
#[derive(Debug)]
struct GuestResources {
    context: VcpuContext,
    /// Presses the power button.
    power_button: EventFd,
    /// Held so that it goes before its memory does.
    _vm: VmFd,
    /// Held as long as anybody can run the guest.
    _memory: Memory,
}

fn kvm_error(doing: &'static str, hint: &'static str) -> impl Fn(kvm_ioctls::Error) -> MachineError {
    move |error| MachineError::Kvm { doing, hint, errno: error.into() }
}

fn system_error(doing: &'static str) -> impl Fn(io::Error) -> MachineError {
    move |errno| MachineError::System { doing, errno }
}

/// Assembles a guest. This process attaches to its memory only after everything was checked that does not need it: once it is
/// attached, a failure releases the reservation.
///
/// # Errors
/// [`MachineError`]; nothing is left behind.
pub fn build(
    config: &Config,
    run_dir: &Path,
    confinement: PreparedConfinement,
) -> Result<Machine, MachineError> {
    let kvm = open_kvm()?;
    let socket = control::socket::claim(run_dir, &config.vm)?;
    let opened = devices::open(config)?;
    let windows: Vec<Window> = opened.iter().map(|device| device.window).collect();
    let console = run::open_output(&config.console)?;
    let vm = create_vm(&kvm)?;
    let bits = address_bits(&kvm)?;
    if config.agent.is_some() {
        boot::check(&config.kernel, &Layout::new(&source::preview(config)?, bits)?, &windows)?;
    }
    let Source { shape, backings } = source::acquire(config)?;
    let layout = Layout::new(&shape, bits)?;
    let memory = Memory::map(&layout, &backings)?;
    let entry = boot::load(&config.kernel, &layout, &windows, memory.guest())?;
    memory
        .register_with(&vm)
        .map_err(kvm_error("take the guest's memory", "; are there more regions than it has slots?"))?;
    let vcpus = Vcpu::create_all((&kvm, &vm), &layout, entry, memory.guest(), config.nested)?;
    let serial = Serial::new(irqfd(&vm, SERIAL_LINE)?, console);
    let (windows, workers) = devices::attach(opened, &vm, memory.guest())?;
    let context = VcpuContext {
        memory: memory.guest().clone(),
        ports: Arc::new(PortIo::new(serial)),
        windows: Arc::new(windows),
        gate: Arc::new(Gate::default()),
    };
    fault::install_handler(&memory, config.vm.as_str()).map_err(system_error("handle bus errors"))?;
    let power_button = irqfd(&vm, POWER_BUTTON_LINE)?;
    let files = memory.node_files().map_err(system_error("read the status of memory files"))?;
    let control = Control::new(socket, (config, &layout, &memory), files);
    let resources = GuestResources { context, power_button, _vm: vm, _memory: memory };
    Ok(Machine { confinement, guest: GuestParts { vcpus, workers, control, resources } })
}

/// Makes a VM with interrupt controllers, and neither memory nor processors.
fn create_vm(kvm: &Kvm) -> Result<VmFd, MachineError> {
    let vm = kvm.create_vm().map_err(kvm_error("make a VM", ""))?;
    vm.set_tss_address(KVM_TSS_ADDRESS).map_err(kvm_error("keep pages for itself", ""))?;
    const _: () = assert!((KVM_TSS_ADDRESS as u64) < MMIO_HOLE_END, "among the devices");
    vm.create_irq_chip().map_err(kvm_error("make interrupt controllers", ""))?;
    route_lines_to_io_apic(&vm).map_err(kvm_error("route interrupts", ""))?;
    Ok(vm)
}

fn open_kvm() -> Result<Kvm, MachineError> {
    let kvm = Kvm::new().map_err(|error| {
        let hint = match error.errno() {
            libc::ENOENT => "; is the module kvm_amd or kvm_intel loaded?",
            libc::EACCES | libc::EPERM => "; may this user open it? Its group is usually kvm",
            _ => "",
        };
        kvm_error("open it", hint)(error)
    })?;
    match REQUIRED_CAPABILITIES.iter().find(|(cap, _)| !kvm.check_extension(*cap)) {
        Some((_, what)) => Err(MachineError::MissingCapability(what)),
        None => Ok(kvm),
    }
}

/// How many bits of address guests have here.
fn address_bits(kvm: &Kvm) -> Result<u8, MachineError> {
    const LEAF_ADDRESS_SIZES: u32 = 0x8000_0008;
    /// Every processor with 64 bits has so many.
    const ADDRESS_BITS_MIN: u8 = 36;
    let supported = kvm
        .get_supported_cpuid(kvm_bindings::KVM_MAX_CPUID_ENTRIES)
        .map_err(kvm_error("ask what vcpus it makes", ""))?;
    let sizes = supported.as_slice().iter().find(|entry| entry.function == LEAF_ADDRESS_SIZES);
    Ok(sizes.map_or(ADDRESS_BITS_MIN, |entry| entry.eax.to_le_bytes()[0]))
}

/// A line goes to the I/O APIC and nowhere else. As KVM begins, the first sixteen also go to the controllers of a PC of old,
/// which nobody programs on a hardware-reduced platform: they would deliver them as exceptions.
fn route_lines_to_io_apic(vm: &VmFd) -> Result<(), kvm_ioctls::Error> {
    let route = |line| {
        let chip = kvm_irq_routing_irqchip { irqchip: KVM_IRQCHIP_IOAPIC, pin: line };
        let u = kvm_irq_routing_entry__bindgen_ty_1 { irqchip: chip };
        kvm_irq_routing_entry { gsi: line, type_: KVM_IRQ_ROUTING_IRQCHIP, u, ..Default::default() }
    };
    let routes: Vec<_> = (0..devices::IO_APIC_LINES).map(route).collect();
    vm.set_gsi_routing(&KvmIrqRouting::from_entries(&routes).expect("a few entries fit"))
}

/// An interrupt line: a write to it is an interrupt.
fn irqfd(vm: &VmFd, number: u32) -> Result<EventFd, MachineError> {
    let line = EventFd::new(EFD_NONBLOCK).map_err(system_error("make an event descriptor"))?;
    vm.register_irqfd(&line, number).map_err(kvm_error("listen to an interrupt line", ""))?;
    Ok(line)
}
