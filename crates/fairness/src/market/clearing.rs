//! From what tenants ask for on both sides of the price to what they get.

use units::limits::{FIXED_CANDIDATES_MAX, MARGINAL_CANDIDATES_MAX};

use super::{
    Market, Status, Tenant,
    goods::{Bundle, Prices, Supply},
    price::{self, Found},
    utility::{Mark, Utility},
};

/// What a tenant may lose of its throughput, relative, by a mix of two bundles that are its best at nearly one price.
const MIX_LOSS: f64 = 1e-3;
/// Dividends that differ by less, relative, are one.
const SAME_BUDGET: f64 = 1e-6;
/// What a tenant may lose of its throughput, relative, against an equal split.
const SPLIT_LOSS: f64 = 1e-6;

/// A gain that counts as so much where it is less: nothing is not infinitely bad.
const GAIN_LEAST: f64 = 1e-9;

/// What may remain of a good, as a part of it, where nothing should.
const LEFT: f64 = 1e-9;

/// What everybody gets, and how that came about.
#[derive(Debug)]
pub(super) struct Cleared {
    pub status: Status,
    pub bundles: Vec<Bundle>,
}

/// Shares that fit, and with which nobody is worse off than with an equal split.
pub(super) fn clear<U: Utility>(market: &Market<'_, U>, found: &Found, turn: usize) -> Cleared {
    let sides = Sides::of(market, found);
    let settled = settled(market, found, sides.as_ref(), turn);
    let cleared = settled.or_else(|| sides.and_then(|sides| sides.as_far_as_possible(found.price(), turn)));
    cleared.unwrap_or_else(|| {
        let bundles = (0..market.tenants.len()).map(|tenant| market.fair(tenant)).collect();
        Cleared { status: Status::FallbackFair, bundles }
    })
}

/// Shares with which at most one tenant has not what it asks for, if there are such.
fn settled<U: Utility>(
    market: &Market<'_, U>,
    found: &Found,
    sides: Option<&Sides<'_, U>>,
    turn: usize,
) -> Option<Cleared> {
    let Some(sides) = sides else { return market.checked_mixes(Status::Exact, found.above.bundles.clone()) };
    let mixed = sides.mixed();
    let rigid = sides.rigid(&mixed);
    if rigid.is_empty() {
        return market.checked_mixes(Status::Mixed, mixed);
    }
    let whole = sides.packed(&rigid, None).and_then(|(bundles, _)| market.checked(Status::Whole, bundles));
    whole.or_else(|| sides.one_marginal(&rigid, turn))
}

/// What tenants ask for on both sides of a price: their own best at either.
struct Sides<'a, U> {
    market: &'a Market<'a, U>,
    /// With more memory.
    memory: &'a [Bundle],
    /// With more bandwidth.
    bandwidth: &'a [Bundle],
    /// What units cost on either side.
    prices: (Prices, Prices),
    /// The same mix for everybody, with which memory is just sold.
    part: f64,
    /// On both sides everybody has as much to spend. Where the dividend leaps instead, what its best is worth to a tenant leaps too.
    has_one_budget: bool,
}

impl<'a, U: Utility> Sides<'a, U> {
    /// None where one price clears the market.
    fn of(market: &'a Market<'a, U>, found: &'a Found) -> Option<Self> {
        let below = found.below.as_ref()?;
        let has_one_budget = (below.dividend / found.above.dividend - 1.0).abs() <= SAME_BUDGET;
        let (memory, bandwidth) = (&below.bundles[..], &found.above.bundles[..]);
        let part =
            ((1.0 - found.above.sum.memory) / (below.sum.memory - found.above.sum.memory)).clamp(0.0, 1.0);
        let prices = (market.prices(below.price), market.prices(found.above.price));
        Some(Self { market, memory, bandwidth, prices, part, has_one_budget })
    }

    /// Where throughputs leap so that nothing else suits: one is set aside, or all get a mix by which some lose, but nobody against an equal split.
    fn as_far_as_possible(&self, price: f64, turn: usize) -> Option<Cleared> {
        let mixed = self.mixed();
        let fixed = self.one_fixed(&self.rigid(&mixed), price, turn);
        fixed.or_else(|| self.market.checked(Status::Mixed, mixed))
    }

    fn mixed(&self) -> Vec<Bundle> {
        (0..self.memory.len()).map(|tenant| self.mix(tenant, self.part)).collect()
    }

    fn mix(&self, tenant: usize, part: f64) -> Bundle {
        self.bandwidth[tenant].towards(self.memory[tenant], part)
    }

    /// Those that lose by a mix: first those to whom the side with more memory is worth most against the other.
    fn rigid(&self, mixed: &[Bundle]) -> Vec<usize> {
        let value = |tenant: usize, bundle| self.market.tenants[tenant].utility.value(bundle);
        let loses = |tenant: &usize| {
            if self.is_mixed_well(*tenant) {
                return false;
            }
            let (one_value, other_value) =
                (value(*tenant, self.memory[*tenant]), value(*tenant, self.bandwidth[*tenant]));
            let due =
                if self.has_one_budget { one_value.max(other_value) } else { one_value.min(other_value) };
            let fair = value(*tenant, self.market.fair(*tenant));
            value(*tenant, mixed[*tenant]) < ((1.0 - MIX_LOSS) * due).max((1.0 - SPLIT_LOSS) * fair)
        };
        let mut rigid: Vec<usize> = (0..mixed.len()).filter(loses).collect();
        let leaning =
            |tenant: usize| value(tenant, self.memory[tenant]) / value(tenant, self.bandwidth[tenant]);
        rigid.sort_by(|one, other| leaning(*other).total_cmp(&leaning(*one)));
        rigid
    }

    /// Whether a tenant loses next to nothing by a mix, whatever it is worth to it: both bundles are one, or it is convex, so that a mix is worth no less
    /// than the lesser of both, and that is next to no less than the other.
    fn is_mixed_well(&self, tenant: usize) -> bool {
        let (one, other) = (self.memory[tenant], self.bandwidth[tenant]);
        one == other
            || self.market.tenants[tenant].utility.is_convex()
                && self.is_as_good(tenant, one, self.prices.0, other)
                && self.is_as_good(tenant, other, self.prices.1, one)
    }

    /// Whether what a convex tenant asks for at some prices is worth next to no less than something else: that, but for a small part of its bandwidth, it
    /// could have paid as well.
    fn is_as_good(&self, tenant: usize, asked: Bundle, prices: Prices, other: Bundle) -> bool {
        let spare = other.bandwidth - self.market.limits(tenant).least.bandwidth;
        prices.of(other) - prices.of(asked) <= prices.bandwidth * spare.min(MIX_LOSS * other.bandwidth)
    }

    /// Those that lose by a mix get what they ask for on one side or the other, and one of them what remains: the one that is best off with it, and
    /// among equals the next after the one whose turn it is.
    fn one_marginal(&self, rigid: &[usize], turn: usize) -> Option<Cleared> {
        let first = turn % rigid.len();
        let in_turn = rigid[first..].iter().chain(&rigid[..first]).take(MARGINAL_CANDIDATES_MAX);
        let packed = in_turn.filter_map(|tenant| Some((*tenant, self.packed(rigid, Some(*tenant))?)));
        let best =
            packed.reduce(|best, next| if next.1.1 > best.1.1 * (1.0 + SPLIT_LOSS) { next } else { best });
        let (tenant, (bundles, _)) = best?;
        self.market.checked(Status::OneMarginal { tenant }, bundles)
    }

    /// One of the rigid gets what it asks for on one side or the other, and the rest is a market of its own; the best such for all together.
    fn one_fixed(&self, rigid: &[usize], price: f64, turn: usize) -> Option<Cleared> {
        let sides = |tenant: &usize| [(*tenant, self.memory[*tenant]), (*tenant, self.bandwidth[*tenant])];
        let fixed = rigid.iter().take(FIXED_CANDIDATES_MAX).flat_map(sides);
        let cleared = fixed.filter_map(|(tenant, bundle)| {
            let bundles = self.beside(tenant, bundle, price, turn)?;
            let cleared = self.market.checked(Status::OneFixed { tenant }, bundles)?;
            Some((self.market.mean_gain(&cleared.bundles), cleared))
        });
        cleared.reduce(|best, next| if next.0 > best.0 { next } else { best }).map(|(_, cleared)| cleared)
    }

    /// What everybody has when one has this, and the others have a market for what is left.
    fn beside(&self, fixed: usize, bundle: Bundle, price: f64, turn: usize) -> Option<Vec<Bundle>> {
        let others = (0..self.memory.len()).filter(|tenant| *tenant != fixed);
        let tenants: Vec<Tenant<&dyn Utility>> =
            others.map(|tenant| self.market.tenants[tenant].borrowed()).collect();
        let left = self.left(&[bundle]);
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "what is left of whole units"
        )]
        let supply = Supply { memory_mib: left.memory as u64, bandwidth_mb_s: left.bandwidth as u64 };
        let weights: f64 = tenants.iter().map(|tenant| tenant.weight).sum();
        if tenants.is_empty() || supply.memory_mib == 0 || supply.bandwidth_mb_s == 0 {
            return None;
        }
        let market = Market { tenants: &tenants, supply, per_weight: 1.0 / weights, part: 1.0 };
        if (0..tenants.len()).any(|tenant| market.check_limits(tenant).is_err()) {
            return None;
        }
        let found = price::find(&market, Some(price), &mut vec![Mark::default(); tenants.len()]);
        let mut bundles = settled(&market, &found, Sides::of(&market, &found).as_ref(), turn)?.bundles;
        bundles.insert(fixed, bundle);
        Some(bundles)
    }

    /// The rigid on the memory side as long as there is memory for them, the others mixed, the marginal one with what remains; and what that is worth
    /// to it against its fair share. None where it does not fit.
    fn packed(&self, rigid: &[usize], marginal: Option<usize>) -> Option<(Vec<Bundle>, f64)> {
        let mut is_rigid = vec![false; self.memory.len()];
        rigid.iter().for_each(|tenant| is_rigid[*tenant] = true);
        let mut bundles = self.bandwidth.to_vec();
        let mut left = self.left(&bundles).memory;
        for tenant in rigid.iter().copied().filter(|tenant| Some(*tenant) != marginal) {
            let more = self.memory[tenant].memory - self.bandwidth[tenant].memory;
            if more <= left {
                left -= more;
                bundles[tenant] = self.memory[tenant];
            }
        }
        let flexible: Vec<usize> = (0..bundles.len()).filter(|tenant| !is_rigid[*tenant]).collect();
        let room: f64 =
            flexible.iter().map(|tenant| self.memory[*tenant].memory - self.bandwidth[*tenant].memory).sum();
        let mixes = |part: f64| {
            let mut mixed = bundles.clone();
            flexible.iter().for_each(|tenant| mixed[*tenant] = self.mix(*tenant, part));
            mixed
        };
        let part = if room > 0.0 { (left / room).clamp(0.0, 1.0) } else { 0.0 };
        let Some(marginal) = marginal else {
            let mixed = mixes(part);
            let left = self.market.part(self.left(&mixed));
            let fits = left.memory.abs() <= LEFT && left.bandwidth.abs() <= LEFT;
            return fits.then_some((mixed, 1.0));
        };
        let candidates =
            [part, 0.0, 1.0].into_iter().filter_map(|part| self.with_rest(mixes(part), marginal));
        candidates.reduce(|best, next| if next.1 > best.1 { next } else { best })
    }

    /// With all that remains for one of them, and what that is worth to it against its fair share.
    fn with_rest(&self, mut bundles: Vec<Bundle>, marginal: usize) -> Option<(Vec<Bundle>, f64)> {
        bundles[marginal] = Bundle::default();
        let all = Bundle::from(self.market.supply.all());
        let rest = self.left(&bundles);
        // What is missing by rounding is nothing.
        let nothing = |rest: f64, all: f64| if rest.abs() <= LEFT * all { 0.0 } else { rest };
        let rest = Bundle {
            memory: nothing(rest.memory, all.memory),
            bandwidth: nothing(rest.bandwidth, all.bandwidth),
        };
        let limits = self.market.limits(marginal);
        if rest.memory < limits.least.memory || rest.bandwidth < limits.least.bandwidth {
            return None;
        }
        bundles[marginal] = Bundle {
            memory: rest.memory.min(limits.most.memory),
            bandwidth: rest.bandwidth.min(limits.most.bandwidth),
        };
        let gain = self.market.gain(marginal, bundles[marginal]);
        Some((bundles, gain))
    }

    /// What is left of the supply.
    fn left(&self, bundles: &[Bundle]) -> Bundle {
        self.market.all().minus(bundles.iter().copied().sum())
    }
}

impl<U: Utility> Market<'_, U> {
    /// What a bundle is worth to a tenant against its fair share; 1 where both are worth nothing.
    pub(crate) fn gain(&self, tenant: usize, bundle: Bundle) -> f64 {
        let value = |bundle| self.tenants[tenant].utility.value(bundle);
        let (this, fair) = (value(bundle), value(self.fair(tenant)));
        if this == fair { 1.0 } else { this / fair }
    }

    /// Such bundles, if together they are no more than there is, and nobody has less than an equal split would give.
    fn checked(&self, status: Status, bundles: Vec<Bundle>) -> Option<Cleared> {
        self.checked_for(status, bundles, |_| true)
    }

    /// The same of what tenants ask for, or of mixes of it: each could have paid a fair share, so that who is convex has no less.
    fn checked_mixes(&self, status: Status, bundles: Vec<Bundle>) -> Option<Cleared> {
        self.checked_for(status, bundles, |tenant| !self.tenants[tenant].utility.is_convex())
    }

    fn checked_for(
        &self,
        status: Status,
        bundles: Vec<Bundle>,
        is_looked_at: impl Fn(usize) -> bool,
    ) -> Option<Cleared> {
        let sum = self.part(bundles.iter().copied().sum());
        let fits = sum.memory <= 1.0 + LEFT && sum.bandwidth <= 1.0 + LEFT;
        let is_fair = |(tenant, bundle): (usize, &Bundle)| {
            !is_looked_at(tenant) || self.gain(tenant, *bundle) >= 1.0 - SPLIT_LOSS
        };
        (fits && bundles.iter().enumerate().all(is_fair)).then_some(Cleared { status, bundles })
    }

    /// The mean of the logarithms of what bundles are worth against fair shares, by weight.
    pub(crate) fn mean_gain(&self, bundles: &[Bundle]) -> f64 {
        let gain = |(tenant, bundle): (usize, &Bundle)| {
            self.weight(tenant) * self.gain(tenant, *bundle).max(GAIN_LEAST).ln()
        };
        bundles.iter().enumerate().map(gain).sum()
    }
}

impl<U: Utility> Tenant<U> {
    /// The same, whatever its utility is.
    fn borrowed(&self) -> Tenant<&dyn Utility> {
        Tenant { weight: self.weight, least: self.least, most: self.most, utility: &self.utility }
    }
}
