//! Tests of the methods of the control socket that act on pool memory, with the confined VMM process
//! and a small guest. The guest increments a counter in each page of 2 MiB of its pool memory,
//! verifies the counters, and prints its progress.
#![allow(clippy::unwrap_used, reason = "test code: a failed unwrap fails the test")]

use std::{
    arch::global_asm,
    fs,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use proto::v1::{self as wire, RehomeState, vmm_client::VmmClient};
use tempfile::TempDir;
use tonic::{
    Code,
    transport::{Channel, Endpoint},
};

/// Time limit of every wait.
const WAIT_TIMEOUT: Duration = Duration::from_secs(60);
/// Offset of the entry point from the load address of a bzImage.
const ENTRY_OFFSET: usize = 0x200;
const BOOT_SECTOR_BYTES: usize = 512;

global_asm!(
    ".pushsection .rodata",
    // Maps the first large page of pool memory at 4 GiB. Prints "." after every 64 rounds, and "!"
    // after an unexpected value.
    "count_in_large_page:",
    "  mov qword ptr [0xa020], 0x11003",
    "  mov rax, 0x100000083",
    "  mov [0x11000], rax",
    "  xor r8d, r8d",
    "2: mov rsi, 0x100000000",
    "  mov ecx, 512",
    "3: cmp [rsi], r8",
    "  jne 4f",
    "  inc qword ptr [rsi]",
    "  add rsi, 4096",
    "  dec ecx",
    "  jnz 3b",
    "  inc r8",
    "  test r8b, 63",
    "  jnz 2b",
    "  mov dx, 0x3f8",
    "  mov al, 46",
    "  out dx, al",
    "  jmp 2b",
    "4: mov dx, 0x3f8",
    "  mov al, 33",
    "  out dx, al",
    "5: jmp 5b",
    "count_in_large_page_end:",
    ".popsection",
);

/// Returns a bzImage with the code of the guest (Linux boot protocol).
fn kernel_image() -> Vec<u8> {
    unsafe extern "C" {
        static count_in_large_page: u8;
        static count_in_large_page_end: u8;
    }
    let (start, end) = (&raw const count_in_large_page, &raw const count_in_large_page_end);
    // SAFETY: both labels enclose the machine code above, which is read-only data of this program.
    let code = unsafe { std::slice::from_raw_parts(start, end as usize - start as usize) };
    let mut image = vec![0; 2 * BOOT_SECTOR_BYTES];
    image[0x1f1] = 1; // number of setup sectors after the first
    image[0x202..0x206].copy_from_slice(b"HdrS");
    image[0x206..0x208].copy_from_slice(&0x020f_u16.to_le_bytes());
    image[0x211] = 1; // flag: the kernel is loaded at 1 MiB
    image[0x214..0x218].copy_from_slice(&0x10_0000_u32.to_le_bytes());
    image[0x236] = 1; // flag: the kernel has a 64-bit entry point
    image[0x22c..0x230].copy_from_slice(&0x7fff_ffff_u32.to_le_bytes());
    image.resize(2 * BOOT_SECTOR_BYTES + ENTRY_OFFSET, 0);
    image.extend_from_slice(code);
    image
}

/// Running VMM process.
struct Vmm {
    dir: TempDir,
    process: Child,
}

impl Vmm {
    /// Starts a VMM with the pool memory that `pool` describes. Returns `None` if KVM is not
    /// available.
    fn start(pool: &str) -> Option<Self> {
        if let Err(error) = fs::File::options().read(true).write(true).open("/dev/kvm") {
            eprintln!("SKIPPED: guests on this machine's /dev/kvm: {error}");
            return None;
        }
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        fs::write(path("kernel"), kernel_image()).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_vmm-plugin"));
        command.args(["run", "--vm", "v", "--standalone", "--memory", "size=64MiB", "--pool", pool]);
        command.arg("--kernel").arg(path("kernel")).arg("--run-dir").arg(path("run"));
        command.arg("--serial").arg(format!("file={}", path("console").display()));
        if rustix::process::geteuid().is_root() {
            command.args(["--uid", "65534", "--gid", "65534"]);
        }
        let process = command.stdin(Stdio::null()).spawn().unwrap();
        let mut vmm = Self { dir, process };
        vmm.wait_for_progress();
        Some(vmm)
    }

    fn console(&self) -> String {
        fs::read_to_string(self.dir.path().join("console")).unwrap_or_default()
    }

    /// Waits for further output of the guest, and checks that the guest found no unexpected value.
    fn wait_for_progress(&mut self) {
        let (before, start) = (self.console().len(), Instant::now());
        while self.console().len() < before + 3 {
            assert!(!self.console().contains('!'), "the guest has read an unexpected value");
            assert!(start.elapsed() < WAIT_TIMEOUT, "no further output of the guest");
            assert_eq!(self.process.try_wait().unwrap(), None, "the VMM ended");
            std::thread::yield_now();
        }
    }

    async fn client(&self) -> VmmClient<Channel> {
        let socket = self.dir.path().join("run/v.sock");
        let endpoint = Endpoint::from_shared(format!("unix:{}", socket.display())).unwrap();
        VmmClient::new(endpoint.connect().await.unwrap())
    }

    /// Returns whether the process has a mapping or a descriptor of the file of the pool memory.
    fn uses_pool(&self) -> bool {
        let proc = format!("/proc/{}", self.process.id());
        let maps = fs::read_to_string(format!("{proc}/maps")).unwrap();
        let mut links = fs::read_dir(format!("{proc}/fd"))
            .unwrap()
            .map(|entry| fs::read_link(entry.unwrap().path()).unwrap().to_string_lossy().into_owned());
        maps.contains("memfd:pool") || links.any(|link| link.contains("memfd:pool"))
    }
}

impl Drop for Vmm {
    fn drop(&mut self) {
        let _ = self.process.kill(); // fails only if the process has already ended
        let _ = self.process.wait();
    }
}

fn block_on<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(future)
}

#[test]
fn confined_vmm_moves_pool_memory_of_its_guest() {
    let Some(mut vmm) = Vmm::start("size=1GiB") else { return };
    assert!(vmm.uses_pool());
    block_on(async {
        let mut client = vmm.client().await;
        let status = client.get_rehome(wire::GetRehomeRequest {}).await.unwrap().into_inner();
        assert_eq!(status.state(), RehomeState::None);
        let start = Instant::now();
        let done = loop {
            let status = client.rehome(wire::RehomeRequest {}).await.unwrap().into_inner();
            match status.state() {
                RehomeState::Copying => assert!(start.elapsed() < WAIT_TIMEOUT, "{status:?}"),
                RehomeState::Done => break status,
                _ => panic!("{status:?}"),
            }
        };
        assert!(done.total_bytes == 1 << 30 && done.copied_bytes >= 2 << 20, "{done:?}");
        assert!(done.pause_us > 0 && done.rounds > 0, "{done:?}");
        eprintln!("{done:?}");
        assert!(!vmm.uses_pool());
        vmm.wait_for_progress();
        let repeated = client.rehome(wire::RehomeRequest {}).await.unwrap().into_inner();
        let cancelled = client.cancel_rehome(wire::CancelRehomeRequest {}).await.unwrap().into_inner();
        assert_eq!((&repeated, &cancelled), (&done, &done));
        let guest = client.info(wire::InfoRequest {}).await.unwrap().into_inner();
        assert!(guest.nodes.iter().all(|node| node.slices.is_empty() && node.touched_bytes.is_none()));
        vmm.wait_for_progress();
    });
}

#[test]
fn confined_vmm_samples_accesses() {
    let Some(mut vmm) = Vmm::start("size=1GiB") else { return };
    block_on(async {
        let mut client = vmm.client().await;
        let first = client.sample_access(wire::SampleAccessRequest {}).await.unwrap().into_inner();
        assert_eq!(first, wire::SampleAccessResponse::default());
        let early = client.sample_access(wire::SampleAccessRequest {}).await.unwrap_err();
        assert_eq!(early.code(), Code::ResourceExhausted, "{early:?}");
        let start = Instant::now();
        let sample = loop {
            match client.sample_access(wire::SampleAccessRequest {}).await {
                Ok(sample) => break sample.into_inner(),
                Err(status) => assert!(start.elapsed() < WAIT_TIMEOUT, "{status:?}"),
            }
        };
        assert!(sample.interval_ms.unwrap() >= 1000, "{sample:?}");
        let [node] = sample.nodes[..] else { panic!("one node expected: {sample:?}") };
        // The guest accesses 2 of 1024 MiB.
        assert!(node.node == 1 && node.sampled_pages == 200 && node.accessed_pages <= 10, "{node:?}");
        vmm.wait_for_progress();
    });
}

#[test]
fn private_pool_memory_is_neither_moved_nor_sampled() {
    let Some(mut vmm) = Vmm::start("size=1GiB,shared=off") else { return };
    block_on(async {
        let mut client = vmm.client().await;
        let status = client.rehome(wire::RehomeRequest {}).await.unwrap_err();
        assert_eq!(status.code(), Code::FailedPrecondition);
        assert_eq!(status.message(), "the pool memory cannot be moved: the pool memory is private");
        client.sample_access(wire::SampleAccessRequest {}).await.unwrap();
    });
    assert!(vmm.uses_pool());
    vmm.wait_for_progress();
}
