//! Split of a VM's memory, and hosts that fit. Insensitive VMs are placed on pool memory, of others
//! the predicted frigid memory; without a model a fixed fraction (the static policy in Pond 6.4).
//! Always in whole slices, rounded down. The scheduler chooses the host.

use pool::{
    audit::{Actor, Decision, Subject, What},
    ledger::{EmcEntry, HostEntry},
    manager::Manager,
};
use prediction::frigid::{Groups, RiskAllocation};
use proto::v1 as wire;
use units::{Bytes, Fraction, HostId, Name, UnixMs, limits::SLICES_PER_VM_MAX};

use crate::forecasts::{self, Counters, Foreseen, Told};

/// Validated plan request.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// VM.
    pub vm: Name,
    /// Cores.
    pub cores: u32,
    /// Total memory.
    pub memory: Bytes,
    /// Pages must not be migrated.
    pub pinned: bool,
    /// Properties for predictions.
    pub groups: Groups,
    /// Counters of its workload, if measured.
    pub counters: Option<Counters>,
}

/// Name of the fixed policy, with its version.
pub const FIXED_SHARE: &str = "fixed-share/1";

/// Split of a VM's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Split {
    /// Local memory.
    pub local: Bytes,
    /// Pool memory, in whole slices.
    pub pool: Bytes,
}

/// Local memory of a VM on pool memory only: its guest boots there, and a node with CPUs must have
/// memory.
const LOCAL_OF_WHOLE: Bytes = Bytes::mib(512);

/// Returns the pool memory for a fraction, rounded down to whole slices, at most the limit of a VM.
fn split(memory: Bytes, to_pool: Bytes) -> Split {
    let pool = to_pool.min(Bytes::slices(SLICES_PER_VM_MAX)).slices_floor();
    let local = memory.checked_sub(pool).expect("a part is not larger than its whole");
    Split { local, pool }
}

/// Split with its policy and reason.
#[derive(Clone, Debug, PartialEq)]
pub struct Decided {
    /// Split.
    pub split: Split,
    /// Policy or model, with its version.
    model: String,
    facts: Vec<(String, String)>,
    /// The VM is placed on pool memory as far as possible.
    pub whole: bool,
}

/// Splits a VM's memory by its prediction; without a model, the fraction `share` comes from the
/// pool.
pub fn decide(plan: &Plan, foreseen: &Foreseen, share: Fraction) -> Decided {
    let placed = foreseen.sensitivity.zip(foreseen.point.cut);
    let whole = placed.map(|(told, cut)| (told, told.probability <= cut.at_most)).filter(|(_, fits)| *fits);
    let stake: Option<RiskAllocation> = foreseen
        .known
        .prediction
        .zip(foreseen.point.appetite)
        .map(|(said, appetite)| said.allocation(plan.memory, appetite));
    let (model, to_pool, why) = match (whole, stake, foreseen.begun.remark) {
        (Some((Told { version, modelled, .. }, _)), ..) => {
            let all = plan.memory.saturating_sub(LOCAL_OF_WHOLE);
            let modelled = if modelled { " (made of MODELLED workloads)" } else { "" };
            let why = "its workload is forecast not to mind the pool's latency: all but what it boots from";
            (format!("sensitivity/{version}{modelled}"), all, why.to_owned())
        }
        (None, Some(stake), Some(remark)) => {
            let share = Fraction::new(stake.share).expect("a stake is a share");
            let taken = format!(
                "{:.1} % of {} is forecast to stay untouched, at a risk that it is worth",
                stake.share * 100.0,
                plan.memory
            );
            let why = match share.of(plan.memory).slices_floor() {
                Bytes::ZERO => "not a slice of it is worth the risk of being touched".to_owned(),
                _ => format!("{taken}; down to whole slices"),
            };
            (format!("frigid/{}", remark.version), share.of(plan.memory), why)
        }
        (None, _, remark) => {
            let why = match remark {
                None => "no model of frigid memory serves".to_owned(),
                Some(_) => "too few outcomes tell yet how far the model can be trusted".to_owned(),
            };
            let why = format!("{why}: a fixed share, {:.1} %", share.get() * 100.0);
            (FIXED_SHARE.to_owned(), share.of(plan.memory), why)
        }
    };
    let mut facts = forecasts::facts(foreseen, stake);
    let say = |name: &str, value: String| (name.to_owned(), value);
    let size = format!("{}, {} cores{}", plan.memory, plan.cores, if plan.pinned { ", pinned" } else { "" });
    facts.extend([say("because", why), say("told: size", size)]);
    Decided { split: split(plan.memory, to_pool), model, facts, whole: whole.is_some() }
}

/// Free capacity of a host for a VM, quick to copy under the ledger's lock.
#[derive(Clone, Debug)]
pub struct Offer {
    host: Name,
    free_cores: u32,
    free_local: Bytes,
    free_slices: u32,
    /// EMC with the most free slices, if it has all slices that the VM needs.
    emc: Option<Name>,
    /// Reason why the host accepts no VM.
    unschedulable: Option<&'static str>,
}

/// Copies the free capacity of each host for a split.
pub fn offers(manager: &Manager, split: Split) -> Vec<Offer> {
    manager.durable().hosts().map(|(id, host)| offer(manager, id, host, split)).collect()
}

fn offer(manager: &Manager, id: HostId, entry: &HostEntry, split: Split) -> Offer {
    let slices = slices_of(split);
    let reach = || manager.durable().reach(entry).map(|(_, emc)| emc);
    let whole = reach().filter(|emc| slices > 0 && emc.free() >= slices).max_by_key(|emc| emc.free());
    let not_up = || entry.not_schedulable().unwrap_or("not up");
    Offer {
        host: entry.host.name.clone(),
        free_cores: entry.cores_free(),
        free_local: entry.local_free(),
        free_slices: reach().map(EmcEntry::free).sum(),
        emc: whole.map(|emc| emc.emc.name.clone()),
        unschedulable: (!manager.is_schedulable(id)).then(not_up),
    }
}

fn slices_of(split: Split) -> u32 {
    split.pool.as_slices().unwrap_or(u32::MAX)
}

/// Host with the result of the fit.
struct Fit {
    offer: Offer,
    fits: Result<(), String>,
}

/// Plans a VM: returns the response, with the tightest fitting hosts first, and the decision to be
/// recorded.
pub fn plan(
    plan: &Plan,
    decided: Decided,
    offers: Vec<Offer>,
    at: UnixMs,
    actor: Actor,
) -> (wire::PlanVmResponse, Decision) {
    let Decided { split, model, facts, .. } = decided;
    let fit = |offer| Fit { fits: fits(&offer, plan, split), offer };
    let mut fits: Vec<Fit> = offers.into_iter().map(fit).collect();
    let tightness =
        |Fit { offer, fits }: &Fit| (fits.is_err(), offer.free_cores, offer.free_local, offer.host.clone());
    fits.sort_by_cached_key(tightness);
    let decision = Decision {
        at,
        actor,
        subject: Subject::Vm(plan.vm.clone()),
        what: What::Planned {
            model,
            memory: plan.memory,
            local: split.local,
            pool: split.pool,
            facts,
            hosts: fits.iter().map(|fit| (fit.offer.host.clone(), fit.fits.clone())).collect(),
        },
    };
    let response = wire::PlanVmResponse {
        local_bytes: split.local.get(),
        pool_bytes: split.pool.get(),
        hosts: fits.into_iter().map(shown).collect(),
        decision: Some(crate::convert::decision(0, &decision)),
    };
    (response, decision)
}

/// Checks whether a VM fits on a host.
///
/// # Errors
/// The resource that the host lacks.
fn fits(offer: &Offer, plan: &Plan, split: Split) -> Result<(), String> {
    let slices = slices_of(split);
    if let Some(why) = offer.unschedulable {
        Err(why.to_owned())
    } else if offer.free_cores < plan.cores {
        Err(format!("{} cores free, {} needed", offer.free_cores, plan.cores))
    } else if offer.free_local < split.local {
        Err(format!("{} of local memory free, {} needed", offer.free_local, split.local))
    } else if offer.free_slices < slices {
        Err(format!("{} slices free, {slices} needed", offer.free_slices))
    } else {
        Ok(())
    }
}

fn shown(Fit { offer, fits }: Fit) -> wire::HostFit {
    wire::HostFit {
        host: offer.host.to_string(),
        fits: fits.is_ok(),
        free_cores: offer.free_cores,
        free_local_bytes: offer.free_local.get(),
        emc: offer.emc.map(String::from).unwrap_or_default(),
        reason: fits.err().unwrap_or_default(),
    }
}

#[cfg(test)]
mod tests;
