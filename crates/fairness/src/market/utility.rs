//! What shares are worth to a tenant, and what it would buy.

use super::goods::{Bundle, Prices};

/// What a tenant has to spend.
#[derive(Clone, Copy, Debug)]
pub struct Purse {
    /// How much; enough for the least it must have.
    pub budget: f64,
    /// What a unit costs; one of both prices may be 0.
    pub prices: Prices,
}

/// Between what a tenant's share must lie.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Of both no less than this.
    pub least: Bundle,
    /// Of both no more than this.
    pub most: Bundle,
}

/// What a tenant asks for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Asked {
    /// This.
    pub bundle: Bundle,
    /// It keeps some of its money: nothing that a little more could buy is worth more to it.
    pub content: bool,
}

/// What a tenant remembers between two questions of one market, to answer the next the sooner: all nothing at first.
#[derive(Clone, Copy, Debug, Default)]
pub struct Mark {
    /// Where it found its last answer: for the tenant to say what that means. All that is left of a mark in the next market.
    pub at: u32,
    /// What was asked may lie between these, and the answer is the same: for the tenant to say of what.
    pub above: f64,
    /// See `above`.
    pub upto: f64,
    /// The answer.
    pub answer: f64,
}

impl Mark {
    /// Whether nothing was written yet in this market.
    pub(super) fn is_new(&self) -> bool {
        self.above == self.upto
    }
}

/// What shares are worth to a tenant: its data access throughput, Spirit's f. More of something is never worth less.
///
/// Only the order matters: values of two tenants are never compared.
pub trait Utility {
    /// What a bundle is worth; 0 or more, and finite.
    fn value(&self, bundle: Bundle) -> f64;

    /// Whether it is as a slowdown by a convex curve is: between two bundles none is worth less than the lesser of both; with the same memory a part less
    /// bandwidth takes no larger part of throughput; and who spends all it has and asks for the same memory at two prices, or for the same bandwidth and next
    /// to the same memory, mostly does so at those between. Then it need not be asked what mixes are worth to it, nor at each price before the last.
    fn is_convex(&self) -> bool {
        false
    }

    /// The bundle within limits that is worth most of those that the purse can pay, and the cheapest of them.
    ///
    /// The mark is the tenant's own: what it wrote there last.
    fn asks(&self, purse: &Purse, within: &Limits, mark: &mut Mark) -> Asked;

    /// It is asked soon: whoever looks at much memory may begin to, so that many who wait for memory do so together. Nothing comes of it but time.
    fn look_ahead(&self, _mark: &Mark) {}
}

impl<U: Utility + ?Sized> Utility for &U {
    fn value(&self, bundle: Bundle) -> f64 {
        (**self).value(bundle)
    }

    fn is_convex(&self) -> bool {
        (**self).is_convex()
    }

    fn asks(&self, purse: &Purse, within: &Limits, mark: &mut Mark) -> Asked {
        (**self).asks(purse, within, mark)
    }

    fn look_ahead(&self, mark: &Mark) {
        (**self).look_ahead(mark);
    }
}

impl<U: Utility + ?Sized> Utility for Box<U> {
    fn value(&self, bundle: Bundle) -> f64 {
        (**self).value(bundle)
    }

    fn is_convex(&self) -> bool {
        (**self).is_convex()
    }

    fn asks(&self, purse: &Purse, within: &Limits, mark: &mut Mark) -> Asked {
        (**self).asks(purse, within, mark)
    }

    fn look_ahead(&self, mark: &Mark) {
        (**self).look_ahead(mark);
    }
}
