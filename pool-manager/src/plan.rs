//! How a VM's memory is split before a model has been trained: a fixed share, in whole slices rounded down (Pond 6.4's
//! static strawman), and which hosts it would fit on. Choosing one is the scheduler's business.

use pool::{
    audit::{Actor, Decision, Subject, What},
    ledger::{HostEntry, When},
    manager::Manager,
};
use proto::v1 as wire;
use units::{Bytes, Fraction, HostId, Name};

/// A VM to be planned, checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// Which VM.
    pub vm: Name,
    /// Its cores.
    pub cores: u32,
    /// All its memory.
    pub memory: Bytes,
    /// Whether its pages must stay where they are.
    pub pinned: bool,
}

/// The fixed policy, with its version.
pub const FIXED_SHARE: &str = "fixed-share/1";

/// A VM's memory in two parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Split {
    /// From the host itself.
    pub local: Bytes,
    /// From the pool; whole slices.
    pub pool: Bytes,
}

/// A share of the memory goes to the pool, rounded down to whole slices.
pub fn split(memory: Bytes, share: Fraction) -> Split {
    let pool = share.of(memory).slices_floor();
    let local = memory.checked_sub(pool).expect("a part is not larger than its whole");
    Split { local, pool }
}

/// A host and whether the VM fits there.
struct Fit {
    host: Name,
    free_cores: u32,
    free_local: Bytes,
    emc: Option<Name>,
    fits: Result<(), String>,
}

/// Plans a VM: the answer, and the decision to be remembered.
pub fn plan(
    manager: &Manager,
    when: When,
    plan: &Plan,
    share: Fraction,
    actor: Actor,
) -> (wire::PlanVmResponse, Decision) {
    let split = split(plan.memory, share);
    let mut fits: Vec<Fit> =
        manager.durable().hosts().map(|(id, host)| fit(manager, id, host, plan, split)).collect();
    fits.sort_by_key(|fit| (fit.fits.is_err(), fit.free_cores, fit.free_local, fit.host.clone())); // tightest first
    let decision = Decision {
        at: when.wall,
        actor,
        subject: Subject::Vm(plan.vm.clone()),
        what: What::Planned {
            model: FIXED_SHARE.into(),
            memory: plan.memory,
            local: split.local,
            pool: split.pool,
            facts: vec![
                ("pool_share".into(), share.get().to_string()),
                ("cores".into(), plan.cores.to_string()),
                ("pinned".into(), plan.pinned.to_string()),
            ],
            hosts: fits.iter().map(|fit| (fit.host.clone(), fit.fits.clone())).collect(),
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

fn fit(manager: &Manager, id: HostId, entry: &HostEntry, plan: &Plan, split: Split) -> Fit {
    let slices = split.pool.as_slices().unwrap_or(u32::MAX);
    let reach: Vec<_> =
        manager.durable().reach(entry).map(|(_, emc)| (emc.free(), emc.emc.name.clone())).collect();
    let free: u32 = reach.iter().map(|(free, _)| free).sum();
    let whole = reach.into_iter().filter(|(free, _)| *free >= slices).max_by_key(|(free, _)| *free);
    let fits = if !manager.is_schedulable(id) {
        Err(entry.not_schedulable().unwrap_or("not up").to_owned())
    } else if entry.cores_free() < plan.cores {
        Err(format!("{} cores free, {} needed", entry.cores_free(), plan.cores))
    } else if entry.local_free() < split.local {
        Err(format!("{} of local memory free, {} needed", entry.local_free(), split.local))
    } else if free < slices {
        Err(format!("{free} slices free, {slices} needed"))
    } else {
        Ok(())
    };
    let emc = whole.filter(|_| slices > 0).map(|(_, name)| name);
    Fit {
        host: entry.host.name.clone(),
        free_cores: entry.cores_free(),
        free_local: entry.local_free(),
        emc,
        fits,
    }
}

fn shown(fit: Fit) -> wire::HostFit {
    wire::HostFit {
        host: fit.host.to_string(),
        fits: fit.fits.is_ok(),
        free_cores: fit.free_cores,
        free_local_bytes: fit.free_local.get(),
        emc: fit.emc.map(String::from).unwrap_or_default(),
        why_not: fit.fits.err().unwrap_or_default(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pool_gets_whole_slices_rounded_down() {
        let share = |x| Fraction::new(x).unwrap();
        assert_eq!(split(Bytes::gib(32), share(0.2)), Split { local: Bytes::gib(26), pool: Bytes::gib(6) });
        assert_eq!(split(Bytes::gib(7), share(0.5)), Split { local: Bytes::gib(4), pool: Bytes::gib(3) });
        assert_eq!(split(Bytes::gib(3), share(0.3)), Split { local: Bytes::gib(3), pool: Bytes::ZERO });
    }
}
