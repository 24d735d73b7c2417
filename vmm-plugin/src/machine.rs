//! Assembles a guest from its memory, vCPUs and devices, and runs the guest. All checks are made
//! and all files are opened before the first thread starts.

mod devices;
mod run;

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
    memory::{Memory, MemoryError, accessed::AccessSampler, fault},
    platform::{MmioWindow, POWER_BUTTON_IRQ, SERIAL_IRQ},
    source::{self, Source, SourceError},
    vcpu::{Gate, Vcpu, VcpuContext, VcpuError},
};

pub use self::run::run;

/// Guest-physical address of the three pages that KVM reserves on Intel processors. The pages are
/// inside the MMIO hole.
const KVM_TSS_ADDRESS: usize = 0xfffb_d000;
/// Required capabilities of KVM, each with its name in messages.
const REQUIRED_CAPABILITIES: [(Cap, &str); 3] = [
    (Cap::Irqchip, "an interrupt controller in the kernel"),
    (Cap::UserMemory, "user memory"),
    (Cap::Irqfd, "irqfd"),
];

/// Error returned when a guest cannot be assembled or started.
#[derive(Debug, thiserror::Error)]
pub enum MachineError {
    /// An operation of KVM failed.
    #[error("/dev/kvm: cannot {operation}{hint}")]
    Kvm {
        /// Failed operation, completing "cannot …".
        operation: &'static str,
        /// Advice that is appended to the message, or an empty string.
        hint: &'static str,
        /// Error returned by the system call.
        #[source]
        errno: io::Error,
    },
    /// KVM does not support a required capability.
    #[error("/dev/kvm: this kernel's KVM lacks {0}")]
    MissingCapability(&'static str),
    /// The control socket cannot be created, or the VM is already running.
    #[error(transparent)]
    Socket(#[from] SocketError),
    /// The guest cannot have the requested NUMA nodes.
    #[error(transparent)]
    Shape(#[from] ShapeError),
    /// The guest's memory cannot be acquired from the agent or the host.
    #[error(transparent)]
    Source(#[from] SourceError),
    /// The guest's memory cannot be mapped.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// The kernel cannot be loaded.
    #[error(transparent)]
    Boot(#[from] BootError),
    /// A vCPU cannot be created.
    #[error(transparent)]
    Vcpu(#[from] VcpuError),
    /// A disk cannot be opened.
    #[error(transparent)]
    Disk(#[from] DiskError),
    /// A tap device cannot be opened.
    #[error("--net: cannot use the tap device {tap:?}{hint}")]
    Tap {
        /// Name of the tap device.
        tap: String,
        /// Advice that is appended to the message, or an empty string.
        hint: &'static str,
        /// Error returned by the system call.
        #[source]
        errno: io::Error,
    },
    /// The output file of the serial console cannot be created.
    #[error("--serial: cannot {operation}")]
    Console {
        /// Failed operation, completing "cannot …".
        operation: String,
        /// Error returned by the system call.
        #[source]
        errno: io::Error,
    },
    /// The process cannot be confined.
    #[error(transparent)]
    Confine(#[from] ConfineError),
    /// A system call failed.
    #[error("cannot {operation}")]
    System {
        /// Failed operation, completing "cannot …".
        operation: &'static str,
        /// Error returned by the system call.
        #[source]
        errno: io::Error,
    },
}

/// Assembled guest that has not started, and the confinement that the process will enter.
#[derive(Debug)]
pub struct Machine {
    confinement: PreparedConfinement,
    guest: GuestParts,
}

/// Parts of an assembled guest. Fields are dropped in their order: the vCPUs before the VM, and the
/// VM before its memory.
#[derive(Debug)]
struct GuestParts {
    vcpus: Vec<Vcpu>,
    workers: Vec<Worker>,
    control: Control,
    resources: GuestResources,
}

/// Resources of a guest that exist until the guest ends.
#[derive(Debug)]
struct GuestResources {
    context: VcpuContext,
    /// irqfd that presses the power button.
    power_button: EventFd,
    /// The VM, which is dropped before its memory.
    vm: Arc<VmFd>,
    /// Memory of the VM, which stays mapped while the VM exists.
    memory: Arc<Memory>,
}

fn kvm_error(operation: &'static str, hint: &'static str) -> impl Fn(kvm_ioctls::Error) -> MachineError {
    move |error| MachineError::Kvm { operation, hint, errno: error.into() }
}

fn system_error(operation: &'static str) -> impl Fn(io::Error) -> MachineError {
    move |errno| MachineError::System { operation, errno }
}

/// Assembles a guest. The process attaches to the VM's reserved memory only after all checks that
/// do not need the memory. A failure after that releases the reservation, because the process ends.
///
/// # Errors
/// [`MachineError`] if the guest cannot be assembled. All resources are then released.
pub fn build(
    config: &Config,
    run_dir: &Path,
    confinement: PreparedConfinement,
) -> Result<Machine, MachineError> {
    let kvm = open_kvm()?;
    let socket = control::socket::claim_control_socket(run_dir, &config.vm)?;
    let opened = devices::open(config)?;
    let windows: Vec<MmioWindow> = opened.iter().map(|device| device.window).collect();
    let console = run::open_output(&config.console)?;
    let vm = create_vm(&kvm)?;
    let bits = address_bits(&kvm)?;
    if config.agent.is_some() {
        boot::check(&config.kernel, &Layout::new(&source::preview_shape(config)?, bits)?, &windows)?;
    }
    let Source { shape, backings } = source::acquire_memory(config, socket.path())?;
    let layout = Layout::new(&shape, bits)?;
    let memory = Memory::map(&layout, &backings)?;
    let entry = boot::load(&config.kernel, &layout, &windows, memory.guest())?;
    memory.register_with_kvm(&vm).map_err(kvm_error(
        "register the guest's memory",
        "; KVM may support fewer memory slots than the guest has regions",
    ))?;
    let vcpus = Vcpu::create_all((&kvm, &vm), &layout, entry, memory.guest(), config.nested)?;
    let serial = Serial::new(create_irqfd(&vm, SERIAL_IRQ)?, console);
    let (windows, workers) = devices::attach(opened, &vm, memory.guest())?;
    let context = VcpuContext {
        memory: memory.guest().clone(),
        ports: Arc::new(PortIo::new(serial)),
        windows: Arc::new(windows),
        gate: Arc::new(Gate::default()),
    };
    fault::install_handler(&memory, config.vm.as_str()).map_err(system_error("install a SIGBUS handler"))?;
    let power_button = create_irqfd(&vm, POWER_BUTTON_IRQ)?;
    let files = memory.node_files().map_err(system_error("stat the memory files"))?;
    let sampler = AccessSampler::new(&memory, &layout)
        .map_err(system_error("prepare access sampling of the pool memory"))?;
    let control = Control::new(socket, (config, &layout, &memory), files, sampler);
    let resources = GuestResources { context, power_button, vm: Arc::new(vm), memory: Arc::new(memory) };
    Ok(Machine { confinement, guest: GuestParts { vcpus, workers, control, resources } })
}

/// Creates a VM with the interrupt controllers of KVM.
fn create_vm(kvm: &Kvm) -> Result<VmFd, MachineError> {
    let vm = kvm.create_vm().map_err(kvm_error("create a VM", ""))?;
    vm.set_tss_address(KVM_TSS_ADDRESS).map_err(kvm_error("set the TSS address", ""))?;
    const _: () = assert!((KVM_TSS_ADDRESS as u64) < MMIO_HOLE_END, "the TSS must be inside the MMIO hole");
    vm.create_irq_chip().map_err(kvm_error("create interrupt controllers", ""))?;
    route_lines_to_io_apic(&vm).map_err(kvm_error("route interrupts", ""))?;
    Ok(vm)
}

fn open_kvm() -> Result<Kvm, MachineError> {
    let kvm = Kvm::new().map_err(|error| {
        let hint = match error.errno() {
            libc::ENOENT => "; load the kernel module kvm_amd or kvm_intel",
            libc::EACCES | libc::EPERM => "; add this user to the group of the file, usually kvm",
            _ => "",
        };
        kvm_error("open it", hint)(error)
    })?;
    match REQUIRED_CAPABILITIES.iter().find(|(cap, _)| !kvm.check_extension(*cap)) {
        Some((_, name)) => Err(MachineError::MissingCapability(name)),
        None => Ok(kvm),
    }
}

/// Returns the number of guest-physical address bits on this host.
fn address_bits(kvm: &Kvm) -> Result<u8, MachineError> {
    const LEAF_ADDRESS_SIZES: u32 = 0x8000_0008;
    /// Minimum number of address bits of x86-64 processors.
    const ADDRESS_BITS_MIN: u8 = 36;
    let supported = kvm
        .get_supported_cpuid(kvm_bindings::KVM_MAX_CPUID_ENTRIES)
        .map_err(kvm_error("get the supported CPUID", ""))?;
    let sizes = supported.as_slice().iter().find(|entry| entry.function == LEAF_ADDRESS_SIZES);
    Ok(sizes.map_or(ADDRESS_BITS_MIN, |entry| entry.eax.to_le_bytes()[0]))
}

/// Routes interrupt lines only to the I/O APIC. By default, KVM also routes the first 16 lines to
/// the legacy PIC. Kernels do not program the PIC on a hardware-reduced platform, so the PIC would
/// deliver interrupts with the vectors of exceptions.
fn route_lines_to_io_apic(vm: &VmFd) -> Result<(), kvm_ioctls::Error> {
    let route = |line| {
        let chip = kvm_irq_routing_irqchip { irqchip: KVM_IRQCHIP_IOAPIC, pin: line };
        let u = kvm_irq_routing_entry__bindgen_ty_1 { irqchip: chip };
        kvm_irq_routing_entry { gsi: line, type_: KVM_IRQ_ROUTING_IRQCHIP, u, ..Default::default() }
    };
    let routes: Vec<_> = (0..devices::IO_APIC_PIN_COUNT).map(route).collect();
    vm.set_gsi_routing(&KvmIrqRouting::from_entries(&routes).expect("a few entries fit into the list"))
}

/// Creates an eventfd that raises an interrupt line on each write.
fn create_irqfd(vm: &VmFd, number: u32) -> Result<EventFd, MachineError> {
    let line = EventFd::new(EFD_NONBLOCK).map_err(system_error("create an eventfd"))?;
    vm.register_irqfd(&line, number).map_err(kvm_error("register an irqfd", ""))?;
    Ok(line)
}
