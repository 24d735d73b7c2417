//! Tests that move the memory of running guests.

use std::{
    os::unix::fs::MetadataExt as _,
    sync::atomic::{AtomicU32, AtomicU64},
    time::Instant,
};

use vm_memory::{Bytes as _, GuestAddress};

use super::{throttle::Throttle, *};
use crate::{
    exit,
    memory::{PAGE_BYTES, fault},
    vcpu::{
        PauseReason,
        test_guest::{POOL_ADDRESS, POOL_BYTES, TestGuest},
    },
};

/// Number of pages that the guests of most tests write.
const PAGES: u64 = 2048;
/// Time limit of every wait.
const WAIT_TIMEOUT: Duration = Duration::from_secs(60);
/// Limits with which a move does not converge while the guest runs.
const ENDLESS: RehomeLimits =
    RehomeLimits { pause_max: Duration::ZERO, rounds_max: u32::MAX, throttle_percent_max: 0 };

fn rehomer(guest: &TestGuest, control: &RehomeControl, limits: RehomeLimits) -> Rehomer {
    Rehomer::new(control, limits, (&guest.vm, &guest.memory), &guest.vcpus, &guest.devices)
}

/// Starts a guest and waits until it has written all its pages.
fn start_writing(cpus: u32, pages: u64) -> Option<TestGuest> {
    let guest = TestGuest::start(cpus, pages)?;
    guest.wait_for_rounds(1);
    Some(guest)
}

/// Moves the memory of a guest and returns the final status.
fn move_memory(guest: &TestGuest, control: &RehomeControl, limits: RehomeLimits) -> RehomeStatus {
    assert_eq!(control.start(0).unwrap().state, RehomeState::Copying);
    rehomer(guest, control, limits).perform();
    control.status()
}

/// Returns the contents of the pages that the guest writes.
fn pool_contents(guest: &TestGuest) -> Vec<u8> {
    let mut bytes = vec![0; usize::try_from(PAGES).unwrap() * PAGE_BYTES];
    guest.memory.guest().read_slice(&mut bytes, GuestAddress(POOL_ADDRESS)).unwrap();
    bytes
}

fn wait_until(mut condition: impl FnMut() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < WAIT_TIMEOUT, "the condition does not hold in time");
        std::thread::yield_now();
    }
}

fn spare_bytes(guest: &TestGuest) -> u64 {
    let (_, spare) = guest.memory.movable_regions().unwrap();
    spare.file.metadata().unwrap().blocks() * 512
}

/// Returns whether the process has a mapping or a descriptor of the guest's pool file.
fn uses_pool(guest: &TestGuest) -> bool {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let links = std::fs::read_dir("/proc/self/fd").unwrap().filter_map(|entry| {
        std::fs::read_link(entry.unwrap().path()).ok() // other tests close descriptors
    });
    let name = format!("memfd:{} ", guest.pool_name);
    let is_open = links.into_iter().any(|link| link.to_string_lossy().contains(&name));
    assert_eq!(is_open, maps.contains(&name), "mappings and descriptors end together");
    is_open
}

/// Checks that the guest writes to the memory that the process maps, and reads what it wrote.
fn assert_guest_uses_mapped_memory(guest: &TestGuest) {
    let counter = || guest.memory.guest().read_obj::<u64>(GuestAddress(POOL_ADDRESS)).unwrap();
    let before = counter();
    guest.wait_for_rounds(2);
    assert!(counter() > before, "the guest writes to other memory");
    guest.assert_healthy();
}

#[test]
fn running_guest_keeps_its_data_and_uses_no_slice() {
    // A guest with many pages writes other pages between the last round and the pause.
    for (cpus, pages) in [(1, PAGES), (2, PAGES), (1, 16 * PAGES), (2, 16 * PAGES)] {
        let Some(guest) = start_writing(cpus, pages) else { return };
        let control = RehomeControl::new(&guest.memory);
        assert!(uses_pool(&guest));
        let status = move_memory(&guest, &control, RehomeLimits::default());
        assert_eq!((status.state, status.reason.as_str()), (RehomeState::Done, ""));
        assert_eq!(status.freed_slices, [(3, "emc0".to_owned())]);
        assert_eq!(status.total_bytes, POOL_BYTES);
        assert!(status.copied_bytes >= pages * PAGE_BYTES as u64, "{status:?}");
        assert!(status.pause > Duration::ZERO && status.rounds >= 1, "{status:?}");
        assert!(!uses_pool(&guest));
        assert_guest_uses_mapped_memory(&guest);
        assert_eq!(control.start(0).unwrap(), status, "a move that is done is not repeated");
    }
}

#[test]
fn untouched_pages_and_zeros_use_no_local_memory() {
    let Some(guest) = start_writing(1, 16) else { return };
    let zeros = GuestAddress(POOL_ADDRESS + (512 << 20));
    guest.memory.guest().write_slice(&vec![0; 8 << 20], zeros).unwrap();
    let control = RehomeControl::new(&guest.memory);
    assert_eq!(move_memory(&guest, &control, RehomeLimits::default()).state, RehomeState::Done);
    assert!(spare_bytes(&guest) <= 4 << 20, "{}", spare_bytes(&guest));
    assert_guest_uses_mapped_memory(&guest);
}

#[test]
fn cancelled_move_leaves_the_guest_on_its_slices_and_can_be_repeated() {
    let Some(guest) = start_writing(1, PAGES) else { return };
    let control = RehomeControl::new(&guest.memory);
    assert_eq!(control.cancel(7).state, RehomeState::None);
    assert_eq!(
        control.start(6).unwrap().state,
        RehomeState::None,
        "the request is older than the cancellation"
    );
    std::thread::scope(|scope| {
        scope.spawn(|| move_memory(&guest, &control, ENDLESS));
        wait_until(|| control.status().rounds >= 2);
        assert!(spare_bytes(&guest) > 0);
        assert_eq!(control.start(0).unwrap().state, RehomeState::Copying);
        control.cancel(0);
        wait_until(|| control.status().state != RehomeState::Copying);
    });
    let status = control.status();
    assert_eq!((status.state, status.reason.as_str()), (RehomeState::Failed, "cancelled"));
    assert_eq!(spare_bytes(&guest), 0);
    assert!(uses_pool(&guest));
    assert_guest_uses_mapped_memory(&guest);
    assert_eq!(move_memory(&guest, &control, RehomeLimits::default()).state, RehomeState::Done);
    assert_guest_uses_mapped_memory(&guest);
}

#[test]
fn move_that_does_not_converge_fails_and_the_guest_continues() {
    let Some(guest) = start_writing(1, PAGES) else { return };
    let control = RehomeControl::new(&guest.memory);
    let status = move_memory(&guest, &control, RehomeLimits { rounds_max: 3, ..ENDLESS });
    assert_eq!(status.state, RehomeState::Failed);
    assert!(status.reason.starts_with("the guest writes faster than pages are copied: "), "{status:?}");
    assert!(status.reason.ends_with(" bytes remain after 3 rounds"), "{status:?}");
    assert_eq!(spare_bytes(&guest), 0);
    assert!(uses_pool(&guest));
    assert_guest_uses_mapped_memory(&guest);
}

#[test]
fn throttle_stops_the_vcpus_and_resumes_them_when_dropped() {
    let Some(guest) = start_writing(2, PAGES) else { return };
    let start = Instant::now();
    let mut throttle = Throttle::new(&guest.vcpus, 100, start);
    throttle.update(start);
    guest.wait_for_rounds(1);
    throttle.increase(101);
    let stops = |throttle: &Throttle<'_>| {
        throttle.update(Instant::now());
        guest.vcpus.are_waiting()
    };
    wait_until(|| stops(&throttle));
    let before = pool_contents(&guest);
    assert!(pool_contents(&guest) == before, "a stopped guest has written");
    drop(throttle);
    guest.wait_for_rounds(1);
    guest.assert_healthy();
}

#[test]
fn paused_guest_stays_paused() {
    let Some(guest) = start_writing(2, PAGES) else { return };
    assert!(guest.vcpus.pause(PauseReason::Client));
    let before = pool_contents(&guest);
    let control = RehomeControl::new(&guest.memory);
    assert_eq!(move_memory(&guest, &control, RehomeLimits::default()).state, RehomeState::Done);
    assert!(guest.vcpus.pause(PauseReason::Client), "the vCPUs still wait");
    assert!(pool_contents(&guest) == before, "the paused guest has written");
    guest.vcpus.resume(PauseReason::Client);
    assert_guest_uses_mapped_memory(&guest);
}

/// A device writes to pages that the guest does not use, while it holds its lock like a worker that
/// processes a request.
#[test]
fn writes_of_devices_are_not_lost() {
    const DEVICE_PAGES: u64 = 512;
    let address = |write: u64| {
        GuestAddress(POOL_ADDRESS + (256 << 20) + write % DEVICE_PAGES * PAGE_BYTES as u64 + write % 4096)
    };
    let Some(guest) = start_writing(1, PAGES) else { return };
    let control = RehomeControl::new(&guest.memory);
    let (writes, is_moved) = (AtomicU64::new(0), AtomicBool::new(false));
    let value = |write: u64| (write % 251).to_le_bytes()[0];
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let device = &guest.devices.0[0].1;
            while !is_moved.load(Ordering::SeqCst) {
                let guard = device.quiesce(Instant::now() + WAIT_TIMEOUT).unwrap();
                for write in (writes.load(Ordering::SeqCst)..).take(64) {
                    guest.memory.guest().write_obj(value(write), address(write)).unwrap();
                }
                writes.fetch_add(64, Ordering::SeqCst);
                drop(guard);
                std::thread::yield_now();
            }
        });
        wait_until(|| writes.load(Ordering::SeqCst) > DEVICE_PAGES);
        let limits = RehomeLimits { rounds_max: 100, throttle_percent_max: 100, ..RehomeLimits::default() };
        let status = move_memory(&guest, &control, limits);
        let done = writes.load(Ordering::SeqCst);
        wait_until(|| writes.load(Ordering::SeqCst) > done + 64); // the device continues
        is_moved.store(true, Ordering::SeqCst);
        assert_eq!((status.state, status.reason.as_str()), (RehomeState::Done, ""));
    });
    let end = writes.load(Ordering::SeqCst);
    // Writes to one byte repeat after DEVICE_PAGES * 8 writes.
    for write in end.saturating_sub(DEVICE_PAGES)..end {
        let read: u8 = guest.memory.guest().read_obj(address(write)).unwrap();
        assert_eq!(read, value(write), "write {write} of {end}");
    }
    assert_guest_uses_mapped_memory(&guest);
}

/// A page has data in the first round. A device fills the page with zeros after the round.
#[test]
fn zeros_replace_data_that_was_already_copied() {
    let page = GuestAddress(POOL_ADDRESS + (300 << 20));
    let Some(guest) = start_writing(1, 16) else { return };
    guest.memory.guest().write_slice(&[7; PAGE_BYTES], page).unwrap();
    let control = RehomeControl::new(&guest.memory);
    let guard = guest.devices.0[0].1.quiesce(Instant::now() + WAIT_TIMEOUT).unwrap();
    let status = std::thread::scope(|scope| {
        let moved = scope.spawn(|| move_memory(&guest, &control, RehomeLimits::default()));
        wait_until(|| control.status().rounds >= 1);
        guest.memory.guest().write_slice(&[0; PAGE_BYTES], page).unwrap();
        drop(guard);
        moved.join().unwrap()
    });
    assert_eq!((status.state, status.reason.as_str()), (RehomeState::Done, ""));
    let mut read = [1; PAGE_BYTES];
    guest.memory.guest().read_slice(&mut read, page).unwrap();
    assert_eq!(read, [0; PAGE_BYTES]);
}

#[test]
fn busy_device_makes_the_move_fail() {
    let Some(guest) = start_writing(1, 16) else { return };
    let control = RehomeControl::new(&guest.memory);
    let guard = guest.devices.0[0].1.quiesce(Instant::now() + WAIT_TIMEOUT).unwrap();
    let status = std::thread::scope(|scope| {
        scope.spawn(|| move_memory(&guest, &control, RehomeLimits::default())).join().unwrap()
    });
    assert_eq!(status.state, RehomeState::Failed);
    assert_eq!(status.reason, "a device did not become idle within 500ms");
    drop(guard);
    assert!(uses_pool(&guest));
    assert_guest_uses_mapped_memory(&guest);
}

#[test]
fn requests_wake_the_thread_once() {
    let Some(guest) = start_writing(1, 16) else { return };
    let control = RehomeControl::new(&guest.memory);
    let performed = AtomicU32::new(0);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let rehomer = rehomer(&guest, &control, RehomeLimits::default());
            rehomer.wait_for_request();
            rehomer.perform();
            performed.fetch_add(1, Ordering::SeqCst);
        });
        for _ in 0..3 {
            control.start(0).unwrap();
        }
        wait_until(|| control.status().state == RehomeState::Done);
    });
    assert_eq!(performed.load(Ordering::SeqCst), 1);
    assert_guest_uses_mapped_memory(&guest);
}

/// Environment variable of a child process that loses a slice while its memory is moved.
const CHILD_ENV: &str = "TARN_TEST_LOST_SLICE";

/// Truncates the file of the slice during a move. Runs only in a child process, because the process
/// ends.
#[test]
fn child_loses_slice_during_a_move() {
    if std::env::var_os(CHILD_ENV).is_none() {
        return;
    }
    let file = tempfile::tempfile().unwrap();
    file.set_len(POOL_BYTES).unwrap();
    let pool = ("pool".to_owned(), file.try_clone().unwrap());
    let guest = TestGuest::start_with_pool(pool, 1, PAGES).unwrap();
    fault::install_handler(&guest.memory, "v").unwrap();
    let control = RehomeControl::new(&guest.memory);
    std::thread::scope(|scope| {
        scope.spawn(|| move_memory(&guest, &control, ENDLESS));
        wait_until(|| control.status().rounds >= 1);
        file.set_len(0).unwrap();
        wait_until(|| false);
    });
}

#[test]
fn lost_slice_ends_the_process_during_a_move() {
    if TestGuest::start(1, 16).is_none() {
        return;
    }
    let mut command = std::process::Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "rehome::tests::child_loses_slice_during_a_move", "--nocapture"]);
    let output = command.env(CHILD_ENV, "1").output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(exit::SLICE_LOST.into()), "{stderr}");
    let expected = "error: VM v lost slice 3 of EMC emc0: the rack revoked it";
    assert!(stderr.contains(expected), "{stderr}");
}

#[test]
fn guest_without_enough_spare_memory_cannot_be_moved() {
    let Some(mut guest) = TestGuest::start(1, 16) else { return };
    let memory = Arc::get_mut(&mut guest.memory).unwrap();
    memory.set_spare_bytes(POOL_BYTES - 4096);
    let error = RehomeControl::new(&guest.memory).start(0).unwrap_err();
    assert_eq!(error, NotMovable::NoSpareMemory { spare: POOL_BYTES - 4096, pool: POOL_BYTES });
}
