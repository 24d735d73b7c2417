//! Searches the least memory that serves the VMs as well as the given memory without pools: the memory of
//! each socket without pools, and the best pair of local memory and pool memory.

use cli_runtime::Failure;
use sim::plan::replay::ReplayReport;

use super::{
    options::Division,
    runner::{LimitedPools, ReplayResult, ReplaySpec, Runner},
};

/// Fractions of local memory that are searched, in percent: from, to and step.
const LOCAL_PERCENT: (u32, u32, u32) = (30, 90, 5);
/// Number of bisections of the pool memory for each local memory. They reach a precision of about 1 %
/// of the memory without pools.
const POOL_BISECTIONS: usize = 6;
/// Least mean memory of the running VMs, relative to the cluster without pools. Two placements of the
/// same VMs differ by a few tenths of a percent.
const USED_MEMORY_MIN: f64 = 0.995;
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

/// Search of the pool memory for one division, pool size and local memory.
struct Candidate {
    division: Division,
    pool_sockets: u32,
    local_fraction: f64,
    /// Pool memory with which too many VMs are rejected.
    insufficient: f64,
    /// Least pool memory that was tested and is sufficient, or untested.
    sufficient: f64,
}

impl Candidate {
    fn spec(&self, fraction: f64) -> ReplaySpec {
        let pools = Some(LimitedPools { pool_sockets: self.pool_sockets, fraction });
        ReplaySpec { division: self.division, local_fraction: self.local_fraction, pools }
    }

    fn is_for(&self, division: Division, pool_sockets: u32) -> bool {
        self.division == division && self.pool_sockets == pool_sockets
    }
}

/// Returns, for each division and pool size, the replay with the least local and pool memory together that
/// [is sufficient](is_sufficient). It is a replay without pool memory if every tested pair of
/// memories needs more than the cluster without pools.
///
/// # Errors
/// The errors of [`Runner::pass`].
pub(super) fn least_with_pools(
    runner: &Runner<'_>,
    divisions: &[Division],
    all_local: &ReplayReport,
) -> Result<Vec<ReplayResult>, Failure> {
    let (from, to, step) = LOCAL_PERCENT;
    let pairs: Vec<(Division, u32)> = divisions
        .iter()
        .flat_map(|division| runner.pool_sizes.iter().map(move |pool_sockets| (*division, *pool_sockets)))
        .collect();
    let mut candidates: Vec<Candidate> = Vec::new();
    for (division, pool_sockets) in &pairs {
        candidates.extend((from..=to).step_by(step as usize).map(|percent| {
            let local_fraction = f64::from(percent) / 100.0;
            let (division, pool_sockets) = (*division, *pool_sockets);
            Candidate {
                division,
                pool_sockets,
                local_fraction,
                insufficient: 0.0,
                sufficient: 1.0 - local_fraction,
            }
        }));
    }
    let without: Vec<ReplaySpec> = pairs
        .iter()
        .map(|(division, pool_sockets)| {
            let pools = Some(LimitedPools { pool_sockets: *pool_sockets, fraction: 0.0 });
            ReplaySpec { division: *division, local_fraction: 1.0, pools }
        })
        .collect();
    let mut best = runner.pass(&without)?;
    // The first test is at the pool memory with which nothing is saved.
    let mut tests: Vec<f64> = candidates.iter().map(|candidate| candidate.sufficient).collect();
    for _ in 0..=POOL_BISECTIONS {
        if candidates.is_empty() {
            break;
        }
        let specs: Vec<ReplaySpec> =
            candidates.iter().zip(&tests).map(|(candidate, fraction)| candidate.spec(*fraction)).collect();
        let results = runner.pass(&specs)?;
        for ((candidate, result), fraction) in candidates.iter_mut().zip(results).zip(&tests) {
            if !is_sufficient(&result.report, all_local) {
                candidate.insufficient = *fraction;
                continue;
            }
            candidate.sufficient = *fraction;
            let at = pairs.iter().position(|(division, size)| candidate.is_for(*division, *size));
            let best = &mut best[at.expect("every candidate has a pair")];
            if total_fraction(runner, &result) < total_fraction(runner, best) {
                *best = result;
            }
        }
        candidates.retain(|candidate| {
            let at = pairs.iter().position(|(division, size)| candidate.is_for(*division, *size));
            let best = total_fraction(runner, &best[at.expect("every candidate has a pair")]);
            candidate.insufficient < candidate.sufficient
                && candidate.local_fraction + candidate.insufficient < best
        });
        tests = candidates.iter().map(|c| f64::midpoint(c.insufficient, c.sufficient)).collect();
    }
    Ok(best)
}

/// Returns the local and pool memory of a replay with pools of one size, as a fraction of the memory
/// without pools.
fn total_fraction(runner: &Runner<'_>, result: &ReplayResult) -> f64 {
    let pools_mib: u64 =
        result.report.pools.iter().map(|peaks| u64::from(peaks.pools) * peaks.sampled_mib).sum();
    result.spec.local_fraction + pools_mib as f64 / runner.cluster.total_mib() as f64
}
