//! Prediction before a VM starts (Pond, section 4.6): how much of its memory stays untouched,
//! whether its workload tolerates pool latency, and how much risk each prediction may take.
//!
//! - [`frigid`] predicts frigid (never touched) memory with quantile regression trees, calibrates
//!   the prediction on recent outcomes and backtests it.
//! - [`sensitivity`] predicts whether pool memory slows a workload down by more than the
//!   performance degradation margin (PDM), from core counters.
//! - [`combination`] chooses the operating points of both predictions (Pond, Eq. 1).
//! - [`trees`], [`import`], [`file`](mod@file) and [`table`] hold tree ensembles, models trained
//!   elsewhere, the model file format and CSV tables of ended VMs.
//!
//! Models are data: they are trained from outcomes that the caller passes in. Bytes and time are
//! arguments; the crate reads no clock and no file and keeps no state.
//!
//! ```
//! use prediction::combination::{FrigidPoint, InsensitivityPoint, VmMix, solve};
//! use units::Fraction;
//!
//! let share = |part| Fraction::new(part).unwrap();
//! let insensitive = [InsensitivityPoint { fp: share(0.02), placed: share(0.30) }];
//! let frigid = [FrigidPoint { op: share(0.04), share: share(0.20) }];
//! let mix = VmMix { history: share(0.8), exceeds: share(0.25) };
//! // At most 2.4 % of VMs may be slowed down beyond the margin.
//! let chosen = solve(&insensitive, &frigid, mix, share(0.024));
//! assert!((chosen.pool - 0.392).abs() < 1e-9);
//! ```
#![forbid(unsafe_code)]

pub mod combination;
pub mod file;
pub mod frigid;
pub mod import;
pub mod sensitivity;
pub mod table;
pub mod trees;
