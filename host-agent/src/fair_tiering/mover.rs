//! Page moves between tiers, by mechanisms of the Linux kernel.

use std::{fmt, io, ops::Range};

use units::{Bytes, Name};

use super::accesses::TenantProcess;
use crate::host::{
    cgroup::{Cgroups, ReclaimResult},
    memory::numa::{self, PromotionLimits, PromotionResult},
    sysfs::{Sysfs, SysfsError},
    tiers::Tiers,
};

/// Mechanism that moves pages of tenants between tiers.
pub(super) trait PageMover: fmt::Debug + Send {
    /// Demotes the least recently used pages of a tenant.
    ///
    /// # Errors
    /// The tenant has ended, or the mechanism rejects the request.
    fn demote(&mut self, tenant: &Name, bytes: Bytes) -> Result<ReclaimResult, SysfsError>;

    /// Promotes the pages of a process in these ranges, in their order, to a node with local memory.
    ///
    /// # Errors
    /// ESRCH: the process has ended or belongs to another cgroup; or the kernel rejects the call.
    fn promote(
        &mut self,
        process: &TenantProcess,
        ranges: &[Range<usize>],
        tiers: &Tiers,
        to: u32,
        limits: PromotionLimits,
    ) -> io::Result<PromotionResult>;

    /// Returns those of the given pages of a process that are in slower memory.
    ///
    /// # Errors
    /// The process has ended.
    fn slow_pages(&self, process: u32, pages: &[usize], tiers: &Tiers) -> io::Result<Vec<usize>>;
}

/// Demotion by `memory.reclaim` of the tenant's cgroup, promotion by `move_pages`.
#[derive(Debug)]
pub(super) struct KernelMover {
    /// Cgroups of the tenants.
    pub cgroups: Cgroups,
    /// Root of procfs.
    pub proc: Sysfs,
}

impl PageMover for KernelMover {
    fn demote(&mut self, tenant: &Name, bytes: Bytes) -> Result<ReclaimResult, SysfsError> {
        self.cgroups.reclaim(tenant.as_str(), bytes)
    }

    fn promote(
        &mut self,
        TenantProcess { tenant, pid }: &TenantProcess,
        ranges: &[Range<usize>],
        tiers: &Tiers,
        to: u32,
        limits: PromotionLimits,
    ) -> io::Result<PromotionResult> {
        // The ranges were measured earlier. Meanwhile, the kernel may have reused the identifier.
        let current = self.cgroups.tenant_of(&self.proc, *pid).map_err(io::Error::other)?;
        if current.as_deref() != Some(tenant.as_str()) {
            return Err(io::Error::from_raw_os_error(libc::ESRCH));
        }
        numa::promote_pages(*pid, ranges, &tiers.slow, to, limits)
    }

    fn slow_pages(&self, process: u32, pages: &[usize], tiers: &Tiers) -> io::Result<Vec<usize>> {
        numa::find_pages_on(process, pages, &tiers.slow)
    }
}

/// Simulated pages of one process, for tests.
#[cfg(test)]
pub(super) mod fake {
    use std::collections::BTreeSet;

    use super::*;

    /// Mover that knows which pages of the process are in slower memory.
    #[derive(Debug, Default)]
    pub(in crate::fair_tiering) struct FakeMover {
        /// Pages in slower memory.
        pub slow: BTreeSet<usize>,
        /// Address below which all pages are in slower memory, too.
        pub slow_below: Option<usize>,
        /// Pages that other processes map.
        pub shared: BTreeSet<usize>,
        /// Whether the target node is full.
        pub is_full: bool,
        /// Process that has ended.
        pub ended: Option<u32>,
    }

    impl PageMover for FakeMover {
        fn demote(&mut self, _: &Name, _: Bytes) -> Result<ReclaimResult, SysfsError> {
            unreachable!("nothing is demoted")
        }

        fn promote(
            &mut self,
            _: &TenantProcess,
            ranges: &[Range<usize>],
            _: &Tiers,
            _: u32,
            limits: PromotionLimits,
        ) -> io::Result<PromotionResult> {
            let mut result = PromotionResult::default();
            let pages = ranges.iter().flat_map(|range| range.clone().step_by(4096));
            for page in pages.take(limits.examined) {
                if result.moved.len() == limits.moved {
                    break;
                }
                result.examined += 1;
                if self.is_full {
                    *result.failed.entry(libc::ENOMEM).or_default() += 1;
                } else if self.shared.contains(&page) {
                    *result.failed.entry(libc::EACCES).or_default() += 1;
                } else if self.slow.remove(&page) {
                    result.moved.push(page);
                }
            }
            Ok(result)
        }

        fn slow_pages(&self, process: u32, pages: &[usize], _: &Tiers) -> io::Result<Vec<usize>> {
            if self.ended == Some(process) {
                return Err(io::Error::from_raw_os_error(libc::ESRCH));
            }
            Ok(pages
                .iter()
                .copied()
                .filter(|page| self.slow_below.is_some_and(|end| *page < end) || self.slow.contains(page))
                .collect())
        }
    }
}
