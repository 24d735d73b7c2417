//! Replays a trace with several policies and several sizes of memory in one pass. Replays run in
//! parallel, each on one thread; their results do not depend on the number of threads.

use std::{io, path::Path, thread};

use cli_runtime::Failure;
use prediction::operating_point::OperatorLimits;
use sim::plan::{
    Cluster,
    customers::{Customers, VmTruth},
    forecast::Forecaster,
    input::PlannedVm,
    replay::{Outcome, PlacedMemory, PlacementRule, Replay, ReplayReport, SampleTimes},
    slices::{PoolShape, SliceReplay, SliceReport, SliceVm},
};
use units::{Bytes, Fraction, Ns, limits::SLICES_PER_EMC_MAX};

use super::{
    options::{Division, Placement},
    stream,
};

/// Replay to run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct ReplaySpec {
    pub division: Division,
    /// Local memory of each socket, as a fraction of its memory without pools.
    pub local_fraction: f64,
}

impl ReplaySpec {
    /// Replay of the cluster without pools.
    pub(super) const ALL_LOCAL: Self = Self::new(Division::Whole, 1.0);

    /// Creates a specification.
    pub(super) const fn new(division: Division, local_fraction: f64) -> Self {
        Self { division, local_fraction }
    }
}

/// Result of a replay.
#[derive(Clone, Debug)]
pub(super) struct ReplayResult {
    pub spec: ReplaySpec,
    pub report: ReplayReport,
    /// VMs slowed down beyond the margin; empty if the touched memory is unknown. With
    /// [`Division::Whole`], one entry per fixed share, and otherwise one entry.
    pub slowed: Vec<SlowedVms>,
}

/// VMs that were placed after the warm-up, and those of them that are slowed down beyond the margin.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct SlowedVms {
    pub placed: u64,
    pub slowed: u64,
}

impl SlowedVms {
    /// Returns the slowed-down VMs as a fraction of the placed VMs.
    pub(super) fn fraction(self) -> f64 {
        if self.placed == 0 { 0.0 } else { self.slowed as f64 / self.placed as f64 }
    }

    fn add(&mut self, is_slowed: bool) {
        self.placed += 1;
        self.slowed += u64::from(is_slowed);
    }
}

/// Inputs of all passes over a trace.
#[derive(Clone, Debug)]
pub(super) struct Runner<'a> {
    pub trace: &'a Path,
    /// Cluster without pools, to which the results are relative.
    pub cluster: Cluster,
    /// Cluster on whose empty sockets each VM of the trace must fit.
    pub trace_limits: Cluster,
    pub pool_sizes: &'a [u32],
    pub placement: Placement,
    pub times: SampleTimes,
    /// Customers that model the touched memory and the slowdowns.
    pub customers: Option<&'a Customers>,
    /// Slowdown beyond which VMs count as slowed down.
    pub pdm: Fraction,
    /// Predictions for all VMs, in the order of arrival; empty if no policy needs them.
    pub forecasts: Vec<Forecast>,
    /// Fixed shares whose slowed-down VMs are counted with [`Division::Whole`].
    pub fixed_shares: &'a [Fraction],
    /// Size of a slice; `None` if pool memory is not divided into slices.
    pub slice_mib: Option<u64>,
}

/// Pool memory of a VM under both policies with predictions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Forecast {
    frigid_mib: u32,
    full_mib: u32,
}

/// Bit of [`Forecast::full_mib`] of a VM on pool memory only.
const POOL_ONLY: u32 = 1 << 31;

/// Memory of a VM on a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct PoolMemory {
    mib: u64,
    is_pool_only: bool,
}

/// State of one replay of a pass.
struct RunningReplay {
    spec: ReplaySpec,
    replay: Replay,
    slowed: Vec<SlowedVms>,
    /// VMs of the last chunk that were placed and have slices; empty without replays of slices.
    started: Vec<SliceVm>,
}

/// Replay of the slices of another replay.
struct RunningSlices {
    /// Index of the replay that places the VMs.
    replay: usize,
    slices: SliceReplay,
}

/// State of a pass.
struct Pass {
    replays: Vec<RunningReplay>,
    slices: Vec<RunningSlices>,
    /// Number of VMs so far.
    vms: usize,
    last_arrival: Ns,
}

/// Chunk of VMs, with their true behaviour and predictions if known.
struct Chunk<'a> {
    vms: &'a [PlannedVm],
    truths: Vec<VmTruth>,
    forecasts: &'a [Forecast],
}

impl Runner<'_> {
    /// Predicts all VMs.
    ///
    /// # Errors
    /// [`Failure::File`] if the trace cannot be read or is invalid.
    pub(super) fn forecast(
        &self,
        customers: &Customers,
        limits: OperatorLimits,
    ) -> Result<Vec<Forecast>, Failure> {
        let start = || Ok((Forecaster::new(customers, limits), Vec::new()));
        let consume = |(forecaster, forecasts): &mut (Forecaster<'_>, Vec<Forecast>), vms: &[PlannedVm]| {
            forecasts.extend(vms.iter().map(|vm| {
                let forecast = forecaster.arrive(vm);
                let mib = |mib: u64| u32::try_from(mib).expect("a socket has at most 64 TiB");
                let pool_only = if forecast.full.is_pool_only { POOL_ONLY } else { 0 };
                Forecast {
                    frigid_mib: mib(forecast.frigid.pool_mib),
                    full_mib: mib(forecast.full.pool_mib) | pool_only,
                }
            }));
        };
        stream::replay_trace(self.trace, self.trace_limits, false, start, consume)
            .map(|(_, forecasts)| forecasts)
    }

    /// Replays the trace once, and returns the results in the order of the specifications.
    ///
    /// # Errors
    /// [`Failure::File`] if the trace cannot be read or is invalid, and [`Failure::InvalidValue`] if it
    /// ends before the first sample.
    pub(super) fn pass(&self, specs: &[ReplaySpec]) -> Result<Vec<ReplayResult>, Failure> {
        let pass = self.replay_trace(specs, &[])?;
        let last_arrival = pass.last_arrival;
        let finish = |running: RunningReplay| ReplayResult {
            spec: running.spec,
            report: running.replay.finish(last_arrival),
            slowed: running.slowed,
        };
        let results: Vec<_> = pass.replays.into_iter().map(finish).collect();
        if results.iter().any(|result| result.report.samples == 0) {
            return Err(Failure::InvalidValue {
                field: "--warm-up",
                value: self.times.first.to_string(),
                rule: "must be before the last event of the trace".into(),
            });
        }
        Ok(results)
    }

    /// Replays the slices of each specification in pools of several shapes. Returns the results of each
    /// specification in the order of its shapes.
    ///
    /// # Errors
    /// [`Failure::InvalidValue`] if a pool exceeds the limits of the ledger, and the errors of
    /// [`Runner::pass`].
    pub(super) fn slice_pass(
        &self,
        specs: &[(ReplaySpec, Vec<PoolShape>)],
    ) -> Result<Vec<Vec<SliceReport>>, Failure> {
        let shapes: Vec<(usize, PoolShape)> = specs
            .iter()
            .enumerate()
            .flat_map(|(replay, (_, shapes))| shapes.iter().map(move |shape| (replay, *shape)))
            .collect();
        let replays: Vec<ReplaySpec> = specs.iter().map(|(spec, _)| *spec).collect();
        let pass = self.replay_trace(&replays, &shapes)?;
        let mut reports: Vec<Vec<SliceReport>> = vec![Vec::new(); specs.len()];
        for (running, (_, shape)) in pass.slices.into_iter().zip(shapes) {
            let report = running.slices.finish();
            if report.rejected > 0 {
                return Err(Failure::InvalidValue {
                    field: "--slice",
                    value: Bytes::mib(shape.slice_mib).to_string(),
                    rule: format!(
                        "must be larger, or pools must have more EMCs: the ledger rejects {} starts in pools of {} \
                         sockets, because an EMC has at most {SLICES_PER_EMC_MAX} slices",
                        report.rejected, shape.pool_sockets
                    )
                    .into(),
                });
            }
            reports[running.replay].push(report);
        }
        Ok(reports)
    }

    fn replay_trace(&self, specs: &[ReplaySpec], shapes: &[(usize, PoolShape)]) -> Result<Pass, Failure> {
        let start = || self.start_pass(specs, shapes);
        let consume = |pass: &mut Pass, vms: &[PlannedVm]| self.consume(pass, vms);
        let needs_socket = self.placement == Placement::AsTraced;
        let pass = stream::replay_trace(self.trace, self.trace_limits, needs_socket, start, consume)?;
        if !self.forecasts.is_empty() && self.forecasts.len() != pass.vms {
            let errno = io::Error::other("the file changed while it was read");
            return Err(Failure::File { operation: "read", path: self.trace.to_owned(), errno });
        }
        Ok(pass)
    }

    fn start_pass(&self, specs: &[ReplaySpec], shapes: &[(usize, PoolShape)]) -> Result<Pass, Failure> {
        let replay = |spec: &ReplaySpec| {
            let counters = match (self.customers, spec.division) {
                (None, _) => 0,
                (Some(_), Division::Whole) => self.fixed_shares.len(),
                (Some(_), Division::Share(_) | Division::Frigid | Division::Full) => 1,
            };
            RunningReplay {
                spec: *spec,
                replay: self.start_replay(spec),
                slowed: vec![SlowedVms::default(); counters],
                started: Vec::new(),
            }
        };
        let slices = |(replay, shape): &(usize, PoolShape)| {
            let slices =
                SliceReplay::new(&self.cluster, *shape).map_err(|rejection| Failure::InvalidValue {
                    field: "--pool-sockets",
                    value: shape.pool_sockets.to_string(),
                    rule: format!("must be within the limits of a rack: {rejection}").into(),
                })?;
            Ok(RunningSlices { replay: *replay, slices })
        };
        Ok(Pass {
            replays: specs.iter().map(replay).collect(),
            slices: shapes.iter().map(slices).collect::<Result<_, Failure>>()?,
            vms: 0,
            last_arrival: Ns::ZERO,
        })
    }

    fn start_replay(&self, spec: &ReplaySpec) -> Replay {
        let rule = match self.placement {
            Placement::BestFit => PlacementRule::BestFit,
            Placement::AsTraced => PlacementRule::AsTraced,
        };
        let local_memory = part_of(self.cluster.memory_per_socket, spec.local_fraction);
        // Without pools, a smaller local memory is a smaller cluster.
        let memory_per_socket = match spec.division {
            Division::Whole => local_memory,
            Division::Share(_) | Division::Frigid | Division::Full => self.cluster.memory_per_socket,
        };
        let cluster = Cluster { memory_per_socket, ..self.cluster };
        let replay = Replay::new(&cluster, self.pool_sizes, rule, self.times)
            .with_local_limit(local_memory.get() >> 20);
        match spec.division {
            Division::Whole | Division::Share(_) => replay,
            Division::Frigid | Division::Full => replay.with_local_memory_first(self.slice_mib.unwrap_or(1)),
        }
    }

    /// Replays a chunk of VMs in all replays.
    fn consume(&self, pass: &mut Pass, vms: &[PlannedVm]) {
        let truths = self.customers.map_or_else(Vec::new, |customers| {
            vms.iter().zip(pass.vms as u64..).map(|(vm, sequence)| customers.truth(vm, sequence)).collect()
        });
        let forecasts = self.forecasts.get(pass.vms..).unwrap_or_default();
        let chunk = Chunk { vms, truths, forecasts };
        pass.vms += vms.len();
        pass.last_arrival = vms.last().map_or(pass.last_arrival, |vm| vm.arrive);
        let has_slices = !pass.slices.is_empty();
        for_each_parallel(&mut pass.replays, |running| self.replay_chunk(running, &chunk, has_slices));
        let replays = &pass.replays;
        for_each_parallel(&mut pass.slices, |running| {
            replays[running.replay].started.iter().for_each(|vm| running.slices.start(vm));
        });
    }

    fn replay_chunk(&self, running: &mut RunningReplay, chunk: &Chunk<'_>, has_slices: bool) {
        running.started.clear();
        for (index, vm) in chunk.vms.iter().enumerate() {
            let memory = self.pool_memory(running.spec.division, vm, chunk.forecasts.get(index));
            let outcome = running.replay.arrive(&demand(vm, memory));
            let Outcome::Placed { socket, pool_mib } = outcome else { continue };
            if let Some(truth) = chunk.truths.get(index).filter(|_| vm.arrive >= self.times.first) {
                let memory = memory.map(|memory| PoolMemory { mib: pool_mib, ..memory });
                self.count_slowed(running, vm, memory, truth);
            }
            if let Some(slice_mib) = self.slice_mib.filter(|slice_mib| has_slices && pool_mib >= *slice_mib) {
                let slices = u32::try_from(pool_mib / slice_mib).expect("a VM has few slices");
                running.started.push(SliceVm { arrive: vm.arrive, depart: vm.depart, socket, slices });
            }
        }
    }

    /// Returns the pool memory of a VM, in whole slices. Returns `None` for [`Division::Whole`].
    fn pool_memory(
        &self,
        division: Division,
        vm: &PlannedVm,
        forecast: Option<&Forecast>,
    ) -> Option<PoolMemory> {
        // Missing if the file has grown since the predictions, which is reported at its end.
        let forecast = || forecast.copied().unwrap_or_default();
        let (mib, is_pool_only) = match division {
            Division::Whole => return None,
            Division::Share(share) => (share.of(Bytes::mib(vm.mib)).get() >> 20, false),
            Division::Frigid => (forecast().frigid_mib.into(), false),
            Division::Full => {
                let full_mib = forecast().full_mib;
                (u64::from(full_mib & !POOL_ONLY), full_mib & POOL_ONLY != 0)
            }
        };
        Some(PoolMemory { mib: self.slice_mib.map_or(mib, |slice| mib / slice * slice), is_pool_only })
    }

    fn count_slowed(
        &self,
        running: &mut RunningReplay,
        vm: &PlannedVm,
        memory: Option<PoolMemory>,
        truth: &VmTruth,
    ) {
        let pdm = self.pdm;
        match memory {
            Some(PoolMemory { mib, is_pool_only: true }) => {
                running.slowed[0].add(truth.touches_pool(mib) && truth.is_slowed_on_pool(pdm));
            }
            Some(PoolMemory { mib, is_pool_only: false }) => {
                running.slowed[0].add(truth.is_slowed_by_split(mib, pdm));
            }
            None => {
                for (slowed, share) in running.slowed.iter_mut().zip(self.fixed_shares) {
                    slowed.add(truth.is_slowed_by_split(share.of(Bytes::mib(vm.mib)).get() >> 20, pdm));
                }
            }
        }
    }
}

/// Returns a fraction of a memory, in whole MiB.
pub(super) fn part_of(memory: Bytes, fraction: f64) -> Bytes {
    let mib = (fraction * (memory.get() >> 20) as f64).round();
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a fraction of MiB")]
    let mib = mib as u64;
    Bytes::mib(mib)
}

/// Returns the demand of a VM. Without a division, its whole memory is local, and counts as used in its
/// pool.
fn demand(vm: &PlannedVm, memory: Option<PoolMemory>) -> PlacedMemory {
    let whole = PlacedMemory::whole(vm);
    memory.map_or(whole, |PoolMemory { mib, .. }| PlacedMemory {
        local_mib: vm.mib - mib,
        pool_mib: mib,
        ..whole
    })
}

/// Calls a function for all items, on all processors.
fn for_each_parallel<T: Send>(items: &mut [T], each: impl Fn(&mut T) + Sync) {
    let threads = thread::available_parallelism().map_or(1, usize::from);
    let per_thread = items.len().div_ceil(threads).max(1);
    let each = &each;
    thread::scope(|scope| {
        for part in items.chunks_mut(per_thread) {
            scope.spawn(move || part.iter_mut().for_each(each));
        }
    });
}
