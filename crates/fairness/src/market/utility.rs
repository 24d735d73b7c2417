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

/// What shares are worth to a tenant: its data access throughput, Spirit's f. More of something is never worth less.
///
/// Only the order matters: values of two tenants are never compared.
pub trait Utility {
    /// What a bundle is worth; 0 or more, and finite.
    fn value(&self, bundle: Bundle) -> f64;

    /// The bundle within limits that is worth most of those that the purse can pay, and the cheapest of them.
    ///
    /// The mark is the tenant's own, 0 at first: whatever it wrote there last, to find this the sooner.
    fn asks(&self, purse: &Purse, within: &Limits, mark: &mut u32) -> Asked;
}

impl<U: Utility + ?Sized> Utility for &U {
    fn value(&self, bundle: Bundle) -> f64 {
        (**self).value(bundle)
    }

    fn asks(&self, purse: &Purse, within: &Limits, mark: &mut u32) -> Asked {
        (**self).asks(purse, within, mark)
    }
}

impl<U: Utility + ?Sized> Utility for Box<U> {
    fn value(&self, bundle: Bundle) -> f64 {
        (**self).value(bundle)
    }

    fn asks(&self, purse: &Purse, within: &Limits, mark: &mut u32) -> Asked {
        (**self).asks(purse, within, mark)
    }
}
