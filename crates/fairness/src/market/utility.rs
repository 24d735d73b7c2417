//! Interface between the market and its tenants: the value of a bundle to a tenant, and its demand
//! at given prices.

use super::goods::{Bundle, Prices};

/// Constraint on the cost of a bundle.
#[derive(Clone, Copy, Debug)]
pub struct BudgetConstraint {
    /// Largest cost of a bundle. The tenant's minimum share does not cost more.
    pub budget: f64,
    /// Price per unit of each good. At most one of the two prices is 0.
    pub prices: Prices,
}

/// Limits of a tenant's share, in MiB of memory and MB/s of bandwidth.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Minimum share of both goods.
    pub min: Bundle,
    /// Maximum share of both goods.
    pub max: Bundle,
}

/// Demand of a tenant at given prices.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Demand {
    /// Affordable bundle of the highest value.
    pub bundle: Bundle,
    /// Whether the tenant is satiated: part of its budget remains, and spending slightly more would
    /// not raise the value of its bundle.
    pub satiated: bool,
}

/// State that an evaluation of a tenant's demand leaves for the next evaluation in the same market.
/// All fields are 0 before the first evaluation. Each utility defines their meaning.
#[derive(Clone, Copy, Debug, Default)]
pub struct DemandHint {
    /// Position of the last answer, such as an index of a knot or of a grid point.
    pub position: u32,
    /// Exclusive lower bound of the queries for which `answer` is valid.
    pub lower: f64,
    /// Inclusive upper bound of the queries for which `answer` is valid.
    pub upper: f64,
    /// Answer to the last query.
    pub answer: f64,
}

/// Value of bundles to a tenant: its data access throughput, the function f of Spirit. The value
/// must not fall if the amount of a good increases.
///
/// Only the order of values matters. Values of different tenants are never compared.
pub trait Utility {
    /// Returns the value of a bundle. The value must be finite and at least 0.
    fn value(&self, bundle: Bundle) -> f64;

    /// Returns the bundle of the highest value within the limits and the budget. Returns the
    /// cheapest of several bundles of the same value.
    ///
    /// `hint` holds the state of the last evaluation of this tenant, and is updated.
    fn demand(&self, constraint: &BudgetConstraint, within: &Limits, hint: &mut DemandHint) -> Demand;
}

impl<U: Utility + ?Sized> Utility for &U {
    fn value(&self, bundle: Bundle) -> f64 {
        (**self).value(bundle)
    }

    fn demand(&self, constraint: &BudgetConstraint, within: &Limits, hint: &mut DemandHint) -> Demand {
        (**self).demand(constraint, within, hint)
    }
}

impl<U: Utility + ?Sized> Utility for Box<U> {
    fn value(&self, bundle: Bundle) -> f64 {
        (**self).value(bundle)
    }

    fn demand(&self, constraint: &BudgetConstraint, within: &Limits, hint: &mut DemandHint) -> Demand {
        (**self).demand(constraint, within, hint)
    }
}
