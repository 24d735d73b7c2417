//! Fair sharing of memory tiers among tenants (Equilibria, section IV).
//!
//! An operator gives each tenant two limits per tier. The *protection* is the amount of memory that
//! is exempt from demotion. The *bound* is the largest amount that the tenant may use. Tenants may
//! borrow free memory above their protection. When memory becomes scarce, [`Policy`] demotes
//! tenants in proportion to their usage above the protection, slows down their promotions, and
//! limits the promotions of tenants whose pages move back and forth between tiers (thrashing).
//!
//! The policy receives counters and returns orders. It never observes the demand of a tenant.
//!
//! | rule | function or type | section of the paper |
//! |---|---|---|
//! | memory to demote | [`demotion_target`], Eq. 1 | IV-D |
//! | promotion rate | [`promotion_factor`], Eq. 2 | IV-E |
//! | detection of thrashing | [`ThrashTable`] | IV-F |
//! | limit for thrashing tenants | [`THRASH_LEVEL_MAX`] | IV-F |
//!
//! A tenant above its protection is demoted when memory becomes scarce:
//!
//! ```
//! use tiering::fair::{FAST, HostSample, Order, Policy, Settings, TenantId, TenantSample, TierSample};
//! use units::{Bytes, Ns};
//!
//! # fn main() -> Result<(), tiering::fair::SettingsError> {
//! let mut policy = Policy::new(Settings::default())?;
//! let tier = |capacity, free| TierSample { capacity: Bytes::gib(capacity), free: Bytes::gib(free) };
//! let host = HostSample::new(Ns::secs(1), &[tier(256, 0), tier(64, 60)]);
//! let tenant = |id, usage| {
//!     let mut tenant = TenantSample::new(TenantId(id));
//!     tenant.tiers[FAST].usage = Bytes::gib(usage);
//!     tenant.tiers[FAST].protection = Bytes::gib(80);
//!     tenant
//! };
//! let decision = policy.step(&host, &[tenant(1, 186), tenant(2, 70)]);
//! let demoted: Vec<TenantId> = decision
//!     .orders()
//!     .iter()
//!     .filter_map(|order| match order {
//!         Order::Demote { tenant, .. } => Some(*tenant),
//!         Order::LimitPromotion { .. } => None,
//!     })
//!     .collect();
//! assert_eq!(demoted, [TenantId(1)]);
//! println!("{}", decision.tenants()[0]);
//! # Ok(())
//! # }
//! ```

mod decision;
mod distribution;
mod equations;
mod policy;
mod report;
mod sample;
mod settings;
mod tenant_state;
mod thrash_table;
mod thrash_throttle;

pub use decision::{Candidates, Decision, Order, PromotionBudget, Urgency};
pub use equations::{Factor, THRASH_LEVEL_MAX, demotion_target, promotion_factor};
pub use policy::Policy;
pub use report::{Demotion, DemotionReason, TenantReport, TenantTierReport, ThrottleReason, TierReport};
pub use sample::{Counters, FAST, HostSample, TenantId, TenantSample, TenantTier, TierSample};
pub use settings::{Settings, SettingsError, ThrashSettings};
pub use thrash_table::{ThrashCounts, ThrashTable, ThrashTableSettings};
pub use thrash_throttle::ThrashState;

#[cfg(test)]
mod tests;
