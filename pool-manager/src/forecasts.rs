//! Predictions in production: properties of VMs before they start, the serving models, and
//! outcomes. Prediction quality is left to `prediction`, the split of a VM's memory to `plan`.
//!
//! ```text
//!   PlanVm ──▶ foresee ──▶ plan remembered ──reservation──▶ VM has its memory ──agent: touched──▶ VM ended ──▶ outcome
//!                 ▲                                                                                              │
//!                 └── model, operating point ◀── train, promote, every so many outcomes ◀──── store ◀────────────┘
//! ```

mod books;
mod models;
mod point;
pub mod rows;
mod state;
mod words;

use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use prediction::{
    file::{Content, ModelFile},
    frigid::{Calibration, VmRequest},
};
use tokio::sync::{Semaphore, watch};
use units::{Bytes, HostId, Name, Ns, ReservationId, UnixMs, limits::EXPLAIN_CALLS_IN_FLIGHT_MAX};

pub use models::{Labels, ModelError, Shown, Training};
pub use point::{Point, Rules};
pub use rows::{Begun, Counters, Past};
pub use state::{Foreseen, Told, past};
pub use words::facts;

use crate::{
    driver::{Asked, Handle},
    metrics::Metrics,
    plan::Plan,
    store::{Scan, StoreError},
};
use books::Pen;
use models::Shelf;
use state::State;

/// Settings of an operator.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Settings {
    /// Risk limits.
    pub rules: Rules,
    /// Retention of outcomes.
    pub keep: Ns,
}

/// Predictions of a rack.
#[derive(Debug)]
pub struct Forecasts {
    state: RwLock<State>,
    shelf: tokio::sync::Mutex<Shelf>,
    /// Held during a training: there is one at a time.
    training: Arc<Semaphore>,
    /// Permits for readings of many outcomes, or of a model.
    reading: Arc<Semaphore>,
    driver: Handle,
    metrics: Arc<Metrics>,
    settings: watch::Receiver<Settings>,
    pen: Pen,
}

/// Predictions in the store, read before writers start.
#[derive(Debug)]
pub struct Loaded(rows::Loaded);

/// Reads them.
///
/// # Errors
/// The store cannot be read.
pub fn load(store: &mut dyn Scan) -> Result<Loaded, StoreError> {
    rows::load(store).map(Loaded)
}

impl Forecasts {
    /// Creates predictions from the store's contents.
    pub fn new(
        Loaded(loaded): Loaded,
        driver: Handle,
        metrics: Arc<Metrics>,
        settings: watch::Receiver<Settings>,
    ) -> Self {
        let rules = settings.borrow().rules;
        let mut state = State::new(rules);
        let shelf = Shelf::of(&loaded);
        for (kind, version) in shelf.serving() {
            let bytes = loaded.models.iter().find(|(of, number, _)| (*of, *number) == (kind, version));
            match bytes.map(|(_, _, bytes)| ModelFile::read(bytes)) {
                Some(Ok(file)) => {
                    let calibration = calibration_of(&file);
                    state.serve(version, file, calibration, Point::nothing(rules));
                }
                Some(Err(error)) => {
                    let (kind, error) = (kind.name(), units::chain(&error));
                    tracing::error!(kind, version, error, "model does not serve: train one anew");
                }
                None => tracing::error!(
                    kind = kind.name(),
                    version,
                    "model does not serve: it is not in the store"
                ),
            }
        }
        loaded.pasts.iter().for_each(|(number, past)| state.load(*number, past));
        loaded.begun.into_iter().for_each(|(id, begun)| state.load_begun(id, begun));
        let basis = state.basis(rules);
        state.set_point(basis.serving, basis.choose());
        let forecasts = Self {
            state: RwLock::new(state),
            shelf: tokio::sync::Mutex::new(shelf),
            training: Arc::new(Semaphore::new(1)),
            reading: Arc::new(Semaphore::new(EXPLAIN_CALLS_IN_FLIGHT_MAX)),
            driver,
            metrics,
            settings,
            pen: Pen::default(),
        };
        forecasts.show();
        forecasts
    }

    /// A poisoned state is used: a worse prediction harms less than none.
    fn read(&self) -> RwLockReadGuard<'_, State> {
        self.state.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, State> {
        self.state.write().unwrap_or_else(PoisonError::into_inner)
    }

    fn rules(&self) -> Rules {
        self.settings.borrow().rules
    }

    /// Predicts the memory of a VM that is planned now.
    ///
    /// # Errors
    /// The manager is stopping.
    pub fn foresee(&self, plan: &Plan) -> Result<Foreseen, Asked> {
        let begins = self.driver.look(|_, when| when.wall)?;
        let ask = VmRequest {
            groups: plan.groups.clone(),
            requested: plan.memory,
            cores: (plan.cores > 0).then_some(plan.cores.into()),
            begins,
        };
        Ok(self.read().foresee(ask, plan.counters))
    }

    /// Records a plan, with its inputs, until the VM has its memory.
    pub fn planned(&self, vm: &Name, begun: Begun) {
        self.write().planned(vm, begun);
    }

    /// Adds VMs that ended elsewhere or before, and returns the number of new ones. Durable when it
    /// returns.
    ///
    /// # Errors
    /// The store failed: none was added.
    pub async fn add(&self, pasts: Vec<Past>) -> Result<u32, Asked> {
        let (numbers, mut writes): (Vec<u64>, Vec<_>) = {
            let mut state = self.write();
            pasts.into_iter().filter_map(|past| state.add(past)).unzip()
        };
        let added = u32::try_from(numbers.len()).expect("a request has few outcomes");
        writes.extend(self.write().forget(self.oldest()?));
        self.driver.keep(writes).await.inspect_err(|_| self.write().take_back(&numbers))?;
        Ok(added)
    }

    /// Returns the time after which outcomes must have ended to be kept.
    ///
    /// # Errors
    /// The manager is stopping.
    pub fn oldest(&self) -> Result<UnixMs, Asked> {
        let (keep, now) = (self.settings.borrow().keep, self.driver.look(|_, when| when.wall)?);
        Ok(UnixMs(now.0.saturating_sub(keep.as_ms())))
    }

    /// Returns ended VMs with numbers above `after`, and the start of the next page.
    ///
    /// # Errors
    /// The store cannot be read.
    pub async fn outcomes(&self, after: u64, limit: usize) -> Result<(Vec<Past>, Option<u64>), ModelError> {
        let pasts = self.pasts().await?;
        let mut wanted = pasts.into_iter().filter(|(number, _)| *number > after);
        let page: Vec<(u64, Past)> = wanted.by_ref().take(limit).collect();
        let next = wanted.next().and(page.last()).map(|(number, _)| *number);
        Ok((page.into_iter().map(|(_, past)| past).collect(), next))
    }

    /// Records the memory touched by the VMs of a host, as measured by its agent.
    ///
    /// # Errors
    /// The manager is stopping.
    pub fn touched(&self, host: HostId, told: &[(ReservationId, Bytes)]) -> Result<(), Asked> {
        if !told.is_empty() {
            let now = self.driver.look(|_, when| when.wall)?;
            let mut state = self.write();
            told.iter().for_each(|(id, bytes)| state.touched(host, *id, *bytes, now));
        }
        Ok(())
    }

    /// Resets measurements of a host whose agent connected or disconnected: the agent reports them
    /// again.
    pub fn agent_changes(&self, host: HostId) {
        self.write().forget_peaks(host);
    }

    /// Updates the metrics of serving models and the operating point.
    fn show(&self) {
        let state = self.read();
        self.metrics.forecasts(state.serving(), state.point(), state.outcomes());
    }
}

/// Number of outcomes in the backtest of a new model.
fn calibration_of(file: &ModelFile) -> Calibration {
    match &file.content {
        Content::Frigid { calibration, .. } => calibration.clone(),
        Content::Sensitivity { .. } => Calibration::default(),
    }
}
