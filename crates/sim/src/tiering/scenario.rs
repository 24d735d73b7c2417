//! Scenario of a simulation: capacity of the tiers, and the demand and limits of the tenants.

use serde::Deserialize;
use units::{
    QuotedText,
    limits::{TIERING_SIMULATED_GB_MAX, TIERING_SIMULATED_SECONDS_MAX, TIERING_SIMULATED_TENANTS_MAX},
};

use super::Scheme;
use crate::scenario_error::{ScenarioError, check_name, check_range};

/// Shortest simulation, in seconds. The results are means of the last 60 s.
const SECONDS_MIN: f64 = 60.0;
/// Size of a lower tier that holds all memory of all tenants, in GB.
pub(super) const LOWER_TIER_GB: f64 = 2.0 * TIERING_SIMULATED_GB_MAX;
/// Size that a tenant allocates per second until it reaches its demand, in GB.
const ALLOCATION_GB_PER_S: f64 = 2.0;

/// Scenario with fixed demands, as a user writes it. All sizes are in GB (10⁹ bytes).
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ScenarioSpec {
    /// Name.
    pub name: String,
    /// Usable local memory. The memory below the high watermark is added to it.
    pub capacity_gb: f64,
    /// Simulated time in seconds, a whole number.
    pub seconds: f64,
    /// Tenants.
    pub tenants: Vec<TenantSpec>,
}

/// Tenant with a fixed demand, as a user writes it.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TenantSpec {
    /// Name, unique in the scenario.
    pub name: String,
    /// Time at which the tenant starts to allocate memory, in seconds.
    #[serde(default)]
    pub start_s: f64,
    /// Memory that the tenant allocates and accesses.
    pub demand_gb: f64,
    /// Protection of local memory.
    #[serde(default)]
    pub protection_gb: f64,
    /// Bound of local memory. `None` for no bound.
    #[serde(default)]
    pub bound_gb: Option<f64>,
    /// Fraction of the memory that receives 90 % of the accesses; 1 for equal accesses.
    #[serde(default = "one")]
    pub hot_fraction: f64,
}

fn one() -> f64 {
    1.0
}

/// Scenario that can be simulated.
#[derive(Clone, Debug)]
pub struct Scenario {
    pub(super) name: String,
    /// Usable local memory in GB, and the sizes of the lower tiers.
    pub(super) tiers_gb: Vec<f64>,
    pub(super) seconds: u32,
    pub(super) tenants: Vec<Tenant>,
    /// Schemes to simulate. The last one is Equilibria.
    pub(super) schemes: Vec<Scheme>,
}

/// Tenant of a scenario.
#[derive(Clone, Debug)]
pub(super) struct Tenant {
    pub(super) name: String,
    /// Times in seconds and demands in GB from these times on, in the order of time.
    pub(super) demand_gb: Vec<(u32, f64)>,
    pub(super) allocation_gb_per_s: f64,
    /// Protection and bound per tier, in GB.
    pub(super) limits_gb: Vec<(f64, Option<f64>)>,
    pub(super) pattern: Pattern,
    /// Number of threads that access memory.
    pub(super) threads: u32,
}

/// Order in which a tenant accesses its memory.
#[derive(Clone, Copy, Debug)]
pub(super) enum Pattern {
    /// Passes over the whole memory. A part of the memory receives 90 % of the accesses.
    Passes {
        /// Size of this part as a fraction of the memory; 1 for equal accesses.
        hot_fraction: f64,
    },
    /// Several passes over a block, then over the next one.
    Blocks {
        /// Size of a block in GB.
        block_gb: f64,
        /// Number of passes over each block.
        passes: u32,
    },
}

impl Tenant {
    /// Creates a tenant that accesses its memory in passes.
    pub(super) fn new(name: &str, start_s: u32, demand_gb: f64, protection_gb: f64) -> Self {
        Self {
            name: name.to_owned(),
            demand_gb: vec![(start_s, demand_gb)],
            allocation_gb_per_s: ALLOCATION_GB_PER_S,
            limits_gb: vec![(protection_gb, None)],
            pattern: Pattern::Passes { hot_fraction: 1.0 },
            threads: 1,
        }
    }

    /// Sets the bound of local memory.
    pub(super) fn with_bound(mut self, bound_gb: f64) -> Self {
        self.limits_gb[0].1 = Some(bound_gb);
        self
    }
}

impl Scenario {
    /// Returns the name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Checks a scenario that a user wrote.
    ///
    /// # Errors
    /// [`ScenarioError`] for the first invalid field.
    pub fn from_spec(spec: &ScenarioSpec) -> Result<Self, ScenarioError> {
        check_name("name", &spec.name)?;
        check_range("capacity_gb", spec.capacity_gb, 1.0, TIERING_SIMULATED_GB_MAX)?;
        check_range("seconds", spec.seconds, SECONDS_MIN, TIERING_SIMULATED_SECONDS_MAX)?;
        let seconds = whole_seconds("seconds", spec.seconds)?;
        let count = spec.tenants.len();
        if count == 0 || count > TIERING_SIMULATED_TENANTS_MAX {
            let rule = format!("must be from 1 to {TIERING_SIMULATED_TENANTS_MAX}");
            return Err(ScenarioError::new("number of tenants", count, rule));
        }
        let tenants = spec.tenants.iter().enumerate();
        let tenants: Result<Vec<Tenant>, ScenarioError> =
            tenants.map(|(index, tenant)| tenant.check(index, spec)).collect();
        let tenants = tenants?;
        let sum: f64 = spec.tenants.iter().map(|tenant| tenant.demand_gb).sum();
        check_range("sum of demand_gb", sum, 0.0, TIERING_SIMULATED_GB_MAX)?;
        Ok(Self {
            name: spec.name.clone(),
            tiers_gb: vec![spec.capacity_gb, LOWER_TIER_GB],
            seconds,
            tenants,
            schemes: Scheme::DEFAULT.to_vec(),
        })
    }
}

impl TenantSpec {
    fn check(&self, index: usize, scenario: &ScenarioSpec) -> Result<Tenant, ScenarioError> {
        let field = |name: &str| format!("tenants[{index}].{name}");
        check_name(&field("name"), &self.name)?;
        if scenario.tenants[..index].iter().any(|earlier| earlier.name == self.name) {
            return Err(ScenarioError::new(field("name"), QuotedText(&self.name), "must be unique"));
        }
        check_range(&field("start_s"), self.start_s, 0.0, scenario.seconds)?;
        let start_s = whole_seconds(&field("start_s"), self.start_s)?;
        for (name, size) in [("demand_gb", self.demand_gb), ("protection_gb", self.protection_gb)] {
            check_range(&field(name), size, 0.0, TIERING_SIMULATED_GB_MAX)?;
        }
        if let Some(bound_gb) = self.bound_gb {
            check_range(&field("bound_gb"), bound_gb, 0.0, TIERING_SIMULATED_GB_MAX)?;
        }
        check_range(&field("hot_fraction"), self.hot_fraction, 0.01, 1.0)?;
        Ok(Tenant {
            limits_gb: vec![(self.protection_gb, self.bound_gb)],
            pattern: Pattern::Passes { hot_fraction: self.hot_fraction },
            ..Tenant::new(&self.name, start_s, self.demand_gb, self.protection_gb)
        })
    }
}

/// Converts a number of seconds, which is in the range of `u32`.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "the range is checked before")]
fn whole_seconds(field: &str, value: f64) -> Result<u32, ScenarioError> {
    if value.fract() == 0.0 {
        Ok(value as u32)
    } else {
        Err(ScenarioError::new(field, format!("{value:?}"), "must be a whole number"))
    }
}
