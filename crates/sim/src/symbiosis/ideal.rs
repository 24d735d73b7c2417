//! Ideal allocation: maximises the geometric mean of the true throughputs. No tenant has a lower
//! throughput than with an equal split. Shares are multiples of about 1/200.

use fairness::market::Bundle;

use super::{
    split::{Table, best_split},
    tenant::Tenant,
};

/// Number of steps into which each resource is divided. It is rounded down to a multiple of the
/// number of tenants, so that an equal split is on the grid.
const GRID_STEPS: usize = 200;

/// Computes the ideal share of each tenant. `memory` is the memory of the host in footprints.
pub(super) fn ideal_shares(tenants: &[Tenant], memory: f64) -> Vec<Bundle> {
    let steps = (GRID_STEPS / tenants.len()).max(1) * tenants.len();
    let part = |count: usize| count as f64 / steps as f64;
    let share = |(m, b): (usize, usize)| Bundle { memory: part(m) * memory, bandwidth: part(b) };
    let equal = (steps / tenants.len(), steps / tenants.len());
    let table = |tenant: &Tenant| -> Table {
        let equal_value = tenant.throughput(share(equal));
        let log = |cell| {
            let value = tenant.throughput(share(cell));
            #[expect(clippy::cast_possible_truncation, reason = "seven digits are enough to compare")]
            let log = value.ln() as f32;
            if value >= equal_value { log } else { f32::NEG_INFINITY }
        };
        (0..=steps).flat_map(|m| (0..=steps).map(move |b| (m, b))).map(log).collect()
    };
    let tables: Vec<Table> = tenants.iter().map(table).collect();
    let split = best_split(&tables, steps).expect("an equal split is on the grid");
    split.into_iter().map(share).collect()
}
