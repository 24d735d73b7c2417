//! Tenant created from a trace, with its exact miss-ratio curve and the curve that a host measures.

use std::sync::Arc;

use fairness::{
    curve::Knot,
    market::Bundle,
    profile::{MissModel, ReuseDistances},
};

/// Kind of a tenant for reports: the resource that its throughput depends on most.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub enum Kind {
    /// The throughput depends mainly on bandwidth.
    Bandwidth,
    /// The throughput depends on memory: 10 % more memory gains over a third as much as 10 % more
    /// bandwidth.
    Memory,
    /// The throughput gains less than 0.5 % from 10 % more of either resource.
    Compute,
}

/// Tenant that shares a host with others.
#[derive(Clone, Debug)]
pub struct Tenant {
    /// Name of the trace of the tenant.
    pub name: String,
    /// Cost of a miss relative to a hit (γ in Spirit).
    pub gamma: f64,
    /// Bandwidth demand, as a fraction of the link.
    pub wanted: f64,
    exact_curve: Arc<MissRatioCurve>,
    measured: Arc<MissRatioCurve>,
}

/// Miss-ratio curve: the miss ratio at every 1/1000 of the footprint.
#[derive(Clone, Debug)]
pub struct MissRatioCurve(Vec<f64>);

/// Number of steps of a [`MissRatioCurve`] from 0 to the whole footprint.
const CURVE_STEPS: u32 = 1000;
/// Upper bound on the number of pages sampled for reuse distances.
pub(super) const SAMPLED_PAGES_MAX: usize = 8192;

impl MissRatioCurve {
    /// Creates the curve of a miss model. `footprint` is the footprint in the model's unit of memory.
    pub(super) fn from_model(model: &impl MissModel, footprint: f64) -> Self {
        Self(
            (0..=CURVE_STEPS)
                .map(|at| model.misses(f64::from(at) / f64::from(CURVE_STEPS) * footprint))
                .collect(),
        )
    }

    /// Returns the miss ratio if the fraction `part` of the footprint is in memory. Interpolates
    /// linearly between points.
    pub fn misses(&self, part: f64) -> f64 {
        let position = part.clamp(0.0, 1.0) * f64::from(CURVE_STEPS);
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "clamped to CURVE_STEPS")]
        let below = position.floor() as usize;
        let above = (below + 1).min(CURVE_STEPS as usize);
        self.0[below] + (position - position.floor()) * (self.0[above] - self.0[below])
    }

    /// Converts the curve into knots, with memory as a fraction of the footprint.
    pub fn knots(&self) -> Vec<Knot> {
        let knot = |(at, misses): (u32, &f64)| Knot {
            memory: f64::from(at) / f64::from(CURVE_STEPS),
            misses: *misses,
        };
        (0..).zip(&self.0).map(knot).collect()
    }
}

impl Tenant {
    /// Creates a tenant from a sequence of page accesses. The footprint of every tenant is 1,
    /// regardless of its number of pages.
    pub fn new(name: String, touches: &[u32], gamma: f64, wanted: f64) -> Self {
        let pages = touches.iter().max().map_or(1, |last| last + 1);
        let footprint = f64::from(pages);
        let mut exact = ReuseDistances::new(pages as usize + 1, 1.0);
        let mut sampled = ReuseDistances::new(SAMPLED_PAGES_MAX, 1.0);
        for page in touches {
            exact.touch(u64::from(*page));
            sampled.touch(u64::from(*page));
        }
        let (exact_curve, measured) =
            (MissRatioCurve::from_model(&exact, footprint), MissRatioCurve::from_model(&sampled, footprint));
        Self { name, gamma, wanted, exact_curve: Arc::new(exact_curve), measured: Arc::new(measured) }
    }

    /// Returns a tenant with the same trace and the given parameters.
    #[must_use]
    pub fn with_params(&self, gamma: f64, wanted: f64) -> Self {
        Self { gamma, wanted, ..self.clone() }
    }

    /// Returns the true throughput with a share, relative to a run without misses (from 0 to 1).
    /// The share has memory in footprints and bandwidth as a fraction of the link.
    pub fn throughput(&self, share: Bundle) -> f64 {
        throughput(self.exact_curve.misses(share.memory), self.gamma, self.wanted, share.bandwidth)
    }

    /// Returns the bandwidth that the tenant uses with a share, as a fraction of the link.
    pub fn bandwidth_used(&self, share: Bundle) -> f64 {
        self.wanted.min(share.bandwidth)
    }

    /// Returns the miss-ratio curve that a host measures from sampled reuse distances.
    pub fn measured(&self) -> &Arc<MissRatioCurve> {
        &self.measured
    }

    /// Returns the kind of the tenant, from its marginal gains at a share.
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

/// Computes the throughput as the inverse of Spirit's slowdown (section 4.2, corrected form).
pub(super) fn throughput(misses: f64, gamma: f64, wanted: f64, bandwidth: f64) -> f64 {
    if misses == 0.0 {
        return 1.0;
    }
    let shortage = if wanted > 0.0 { (wanted / bandwidth).max(1.0) } else { 1.0 };
    1.0 / (1.0 + misses * gamma * shortage)
}
