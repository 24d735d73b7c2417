//! Predictions for a VM before it starts (Pond, section 4.6): how much of its memory stays
//! untouched, and whether its workload tolerates pool latency. The crate also chooses how much risk
//! each prediction may take, and judges whether pool memory slows a running VM down.
//!
//! - [`frigid`] predicts frigid (never touched) memory with quantile regression trees, calibrates
//!   the prediction on recent outcomes and backtests it.
//! - [`sensitivity`] predicts from core counters whether pool memory slows a workload down by more
//!   than the performance degradation margin (PDM).
//! - [`qos`] judges running VMs and limits migration requests (Pond, sections 4.5 B and 4.6).
//! - [`combination`] chooses the operating points of both predictions (Pond, Eq. 1), and
//!   [`operating_point`] applies the choice to a VM.
//! - [`trees`] trains and evaluates tree ensembles, [`import`] reads models trained elsewhere,
//!   [`file`](mod@file) is the model file format, [`table`] reads CSV tables of ended VMs, and
//!   [`labels`] reads CSV tables of labelled workloads.
//!
//! The caller passes in the outcomes to train on, file contents as bytes, and the time. The crate
//! reads no clock and no file and keeps no state.
//!
//! ```
//! use prediction::combination::{FrigidPoint, InsensitivityPoint, VmMix, choose_combination};
//! use units::Fraction;
//!
//! let share = |part| Fraction::new(part).unwrap();
//! let insensitive = [InsensitivityPoint { fp: share(0.02), placed: share(0.30) }];
//! let frigid = [FrigidPoint { op: share(0.04), share: share(0.20) }];
//! let mix = VmMix { history: share(0.8), exceeds: share(0.25) };
//! // At most 2.4 % of VMs may be slowed down beyond the margin.
//! let chosen = choose_combination(&insensitive, &frigid, mix, share(0.024));
//! assert!((chosen.pool - 0.392).abs() < 1e-9);
//! ```
#![forbid(unsafe_code)]

pub mod combination;
pub mod file;
pub mod frigid;
pub mod import;
pub mod labels;
pub mod operating_point;
pub mod qos;
pub mod sensitivity;
pub mod table;
pub mod trees;
