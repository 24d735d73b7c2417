//! Simulation of tenants that change their workload at run time (Spirit, figure 9). Four tenants
//! share a host; two of them switch from one trace to another and back.
//!
//! The allocator has no advance information about the workloads. Each tenant replays its trace in a
//! loop against local memory with LRU replacement. The bandwidth share of a tenant determines the
//! duration of a miss. At the end of each epoch, the allocator computes the shares of the next
//! epoch from the page reuse observed in this epoch, as on a real host. The same accesses are also
//! simulated with an equal split.

use std::sync::Arc;

use fairness::{
    epoch::{EpochAllocator, MarketMember},
    market::{Bundle, Share},
    profile::ReuseDistances,
};

use super::{
    host::{Host, to_bundle},
    lru::Lru,
    mixes::MEMORY_BOUND_MISS_COST,
    tenant::{MissRatioCurve, SAMPLED_PAGES_MAX, throughput},
};

/// Workload of a tenant: a trace that the tenant replays in a loop.
#[derive(Clone, Debug)]
pub struct TenantActivity {
    /// Name of the trace, for reports.
    pub name: String,
    /// Accessed blocks in order, numbered from 0.
    touches: Arc<[u32]>,
    /// Number of different blocks in the trace.
    blocks: u32,
    /// Number of pages per block. An access to a block accesses all its pages in sequence.
    pages_per_block: u32,
}

/// Change of the activity of one tenant.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Change {
    /// Number of the epoch, from 0. The activity changes at the start of this epoch.
    pub epoch: usize,
    /// Index of the tenant whose activity changes.
    pub tenant: usize,
    /// Index of the new activity, 0 or 1.
    pub to: usize,
}

/// Changes of activity as in Spirit's experiment, but over fewer epochs. All tenants start with
/// activity 0.
pub const ACTIVITY_CHANGES: [Change; 4] = [
    Change { epoch: 8, tenant: 0, to: 1 },
    Change { epoch: 16, tenant: 1, to: 1 },
    Change { epoch: 24, tenant: 0, to: 0 },
    Change { epoch: 32, tenant: 1, to: 0 },
];
/// Number of tenants in the experiment.
pub const TENANTS: usize = 4;
/// Number of epochs in the experiment.
pub const EPOCH_COUNT: usize = 40;
/// Length of an epoch: the time in which a tenant with an equal split runs the trace of its first
/// activity this number of times. In a shorter epoch, the observed reuse would depend on the
/// position in the trace.
const PASSES_PER_EPOCH: usize = 4;
/// Number of epochs after a change within which shares must settle. It is 2 because the shares of
/// the first epoch are computed before the change is observed.
pub const RESPONSE_EPOCHS_MAX: usize = 2;
/// Maximum relative deviation from the long-run share at which a share counts as settled.
const SETTLED_TOLERANCE: f64 = 0.05;

/// Results of all tenants in one epoch.
#[derive(Clone, Debug)]
pub struct Epoch {
    /// Results of each tenant, by index.
    pub tenants: Vec<TenantEpoch>,
}

/// Share and results of a tenant in an epoch.
#[derive(Clone, Copy, Debug)]
pub struct TenantEpoch {
    /// Index of the activity in this epoch.
    pub activity: usize,
    /// Share of the tenant, as fractions of all memory and of the link.
    pub share: Bundle,
    /// Fraction of page accesses that miss local memory.
    pub misses: f64,
    /// Throughput relative to a run without misses, from 0 to 1.
    pub throughput: f64,
    /// Throughput of the same accesses with an equal split of memory and link.
    pub equal_split_throughput: f64,
}

impl TenantActivity {
    /// Creates two activities with about equal footprints. In the trace with fewer blocks, each
    /// block has more pages.
    pub fn pair_with_equal_footprints(traces: [(String, Vec<u32>); 2]) -> [Self; 2] {
        let blocks = |touches: &[u32]| touches.iter().max().map_or(1, |last| last + 1);
        let most = traces.iter().map(|(_, touches)| blocks(touches)).max().unwrap_or(1);
        traces.map(|(name, touches)| {
            let blocks = blocks(&touches);
            let pages_per_block = (f64::from(most) / f64::from(blocks)).round();
            #[expect(
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                reason = "the ratio is at most the number of pages of a trace"
            )]
            let pages_per_block = pages_per_block as u32;
            Self { name, touches: touches.into(), blocks, pages_per_block }
        })
    }

    fn footprint(&self) -> u32 {
        self.blocks * self.pages_per_block
    }
}

/// Simulates all epochs and returns their results. `memory` is the local memory per tenant, as a
/// fraction of a footprint.
///
/// # Panics
/// Panics if a trace is empty or there is less than one page of memory per tenant.
pub fn simulate_changes(activities: &[TenantActivity; 2], memory: f64, changes: &[Change]) -> Vec<Epoch> {
    let host = Host { memory: memory * TENANTS as f64 };
    let mut simulation = HostSimulation::new(activities, host);
    let mut epochs = EpochAllocator::default();
    let epoch = |epoch: usize| {
        for change in changes.iter().filter(|change| change.epoch == epoch) {
            simulation.tenants[change.tenant].activity = change.to;
        }
        let tenants = simulation.run_epoch();
        simulation.allocate_shares(&mut epochs);
        Epoch { tenants }
    };
    (0..EPOCH_COUNT).map(epoch).collect()
}

/// Simulated host with its tenants.
struct HostSimulation<'a> {
    activities: &'a [TenantActivity; 2],
    host: Host,
    /// Footprint of a tenant in pages: the maximum of the two activities.
    footprint: f64,
    /// Length of an epoch. The unit is the duration of a hit.
    length: f64,
    tenants: Vec<TenantState>,
}

/// State of a running tenant.
#[derive(Clone)]
struct TenantState {
    activity: usize,
    /// Position of the next access in the trace of each activity.
    positions: [usize; 2],
    /// Local memory with the allocated share.
    local: Lru,
    /// Local memory with an equal split, for comparison.
    equal: Lru,
    reuse: ReuseDistances,
    /// Allocated share: memory in footprints, bandwidth as a fraction of the link.
    share: Bundle,
    /// Time by which the last access exceeded the end of the previous epoch.
    overrun: f64,
}

impl<'a> HostSimulation<'a> {
    fn new(activities: &'a [TenantActivity; 2], host: Host) -> Self {
        let pages: u32 = activities.iter().map(TenantActivity::footprint).sum();
        let footprint = f64::from(activities.iter().map(TenantActivity::footprint).max().unwrap_or(1));
        let share = host.equal(TENANTS);
        let mut equal = Lru::new(pages);
        equal.resize(to_pages(share, footprint));
        // Tenants start at different positions, so that tenants with the same activity do not run
        // in step.
        let start_positions =
            |tenant: usize| activities.each_ref().map(|activity| activity.touches.len() * tenant / TENANTS);
        let state = |tenant: usize| TenantState {
            activity: 0,
            positions: start_positions(tenant),
            local: equal.clone(),
            equal: equal.clone(),
            reuse: ReuseDistances::new(SAMPLED_PAGES_MAX, 1.0),
            share,
            overrun: 0.0,
        };
        let tenants: Vec<TenantState> = (0..TENANTS).map(state).collect();
        let mut sample = tenants[0].clone();
        let touches = PASSES_PER_EPOCH * activities[0].touches.len();
        let length = (0..touches).map(|_| sample.touch(activities, share).time).sum();
        Self { activities, host, footprint, length, tenants }
    }

    fn run_epoch(&mut self) -> Vec<TenantEpoch> {
        let Self { activities, host, footprint, length, tenants } = self;
        tenants.iter_mut().map(|tenant| tenant.run_epoch(activities, *host, *footprint, *length)).collect()
    }

    /// Computes the shares of the next epoch from the reuse observed in this epoch.
    fn allocate_shares(&mut self, epochs: &mut EpochAllocator) {
        let member = |(at, tenant): (usize, &TenantState)| {
            let curve = Arc::new(MissRatioCurve::from_model(&tenant.reuse, self.footprint));
            let utility = self.host.utility(&curve, MEMORY_BOUND_MISS_COST, 1.0);
            MarketMember { name: at.to_string().into(), weight: 1.0, min: Share::default(), utility }
        };
        let members: Vec<_> = self.tenants.iter().enumerate().map(member).collect();
        let decision = epochs.decide(self.host.supply(), &members);
        let decision = decision.expect("tenants with equal weights and without limits");
        for (tenant, share) in self.tenants.iter_mut().zip(&decision.shares) {
            tenant.share = to_bundle(share);
        }
    }
}

/// Result of one access to a block.
#[derive(Clone, Copy, Default)]
struct BlockAccess {
    pages: u32,
    missed: u32,
    time: f64,
    /// Duration of the same access with an equal split.
    equal_time: f64,
}

/// Converts the local memory of a share into pages.
fn to_pages(share: Bundle, footprint: f64) -> usize {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "pages of a tenant fit usize"
    )]
    let pages = (share.memory * footprint) as usize;
    pages
}

impl TenantState {
    fn run_epoch(
        &mut self,
        activities: &[TenantActivity; 2],
        host: Host,
        footprint: f64,
        length: f64,
    ) -> TenantEpoch {
        self.local.resize(to_pages(self.share, footprint));
        // Clears the reuse counts of earlier epochs, but keeps the recency of pages.
        self.reuse.decay(0.0);
        let (mut time, mut equal_time) = (self.overrun, 0.0);
        let (mut pages, mut missed) = (0_u64, 0_u64);
        let start = time;
        while time < length {
            let access = self.touch(activities, host.equal(TENANTS));
            pages += u64::from(access.pages);
            missed += u64::from(access.missed);
            time += access.time;
            equal_time += access.equal_time;
        }
        self.overrun = time - length;
        TenantEpoch {
            activity: self.activity,
            share: Bundle { memory: self.share.memory / host.memory, ..self.share },
            misses: missed as f64 / pages.max(1) as f64,
            throughput: pages as f64 / (time - start),
            equal_split_throughput: pages as f64 / equal_time,
        }
    }

    /// Accesses the next block of the trace with both memories, `local` and `equal`.
    fn touch(&mut self, activities: &[TenantActivity; 2], equal: Bundle) -> BlockAccess {
        let activity = &activities[self.activity];
        let at = &mut self.positions[self.activity];
        let block = activity.touches[*at];
        *at = (*at + 1) % activity.touches.len();
        let page_offset: u32 = activities[..self.activity].iter().map(TenantActivity::footprint).sum();
        let first = page_offset + block * activity.pages_per_block;
        let (mut missed, mut equal_missed) = (0, 0);
        for page in first..first + activity.pages_per_block {
            self.reuse.touch(u64::from(page));
            missed += u32::from(!self.local.touch(page));
            equal_missed += u32::from(!self.equal.touch(page));
        }
        let pages = f64::from(activity.pages_per_block);
        let time = |missed: u32, share: Bundle| {
            pages / throughput(f64::from(missed) / pages, MEMORY_BOUND_MISS_COST, 1.0, share.bandwidth)
        };
        BlockAccess {
            pages: activity.pages_per_block,
            missed,
            time: time(missed, self.share),
            equal_time: time(equal_missed, equal),
        }
    }
}

/// Response of the shares of a tenant to a change of its activity.
#[derive(Clone, Copy, Debug)]
pub struct ChangeResponse {
    /// Change that caused the response.
    pub change: Change,
    /// Share in the last epoch before the change.
    pub before: Bundle,
    /// Share in the second epoch after the change.
    pub settled: Bundle,
    /// Mean share from the second epoch after the change until the next change or the end.
    pub long_run: Bundle,
    /// Number of epochs from the change to the first settled share, or `None` if the share does not
    /// settle.
    pub epochs: Option<usize>,
    /// Maximum deviation from the long-run share, from the second epoch after the change on. It is
    /// above 0 because traces vary over time.
    pub deviation_max: f64,
}

impl ChangeResponse {
    /// Returns whether the share has settled two epochs after the change. A settled share deviates
    /// from the long-run share by at most 5 % of the long-run share or of an equal share, whichever
    /// is larger.
    pub fn is_settled_in_time(&self) -> bool {
        relative_deviation(self.settled, self.long_run) <= SETTLED_TOLERANCE
    }
}

/// Returns the deviation of a share from the long-run share, relative to the long-run share or an
/// equal share, whichever is larger. Returns the maximum over memory and bandwidth.
fn relative_deviation(share: Bundle, long_run: Bundle) -> f64 {
    let relative = |share: f64, run: f64| (share - run).abs() / run.max(1.0 / TENANTS as f64);
    relative(share.memory, long_run.memory).max(relative(share.bandwidth, long_run.bandwidth))
}

/// Computes the response of the shares to each change.
///
/// # Panics
/// Panics if a change is followed by fewer than three epochs before the next change or the end.
pub fn change_responses(epochs: &[Epoch], changes: &[Change]) -> Vec<ChangeResponse> {
    let until = |from: usize| {
        let later = changes.iter().map(|change| change.epoch).filter(|epoch| *epoch > from);
        later.min().unwrap_or(epochs.len())
    };
    changes.iter().map(|change| compute_response(epochs, *change, until(change.epoch))).collect()
}

fn compute_response(epochs: &[Epoch], change: Change, until: usize) -> ChangeResponse {
    let share = |epoch: usize| epochs[epoch].tenants[change.tenant].share;
    let settled = change.epoch + RESPONSE_EPOCHS_MAX;
    assert!(settled < until, "{change:?}: must be at least 3 epochs before epoch {until}");
    let mean = |resource: fn(Bundle) -> f64| {
        (settled..until).map(|epoch| resource(share(epoch))).sum::<f64>() / (until - settled) as f64
    };
    let long_run = Bundle { memory: mean(|share| share.memory), bandwidth: mean(|share| share.bandwidth) };
    let deviation = |epoch: usize| relative_deviation(share(epoch), long_run);
    ChangeResponse {
        change,
        before: share(change.epoch.saturating_sub(1)),
        settled: share(settled),
        long_run,
        epochs: (0..until - change.epoch).find(|later| deviation(change.epoch + later) <= SETTLED_TOLERANCE),
        deviation_max: (settled..until).map(deviation).fold(0.0, f64::max),
    }
}
