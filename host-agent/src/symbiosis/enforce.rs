//! Converts shares to limits: reductions before increases, so that the limits never exceed the
//! supply.

use fairness::market::Share;
use units::{Bytes, Name};

use crate::host::{
    cgroup::{Cgroups, Limits},
    sysfs::SysfsError,
};

/// Bytes per MB.
const MB: u64 = 1_000_000;

/// A limit of 0 would stop a tenant for ever, and the kernel rejects it.
const BYTES_PER_S_MIN: u64 = MB / 10;

/// Enforcement of a share.
pub(super) trait Enforcer {
    /// Returns a tenant's current limits; `None` without limits.
    ///
    /// # Errors
    /// It does not exist, or cannot be read.
    fn limits(&self, tenant: &Name) -> Result<Option<Limits>, SysfsError>;

    /// Limits a tenant.
    ///
    /// # Errors
    /// It does not exist, or the kernel rejects the limit; some limits may be set.
    fn set(&self, tenant: &Name, to: &Limits) -> Result<(), SysfsError>;

    /// Returns whether a tenant exists.
    fn exists(&self, tenant: &Name) -> bool;
}

/// Memory above a share is swapped out, and returns as fast as the share permits (Spirit 5).
#[derive(Clone, Copy, Debug)]
pub(super) struct Swap<'a> {
    pub cgroups: &'a Cgroups,
    /// The swap device's number.
    pub device: &'a str,
}

/// Reports shares only: another program may use them.
#[derive(Clone, Copy, Debug)]
pub(super) struct Advice;

impl Enforcer for Swap<'_> {
    fn limits(&self, tenant: &Name) -> Result<Option<Limits>, SysfsError> {
        self.cgroups.limits(tenant.as_str(), self.device).map(Some)
    }

    /// Sets the bandwidth first, because reclaimed pages use it.
    fn set(&self, tenant: &Name, to: &Limits) -> Result<(), SysfsError> {
        self.cgroups.limit_bandwidth(tenant.as_str(), self.device, to.read, to.written)?;
        self.cgroups.limit_memory(tenant.as_str(), to.memory)
    }

    fn exists(&self, tenant: &Name) -> bool {
        self.cgroups.exists(tenant.as_str())
    }
}

impl Enforcer for Advice {
    fn limits(&self, _: &Name) -> Result<Option<Limits>, SysfsError> {
        Ok(None)
    }

    fn set(&self, _: &Name, _: &Limits) -> Result<(), SysfsError> {
        Ok(())
    }

    fn exists(&self, _: &Name) -> bool {
        true
    }
}

/// Share to be set as limits of a tenant.
#[derive(Clone, Copy)]
pub(super) struct LimitRequest<'a> {
    pub tenant: &'a Name,
    pub share: Share,
    pub by: &'a dyn Enforcer,
}

/// Change of the limits of a tenant.
struct LimitChange<'a> {
    tenant: &'a Name,
    by: &'a dyn Enforcer,
    from: Limits,
    to: Limits,
}

/// Sets limits that differ from the requested ones. Returns tenants whose limits are not set, with
/// the reason: vanished tenants, and tenants whose increase failed.
///
/// # Errors
/// A reduction failed: no limit is changed, and all tenants keep their shares.
pub(super) fn enforce(orders: &[LimitRequest<'_>]) -> Result<Vec<(Name, String)>, String> {
    let mut failed = Vec::new();
    let mut steps = Vec::new();
    for order in orders {
        match order.step() {
            Ok(step) => steps.extend(step),
            Err(_) if !order.by.exists(order.tenant) => failed.push(vanished(order.tenant)),
            Err(error) => return Err(message(order.tenant, &error)),
        }
    }
    for (at, step) in steps.iter().enumerate() {
        match step.set(&step.lower()) {
            Ok(()) => {}
            Err(_) if !step.by.exists(step.tenant) => failed.push(vanished(step.tenant)),
            Err(error) => {
                undo(&steps[..=at]);
                return Err(message(step.tenant, &error));
            }
        }
    }
    for step in steps.iter().filter(|step| step.lower() != step.to) {
        match step.set(&step.to) {
            Ok(()) => {}
            Err(_) if !step.by.exists(step.tenant) => failed.push(vanished(step.tenant)),
            Err(error) => failed.push((step.tenant.clone(), units::chain(&error))),
        }
    }
    Ok(failed)
}

impl<'a> LimitRequest<'a> {
    /// Returns the change of its limits, if any.
    fn step(&self) -> Result<Option<LimitChange<'a>>, SysfsError> {
        let bandwidth = Some(self.share.bandwidth_mb_s.saturating_mul(MB).max(BYTES_PER_S_MIN));
        let memory = Some(Bytes::mib(self.share.memory_mib).get());
        let to = Limits { memory, read: bandwidth, written: bandwidth };
        let from = self.by.limits(self.tenant)?.filter(|from| *from != to);
        Ok(from.map(|from| LimitChange { tenant: self.tenant, by: self.by, from, to }))
    }
}

impl LimitChange<'_> {
    /// Returns the minimum of the current and the new limits.
    fn lower(&self) -> Limits {
        let min = |from: Option<u64>, to: Option<u64>| from.into_iter().chain(to).min();
        let Self { from, to, .. } = self;
        Limits {
            memory: min(from.memory, to.memory),
            read: min(from.read, to.read),
            written: min(from.written, to.written),
        }
    }

    fn set(&self, to: &Limits) -> Result<(), SysfsError> {
        if *to == self.from { Ok(()) } else { self.by.set(self.tenant, to) }
    }
}

fn undo(steps: &[LimitChange<'_>]) {
    for step in steps {
        if let Err(error) = step.by.set(step.tenant, &step.from) {
            tracing::error!(tenant = %step.tenant, error = units::chain(&error), "limits not restored");
        }
    }
}

fn vanished(tenant: &Name) -> (Name, String) {
    (tenant.clone(), "cgroup does not exist".to_owned())
}

fn message(tenant: &Name, error: &SysfsError) -> String {
    format!("{tenant}: {}", units::chain(error))
}

#[cfg(test)]
mod tests {
    use std::{
        cell::{Cell, RefCell},
        collections::BTreeMap,
        io,
    };

    use super::*;

    /// Tenants in memory; a call of a given number fails.
    #[derive(Default)]
    struct FakeEnforcer {
        limits: RefCell<BTreeMap<Name, Limits>>,
        failing_call: Cell<Option<u32>>,
        vanished: RefCell<Vec<Name>>,
        /// Maximum of the sums of all limits.
        peak: Cell<Option<(u64, u64)>>,
    }

    impl FakeEnforcer {
        fn record_peak(&self) {
            let all = self.limits.borrow();
            let sum =
                |of: fn(&Limits) -> Option<u64>| all.values().map(|one| of(one).unwrap_or(0)).sum::<u64>();
            let (memory, bandwidth) = (sum(|one| one.memory), sum(|one| one.read));
            let peak = self.peak.get().unwrap_or((0, 0));
            self.peak.set(Some((peak.0.max(memory), peak.1.max(bandwidth))));
        }
    }

    impl Enforcer for FakeEnforcer {
        fn limits(&self, tenant: &Name) -> Result<Option<Limits>, SysfsError> {
            Ok(Some(self.limits.borrow()[tenant]))
        }

        fn set(&self, tenant: &Name, to: &Limits) -> Result<(), SysfsError> {
            let remaining = self.failing_call.get();
            self.failing_call
                .set(remaining.map(|remaining| remaining.saturating_sub(1)).filter(|_| remaining != Some(0)));
            if remaining == Some(0) || !self.exists(tenant) {
                let errno = io::Error::from_raw_os_error(rustix::io::Errno::ROFS.raw_os_error());
                return Err(SysfsError::Write {
                    path: tenant.to_string().into(),
                    value: String::new(),
                    errno,
                });
            }
            self.limits.borrow_mut().insert(tenant.clone(), *to);
            self.record_peak();
            Ok(())
        }

        fn exists(&self, tenant: &Name) -> bool {
            !self.vanished.borrow().contains(tenant)
        }
    }

    fn names() -> [Name; 3] {
        ["a", "b", "c"].map(|name| Name::new(name).unwrap())
    }

    fn limits(memory_mib: u64, mb_s: u64) -> Limits {
        Limits { memory: Some(memory_mib << 20), read: Some(mb_s * MB), written: Some(mb_s * MB) }
    }

    /// Tenants with limits of 300 MiB and 30 MB/s in total.
    fn fake() -> FakeEnforcer {
        let fake = FakeEnforcer::default();
        let initial = [limits(100, 10), limits(150, 5), limits(50, 15)];
        fake.limits.borrow_mut().extend(names().into_iter().zip(initial));
        fake
    }

    fn change(fake: &FakeEnforcer) -> Result<Vec<(Name, String)>, String> {
        let shares = [(200, 5), (50, 20), (50, 5)];
        let shares = shares.map(|(memory_mib, bandwidth_mb_s)| Share { memory_mib, bandwidth_mb_s });
        let names = names();
        let orders = names.iter().zip(shares).map(|(tenant, share)| LimitRequest { tenant, share, by: fake });
        enforce(&orders.collect::<Vec<_>>())
    }

    #[test]
    fn limits_never_exceed_supply_during_a_change() {
        let fake = fake();
        assert_eq!(change(&fake), Ok(vec![]));
        let [a, b, c] = names();
        let after = BTreeMap::from([(a, limits(200, 5)), (b, limits(50, 20)), (c, limits(50, 5))]);
        assert_eq!(*fake.limits.borrow(), after);
        let (memory, bandwidth) = fake.peak.get().unwrap();
        assert!(memory <= 300 << 20 && bandwidth <= 30 * MB, "{memory} {bandwidth}");
    }

    #[test]
    fn failed_reduction_restores_all_limits() {
        for at in 0..3 {
            let fake = fake();
            let initial = fake.limits.borrow().clone();
            fake.failing_call.set(Some(at));
            let error = change(&fake).unwrap_err();
            assert!(error.contains("Read-only file system"), "{error}");
            assert_eq!(*fake.limits.borrow(), initial, "call {at} failed");
        }
    }

    #[test]
    fn failed_increase_is_reported_and_others_apply() {
        let fake = fake();
        fake.failing_call.set(Some(3));
        let failed = change(&fake).unwrap();
        assert_eq!(failed.len(), 1);
        assert_eq!(failed[0].0, names()[0]);
        assert_eq!(fake.limits.borrow()[&names()[1]], limits(50, 20));
    }

    #[test]
    fn vanished_tenant_does_not_block_enforcement() {
        let fake = fake();
        fake.vanished.borrow_mut().push(names()[1].clone());
        let failed = change(&fake).unwrap();
        assert!(
            failed.iter().all(|(name, reason)| *name == names()[1] && reason == "cgroup does not exist"),
            "{failed:?}"
        );
        assert_eq!(fake.limits.borrow()[&names()[0]], limits(200, 5));
    }
}
