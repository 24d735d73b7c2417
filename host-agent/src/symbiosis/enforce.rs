//! Enforcement of shares as limits of cgroups. All reductions are set before the first increase, so
//! that the sum of the limits never exceeds the supply.

use fairness::market::Share;
use units::Name;

use crate::host::{
    cgroup::{Cgroups, Limits},
    sysfs::SysfsError,
};

/// Bytes per MB.
const BYTES_PER_MB: u64 = 1_000_000;

/// Minimum bandwidth limit, 100 kB/s. The kernel rejects a limit of 0, and a tenant without
/// bandwidth could not make progress.
const BYTES_PER_S_MIN: u64 = BYTES_PER_MB / 10;

/// Mechanism that enforces shares.
pub(super) trait Enforcer {
    /// Returns the current limits of a tenant; `None` if the mechanism sets no limits.
    ///
    /// # Errors
    /// The tenant does not exist, or its limits cannot be read.
    fn limits(&self, tenant: &Name) -> Result<Option<Limits>, SysfsError>;

    /// Sets the limits of a tenant.
    ///
    /// # Errors
    /// The tenant does not exist, or the kernel rejects a limit. Other limits may have been set.
    fn set(&self, tenant: &Name, to: &Limits) -> Result<(), SysfsError>;

    /// Returns whether a tenant exists.
    fn exists(&self, tenant: &Name) -> bool;
}

/// Enforcement by swapping: the kernel swaps out memory above a share, and limits the bandwidth of
/// swapping to the share (Spirit, section 5).
#[derive(Clone, Copy, Debug)]
pub(super) struct Swap<'a> {
    pub cgroups: &'a Cgroups,
    /// Number of the swap device, such as `253:0`.
    pub device: &'a str,
}

/// No enforcement: shares are only reported.
#[derive(Clone, Copy, Debug)]
pub(super) struct AdviceEnforcer;

impl Enforcer for Swap<'_> {
    fn limits(&self, tenant: &Name) -> Result<Option<Limits>, SysfsError> {
        self.cgroups.limits(tenant.as_str(), self.device).map(Some)
    }

    /// Sets the bandwidth limit first, because it also applies to the pages that the memory limit
    /// reclaims.
    fn set(&self, tenant: &Name, to: &Limits) -> Result<(), SysfsError> {
        self.cgroups.limit_bandwidth(tenant.as_str(), self.device, to.read, to.written)?;
        self.cgroups.limit_memory(tenant.as_str(), to.memory)
    }

    fn exists(&self, tenant: &Name) -> bool {
        self.cgroups.exists(tenant.as_str())
    }
}

impl Enforcer for AdviceEnforcer {
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

/// Share of a tenant to be enforced.
#[derive(Clone, Copy)]
pub(super) struct LimitRequest<'a> {
    pub tenant: &'a Name,
    pub share: Share,
    pub enforcer: &'a dyn Enforcer,
}

/// Change of the limits of a tenant.
struct LimitChange<'a> {
    tenant: &'a Name,
    enforcer: &'a dyn Enforcer,
    from: Limits,
    to: Limits,
}

/// Sets the limits of all tenants to their shares. Returns the tenants whose limits are not set,
/// with the reason: tenants that do not exist any more, and tenants whose increase failed.
///
/// # Errors
/// The message of a failed reduction, after all limits were restored.
pub(super) fn enforce(requests: &[LimitRequest<'_>]) -> Result<Vec<(Name, String)>, String> {
    let mut failed = Vec::new();
    let mut changes = Vec::new();
    for request in requests {
        match request.change() {
            Ok(change) => changes.extend(change),
            Err(_) if !request.enforcer.exists(request.tenant) => {
                failed.push(vanished_tenant_failure(request.tenant))
            }
            Err(error) => return Err(failure_message(request.tenant, &error)),
        }
    }
    for (at, change) in changes.iter().enumerate() {
        match change.set(&change.lower_limits()) {
            Ok(()) => {}
            Err(_) if !change.enforcer.exists(change.tenant) => {
                failed.push(vanished_tenant_failure(change.tenant))
            }
            Err(error) => {
                restore_limits(&changes[..=at]);
                return Err(failure_message(change.tenant, &error));
            }
        }
    }
    for change in changes.iter().filter(|change| change.lower_limits() != change.to) {
        match change.set(&change.to) {
            Ok(()) => {}
            Err(_) if !change.enforcer.exists(change.tenant) => {
                failed.push(vanished_tenant_failure(change.tenant))
            }
            Err(error) => failed.push((change.tenant.clone(), units::chain(&error))),
        }
    }
    Ok(failed)
}

impl<'a> LimitRequest<'a> {
    /// Returns the change from the tenant's current limits; `None` if the limits are equal, or if
    /// the mechanism sets no limits.
    fn change(&self) -> Result<Option<LimitChange<'a>>, SysfsError> {
        let bandwidth = Some(self.share.bandwidth_bytes_s().max(BYTES_PER_S_MIN));
        let memory = Some(self.share.memory_bytes());
        let to = Limits { memory, read: bandwidth, written: bandwidth };
        let from = self.enforcer.limits(self.tenant)?.filter(|from| *from != to);
        Ok(from.map(|from| LimitChange { tenant: self.tenant, enforcer: self.enforcer, from, to }))
    }
}

impl LimitChange<'_> {
    /// Returns the lower of the current and the new value of each limit.
    fn lower_limits(&self) -> Limits {
        let min = |from: Option<u64>, to: Option<u64>| from.into_iter().chain(to).min();
        let Self { from, to, .. } = self;
        Limits {
            memory: min(from.memory, to.memory),
            read: min(from.read, to.read),
            written: min(from.written, to.written),
        }
    }

    fn set(&self, to: &Limits) -> Result<(), SysfsError> {
        if *to == self.from { Ok(()) } else { self.enforcer.set(self.tenant, to) }
    }
}

fn restore_limits(changes: &[LimitChange<'_>]) {
    for change in changes {
        if let Err(error) = change.enforcer.set(change.tenant, &change.from) {
            tracing::error!(tenant = %change.tenant, error = units::chain(&error), "cannot restore limits");
        }
    }
}

fn vanished_tenant_failure(tenant: &Name) -> (Name, String) {
    (tenant.clone(), "cgroup does not exist".to_owned())
}

fn failure_message(tenant: &Name, error: &SysfsError) -> String {
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

    /// Enforcer that stores limits in memory and can fail.
    #[derive(Default)]
    struct FakeEnforcer {
        limits: RefCell<BTreeMap<Name, Limits>>,
        /// Number of calls before the call that fails.
        failing_call: Cell<Option<u32>>,
        vanished: RefCell<Vec<Name>>,
        /// Largest sum of all memory limits, and of all read limits, so far.
        peak: Cell<Option<(u64, u64)>>,
    }

    impl FakeEnforcer {
        fn record_peak(&self) {
            let all = self.limits.borrow();
            let sum = |of: fn(&Limits) -> Option<u64>| {
                all.values().map(|limits| of(limits).unwrap_or(0)).sum::<u64>()
            };
            let (memory, bandwidth) = (sum(|limits| limits.memory), sum(|limits| limits.read));
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
        Limits {
            memory: Some(memory_mib << 20),
            read: Some(mb_s * BYTES_PER_MB),
            written: Some(mb_s * BYTES_PER_MB),
        }
    }

    /// Creates three tenants with limits of 300 MiB and 30 MB/s in total.
    fn fake() -> FakeEnforcer {
        let fake = FakeEnforcer::default();
        let initial = [limits(100, 10), limits(150, 5), limits(50, 15)];
        fake.limits.borrow_mut().extend(names().into_iter().zip(initial));
        fake
    }

    fn apply_change(fake: &FakeEnforcer) -> Result<Vec<(Name, String)>, String> {
        let shares = [(200, 5), (50, 20), (50, 5)];
        let shares = shares.map(|(memory_mib, bandwidth_mb_s)| Share::new(memory_mib, bandwidth_mb_s));
        let names = names();
        let requests =
            names.iter().zip(shares).map(|(tenant, share)| LimitRequest { tenant, share, enforcer: fake });
        enforce(&requests.collect::<Vec<_>>())
    }

    #[test]
    fn limits_never_exceed_supply_during_a_change() {
        let fake = fake();
        assert_eq!(apply_change(&fake), Ok(vec![]));
        let [a, b, c] = names();
        let after = BTreeMap::from([(a, limits(200, 5)), (b, limits(50, 20)), (c, limits(50, 5))]);
        assert_eq!(*fake.limits.borrow(), after);
        let (memory, bandwidth) = fake.peak.get().unwrap();
        assert!(memory <= 300 << 20 && bandwidth <= 30 * BYTES_PER_MB, "{memory} {bandwidth}");
    }

    #[test]
    fn failed_reduction_restores_all_limits() {
        for at in 0..3 {
            let fake = fake();
            let initial = fake.limits.borrow().clone();
            fake.failing_call.set(Some(at));
            let error = apply_change(&fake).unwrap_err();
            assert!(error.contains("Read-only file system"), "{error}");
            assert_eq!(*fake.limits.borrow(), initial, "call {at} failed");
        }
    }

    #[test]
    fn failed_increase_is_reported_and_other_limits_are_set() {
        let fake = fake();
        fake.failing_call.set(Some(3));
        let failed = apply_change(&fake).unwrap();
        assert_eq!(failed.len(), 1);
        assert_eq!(failed[0].0, names()[0]);
        assert_eq!(fake.limits.borrow()[&names()[1]], limits(50, 20));
    }

    #[test]
    fn vanished_tenant_does_not_block_enforcement() {
        let fake = fake();
        fake.vanished.borrow_mut().push(names()[1].clone());
        let failed = apply_change(&fake).unwrap();
        assert!(
            failed.iter().all(|(name, reason)| *name == names()[1] && reason == "cgroup does not exist"),
            "{failed:?}"
        );
        assert_eq!(fake.limits.borrow()[&names()[0]], limits(200, 5));
    }
}
