//! Power law of access frequency by page rank `x` (Spirit, section 4.2):
//! `g(x) = α1·(1 + x/α2)^α3 + α4`.

use super::MissModel;

/// Access frequency of pages by rank. The factor α1 is not stored, because only ratios of
/// frequencies matter.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PowerLaw {
    /// Scale α2 of the rank, in pages, more than 0. With a larger scale, the frequency falls at
    /// higher ranks.
    pub scale: f64,
    /// Exponent α3, at most 0.
    pub slope: f64,
    /// Constant term α4 relative to α1, at least 0: every page is accessed at least this often.
    pub floor: f64,
    /// Fraction of accesses that scan all pages in order, 0 to 1. With LRU replacement, such
    /// accesses miss unless all pages fit into memory. The paper has no such term.
    pub scan_fraction: f64,
    /// Number of pages of the tenant.
    pub pages: f64,
    /// Number of pages per MiB.
    pub pages_per_mib: f64,
    /// Standard error of the miss ratio, 0 to 1.
    pub error: f64,
}

impl PowerLaw {
    /// Returns the integral of `g` from 0 to `rank`, divided by α1.
    fn access_integral(&self, rank: f64) -> f64 {
        power_law_integral(self.scale, self.slope, rank) + self.floor * rank
    }
}

/// Returns the integral of `(1 + x/scale)^slope` from 0 to `rank`.
pub(super) fn power_law_integral(scale: f64, slope: f64, rank: f64) -> f64 {
    let log = (rank / scale).ln_1p();
    let power = slope + 1.0;
    // For a slope of -1, the closed form is 0/0. Its limit is `scale * log`.
    if (power * log).abs() < 1e-8 { scale * log } else { scale * (power * log).exp_m1() / power }
}

impl MissModel for PowerLaw {
    fn misses(&self, memory: f64) -> f64 {
        let rank = memory * self.pages_per_mib;
        if rank >= self.pages {
            return 0.0;
        }
        let missed =
            (1.0 - self.access_integral(rank.max(0.0)) / self.access_integral(self.pages)).clamp(0.0, 1.0);
        missed + self.scan_fraction * (1.0 - missed)
    }

    fn footprint(&self) -> f64 {
        self.pages / self.pages_per_mib
    }

    fn error(&self) -> f64 {
        self.error
    }
}
