//! What tenants share, and the units in which the market is told of it.

use fairness::{
    curve::Knot,
    market::{Bundle, Share, Supply},
    profile::{TenantUtility, wanted},
};

use super::tenant::Tenant;

/// A host: how much memory there is, in footprints of tenants; its link is 1.
#[derive(Clone, Copy, Debug)]
pub struct Host {
    /// In footprints.
    pub memory: f64,
}

/// MiB of a footprint, and MB/s of the link, as they are told to the market: so many that whole units are as good as parts. A tenant whose throughput leaps
/// with its last page may lose all of a leap by a unit.
const FOOTPRINT_MIB: f64 = 1_048_576.0;
const LINK_MB_S: u64 = 1_000_000;

impl Host {
    /// What each of so many tenants has of an equal split.
    pub fn equal(self, tenants: usize) -> Bundle {
        let part = 1.0 / tenants as f64;
        Bundle { memory: self.memory * part, bandwidth: part }
    }

    pub(super) fn supply(self) -> Supply {
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "MiB of a host")]
        let memory_mib = (self.memory * FOOTPRINT_MIB) as u64;
        Supply { memory_mib, bandwidth_mb_s: LINK_MB_S }
    }

    /// What bundles are worth to one that misses like this, with memory in footprints, and could use so much of the link.
    pub(super) fn worth(self, knots: Vec<Knot>, gamma: f64, link: f64) -> TenantUtility {
        let knots: Vec<Knot> =
            knots.into_iter().map(|knot| Knot { memory: knot.memory * FOOTPRINT_MIB, ..knot }).collect();
        TenantUtility::new(self.supply(), knots, gamma, link * LINK_MB_S as f64)
            .expect("a measured curve is one, and parts of a link are numbers")
    }

    /// What bundles are worth to a tenant by what is measured of it while it has such a share.
    pub(super) fn learnt(self, tenant: &Tenant, share: Bundle) -> TenantUtility {
        let link = wanted(tenant.uses(share), share.bandwidth, 1.0);
        self.worth(tenant.measured().knots(), tenant.gamma, link)
    }
}

/// A share, in footprints and as a part of the link.
pub(super) fn part(share: &Share) -> Bundle {
    Bundle {
        memory: share.memory_mib as f64 / FOOTPRINT_MIB,
        bandwidth: share.bandwidth_mb_s as f64 / LINK_MB_S as f64,
    }
}
