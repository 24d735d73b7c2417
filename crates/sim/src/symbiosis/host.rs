//! Host that tenants share, and the units of memory and bandwidth in its market.

use std::sync::Arc;

use fairness::{
    market::{Bundle, Share, Supply},
    profile::wanted,
};

use super::{
    tenant::{MissRatioCurve, Tenant},
    utility::TraceUtility,
};

/// Host that tenants share. The unit of memory is the footprint of a tenant. The bandwidth of the
/// link is 1.
#[derive(Clone, Copy, Debug)]
pub struct Host {
    /// Local memory of the host, in footprints.
    pub memory: f64,
}

/// Size of a footprint in the market, in MiB. It is large so that rounding to whole pages has no
/// effect.
const FOOTPRINT_MIB: f64 = 1_048_576.0;
/// Bandwidth of the link in the market, in MB/s. It is large for the same reason as
/// [`FOOTPRINT_MIB`].
const LINK_MB_S: u64 = 1_000_000;

impl Host {
    /// Returns the share of each tenant in an equal split.
    pub fn equal(self, tenants: usize) -> Bundle {
        let fraction = 1.0 / tenants as f64;
        Bundle { memory: self.memory * fraction, bandwidth: fraction }
    }

    pub(super) fn supply(self) -> Supply {
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a host's MiB fit in u64"
        )]
        let memory_mib = (self.memory * FOOTPRINT_MIB) as u64;
        Supply::new(memory_mib, LINK_MB_S)
    }

    /// Creates the utility of a tenant. `gamma` is its miss penalty, and `link` its bandwidth demand
    /// as a fraction of the link.
    pub(super) fn utility(self, curve: &Arc<MissRatioCurve>, gamma: f64, link: f64) -> TraceUtility {
        TraceUtility::new(self.supply(), curve, FOOTPRINT_MIB, gamma, link * LINK_MB_S as f64)
            .expect("measured curves are valid")
    }

    /// Creates the utility of a tenant from the values that a host measures under this share.
    pub(super) fn measured_utility(self, tenant: &Tenant, share: Bundle) -> TraceUtility {
        let link = wanted(tenant.bandwidth_used(share), share.bandwidth, 1.0);
        self.utility(tenant.measured(), tenant.gamma, link)
    }
}

/// Converts a share of the market into footprints and a fraction of the link.
pub(super) fn to_bundle(share: &Share) -> Bundle {
    let Bundle { memory, bandwidth } = (*share).into();
    Bundle { memory: memory / FOOTPRINT_MIB, bandwidth: bandwidth / LINK_MB_S as f64 }
}
