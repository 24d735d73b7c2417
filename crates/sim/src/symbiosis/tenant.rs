//! A tenant out of a trace: what it truly is, and what a host can tell of it.

use std::sync::Arc;

use fairness::{
    curve::Knot,
    market::Bundle,
    profile::{MissModel, ReuseDistances},
};

/// What a tenant's throughput hangs on, for those who read a table.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub enum Kind {
    /// On bandwidth.
    Bandwidth,
    /// On memory too: a tenth more of it does a third, at least, of what a tenth more bandwidth does.
    Memory,
    /// On neither, much.
    Compute,
}

/// One of those that share a host.
#[derive(Clone, Debug)]
pub struct Tenant {
    /// Its trace's name.
    pub name: String,
    /// How much longer remote memory takes.
    pub gamma: f64,
    /// Bandwidth that it could use, as a part of the link.
    pub wanted: f64,
    truth: Arc<Curve>,
    measured: Arc<Curve>,
}

/// Miss ratios at every 1/1000 of what a tenant touches.
#[derive(Clone, Debug)]
pub struct Curve(Vec<f64>);

/// Steps of a [`Curve`].
const STEPS: u32 = 1000;
/// Pages that are watched to learn reuse distances.
pub(super) const WATCHED: usize = 8192;

impl Curve {
    fn of(model: &impl MissModel, footprint: f64) -> Self {
        Self((0..=STEPS).map(|at| model.misses(f64::from(at) / f64::from(STEPS) * footprint)).collect())
    }

    /// Miss ratio with such a part of the footprint; what lies between is straight.
    pub fn misses(&self, part: f64) -> f64 {
        let place = part.clamp(0.0, 1.0) * f64::from(STEPS);
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "from 0 to the steps")]
        let below = place.floor() as usize;
        let above = (below + 1).min(STEPS as usize);
        self.0[below] + (place - place.floor()) * (self.0[above] - self.0[below])
    }

    /// As a measured curve: sizes of memory as parts of the footprint.
    pub fn knots(&self) -> Vec<Knot> {
        let knot =
            |(at, misses): (u32, &f64)| Knot { memory: f64::from(at) / f64::from(STEPS), misses: *misses };
        (0..).zip(&self.0).map(knot).collect()
    }
}

impl Tenant {
    /// One that touches these pages. A page stands for as many as make one footprint for all tenants: 1.
    pub fn new(name: String, touches: &[u32], gamma: f64, wanted: f64) -> Self {
        let pages = touches.iter().max().map_or(1, |last| last + 1);
        let footprint = f64::from(pages);
        let mut exact = ReuseDistances::new(pages as usize + 1, 1.0);
        let mut some = ReuseDistances::new(WATCHED, 1.0);
        for page in touches {
            exact.touch(u64::from(*page));
            some.touch(u64::from(*page));
        }
        let (truth, measured) = (Curve::of(&exact, footprint), Curve::of(&some, footprint));
        Self { name, gamma, wanted, truth: Arc::new(truth), measured: Arc::new(measured) }
    }

    /// The same trace of another tenant.
    #[must_use]
    pub fn again(&self, gamma: f64, wanted: f64) -> Self {
        Self { gamma, wanted, ..self.clone() }
    }

    /// Throughput with such parts of its footprint and of the link; 1 is never slowed down.
    pub fn throughput(&self, share: Bundle) -> f64 {
        throughput(self.truth.misses(share.memory), self.gamma, self.wanted, share.bandwidth)
    }

    /// Bandwidth that it uses of what it may.
    pub fn uses(&self, share: Bundle) -> f64 {
        self.wanted.min(share.bandwidth)
    }

    /// What the reuse distances of some of its pages say.
    pub fn measured(&self) -> &Curve {
        &self.measured
    }

    /// What it hangs on, with such a share.
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

/// Spirit's slowdown (4.2, resolved), inverted.
pub(super) fn throughput(misses: f64, gamma: f64, wanted: f64, bandwidth: f64) -> f64 {
    if misses == 0.0 {
        return 1.0;
    }
    let lack = if wanted > 0.0 { (wanted / bandwidth).max(1.0) } else { 1.0 };
    1.0 / (1.0 + misses * gamma * lack)
}
