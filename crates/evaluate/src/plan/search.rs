//! Searches the least memory that serves the VMs as well as the given memory without pools: the memory of
//! each socket without pools, and the best pair of local memory and pool memory.

use cli_runtime::Failure;
use sim::plan::replay::ReplayReport;

use super::{
    options::Division,
    runner::{ReplayResult, ReplaySpec, Runner},
};

/// Range of the local memory that is searched, in percent of the memory without pools.
const LOCAL_PERCENT: std::ops::RangeInclusive<u32> = 40..=100;
/// Least mean memory of the running VMs, relative to the cluster without pools. Two placements of the
/// same VMs differ by about a tenth of a percent.
const USED_MEMORY_MIN: f64 = 0.998;
/// Number of fractions in each of two passes that search the least memory without pools.
const WITHOUT_POOLS_STEPS: u32 = 20;

/// Returns the least memory of each socket without pools that [is sufficient](is_sufficient), as a
/// fraction of the given memory. More memory can lead to a placement that is not sufficient; the least
/// of the tested fractions is returned.
///
/// # Errors
/// The errors of [`Runner::pass`].
pub(super) fn least_without_pools(runner: &Runner<'_>, all_local: &ReplayReport) -> Result<f64, Failure> {
    let (mut least, mut width) = (1.0, 1.0);
    for _ in 0..2 {
        let step = width / f64::from(WITHOUT_POOLS_STEPS);
        let fractions = (1..WITHOUT_POOLS_STEPS).map(|at| least - f64::from(at) * step);
        let specs: Vec<ReplaySpec> =
            fractions.map(|fraction| ReplaySpec::new(Division::Whole, fraction)).collect();
        let results = runner.pass(&specs)?;
        let sufficient = results.iter().filter(|result| is_sufficient(&result.report, all_local));
        least = sufficient.map(|result| result.spec.local_fraction).fold(least, f64::min);
        width = step;
    }
    Ok(least)
}

/// Returns whether a replay serves the VMs as well as the cluster without pools: it rejects no more VMs,
/// and the running VMs have as much memory. The second condition excludes clusters that reject a few
/// large VMs instead of many small ones.
fn is_sufficient(report: &ReplayReport, all_local: &ReplayReport) -> bool {
    report.counts.rejected <= all_local.counts.rejected
        && report.used_mean_mib >= all_local.used_mean_mib * USED_MEMORY_MIN
}

/// Returns, for each division and pool size, the replay with the least local and pool memory together that
/// [is sufficient](is_sufficient). It has all memory local if no tested local memory saves anything. Each
/// report has only the pools of its size.
///
/// # Errors
/// The errors of [`Runner::pass`].
pub(super) fn least_with_pools(
    runner: &Runner<'_>,
    divisions: &[Division],
    all_local: &ReplayReport,
) -> Result<Vec<ReplayResult>, Failure> {
    let specs = |division: &Division| {
        let division = *division;
        LOCAL_PERCENT.map(move |percent| ReplaySpec::new(division, f64::from(percent) / 100.0))
    };
    let specs: Vec<ReplaySpec> = divisions.iter().flat_map(specs).collect();
    let results = runner.pass(&specs)?;
    let mut best = Vec::new();
    for results in results.chunks(specs.len() / divisions.len()) {
        let all = results.last().expect("the range is not empty");
        for at in 0..runner.pool_sizes.len() {
            let sufficient = results.iter().filter(|result| is_sufficient(&result.report, all_local));
            let total = |result: &&ReplayResult| total_fraction(runner, result, at);
            let least = sufficient.chain([all]).min_by(|one, other| total(one).total_cmp(&total(other)));
            let mut least = least.expect("the replay with all memory local").clone();
            least.report.pools = vec![least.report.pools[at]];
            best.push(least);
        }
    }
    Ok(best)
}

/// Returns the local and pool memory of a replay with the pools at an index of the pool sizes, as a
/// fraction of the memory without pools.
fn total_fraction(runner: &Runner<'_>, result: &ReplayResult, at: usize) -> f64 {
    let peaks = result.report.pools[at];
    let pools_mib = u64::from(peaks.pools) * peaks.sampled_mib;
    result.spec.local_fraction + pools_mib as f64 / runner.cluster.total_mib() as f64
}
