//! What risk costs, and whom not to trust: found by outcomes of late, each held against what was said before it was known. Where the model
//! is wrong, or the world has changed, it shows here first. A price is chosen as those of risk-controlling prediction sets
//! are: the lowest at which the rate seen, with a margin for chance, stays within the rate asked for.

use std::collections::{BTreeMap, VecDeque};

use serde::{Deserialize, Serialize};
use units::{
    Bytes, Fraction, UnixMs,
    limits::{CALIBRATION_OUTCOMES_MAX, OWNER_MARGINS_MAX},
};

use super::{
    history::gib,
    risk::{Appetite, Curve, LEVELS},
};

/// What was said of a VM before it started, and what came of it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Judged {
    /// When it began.
    pub begins: UnixMs,
    /// What the model said.
    pub curve: Curve,
    /// Which caution its owner was due.
    pub caution: f64,
    /// What it asked for.
    pub requested: Bytes,
    /// Share of it that it did not touch.
    pub untouched: Fraction,
}

/// Outcomes of late, and how each owner fared.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Calibration {
    recent: VecDeque<Judged>,
    owners: BTreeMap<String, Tally>,
}

/// How one owner's VMs did against what was said of them; older ones count less.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
struct Tally {
    outcomes: f64,
    hits: f64,
}

/// The level at which owners' outcomes are counted: one in ten should be below.
const WATCHED: usize = 9;
/// Outcomes of an owner from which on it may be met with caution; and those that are remembered, about.
const ENOUGH: f64 = 100.0;
const REMEMBERED: f64 = 200.0;
/// By how many standard deviations an owner's hits must exceed what should be, before it is not chance.
const BEYOND_CHANCE: f64 = 2.0;
/// The most caution.
const CAUTION_MAX: f64 = 10.0;

/// Prices that are tried: GiB that one VM more hit must bring.
const PRICES: (f64, f64) = (0.01, 1e6);
/// Halvings of the range between them, by ratio: to a hundredth of a percent.
const HALVINGS: usize = 18;
/// By how many standard deviations the rate seen must stay below the rate asked for: it was seen by chance, and the price was chosen
/// for it.
const MARGIN: f64 = 1.0;
/// How many of the latest outcomes may not be hit clearly more often than asked for: where the mix of VMs changes, it shows in these
/// long before it shows in all.
const LATEST: [usize; 4] = [50, 150, 450, 1350];

impl Calibration {
    /// Takes in what came of a VM, of an owner if it has one, and what was said of it.
    pub fn add(&mut self, owner: Option<String>, judged: Judged) {
        if let Some(owner) = owner {
            self.make_room_for(&owner);
            let is_hit = judged.curve.at_level(WATCHED) > judged.untouched.get();
            let tally = self.owners.entry(owner).or_default();
            let kept = if tally.outcomes < REMEMBERED { 1.0 } else { 1.0 - 1.0 / REMEMBERED };
            tally.outcomes = tally.outcomes * kept + 1.0;
            tally.hits = tally.hits * kept + f64::from(u8::from(is_hit));
        }
        if self.recent.len() >= CALIBRATION_OUTCOMES_MAX {
            self.recent.pop_front();
        }
        self.recent.push_back(judged);
    }

    /// Of too many owners, the half of which least is known is forgotten.
    fn make_room_for(&mut self, owner: &str) {
        if self.owners.len() >= OWNER_MARGINS_MAX && !self.owners.contains_key(owner) {
            let mut outcomes: Vec<f64> = self.owners.values().map(|tally| tally.outcomes).collect();
            let median = *outcomes.select_nth_unstable_by(OWNER_MARGINS_MAX / 2, f64::total_cmp).1;
            self.owners.retain(|_, tally| tally.outcomes > median);
        }
    }

    /// The same, but only of VMs that began after a moment, and of nobody's VMs in particular.
    pub fn after(&self, moment: UnixMs) -> Self {
        let recent = self.recent.iter().filter(|judged| judged.begins > moment).copied().collect();
        Self { recent, owners: BTreeMap::new() }
    }

    /// How much more often an owner's outcomes were below what was said than they should be; 1 if they were not, if that may be chance,
    /// or if nobody is known to own them.
    pub fn caution(&self, owner: Option<&String>) -> f64 {
        let tally = owner.and_then(|owner| self.owners.get(owner)).copied().unwrap_or_default();
        let due = LEVELS[WATCHED] * tally.outcomes;
        let by_chance = due + BEYOND_CHANCE * due.sqrt();
        if tally.outcomes < ENOUGH || tally.hits <= by_chance {
            1.0
        } else {
            (tally.hits / due).min(CAUTION_MAX)
        }
    }

    /// The lowest price at which, with a margin for chance, at most `rate` of the outcomes would have been hit, and of the latest not
    /// clearly more. None while there are too few to tell: of a rate of one in a hundred, hundreds are needed.
    pub fn appetite(&self, rate: Fraction) -> Option<Appetite> {
        let (mut low, mut high) = PRICES;
        if !self.fits(high, rate) {
            return None;
        }
        for _ in 0..HALVINGS {
            let middle = (low * high).sqrt();
            if self.fits(middle, rate) { high = middle } else { low = middle }
        }
        Some(Appetite::new(high, rate))
    }

    /// Share of the memory of outcomes of late that an appetite would have taken, in whole slices of each VM; nothing while there is none.
    pub fn taken(&self, appetite: Appetite) -> f64 {
        let (mut taken, mut requested) = (0.0, 0.0);
        for judged in &self.recent {
            let stake = judged.curve.stake(judged.requested, appetite, judged.caution);
            let share = Fraction::new(stake.share).expect("a stake is a share");
            taken += gib(share.of(judged.requested).slices_floor());
            requested += gib(judged.requested);
        }
        if self.recent.is_empty() { 0.0 } else { taken / requested }
    }

    /// Whether it is one that outcomes made.
    pub(crate) fn is_sound(&self) -> bool {
        let is_sound = |judged: &Judged| judged.requested > Bytes::ZERO && judged.caution >= 1.0;
        let tallies = self.owners.values().all(|tally| tally.outcomes.is_finite() && tally.hits.is_finite());
        self.recent.len() <= CALIBRATION_OUTCOMES_MAX
            && self.owners.len() <= OWNER_MARGINS_MAX
            && self.recent.iter().all(is_sound)
            && tallies
    }

    /// How many outcomes are remembered.
    pub fn outcomes(&self) -> usize {
        self.recent.len()
    }

    fn fits(&self, price: f64, rate: Fraction) -> bool {
        let appetite = Appetite::new(price, rate);
        let (mut allowed, mut hits) = (0.0, 0.0);
        for (at, judged) in self.recent.iter().rev().enumerate() {
            let stake = judged.curve.stake(judged.requested, appetite, judged.caution);
            allowed += rate.get();
            hits += f64::from(u8::from(stake.share > judged.untouched.get()));
            if LATEST.contains(&(at + 1)) && hits > allowed + f64::sqrt(allowed) {
                return false;
            }
        }
        let next: f64 = f64::max(hits, 1.0); // where none was hit, the next may be
        next + MARGIN * next.sqrt() <= allowed
    }
}
