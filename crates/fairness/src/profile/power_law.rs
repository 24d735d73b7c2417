//! How often pages are touched, by their rank (Spirit 4.2): `g(x) = α1·(1 + x/α2)^α3 + α4`.

use super::MissModel;

/// Touches by rank, up to a factor: only ratios matter.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PowerLaw {
    /// Ranks after which touches begin to fall; α2, more than 0.
    pub scale: f64,
    /// How steeply they fall; α3, 0 or less.
    pub slope: f64,
    /// Touches of every page beside, against those of the first that fall; α4/α1, 0 or more.
    pub floor: f64,
    /// The part of touches that goes through all pages in turn, 0 to 1: under LRU it misses unless all of them fit. The paper has no such part.
    pub scanned: f64,
    /// Pages there are.
    pub pages: f64,
    /// Pages of a MiB.
    pub pages_per_mib: f64,
    /// The standard error of a miss ratio.
    pub error: f64,
}

impl PowerLaw {
    /// All touches of the pages up to a rank, against those of the first that fall: the integral of g.
    fn touches(&self, rank: f64) -> f64 {
        falling(self.scale, self.slope, rank) + self.floor * rank
    }
}

/// The integral of `(1 + x/scale)^slope` from 0 to a rank.
pub(super) fn falling(scale: f64, slope: f64, rank: f64) -> f64 {
    let log = (rank / scale).ln_1p();
    let power = slope + 1.0;
    // Near a slope of -1 the quotient is 0/0, and its limit the logarithm.
    if (power * log).abs() < 1e-8 { scale * log } else { scale * (power * log).exp_m1() / power }
}

impl MissModel for PowerLaw {
    fn misses(&self, memory: f64) -> f64 {
        let rank = memory * self.pages_per_mib;
        if rank >= self.pages {
            return 0.0;
        }
        let missed = (1.0 - self.touches(rank.max(0.0)) / self.touches(self.pages)).clamp(0.0, 1.0);
        missed + self.scanned * (1.0 - missed)
    }

    fn footprint(&self) -> f64 {
        self.pages / self.pages_per_mib
    }

    fn error(&self) -> f64 {
        self.error
    }
}
