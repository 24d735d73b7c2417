//! From shares to limits: first all that is taken from anybody, then all that is given, so that no more is dealt out at any time than there is.

use fairness::market::Share;
use units::{Bytes, Name};

use crate::host::{
    cgroup::{Cgroups, Limits, is_gone},
    sysfs::SysfsError,
};

/// A MB is a million bytes.
const MB: u64 = 1_000_000;

/// Who may move nothing at all would stand still for ever, and the kernel takes no such limit.
const BYTES_PER_S_MIN: u64 = MB / 10;

/// What becomes of a share.
pub(super) trait Enforcer {
    /// What a tenant is limited to now; nothing where nobody is limited.
    ///
    /// # Errors
    /// It is gone, or cannot be read.
    fn limits(&self, tenant: &Name) -> Result<Option<Limits>, SysfsError>;

    /// Limits a tenant.
    ///
    /// # Errors
    /// It is gone, or the kernel refuses: a part may have been done.
    fn set(&self, tenant: &Name, to: &Limits) -> Result<(), SysfsError>;
}

/// What exceeds a share is swapped out, and comes back as fast as the share allows (Spirit 5).
#[derive(Clone, Copy, Debug)]
pub(super) struct Swap<'a> {
    pub cgroups: &'a Cgroups,
    /// The swap device's number.
    pub device: &'a str,
}

/// Shares are told, and that is all: where somebody else goes by them, or nobody can yet.
#[derive(Clone, Copy, Debug)]
pub(super) struct Advice;

impl Enforcer for Swap<'_> {
    fn limits(&self, tenant: &Name) -> Result<Option<Limits>, SysfsError> {
        self.cgroups.limits(tenant.as_str(), self.device).map(Some)
    }

    /// Bandwidth first: pages that are taken away go through it.
    fn set(&self, tenant: &Name, to: &Limits) -> Result<(), SysfsError> {
        self.cgroups.limit_bandwidth(tenant.as_str(), self.device, to.bandwidth)?;
        self.cgroups.limit_memory(tenant.as_str(), to.memory)
    }
}

impl Enforcer for Advice {
    fn limits(&self, _: &Name) -> Result<Option<Limits>, SysfsError> {
        Ok(None)
    }

    fn set(&self, _: &Name, _: &Limits) -> Result<(), SysfsError> {
        Ok(())
    }
}

/// A share that is to be a tenant's limits.
#[derive(Clone, Copy)]
pub(super) struct Order<'a> {
    pub tenant: &'a Name,
    pub share: Share,
    pub by: &'a dyn Enforcer,
}

/// Something to change.
struct Step<'a> {
    tenant: &'a Name,
    by: &'a dyn Enforcer,
    from: Limits,
    to: Limits,
}

/// Sets limits, where they are not what they are to be. Answers which tenants have not got theirs, and why: those that are gone, and those that were to get
/// more and could not.
///
/// # Errors
/// Somebody that was to get less could not be limited: then nobody is, and all have what they had.
pub(super) fn enforce(orders: &[Order<'_>]) -> Result<Vec<(Name, String)>, String> {
    let mut failed = Vec::new();
    let mut steps = Vec::new();
    for order in orders {
        match order.step() {
            Ok(step) => steps.extend(step),
            Err(error) if is_gone(&error) => failed.push(gone(order.tenant)),
            Err(error) => return Err(told(order.tenant, &error)),
        }
    }
    for (at, step) in steps.iter().enumerate() {
        match step.set(&step.less()) {
            Ok(()) => {}
            Err(error) if is_gone(&error) => failed.push(gone(step.tenant)),
            Err(error) => {
                undo(&steps[..=at]);
                return Err(told(step.tenant, &error));
            }
        }
    }
    for step in steps.iter().filter(|step| step.less() != step.to) {
        match step.set(&step.to) {
            Ok(()) => {}
            Err(error) if is_gone(&error) => failed.push(gone(step.tenant)),
            Err(error) => failed.push((step.tenant.clone(), units::chain(&error))),
        }
    }
    Ok(failed)
}

impl<'a> Order<'a> {
    /// What is to be changed for it, if anything is.
    fn step(&self) -> Result<Option<Step<'a>>, SysfsError> {
        let to = Limits {
            memory: Some(Bytes::mib(self.share.memory_mib)),
            bandwidth: Some(self.share.bandwidth_mb_s.saturating_mul(MB).max(BYTES_PER_S_MIN)),
        };
        let from = self.by.limits(self.tenant)?.filter(|from| *from != to);
        Ok(from.map(|from| Step { tenant: self.tenant, by: self.by, from, to }))
    }
}

impl Step<'_> {
    /// Of both goods what is less: what there is now, or what is to be.
    fn less(&self) -> Limits {
        let less = |from: Option<u64>, to: Option<u64>| from.into_iter().chain(to).min();
        let memory = less(self.from.memory.map(Bytes::get), self.to.memory.map(Bytes::get));
        Limits { memory: memory.map(Bytes::new), bandwidth: less(self.from.bandwidth, self.to.bandwidth) }
    }

    fn set(&self, to: &Limits) -> Result<(), SysfsError> {
        if *to == self.from { Ok(()) } else { self.by.set(self.tenant, to) }
    }
}

fn undo(steps: &[Step<'_>]) {
    for step in steps {
        if let Err(error) = step.by.set(step.tenant, &step.from) {
            tracing::error!(tenant = %step.tenant, error = units::chain(&error), "limits not as they were");
        }
    }
}

fn gone(tenant: &Name) -> (Name, String) {
    (tenant.clone(), "is gone".to_owned())
}

fn told(tenant: &Name, error: &SysfsError) -> String {
    format!("{tenant}: {}", units::chain(error))
}
