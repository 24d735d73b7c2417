//! The interface between the market and its tenants: the value of a bundle and the demand at given
//! prices.

use super::goods::{Bundle, Prices};

/// Constraint on the cost of a bundle.
#[derive(Clone, Copy, Debug)]
pub struct BudgetConstraint {
    /// Largest cost. It suffices for the tenant's minimum share.
    pub budget: f64,
    /// Price per unit of each good. At most one of them is 0.
    pub prices: Prices,
}

/// Limits of a tenant's share.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Minimum of both goods.
    pub min: Bundle,
    /// Maximum of both goods.
    pub max: Bundle,
}

/// Demand of a tenant at given prices.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Demand {
    /// Best affordable bundle.
    pub bundle: Bundle,
    /// Whether the tenant is satiated: part of its budget remains, and spending slightly more would
    /// not raise its value.
    pub satiated: bool,
}

/// State that a tenant keeps between evaluations of its demand within one market. The next search
/// starts from it. All zero at first.
#[derive(Clone, Copy, Debug, Default)]
pub struct WarmStart {
    /// Position of the last answer, such as a knot or a grid index; its meaning belongs to the
    /// utility. Only this field is kept for the next market.
    pub position: u32,
    /// Exclusive lower bound of the query for which `answer` is valid; the query belongs to the
    /// utility.
    pub lower: f64,
    /// Inclusive upper bound of that query.
    pub upper: f64,
    /// Last answer.
    pub answer: f64,
}

impl WarmStart {
    /// Returns whether the tenant has not been evaluated in this market yet.
    pub(super) fn is_new(&self) -> bool {
        self.lower == self.upper
    }
}

/// Value of bundles to a tenant: its data access throughput, the function f of Spirit. It is
/// monotone: more of a good is never worth less.
///
/// Only the order of values matters. Values of different tenants are never compared.
pub trait Utility {
    /// Returns the value of a bundle: finite, at least 0.
    fn value(&self, bundle: Bundle) -> f64;

    /// Returns whether the utility behaves like the slowdown of a convex curve. Three properties
    /// follow:
    ///
    /// - A bundle between two others is worth no less than the worse of them.
    /// - With constant memory, a relative loss of bandwidth causes no larger relative loss of
    ///   throughput.
    /// - A tenant that spends its whole budget and demands the same memory at two prices, or the
    ///   same bandwidth and nearly the same memory, usually does so at the prices between.
    ///
    /// The market then skips evaluations of mixtures and of prices within the bracket.
    fn is_convex(&self) -> bool {
        false
    }

    /// Returns the bundle of the highest value among those within the limits and the budget; among
    /// equals, the cheapest.
    ///
    /// `warm` holds the state that the last evaluation of this tenant left.
    fn demand(&self, constraint: &BudgetConstraint, within: &Limits, warm: &mut WarmStart) -> Demand;

    /// Announces that the demand will be evaluated soon. An implementation may start loading its
    /// data into the cache, so that many tenants wait for memory together. It does not change
    /// results.
    fn prefetch(&self, _mark: &WarmStart) {}
}

impl<U: Utility + ?Sized> Utility for &U {
    fn value(&self, bundle: Bundle) -> f64 {
        (**self).value(bundle)
    }

    fn is_convex(&self) -> bool {
        (**self).is_convex()
    }

    fn demand(&self, constraint: &BudgetConstraint, within: &Limits, warm: &mut WarmStart) -> Demand {
        (**self).demand(constraint, within, warm)
    }

    fn prefetch(&self, warm: &WarmStart) {
        (**self).prefetch(warm);
    }
}

impl<U: Utility + ?Sized> Utility for Box<U> {
    fn value(&self, bundle: Bundle) -> f64 {
        (**self).value(bundle)
    }

    fn is_convex(&self) -> bool {
        (**self).is_convex()
    }

    fn demand(&self, constraint: &BudgetConstraint, within: &Limits, warm: &mut WarmStart) -> Demand {
        (**self).demand(constraint, within, warm)
    }

    fn prefetch(&self, warm: &WarmStart) {
        (**self).prefetch(warm);
    }
}
