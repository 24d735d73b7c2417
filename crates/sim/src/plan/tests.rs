//! Compares the replay with a reference that shares no code with it: it handles one second after the
//! other, and searches all sockets and all VMs.

use proptest::prelude::*;
use units::{Bytes, Ns};

use super::{
    Cluster,
    input::VmStream,
    replay::{Outcome, PlacedMemory, PlacementRule, PoolPeaks, Replay, ReplayReport, SampleTimes, VmCounts},
    result::DramNeed,
};

/// VM of the reference: arrival, departure, cores and memory in MiB.
#[derive(Clone, Copy, Debug)]
struct TestVm {
    arrive: u64,
    depart: Option<u64>,
    cores: u32,
    mib: u64,
}

/// Results of the reference.
#[derive(Debug, Default, PartialEq)]
struct Expected {
    /// Socket of each VM that was placed.
    sockets: Vec<Option<usize>>,
    rejected: u64,
    instant: u64,
    samples: u64,
    socket_peak: u64,
    stranded_sum: u64,
    used_sum: u64,
    /// Largest use of a pool by pool size: in a sample, and after any event.
    pool_peaks: Vec<(u64, u64)>,
}

struct ReferenceCluster {
    sockets: usize,
    cores: u32,
    mib: u64,
}

/// Replays the VMs second by second.
fn reference(
    cluster: &ReferenceCluster,
    vms: &[TestVm],
    pool_sizes: &[usize],
    first: u64,
    every: u64,
) -> Expected {
    let mut expected = Expected { sockets: vec![None; vms.len()], ..Expected::default() };
    expected.pool_peaks = vec![(0, 0); pool_sizes.len()];
    let is_running = |vm: usize, second: u64| vms[vm].depart.is_none_or(|depart| depart > second);
    let mut placed: Vec<(usize, usize)> = Vec::new();
    let end = vms.iter().map(|vm| vm.arrive).max().unwrap();
    let mut second = 0;
    loop {
        placed.retain(|(vm, _)| is_running(*vm, second));
        for vm in (0..vms.len()).filter(|vm| vms[*vm].arrive == second) {
            if vms[vm].depart == Some(second) {
                expected.instant += 1;
                continue;
            }
            let free = |socket: usize| {
                let on_it = placed.iter().filter(|(_, on)| *on == socket);
                let used = on_it.fold((0, 0), |(c, m), (vm, _)| (c + vms[*vm].cores, m + vms[*vm].mib));
                (cluster.cores - used.0, cluster.mib - used.1)
            };
            let mut best: Option<(u32, u64, usize)> = None;
            for socket in 0..cluster.sockets {
                let (cores, mib) = free(socket);
                if cores < vms[vm].cores || mib < vms[vm].mib {
                    continue;
                }
                if best.is_none_or(|best| (cores, mib, socket) < best) {
                    best = Some((cores, mib, socket));
                }
            }
            match best {
                Some((_, _, socket)) => {
                    placed.push((vm, socket));
                    expected.sockets[vm] = Some(socket);
                }
                None => expected.rejected += 1,
            }
            if second >= first {
                record_pools(cluster, vms, &placed, pool_sizes, |at, used| {
                    expected.pool_peaks[at].1 = expected.pool_peaks[at].1.max(used);
                });
            }
        }
        if second >= first && (second - first).is_multiple_of(every) {
            expected.samples += 1;
            expected.used_sum += placed.iter().map(|(vm, _)| vms[*vm].mib).sum::<u64>();
            for socket in 0..cluster.sockets {
                let on_it: Vec<usize> =
                    placed.iter().filter(|(_, on)| *on == socket).map(|(vm, _)| *vm).collect();
                let used: u64 = on_it.iter().map(|vm| vms[*vm].mib).sum();
                expected.socket_peak = expected.socket_peak.max(used);
                if on_it.iter().map(|vm| vms[*vm].cores).sum::<u32>() == cluster.cores {
                    expected.stranded_sum += cluster.mib - used;
                }
            }
            record_pools(cluster, vms, &placed, pool_sizes, |at, used| {
                let peaks = &mut expected.pool_peaks[at];
                *peaks = (peaks.0.max(used), peaks.1.max(used));
            });
        }
        let departs_later = placed.iter().any(|(vm, _)| vms[*vm].depart.is_some());
        if second >= end && !departs_later {
            return expected;
        }
        second += 1;
    }
}

fn record_pools(
    cluster: &ReferenceCluster,
    vms: &[TestVm],
    placed: &[(usize, usize)],
    pool_sizes: &[usize],
    mut record: impl FnMut(usize, u64),
) {
    for (at, size) in pool_sizes.iter().enumerate() {
        let pools = cluster.sockets / size;
        for pool in 0..pools {
            let on_it = placed.iter().filter(|(_, socket)| socket % pools == pool);
            record(at, on_it.map(|(vm, _)| vms[*vm].mib).sum());
        }
    }
}

fn to_placed(vm: &TestVm) -> PlacedMemory {
    PlacedMemory {
        arrive: Ns::secs(vm.arrive),
        depart: vm.depart.map_or(Ns::NEVER, Ns::secs),
        cores: vm.cores,
        mib: vm.mib,
        local_mib: vm.mib,
        pool_mib: vm.mib,
        traced_socket: None,
    }
}

fn replay(
    cluster: &Cluster,
    vms: &[TestVm],
    pool_sizes: &[u32],
    times: SampleTimes,
) -> (Vec<Outcome>, ReplayReport) {
    let mut replay = Replay::new(cluster, pool_sizes, PlacementRule::BestFit, times);
    let outcomes = vms.iter().map(|vm| replay.arrive(&to_placed(vm))).collect();
    let last = vms.last().map_or(Ns::ZERO, |vm| Ns::secs(vm.arrive));
    (outcomes, replay.finish(last))
}

fn any_vms() -> impl Strategy<Value = Vec<TestVm>> {
    let vm = (0..60_u64, prop::option::weighted(0.9, 0..40_u64), 1..5_u32, 1..13_u64);
    prop::collection::vec(vm, 1..80).prop_map(|mut vms| {
        vms.sort_by_key(|(arrive, ..)| *arrive);
        let test_vm = |(arrive, life, cores, mib): (u64, Option<u64>, u32, u64)| TestVm {
            arrive,
            depart: life.map(|life| arrive + life),
            cores,
            mib,
        };
        vms.into_iter().map(test_vm).collect()
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]
    #[test]
    fn replay_agrees_exactly_with_reference(
        vms in any_vms(), sockets in 1..4_u32, cores in 4..9_u32, mib in 12..25_u64, first in 0..40_u64, every in 1..12_u64,
    ) {
        let sockets = 2 * sockets;
        let pool_sizes = [1, 2, sockets];
        let cluster = Cluster { sockets, cores_per_socket: cores, memory_per_socket: Bytes::mib(mib) };
        let times = SampleTimes { first: Ns::secs(first), interval: Ns::secs(every) };
        let (outcomes, report) = replay(&cluster, &vms, &pool_sizes, times);
        let reference_cluster = ReferenceCluster { sockets: sockets as usize, cores, mib };
        let expected = reference(&reference_cluster, &vms, &pool_sizes.map(|size| size as usize), first, every);
        let placed = |outcome: &Outcome| match outcome {
            Outcome::Placed { socket, .. } => Some(*socket as usize),
            Outcome::Rejected | Outcome::Instant => None,
        };
        prop_assert_eq!(outcomes.iter().map(placed).collect::<Vec<_>>(), expected.sockets);
        let counts = VmCounts { vms: vms.len() as u64, rejected: expected.rejected, instant: expected.instant };
        prop_assert_eq!(report.counts, counts);
        prop_assert_eq!((report.samples, report.socket_peak_mib), (expected.samples, expected.socket_peak));
        let mean = |sum: u64| if expected.samples == 0 { 0.0 } else { sum as f64 / expected.samples as f64 };
        let means = (report.stranded_mean_mib, report.used_mean_mib);
        prop_assert_eq!(means, (mean(expected.stranded_sum), mean(expected.used_sum)));
        let peaks: Vec<_> = report.pools.iter().map(|pool| (pool.sampled_mib, pool.event_mib)).collect();
        prop_assert_eq!(peaks, expected.pool_peaks);
    }
}

fn vm(arrive: u64, depart: Option<u64>, cores: u32, mib: u64) -> TestVm {
    TestVm { arrive, depart, cores, mib }
}

fn placed((socket, pool_mib): (u32, u64)) -> Outcome {
    Outcome::Placed { socket, pool_mib }
}

const SMALL: Cluster = Cluster { sockets: 2, cores_per_socket: 4, memory_per_socket: Bytes::mib(8) };
const EVERY_SECOND: SampleTimes = SampleTimes { first: Ns::ZERO, interval: Ns::secs(1) };

#[test]
fn fewest_free_cores_then_least_free_memory_then_lowest_number_is_chosen() {
    let cluster = Cluster { sockets: 3, ..SMALL };
    let vms = [vm(0, None, 1, 1), vm(0, None, 4, 1), vm(0, None, 2, 6), vm(1, None, 2, 2), vm(1, None, 1, 1)];
    let (outcomes, _) = replay(&cluster, &vms, &[3], EVERY_SECOND);
    // The fourth VM fits only on socket 2. The last VM then fits only on socket 0.
    let sockets = [(0, 1), (1, 1), (0, 6), (2, 2), (0, 1)].map(placed);
    assert_eq!(outcomes, sockets);
}

#[test]
fn departures_of_a_second_precede_its_arrivals() {
    let vms = [
        vm(0, Some(5), 4, 8),
        vm(0, None, 4, 8),
        vm(5, Some(5), 4, 8),
        vm(5, Some(9), 4, 8),
        vm(6, None, 1, 1),
    ];
    let (outcomes, report) = replay(&SMALL, &vms, &[2], EVERY_SECOND);
    let expected = [placed((0, 8)), placed((1, 8)), Outcome::Instant, placed((0, 8)), Outcome::Rejected];
    assert_eq!(outcomes, expected);
    assert_eq!(report.counts, VmCounts { vms: 5, rejected: 1, instant: 1 });
    assert_eq!((report.samples, report.running_max), (10, 2));
}

#[test]
fn short_peak_between_samples_is_an_event_peak_only() {
    let times = SampleTimes { first: Ns::secs(10), interval: Ns::secs(10) };
    let vms = [vm(0, Some(9), 4, 8), vm(0, None, 1, 2), vm(11, Some(12), 1, 5), vm(20, None, 1, 1)];
    let (_, report) = replay(&SMALL, &vms, &[2], times);
    let peaks = PoolPeaks { pool_sockets: 2, pools: 1, sampled_mib: 3, event_mib: 7 };
    assert_eq!(report.pools, [peaks]);
    assert_eq!(report.samples, 2);
}

#[test]
fn traced_socket_is_used_and_overcommit_is_rejected() {
    let mut replay = Replay::new(&SMALL, &[2], PlacementRule::AsTraced, EVERY_SECOND);
    let mut arrive = |cores, socket| {
        replay.arrive(&PlacedMemory { traced_socket: socket, ..to_placed(&vm(0, None, cores, 1)) })
    };
    assert_eq!(arrive(1, Some(1)), placed((1, 1)));
    assert_eq!(arrive(4, Some(1)), Outcome::Rejected);
    assert_eq!(arrive(4, Some(0)), placed((0, 1)));
    assert_eq!(arrive(1, None), Outcome::Rejected);
}

#[test]
fn vm_runs_on_a_socket_that_has_its_local_memory() {
    // Sockets with 8 MiB, of which 5 MiB are local.
    let replay = Replay::new(&SMALL, &[1], PlacementRule::BestFit, EVERY_SECOND);
    let mut replay = replay.with_local_limit(5);
    let mut arrive = |mib, pool_mib| {
        let vm = vm(0, None, 1, mib);
        replay.arrive(&PlacedMemory { local_mib: mib - pool_mib, pool_mib, ..to_placed(&vm) })
    };
    assert_eq!(arrive(4, 0), placed((0, 0)));
    // Socket 0 has only 1 MiB of local memory left.
    assert_eq!(arrive(2, 0), placed((1, 0)));
    assert_eq!(arrive(4, 3), placed((0, 3)));
    assert_eq!(arrive(4, 0), Outcome::Rejected);
}

#[test]
fn local_memory_is_used_first_and_pool_memory_in_whole_units() {
    let replay = Replay::new(&SMALL, &[2], PlacementRule::BestFit, EVERY_SECOND);
    let mut replay = replay.with_local_limit(5).with_local_memory_first(2);
    let mut arrive =
        |mib, pool_mib| replay.arrive(&PlacedMemory { pool_mib, ..to_placed(&vm(0, None, 1, mib)) });
    assert_eq!(arrive(4, 4), placed((0, 0)));
    // 1 MiB of local memory is free on socket 0, and 2 MiB are missing.
    assert_eq!(arrive(3, 2), placed((0, 2)));
    // The VM may have only 1 MiB on the pool, which is less than a unit.
    assert_eq!(arrive(1, 1), placed((1, 0)));
    assert_eq!(arrive(5, 3), placed((1, 2)));
    assert_eq!(arrive(2, 1), Outcome::Rejected);
}

#[test]
fn required_dram_is_relative_to_all_sockets() {
    let cluster = Cluster { sockets: 8, cores_per_socket: 4, memory_per_socket: Bytes::gib(4) };
    let need = DramNeed::new(&cluster, 2048.0, 2, 6144.0);
    // 8 sockets with 2 GiB, and 2 pools with 6 GiB, instead of 32 GiB.
    assert_eq!((need.local_mib, need.pools_mib), (16.0 * 1024.0, 12.0 * 1024.0));
    assert_eq!((need.required, need.saved()), (0.875, 0.125));
}

/// Replays the open part of Azure's trace V1. Returns `None` without the public data.
fn azure_v1(pool_sizes: &[u32]) -> Option<(Cluster, ReplayReport)> {
    let input = crate::public_data::open_gz("vm-arrivals/azure-v1/vms.csv.gz")?;
    let cluster = Cluster { sockets: 768, cores_per_socket: 48, memory_per_socket: Bytes::gib(144) };
    let times = SampleTimes { first: Ns::secs(86_400), interval: Ns::secs(300) };
    let mut stream = VmStream::new(input, cluster).unwrap();
    let mut replay = Replay::new(&cluster, pool_sizes, PlacementRule::BestFit, times);
    let mut chunk = Vec::new();
    let mut last = Ns::ZERO;
    loop {
        stream.read_chunk(&mut chunk, 1000).unwrap();
        let Some(vm) = chunk.last() else { return Some((cluster, replay.finish(last))) };
        last = vm.arrive;
        for vm in &chunk {
            replay.arrive(&PlacedMemory::whole(vm));
        }
    }
}

/// Compares with numbers of a simulator that is not part of this repository.
#[test]
fn azure_v1_agrees_with_outside_simulator() {
    let Some((cluster, report)) = azure_v1(&[8, 16, 32, 64]) else { return };
    // Half of each VM's memory is on a pool.
    let required = |peaks: &PoolPeaks| {
        let need = DramNeed::new(&cluster, 72.0 * 1024.0, peaks.pools, peaks.sampled_mib as f64 / 2.0);
        100.0 * need.required
    };
    let rounded: Vec<String> = report.pools.iter().map(|peaks| format!("{:.1}", required(peaks))).collect();
    assert_eq!(rounded, ["95.9", "94.3", "92.7", "91.5"]);
    assert_eq!(format!("{:.3}", 100.0 * report.rejected()), "2.888");
}
