//! What a host learns of one tenant, epoch after epoch: from what it measures to what shares are worth to the tenant.
//!
//! Spirit counts accesses by sampling in hardware. A host without that still knows what matters, seconds: how long a tenant worked, how often the kernel
//! made it wait for a page, and how long that takes. Where somebody looks at which pages are touched, a power law says how waiting hangs on memory; where
//! nobody does, a straight line; and both go through what was measured, by [`Waits`].

use thiserror::Error;

use super::{
    FitError, Histogram, MissModel, Moves, PowerLaw, Seen, Worth, WorthError, fit,
    waits::{Mean, Waits},
    wanted,
};
use crate::{curve::Knot, market::Supply};

/// What was measured of a tenant in one epoch.
#[derive(Clone, Debug)]
pub struct Sample {
    /// How long the epoch was, in seconds; more than 0.
    pub seconds: f64,
    /// Memory that it had, in MiB.
    pub memory: f64,
    /// And what of it lies elsewhere, in MiB.
    pub remote: f64,
    /// Seconds that it worked, of all its threads.
    pub worked: f64,
    /// How often it had to wait for a page.
    pub misses: f64,
    /// Pages that were brought to it: those it waited for, and those that were read ahead with them.
    pub brought: f64,
    /// How long one such wait takes while the link is not full, in seconds.
    pub miss: f64,
    /// What it moved over the link, the busier way, in MB/s.
    pub used: f64,
    /// What it may move, in MB/s.
    pub limit: f64,
    /// Seconds in which some of it stood still until pages were moved, however long they queued; if that was counted.
    pub stalled: Option<f64>,
    /// Which pages it touched, if somebody looked.
    pub touched: Option<Touched>,
}

/// Which pages a tenant touched.
#[derive(Clone, Debug, Default)]
pub struct Touched {
    /// How often each block of pages was seen to be touched.
    pub histogram: Histogram,
    /// MiB of a block.
    pub block: f64,
    /// Pages that were touched, in a second: those that are touched again at once count once.
    pub pages_per_second: f64,
}

/// A number that cannot have been measured.
#[derive(Clone, Copy, Debug, Error, PartialEq)]
#[error("{what} {value} must be a number, {rule}")]
pub struct SampleError {
    /// Which.
    pub what: &'static str,
    /// What it was.
    pub value: f64,
    /// What it has to be.
    pub rule: &'static str,
}

/// Of an epoch, what it must have worked or waited for that to say anything.
const IDLE: f64 = 0.002;
/// Who uses all that it may wants at least so many times as much, and at most: the next epoch shows whether that was enough.
const MORE: f64 = 1.25;
const MOST: f64 = 4.0;
/// Of an epoch, what is nearly all; and of how long threads waited, that from which on they are not one thread alone.
const STALLED: f64 = 0.8;
const MANY: f64 = 0.7;
/// The shortest wait that is reckoned with, in seconds: far below any device's.
const MISS_MIN: f64 = 1e-9;
/// MB of a page.
const PAGE_MB: f64 = 4096.0 / 1e6;
/// Of an epoch, the work of one that does nothing but wait.
const WORK_MIN: f64 = 1e-4;
/// The longest wait that is reckoned with, in seconds for each second of work.
const WAITS_MAX: f64 = 1e6;
/// Pages of 4 KiB of a MiB.
const PAGES_PER_MIB: f64 = 256.0;
/// How far off miss ratios are that nobody looked for: anything may be true.
const UNKNOWN: f64 = 1.0;

/// What is known of a tenant.
#[derive(Clone, Debug, Default)]
pub struct Learner {
    waits: Waits,
    /// The part of touches for which a page had to be brought.
    missed: Option<Mean>,
    law: Option<PowerLaw>,
    /// Pages that it touches in a second, if somebody has looked.
    pages_per_second: Option<f64>,
    /// Memory beyond which more is of no use, in MiB.
    footprint: f64,
    /// Seconds that it would wait for each second of work with no memory at all, by the model.
    without: f64,
    /// MB/s that it would move with the memory it had, if nothing held it up.
    wanted: f64,
    moves: Moves,
}

impl Learner {
    /// An epoch is over; the link has so many MB/s. What is out of range is not learnt. Of a tenant that hardly worked nothing is, but how much it has.
    ///
    /// # Errors
    /// The first number that cannot have been measured.
    pub fn learn(&mut self, sample: &Sample, link: f64) -> Result<(), SampleError> {
        sample.check()?;
        self.footprint = (sample.memory + sample.remote).max(1.0);
        let longer = sample.held_up(link);
        self.wanted = (sample.used * longer).min(link);
        if sample.worked + sample.waited().max(sample.stalled.unwrap_or(0.0)) < IDLE * sample.seconds {
            return Ok(());
        }
        // A fit needs more than this epoch may have shown: then the last one stands.
        if let Some(missed) = sample.missed() {
            let missed = Mean::with(self.missed, missed);
            self.missed = Some(missed);
            self.law = sample.fitted(missed.value).and_then(Result::ok).or(self.law);
        }
        let work = sample.work();
        self.pages_per_second =
            sample.touched.as_ref().map(|touched| touched.pages_per_second).or(self.pages_per_second);
        // Until somebody has looked: as if every page were touched each second.
        let pages_per_second = self.pages_per_second.unwrap_or(self.footprint * PAGES_PER_MIB);
        let touches = pages_per_second * sample.seconds / work;
        self.without = (touches * sample.miss).min(WAITS_MAX);
        let waited = (sample.waited() / work).min(WAITS_MAX);
        let model = self.model();
        self.waits.note(sample.memory.max(1.0), waited, model);
        self.moves = sample.moves(longer, waited);
        Ok(())
    }

    /// Seconds that it waits for each second of work with so much memory (MiB), if the link is not full.
    pub fn waits(&self, memory: f64) -> f64 {
        self.waits.at(memory, self.model()).min(WAITS_MAX)
    }

    /// The same by the model alone.
    fn model(&self) -> impl Fn(f64) -> f64 + use<> {
        let (law, footprint, without) = (self.law, self.footprint, self.without);
        move |memory| without * misses(law, footprint, memory)
    }

    /// What shares are worth to it; memory beyond `most` MiB it cannot have, whoever says so.
    ///
    /// # Errors
    /// Nothing was learnt that makes sense: see [`WorthError`].
    pub fn worth(&self, supply: Supply, most: f64) -> Result<Worth, WorthError> {
        let waits = |memory: f64| self.waits(memory.min(most));
        let gamma = waits(0.0);
        let part = |memory: f64| if gamma > 0.0 { (waits(memory) / gamma).min(1.0) } else { 0.0 };
        let knots: Vec<Knot> =
            self.sizes(most).into_iter().map(|memory| Knot { memory, misses: part(memory) }).collect();
        Worth::of_waits(supply, knots, gamma, self.moves)
    }

    /// Bandwidth that it could use with the memory that it had, in MB/s.
    pub fn wanted(&self) -> f64 {
        self.wanted
    }

    /// How far off miss ratios may be, about: 1 where nobody looked which pages are touched.
    pub fn error(&self) -> f64 {
        self.law.as_ref().map_or(UNKNOWN, MissModel::error)
    }

    /// Sizes of memory at which waits are told: closer to each other where there is less, where they were measured, and the most there may be.
    fn sizes(&self, most: f64) -> Vec<f64> {
        let even = (0..=SIZES).map(|at| self.footprint * (f64::from(at) / f64::from(SIZES)).powi(2));
        let mut sizes: Vec<f64> =
            even.chain(self.waits.sizes()).chain(Some(most).filter(|most| most.is_finite())).collect();
        sizes.sort_by(f64::total_cmp);
        sizes.dedup_by(|next, last| *next - *last < 1e-6);
        sizes
    }
}

const SIZES: u32 = 64;

/// By the power law; by a straight line down to all that it has, where there is none.
fn misses(law: Option<PowerLaw>, footprint: f64, memory: f64) -> f64 {
    match law {
        Some(law) => law.misses(memory),
        None => (1.0 - memory / footprint).max(0.0),
    }
}

impl Sample {
    fn check(&self) -> Result<(), SampleError> {
        let wrong = |what, value, rule| Err(SampleError { what, value, rule });
        if !(self.seconds.is_finite() && self.seconds > 0.0) {
            return wrong("seconds", self.seconds, "more than 0");
        }
        let touched = self.touched.as_ref();
        let all = [
            ("memory", self.memory),
            ("remote memory", self.remote),
            ("work", self.worked),
            ("misses", self.misses),
            ("pages brought", self.brought),
            ("time of a miss", self.miss),
            ("bandwidth used", self.used),
            ("bandwidth limit", self.limit),
            ("time stalled", self.stalled.unwrap_or(0.0)),
            ("size of a block", touched.map_or(1.0, |touched| touched.block)),
            ("pages touched", touched.map_or(0.0, |touched| touched.pages_per_second)),
        ];
        match all.into_iter().find(|(_, value)| !(value.is_finite() && *value >= 0.0)) {
            Some((what, value)) => wrong(what, value, "0 or more"),
            None => Ok(()),
        }
    }

    /// Seconds of all its threads; of one that does nothing but wait, a few.
    fn work(&self) -> f64 {
        self.worked.max(WORK_MIN * self.seconds)
    }

    /// Seconds that it would have waited if the link had not been full.
    fn waited(&self) -> f64 {
        self.misses * self.miss
    }

    /// How many times as fast it would have been if the link had not been full; 1 where it was not.
    fn held_up(&self, link: f64) -> f64 {
        let wanted = wanted(self.used, self.limit, link);
        if wanted <= self.used || self.used == 0.0 {
            return 1.0;
        }
        let all = wanted / self.used;
        let Some(stalled) = self.stalled else { return all };
        // Threads that stand still at one time are counted once; where it was nearly all the time, or less than they waited for pages, they may be any number.
        if stalled >= STALLED * self.seconds || stalled < MANY * self.waited() {
            return all.min(MOST);
        }
        let stalled = stalled * (self.worked / self.seconds).max(1.0);
        ((self.work() + stalled) / (self.work() + self.waited())).clamp(MORE, MOST)
    }

    /// What it moves if nothing holds it up, of one that would be so many times as fast then, and waits so long for each second of work.
    fn moves(&self, longer: f64, waited: f64) -> Moves {
        let used = self.used * longer;
        let misses = (self.brought * PAGE_MB / self.seconds * longer).min(used);
        // Who has not waited yet would for one page after another.
        let waiting =
            if waited > 0.0 { misses * (1.0 + waited) / waited } else { PAGE_MB / self.miss.max(MISS_MIN) };
        Moves { waiting, always: (used - misses) * (1.0 + waited) }
    }

    /// The part of touches for which a page had to be brought, if somebody looked; such a page was touched, whether or not that was seen.
    fn missed(&self) -> Option<f64> {
        let brought = self.brought.max(self.misses);
        let touches = (self.touched.as_ref()?.pages_per_second * self.seconds).max(brought);
        Some(if touches > 0.0 { brought / touches } else { 0.0 })
    }

    /// The power law by which its blocks are touched, if somebody looked; through the part of touches that had to wait.
    fn fitted(&self, misses: f64) -> Option<Result<PowerLaw, FitError>> {
        let touched = self.touched.as_ref().filter(|touched| touched.block > 0.0)?;
        let seen = Seen {
            pages: (self.memory + self.remote) / touched.block,
            local: self.memory / touched.block,
            misses,
            pages_per_mib: 1.0 / touched.block,
        };
        Some(fit(&touched.histogram, &seen))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::market::{Bundle, Utility};

    const SUPPLY: Supply = Supply { memory_mib: 1000, bandwidth_mb_s: 100 };

    /// One that keeps a processor busy with 400 of its 1000 MiB, and waits as long as it works.
    fn sample() -> Sample {
        Sample {
            seconds: 10.0,
            memory: 400.0,
            remote: 600.0,
            worked: 5.0,
            misses: 5000.0,
            brought: 5000.0,
            miss: 1e-3,
            used: 5000.0 * PAGE_MB / 10.0,
            limit: 50.0,
            stalled: None,
            touched: None,
        }
    }

    #[test]
    fn what_it_waited_with_what_it_had_is_true_whatever_the_model_says() {
        let mut learner = Learner::default();
        learner.learn(&sample(), 100.0).unwrap();
        assert_eq!(learner.waits(400.0), 1.0);
        assert!(learner.waits(1000.0) < 1e-9 && learner.waits(0.0) > 1.0);
        let worth = learner.worth(SUPPLY, f64::INFINITY).unwrap();
        let value = |memory, bandwidth| worth.value(Bundle { memory, bandwidth });
        assert!((value(400.0, 50.0) - 0.5).abs() < 0.01, "it works half of the time");
        assert!((value(1000.0, 50.0) - 1.0).abs() < 1e-9);
        let used = sample().used;
        assert!(value(400.0, 2.0 * used) > 0.98 * value(400.0, 50.0), "twice what it uses is as good as any");
        assert!(value(400.0, used / 2.0) < 0.55 * value(400.0, 50.0), "half of it is half");
        let held_up = |memory| value(memory, used / 2.0) / value(memory, 50.0);
        assert!(held_up(800.0) > 1.3 * held_up(400.0), "with more memory it moves less");
    }

    #[test]
    fn who_uses_all_it_may_wants_what_it_was_held_up_for() {
        let wanted = |stalled| {
            let mut learner = Learner::default();
            learner.learn(&Sample { misses: 2000.0, used: 45.0, stalled, ..sample() }, 200.0).unwrap();
            learner.wanted()
        };
        assert_eq!(wanted(None), 200.0, "nobody knows: the link");
        assert_eq!(
            wanted(Some(7.0)),
            45.0 * 12.0 / 7.0,
            "it worked for 5 s and waited for 2 s, and 5 s more it was held up"
        );
        assert_eq!(wanted(Some(2.0)), 45.0 * MORE, "at any rate something more");
        assert_eq!(wanted(Some(9.9)), 45.0 * MOST, "nobody knows how many threads stood still");
        assert_eq!(wanted(Some(1.0)), 45.0 * MOST, "threads waited at the same time");
    }

    #[test]
    fn who_never_waits_gains_nothing_from_anything() {
        let mut learner = Learner::default();
        let busy = Sample { remote: 0.0, misses: 0.0, brought: 0.0, used: 0.0, ..sample() }; // what it has it may need
        learner.learn(&busy, 100.0).unwrap();
        let worth = learner.worth(SUPPLY, f64::INFINITY).unwrap();
        let value = |memory| worth.value(Bundle { memory, bandwidth: 1.0 });
        assert_eq!(value(400.0), value(1000.0));
        assert!(value(200.0) < value(400.0));
    }

    #[test]
    fn memory_that_it_may_not_have_is_worth_nothing() {
        let mut learner = Learner::default();
        learner.learn(&sample(), 100.0).unwrap();
        let worth = learner.worth(SUPPLY, 500.0).unwrap();
        let value = |memory| worth.value(Bundle { memory, bandwidth: 50.0 });
        assert!(value(400.0) < value(500.0));
        assert!((value(500.0) - value(900.0)).abs() < 1e-9);
    }

    #[test]
    fn who_hardly_waits_needs_what_it_moves_all_the_same() {
        // Eight threads are busy, and wait a hundredth of that; and one that waits for nothing, and only writes.
        let busy = Sample { worked: 80.0, misses: 800.0, used: 26.0, ..sample() };
        for sample in [busy, Sample { misses: 0.0, brought: 0.0, used: 26.0, ..sample() }] {
            let mut learner = Learner::default();
            learner.learn(&sample, 100.0).unwrap();
            let worth = learner.worth(SUPPLY, f64::INFINITY).unwrap();
            let value = |memory, bandwidth| worth.value(Bundle { memory, bandwidth });
            assert!(value(400.0, 52.0) > 0.97, "{}", value(400.0, 52.0));
            assert!((value(400.0, 13.0) - 0.5).abs() < 0.02, "{}", value(400.0, 13.0));
        }
    }

    #[test]
    fn who_is_held_up_all_the_time_is_not_idle() {
        let mut learner = Learner::default();
        let held_up = Sample { worked: 0.05, misses: 4000.0, miss: 5e-6, stalled: Some(9.9), ..sample() };
        learner.learn(&Sample { used: 4.0, limit: 4.0, ..held_up }, 100.0).unwrap();
        assert_eq!(learner.wanted(), 4.0 * MOST);
        assert!(learner.waits(100.0) > learner.waits(400.0));
    }

    #[test]
    fn who_gets_what_it_wants_does_not_seem_to_want_ever_more() {
        let mut learner = Learner::default();
        let sample = Sample { used: 20.0, stalled: Some(5.0), ..sample() };
        for _ in 0..5 {
            let limit = learner.wanted().max(20.0);
            learner.learn(&Sample { limit, ..sample.clone() }, 100.0).unwrap();
            assert_eq!(learner.wanted(), 20.0 * MORE);
        }
    }

    #[test]
    fn who_only_waits_is_not_idle() {
        let mut learner = Learner::default();
        learner.learn(&Sample { worked: 0.05, misses: 2500.0, ..sample() }, 100.0).unwrap();
        assert_eq!(learner.waits(400.0), 50.0);
    }

    #[test]
    fn one_page_that_was_waited_for_changes_next_to_nothing() {
        let learnt = |misses| {
            let mut learner = Learner::default();
            learner.learn(&Sample { misses, brought: misses, ..sample() }, 100.0).unwrap();
            let worth = learner.worth(SUPPLY, f64::INFINITY).unwrap();
            [learner.waits(200.0), worth.value(Bundle { memory: 200.0, bandwidth: 20.0 })]
        };
        let (one, none) = (learnt(1.0), learnt(0.0));
        assert!(
            (one[0] / none[0] - 1.0).abs() < 1e-3 && (one[1] / none[1] - 1.0).abs() < 1e-3,
            "{one:?} {none:?}"
        );
    }

    #[test]
    fn an_idle_epoch_says_nothing() {
        let mut learner = Learner::default();
        learner.learn(&sample(), 100.0).unwrap();
        let before = learner.waits(200.0);
        learner.learn(&Sample { worked: 0.01, misses: 1.0, ..sample() }, 100.0).unwrap();
        assert_eq!(learner.waits(200.0), before);
    }

    #[test]
    fn pages_that_are_read_ahead_are_missed_as_well() {
        let counts = vec![10; 1000];
        let sample = |brought| {
            let touched =
                Touched { histogram: Histogram::new(counts.clone()), block: 1.0, pages_per_second: 4000.0 };
            Sample { touched: Some(touched), brought, ..sample() }
        };
        let waits = |brought| {
            let mut learner = Learner::default();
            learner.learn(&sample(brought), 100.0).unwrap();
            learner.waits(700.0) / learner.waits(400.0)
        };
        assert_eq!(waits(40_000.0), 1.0, "it goes through all pages, and more memory is of no use");
        assert!(waits(5000.0) < 0.8);
    }

    #[test]
    fn numbers_that_cannot_have_been_measured_are_refused_by_name_and_change_nothing() {
        let mut learner = Learner::default();
        learner.learn(&sample(), 100.0).unwrap();
        let before = format!("{learner:?}");
        let wrong = [
            (Sample { misses: f64::NAN, ..sample() }, "misses NaN must be a number, 0 or more"),
            (Sample { memory: -1.0, ..sample() }, "memory -1 must be a number, 0 or more"),
            (Sample { seconds: 0.0, ..sample() }, "seconds 0 must be a number, more than 0"),
            (Sample { used: f64::INFINITY, ..sample() }, "bandwidth used inf must be a number, 0 or more"),
        ];
        for (sample, says) in wrong {
            assert_eq!(learner.learn(&sample, 100.0).unwrap_err().to_string(), says);
            assert_eq!(format!("{learner:?}"), before);
        }
    }

    #[test]
    fn where_somebody_looks_which_pages_are_touched_the_shape_is_theirs() {
        // A tenth of its blocks are touched nine times as often as the others.
        let counts = (0..1000).map(|block| if block < 100 { 90 } else { 10 });
        let touched = Touched { histogram: Histogram::new(counts), block: 1.0, pages_per_second: 1500.0 };
        let mut learner = Learner::default();
        learner.learn(&Sample { touched: Some(touched), ..sample() }, 100.0).unwrap();
        assert_eq!(learner.waits(400.0), 1.0);
        let mut blind = Learner::default();
        blind.learn(&sample(), 100.0).unwrap();
        assert!(learner.waits(50.0) / learner.waits(150.0) > 1.05 * blind.waits(50.0) / blind.waits(150.0));
        assert!(learner.error() < blind.error());
    }
}
