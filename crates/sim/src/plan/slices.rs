//! Replays the slices of placed VMs through the ledger of the pool manager. Each pool is a rack of its
//! own, whose hosts are the sockets of the pool.
//!
//! A slice is assigned, granted and online when its VM starts. After the VM has ended, the host takes
//! one slice after the other offline at a given speed, and the slice is scrubbed and free again.
//! Devices and hosts answer without delay otherwise. The ledger contains twice the memory of the sockets, as
//! far as its limits permit, so that no start waits; the peak of slices that are in use or draining is the
//! size of a pool with which no start would wait (guarantee 6).
//!
//! The results are those after the warm-up, as for the sizes of the pools.
//!
//! The *offline speed* of a start is the speed at which slices must have been taken offline, so that the
//! start does not wait in a pool without a buffer, which is as large as the largest use of any pool
//! (Pond, section 6.5). If `s` slices of this pool are still unused after the start, then all released
//! slices but the latest `s` must be offline: the speed is the largest (i - s) / age over the i latest
//! released slices, where `age` is the time since the i-th of them was released, at least 1 s.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BinaryHeap, VecDeque},
};

use pool::{
    audit::Actor,
    ledger::{EmcSpec, HostSpec, Ledger, RackSpec, Reserve, ReserveOutcome, When},
    protocol::{Holding, ScrubReport},
    record::{EndReason, Meta, RequestKey},
    rejection::Rejection,
    slice::Event,
};
use units::{
    Bytes, EmcId, HostId, Name, Ns, RequestId, ReservationId, SliceId, UnixMs,
    limits::{REQUEST_ID_RETENTION, RESERVATIONS_PER_HOST_MAX, SLICES_PER_EMC_MAX},
};

use super::{Cluster, attachment::Attachment};

/// Time for which a released slice counts towards offline speeds.
const RELEASES_RETAINED: Ns = Ns::secs(3600);
/// Shortest age of a released slice, the resolution of traces.
const AGE_MIN_S: f64 = 1.0;

/// Shape of the pools.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PoolShape {
    /// Number of sockets of each pool; divides the sockets of the cluster.
    pub pool_sockets: u32,
    /// EMCs of each pool, and the sockets that are attached to them.
    pub attachment: Attachment,
    /// Size of a slice in MiB, more than 0.
    pub slice_mib: u64,
    /// Slices of a pool without a buffer: the largest use of any pool.
    pub slices_without_buffer: u32,
    /// Speed at which a host takes slices offline, in GiB/s, more than 0.
    pub offline_gib_per_s: f64,
    /// Time from which starts count in the result.
    pub first: Ns,
}

/// Result of the replay of slices.
#[derive(Clone, Debug, PartialEq)]
pub struct SliceReport {
    /// Largest number of slices in use in any pool.
    pub in_use_max: u32,
    /// Largest number of slices in use or draining in any pool.
    pub occupied_max: u32,
    /// Number of slices that were assigned to VMs.
    pub assigned: u64,
    /// Number of VMs with slices that started.
    pub starts: u64,
    /// Number of starts that the ledger rejected because of its limits.
    pub rejected: u64,
    /// Offline speeds of starts in GiB/s: 50th, 99th and 99.99th percentile.
    pub offline_gib_per_s: [f64; 3],
    /// Largest number of VMs with slices on one EMC at a time.
    pub vms_per_emc_max: u32,
    /// Largest number of slices in use on any EMC.
    pub in_use_per_emc_max: u32,
    /// Largest number of slices in use or draining on any EMC.
    pub occupied_per_emc_max: u32,
}

impl SliceReport {
    /// Returns the slices that each pool needs in addition to those in use, so that no start waits.
    pub fn buffer(&self) -> u32 {
        self.occupied_max - self.in_use_max
    }

    /// Returns the same for each EMC, if each EMC is as large as the largest use of any EMC.
    pub fn buffer_per_emc(&self) -> u32 {
        self.occupied_per_emc_max - self.in_use_per_emc_max
    }
}

/// Placed VM with slices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SliceVm {
    /// Start, not before that of the previous VM.
    pub arrive: Ns,
    /// End, after the start.
    pub depart: Ns,
    /// Socket of the VM.
    pub socket: u32,
    /// Number of slices, more than 0.
    pub slices: u32,
}

/// Replay of the slices of all pools of one size.
#[derive(Debug)]
pub struct SliceReplay {
    shape: PoolShape,
    pools: Vec<PoolRack>,
    /// Time at which each host has taken all released slices offline.
    idle_at: Vec<Ns>,
    slice_offline_time: Ns,
    running: BinaryHeap<Reverse<(Ns, u32, ReservationId)>>,
    draining: BinaryHeap<Reverse<(Ns, u32, SliceId)>>,
    speeds: SpeedHistogram,
    report: SliceReport,
}

/// Rack of one pool.
#[derive(Debug)]
struct PoolRack {
    ledger: Ledger,
    hosts: Vec<(HostId, Name)>,
    in_use: u32,
    occupied: u32,
    /// Use of each EMC.
    emcs: BTreeMap<EmcId, EmcUse>,
    /// Releases of the last hour, oldest first.
    releases: VecDeque<(Ns, u32)>,
    /// Slices of these releases.
    released: u32,
    started: u64,
}

/// VMs and slices on an EMC.
#[derive(Clone, Copy, Debug, Default)]
struct EmcUse {
    vms: u32,
    in_use: u32,
    occupied: u32,
}

impl SliceReplay {
    /// Creates the pools of a cluster, without VMs.
    ///
    /// # Errors
    /// Returns [`Rejection`] if a pool exceeds the limits of the ledger, for example on the hosts of a rack.
    pub fn new(cluster: &Cluster, shape: PoolShape) -> Result<Self, Rejection> {
        let pools = cluster.sockets / shape.pool_sockets;
        let socket_mib = super::to_mib(cluster.memory_per_socket);
        // Slices in use never exceed the memory of the sockets. As many can be draining.
        let slices = 2 * u64::from(shape.pool_sockets) * socket_mib.div_ceil(shape.slice_mib);
        let emcs = shape.attachment.emcs(shape.pool_sockets);
        let per_emc = slices.div_ceil(u64::from(emcs)).min(u64::from(SLICES_PER_EMC_MAX));
        let per_emc = u32::try_from(per_emc).expect("the limit fits");
        let rack = rack_spec(&shape, per_emc);
        let pool = || PoolRack::new(&rack);
        let slice_gib = shape.slice_mib as f64 / 1024.0;
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a positive time")]
        let slice_offline_time = Ns((slice_gib / shape.offline_gib_per_s * 1e9) as u64);
        Ok(Self {
            shape,
            pools: (0..pools).map(|_| pool()).collect::<Result<_, _>>()?,
            idle_at: vec![Ns::ZERO; cluster.sockets as usize],
            slice_offline_time,
            running: BinaryHeap::new(),
            draining: BinaryHeap::new(),
            speeds: SpeedHistogram::default(),
            report: SliceReport {
                in_use_max: 0,
                occupied_max: 0,
                assigned: 0,
                starts: 0,
                rejected: 0,
                offline_gib_per_s: [0.0; 3],
                vms_per_emc_max: 0,
                in_use_per_emc_max: 0,
                occupied_per_emc_max: 0,
            },
        })
    }

    /// Starts a VM, after all VMs and slices that have ended or are offline until then.
    pub fn start(&mut self, vm: &SliceVm) {
        self.advance(vm.arrive);
        let pools = u32::try_from(self.pools.len()).expect("fewer pools than sockets");
        let index = vm.socket % pools;
        let pool = &mut self.pools[index as usize];
        let host = (vm.socket / pools) as usize;
        let speed = pool.offline_speed(vm.arrive, vm.slices, self.shape.slices_without_buffer);
        let Some(id) = pool.reserve(vm.arrive, host, vm.slices) else {
            self.report.rejected += 1;
            return;
        };
        if vm.depart < Ns::NEVER {
            self.running.push(Reverse((vm.depart, vm.socket, id)));
        }
        if vm.arrive < self.shape.first {
            return;
        }
        self.speeds.add(speed * self.shape.slice_mib as f64 / 1024.0);
        self.report.starts += 1;
        self.report.assigned += u64::from(vm.slices);
        self.report.in_use_max = self.report.in_use_max.max(pool.in_use);
        self.report.occupied_max = self.report.occupied_max.max(pool.occupied);
        for emc in pool.emcs.values() {
            self.report.vms_per_emc_max = self.report.vms_per_emc_max.max(emc.vms);
            self.report.in_use_per_emc_max = self.report.in_use_per_emc_max.max(emc.in_use);
            self.report.occupied_per_emc_max = self.report.occupied_per_emc_max.max(emc.occupied);
        }
    }

    /// Ends VMs and takes slices offline until a time, in the order of time.
    fn advance(&mut self, time: Ns) {
        loop {
            let ends = self.running.peek().map(|Reverse((at, ..))| *at).filter(|at| *at <= time);
            let drained = self.draining.peek().map(|Reverse((at, ..))| *at).filter(|at| *at <= time);
            match (ends, drained) {
                (None, None) => return,
                (Some(end), drained) if drained.is_none_or(|at| end <= at) => self.end_next_vm(),
                _ => self.free_next_slice(),
            }
        }
    }

    fn end_next_vm(&mut self) {
        let Some(Reverse((now, socket, id))) = self.running.pop() else { return };
        let pools = u32::try_from(self.pools.len()).expect("fewer pools than sockets");
        let slices = self.pools[(socket % pools) as usize].end(now, id);
        let idle_at = &mut self.idle_at[socket as usize];
        *idle_at = (*idle_at).max(now);
        for slice in slices {
            *idle_at = idle_at.after(self.slice_offline_time);
            self.draining.push(Reverse((*idle_at, socket, slice)));
        }
    }

    fn free_next_slice(&mut self) {
        let Some(Reverse((now, socket, slice))) = self.draining.pop() else { return };
        let pools = u32::try_from(self.pools.len()).expect("fewer pools than sockets");
        self.pools[(socket % pools) as usize].free(now, slice, self.shape.slice_mib);
    }

    /// Returns the result.
    pub fn finish(mut self) -> SliceReport {
        self.report.offline_gib_per_s = [0.5, 0.99, 0.9999].map(|level| self.speeds.percentile(level));
        self.report
    }
}

fn rack_spec(shape: &PoolShape, slices_per_emc: u32) -> RackSpec {
    let name = |text: String| Name::new(&text).expect("letters and digits are a name");
    let emcs = 0..shape.attachment.emcs(shape.pool_sockets);
    let emcs: Vec<Name> = emcs.map(|emc| name(format!("emc{emc}"))).collect();
    let attached = shape.attachment.emcs_by_host(shape.pool_sockets);
    let names = |numbers: &Vec<u32>| numbers.iter().map(|emc| emcs[*emc as usize].clone()).collect();
    let emc = |emc: &Name| EmcSpec {
        name: emc.clone(),
        slices: slices_per_emc,
        driver: "emulated".to_owned(),
        path: format!("/{emc}"),
        serial: None,
    };
    let host = |(host, attached): (usize, &Vec<u32>)| HostSpec {
        name: name(format!("socket{host}")),
        cores: u32::try_from(RESERVATIONS_PER_HOST_MAX).expect("the limit fits"),
        local: Bytes::ZERO,
        emcs: names(attached),
    };
    RackSpec { emcs: emcs.iter().map(emc).collect(), hosts: attached.iter().enumerate().map(host).collect() }
}

fn when(now: Ns) -> When {
    When { now, wall: UnixMs(now.as_ms()) }
}

impl PoolRack {
    fn new(spec: &RackSpec) -> Result<Self, Rejection> {
        let mut ledger = Ledger::new(Meta::new("plan".to_owned()));
        let change = ledger.decide_configuration(when(Ns::ZERO), spec)?;
        ledger.apply(change);
        let hosts: Vec<_> = ledger.hosts().map(|(id, entry)| (id, entry.host.name.clone())).collect();
        hosts.iter().for_each(|(id, _)| ledger.set_host_live(*id, true));
        let emcs = ledger.emcs().map(|(id, _)| (id, EmcUse::default())).collect();
        Ok(Self {
            ledger,
            hosts,
            in_use: 0,
            occupied: 0,
            emcs,
            releases: VecDeque::new(),
            released: 0,
            started: 0,
        })
    }

    /// Reserves slices for a VM and brings them online. Returns `None` if the ledger rejects the request.
    fn reserve(&mut self, now: Ns, host: usize, slices: u32) -> Option<ReservationId> {
        self.started += 1;
        let vm = format!("vm{}", self.started);
        let request = Reserve {
            request: RequestKey {
                client: Name::new("plan").expect("letters are a name"),
                id: RequestId::new(&vm).expect("letters and digits are a request ID"),
            },
            host: self.hosts[host].1.clone(),
            vm: Name::new(&vm).expect("letters and digits are a name"),
            slices,
            local: Bytes::ZERO,
            cores: 0,
            pinned: false,
            commit_within: Ns::secs(300),
            uid: None,
        };
        let Ok(ReserveOutcome::New(id, change)) = self.ledger.decide_reserve(when(now), request) else {
            return None;
        };
        self.ledger.apply(change);
        let host = self.hosts[host].0;
        let own = self.slices_of(id);
        for slice in &own {
            let epoch = self.ledger.slot(*slice).expect("the slice exists").epoch;
            self.step(*slice, Event::Granted(epoch));
            self.step(*slice, Event::Onlined(host, epoch));
        }
        let commit = self.ledger.decide_commit(when(now), id, Actor::Manager);
        self.ledger.apply(commit.expect("a new reservation can be committed"));
        self.count_on_emcs(&own, |emc, slices| {
            emc.vms += 1;
            emc.in_use += slices;
            emc.occupied += slices;
        });
        self.in_use += slices;
        self.occupied += slices;
        Some(id)
    }

    fn slices_of(&self, id: ReservationId) -> Vec<SliceId> {
        self.ledger.reservation(id).map(|reservation| reservation.slices.clone()).unwrap_or_default()
    }

    fn step(&mut self, slice: SliceId, event: Event) {
        let change = self.ledger.decide_slice_change(slice, event);
        self.ledger.apply(change.expect("the events are in the order of the slice's states"));
    }

    /// Changes the use of each EMC with some of these slices by their number.
    fn count_on_emcs(&mut self, slices: &[SliceId], change: impl Fn(&mut EmcUse, u32)) {
        let mut numbers: BTreeMap<EmcId, u32> = BTreeMap::new();
        for emc in slices.iter().filter_map(|slice| self.ledger.emc_of(*slice)) {
            *numbers.entry(emc).or_default() += 1;
        }
        for (emc, number) in numbers {
            change(self.emcs.entry(emc).or_default(), number);
        }
    }

    /// Ends a VM, and returns the slices that its host must take offline.
    fn end(&mut self, now: Ns, id: ReservationId) -> Vec<SliceId> {
        let slices = self.slices_of(id);
        let change =
            self.ledger.decide_reservation_end(when(now), id, EndReason::ProcessGone, Actor::Manager);
        self.ledger.apply(change.expect("the reservation exists"));
        self.count_on_emcs(&slices, |emc, slices| {
            emc.vms -= 1;
            emc.in_use -= slices;
        });
        let count = u32::try_from(slices.len()).expect("a VM has few slices");
        self.in_use -= count;
        self.releases.push_back((now, count));
        self.released += count;
        while let Some((at, oldest)) = self.releases.front().copied()
            && now.since(at) > RELEASES_RETAINED
        {
            self.releases.pop_front();
            self.released -= oldest;
        }
        slices
    }

    /// Revokes a slice that its host has taken offline, scrubs it and frees it.
    fn free(&mut self, now: Ns, slice: SliceId, slice_mib: u64) {
        let slot = self.ledger.slot(slice).expect("the slice exists");
        let host = slot.holder().expect("a draining slice has a holder");
        self.step(slice, Event::Released(host, slot.epoch));
        self.step(slice, Event::Revoked(slot.epoch));
        self.step(slice, Event::ScrubBy(host));
        let epoch = self.ledger.slot(slice).expect("the slice exists").epoch;
        self.step(slice, Event::Granted(epoch));
        let wall = UnixMs(now.as_ms());
        let report = ScrubReport {
            holding: Holding { slice, epoch },
            started: wall,
            ended: wall,
            verified: Bytes::mib(slice_mib),
        };
        self.step(slice, Event::Scrubbed(host, report));
        self.step(slice, Event::Revoked(epoch));
        self.occupied -= 1;
        self.count_on_emcs(&[slice], |emc, slices| emc.occupied -= slices);
        // No request is repeated, so that ended requests need not be retained.
        let expired = self.ledger.decide_pruning(when(now.after(REQUEST_ID_RETENTION)), usize::MAX);
        self.ledger.apply(expired);
    }

    /// Returns the speed in slices/s at which slices must have been taken offline, so that a VM with
    /// `slices` starts without waiting.
    fn offline_speed(&self, now: Ns, slices: u32, slices_without_buffer: u32) -> f64 {
        let unused = f64::from(slices_without_buffer.saturating_sub(self.in_use + slices));
        let (mut released, mut speed) = (0.0_f64, 0.0_f64);
        for (at, count) in self.releases.iter().rev() {
            let age_s = (now.since(*at).0 as f64 / 1e9).max(AGE_MIN_S);
            // Older releases cannot increase the speed.
            if now.since(*at) > RELEASES_RETAINED || f64::from(self.released) - unused <= speed * age_s {
                break;
            }
            released += f64::from(*count);
            speed = speed.max((released - unused) / age_s);
        }
        speed
    }
}

/// Number of buckets of a histogram.
const SPEED_BUCKETS: usize = 4096;
/// Ratio of the bounds of a bucket.
const SPEED_BUCKET_RATIO: f64 = 1.01;
/// Upper bound of the first bucket, in GiB/s.
const SPEED_MIN: f64 = 1e-6;

/// Histogram of speeds in GiB/s, with a relative error of 1 %.
#[derive(Clone, Debug)]
struct SpeedHistogram {
    counts: Vec<u64>,
    total: u64,
}

impl Default for SpeedHistogram {
    fn default() -> Self {
        Self { counts: vec![0; SPEED_BUCKETS], total: 0 }
    }
}

impl SpeedHistogram {
    fn add(&mut self, speed: f64) {
        let bucket =
            if speed <= SPEED_MIN { 0.0 } else { (speed / SPEED_MIN).log(SPEED_BUCKET_RATIO).ceil() };
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "limited below")]
        let bucket = (bucket as usize).min(SPEED_BUCKETS - 1);
        self.counts[bucket] += 1;
        self.total += 1;
    }

    /// Returns the smallest speed that is at least that of a fraction of the starts; 0 for the first
    /// bucket.
    fn percentile(&self, level: f64) -> f64 {
        let rank = level * self.total as f64;
        let mut below = 0;
        for (bucket, count) in self.counts.iter().enumerate() {
            below += count;
            if below as f64 >= rank {
                return if bucket == 0 { 0.0 } else { SPEED_MIN * SPEED_BUCKET_RATIO.powf(bucket as f64) };
            }
        }
        0.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CLUSTER: Cluster = Cluster { sockets: 4, cores_per_socket: 4, memory_per_socket: Bytes::gib(8) };
    const SHAPE: PoolShape = PoolShape {
        pool_sockets: 2,
        attachment: Attachment { emcs_per_host: 1, hosts_per_emc: None },
        slice_mib: 1024,
        slices_without_buffer: 6,
        offline_gib_per_s: 0.5,
        first: Ns::ZERO,
    };

    fn vm(arrive: u64, depart: u64, socket: u32, slices: u32) -> SliceVm {
        SliceVm { arrive: Ns::secs(arrive), depart: Ns::secs(depart), socket, slices }
    }

    fn replay(shape: PoolShape, vms: &[SliceVm]) -> SliceReport {
        let mut replay = SliceReplay::new(&CLUSTER, shape).unwrap();
        vms.iter().for_each(|vm| replay.start(vm));
        replay.finish()
    }

    #[test]
    fn draining_slices_need_a_buffer() {
        // Sockets 0 and 2 share a pool. At 13 s, 1 of the 4 released slices is free, after 2 s.
        let report = replay(SHAPE, &[vm(0, 10, 0, 4), vm(13, 90, 2, 5), vm(13, 90, 1, 1)]);
        assert_eq!((report.in_use_max, report.occupied_max, report.buffer()), (5, 8, 3));
        assert_eq!((report.starts, report.assigned, report.rejected), (3, 10, 0));
        // A host takes one slice after the other offline, so that 8 s are enough.
        let report = replay(SHAPE, &[vm(0, 10, 0, 4), vm(18, 90, 2, 5)]);
        assert_eq!(report.buffer(), 0);
    }

    #[test]
    fn offline_speed_is_that_of_slices_that_must_be_reused() {
        // The pool has 6 slices. Of the 4 released ones, 1 may still be draining: 3 slices in 2 s.
        let report = replay(SHAPE, &[vm(0, 10, 0, 4), vm(12, 90, 2, 5)]);
        let [median, p99, p9999] = report.offline_gib_per_s;
        assert_eq!(median, 0.0);
        assert!((p99 / 1.5 - 1.0).abs() < 0.01 && p99 == p9999, "{p99} {p9999}");
    }

    #[test]
    fn starts_of_the_warm_up_do_not_count() {
        let vms = [vm(0, 10, 0, 6), vm(13, 90, 2, 2), vm(14, 90, 2, 1)];
        let report = replay(PoolShape { first: Ns::secs(14), ..SHAPE }, &vms);
        // Of the 6 slices released at 10 s, one is offline after 2 s, and one after 4 s.
        assert_eq!((report.starts, report.in_use_max, report.occupied_max), (1, 3, 7));
    }

    #[test]
    fn lost_emc_affects_vms_with_its_slices() {
        let vms = [vm(0, 90, 0, 3), vm(0, 90, 2, 2), vm(1, 90, 0, 1)];
        let one = replay(SHAPE, &vms);
        assert_eq!((one.vms_per_emc_max, one.in_use_per_emc_max), (3, 6));
        let attachment = Attachment { emcs_per_host: 2, hosts_per_emc: None };
        let two = replay(PoolShape { attachment, ..SHAPE }, &vms);
        assert_eq!((two.vms_per_emc_max, two.in_use_per_emc_max), (2, 3));
    }

    #[test]
    fn percentile_has_a_relative_error_of_one_percent() {
        let mut speeds = SpeedHistogram::default();
        (1..=1000).for_each(|speed| speeds.add(f64::from(speed)));
        for (level, expected) in [(0.5, 500.0), (0.99, 990.0), (0.9999, 1000.0)] {
            assert!((speeds.percentile(level) / expected - 1.0).abs() <= 0.01, "{level}");
        }
        assert_eq!(SpeedHistogram::default().percentile(0.5), 0.0);
    }
}
