//! Replays VMs on a cluster: places them, and samples the use of sockets and pools.

use std::{cmp::Reverse, collections::BinaryHeap};

use units::Ns;

use super::{Cluster, input::PlannedVm, sockets::Sockets, to_mib};

/// Rule for the socket of a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PlacementRule {
    /// The socket that fits best.
    BestFit,
    /// The socket in the trace. A VM is rejected if it does not fit there, or if the trace has no
    /// socket for it.
    AsTraced,
}

/// Times of the samples.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SampleTimes {
    /// Time of the first sample.
    pub first: Ns,
    /// Time between two samples, more than 0.
    pub interval: Ns,
}

/// VM to replay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlacedMemory {
    /// Arrival time, not before that of the previous VM.
    pub arrive: Ns,
    /// Departure time, not before the arrival; [`Ns::NEVER`] if the VM runs to the end.
    pub depart: Ns,
    /// Number of cores.
    pub cores: u32,
    /// Memory of the VM in MiB. The VMs of a socket have at most the memory of a socket without pools.
    pub mib: u64,
    /// Local memory of the VM in MiB, at most `mib`. Ignored if VMs use local memory first.
    pub local_mib: u64,
    /// Memory that counts as used in the VM's pool, in MiB; the largest pool memory if VMs use local
    /// memory first.
    pub pool_mib: u64,
    /// Socket in the trace, for [`PlacementRule::AsTraced`].
    pub traced_socket: Option<u32>,
}

impl PlacedMemory {
    /// Returns a VM whose whole memory is local, and counts as used in its pool. The results hold for every fixed
    /// share of pool memory, because they are proportional to it.
    pub fn whole(vm: &PlannedVm) -> Self {
        Self {
            arrive: vm.arrive,
            depart: vm.depart,
            cores: vm.cores,
            mib: vm.mib,
            local_mib: vm.mib,
            pool_mib: vm.mib,
            traced_socket: vm.socket,
        }
    }
}

/// Result for one VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The VM runs.
    Placed {
        /// Socket of the VM.
        socket: u32,
        /// Memory of the VM in its pool, in MiB.
        pool_mib: u64,
    },
    /// No socket fits.
    Rejected,
    /// The VM departs when it arrives, and is not placed.
    Instant,
}

/// Replay of a trace on a cluster, with pools of several sizes. All pool sizes share one placement.
#[derive(Clone, Debug)]
pub struct Replay {
    rule: PlacementRule,
    sockets: Sockets,
    /// Local memory of each socket, in MiB.
    local_limit_mib: u64,
    /// Unit of pool memory in MiB, if VMs use local memory first.
    local_first_unit_mib: Option<u64>,
    /// Local memory in use on each socket, in MiB.
    local_used_mib: Vec<u64>,
    running: BinaryHeap<Reverse<RunningVm>>,
    pools: Vec<PoolUse>,
    sampler: Sampler,
    counts: VmCounts,
    running_max: usize,
    socket_peak_mib: u64,
    socket_event_mib: u64,
    socket_max_mib: u64,
    first_arrival: Option<Ns>,
    /// Stranded memory at the last sample.
    stranded_mib: u64,
    stranded_mib_sum: f64,
    /// Sockets without free cores at the last sample.
    full_sockets: u32,
    full_sockets_sum: f64,
    /// Memory of the running VMs, local and on pools.
    used_mib: u64,
    used_mib_sum: f64,
}

/// Numbers of VMs by their result.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VmCounts {
    /// All VMs.
    pub vms: u64,
    /// VMs that were rejected.
    pub rejected: u64,
    /// VMs that departed when they arrived.
    pub instant: u64,
}

/// Result of a replay.
#[derive(Clone, Debug, PartialEq)]
pub struct ReplayReport {
    /// Numbers of VMs.
    pub counts: VmCounts,
    /// Number of samples.
    pub samples: u64,
    /// Largest number of VMs that ran at the same time.
    pub running_max: usize,
    /// Largest local use of a socket in a sample, in MiB.
    pub socket_peak_mib: u64,
    /// Largest local use of a socket at any time from the first sample on, in MiB.
    pub socket_event_mib: u64,
    /// Largest local use of a socket at any time, in MiB.
    pub socket_max_mib: u64,
    /// Arrival of the first VM; `None` without VMs.
    pub first_arrival: Option<Ns>,
    /// Mean over the samples of the free local memory on sockets without free cores, in MiB: no VM can
    /// use it (Pond, section 2). 0 without samples.
    pub stranded_mean_mib: f64,
    /// Mean over the samples of the number of sockets without free cores. 0 without samples.
    pub full_sockets_mean: f64,
    /// Mean over the samples of the memory of all running VMs, in MiB. 0 without samples.
    pub used_mean_mib: f64,
    /// Peaks by pool size, in the order of the pool sizes.
    pub pools: Vec<PoolPeaks>,
}

/// Largest use of a pool of one size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolPeaks {
    /// Number of sockets of each pool.
    pub pool_sockets: u32,
    /// Number of pools.
    pub pools: u32,
    /// Largest use of any pool in a sample, in MiB.
    pub sampled_mib: u64,
    /// Largest use of any pool after an arrival, in MiB, since the first sample was due.
    pub event_mib: u64,
}

/// VM that runs. The order is that of departures.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct RunningVm {
    depart: Ns,
    socket: u32,
    cores: u32,
    mib: u64,
    local_mib: u64,
    pool_mib: u64,
}

/// Use of all pools of one size.
#[derive(Clone, Debug)]
struct PoolUse {
    peaks: PoolPeaks,
    used_mib: Vec<u64>,
}

/// Time of the next sample.
#[derive(Clone, Copy, Debug)]
struct Sampler {
    times: SampleTimes,
    next: Ns,
    samples: u64,
    /// Whether the use has changed since the last sample.
    is_changed: bool,
}

impl Replay {
    /// Creates a replay without VMs.
    ///
    /// # Panics
    /// Panics if a pool size does not divide the number of sockets, or if the interval of the
    /// samples is 0.
    pub fn new(cluster: &Cluster, pool_sizes: &[u32], rule: PlacementRule, times: SampleTimes) -> Self {
        assert!(times.interval > Ns::ZERO, "samples have an interval");
        let pool_use = |size: &u32| {
            assert!(cluster.is_divided_by(*size), "the pool size divides the number of sockets");
            let pools = cluster.sockets / size;
            let peaks = PoolPeaks { pool_sockets: *size, pools, sampled_mib: 0, event_mib: 0 };
            PoolUse { peaks, used_mib: vec![0; pools as usize] }
        };
        Self {
            rule,
            sockets: Sockets::new(cluster),
            local_limit_mib: to_mib(cluster.memory_per_socket),
            local_first_unit_mib: None,
            local_used_mib: vec![0; cluster.sockets as usize],
            running: BinaryHeap::new(),
            pools: pool_sizes.iter().map(pool_use).collect(),
            sampler: Sampler { times, next: times.first, samples: 0, is_changed: true },
            counts: VmCounts::default(),
            running_max: 0,
            socket_peak_mib: 0,
            socket_event_mib: 0,
            socket_max_mib: 0,
            first_arrival: None,
            stranded_mib: 0,
            stranded_mib_sum: 0.0,
            full_sockets: 0,
            full_sockets_sum: 0.0,
            used_mib: 0,
            used_mib_sum: 0.0,
        }
    }

    /// Limits the local memory of each socket. A VM whose local memory does not fit on a socket runs on
    /// another socket, or is rejected.
    #[must_use]
    pub fn with_local_limit(mut self, mib: u64) -> Self {
        self.local_limit_mib = mib;
        self
    }

    /// Lets each VM use the free local memory of its socket first. Only the rest is on the pool: a multiple
    /// of `unit_mib`, and at most the pool memory of the VM. Unlike in `packing`, sockets on which a VM needs no
    /// pool memory are not preferred.
    #[must_use]
    pub fn with_local_memory_first(mut self, unit_mib: u64) -> Self {
        self.local_first_unit_mib = Some(unit_mib);
        self
    }

    /// Replays the departures up to the arrival of a VM, and then its arrival.
    pub fn arrive(&mut self, vm: &PlacedMemory) -> Outcome {
        self.depart_until(vm.arrive);
        self.sample_before(vm.arrive);
        self.counts.vms += 1;
        self.first_arrival.get_or_insert(vm.arrive);
        if vm.depart <= vm.arrive {
            self.counts.instant += 1;
            return Outcome::Instant;
        }
        let Some(socket) = self.find_socket(vm) else {
            self.counts.rejected += 1;
            return Outcome::Rejected;
        };
        let (local_mib, pool_mib) = self.divide(vm, socket).expect("the VM fits on the socket");
        self.place(&PlacedMemory { local_mib, pool_mib, ..*vm }, socket);
        Outcome::Placed { socket, pool_mib }
    }

    fn find_socket(&self, vm: &PlacedMemory) -> Option<u32> {
        let has_room = |socket: u32| self.divide(vm, socket).is_some();
        match self.rule {
            PlacementRule::BestFit => self.sockets.best_fit(vm.cores, vm.mib, has_room),
            PlacementRule::AsTraced => vm
                .traced_socket
                .filter(|socket| self.sockets.fits(*socket, vm.cores, vm.mib) && has_room(*socket)),
        }
    }

    /// Returns the local memory and the pool memory of a VM on a socket, in MiB. Returns `None` if the
    /// socket has too little local memory.
    fn divide(&self, vm: &PlacedMemory, socket: u32) -> Option<(u64, u64)> {
        let local_free = self.local_limit_mib - self.local_used_mib[socket as usize];
        let (local_mib, pool_mib) = match self.local_first_unit_mib {
            None => (vm.local_mib, vm.pool_mib),
            Some(unit) => {
                let pool_mib = vm.mib.saturating_sub(local_free).next_multiple_of(unit);
                (vm.mib.checked_sub(pool_mib)?, pool_mib)
            }
        };
        let fits = local_mib <= local_free && pool_mib <= vm.pool_mib;
        fits.then_some((local_mib, pool_mib))
    }

    fn place(&mut self, vm: &PlacedMemory, socket: u32) {
        let PlacedMemory { depart, cores, mib, local_mib, pool_mib, .. } = *vm;
        self.sockets.allocate(socket, cores, mib);
        let local_used = &mut self.local_used_mib[socket as usize];
        *local_used += local_mib;
        self.socket_max_mib = self.socket_max_mib.max(*local_used);
        let counts_as_event = vm.arrive >= self.sampler.times.first;
        if counts_as_event {
            self.socket_event_mib = self.socket_event_mib.max(*local_used);
        }
        self.used_mib += mib;
        self.running.push(Reverse(RunningVm { depart, socket, cores, mib, local_mib, pool_mib }));
        self.running_max = self.running_max.max(self.running.len());
        self.sampler.is_changed = true;
        for pool_use in &mut self.pools {
            let used = &mut pool_use.used_mib[(socket % pool_use.peaks.pools) as usize];
            *used += pool_mib;
            if counts_as_event {
                pool_use.peaks.event_mib = pool_use.peaks.event_mib.max(*used);
            }
        }
    }

    /// Replays the departures up to a time, with the samples before each departure.
    fn depart_until(&mut self, time: Ns) {
        while let Some(Reverse(vm)) = self.running.peek().copied().filter(|Reverse(vm)| vm.depart <= time) {
            self.sample_before(vm.depart);
            self.running.pop();
            self.sockets.free(vm.socket, vm.cores, vm.mib);
            self.local_used_mib[vm.socket as usize] -= vm.local_mib;
            self.used_mib -= vm.mib;
            self.sampler.is_changed = true;
            for pool_use in &mut self.pools {
                pool_use.used_mib[(vm.socket % pool_use.peaks.pools) as usize] -= vm.pool_mib;
            }
        }
    }

    /// Takes all samples that are due before a time.
    fn sample_before(&mut self, time: Ns) {
        if self.sampler.next < time {
            let span = time.since(self.sampler.next).0 - 1;
            self.take_samples(span / self.sampler.times.interval.0 + 1);
        }
    }

    /// Takes a number of samples of the current use.
    fn take_samples(&mut self, count: u64) {
        let step = Ns(self.sampler.times.interval.0.saturating_mul(count));
        self.sampler.next = self.sampler.next.after(step);
        self.sampler.samples += count;
        if std::mem::take(&mut self.sampler.is_changed) {
            self.sample_use();
        }
        self.stranded_mib_sum += self.stranded_mib as f64 * count as f64;
        self.full_sockets_sum += f64::from(self.full_sockets) * count as f64;
        self.used_mib_sum += self.used_mib as f64 * count as f64;
    }

    fn sample_use(&mut self) {
        (self.stranded_mib, self.full_sockets) = (0, 0);
        for (socket, used) in (0..).zip(&self.local_used_mib) {
            self.socket_peak_mib = self.socket_peak_mib.max(*used);
            self.socket_event_mib = self.socket_event_mib.max(*used);
            if self.sockets.free_cores(socket) == 0 {
                self.stranded_mib += self.local_limit_mib - used;
                self.full_sockets += 1;
            }
        }
        for pool_use in &mut self.pools {
            let largest = pool_use.used_mib.iter().copied().max().unwrap_or_default();
            pool_use.peaks.sampled_mib = pool_use.peaks.sampled_mib.max(largest);
            pool_use.peaks.event_mib = pool_use.peaks.event_mib.max(largest);
        }
    }

    /// Replays the remaining departures and samples, and returns the result. `last_arrival` is the
    /// arrival of the last VM.
    pub fn finish(mut self, last_arrival: Ns) -> ReplayReport {
        let departures = self.running.iter().map(|Reverse(vm)| vm.depart).filter(|at| *at < Ns::NEVER);
        let last_event = departures.max().unwrap_or(last_arrival).max(last_arrival);
        self.depart_until(last_event);
        self.sample_before(last_event.after(Ns(1)));
        let samples = self.sampler.samples;
        let mean = |sum: f64| if samples == 0 { 0.0 } else { sum / samples as f64 };
        ReplayReport {
            counts: self.counts,
            samples,
            running_max: self.running_max,
            socket_peak_mib: self.socket_peak_mib,
            socket_event_mib: self.socket_event_mib,
            socket_max_mib: self.socket_max_mib,
            first_arrival: self.first_arrival,
            stranded_mean_mib: mean(self.stranded_mib_sum),
            full_sockets_mean: mean(self.full_sockets_sum),
            used_mean_mib: mean(self.used_mib_sum),
            pools: self.pools.into_iter().map(|pool_use| pool_use.peaks).collect(),
        }
    }
}
