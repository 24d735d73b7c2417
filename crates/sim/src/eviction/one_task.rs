//! One task that has a server and a network of its own (section IV-C2).

use serde::Serialize;

use super::{Outcome, Parameters, Tenant, Workload};

/// Measurement of one task.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct TaskReport {
    /// Time that the task needs, divided by the time if it never waits.
    pub normalized_time: f64,
    /// Memory that was evicted while the task was blocked, in GB (10⁹ bytes).
    pub urgent_gb: f64,
}

/// Runs a task of a workload with this part of its working set as its limit, with a fixed or an adaptive
/// threshold.
///
/// # Panics
/// Panics if [`Parameters::check`] returns an error, or `local_ratio` is not more than 0.
pub fn simulate_task(
    parameters: &Parameters,
    workload: &Workload,
    local_ratio: f64,
    is_adaptive: bool,
) -> TaskReport {
    let spec = workload.tenant(local_ratio, parameters.eviction_mb_per_s);
    let tenant = Tenant::new(spec, &parameters.settings(), is_adaptive).expect("the parameters are checked");
    let Outcome { completion_s, urgent_bytes, .. } = tenant.run();
    let normalized_time = completion_s * spec.growth_per_s / spec.working_set;
    TaskReport { normalized_time, urgent_gb: urgent_bytes / 1e9 }
}
