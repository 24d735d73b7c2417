//! One vCPU: its CPUID and registers, and the loop that runs it until the guest ends.

mod cpuid;
mod mce;

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
    boot::{EntryPoint, Protocol, Segments},
    devices::{ExitRequest, MmioBus, PortIo},
    layout::Layout,
    memory::{
        GuestMemory,
        fault::{self, MemoryFault},
        guest_address, poison,
    },
};

/// Signal that makes KVM_RUN return. Its handler does nothing.
pub fn kick_signal() -> i32 {
    libc::SIGRTMIN()
}

/// Reason for a guest's end.
#[derive(Debug, PartialEq, Eq)]
pub enum ExitReason {
    /// The guest requested it.
    Requested(ExitRequest),
    /// A vCPU cannot continue.
    Crashed(String),
    /// The VMM failed.
    Failed(String),
}

/// Error returned when a vCPU cannot be created.
#[derive(Debug, thiserror::Error)]
#[error("vCPU {cpu}: cannot {doing}")]
pub struct VcpuError {
    cpu: u32,
    doing: &'static str,
    #[source]
    errno: io::Error,
}

/// Controls whether vCPUs may run; initially closed.
#[derive(Debug, Default)]
pub struct Gate {
    state: Mutex<State>,
    changed: Condvar,
    /// Number of vCPUs that wait at the gate.
    waiting: AtomicU32,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum State {
    Open,
    #[default]
    Closed,
    Stopped,
}

impl Gate {
    /// Opens or closes the gate.
    pub fn set_open(&self, open: bool) {
        self.set(if open { State::Open } else { State::Closed });
    }

    /// Ends all vCPUs.
    pub fn stop(&self) {
        self.set(State::Stopped);
    }

    fn set(&self, state: State) {
        *self.state.lock().unwrap_or_else(PoisonError::into_inner) = state;
        self.changed.notify_all();
    }

    /// Returns the number of vCPUs that wait at the gate.
    pub fn waiting(&self) -> u32 {
        self.waiting.load(Ordering::SeqCst)
    }

    /// Waits until the gate is open. Returns `false` if the vCPUs are to end. `on_pause` is called
    /// before waiting.
    fn wait_until_open(&self, on_pause: impl FnOnce()) -> bool {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if *state == State::Open {
            return true;
        }
        on_pause();
        self.waiting.fetch_add(1, Ordering::SeqCst);
        let state = self.changed.wait_while(state, |state| *state == State::Closed);
        self.waiting.fetch_sub(1, Ordering::SeqCst);
        *state.unwrap_or_else(PoisonError::into_inner) == State::Open
    }
}

/// Parts of the guest that a vCPU accesses.
#[derive(Clone, Debug)]
pub struct VcpuContext {
    /// Guest memory, to distinguish it from MMIO.
    pub memory: GuestMemory,
    /// I/O ports.
    pub ports: Arc<PortIo>,
    /// MMIO devices.
    pub windows: Arc<MmioBus>,
    /// Controls whether the vCPU may run.
    pub gate: Arc<Gate>,
}

/// A vCPU.
#[derive(Debug)]
pub struct Vcpu {
    cpu: u32,
    fd: VcpuFd,
    /// Reporting of memory errors, if KVM supports it.
    machine_checks: Option<MachineChecks>,
}

impl Vcpu {
    /// Creates the vCPUs of a guest. The first one starts at `entry`; the guest starts the others.
    /// With `nested` they have VMX or SVM.
    ///
    /// # Errors
    /// [`VcpuError`] naming the vCPU and the failed operation.
    pub fn create_all(
        (kvm, vm): (&Kvm, &VmFd),
        layout: &Layout,
        entry: EntryPoint,
        memory: &GuestMemory,
        nested: bool,
    ) -> Result<Vec<Self>, VcpuError> {
        let vendor =
            kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES).map(|supported| Vendor::from_cpuid(&supported));
        let make = |cpu| {
            let failed =
                |doing| move |error: kvm_ioctls::Error| VcpuError { cpu, doing, errno: error.into() };
            let id = u64::from(layout.apic_id(cpu));
            let vendor = vendor.map_err(failed("get the supported CPUID"))?;
            let fd = vm.create_vcpu(id).map_err(failed("create it"))?;
            let mut vcpu = Self { cpu, fd, machine_checks: None };
            let cpuid = cpuid::build(kvm, layout, cpu, nested).map_err(failed("get the supported CPUID"))?;
            vcpu.fd.set_cpuid2(&cpuid).map_err(failed("set the CPUID"))?;
            vcpu.machine_checks = MachineChecks::set_up(kvm, &vcpu.fd, (vendor, layout.cpus()), nested)
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
        (0..layout.cpus()).map(make).collect()
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
            let one = Msrs::from_entries(&[entry]).expect("a single entry fits");
            self.fd.set_msrs(&one)?; // an MSR that KVM does not support is skipped
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
            Protocol::Linux64 => registers.rsi = entry.parameters,
            Protocol::Pvh => registers.rbx = entry.parameters,
        }
        self.fd.set_regs(&registers)
    }

    /// Runs the vCPU until it exits; `None` if it was stopped.
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

    /// Reports recorded memory errors to the guest. The process ends if a consumed error cannot be
    /// reported. An error that was only found may wait until its page is accessed.
    fn report_memory_errors(&self, context: &VcpuContext) {
        if let Some(at) = poison::take_consumed() {
            if self.report_memory_error(at, true, context) {
                fault::log_reported(at);
            } else {
                fault::exit_on(MemoryFault::Poisoned(Some(at)));
            }
        }
        if self.cpu == 0
            && let Some(at) = poison::take_found()
            && self.report_memory_error(at, false, context)
        {
            fault::log_reported(at);
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
        match poison::in_guest(move || fd.run()) {
            Ok(VcpuExit::IoIn(port, data)) => context.ports.read(port, data),
            Ok(VcpuExit::IoOut(port, data)) => {
                return context.ports.write(port, data).map(ExitReason::Requested);
            }
            Ok(VcpuExit::MmioRead(at, data)) => {
                exit_if_ram(at, context);
                context.windows.read(at, data);
            }
            Ok(VcpuExit::MmioWrite(at, data)) => {
                exit_if_ram(at, context);
                context.windows.write(at, data);
            }
            Ok(VcpuExit::MemoryFault { .. }) => fault::exit_on(MemoryFault::Missing(None)),
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
                libc::EFAULT => fault::exit_on(MemoryFault::Missing(None)),
                libc::EHWPOISON => fault::exit_on(MemoryFault::Poisoned(None)),
                _ => return Some(ExitReason::Failed(format!("vCPU {cpu}: KVM_RUN: {error}"))),
            },
        }
        None
    }
}

/// Ends the process on an MMIO exit inside RAM: KVM under a hypervisor (PVM) reports an unreachable
/// page so.
fn exit_if_ram(at: u64, context: &VcpuContext) {
    if context.memory.address_in_range(GuestAddress(at)) {
        fault::exit_on(MemoryFault::Missing(None));
    }
}
