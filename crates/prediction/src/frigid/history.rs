//! What came of VMs that were like this one, group by group, as numbers for trees: order statistics, how long ago, which
//! way, how many, and how often little was left. What is not known is NaN.

use std::collections::{BTreeMap, VecDeque};

use units::{Bytes, UnixMs, limits::OUTCOMES_PER_GROUP_MAX};

use super::outcome::{Ask, Groups, Outcome, Usage};

/// What is said of a VM itself.
const OF_ASK: [&str; 3] = ["requested_gib", "cores", "gib_per_core"];
/// What is said of each group. Shares are of what is asked for now: one that touched 6 GiB leaves half of 12.
const OF_GROUP: [&str; 21] = [
    "count",
    "hours_ago",
    "last",
    "before_last",
    "lowest",
    "lowest_share", // of what was asked for then
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
    "below_10",
    "below_30",
    "below_50",
    "below_70",
];
/// Where two of them stand.
const COUNT: usize = 0;
const LOWEST: usize = 4;
/// Shares that outcomes are counted below: the last of the names.
const TABLE: [f64; 4] = [0.1, 0.3, 0.5, 0.7];

/// Numbers of a row for trees.
pub const FEATURES: usize = OF_ASK.len() + Groups::COUNT * OF_GROUP.len();

/// What the numbers of a row are.
pub fn feature_names() -> impl Iterator<Item = String> {
    let of_group = |group| OF_GROUP.iter().map(move |name| format!("{group}.{name}"));
    OF_ASK.iter().map(ToString::to_string).chain(Groups::NAMES.into_iter().flat_map(of_group))
}

/// Outcomes by group.
#[derive(Clone, Debug, Default)]
pub struct History {
    groups: [BTreeMap<String, Group>; Groups::COUNT],
}

impl History {
    /// Takes in what came of a VM.
    pub fn add(&mut self, ask: &Ask, outcome: &Outcome) {
        for (groups, name) in self.groups.iter_mut().zip(ask.groups.all()) {
            if let Some(group) = groups.get_mut(name) {
                group.add(ask, outcome);
            } else if !name.is_empty() {
                groups.entry(name.to_owned()).or_insert_with(Group::new).add(ask, outcome);
            }
        }
    }

    /// What is known of a VM that is to start.
    pub fn features(&self, ask: &Ask) -> [f64; FEATURES] {
        let gib = gib(ask.requested);
        let mut row = [f64::NAN; FEATURES];
        let (of_ask, of_groups) = row.split_at_mut(OF_ASK.len());
        let per_core = ask.cores.filter(|cores| *cores > 0.0).map_or(f64::NAN, |cores| gib / cores);
        of_ask.copy_from_slice(&[gib, ask.cores.unwrap_or(f64::NAN), per_core]);
        let of_groups = of_groups.chunks_exact_mut(OF_GROUP.len());
        for ((groups, name), of_group) in self.groups.iter().zip(ask.groups.all()).zip(of_groups) {
            if let Some(group) = groups.get(name) {
                of_group.copy_from_slice(&group.features(ask));
            }
        }
        row
    }
}

/// What is known of the narrowest group of a VM that had an outcome: which group, how many, and the lowest share. Said of features,
/// as they were when the VM began.
pub(super) fn alike(features: &[f64; FEATURES]) -> Option<(usize, f64, f64)> {
    let mut groups = features[OF_ASK.len()..].chunks_exact(OF_GROUP.len()).enumerate();
    groups.find(|(_, group)| !group[COUNT].is_nan()).map(|(at, group)| (at, group[COUNT], group[LOWEST]))
}

/// The lowest share in one group, by its index; none if it had no outcome.
pub(super) fn lowest(features: &[f64; FEATURES], group: usize) -> Option<f64> {
    let lowest = features[OF_ASK.len() + group * OF_GROUP.len() + LOWEST];
    (!lowest.is_nan()).then_some(lowest)
}

/// Outcomes of one group.
#[derive(Clone, Debug)]
struct Group {
    count: u32,
    lowest: f64,
    highest: Bytes,
    below: [u32; TABLE.len()],
    /// The latest, one by one.
    recent: VecDeque<Past>,
}

/// One outcome.
#[derive(Clone, Copy, Debug)]
struct Past {
    ended: UnixMs,
    requested: Bytes,
    peak: Bytes,
    usage: Usage,
}

impl Group {
    fn new() -> Self {
        let (below, recent) = ([0; TABLE.len()], VecDeque::with_capacity(1));
        Self { count: 0, lowest: 1.0, highest: Bytes::new(0), below, recent }
    }

    fn add(&mut self, ask: &Ask, outcome: &Outcome) {
        let untouched = outcome.untouched.get();
        let peak = outcome.peak(ask.requested);
        self.count = self.count.saturating_add(1);
        self.lowest = self.lowest.min(untouched);
        self.highest = self.highest.max(peak);
        self.below.iter_mut().zip(TABLE).for_each(|(n, share)| *n += u32::from(untouched < share));
        let (ended, requested, usage) = (outcome.ended, ask.requested, outcome.usage);
        // Outcomes of long ago may become known late.
        let at = self.recent.partition_point(|past| past.ended <= ended);
        self.recent.insert(at, Past { ended, requested, peak, usage });
        if self.recent.len() > OUTCOMES_PER_GROUP_MAX {
            self.recent.pop_front();
        }
    }

    fn features(&self, ask: &Ask) -> [f64; OF_GROUP.len()] {
        let left = |used: Bytes| 1.0 - (gib(used) / gib(ask.requested)).min(1.0);
        let measured = |used: Option<Bytes>| used.map_or(f64::NAN, left);
        let latest: Vec<f64> = self.recent.iter().rev().map(|past| left(past.peak)).collect();
        let last = self.recent.back().expect("a group has an outcome");
        let mut sorted = latest.clone();
        sorted.sort_unstable_by(f64::total_cmp);
        let n = latest.len();
        let mean = latest.iter().sum::<f64>() / n as f64;
        let spread = (latest.iter().map(|one| (one - mean).powi(2)).sum::<f64>() / n as f64).sqrt();
        let [below_10, below_30, below_50, below_70] =
            self.below.map(|below| f64::from(below) / f64::from(self.count));
        [
            f64::from(self.count),
            ask.begins.0.saturating_sub(last.ended.0) as f64 / 3.6e6,
            latest[0],
            latest.get(1).copied().unwrap_or(f64::NAN),
            left(self.highest),
            self.lowest,
            latest.iter().take(4).copied().fold(1.0, f64::min),
            sorted.get(1).copied().unwrap_or(f64::NAN),
            sorted[n / 10],
            sorted[n / 2],
            mean,
            if n > 1 { spread } else { f64::NAN },
            latest[0] - mean,
            gib(ask.requested) / gib(last.requested),
            measured(last.usage.p99),
            measured(last.usage.mean),
            last.usage.busy_percent.unwrap_or(f64::NAN),
            below_10,
            below_30,
            below_50,
            below_70,
        ]
    }
}

/// As trees see it.
pub(super) fn gib(bytes: Bytes) -> f64 {
    bytes.get() as f64 / Bytes::gib(1).get() as f64
}
