//! The search for the price at which both goods are sold.
//!
//! What is asked of memory falls as its price rises, though not always (a tenant that wants both goods in a fixed ratio may ask for more of one as it
//! gets dearer); a change of sign is found in any case. Prices are tried by the logarithm of their ratio, so that a good may be nearly worthless.
//!
//! Between two prices, what all ask for together mostly changes as a straight line does, but for leaps: with a curve of knots a tenant goes from one to the
//! next at some price, and in the end the price of all is where one leaps. Only halving would come to the end of that; so the few whose leaps are most of
//! the change are asked alone where they do (`likely`), and few prices are left for all to be asked. As long as halving could still end in time, any price
//! between may be tried. Who asks for the same of one good on both sides of the price is not asked again before the search ends (`leave_out`).

use units::limits::PRICE_ROUNDS_MAX;

use super::{
    Market,
    goods::Bundle,
    round::{Crowd, Round},
    utility::{Mark, Utility},
};

/// How narrow a bracket gets: the ratio of prices is known to this, relative.
const STEP_MIN: f64 = 1e-10;
/// What may stay unsold, or be sold twice, of a good that counts as just sold out.
const SOLD_OUT: f64 = 1e-10;
/// How far from the first price the second is, at least and at most, and how much further each time.
const STEP_LEAST: f64 = 1e-6;
const STEP_MOST: f64 = 0.5;
const STEP_GROWTH: f64 = 8.0;
/// And from `STEP_MOST` on up to where prices are mostly; beyond that it is at once as far as prices go.
const FAR_GROWTH: f64 = 2.0;
const FAR: f64 = 2.0;
const ALL_GROWTH: f64 = 16.0;
/// Between ratios further apart, e to this, what is asked for says little.
const WIDE: f64 = 3.0;
/// What part of a change of demand is a leap, if one tenant makes it; how many of those are asked alone; and to which part of a bracket where the price is
/// as much the others' affair.
const LEAP: f64 = 0.25;
const LEAPERS_MAX: usize = 4;
const ROUGH: f64 = 1.0 / 64.0;
/// One of how many tenants is asked for a guess, and how many make one.
const GUESSED_BY: usize = 16;
const GUESSERS_MIN: usize = 32;
/// Demand that counts as so much where it is less: its logarithm is never far from others.
const DEMAND_LEAST: f64 = 1e-3;
/// Beyond this ratio of prices, e to this, the cheaper good is for nothing.
const RATIO_MAX: f64 = 27.0;

/// Where the search ended.
#[derive(Clone, Debug)]
pub(super) struct Found {
    /// Just below the price: memory is asked for more than there is. None where one price clears the market.
    pub below: Option<Round>,
    /// At the price, or just above it: memory is not asked for more than there is.
    pub above: Round,
    /// Prices that were tried.
    pub rounds: u32,
}

impl Found {
    pub fn price(&self) -> f64 {
        self.above.price
    }

    /// The larger of both sides.
    pub fn dividend(&self) -> f64 {
        self.below.as_ref().map_or(1.0, |below| below.dividend).max(self.above.dividend)
    }
}

/// Sought from near the last price, if there was one.
pub(super) fn find<U: Utility>(market: &Market<'_, U>, last: Option<f64>, marks: &mut [Mark]) -> Found {
    let is_within = |price: &f64| *price > 0.0 && *price < 1.0;
    let last = last.filter(is_within).or_else(|| guess(market, marks).filter(is_within));
    let crowd = Crowd::all(market.tenants.len());
    Search {
        market,
        marks,
        crowd,
        rounds: 0,
        most: PRICE_ROUNDS_MAX,
        spare: Round::default(),
        leaves_out: true,
    }
    .run(ratio(last.unwrap_or(0.5)), last.is_some())
}

/// The price if the first of many tenants were all of them.
fn guess<U: Utility>(market: &Market<'_, U>, marks: &mut [Mark]) -> Option<f64> {
    let some = market.tenants.len() / GUESSED_BY;
    (some >= GUESSERS_MIN).then(|| find(&market.of_first(some), None, &mut marks[..some]).price())
}

struct Search<'a, 'b, U> {
    market: &'a Market<'b, U>,
    marks: &'a mut [Mark],
    crowd: Crowd,
    rounds: u32,
    /// The most there may be of them.
    most: u32,
    /// A round that is no longer needed: its memory is used again.
    spare: Round,
    /// Who is thought to ask for the same at each price that may still be tried is not asked.
    leaves_out: bool,
}

/// What everybody asks for at one ratio of prices.
struct Tried {
    ratio: f64,
    round: Round,
}

/// What a round says of the price.
enum Verdict {
    /// Nothing is asked for more than there is: this is it.
    Clears,
    /// Memory is.
    TooLow,
    /// Bandwidth is.
    TooHigh,
}

/// How often in a row each end has moved.
#[derive(Clone, Copy, Default)]
struct Streak {
    low: u32,
    high: u32,
}

impl Streak {
    /// How many times as far as is likely an end that moved so often is to move now.
    fn lean(moves: u32) -> f64 {
        f64::from(moves.saturating_sub(1)).exp2()
    }
}

impl Tried {
    fn verdict(&self) -> Verdict {
        let Bundle { memory, bandwidth } = self.round.sum;
        if memory > 1.0 + SOLD_OUT {
            Verdict::TooLow
        } else if bandwidth > 1.0 + SOLD_OUT {
            Verdict::TooHigh
        } else {
            Verdict::Clears
        }
    }
}

impl<U: Utility> Search<'_, '_, U> {
    fn try_at(&mut self, ratio: f64) -> Tried {
        self.rounds += 1;
        let round = std::mem::take(&mut self.spare);
        self.ask(Tried { ratio, round })
    }

    fn ask(&mut self, mut at: Tried) -> Tried {
        at.round.ask(self.market, &self.crowd, price(at.ratio), self.marks);
        at
    }

    fn cleared(self, at: Tried) -> Found {
        Found { below: None, above: at.round, rounds: self.rounds }
    }

    fn run(mut self, first: f64, is_near: bool) -> Found {
        let first = self.try_at(first);
        // Mostly demand falls by more than the root of what the ratio rises by: then this is on the other side of the price, and not far.
        let near = 2.0 * first.round.sum.memory.ln().abs();
        let step = if is_near { near.clamp(STEP_LEAST, STEP_MOST) } else { STEP_MOST };
        match first.verdict() {
            Verdict::Clears => self.cheapened(first),
            Verdict::TooLow => self.up(first, step),
            Verdict::TooHigh => self.down(first, step),
        }
    }

    /// Ever dearer memory, up to bandwidth for nothing.
    fn up(mut self, mut low: Tried, mut step: f64) -> Found {
        loop {
            let next = self.try_at(low.ratio + step);
            match next.verdict() {
                Verdict::Clears => return self.cheapened(next),
                Verdict::TooHigh => return self.between(low, next),
                // At a price of 1 all budgets buy what there is of memory, and no more.
                Verdict::TooLow if next.round.price == 1.0 => return self.cleared(next),
                Verdict::TooLow => self.spare = std::mem::replace(&mut low, next).round,
            }
            step = further(step);
        }
    }

    /// Ever cheaper memory, down to nothing.
    fn down(mut self, mut high: Tried, mut step: f64) -> Found {
        loop {
            let next = self.try_at(high.ratio - step);
            match next.verdict() {
                Verdict::Clears => return self.cheapened(next),
                Verdict::TooLow => return self.between(next, high),
                Verdict::TooHigh if next.round.price == 0.0 => return self.cleared(next),
                Verdict::TooHigh => self.spare = std::mem::replace(&mut high, next).round,
            }
            step = further(step);
        }
    }

    fn between(mut self, mut low: Tried, mut high: Tried) -> Found {
        let mut streak = Streak::default();
        self.leave_out(&mut low, &mut high);
        while self.rounds < self.most && high.ratio - low.ratio > STEP_MIN {
            let ratio = self.next(&low, &high, streak);
            if ratio <= low.ratio || ratio >= high.ratio {
                break;
            }
            let next = self.try_at(ratio);
            match next.verdict() {
                Verdict::Clears => return self.cleared_by_all(next),
                Verdict::TooLow => {
                    streak = Streak { low: streak.low + 1, high: 0 };
                    self.spare = std::mem::replace(&mut low, next).round;
                }
                Verdict::TooHigh => {
                    streak = Streak { low: 0, high: streak.high + 1 };
                    self.spare = std::mem::replace(&mut high, next).round;
                }
            }
            self.leave_out(&mut low, &mut high);
        }
        self.between_all(low, high)
    }

    /// Those are no longer asked that ask for the same of one good on both sides.
    fn leave_out(&mut self, low: &mut Tried, high: &mut Tried) {
        let is_priced = low.ratio >= -RATIO_MAX && high.ratio <= RATIO_MAX;
        if self.leaves_out && is_priced {
            self.crowd.settle(self.market, &mut low.round, &mut high.round);
        }
    }

    /// Where the search ends: what everybody asks for there, those too that were left out. Where both sides have one dividend, those ask for the same on both.
    fn between_all(mut self, mut low: Tried, mut high: Tried) -> Found {
        if self.crowd.asked.len() < self.marks.len() {
            let asked = self.crowd.asked.clone();
            let has_one_dividend = low.round.dividend == high.round.dividend;
            high = self.ask_all(high);
            if has_one_dividend && low.round.dividend == high.round.dividend {
                low.round.complete(self.market, &asked, &high.round);
            } else {
                low = self.ask_all(low);
            }
            if !matches!((low.verdict(), high.verdict()), (Verdict::TooLow, Verdict::TooHigh)) {
                return self.of_all(high.ratio);
            }
        }
        Found { below: Some(low.round), above: high.round, rounds: self.rounds }
    }

    /// The same where one price clears the market.
    fn cleared_by_all(mut self, mut at: Tried) -> Found {
        if self.crowd.asked.len() < self.marks.len() {
            at = self.ask_all(at);
            if !matches!(at.verdict(), Verdict::Clears) {
                return self.of_all(at.ratio);
            }
        }
        self.cleared(at)
    }

    /// Once more at the same price, with nobody left out.
    fn ask_all(&mut self, at: Tried) -> Tried {
        self.crowd.ask_all_from(self.marks.len(), at.round.dividend);
        self.ask(at)
    }

    /// From the beginning, with nobody left out: somebody who was asks for something else after all.
    fn of_all(mut self, near: f64) -> Found {
        (self.leaves_out, self.most) = (false, self.rounds + PRICE_ROUNDS_MAX);
        self.crowd = Crowd::all(self.marks.len());
        self.run(near, true)
    }

    /// Where the price is likely to be; further from an end, twice each time, that alone keeps moving; and half-way where that says little, or there is
    /// just time for halving.
    fn next(&mut self, low: &Tried, high: &Tried, streak: Streak) -> f64 {
        let (from, to) = (low.ratio, high.ratio);
        let (middle, halvings) = (f64::midpoint(from, to), self.most - self.rounds);
        if to - from > WIDE || to - from > STEP_MIN / 2.0 * f64::from(halvings).exp2() {
            return middle;
        }
        let likely = self.likely(low, high);
        let ratio = if likely < middle {
            (from + (likely - from) * Streak::lean(streak.low)).min(middle)
        } else {
            (to - (to - likely) * Streak::lean(streak.high)).max(middle)
        };
        if ratio > from && ratio < to { ratio } else { middle }
    }

    /// Where memory would be just sold if all but a few changed evenly what they ask for; those few are asked.
    fn likely(&mut self, low: &Tried, high: &Tried) -> f64 {
        let market = self.market;
        let memory = |of: &Tried, at: usize| market.part(of.round.bundles[at]).memory;
        let leap = LEAP * (low.round.sum.memory - high.round.sum.memory);
        let leaps = |at: &usize| memory(low, *at) - memory(high, *at) > leap;
        let leapers: Vec<_> = (0..self.crowd.asked.len()).filter(leaps).take(LEAPERS_MAX).collect();
        if leapers.is_empty() {
            return straight(low, high);
        }
        let even = |at: &Tried| at.round.sum.memory - leapers.iter().map(|one| memory(at, *one)).sum::<f64>();
        let (even_low, even_high) = (even(low), even(high));
        let (mut from, mut to) = (low.ratio, high.ratio);
        let apart = if even_low - even_high < leap { STEP_MIN } else { STEP_MIN.max(ROUGH * (to - from)) };
        while to - from > apart {
            let middle = f64::midpoint(from, to);
            let part = (middle - low.ratio) / (high.ratio - low.ratio);
            let between = |low: f64, high: f64| low + part * (high - low);
            let (prices, dividend) =
                (market.prices(price(middle)), between(low.round.dividend, high.round.dividend));
            let mut sum = between(even_low, even_high);
            for leaper in &leapers {
                let tenant = self.crowd.asked[*leaper];
                let asked = market.ask(tenant, prices, dividend, &mut self.marks[tenant]);
                sum += market.part(asked.bundle).memory;
            }
            if sum > 1.0 + SOLD_OUT { from = middle } else { to = middle }
        }
        if from > low.ratio { from } else { to }
    }

    /// Where several prices clear a market with a dividend, the one with the smallest, as if all that some cannot use had been dearer from the start.
    fn cheapened(mut self, at: Tried) -> Found {
        if at.round.dividend <= 1.0 {
            return self.cleared(at);
        }
        for towards in [-STEP_LEAST, STEP_LEAST] {
            let near = self.try_at(at.ratio + towards);
            if matches!(near.verdict(), Verdict::Clears) && near.round.dividend < at.round.dividend {
                return self.cheapened_from(near, towards);
            }
            self.spare = near.round;
        }
        self.cleared(at)
    }

    fn cheapened_from(mut self, mut best: Tried, mut towards: f64) -> Found {
        let mut is_growing = true;
        while self.rounds < self.most && towards.abs() > STEP_MIN {
            if is_growing {
                towards *= STEP_GROWTH
            } else {
                towards /= 2.0
            }
            let next = self.try_at(best.ratio + towards);
            if matches!(next.verdict(), Verdict::Clears) && next.round.dividend <= best.round.dividend {
                self.spare = std::mem::replace(&mut best, next).round;
            } else {
                is_growing = false;
                self.spare = next.round;
            }
        }
        self.cleared(best)
    }
}

/// The price of memory, where so much is the logarithm of its ratio to that of bandwidth; beyond all ratios one of both is 0.
fn price(ratio: f64) -> f64 {
    if ratio.abs() > RATIO_MAX { if ratio > 0.0 { 1.0 } else { 0.0 } } else { 1.0 / (1.0 + (-ratio).exp()) }
}

/// The next step away from a price that was too low or too high.
fn further(step: f64) -> f64 {
    step * match step {
        near if near < STEP_MOST => STEP_GROWTH,
        far if far < FAR => FAR_GROWTH,
        _ => ALL_GROWTH,
    }
}

fn ratio(price: f64) -> f64 {
    (price / (1.0 - price)).ln()
}

/// Where a straight line between both ends crosses, through the logarithms of ratio and demand.
fn straight(low: &Tried, high: &Tried) -> f64 {
    let (over, under) = (low.round.sum.memory.ln(), -high.round.sum.memory.max(DEMAND_LEAST).ln());
    low.ratio + (high.ratio - low.ratio) * over / (over + under)
}
