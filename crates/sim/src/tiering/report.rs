//! Results of a simulation: means of the last minute, and the timeline.

use serde::Serialize;
use tiering::fair::FAST;
use units::limits::TIERS_MAX;

use super::{
    Scenario, Scheme,
    memory::{UNIT_BYTES, UNIT_PAGES},
    scenario::Tenant,
    tenant::SimulatedTenant,
};

/// Time at the end of a simulation over which results are averaged, in seconds.
const MEAN_SECONDS: usize = 60;
/// Period of the detection of thrashing, in seconds.
const THRASH_PERIOD_S: usize = 5;
/// Number of periods, the first one included, in which migrations must fall.
const THRASH_PERIODS: usize = 4;

/// State of all tenants at the end of a second.
#[derive(Clone, Debug, Serialize)]
pub struct TimePoint {
    /// Second, from 0.
    pub second: u32,
    /// State of each tenant, in the order of the scenario.
    pub tenants: Vec<TenantPoint>,
}

/// State of a tenant at the end of a second, and counts of this second.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct TenantPoint {
    /// Memory per tier in GB.
    pub tiers_gb: [f64; TIERS_MAX],
    /// Pages that were accessed in this second. A page counts once per access of its unit.
    pub accessed_pages: u64,
    /// Pages that were promoted in this second.
    pub promoted_pages: u64,
    /// Pages that were demoted in this second.
    pub demoted_pages: u64,
    /// Thrash level.
    pub thrash_level: u8,
}

impl TenantPoint {
    pub(super) fn new(tenant: &SimulatedTenant<'_>, thrash_level: u8) -> Self {
        let size_gb = |units: usize| (units as u64 * UNIT_BYTES) as f64 / 1e9;
        Self {
            tiers_gb: std::array::from_fn(|tier| size_gb(tenant.memory.units_in(tier))),
            accessed_pages: tenant.counts.accessed * UNIT_PAGES,
            promoted_pages: tenant.counts.promoted * UNIT_PAGES,
            demoted_pages: tenant.counts.demoted * UNIT_PAGES,
            thrash_level,
        }
    }

    /// Returns the local memory in GB.
    pub fn local_gb(&self) -> f64 {
        self.tiers_gb[FAST]
    }

    /// Returns the number of promoted and demoted pages.
    pub fn migrated_pages(&self) -> u64 {
        self.promoted_pages + self.demoted_pages
    }
}

/// Results of a scenario.
#[derive(Clone, Debug, Serialize)]
pub struct ScenarioReport {
    /// Name of the scenario.
    pub name: String,
    /// Usable local memory in GB.
    pub capacity_gb: f64,
    /// Simulated time in seconds.
    pub seconds: u32,
    /// Tenants with their demand and limits, in the order of the scenario.
    pub tenants: Vec<TenantReport>,
    /// Local memory of each tenant with Equilibria in GB, mean of the last 60 s.
    pub local_gb: Vec<f64>,
    /// Effect of the mitigation of thrashing. `None` if the scenario does not simulate Equilibria
    /// without mitigation, or if no thrashing was detected.
    pub thrashing: Option<ThrashingReport>,
    /// Results of each scheme.
    pub schemes: Vec<SchemeReport>,
}

/// Tenant of a scenario. Limits are those of local memory.
#[derive(Clone, Debug, Serialize)]
pub struct TenantReport {
    /// Name.
    pub name: String,
    /// Demand at the end in GB.
    pub demand_gb: f64,
    /// Protection in GB.
    pub protection_gb: f64,
    /// Bound in GB.
    pub bound_gb: Option<f64>,
}

/// Results of a scheme. All lists are in the order of the tenants. Rates and sizes are means of the
/// last 60 s.
#[derive(Clone, Debug, Serialize)]
pub struct SchemeReport {
    /// Scheme.
    pub scheme: Scheme,
    /// Local memory in GB.
    pub local_gb: Vec<f64>,
    /// Memory of each tier in GB.
    pub tiers_gb: Vec<[f64; TIERS_MAX]>,
    /// Smallest local memory in GB after the local memory first reached its mean.
    pub local_min_gb: Vec<f64>,
    /// Largest local memory in GB.
    pub local_max_gb: Vec<f64>,
    /// Accessed pages per second.
    pub accessed_pages_per_s: Vec<f64>,
    /// Promoted pages per second.
    pub promoted_pages_per_s: Vec<f64>,
    /// Demoted pages per second.
    pub demoted_pages_per_s: Vec<f64>,
    /// State at the end of each second.
    #[serde(skip)]
    pub timeline: Vec<TimePoint>,
}

/// Effect of the mitigation of thrashing for the first tenant of a scenario.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct ThrashingReport {
    /// Second in which thrashing was detected.
    pub detected_s: u32,
    /// Migrated pages per second in the period before the detection.
    pub migrated_before: f64,
    /// Migrated pages per second in the fourth period since the detection.
    pub migrated_after: f64,
    /// Decrease of migrations, from 0 to 1.
    pub decrease: f64,
    /// Relative increase of the accesses of the other tenants by the mitigation, in the last 60 s.
    pub neighbour_gain: f64,
}

impl ScenarioReport {
    /// Returns the tenants with a bound of local memory, and by how many GB each exceeds its bound at most
    /// with Equilibria.
    pub fn bound_excess_gb(&self) -> Vec<(&str, f64)> {
        let Some(report) = self.scheme(Scheme::Equilibria) else { return Vec::new() };
        let tenants = self.tenants.iter().zip(&report.local_max_gb);
        tenants
            .filter_map(|(tenant, largest)| Some((&*tenant.name, (largest - tenant.bound_gb?).max(0.0))))
            .collect()
    }

    pub(super) fn new(scenario: &Scenario, schemes: Vec<SchemeReport>) -> Self {
        let equilibria = schemes.iter().find(|report| report.scheme == Scheme::Equilibria);
        Self {
            name: scenario.name.clone(),
            capacity_gb: scenario.tiers_gb[FAST],
            seconds: scenario.seconds,
            tenants: scenario.tenants.iter().map(TenantReport::new).collect(),
            local_gb: equilibria.map_or_else(Vec::new, |report| report.local_gb.clone()),
            thrashing: ThrashingReport::new(&schemes),
            schemes,
        }
    }

    /// Returns the results of a scheme, or `None` if it was not simulated.
    pub fn scheme(&self, scheme: Scheme) -> Option<&SchemeReport> {
        self.schemes.iter().find(|report| report.scheme == scheme)
    }
}

impl TenantReport {
    fn new(tenant: &Tenant) -> Self {
        let (protection_gb, bound_gb) = tenant.limits_gb[FAST];
        let demand_gb = tenant.demand_gb.last().map_or(0.0, |(_, demand_gb)| *demand_gb);
        Self { name: tenant.name.clone(), demand_gb, protection_gb, bound_gb }
    }
}

impl SchemeReport {
    pub(super) fn new(scheme: Scheme, timeline: Vec<TimePoint>) -> Self {
        let tenants = timeline.first().map_or(0, |point| point.tenants.len());
        let last = &timeline[timeline.len().saturating_sub(MEAN_SECONDS)..];
        let means = |value: &dyn Fn(&TenantPoint) -> f64| {
            (0..tenants).map(|index| mean(last, index, value)).collect::<Vec<f64>>()
        };
        let local_gb = means(&TenantPoint::local_gb);
        let tier_gb = |tier: usize| means(&|point| point.tiers_gb[tier]);
        let tiers_gb: [Vec<f64>; TIERS_MAX] = std::array::from_fn(tier_gb);
        Self {
            scheme,
            tiers_gb: (0..tenants).map(|index| std::array::from_fn(|tier| tiers_gb[tier][index])).collect(),
            local_min_gb: (0..tenants).map(|index| local_min_gb(&timeline, index, local_gb[index])).collect(),
            local_max_gb: (0..tenants).map(|index| local_max_gb(&timeline, index)).collect(),
            local_gb,
            accessed_pages_per_s: means(&|point| point.accessed_pages as f64),
            promoted_pages_per_s: means(&|point| point.promoted_pages as f64),
            demoted_pages_per_s: means(&|point| point.demoted_pages as f64),
            timeline,
        }
    }

    /// Returns a copy without the timeline.
    #[must_use]
    pub fn without_timeline(&self) -> Self {
        Self {
            scheme: self.scheme,
            local_gb: self.local_gb.clone(),
            tiers_gb: self.tiers_gb.clone(),
            local_min_gb: self.local_min_gb.clone(),
            local_max_gb: self.local_max_gb.clone(),
            accessed_pages_per_s: self.accessed_pages_per_s.clone(),
            promoted_pages_per_s: self.promoted_pages_per_s.clone(),
            demoted_pages_per_s: self.demoted_pages_per_s.clone(),
            timeline: Vec::new(),
        }
    }

    /// Returns the promoted and demoted pages per second of all tenants.
    pub fn migrated_pages_per_s(&self) -> f64 {
        self.promoted_pages_per_s.iter().chain(&self.demoted_pages_per_s).sum()
    }
}

/// Returns the mean of a value of a tenant over some seconds.
fn mean(points: &[TimePoint], index: usize, value: &dyn Fn(&TenantPoint) -> f64) -> f64 {
    points.iter().map(|point| value(&point.tenants[index])).sum::<f64>() / points.len().max(1) as f64
}

/// Returns the smallest local memory of a tenant after it first reached `mean_gb`.
fn local_min_gb(timeline: &[TimePoint], index: usize, mean_gb: f64) -> f64 {
    let local = timeline.iter().map(|point| point.tenants[index].local_gb());
    local.skip_while(|local| *local < mean_gb).fold(f64::INFINITY, f64::min).min(mean_gb)
}

/// Returns the largest local memory of a tenant.
fn local_max_gb(timeline: &[TimePoint], index: usize) -> f64 {
    timeline.iter().map(|point| point.tenants[index].local_gb()).fold(0.0, f64::max)
}

impl ThrashingReport {
    fn new(schemes: &[SchemeReport]) -> Option<Self> {
        let find = |scheme| schemes.iter().find(|report| report.scheme == scheme);
        let (with, without) = (find(Scheme::Equilibria)?, find(Scheme::EquilibriaWithoutMitigation)?);
        let is_detected = |point: &TimePoint| point.tenants[0].thrash_level > 0;
        let detected = with.timeline.iter().position(is_detected)?;
        let after = detected + (THRASH_PERIODS - 1) * THRASH_PERIOD_S;
        let before = with.timeline.get(detected.checked_sub(THRASH_PERIOD_S)?..detected)?;
        let after = with.timeline.get(after..after + THRASH_PERIOD_S)?;
        let migrated = |points: &[TimePoint]| mean(points, 0, &|point| point.migrated_pages() as f64);
        let (migrated_before, migrated_after) = (migrated(before), migrated(after));
        let neighbours = |report: &SchemeReport| report.accessed_pages_per_s[1..].iter().sum::<f64>();
        Some(Self {
            detected_s: with.timeline[detected].second,
            migrated_before,
            migrated_after,
            decrease: 1.0 - migrated_after / migrated_before,
            neighbour_gain: neighbours(with) / neighbours(without) - 1.0,
        })
    }
}
