//! QoS monitor of running VMs (Pond, sections 4.5 B and 4.6). A [`Judge`] follows one VM. It
//! derives from samples whether pool memory slows the VM down beyond the performance degradation
//! margin (PDM). [`hourly_budget`] limits the number of migration requests.
//!
//! A VM is judged in two steps. The first step decides whether the VM must be monitored: it is
//! placed entirely on the pool, or its frigid memory was overpredicted, so that it accesses its
//! pool node. The second step estimates the VM's loss with a [`LossModel`], from the counters of the
//! running VM, the fraction of its loads that the pool serves, and the latency of the pool. Pond
//! classifies workloads with the sensitivity model instead. An estimate of the loss keeps the
//! distance to the margin, so the threshold can allow for the error of each estimate.
//!
//! Erratum. Section 4.6 starts a migration if the sensitivity model does *not* expect an excessive
//! loss. This module starts a migration if the model expects an excessive loss, as section 4.5 and
//! figure 6 do.

mod budget;
mod judge;
mod loss;
mod moved;
mod sample;

pub use budget::{hourly_budget, select_most_harmed};
pub use judge::{Judge, Judgement, Reason, Verdict};
pub use loss::{
    Evidence, LATENCY_RATIO_NAME, LabelledRun, LossAccuracy, LossEstimate, LossModel, POOL_LOADS_NAME,
    Quality,
};
pub use moved::{MeasuredLoss, MoveMeasurement, MoveProgress};
pub use sample::{AccessedShare, AccessedShareError, LoadSource, Placement, PoolLoads, Sample, SampleError};

#[cfg(test)]
mod tests;
