//! Simulation of tenants that share the memory tiers of a host (Equilibria, sections III-F and V-B).
//!
//! The simulation moves units of 4 MiB. Tenants allocate units and access them in passes. A fault of
//! a scanned unit outside of local memory makes the unit a candidate for promotion. Units are demoted
//! from active and inactive LRU lists with one referenced bit, like pages in Linux. A [`Scheme`]
//! decides from counters which tenant is demoted and how much it may promote. It never observes the
//! demand of a tenant or the accesses to a unit.
//!
//! Model of performance: an access to a page takes 3.3 µs in local memory, and 1.65 times as long in
//! a lower tier. Each migrated page takes 0.4 µs of the time of all tenants, for CPU, bandwidth and
//! TLB shootdowns. The constants are calibrated to sections III-F and V-B: 28 % less throughput with
//! a part of the memory in CXL memory, 290,000 pages per second, and 7 % less throughput because of a
//! thrashing tenant. The model has no caches, no file pages, and no limit on the bandwidth of a tier.

mod clock;
mod controller;
mod host;
mod memory;
mod report;
mod scenario;
mod scenarios;
mod tenant;

pub use controller::Scheme;
pub use report::{ScenarioReport, SchemeReport, TenantPoint, TenantReport, TimePoint};
pub use scenario::{Scenario, ScenarioSpec, TenantSpec};
pub use scenarios::scenarios;

use host::Host;

/// Simulates a scenario with each of its schemes. The result is deterministic.
pub fn simulate(scenario: &Scenario) -> ScenarioReport {
    let schemes = scenario.schemes.iter().map(|scheme| simulate_scheme(scenario, *scheme));
    ScenarioReport::new(scenario, schemes.collect())
}

fn simulate_scheme(scenario: &Scenario, scheme: Scheme) -> SchemeReport {
    let mut host = Host::new(scenario, scheme);
    let timeline = (0..scenario.seconds).map(|second| host.run_second(second)).collect();
    SchemeReport::new(scheme, timeline)
}

#[cfg(test)]
mod tests;
