//! Fair allocation of a host's local memory and of the bandwidth of its link to remote memory: the
//! Symbiosis algorithm of Spirit.
//!
//! Each tenant has a weight. [`market`] gives each tenant a budget in proportion to its weight and
//! finds prices at which both resources are sold. Each tenant is then at least as well off as with
//! an equal split (sharing incentive). It also prefers its own share to that of any other tenant
//! (envy-freeness). [`profile`] estimates the utility of a tenant from measurements: its miss-ratio
//! curve ([`curve`]) and the bandwidth that the tenant can use. [`epoch`] limits the change of
//! shares per epoch.
//!
//! The crate is pure. The caller takes the measurements and enforces the shares.
//!
//! A cache and a streaming tenant share a host:
//!
//! ```
//! use fairness::curve::{Knot, MissCurve};
//! use fairness::market::{Market, Slowdown, Supply, Tenant};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let supply = Supply::new(8192, 1000);
//! let tenant = |footprint, wanted| -> Result<_, Box<dyn std::error::Error>> {
//!     let knots = vec![Knot { memory: 0.0, misses: 1.0 }, Knot { memory: footprint, misses: 0.0 }];
//!     let utility = Slowdown::new(MissCurve::new(knots)?, 100.0, wanted)?;
//!     Ok(Tenant::new(1.0, supply, utility))
//! };
//! let tenants = [tenant(6000.0, 100.0)?, tenant(100_000.0, 900.0)?];
//!
//! let market = Market::new(supply, &tenants)?;
//! let outcome = market.clear(0);
//! assert!(outcome.shares[0].memory_mib() > outcome.shares[1].memory_mib());
//! assert!(outcome.shares[0].bandwidth_mb_s() < outcome.shares[1].bandwidth_mb_s());
//!
//! let certificate = market.certify(&outcome);
//! assert!(certificate.sharing_incentive >= 1.0 - 1e-6);
//! # Ok(())
//! # }
//! ```
#![forbid(unsafe_code)]

pub mod curve;
pub mod epoch;
pub mod market;
pub mod profile;
