//! What is traded.

use std::iter::Sum;

/// All that there is.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Supply {
    /// Local memory, in MiB.
    pub memory_mib: u64,
    /// Bandwidth of the link to remote memory, in MB/s.
    pub bandwidth_mb_s: u64,
}

impl Supply {
    /// All of it, as a share.
    pub const fn all(self) -> Share {
        Share { memory_mib: self.memory_mib, bandwidth_mb_s: self.bandwidth_mb_s }
    }
}

/// What a tenant gets, in whole units.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Share {
    /// Local memory, in MiB.
    pub memory_mib: u64,
    /// Bandwidth of the link to remote memory, in MB/s.
    pub bandwidth_mb_s: u64,
}

/// What a tenant might get: parts of units too.
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
    /// A part of the way from here to there, 0 to 1. Where both are the same, so is what is between.
    #[must_use]
    pub fn towards(self, there: Self, part: f64) -> Self {
        Self {
            memory: self.memory + part * (there.memory - self.memory),
            bandwidth: self.bandwidth + part * (there.bandwidth - self.bandwidth),
        }
    }

    /// Each good so many times.
    pub(crate) fn times(self, times: Self) -> Self {
        Self { memory: self.memory * times.memory, bandwidth: self.bandwidth * times.bandwidth }
    }

    /// In whole units, rounded down.
    pub(crate) fn floor(self) -> Share {
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "units of a supply")]
        let whole = |of: f64| of.floor() as u64;
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

/// What a unit costs: a MiB, a MB/s. All that there is of both costs 1.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Prices {
    /// A MiB of local memory.
    pub memory: f64,
    /// A MB/s of bandwidth.
    pub bandwidth: f64,
}

impl Prices {
    /// What a bundle costs.
    pub fn of(self, bundle: Bundle) -> f64 {
        self.memory * bundle.memory + self.bandwidth * bundle.bandwidth
    }
}
