//! Early eviction to memory outside of the host (Glitter, section III).
//!
//! A process that needs a page waits if the host has no free memory for it. Eviction usually begins when
//! the usage reaches a fixed threshold shortly below the limit. If the memory of a tenant grows faster
//! than it can be evicted, this is too late. [`Policy`] lowers the threshold of such a tenant, so that its
//! evictions begin earlier, and raises the threshold when early eviction does not help. It also
//! classifies the flows of evicted data by their urgency, so that a network or an I/O scheduler can
//! prefer the flows of tenants that wait.
//!
//! | rule | function or type | section of the paper |
//! |---|---|---|
//! | earlier eviction | [`lowered_threshold`], Eq. 2 | III-B |
//! | later eviction after more cache misses | [`pulled_back_threshold`], Eq. 4 | III-B |
//! | class of a flow | [`FlowClass`], Algorithm 1 | III-C |
//!
//! Early eviction costs time if the tenant needs the evicted memory again. The paper's scheme can then be
//! slower than a fixed threshold. [`Settings::loss_limit`] limits this loss.
//!
//! A tenant that grows by 600 MB/s while 300 MB/s are evicted gets a threshold of half of its limit:
//!
//! ```
//! use tiering::{evict::{Counters, Policy, Settings, TenantSample}, fair::TenantId};
//! use units::{Bytes, Ns};
//!
//! # fn main() -> Result<(), tiering::evict::SettingsError> {
//! let mut policy = Policy::new(Settings::default())?;
//! let sample = |seconds: u64| TenantSample {
//!     id: TenantId(1),
//!     limit: Bytes::gib(16),
//!     usage: Bytes::new(600_000_000 * seconds),
//!     is_blocked: false,
//!     counters: Counters {
//!         grown: Bytes::new(600_000_000 * seconds),
//!         evicted: Bytes::new(300_000_000 * seconds),
//!         evicting: Ns::secs(seconds),
//!         ..Counters::default()
//!     },
//! };
//! policy.step(Ns::secs(0), &[sample(0)]);
//! let reports = policy.step(Ns::secs(1), &[sample(1)]);
//! assert_eq!(reports[0].threshold, Bytes::gib(8));
//! # Ok(())
//! # }
//! ```

mod early_loss;
mod equations;
mod policy;
mod sample;
mod settings;

pub use equations::{
    CLASSES, ExhaustionLimits, FlowClass, PullBack, lowered_threshold, pulled_back_threshold,
};
pub use policy::Policy;
pub use sample::{Counters, TenantReport, TenantSample, ThresholdChange};
pub use settings::{Settings, SettingsError};

#[expect(clippy::cast_precision_loss, reason = "rates and thresholds need no more than 53 bits")]
fn to_f64(number: u64) -> f64 {
    number as f64
}

#[cfg(test)]
mod tests;
