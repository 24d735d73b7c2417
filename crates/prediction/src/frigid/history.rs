//! Features of a VM, from its request and from the outcomes of similar VMs. The features of each
//! group of similar VMs are order statistics of untouched fractions, their recency, trend and
//! count. Unknown features are NaN.

use std::collections::{BTreeMap, VecDeque};

use units::{Bytes, UnixMs, limits::OUTCOMES_PER_GROUP_MAX};

use super::outcome::{Groups, Outcome, VmRequest, VmUsage};

/// Names of the features from the request.
const REQUEST_FEATURES: [&str; 3] = ["requested_gib", "cores", "gib_per_core"];
/// Names of the features of each group. Untouched fractions are relative to the current request: if
/// an earlier VM touched 6 GiB, the untouched fraction of a request of 12 GiB is one half.
const GROUP_FEATURES: [&str; 17] = [
    "count",
    "hours_ago",
    "last",
    "before_last",
    "lowest",
    // The following feature is relative to the request of the earlier VM.
    "lowest_share",
    "lowest_of_4",
    "second_lowest",
    "tenth",
    "median",
    "mean",
    "spread",
    "rise",
    "growth",
    "last_p99",
    "last_mean",
    "last_busy",
];
/// Index of the feature `lowest` in [`GROUP_FEATURES`].
const LOWEST_INDEX: usize = 4;
/// Index of the feature `tenth` in [`GROUP_FEATURES`].
const TENTH_INDEX: usize = 8;

/// Number of features of a VM, and length of a row of features.
pub const FEATURE_COUNT: usize = REQUEST_FEATURES.len() + Groups::COUNT * GROUP_FEATURES.len();

/// Returns the names of the features, in the order of a row.
pub fn feature_names() -> impl Iterator<Item = String> {
    let group_features = |group| GROUP_FEATURES.iter().map(move |name| format!("{group}.{name}"));
    REQUEST_FEATURES.iter().map(ToString::to_string).chain(Groups::NAMES.into_iter().flat_map(group_features))
}

/// Time since the start of an owner's first ended VM, in milliseconds, after which one ended VM is
/// enough for forecasts.
const FIRST_DAY_MS: u64 = 24 * 60 * 60 * 1000;
/// Number of ended VMs of an owner that are needed for forecasts before that time.
const FIRST_DAY_VMS_MIN: u32 = 4;

/// Outcomes of ended VMs, by group of similar VMs.
#[derive(Clone, Debug, Default)]
pub struct OutcomeHistory {
    /// Outcomes by group name, for each kind of group in the order of [`Groups::NAMES`].
    groups: [BTreeMap<String, OutcomeGroup>; Groups::COUNT],
}

impl OutcomeHistory {
    /// Adds the outcome of an ended VM to each of its groups.
    pub fn add(&mut self, request: &VmRequest, outcome: &Outcome) {
        for (groups, name) in self.groups.iter_mut().zip(request.groups.all()) {
            if let Some(group) = groups.get_mut(name) {
                group.add(request, outcome);
            } else if !name.is_empty() {
                groups.entry(name.to_owned()).or_insert_with(OutcomeGroup::new).add(request, outcome);
            }
        }
    }

    /// Returns whether the history of a VM's owner is long enough for a forecast. Many VMs of a new
    /// owner may start together. Those that end first may touch less memory than the others, so that
    /// a forecast from the first of them would be wrong for all others.
    pub(super) fn has_known_owner(&self, request: &VmRequest) -> bool {
        let at = request.groups.owner_index();
        self.groups[at].get(request.groups.all()[at]).is_some_and(|owner| {
            owner.count >= FIRST_DAY_VMS_MIN
                || request.begins.0.saturating_sub(owner.first_begins.0) >= FIRST_DAY_MS
        })
    }

    /// Computes the features of a VM that is about to start.
    pub fn features(&self, request: &VmRequest) -> [f64; FEATURE_COUNT] {
        let gib = to_gib(request.requested);
        let mut row = [f64::NAN; FEATURE_COUNT];
        let (request_features, groups_features) = row.split_at_mut(REQUEST_FEATURES.len());
        let per_core = request.cores.filter(|cores| *cores > 0.0).map_or(f64::NAN, |cores| gib / cores);
        request_features.copy_from_slice(&[gib, request.cores.unwrap_or(f64::NAN), per_core]);
        let groups_features = groups_features.chunks_exact_mut(GROUP_FEATURES.len());
        for ((groups, name), group_features) in
            self.groups.iter().zip(request.groups.all()).zip(groups_features)
        {
            if let Some(group) = groups.get(name) {
                group_features.copy_from_slice(&group.features(request));
            }
        }
        row
    }
}

/// Untouched fractions of the ended VMs of one owner, relative to the request of a VM that is about
/// to start.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct OwnerHistory {
    /// Lowest untouched fraction, 0 to 1.
    pub lowest: f64,
    /// 10th percentile of the untouched fractions of the latest VMs, 0 to 1.
    pub tenth: f64,
}

impl OwnerHistory {
    /// Reads the history of a VM's owner from the VM's row of features. Returns `None` if the owner
    /// is unknown or none of its VMs has ended.
    pub(super) fn find(groups: &Groups, features: &[f64; FEATURE_COUNT]) -> Option<Self> {
        let start = REQUEST_FEATURES.len() + groups.owner_index() * GROUP_FEATURES.len();
        let (lowest, tenth) = (features[start + LOWEST_INDEX], features[start + TENTH_INDEX]);
        (!lowest.is_nan()).then_some(Self { lowest, tenth })
    }
}

/// Outcomes of one group of VMs.
#[derive(Clone, Debug)]
struct OutcomeGroup {
    /// Earliest start of a VM.
    first_begins: UnixMs,
    /// Number of outcomes.
    count: u32,
    /// Lowest untouched fraction.
    lowest: f64,
    /// Largest peak memory.
    highest: Bytes,
    /// Latest outcomes, ordered by the end time of the VM, at most [`OUTCOMES_PER_GROUP_MAX`].
    recent: VecDeque<RecentOutcome>,
}

/// Recent outcome of a VM of a group.
#[derive(Clone, Copy, Debug)]
struct RecentOutcome {
    /// End time of the VM.
    ended: UnixMs,
    /// Requested memory.
    requested: Bytes,
    /// Peak memory touched.
    peak: Bytes,
    usage: VmUsage,
}

impl OutcomeGroup {
    fn new() -> Self {
        let recent = VecDeque::with_capacity(1);
        Self { first_begins: UnixMs(u64::MAX), count: 0, lowest: 1.0, highest: Bytes::new(0), recent }
    }

    fn add(&mut self, request: &VmRequest, outcome: &Outcome) {
        let peak = outcome.peak(request.requested);
        self.first_begins = self.first_begins.min(request.begins);
        self.count = self.count.saturating_add(1);
        self.lowest = self.lowest.min(outcome.untouched.get());
        self.highest = self.highest.max(peak);
        let (ended, requested, usage) = (outcome.ended, request.requested, outcome.usage);
        // Outcomes are not always added in the order in which the VMs ended.
        let at = self.recent.partition_point(|outcome| outcome.ended <= ended);
        self.recent.insert(at, RecentOutcome { ended, requested, peak, usage });
        if self.recent.len() > OUTCOMES_PER_GROUP_MAX {
            self.recent.pop_front();
        }
    }

    /// Computes [`GROUP_FEATURES`] for a VM that is about to start.
    fn features(&self, request: &VmRequest) -> [f64; GROUP_FEATURES.len()] {
        let untouched_fraction = |used: Bytes| 1.0 - (to_gib(used) / to_gib(request.requested)).min(1.0);
        let untouched_if_measured = |used: Option<Bytes>| used.map_or(f64::NAN, untouched_fraction);
        let latest: Vec<f64> =
            self.recent.iter().rev().map(|outcome| untouched_fraction(outcome.peak)).collect();
        let last = self.recent.back().expect("a group has at least one outcome");
        let mut sorted = latest.clone();
        sorted.sort_unstable_by(f64::total_cmp);
        let n = latest.len();
        let mean = latest.iter().sum::<f64>() / n as f64;
        let spread = (latest.iter().map(|share| (share - mean).powi(2)).sum::<f64>() / n as f64).sqrt();
        [
            f64::from(self.count),
            request.begins.0.saturating_sub(last.ended.0) as f64 / 3.6e6,
            latest[0],
            latest.get(1).copied().unwrap_or(f64::NAN),
            untouched_fraction(self.highest),
            self.lowest,
            latest.iter().take(4).copied().fold(1.0, f64::min),
            sorted.get(1).copied().unwrap_or(f64::NAN),
            sorted[n / 10],
            sorted[n / 2],
            mean,
            if n > 1 { spread } else { f64::NAN },
            latest[0] - mean,
            to_gib(request.requested) / to_gib(last.requested),
            untouched_if_measured(last.usage.p99),
            untouched_if_measured(last.usage.mean),
            last.usage.busy_percent.unwrap_or(f64::NAN),
        ]
    }
}

/// Converts a memory size to GiB, the unit of memory in features.
pub(super) fn to_gib(bytes: Bytes) -> f64 {
    bytes.get() as f64 / Bytes::gib(1).get() as f64
}
