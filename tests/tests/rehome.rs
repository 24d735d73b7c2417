//! Tests of the methods of the control socket that act on pool memory, with a confined VMM process
//! and a small guest. The guest increments counters in its pool memory and verifies them.
#![allow(clippy::unwrap_used, reason = "test code: a failed unwrap fails the test")]

use std::{
    fs,
    process::Child,
    time::{Duration, Instant},
};

use proto::v1::{self as wire, RehomeState, vmm_client::VmmClient};
use tests::{
    small_guests::{can_run_small_guests, count_in_large_page},
    standalone_vm::StandaloneVm,
};
use tonic::{
    Code,
    transport::{Channel, Endpoint},
};

/// Time limit of every wait.
const WAIT_TIMEOUT: Duration = Duration::from_secs(60);

/// Running VMM process.
struct Vmm {
    vm: StandaloneVm,
    process: Child,
}

impl Vmm {
    /// Starts a VMM with the pool memory that `pool` describes. Returns `None` if KVM is not
    /// available.
    fn start(pool: &str) -> Option<Self> {
        if !can_run_small_guests() {
            return None;
        }
        let vm = StandaloneVm::new();
        let options = ["--memory", "size=64MiB", "--pool", pool];
        let process = vm.command(&count_in_large_page(), &options).spawn().unwrap();
        let mut vmm = Self { vm, process };
        vmm.wait_for_progress();
        Some(vmm)
    }

    fn console(&self) -> String {
        self.vm.console()
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
        let socket = self.vm.run_dir().join("v.sock");
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
            let status = client.rehome(wire::RehomeRequest::default()).await.unwrap().into_inner();
            match status.state() {
                RehomeState::Copying => assert!(start.elapsed() < WAIT_TIMEOUT, "{status:?}"),
                RehomeState::Done => break status,
                _ => panic!("{status:?}"),
            }
        };
        assert!(done.total_bytes == 1 << 30 && done.copied_bytes >= 2 << 20, "{done:?}");
        assert!(done.pause_us > 0 && done.rounds > 0 && done.duration_us > done.pause_us, "{done:?}");
        eprintln!("{done:?}");
        assert!(!vmm.uses_pool());
        vmm.wait_for_progress();
        let repeated = client.rehome(wire::RehomeRequest::default()).await.unwrap().into_inner();
        let cancelled =
            client.cancel_rehome(wire::CancelRehomeRequest::default()).await.unwrap().into_inner();
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
        let status = client.rehome(wire::RehomeRequest::default()).await.unwrap_err();
        assert_eq!(status.code(), Code::FailedPrecondition);
        assert_eq!(status.message(), "the pool memory cannot be moved: the pool memory is private");
        client.sample_access(wire::SampleAccessRequest {}).await.unwrap();
    });
    assert!(vmm.uses_pool());
    vmm.wait_for_progress();
}
