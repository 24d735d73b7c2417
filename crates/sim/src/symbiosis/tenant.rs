//! Tenant from a trace: its true behaviour, and its behaviour as measured on a host.

use std::sync::Arc;

use fairness::{
    curve::Knot,
    market::Bundle,
    profile::{MissModel, ReuseDistances},
};

/// Resource that a tenant's throughput depends on, for display.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub enum Kind {
    /// Bandwidth.
    Bandwidth,
    /// Memory: 10 % more of it gains at least a third of the gain from 10 % more bandwidth.
    Memory,
    /// Neither, to a notable degree.
    Compute,
}

/// Tenant of a host.
#[derive(Clone, Debug)]
pub struct Tenant {
    /// Name of its trace.
    pub name: String,
    /// Cost of a miss relative to a hit.
    pub gamma: f64,
    /// Bandwidth demand, as a fraction of the link.
    pub wanted: f64,
    exact_curve: Arc<Curve>,
    measured: Arc<Curve>,
}

/// Miss-ratio curve, at every 1/1000 of the footprint.
#[derive(Clone, Debug)]
pub struct Curve(Vec<f64>);

/// Steps of a [`Curve`].
const STEPS: u32 = 1000;
/// Upper bound on the pages sampled for reuse distances.
pub(super) const SAMPLED_PAGES_MAX: usize = 8192;

impl Curve {
    fn of(model: &impl MissModel, footprint: f64) -> Self {
        Self((0..=STEPS).map(|at| model.misses(f64::from(at) / f64::from(STEPS) * footprint)).collect())
    }

    /// Returns the miss ratio with this fraction of the footprint, linear between points.
    pub fn misses(&self, part: f64) -> f64 {
        let place = part.clamp(0.0, 1.0) * f64::from(STEPS);
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "clamped to STEPS")]
        let below = place.floor() as usize;
        let above = (below + 1).min(STEPS as usize);
        self.0[below] + (place - place.floor()) * (self.0[above] - self.0[below])
    }

    /// Converts into knots, with memory as a fraction of the footprint.
    pub fn knots(&self) -> Vec<Knot> {
        let knot =
            |(at, misses): (u32, &f64)| Knot { memory: f64::from(at) / f64::from(STEPS), misses: *misses };
        (0..).zip(&self.0).map(knot).collect()
    }
}

impl Tenant {
    /// Creates a tenant from the pages that it accesses. All tenants have a footprint of 1,
    /// regardless of their number of pages.
    pub fn new(name: String, touches: &[u32], gamma: f64, wanted: f64) -> Self {
        let pages = touches.iter().max().map_or(1, |last| last + 1);
        let footprint = f64::from(pages);
        let mut exact = ReuseDistances::new(pages as usize + 1, 1.0);
        let mut sampled = ReuseDistances::new(SAMPLED_PAGES_MAX, 1.0);
        for page in touches {
            exact.touch(u64::from(*page));
            sampled.touch(u64::from(*page));
        }
        let (exact_curve, measured) = (Curve::of(&exact, footprint), Curve::of(&sampled, footprint));
        Self { name, gamma, wanted, exact_curve: Arc::new(exact_curve), measured: Arc::new(measured) }
    }

    /// Returns a tenant with the same trace and other parameters.
    #[must_use]
    pub fn with_params(&self, gamma: f64, wanted: f64) -> Self {
        Self { gamma, wanted, ..self.clone() }
    }

    /// Returns the true throughput with a share in footprints and a fraction of the link; 1 without
    /// any slowdown.
    pub fn throughput(&self, share: Bundle) -> f64 {
        throughput(self.exact_curve.misses(share.memory), self.gamma, self.wanted, share.bandwidth)
    }

    /// Returns the bandwidth used of a share.
    pub fn bandwidth_used(&self, share: Bundle) -> f64 {
        self.wanted.min(share.bandwidth)
    }

    /// Returns the miss-ratio curve from sampled reuse distances.
    pub fn measured(&self) -> &Curve {
        &self.measured
    }

    /// Returns the kind of the tenant at a share.
    pub fn kind(&self, share: Bundle) -> Kind {
        let now = self.throughput(share);
        let gain = |memory, bandwidth| {
            let more = Bundle { memory: share.memory * memory, bandwidth: share.bandwidth * bandwidth };
            self.throughput(more) / now - 1.0
        };
        let (memory, bandwidth) = (gain(1.1, 1.0), gain(1.0, 1.1));
        if memory.max(bandwidth) < 0.005 {
            Kind::Compute
        } else if 3.0 * memory > bandwidth {
            Kind::Memory
        } else {
            Kind::Bandwidth
        }
    }
}

/// Throughput: the inverse of Spirit's slowdown (section 4.2, corrected form).
pub(super) fn throughput(misses: f64, gamma: f64, wanted: f64, bandwidth: f64) -> f64 {
    if misses == 0.0 {
        return 1.0;
    }
    let shortage = if wanted > 0.0 { (wanted / bandwidth).max(1.0) } else { 1.0 };
    1.0 / (1.0 + misses * gamma * shortage)
}
