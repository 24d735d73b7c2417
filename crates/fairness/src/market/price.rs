//! The search for the price at which both goods are sold.
//!
//! What is asked of memory falls as its price rises, though not always (a tenant that wants both goods in a fixed ratio may ask for more of one as it
//! gets dearer); a change of sign is found in any case. Prices are tried by the logarithm of their ratio, so that a good may be nearly worthless. The next
//! to try is where the straight line between both ends of the bracket crosses, held near its middle (the ITP method: Oliveira and Takahashi 2020): as safe
//! as halving, mostly far faster.

use units::limits::PRICES_TRIED_MAX;

use super::{Market, goods::Bundle, round::Round, utility::Utility};

/// How narrow a bracket gets: the ratio of prices is known to this, relative.
const STEP_MIN: f64 = 1e-10;
/// What may stay unsold, or be sold twice, of a good that counts as just sold out.
const SOLD_OUT: f64 = 1e-10;
/// How far from the first price the second is, and how much further each time.
const COLD_STEP: f64 = 0.5;
const WARM_STEP: f64 = 1e-6;
const STEP_GROWTH: f64 = 8.0;
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
pub(super) fn find<U: Utility>(market: &Market<'_, U>, last: Option<f64>, marks: &mut [u32]) -> Found {
    let last = last.filter(|last| *last > 0.0 && *last < 1.0);
    let step = if last.is_some() { WARM_STEP } else { COLD_STEP };
    Search { market, marks, rounds: 0, spare: Round::default() }.run(ratio(last.unwrap_or(0.5)), step)
}

struct Search<'a, 'b, U> {
    market: &'a Market<'b, U>,
    marks: &'a mut [u32],
    rounds: u32,
    /// A round that is no longer needed: its memory is used again.
    spare: Round,
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
        let mut round = std::mem::take(&mut self.spare);
        round.ask(self.market, price(ratio), self.marks);
        Tried { ratio, round }
    }

    fn cleared(self, at: Tried) -> Found {
        Found { below: None, above: at.round, rounds: self.rounds }
    }

    fn run(mut self, first: f64, step: f64) -> Found {
        let first = self.try_at(first);
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
            step *= STEP_GROWTH;
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
            step *= STEP_GROWTH;
        }
    }

    fn between(mut self, mut low: Tried, mut high: Tried) -> Found {
        let halvings = ((high.ratio - low.ratio) / STEP_MIN).log2().ceil().max(0.0) + 1.0;
        let begun = self.rounds;
        while self.rounds < PRICES_TRIED_MAX && high.ratio - low.ratio > STEP_MIN {
            let slack = STEP_MIN / 2.0 * (halvings - f64::from(self.rounds - begun)).exp2();
            let ratio = itp(&low, &high, slack);
            if ratio <= low.ratio || ratio >= high.ratio {
                break;
            }
            let next = self.try_at(ratio);
            match next.verdict() {
                Verdict::Clears => return self.cleared(next),
                Verdict::TooLow => self.spare = std::mem::replace(&mut low, next).round,
                Verdict::TooHigh => self.spare = std::mem::replace(&mut high, next).round,
            }
        }
        Found { below: Some(low.round), above: high.round, rounds: self.rounds }
    }

    /// Where several prices clear a market with a dividend, the one with the smallest, as if all that some cannot use had been dearer from the start.
    fn cheapened(mut self, at: Tried) -> Found {
        if at.round.dividend <= 1.0 {
            return self.cleared(at);
        }
        for towards in [-WARM_STEP, WARM_STEP] {
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
        while self.rounds < PRICES_TRIED_MAX && towards.abs() > STEP_MIN {
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

fn ratio(price: f64) -> f64 {
    (price / (1.0 - price)).ln()
}

/// Interpolate, truncate, project: near where the straight line crosses, and no further from the middle than halving would allow by now.
fn itp(low: &Tried, high: &Tried, slack: f64) -> f64 {
    let (a, b) = (low.ratio, high.ratio);
    let (over, under) = (low.round.sum.memory - 1.0, 1.0 - high.round.sum.memory);
    let (middle, width) = (f64::midpoint(a, b), b - a);
    let straight = (a * under + b * over) / (over + under);
    let (off, side) = ((middle - straight).abs(), (middle - straight).signum());
    let by = 0.2 * width * width;
    let truncated = if by <= off { straight + side * by } else { middle };
    let radius = (slack - width / 2.0).max(0.0);
    if (truncated - middle).abs() <= radius { truncated } else { middle - side * radius }
}
