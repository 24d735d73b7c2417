//! The two goods of the market, local memory and link bandwidth: supply, shares, bundles and
//! prices.

use std::iter::Sum;

/// Supply of both goods on a host, in whole units.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Supply {
    /// Local memory, in MiB.
    pub memory_mib: u64,
    /// Bandwidth of the link to remote memory, in MB/s.
    pub bandwidth_mb_s: u64,
}

impl Supply {
    /// Returns the whole supply as a share.
    pub const fn all(self) -> Share {
        Share { memory_mib: self.memory_mib, bandwidth_mb_s: self.bandwidth_mb_s }
    }
}

/// Share of both goods assigned to a tenant, in whole units.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Share {
    /// Local memory, in MiB.
    pub memory_mib: u64,
    /// Bandwidth of the link to remote memory, in MB/s.
    pub bandwidth_mb_s: u64,
}

/// Amounts of both goods, which may be fractions of units.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Bundle {
    /// Local memory, in MiB.
    pub memory: f64,
    /// Bandwidth of the link to remote memory, in MB/s.
    pub bandwidth: f64,
}

impl From<Share> for Bundle {
    fn from(share: Share) -> Self {
        Self { memory: share.memory_mib as f64, bandwidth: share.bandwidth_mb_s as f64 }
    }
}

impl Bundle {
    /// Interpolates between this bundle (`fraction` 0) and `to` (`fraction` 1). Amounts that are
    /// equal in both bundles are not changed by rounding.
    #[must_use]
    pub fn interpolate(self, to: Self, fraction: f64) -> Self {
        Self {
            memory: self.memory + fraction * (to.memory - self.memory),
            bandwidth: self.bandwidth + fraction * (to.bandwidth - self.bandwidth),
        }
    }

    /// Multiplies the amount of each good by the factor for this good in `factors`.
    pub(crate) fn scale(self, factors: Self) -> Self {
        Self { memory: self.memory * factors.memory, bandwidth: self.bandwidth * factors.bandwidth }
    }

    /// Rounds both amounts down to whole units.
    pub(crate) fn floor(self) -> Share {
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "units of a supply")]
        let whole = |amount: f64| amount.floor() as u64;
        Share { memory_mib: whole(self.memory), bandwidth_mb_s: whole(self.bandwidth) }
    }

    pub(crate) fn add(&mut self, other: Self) {
        self.memory += other.memory;
        self.bandwidth += other.bandwidth;
    }

    pub(crate) fn minus(self, other: Self) -> Self {
        Self { memory: self.memory - other.memory, bandwidth: self.bandwidth - other.bandwidth }
    }
}

impl Sum for Bundle {
    fn sum<I: Iterator<Item = Self>>(bundles: I) -> Self {
        bundles.fold(Self::default(), |mut sum, bundle| {
            sum.add(bundle);
            sum
        })
    }
}

/// Price per unit of each good. The whole supply of both goods together costs 1.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Prices {
    /// Price of 1 MiB of local memory.
    pub memory: f64,
    /// Price of 1 MB/s of bandwidth.
    pub bandwidth: f64,
}

impl Prices {
    /// Returns the cost of a bundle, as a fraction of the cost of the whole supply.
    pub fn cost_of(self, bundle: Bundle) -> f64 {
        self.memory * bundle.memory + self.bandwidth * bundle.bandwidth
    }
}
