//! The two goods of the market, local memory and link bandwidth: supply, shares, bundles and
//! prices.

use std::iter::Sum;

/// Number of pages of 4 KiB in 1 MiB.
pub(crate) const PAGES_PER_MIB: u64 = 256;
/// Size of a page in bytes.
const PAGE_BYTES: u64 = 4096;
/// Number of KB in 1 MB.
pub(crate) const KB_PER_MB: u64 = 1000;
/// Number of bytes in 1 KB.
const BYTES_PER_KB: u64 = 1000;

/// Supply of both goods on a host, in whole units: pages of memory and KB/s of bandwidth.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Supply {
    /// Local memory, in pages of 4 KiB.
    pub memory_pages: u64,
    /// Bandwidth of the link to remote memory, in KB/s.
    pub bandwidth_kb_s: u64,
}

/// Share of both goods assigned to a tenant, in whole units: pages of memory and KB/s of bandwidth.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Share {
    /// Local memory, in pages of 4 KiB.
    pub memory_pages: u64,
    /// Bandwidth of the link to remote memory, in KB/s.
    pub bandwidth_kb_s: u64,
}

impl Supply {
    /// Creates a supply of whole MiB of memory and whole MB/s of bandwidth.
    pub const fn new(memory_mib: u64, bandwidth_mb_s: u64) -> Self {
        Self { memory_pages: memory_mib * PAGES_PER_MIB, bandwidth_kb_s: bandwidth_mb_s * KB_PER_MB }
    }

    /// Returns the whole supply as a share.
    pub const fn all(self) -> Share {
        Share { memory_pages: self.memory_pages, bandwidth_kb_s: self.bandwidth_kb_s }
    }
}

impl Share {
    /// Creates a share of whole MiB of memory and whole MB/s of bandwidth.
    pub const fn new(memory_mib: u64, bandwidth_mb_s: u64) -> Self {
        Supply::new(memory_mib, bandwidth_mb_s).all()
    }

    /// Returns the memory in MiB, rounded down.
    pub const fn memory_mib(self) -> u64 {
        self.memory_pages / PAGES_PER_MIB
    }

    /// Returns the bandwidth in MB/s, rounded down.
    pub const fn bandwidth_mb_s(self) -> u64 {
        self.bandwidth_kb_s / KB_PER_MB
    }

    /// Returns the memory in bytes.
    pub const fn memory_bytes(self) -> u64 {
        self.memory_pages.saturating_mul(PAGE_BYTES)
    }

    /// Returns the bandwidth in bytes per second.
    pub const fn bandwidth_bytes_s(self) -> u64 {
        self.bandwidth_kb_s.saturating_mul(BYTES_PER_KB)
    }

    /// Returns whether neither good exceeds its amount in `other`.
    pub const fn is_within(self, other: Self) -> bool {
        self.memory_pages <= other.memory_pages && self.bandwidth_kb_s <= other.bandwidth_kb_s
    }

    /// Returns whether each good differs from its amount in `other` by at most one unit.
    pub(crate) const fn is_near(self, other: Self) -> bool {
        self.memory_pages.abs_diff(other.memory_pages) <= 1
            && self.bandwidth_kb_s.abs_diff(other.bandwidth_kb_s) <= 1
    }

    /// Returns the larger amount of each good.
    pub(crate) fn at_least(self, min: Self) -> Self {
        Self {
            memory_pages: self.memory_pages.max(min.memory_pages),
            bandwidth_kb_s: self.bandwidth_kb_s.max(min.bandwidth_kb_s),
        }
    }

    /// Returns the sum of two shares.
    pub(crate) const fn plus(self, other: Self) -> Self {
        Self {
            memory_pages: self.memory_pages + other.memory_pages,
            bandwidth_kb_s: self.bandwidth_kb_s + other.bandwidth_kb_s,
        }
    }

    /// Returns the difference of two shares, at least 0.
    pub(crate) const fn saturating_minus(self, other: Self) -> Self {
        Self {
            memory_pages: self.memory_pages.saturating_sub(other.memory_pages),
            bandwidth_kb_s: self.bandwidth_kb_s.saturating_sub(other.bandwidth_kb_s),
        }
    }
}

impl Sum for Share {
    fn sum<I: Iterator<Item = Self>>(shares: I) -> Self {
        shares.fold(Self::default(), Self::plus)
    }
}

/// Amounts of both goods, in MiB and MB/s. Unlike a [`Share`], they may be fractions of units.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Bundle {
    /// Local memory, in MiB.
    pub memory: f64,
    /// Bandwidth of the link to remote memory, in MB/s.
    pub bandwidth: f64,
}

impl From<Share> for Bundle {
    fn from(share: Share) -> Self {
        Self {
            memory: share.memory_pages as f64 / PAGES_PER_MIB as f64,
            bandwidth: share.bandwidth_kb_s as f64 / KB_PER_MB as f64,
        }
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

    /// Rounds both amounts down to whole units. Amounts that are below a whole number by rounding
    /// error only are not rounded down to the next unit.
    pub(crate) fn floor(self) -> Share {
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "units of a supply")]
        let whole = |amount: f64| (amount * (1.0 + 2.0 * f64::EPSILON)) as u64;
        let Self { memory, bandwidth } = self.in_units();
        Share { memory_pages: whole(memory), bandwidth_kb_s: whole(bandwidth) }
    }

    /// Returns the amounts in pages and KB/s.
    pub(crate) fn in_units(self) -> Self {
        self.scale(Self { memory: PAGES_PER_MIB as f64, bandwidth: KB_PER_MB as f64 })
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
