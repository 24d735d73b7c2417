//! From shares to limits: first whoever gets less, then whoever gets more, so that no more is dealt out at any time than there is.

use fairness::market::Share;
use units::{Bytes, Name};

use crate::host::{
    cgroup::{Cgroups, Limits, is_gone},
    sysfs::SysfsError,
};

/// A MB is a million bytes.
const MB: u64 = 1_000_000;

/// A share that is to be a tenant's limits.
#[derive(Clone, Copy, Debug)]
pub(super) struct Order<'a> {
    pub tenant: &'a Name,
    pub share: Share,
}

/// Something to change.
struct Step<'a> {
    tenant: &'a Name,
    from: Limits,
    to: Limits,
}

/// Sets limits, where they are not what they are to be. Answers which tenants have not got theirs, and why: those that are gone, and those that were to get
/// more and could not.
///
/// # Errors
/// Somebody that was to get less could not be limited: then nobody is, and all have what they had.
pub(super) fn enforce(
    cgroups: &Cgroups,
    device: &str,
    orders: &[Order<'_>],
) -> Result<Vec<(Name, String)>, String> {
    let mut failed = Vec::new();
    let mut steps = Vec::new();
    for Order { tenant, share } in orders {
        let to = Limits {
            memory: Some(Bytes::mib(share.memory_mib)),
            bandwidth: Some(share.bandwidth_mb_s.saturating_mul(MB)),
        };
        match cgroups.limits(tenant.as_str(), device) {
            Ok(from) => steps.extend((from != to).then_some(Step { tenant, from, to })),
            Err(error) if is_gone(&error) => failed.push(((*tenant).clone(), "is gone".to_owned())),
            Err(error) => return Err(told(tenant, &error)),
        }
    }
    let (less, more): (Vec<Step<'_>>, Vec<Step<'_>>) = steps.into_iter().partition(Step::takes);
    for (at, step) in less.iter().enumerate() {
        match set(cgroups, device, step.tenant, &step.to) {
            Err(error) if is_gone(&error) => failed.push((step.tenant.clone(), "is gone".to_owned())),
            Err(error) => {
                undo(cgroups, device, &less[..=at]);
                return Err(told(step.tenant, &error));
            }
            Ok(()) => {}
        }
    }
    for step in more {
        if let Err(error) = set(cgroups, device, step.tenant, &step.to) {
            let why = if is_gone(&error) { "is gone".to_owned() } else { units::chain(&error) };
            failed.push((step.tenant.clone(), why));
        }
    }
    Ok(failed)
}

impl Step<'_> {
    /// Whether some of anything is taken.
    fn takes(&self) -> bool {
        let is_less =
            |from: Option<u64>, to: Option<u64>| from.is_none_or(|from| to.is_some_and(|to| to < from));
        is_less(self.from.memory.map(Bytes::get), self.to.memory.map(Bytes::get))
            || is_less(self.from.bandwidth, self.to.bandwidth)
    }
}

/// Bandwidth first: pages that are taken away go through it.
fn set(cgroups: &Cgroups, device: &str, tenant: &Name, to: &Limits) -> Result<(), SysfsError> {
    cgroups.limit_bandwidth(tenant.as_str(), device, to.bandwidth)?;
    cgroups.limit_memory(tenant.as_str(), to.memory)
}

fn undo(cgroups: &Cgroups, device: &str, steps: &[Step<'_>]) {
    for step in steps {
        if let Err(error) = set(cgroups, device, step.tenant, &step.from) {
            tracing::error!(tenant = %step.tenant, error = units::chain(&error), "limits not as they were");
        }
    }
}

fn told(tenant: &Name, error: &SysfsError) -> String {
    format!("{tenant}: {}", units::chain(error))
}
