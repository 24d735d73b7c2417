//! Guest for tests that access its pool memory. Each vCPU increments a counter in every page of its
//! own part of the pool memory, in an endless loop, and verifies the counter before each increment.

use std::{
    arch::global_asm,
    fs::File,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU32, Ordering},
        mpsc,
    },
    time::{Duration, Instant},
};

use kvm_bindings::{KVM_MP_STATE_RUNNABLE, kvm_mp_state};
use kvm_ioctls::{Kvm, VmFd};
use units::Bytes;
use vm_memory::{Bytes as _, GuestAddress};
use vmm_sys_util::eventfd::EventFd;

use super::{ExitReason, Gate, Vcpu, VcpuContext};
use crate::{
    boot::{BootProtocol, EntryPoint, write_page_tables},
    confine::threads::SeccompFilters,
    devices::{
        MmioBus, PortIo,
        serial::Serial,
        virtio::{MMIO_WINDOW_BYTES, MmioTransport, rng::VirtioRng},
    },
    layout::{Layout, Local, Performance, Pool, Shape},
    memory::{
        Memory, MemoryBackendOptions, MemoryBacking, MemoryBackings, MemoryOwner, SpareMemory, create_memfd,
    },
    platform::MmioWindow,
    vcpu_threads::VcpuThreads,
    wakeup::Wakeup,
};

/// Guest-physical address of the pool memory, and its size.
pub(crate) const POOL_ADDRESS: u64 = 4 << 30;
pub(crate) const POOL_BYTES: u64 = 1 << 30;
/// Size of the pages in which the guest increments counters.
pub(crate) const PAGE_BYTES: u64 = 4096;

/// Guest-physical addresses of the guest's code, of its additional page table, and of the tasks.
const CODE_ADDRESS: u64 = 0x10_0000;
const POOL_PAGE_TABLE_ADDRESS: u64 = 0x11_0000;
const TASKS_ADDRESS: u64 = 0x12_0000;
/// Address of the page table entry for 4 GiB to 5 GiB, in the table that `write_page_tables` writes.
const POOL_PDPT_ENTRY_ADDRESS: u64 = 0xa020;
/// Distance between the tasks of two vCPUs: each task has its own cache line.
const TASK_BYTES: u64 = 64;
/// Offsets of the fields of a task.
const TASK_PAGES: u64 = 8;
const TASK_ROUNDS: u64 = 16;
const TASK_HAS_FAILED: u64 = 24;
/// Time limit of every wait.
const WAIT_TIMEOUT: Duration = Duration::from_secs(60);

global_asm!(
    ".pushsection .rodata",
    // RDI contains the address of the task.
    "count_in_pages:",
    "  xor r8d, r8d",
    "2: mov rsi, [rdi]",
    "  mov rcx, [rdi + 8]",
    "3: cmp [rsi], r8",
    "  jne 4f",
    "  inc qword ptr [rsi]",
    "  add rsi, 4096",
    "  dec rcx",
    "  jnz 3b",
    "  inc r8",
    "  mov [rdi + 16], r8",
    "  jmp 2b",
    "4: mov qword ptr [rdi + 24], 1",
    "5: jmp 5b",
    "count_in_pages_end:",
    ".popsection",
);

fn guest_code() -> &'static [u8] {
    unsafe extern "C" {
        static count_in_pages: u8;
        static count_in_pages_end: u8;
    }
    let (start, end) = (&raw const count_in_pages, &raw const count_in_pages_end);
    // SAFETY: both labels enclose the machine code above, which is read-only data of this program.
    unsafe { std::slice::from_raw_parts(start, end as usize - start as usize) }
}

/// Running guest with 64 MiB of local memory and one slice of pool memory.
pub(crate) struct TestGuest {
    /// Name of the file of the pool memory.
    pub(crate) pool_name: String,
    pub(crate) layout: Layout,
    pub(crate) memory: Arc<Memory>,
    pub(crate) vcpus: Arc<VcpuThreads>,
    pub(crate) devices: Arc<MmioBus>,
    pub(crate) vm: Arc<VmFd>,
    exits: Mutex<mpsc::Receiver<ExitReason>>,
    cpus: u32,
}

impl TestGuest {
    /// Starts a guest whose vCPUs access the first `pages` pages of pool memory, in equal parts.
    /// Returns `None` if KVM is not available.
    pub(crate) fn start(cpus: u32, pages: u64) -> Option<Self> {
        static STARTED: AtomicU32 = AtomicU32::new(0);
        let pool_name = format!("pool{}", STARTED.fetch_add(1, Ordering::SeqCst));
        let pool = create_memfd(&pool_name, Bytes::new(POOL_BYTES), None).unwrap();
        Self::start_with_pool((pool_name, pool), cpus, pages)
    }

    /// Starts a guest like [`Self::start`], with this pool memory: the name of the file, and the
    /// file.
    pub(crate) fn start_with_pool((pool_name, pool): (String, File), cpus: u32, pages: u64) -> Option<Self> {
        let kvm = Kvm::new().map_err(|error| eprintln!("SKIPPED: no /dev/kvm: {error}")).ok()?;
        let layout = layout(cpus);
        let memory = Memory::map(&layout, &backings(pool)).unwrap();
        let vm = kvm.create_vm().unwrap();
        vm.set_tss_address(0xfffb_d000).unwrap();
        vm.create_irq_chip().unwrap();
        memory.register_with_kvm(&vm).unwrap();
        write_guest(&memory, cpus, pages);
        let entry = EntryPoint { address: CODE_ADDRESS, parameters: 0, protocol: BootProtocol::Linux64 };
        let vcpus = Vcpu::create_all((&kvm, &vm), &layout, entry, memory.guest(), false).unwrap();
        vcpus.iter().for_each(|vcpu| set_up_vcpu(vcpu, entry, &memory));
        let serial = Serial::new(EventFd::new(0).unwrap(), Box::new(std::io::sink()));
        let context = VcpuContext {
            memory: memory.guest().clone(),
            ports: Arc::new(PortIo::new(serial)),
            windows: Arc::new(MmioBus(vec![rng_device(&memory)])),
            gate: Arc::new(Gate::default()),
        };
        let (sender, exits) = mpsc::channel();
        let (filters, wakeup) = (SeccompFilters::default(), Arc::new(Wakeup::new().unwrap()));
        let vcpus = VcpuThreads::start(vcpus, (&context, &filters), &sender, &wakeup).unwrap();
        let (vm, memory, vcpus) = (Arc::new(vm), Arc::new(memory), Arc::new(vcpus));
        Some(Self {
            pool_name,
            layout,
            memory,
            vcpus,
            devices: context.windows,
            vm,
            exits: Mutex::new(exits),
            cpus,
        })
    }

    /// Returns the number of complete rounds of a vCPU.
    fn rounds(&self, cpu: u32) -> u64 {
        self.memory.guest().read_obj(task_field(cpu, TASK_ROUNDS)).unwrap()
    }

    /// Waits until each vCPU has accessed all its pages at least `rounds` times from now on.
    pub(crate) fn wait_for_rounds(&self, rounds: u64) {
        let start = Instant::now();
        for cpu in 0..self.cpus {
            // The round in progress may have accessed some pages before this call.
            let target = self.rounds(cpu) + rounds + 1;
            while self.rounds(cpu) < target {
                self.assert_healthy();
                assert!(start.elapsed() < WAIT_TIMEOUT, "vCPU {cpu} does not progress");
                std::thread::yield_now();
            }
        }
    }

    /// Checks that no vCPU has exited or has found an unexpected value.
    pub(crate) fn assert_healthy(&self) {
        for cpu in 0..self.cpus {
            let has_failed: u64 = self.memory.guest().read_obj(task_field(cpu, TASK_HAS_FAILED)).unwrap();
            assert_eq!(has_failed, 0, "vCPU {cpu} has read an unexpected value");
        }
        assert_eq!(self.exits.lock().unwrap().try_recv().ok(), None, "a vCPU has exited");
    }
}

impl Drop for TestGuest {
    fn drop(&mut self) {
        self.vcpus.stop();
    }
}

fn layout(cpus: u32) -> Layout {
    let local = Local { cpus, memory: Bytes::mib(64), performance: Performance::LOCAL };
    let pool = Pool { slices: 1, performance: Performance::POOL };
    Layout::new(&Shape { local: vec![local], pool: vec![pool] }, 48).unwrap()
}

fn backings(pool: File) -> MemoryBackings {
    let backing = |file, owner| MemoryBacking { file: Arc::new(file), offset: 0, owner };
    let local = backing(create_memfd("local", Bytes::mib(64), None).unwrap(), MemoryOwner::Local);
    let slice = backing(pool, MemoryOwner::Slice { slice: 3, emc: "emc0".into() });
    let spare = Arc::new(create_memfd("spare", Bytes::new(POOL_BYTES), None).unwrap());
    MemoryBackings {
        local: vec![(local, MemoryBackendOptions::default())],
        pool: vec![(vec![slice], MemoryBackendOptions::default())],
        spare: Some(SpareMemory { file: spare, offset: 0, bytes: POOL_BYTES, host_numa_node: None }),
    }
}

/// Creates an entropy device. The guest does not use it.
fn rng_device(memory: &Memory) -> (MmioWindow, Arc<MmioTransport>) {
    let window = MmioWindow { address: 0xd000_0000, bytes: MMIO_WINDOW_BYTES, line: 8 };
    let line = EventFd::new(0).unwrap();
    (window, MmioTransport::new(Box::new(VirtioRng), line, memory.guest().clone()))
}

fn task_field(cpu: u32, field: u64) -> GuestAddress {
    GuestAddress(TASKS_ADDRESS + u64::from(cpu) * TASK_BYTES + field)
}

/// Writes the page tables, the code and the tasks.
fn write_guest(memory: &Memory, cpus: u32, pages: u64) {
    const PRESENT_WRITABLE: u64 = 0b11;
    const LARGE_PAGE: u64 = 1 << 7;
    let memory = memory.guest();
    write_page_tables(memory).unwrap();
    let table = POOL_PAGE_TABLE_ADDRESS | PRESENT_WRITABLE;
    memory.write_obj(table, GuestAddress(POOL_PDPT_ENTRY_ADDRESS)).unwrap();
    for entry in 0..512 {
        let page = (POOL_ADDRESS + (entry << 21)) | PRESENT_WRITABLE | LARGE_PAGE;
        memory.write_obj(page, GuestAddress(POOL_PAGE_TABLE_ADDRESS + entry * 8)).unwrap();
    }
    memory.write_slice(guest_code(), GuestAddress(CODE_ADDRESS)).unwrap();
    let pages_per_cpu = pages / u64::from(cpus);
    for cpu in 0..cpus {
        let start = POOL_ADDRESS + u64::from(cpu) * pages_per_cpu * PAGE_BYTES;
        memory.write_obj(start, task_field(cpu, 0)).unwrap();
        memory.write_obj(pages_per_cpu, task_field(cpu, TASK_PAGES)).unwrap();
    }
}

/// Makes a vCPU start with its task. By default, only the first vCPU starts.
fn set_up_vcpu(vcpu: &Vcpu, entry: EntryPoint, memory: &Memory) {
    vcpu.set_boot_registers(entry, memory.guest()).unwrap();
    let mut registers = vcpu.fd.get_regs().unwrap();
    registers.rdi = task_field(vcpu.cpu, 0).0;
    vcpu.fd.set_regs(&registers).unwrap();
    vcpu.fd.set_mp_state(kvm_mp_state { mp_state: KVM_MP_STATE_RUNNABLE }).unwrap();
}
