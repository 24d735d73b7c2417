//! Predictions in production: properties of VMs before they start, the serving models, and
//! outcomes. Prediction quality is left to `prediction`, the split of a VM's memory to `plan`.
//!
//! ```text
//!   PlanVm ─▶ predict ─▶ plan ─reservation─▶ running VM ─touched memory─▶ ended VM ─▶ outcome
//!                ▲                                                                       │
//!                └── model, operating point ◀── training, promotion ◀── store ◀──────────┘
//! ```

mod explanation;
mod models;
mod outcome_log;
mod state;

use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use prediction::{
    file::{Content, ModelFile},
    frigid::{Calibration, VmRequest},
};
use tokio::sync::{Semaphore, watch};
use units::{Bytes, HostId, Name, Ns, ReservationId, UnixMs, limits::EXPLAIN_CALLS_IN_FLIGHT_MAX};

pub use explanation::facts;
pub use models::{Labels, ModelError, ModelSummary, Training};
pub use state::{SensitivityPrediction, VmForecast, ended_vm};

use crate::{
    driver::{DriverError, Handle},
    metrics::Metrics,
    operating_point::{OperatingPoint, OperatorLimits},
    plan_request::Plan,
    records::forecast_rows::{self, EndedVm, VmStart},
    store::{Scan, StoreError},
};
use models::ModelRegistry;
use outcome_log::WriteQueue;
use state::State;

/// Settings of the operator.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Settings {
    /// Risk limits.
    pub limits: OperatorLimits,
    /// Retention of outcomes.
    pub retention: Ns,
}

/// Predictions of a rack.
#[derive(Debug)]
pub struct Forecasts {
    state: RwLock<State>,
    registry: tokio::sync::Mutex<ModelRegistry>,
    /// One permit: trainings run one at a time.
    training_permits: Arc<Semaphore>,
    /// Permits for readings of many outcomes, or of a model.
    reading_permits: Arc<Semaphore>,
    driver: Handle,
    metrics: Arc<Metrics>,
    settings: watch::Receiver<Settings>,
    write_queue: WriteQueue,
}

/// Predictions in the store, read before writers start.
#[derive(Debug)]
pub struct StoredForecasts(forecast_rows::StoredForecasts);

/// Reads the stored predictions.
///
/// # Errors
/// The store cannot be read.
pub fn load(store: &mut dyn Scan) -> Result<StoredForecasts, StoreError> {
    forecast_rows::load(store).map(StoredForecasts)
}

impl Forecasts {
    /// Creates predictions from the store's contents.
    pub fn new(
        StoredForecasts(stored): StoredForecasts,
        driver: Handle,
        metrics: Arc<Metrics>,
        settings: watch::Receiver<Settings>,
    ) -> Self {
        let limits = settings.borrow().limits;
        let mut state = State::new(limits);
        let registry = ModelRegistry::of(&stored);
        for (kind, version) in registry.serving() {
            let bytes = stored.models.iter().find(|(of, number, _)| (*of, *number) == (kind, version));
            match bytes.map(|(_, _, bytes)| ModelFile::read(bytes)) {
                Some(Ok(file)) => {
                    let calibration = calibration_of(&file);
                    state.serve(version, file, calibration, OperatingPoint::without_pool(limits));
                }
                Some(Err(error)) => {
                    let (kind, error) = (kind.name(), units::chain(&error));
                    tracing::error!(kind, version, error, "serving model is unusable: train a new one");
                }
                None => tracing::error!(kind = kind.name(), version, "serving model is missing in the store"),
            }
        }
        stored.outcomes.iter().for_each(|(number, vm)| state.load(*number, vm));
        stored.starts.into_iter().for_each(|(id, start)| state.load_start(id, start));
        let inputs = state.point_inputs(limits);
        state.set_point(inputs.serving, inputs.choose());
        let forecasts = Self {
            state: RwLock::new(state),
            registry: tokio::sync::Mutex::new(registry),
            training_permits: Arc::new(Semaphore::new(1)),
            reading_permits: Arc::new(Semaphore::new(EXPLAIN_CALLS_IN_FLIGHT_MAX)),
            driver,
            metrics,
            settings,
            write_queue: WriteQueue::default(),
        };
        forecasts.update_metrics();
        forecasts
    }

    /// Uses a poisoned state as well: a worse prediction harms less than none.
    fn read(&self) -> RwLockReadGuard<'_, State> {
        self.state.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, State> {
        self.state.write().unwrap_or_else(PoisonError::into_inner)
    }

    fn limits(&self) -> OperatorLimits {
        self.settings.borrow().limits
    }

    /// Predicts the memory of a VM that is planned now.
    ///
    /// # Errors
    /// The manager is stopping.
    pub fn predict(&self, plan: &Plan) -> Result<VmForecast, DriverError> {
        let begins = self.driver.read(|_, when| when.wall)?;
        let request = VmRequest {
            groups: plan.groups.clone(),
            requested: plan.memory,
            cores: (plan.cores > 0).then_some(plan.cores.into()),
            begins,
        };
        Ok(self.read().predict(request, plan.counters))
    }

    /// Records a plan, with its inputs, until the VM has its memory.
    pub fn record_plan(&self, vm: &Name, start: VmStart) {
        self.write().add_plan(vm, start);
    }

    /// Adds VMs that ended elsewhere or earlier, durably, and returns the number of new ones.
    ///
    /// # Errors
    /// The store failed: none was added.
    pub async fn add_outcomes(&self, vms: Vec<EndedVm>) -> Result<u32, DriverError> {
        let (numbers, mut writes): (Vec<u64>, Vec<_>) = {
            let mut state = self.write();
            vms.into_iter().filter_map(|vm| state.add(vm)).unzip()
        };
        let added = u32::try_from(numbers.len()).expect("the size of a request is limited");
        writes.extend(self.write().expire(self.retention_start()?));
        self.driver.write_entries(writes).await.inspect_err(|_| self.write().remove(&numbers))?;
        Ok(added)
    }

    /// Returns the start of the retention: outcomes that ended before are deleted.
    ///
    /// # Errors
    /// The manager is stopping.
    pub fn retention_start(&self) -> Result<UnixMs, DriverError> {
        let (retention, now) = (self.settings.borrow().retention, self.driver.read(|_, when| when.wall)?);
        Ok(UnixMs(now.0.saturating_sub(retention.as_ms())))
    }

    /// Returns ended VMs with numbers above `after`, and the start of the next page.
    ///
    /// # Errors
    /// The store cannot be read.
    pub async fn outcomes(
        &self,
        after: u64,
        limit: usize,
    ) -> Result<(Vec<EndedVm>, Option<u64>), ModelError> {
        let vms = self.stored_outcomes().await?;
        let mut later = vms.into_iter().filter(|(number, _)| *number > after);
        let page: Vec<(u64, EndedVm)> = later.by_ref().take(limit).collect();
        let next = later.next().and(page.last()).map(|(number, _)| *number);
        Ok((page.into_iter().map(|(_, vm)| vm).collect(), next))
    }

    /// Records the memory touched by the VMs of a host, as measured by its agent.
    ///
    /// # Errors
    /// The manager is stopping.
    pub fn record_touched(
        &self,
        host: HostId,
        touched: &[(ReservationId, Bytes)],
    ) -> Result<(), DriverError> {
        if !touched.is_empty() {
            let now = self.driver.read(|_, when| when.wall)?;
            let mut state = self.write();
            touched.iter().for_each(|(id, bytes)| state.record_peak(host, *id, *bytes, now));
        }
        Ok(())
    }

    /// Resets measurements of a host whose agent connected or disconnected: the agent reports them
    /// again.
    pub fn reset_peaks(&self, host: HostId) {
        self.write().clear_peaks(host);
    }

    /// Updates the metrics of serving models and the operating point.
    fn update_metrics(&self) {
        let state = self.read();
        self.metrics.set_forecasts(state.serving(), state.point(), state.outcomes());
    }
}

/// Returns the calibration of a new model from its backtest.
fn calibration_of(file: &ModelFile) -> Calibration {
    match &file.content {
        Content::Frigid { calibration, .. } => calibration.clone(),
        Content::Sensitivity { .. } => Calibration::default(),
    }
}
