//! Tests of machine checks with a minimal guest, on the KVM of the test machine.

use std::sync::{Arc, mpsc};

use units::Bytes;
use vm_memory::{Bytes as _, GuestAddress};

use super::*;
use crate::{
    boot::{BootProtocol, EntryPoint, write_page_tables},
    confine::{SeccompMode, threads::SeccompFilters},
    devices::{ExitRequest, MmioBus, PortIo, serial::Serial},
    layout::{Layout, Local, Performance, Shape},
    memory::{GuestMemory, poison},
    platform::{RESET_PORT, RESET_VALUE},
    thread_role::ThreadRole,
    vcpu::{ExitReason, Gate, PauseReason, Vcpu, VcpuContext},
};

/// Guest-physical addresses of the guest's code, machine check handler and interrupt table.
const GUEST_CODE_ADDRESS: u64 = 0x10_0000;
const HANDLER_ADDRESS: u64 = GUEST_CODE_ADDRESS + 0x100;
const INTERRUPT_TABLE_ADDRESS: u64 = 0x3000;
/// Vector of the machine check exception.
const MACHINE_CHECK_VECTOR: u64 = 18;
/// Machine code of an endless loop: `jmp $`.
const SPIN_LOOP_CODE: [u8; 2] = [0xeb, 0xfe];
const MC_STATUS: u32 = IA32_MC_CTL + 1;

fn checks(vendor: Vendor, has_lmce: bool) -> MachineChecks {
    MachineChecks { vendor, has_lmce, has_multiple_vcpus: has_lmce }
}

#[test]
fn status_bits_are_the_same_as_in_qemu() {
    let amd = checks(Vendor::Amd, false);
    assert_eq!(amd.status_values(true), (0xbc00_0800_0000_0000, 7));
    assert_eq!(amd.status_values(false), (0x9c00_1800_0000_0000, 5));
    let intel = checks(Vendor::Intel, true);
    assert_eq!(intel.status_values(true), (0xbd80_0000_0000_0134, 15));
    assert_eq!(intel.status_values(false), (0xbd00_0000_0000_00c0, 13));
}

/// Guest that runs an endless loop. Its machine check handler requests a reset.
struct Guest {
    vcpu: Vcpu,
    context: VcpuContext,
    _vm: kvm_ioctls::VmFd,
}

impl Guest {
    /// Creates the guest. Returns `None` if KVM or machine checks are not available.
    fn new() -> Option<Self> {
        let kvm = Kvm::new().map_err(|error| eprintln!("SKIPPED: no /dev/kvm: {error}")).ok()?;
        let local = Local { cpus: 1, memory: Bytes::mib(64), performance: Performance::LOCAL };
        let layout = Layout::new(&Shape { local: vec![local], pool: Vec::new() }, 48).unwrap();
        let backing = crate::memory::MemoryBacking {
            file: Arc::new(crate::memory::create_memfd("local", Bytes::mib(64), None).unwrap()),
            offset: 0,
            owner: crate::memory::MemoryOwner::Local,
        };
        let local = vec![(backing, crate::memory::MemoryBackendOptions::default())];
        let backings = crate::memory::MemoryBackings { local, ..Default::default() };
        let memory = crate::memory::Memory::map(&layout, &backings).unwrap();
        let vm = kvm.create_vm().unwrap();
        vm.set_tss_address(0xfffb_d000).unwrap();
        vm.create_irq_chip().unwrap();
        memory.register_with_kvm(&vm).unwrap();
        write_guest(memory.guest());
        let entry =
            EntryPoint { address: GUEST_CODE_ADDRESS, parameters: 0, protocol: BootProtocol::Linux64 };
        let vcpu = Vcpu::create_all((&kvm, &vm), &layout, entry, memory.guest(), false).unwrap().remove(0);
        if vcpu.machine_checks.is_none() {
            eprintln!("SKIPPED: this KVM has no machine checks");
            return None;
        }
        let line = vmm_sys_util::eventfd::EventFd::new(0).unwrap();
        let serial = Serial::new(line, Box::new(std::io::sink()));
        let context = VcpuContext {
            memory: memory.guest().clone(),
            ports: Arc::new(PortIo::new(serial)),
            windows: Arc::new(MmioBus::default()),
            gate: Arc::new(Gate::default()),
        };
        context.gate.open(PauseReason::NotStarted);
        Some(Self { vcpu, context, _vm: vm })
    }

    /// Sets the guest's interrupt table and enables machine checks.
    fn enable_machine_checks(&self) {
        let mut special = self.vcpu.fd.get_sregs().unwrap();
        (special.idt.base, special.idt.limit) = (INTERRUPT_TABLE_ADDRESS, 0xfff);
        special.cr4 |= CR4_MCE;
        self.vcpu.fd.set_sregs(&special).unwrap();
    }

    /// Converts a guest-physical address to an address of this process.
    fn address_of(&self, guest: u64) -> usize {
        use vm_memory::GuestMemoryBackend as _;
        self.context.memory.get_host_address(GuestAddress(guest)).unwrap() as usize
    }

    fn register(&self, index: u32) -> u64 {
        let entry = kvm_msr_entry { index, ..Default::default() };
        let mut read = Msrs::from_entries(&[entry]).unwrap();
        assert_eq!(self.vcpu.fd.get_msrs(&mut read).unwrap(), 1);
        read.as_slice()[0].data
    }
}

/// Writes the page tables, the code, and the interrupt gate of the machine check handler.
fn write_guest(memory: &GuestMemory) {
    write_page_tables(memory).unwrap();
    memory.write_slice(&SPIN_LOOP_CODE, GuestAddress(GUEST_CODE_ADDRESS)).unwrap();
    let [low, high] = RESET_PORT.to_le_bytes();
    // mov dx, PORT; mov al, VALUE; out dx, al
    let reset = [0x66, 0xba, low, high, 0xb0, RESET_VALUE, 0xee, SPIN_LOOP_CODE[0], SPIN_LOOP_CODE[1]];
    memory.write_slice(&reset, GuestAddress(HANDLER_ADDRESS)).unwrap();
    const PRESENT_INTERRUPT_GATE: u64 = 0x8e << 40;
    let gate = HANDLER_ADDRESS & 0xffff | 0x10 << 16 | PRESENT_INTERRUPT_GATE | (HANDLER_ADDRESS >> 16) << 48;
    memory.write_obj(gate, GuestAddress(INTERRUPT_TABLE_ADDRESS + MACHINE_CHECK_VECTOR * 16)).unwrap();
}

/// Runs a guest that has consumed an error at an address of this process. The thread has the
/// seccomp filter of a vCPU.
fn run_confined(mut guest: Guest, at: usize) -> (Guest, Option<ExitReason>) {
    rustix::thread::set_no_new_privs(true).unwrap();
    let (sender, receiver) = mpsc::channel();
    let run = move || {
        assert!(poison::run_in_guest(|| poison::record_error(at, true)));
        let exit = guest.vcpu.run(&guest.context);
        let _ = sender.send((guest, exit)); // fails only if the receiving test has ended
    };
    SeccompFilters::new(SeccompMode::True).unwrap().spawn(ThreadRole::Vcpu, "vcpu0".into(), run).unwrap();
    receiver.recv().unwrap()
}

#[test]
fn machine_check_reports_the_page_with_the_error() {
    let Some(guest) = Guest::new() else { return };
    guest.enable_machine_checks();
    let at = guest.address_of(0x20_0123);
    let (guest, exit) = run_confined(guest, at);
    assert_eq!(exit, Some(ExitReason::Requested(ExitRequest::Reset)));
    let expected = guest.vcpu.machine_checks.unwrap().status_values(true);
    assert_eq!((guest.register(MC_STATUS), guest.register(IA32_MCG_STATUS)), expected);
    assert_eq!(guest.register(MC_STATUS + 1), 0x20_0000);
    assert_eq!(guest.register(MC_STATUS + 2), MISC_PHYSICAL_PAGE);
}

#[test]
fn error_is_not_reported_to_a_guest_that_cannot_handle_it() {
    let Some(guest) = Guest::new() else { return };
    let (fd, checks) = (&guest.vcpu.fd, guest.vcpu.machine_checks.unwrap());
    assert!(!checks.report(fd, 0x20_0000, true).unwrap(), "CR4.MCE is not set");
    guest.enable_machine_checks();
    assert!(checks.report(fd, 0x20_0000, true).unwrap());
    assert!(!checks.report(fd, 0x20_1000, true).unwrap(), "a machine check is in progress");
}
