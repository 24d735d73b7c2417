//! Predicts the memory of new VMs with the serving models, and records the outcomes of ended VMs.
//! The crate `prediction` contains the models, and the module `plan` splits a VM's memory.
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
mod stored_moves;

use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use pool::{
    audit::{Actor, Decision, DecisionKind, LossByMove, Subject},
    manager::Request,
};
use prediction::{
    file::{Content, ModelFile},
    frigid::{Calibration, VmRequest},
    operating_point::{OperatingPoint, OperatorLimits},
    qos::MeasuredLoss,
};
use tokio::sync::{Semaphore, watch};
use units::{Bytes, Fraction, HostId, Name, Ns, ReservationId, UnixMs, limits::EXPLAIN_CALLS_IN_FLIGHT_MAX};

pub use explanation::explain_prediction;
pub use models::{Evaluation, Labels, ModelError, ModelSummary, Training};
pub use state::{SensitivityPrediction, ServingLossModel, VmForecast, new_ended_vm};

use crate::{
    driver::{DriverError, Handle},
    metrics::Metrics,
    plan_request::Plan,
    records::forecast_rows::{self, EndedVm, MeasuredMove, VmStart},
    store::{Scan, StoreError},
};
use models::ModelRegistry;
use outcome_log::WriteQueue;
use state::State;

/// Section `[prediction]` of `rack.toml`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Settings {
    /// Limits on the fraction of slowed-down VMs.
    pub limits: OperatorLimits,
    /// Age at which outcomes of ended VMs are deleted.
    pub retention: Ns,
}

/// Prediction service of a rack: models, running VMs and outcomes.
#[derive(Debug)]
pub struct Forecasts {
    state: RwLock<State>,
    registry: tokio::sync::Mutex<ModelRegistry>,
    /// Limits trainings to one at a time.
    training_permits: Arc<Semaphore>,
    /// Limits the number of concurrent reads of models and of the stored outcomes.
    reading_permits: Arc<Semaphore>,
    driver: Handle,
    metrics: Arc<Metrics>,
    settings: watch::Receiver<Settings>,
    write_queue: WriteQueue,
}

/// Models, running VMs and outcomes that were read from the store at the start.
#[derive(Debug)]
pub struct StoredForecasts(forecast_rows::StoredForecasts);

/// Reads models, running VMs and outcomes from the store.
///
/// # Errors
/// [`StoreError`] if the store cannot be read.
pub fn load(store: &mut dyn Scan) -> Result<StoredForecasts, StoreError> {
    forecast_rows::load(store).map(StoredForecasts)
}

impl Forecasts {
    /// Creates the prediction service from the contents of the store.
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
                    state.set_serving_model(version, file, calibration, OperatingPoint::without_pool(limits));
                }
                Some(Err(error)) => {
                    let (kind, error) = (kind.name(), units::chain(&error));
                    tracing::error!(kind, version, error, "cannot read the serving model: train a new model");
                }
                None => {
                    tracing::error!(kind = kind.name(), version, "the serving model is missing in the store")
                }
            }
        }
        stored.outcomes.iter().for_each(|(number, vm)| state.load_outcome(*number, vm));
        stored.moves.iter().for_each(|(number, moved)| state.load_measured_move(*number, moved));
        stored.starts.into_iter().for_each(|(id, start)| state.load_start(id, start));
        let inputs = state.operating_point_inputs(limits);
        state.set_operating_point(inputs.serving, inputs.choose());
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

    /// Locks the state for reading. Ignores that another thread panicked while it held the lock,
    /// because a wrong prediction is less harmful than a failed request.
    fn read_state(&self) -> RwLockReadGuard<'_, State> {
        self.state.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write_state(&self) -> RwLockWriteGuard<'_, State> {
        self.state.write().unwrap_or_else(PoisonError::into_inner)
    }

    fn limits(&self) -> OperatorLimits {
        self.settings.borrow().limits
    }

    /// Predicts the frigid memory and latency sensitivity of a VM that starts now.
    ///
    /// # Errors
    /// [`DriverError::Stopping`] if the manager is stopping.
    pub fn predict(&self, plan: &Plan) -> Result<VmForecast, DriverError> {
        let begins = self.driver.read(|_, when| when.wall)?;
        let request = VmRequest {
            groups: plan.groups.clone(),
            requested: plan.memory,
            cores: (plan.cores > 0).then_some(plan.cores.into()),
            begins,
        };
        Ok(self.read_state().predict(request, plan.counters))
    }

    /// Returns X: the largest fraction of VMs that predictions may misplace.
    pub fn exceed_max(&self) -> Fraction {
        self.limits().exceed_max
    }

    /// Returns whether a running VM was placed entirely on the pool.
    pub fn is_pool_only(&self, id: ReservationId) -> bool {
        self.read_state().is_pool_only(id)
    }

    /// Returns the serving model of the loss of running VMs.
    pub fn loss_model(&self) -> Option<ServingLossModel> {
        self.read_state().loss_model().cloned()
    }

    /// Returns the customer or application of a running VM, if its plan named one.
    pub fn owner(&self, id: ReservationId) -> Option<String> {
        self.read_state().owner(id).map(str::to_owned)
    }

    /// Stores the inputs of a plan in memory until the VM starts.
    pub fn record_plan(&self, vm: &Name, start: VmStart) {
        self.write_state().add_plan(vm, start);
    }

    /// Adds outcomes of VMs from other sources, and ignores duplicates. Returns the number of added
    /// outcomes after they are durable.
    ///
    /// # Errors
    /// [`DriverError`] if the outcomes cannot be written. In this case none of them was added.
    pub async fn add_outcomes(&self, vms: Vec<EndedVm>) -> Result<u32, DriverError> {
        let (numbers, mut writes): (Vec<u64>, Vec<_>) = {
            let mut state = self.write_state();
            vms.into_iter().filter_map(|vm| state.add_outcome(vm)).unzip()
        };
        let added = u32::try_from(numbers.len()).expect("the size of a request is limited");
        writes.extend(self.write_state().expire(self.retention_start()?));
        self.driver
            .write_entries(writes)
            .await
            .inspect_err(|_| self.write_state().remove_outcomes(&numbers))?;
        Ok(added)
    }

    /// Records the loss of a running VM that was measured by a move of its memory. The loss becomes
    /// training data for `program` if [`MeasuredLoss::is_label`] holds.
    ///
    /// # Errors
    /// [`DriverError`] if the decision cannot be recorded.
    pub async fn record_measured_loss(
        &self,
        vm: &Name,
        program: String,
        loss: MeasuredLoss,
    ) -> Result<(), DriverError> {
        let measured = self.driver.read(|_, when| when.wall)?;
        let (is_label, standard_error) = (loss.is_label(), loss.standard_error);
        let what = DecisionKind::LossMeasured(LossByMove { loss: loss.loss, standard_error, is_label });
        if is_label {
            let moved = MeasuredMove { vm: vm.to_string(), program, measured, loss };
            self.write_queue.push(self.write_state().add_measured_move(&moved));
            self.update_metrics();
        }
        let decision =
            Decision { at: measured, actor: Actor::Manager, subject: Subject::Vm(vm.clone()), what };
        self.driver.request(Request::RecordDecision(decision)).await.map(drop)
    }

    /// Returns the start of the retention period. Outcomes of VMs that ended earlier are deleted.
    ///
    /// # Errors
    /// [`DriverError::Stopping`] if the manager is stopping.
    pub fn retention_start(&self) -> Result<UnixMs, DriverError> {
        let (retention, now) = (self.settings.borrow().retention, self.driver.read(|_, when| when.wall)?);
        Ok(UnixMs(now.0.saturating_sub(retention.as_ms())))
    }

    /// Returns at most `limit` ended VMs with numbers above `after`, and the value of `after` for
    /// the next page, if there is one.
    ///
    /// # Errors
    /// [`ModelError::Driver`] if the store cannot be read.
    pub async fn list_outcomes(
        &self,
        after: u64,
        limit: usize,
    ) -> Result<(Vec<EndedVm>, Option<u64>), ModelError> {
        Ok(page(self.load_outcomes().await?, after, limit))
    }

    /// Returns at most `limit` measured moves with numbers above `after`, and the value of `after` for the
    /// next page, if there is one.
    ///
    /// # Errors
    /// [`ModelError::Driver`] if the store cannot be read.
    pub async fn list_measured_moves(
        &self,
        after: u64,
        limit: usize,
    ) -> Result<(Vec<MeasuredMove>, Option<u64>), ModelError> {
        Ok(page(self.load_measured_moves().await?, after, limit))
    }

    /// Records how much memory the VMs of a host have touched so far, as measured by the agent.
    ///
    /// # Errors
    /// [`DriverError::Stopping`] if the manager is stopping.
    pub fn record_touched_memory(
        &self,
        host: HostId,
        touched: &[(ReservationId, Bytes)],
    ) -> Result<(), DriverError> {
        if !touched.is_empty() {
            let now = self.driver.read(|_, when| when.wall)?;
            let mut state = self.write_state();
            touched.iter().for_each(|(id, bytes)| state.record_peak(host, *id, *bytes, now));
        }
        Ok(())
    }

    /// Deletes a host's measurements of touched memory after its agent connected or disconnected. A
    /// connected agent reports them again.
    pub fn reset_memory_peaks(&self, host: HostId) {
        self.write_state().clear_memory_peaks(host);
    }

    /// Updates the metrics of serving models, outcomes and the operating point.
    fn update_metrics(&self) {
        let state = self.read_state();
        let [frigid, sensitivity] = state.serving_versions();
        let versions = [frigid, sensitivity, state.loss_model().map(|serving| serving.version)];
        let counts = [state.outcome_count(), state.measured_move_count()];
        self.metrics.set_forecasts(versions, state.operating_point(), counts);
    }
}

/// Returns at most `limit` rows with numbers above `after`, and the number of the last one if more rows
/// follow.
fn page<T>(rows: Vec<(u64, T)>, after: u64, limit: usize) -> (Vec<T>, Option<u64>) {
    let mut later = rows.into_iter().filter(|(number, _)| *number > after);
    let page: Vec<(u64, T)> = later.by_ref().take(limit).collect();
    let next = later.next().and(page.last()).map(|(number, _)| *number);
    (page.into_iter().map(|(_, row)| row).collect(), next)
}

/// Returns the calibration that the backtest of a model produced.
fn calibration_of(file: &ModelFile) -> Calibration {
    match &file.content {
        Content::Frigid { calibration, .. } => calibration.clone(),
        Content::Sensitivity { .. } | Content::Loss { .. } => Calibration::default(),
    }
}
