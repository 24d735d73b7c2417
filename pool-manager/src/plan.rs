//! Splits a VM's memory into local and pool memory, and lists the hosts on which the VM fits. A VM
//! that is insensitive to latency gets almost only pool memory. Any other VM gets its predicted
//! frigid memory from the pool, or a fixed fraction if no model is in use (the static policy in
//! Pond, section 6.4). A VM without a forecast gets no pool memory. Pool memory is rounded down to
//! whole slices. The scheduler chooses the host.

use pool::{
    audit::{Actor, Decision, DecisionKind, Subject},
    ledger::{EmcEntry, HostEntry},
    manager::Manager,
};
use prediction::{frigid::RiskAllocation, operating_point::pool_only_memory};
use proto::v1 as wire;
use units::{Bytes, Fraction, HostId, Name, UnixMs, limits::SLICES_PER_VM_MAX};

use crate::{
    forecasts::{self, SensitivityPrediction, VmForecast},
    plan_request::Plan,
};

/// Name and version of the policy that is used without a model.
pub const FIXED_SHARE_POLICY: &str = "fixed-share/1";

/// Division of a VM's memory into local and pool memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Split {
    /// Local memory of the VM.
    pub local: Bytes,
    /// Pool memory of the VM, in whole slices.
    pub pool: Bytes,
}

/// Splits `memory`: the pool memory is `to_pool`, rounded down to whole slices and limited to
/// [`SLICES_PER_VM_MAX`].
fn split(memory: Bytes, to_pool: Bytes) -> Split {
    let pool = to_pool.min(Bytes::slices(SLICES_PER_VM_MAX)).slices_floor();
    let local = memory.checked_sub(pool).expect("pool memory is at most the VM's memory");
    Split { local, pool }
}

/// Split of a VM's memory, with the policy that decided it and the explanation.
#[derive(Clone, Debug, PartialEq)]
pub struct SplitDecision {
    /// Local and pool memory of the VM.
    pub split: Split,
    /// Name and version of the model or policy that decided.
    model: String,
    facts: Vec<(String, String)>,
    /// Whether the VM is placed on pool memory only, except for the local memory that the guest
    /// needs to boot.
    pub pool_only: bool,
}

/// Splits a VM's memory by its prediction. If no model is calibrated, the fraction `share` comes
/// from the pool.
pub fn decide_split(plan: &Plan, forecast: &VmForecast, share: Fraction) -> SplitDecision {
    let is_pool_only =
        |prediction: &SensitivityPrediction| forecast.point.is_pool_only(prediction.probability);
    let pool_only = forecast.sensitivity.filter(is_pool_only);
    let calibrated = forecast.serving[0].zip(forecast.point.risk_limit);
    let curve = forecast.assessment.prediction.filter(|_| calibrated.is_some());
    let allocation = forecast.point.frigid_allocation(plan.memory, curve);
    let (model, to_pool, why) = match (pool_only, calibrated) {
        (Some(SensitivityPrediction { version, modelled, .. }), _) => {
            let all = pool_only_memory(plan.memory);
            let modelled = if modelled { " (trained on MODELLED workloads)" } else { "" };
            let why = "workload is predicted to be insensitive to the latency of the pool: all memory is pool memory, except the memory needed to boot";
            (format!("sensitivity/{version}{modelled}"), all, why.to_owned())
        }
        (None, Some((version, _))) => {
            let to_pool = allocation.unwrap_or_default().to_fraction().of(plan.memory);
            (format!("frigid/{version}"), to_pool, explain_frigid(plan.memory, forecast, allocation))
        }
        (None, None) => {
            let why = match forecast.serving[0] {
                None => "no model of frigid memory is in use",
                Some(_) => "too few outcomes to calibrate the model",
            };
            let why = format!("{why}: fixed share of {:.1} %", share.get() * 100.0);
            (FIXED_SHARE_POLICY.to_owned(), share.of(plan.memory), why)
        }
    };
    let mut facts = forecasts::explain_prediction(forecast, allocation);
    let fact = |name: &str, value: String| (name.to_owned(), value);
    let size = format!("{}, {} cores{}", plan.memory, plan.cores, if plan.pinned { ", pinned" } else { "" });
    facts.extend([fact("because", why), fact("request: size", size)]);
    SplitDecision { split: split(plan.memory, to_pool), model, facts, pool_only: pool_only.is_some() }
}

/// Explains the pool memory of a VM while a calibrated model is serving.
fn explain_frigid(memory: Bytes, forecast: &VmForecast, allocation: Option<RiskAllocation>) -> String {
    match allocation {
        None if forecast.assessment.prediction.is_none() => {
            "too few VMs of the same owner have ended: no pool memory".to_owned()
        }
        None => "too few outcomes of VMs of this size: no pool memory".to_owned(),
        Some(allocation) if allocation.to_fraction().of(memory).slices_floor() == Bytes::ZERO => {
            "no slice is predicted to stay untouched within the risk limit".to_owned()
        }
        Some(allocation) => format!(
            "{:.1} % of {memory} is predicted to stay untouched within the risk limit; rounded down to whole slices",
            allocation.share * 100.0
        ),
    }
}

/// Free capacity of a host for a planned VM, copied under the ledger's lock.
#[derive(Clone, Debug)]
pub struct HostCandidate {
    host: Name,
    free_cores: u32,
    free_local: Bytes,
    free_slices: u32,
    /// EMC with the most free slices, if it has enough of them for the VM.
    emc: Option<Name>,
    /// Reason why the host accepts no VMs; `None` if it accepts VMs.
    unschedulable: Option<&'static str>,
}

/// Copies the free capacity of all hosts for a VM with this split.
pub fn candidates(manager: &Manager, split: Split) -> Vec<HostCandidate> {
    manager.durable().hosts().map(|(id, host)| host_candidate(manager, id, host, split)).collect()
}

fn host_candidate(manager: &Manager, id: HostId, entry: &HostEntry, split: Split) -> HostCandidate {
    let slices = pool_slices(split);
    let reach = || manager.durable().reach(entry).map(|(_, emc)| emc);
    let single = reach().filter(|emc| slices > 0 && emc.free() >= slices).max_by_key(|emc| emc.free());
    let reason = || entry.unschedulable_reason().unwrap_or("the host is not up");
    HostCandidate {
        host: entry.host.name.clone(),
        free_cores: entry.cores_free(),
        free_local: entry.local_free(),
        free_slices: reach().map(EmcEntry::free).sum(),
        emc: single.map(|emc| emc.emc.name.clone()),
        unschedulable: (!manager.is_schedulable(id)).then(reason),
    }
}

fn pool_slices(split: Split) -> u32 {
    split.pool.as_slices().unwrap_or(u32::MAX)
}

/// Host, and whether the planned VM fits on it; `Err` contains the reason why not.
struct Fit {
    candidate: HostCandidate,
    fits: Result<(), String>,
}

/// Returns the response to a plan request and the decision to record. Hosts on which the VM fits
/// come first, with the least free cores and memory first.
pub fn plan(
    plan: &Plan,
    split_decision: SplitDecision,
    candidates: Vec<HostCandidate>,
    at: UnixMs,
    actor: Actor,
) -> (wire::PlanVmResponse, Decision) {
    let SplitDecision { split, model, facts, .. } = split_decision;
    let fit = |candidate| Fit { fits: check_fit(&candidate, plan, split), candidate };
    let mut fits: Vec<Fit> = candidates.into_iter().map(fit).collect();
    let tightness = |Fit { candidate, fits }: &Fit| {
        (fits.is_err(), candidate.free_cores, candidate.free_local, candidate.host.clone())
    };
    fits.sort_by_cached_key(tightness);
    let decision = Decision {
        at,
        actor,
        subject: Subject::Vm(plan.vm.clone()),
        what: DecisionKind::Planned {
            model,
            memory: plan.memory,
            local: split.local,
            pool: split.pool,
            facts,
            hosts: fits.iter().map(|fit| (fit.candidate.host.clone(), fit.fits.clone())).collect(),
        },
    };
    let response = wire::PlanVmResponse {
        local_bytes: split.local.get(),
        pool_bytes: split.pool.get(),
        hosts: fits.into_iter().map(host_fit_message).collect(),
        decision: Some(crate::convert::decision_message(0, &decision)),
    };
    (response, decision)
}

/// Checks whether a VM fits on a host.
///
/// # Errors
/// Returns the reason why the VM does not fit, such as the missing resource.
fn check_fit(candidate: &HostCandidate, plan: &Plan, split: Split) -> Result<(), String> {
    let slices = pool_slices(split);
    if let Some(why) = candidate.unschedulable {
        Err(why.to_owned())
    } else if candidate.free_cores < plan.cores {
        Err(format!("{} cores free, {} needed", candidate.free_cores, plan.cores))
    } else if candidate.free_local < split.local {
        Err(format!("{} of local memory free, {} needed", candidate.free_local, split.local))
    } else if candidate.free_slices < slices {
        Err(format!("{} slices free, {slices} needed", candidate.free_slices))
    } else {
        Ok(())
    }
}

fn host_fit_message(Fit { candidate, fits }: Fit) -> wire::HostFit {
    wire::HostFit {
        host: candidate.host.to_string(),
        fits: fits.is_ok(),
        free_cores: candidate.free_cores,
        free_local_bytes: candidate.free_local.get(),
        emc: candidate.emc.map(String::from).unwrap_or_default(),
        reason: fits.err().unwrap_or_default(),
    }
}

#[cfg(test)]
mod tests;
