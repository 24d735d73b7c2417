//! vCPUs of a guest: sets CPUID and registers, and runs a vCPU until the guest ends.

mod cpuid;
mod mce;
#[cfg(test)]
pub(crate) mod test_guest;

use std::{
    io,
    sync::{
        Arc, Condvar, Mutex, PoisonError,
        atomic::{AtomicU32, Ordering},
    },
};

use kvm_bindings::{KVM_MAX_CPUID_ENTRIES, Msrs, kvm_msr_entry, kvm_regs};
use kvm_ioctls::{Kvm, VcpuExit, VcpuFd, VmFd};
use vm_memory::{GuestAddress, GuestMemoryBackend as _};

use self::mce::{MachineChecks, Vendor};
use crate::{
    boot::{BootProtocol, EntryPoint, Segments},
    devices::{ExitRequest, MmioBus, PortIo},
    layout::Layout,
    memory::{
        GuestMemory,
        fault::{self, MemoryFault},
        guest_address, poison,
    },
};

/// Returns the number of the kick signal, which makes KVM_RUN return. The handler of the signal
/// does nothing.
pub fn kick_signal() -> i32 {
    libc::SIGRTMIN()
}

/// Reason why a vCPU ended the guest.
#[derive(Debug, PartialEq, Eq)]
pub enum ExitReason {
    /// The guest requested a power state change.
    Requested(ExitRequest),
    /// The guest crashed. The text describes why the vCPU cannot continue.
    Crashed(String),
    /// KVM or the VMM failed. The text describes the error.
    Failed(String),
}

/// Error returned when a vCPU cannot be created.
#[derive(Debug, thiserror::Error)]
#[error("vCPU {cpu}: cannot {operation}")]
pub struct VcpuError {
    cpu: u32,
    operation: &'static str,
    #[source]
    errno: io::Error,
}

/// Reason why vCPUs wait at the gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PauseReason {
    /// The guest has not started.
    NotStarted,
    /// A client has paused the guest.
    Client,
    /// The pool memory of the guest is replaced by local memory.
    Rehome,
    /// The guest writes faster than its pool memory is copied.
    Throttle,
}

impl PauseReason {
    fn bit(self) -> u8 {
        1 << self as u8
    }
}

/// Gate at which vCPUs wait while there is a reason to pause them. The initial reason is
/// [`PauseReason::NotStarted`].
#[derive(Debug, Default)]
pub struct Gate {
    state: Mutex<State>,
    changed: Condvar,
    /// Number of vCPUs that wait at the gate.
    waiting: AtomicU32,
}

/// State of a gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct State {
    /// Bits of the reasons to pause the vCPUs. If there are none, vCPUs run.
    reasons: u8,
    /// Whether vCPU threads end.
    is_stopped: bool,
}

impl Default for State {
    fn default() -> Self {
        Self { reasons: PauseReason::NotStarted.bit(), is_stopped: false }
    }
}

impl State {
    fn is_closed(self) -> bool {
        self.reasons != 0 && !self.is_stopped
    }
}

impl Gate {
    /// Adds a reason to pause the vCPUs.
    pub fn close(&self, reason: PauseReason) {
        self.update(|state| state.reasons |= reason.bit());
    }

    /// Removes a reason to pause the vCPUs. They run if there is no other reason.
    pub fn open(&self, reason: PauseReason) {
        self.update(|state| state.reasons &= !reason.bit());
    }

    /// Makes all vCPU threads end.
    pub fn stop(&self) {
        self.update(|state| state.is_stopped = true);
    }

    fn update(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.state.lock().unwrap_or_else(PoisonError::into_inner));
        self.changed.notify_all();
    }

    /// Returns the number of vCPUs that wait at the gate.
    pub fn waiting_vcpu_count(&self) -> u32 {
        self.waiting.load(Ordering::SeqCst)
    }

    /// Waits until the gate is open. Returns `false` if the vCPU thread must end. Calls `on_pause`
    /// before waiting.
    fn wait_until_open(&self, on_pause: impl FnOnce()) -> bool {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if !state.is_closed() {
            return !state.is_stopped;
        }
        on_pause();
        self.waiting.fetch_add(1, Ordering::SeqCst);
        let state = self.changed.wait_while(state, |state| state.is_closed());
        self.waiting.fetch_sub(1, Ordering::SeqCst);
        !state.unwrap_or_else(PoisonError::into_inner).is_stopped
    }
}

/// Parts of the guest that a running vCPU accesses.
#[derive(Clone, Debug)]
pub struct VcpuContext {
    /// Guest memory, used to detect MMIO exits at addresses of RAM.
    pub memory: GuestMemory,
    /// Devices behind I/O ports.
    pub ports: Arc<PortIo>,
    /// Devices on the MMIO bus.
    pub windows: Arc<MmioBus>,
    /// Gate that controls whether the vCPU may run.
    pub gate: Arc<Gate>,
}

/// vCPU of a guest.
#[derive(Debug)]
pub struct Vcpu {
    cpu: u32,
    fd: VcpuFd,
    /// Machine checks for reporting memory errors. `None` if KVM does not support machine checks.
    machine_checks: Option<MachineChecks>,
}

impl Vcpu {
    /// Creates the vCPUs of a guest. The first vCPU starts at `entry`, and the guest starts the
    /// other vCPUs. With `nested`, the vCPUs have VMX or SVM.
    ///
    /// # Errors
    /// [`VcpuError`] that names the vCPU and the failed operation.
    pub fn create_all(
        (kvm, vm): (&Kvm, &VmFd),
        layout: &Layout,
        entry: EntryPoint,
        memory: &GuestMemory,
        nested: bool,
    ) -> Result<Vec<Self>, VcpuError> {
        let vendor =
            kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES).map(|supported| Vendor::from_cpuid(&supported));
        let create = |cpu| {
            let failed =
                |operation| move |error: kvm_ioctls::Error| VcpuError { cpu, operation, errno: error.into() };
            let id = u64::from(layout.apic_id(cpu));
            let vendor = vendor.map_err(failed("get the supported CPUID"))?;
            let fd = vm.create_vcpu(id).map_err(failed("create it"))?;
            let mut vcpu = Self { cpu, fd, machine_checks: None };
            let cpuid = cpuid::build(kvm, layout, cpu, nested).map_err(failed("get the supported CPUID"))?;
            vcpu.fd.set_cpuid2(&cpuid).map_err(failed("set the CPUID"))?;
            vcpu.machine_checks =
                MachineChecks::set_up_machine_checks(kvm, &vcpu.fd, (vendor, layout.cpus()), nested)
                    .map_err(failed("set up machine checks"))?;
            if vcpu.machine_checks.is_some() {
                poison::enable_reporting();
            }
            vcpu.set_msrs().map_err(failed("set MSRs"))?;
            if cpu == 0 {
                vcpu.set_boot_registers(entry, memory).map_err(failed("set the boot registers"))?;
            }
            Ok(vcpu)
        };
        (0..layout.cpus()).map(create).collect()
    }

    /// Sets write-back as the default memory type and enables fast string operations.
    fn set_msrs(&self) -> Result<(), kvm_ioctls::Error> {
        const IA32_MISC_ENABLE: u32 = 0x1a0;
        const FAST_STRINGS: u64 = 1;
        const IA32_MTRR_DEF_TYPE: u32 = 0x2ff;
        const MTRR_ENABLE_WRITE_BACK: u64 = 1 << 11 | 6;
        let entry = |index, data| kvm_msr_entry { index, data, ..Default::default() };
        for entry in
            [entry(IA32_MISC_ENABLE, FAST_STRINGS), entry(IA32_MTRR_DEF_TYPE, MTRR_ENABLE_WRITE_BACK)]
        {
            let msr = Msrs::from_entries(&[entry]).expect("a single entry fits into the list");
            self.fd.set_msrs(&msr)?; // KVM skips an MSR that it does not support
        }
        Ok(())
    }

    fn set_boot_registers(&self, entry: EntryPoint, memory: &GuestMemory) -> Result<(), kvm_ioctls::Error> {
        let segments = Segments::new(entry.protocol);
        segments.write_gdt(memory).map_err(|_| kvm_ioctls::Error::new(libc::EFAULT))?;
        let mut special = self.fd.get_sregs()?;
        segments.apply(&mut special);
        self.fd.set_sregs(&special)?;
        let mut registers = kvm_regs { rip: entry.address, rflags: 2, rsp: 0x8ff0, ..Default::default() };
        match entry.protocol {
            BootProtocol::Linux64 => registers.rsi = entry.parameters,
            BootProtocol::Pvh => registers.rbx = entry.parameters,
        }
        self.fd.set_regs(&registers)
    }

    /// Runs the vCPU until the guest ends. Returns the reason, or `None` if the VMM stopped the
    /// vCPU.
    pub fn run(&mut self, context: &VcpuContext) -> Option<ExitReason> {
        loop {
            let on_pause = || {
                let _ = self.fd.kvmclock_ctrl(); // fails if the guest has no kvmclock
            };
            if !context.gate.wait_until_open(on_pause) {
                return None;
            }
            self.report_memory_errors(context);
            if let Some(exit) = self.run_once(context) {
                return Some(exit);
            }
        }
    }

    /// Reports recorded memory errors to the guest. Ends the process if a consumed error cannot be
    /// reported. An unconsumed error can be ignored: an access to its page reports the error
    /// again.
    fn report_memory_errors(&self, context: &VcpuContext) {
        if let Some(at) = poison::take_consumed_error() {
            if self.report_memory_error(at, true, context) {
                fault::log_reported_error(at);
            } else {
                fault::exit_on_fault(MemoryFault::Poisoned(Some(at)));
            }
        }
        if self.cpu == 0
            && let Some(at) = poison::take_unconsumed_error()
            && self.report_memory_error(at, false, context)
        {
            fault::log_reported_error(at);
        }
    }

    fn report_memory_error(&self, at: usize, is_consumed: bool, context: &VcpuContext) -> bool {
        let checks_and_address = self.machine_checks.zip(guest_address(&context.memory, at));
        checks_and_address
            .is_some_and(|(checks, address)| checks.report(&self.fd, address, is_consumed) == Ok(true))
    }

    fn run_once(&mut self, context: &VcpuContext) -> Option<ExitReason> {
        let cpu = self.cpu;
        let crashed = |reason: String| Some(ExitReason::Crashed(format!("vCPU {cpu}: {reason}")));
        let fd = &mut self.fd;
        match poison::run_in_guest(move || fd.run()) {
            Ok(VcpuExit::IoIn(port, data)) => context.ports.read(port, data),
            Ok(VcpuExit::IoOut(port, data)) => {
                return context.ports.write(port, data).map(ExitReason::Requested);
            }
            Ok(VcpuExit::MmioRead(at, data)) => {
                exit_if_guest_memory(at, context);
                context.windows.read(at, data);
            }
            Ok(VcpuExit::MmioWrite(at, data)) => {
                exit_if_guest_memory(at, context);
                context.windows.write(at, data);
            }
            Ok(VcpuExit::MemoryFault { .. }) => fault::exit_on_fault(MemoryFault::Missing(None)),
            Ok(VcpuExit::Shutdown) => return crashed("triple fault".into()),
            Ok(VcpuExit::InternalError) => return crashed("KVM internal error".into()),
            Ok(VcpuExit::FailEntry(reason, _)) => {
                return crashed(format!("VM entry failed: reason {reason:#x}"));
            }
            Ok(VcpuExit::Hlt) => return crashed("halted".into()),
            Ok(VcpuExit::Intr) => {}
            Ok(other) => return crashed(format!("unexpected exit {other:?}")),
            Err(error) => match error.errno() {
                libc::EINTR | libc::EAGAIN => {}
                libc::EFAULT => fault::exit_on_fault(MemoryFault::Missing(None)),
                libc::EHWPOISON => fault::exit_on_fault(MemoryFault::Poisoned(None)),
                _ => return Some(ExitReason::Failed(format!("vCPU {cpu}: KVM_RUN: {error}"))),
            },
        }
        None
    }
}

/// Ends the process if the address of an MMIO exit is in RAM. KVM on PVM, a hypervisor without
/// hardware virtualization, reports an inaccessible page with such an exit.
fn exit_if_guest_memory(at: u64, context: &VcpuContext) {
    if context.memory.address_in_range(GuestAddress(at)) {
        fault::exit_on_fault(MemoryFault::Missing(None));
    }
}
