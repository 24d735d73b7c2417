//! Lifecycle of models: training on outcomes or labels, import, comparison with the serving model,
//! promotion, rollback. A model is durable before it serves, and stored as its original file.

use std::{collections::BTreeMap, sync::Arc};

use pool::{
    audit::{Actor, Decision, DecisionKind, Subject},
    manager::Request,
};
use prediction::{
    file::{Content, FileError, Kind, ModelFile, Provenance},
    frigid::{
        Calibration, ModelSource,
        backtest::{self, TooFewOutcomes, VmSample},
        feature_names,
    },
    import::{Format, ImportError, ImportedModel},
    sensitivity::{self, COUNTERS, Workload, backtest::EvaluationError},
};
use tokio::sync::OwnedSemaphorePermit;
use units::{
    Fraction, UnixMs,
    limits::{MODELS_RETAINED_MAX, ROLLBACK_MODELS_MAX},
};

use super::{Forecasts, calibration_of};
use crate::{
    driver::DriverError,
    records::forecast_rows::{self, EndedVm, ModelVersions},
};

/// Target rates of a backtest.
const RATES: [f64; 4] = [0.01, 0.02, 0.04, 0.1];
/// Target rate of comparisons without a configured operating point.
const COMPARISON_RATE: f64 = 0.04;
/// Seed, so that trainings on the same rows are equal.
const SEED: u64 = 1;
/// Nice value of trainings, which use idle processors.
const NICE: i32 = 10;

/// Error of a model operation.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// There is no model of this version.
    #[error("version: {} {version} does not exist: see `tarn get models`", kind.name())]
    NoSuchModel {
        /// Kind.
        kind: Kind,
        /// Version.
        version: u32,
    },
    /// No model serves.
    #[error("kind: no {} model serves", .0.name())]
    NoneServes(Kind),
    /// The model is already serving.
    #[error("version: {} {version} is already serving", kind.name())]
    AlreadyServing {
        /// Kind.
        kind: Kind,
        /// Version.
        version: u32,
    },
    /// Another training is in progress.
    #[error("another training is in progress: try again later")]
    Busy,
    /// There are too few outcomes.
    #[error("outcomes")]
    TooFewOutcomes(#[from] TooFewOutcomes),
    /// The labels cannot be trained on.
    #[error("labels")]
    Evaluation(#[from] EvaluationError),
    /// Labels are missing.
    #[error("labels: missing: required for a model of latency sensitivity")]
    NoLabels,
    /// The file is no model.
    #[error("content")]
    File(#[from] FileError),
    /// The file is a model of another kind.
    #[error("kind: the file is a model of {}: must be of {}", actual.name(), requested.name())]
    OtherKind {
        /// Kind in the request.
        requested: Kind,
        /// Kind of the file.
        actual: Kind,
    },
    /// The imported model is rejected.
    #[error("content")]
    Import(#[from] ImportError),
    /// The store failed, or the manager is stopping.
    #[error(transparent)]
    Driver(#[from] DriverError),
}

/// Training data of a model.
#[derive(Clone, Debug)]
pub enum Training {
    /// Stored outcomes.
    Frigid,
    /// Labelled workloads.
    Sensitivity(Labels),
}

/// Labelled workloads.
#[derive(Clone, Debug)]
pub struct Labels {
    /// Workloads with local memory, with their slowdown on pool memory.
    pub workloads: Vec<Workload>,
    /// Performance degradation margin.
    pub pdm: Fraction,
    /// Slowdowns come from a processor model.
    pub modelled: bool,
}

/// Model as listed.
#[derive(Clone, Debug)]
pub struct ModelSummary {
    /// Kind.
    pub kind: Kind,
    /// Version.
    pub version: u32,
    /// The model serves.
    pub is_serving: bool,
    /// Origin.
    pub provenance: Provenance,
    /// Size in bytes.
    pub bytes: usize,
    /// Thresholds of a sensitivity model.
    pub cutoffs: Vec<sensitivity::Cutoff>,
    /// Comparison with the serving model.
    pub comparison: Option<Comparison>,
}

/// Comparison of two models on the same VMs, which started after the serving model was created,
/// each at the risk limit for the same target rate.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Comparison {
    /// Version of the serving model.
    pub version: u32,
    /// Number of VMs.
    pub vms: usize,
    /// Target rate.
    pub rate: Fraction,
    /// Fraction of memory predicted frigid, in whole slices.
    pub share: f64,
    /// `share` of the serving model.
    pub share_of_serving: f64,
}

/// All stored models, and which of them serve.
#[derive(Debug, Default)]
pub(super) struct ModelRegistry {
    versions: BTreeMap<Kind, ModelVersions>,
    models: BTreeMap<(Kind, u32), (Provenance, Vec<sensitivity::Cutoff>, usize)>,
}

impl ModelRegistry {
    /// Loads models from the store. A file that cannot be read stays stored and does not serve.
    pub fn of(stored: &forecast_rows::StoredForecasts) -> Self {
        let mut registry =
            Self { versions: stored.versions.iter().cloned().collect(), models: BTreeMap::new() };
        for (kind, version, bytes) in &stored.models {
            match ModelFile::read(bytes) {
                Ok(file) => registry.put(*kind, *version, &file, bytes.len()),
                Err(error) => {
                    let (kind, error) = (kind.name(), units::chain(&error));
                    tracing::error!(kind, version, error, "cannot read model, skipped");
                }
            }
        }
        registry
    }

    /// Returns the serving models.
    pub fn serving(&self) -> impl Iterator<Item = (Kind, u32)> {
        self.versions.iter().filter_map(|(kind, versions)| Some((*kind, versions.serving()?)))
    }

    fn versions(&self, kind: Kind) -> ModelVersions {
        let mut versions = self.versions.get(&kind).cloned().unwrap_or_default();
        let numbers = self.models.keys().filter(|(of, _)| *of == kind).map(|(_, version)| *version);
        versions.next = versions.next.max(numbers.max().unwrap_or(0) + 1);
        versions
    }

    fn put(&mut self, kind: Kind, version: u32, file: &ModelFile, bytes: usize) {
        let cutoffs = match &file.content {
            Content::Sensitivity { model, .. } => model.cutoffs().to_vec(),
            Content::Frigid { .. } => Vec::new(),
        };
        self.models.insert((kind, version), (file.provenance.clone(), cutoffs, bytes));
    }

    fn summary(&self, kind: Kind, version: u32) -> Result<ModelSummary, ModelError> {
        let model = self.models.get(&(kind, version));
        let (provenance, cutoffs, bytes) = model.cloned().ok_or(ModelError::NoSuchModel { kind, version })?;
        let is_serving = self.versions(kind).serving() == Some(version);
        Ok(ModelSummary { kind, version, is_serving, provenance, bytes, cutoffs, comparison: None })
    }

    /// Returns the oldest models that were not promoted, to be deleted when a model is added.
    fn surplus_versions(&self, kind: Kind) -> Vec<u32> {
        let versions = self.versions(kind);
        let stored = self.models.keys().filter(|(of, _)| *of == kind).map(|(_, version)| *version);
        let idle: Vec<u32> = stored.filter(|version| !versions.promoted.contains(version)).collect();
        idle[..(idle.len() + 1).saturating_sub(MODELS_RETAINED_MAX)].to_vec()
    }
}

impl Forecasts {
    /// Returns all stored models.
    pub async fn models(&self) -> Vec<ModelSummary> {
        let registry = self.registry.lock().await;
        registry.models.keys().filter_map(|(kind, version)| registry.summary(*kind, *version).ok()).collect()
    }

    /// Returns a model with its file; without a version the serving one.
    ///
    /// # Errors
    /// It does not exist.
    pub async fn model(
        &self,
        kind: Kind,
        version: Option<u32>,
    ) -> Result<(ModelSummary, Vec<u8>), ModelError> {
        let registry = self.registry.lock().await;
        let version = version.or(registry.versions(kind).serving()).ok_or(ModelError::NoneServes(kind))?;
        let summary = registry.summary(kind, version)?;
        drop(registry);
        Ok((summary, self.bytes(kind, version).await?))
    }

    /// Trains a model and stores it. It does not serve.
    ///
    /// # Errors
    /// Too few outcomes, or another training is in progress.
    pub async fn train(&self, training: Training) -> Result<ModelSummary, ModelError> {
        let permit = self.training_permit()?;
        let created = self.now()?;
        let (kind, samples) = match &training {
            Training::Frigid => (Kind::Frigid, self.samples().await?),
            Training::Sensitivity(_) => (Kind::Sensitivity, Vec::new()),
        };
        let file = run_in_background(move || {
            let _permit = permit; // released when the training ends, also without a waiting caller
            let provenance = Provenance { trained_by: "tarn".to_owned(), ..provenance(created) };
            match training {
                Training::Frigid => frigid_file(&samples, &ModelSource::Trained, provenance),
                Training::Sensitivity(labels) => {
                    let model = sensitivity::Model::train(&labels.workloads, labels.pdm, SEED)?;
                    Ok(sensitivity_file(model, &labels, provenance))
                }
            }
        });
        self.store_model(kind, file.await??).await
    }

    fn training_permit(&self) -> Result<OwnedSemaphorePermit, ModelError> {
        Arc::clone(&self.training_permits).try_acquire_owned().map_err(|_| ModelError::Busy)
    }

    /// Stores an imported file of Tarn. It does not serve.
    ///
    /// # Errors
    /// It is no model, or of another kind.
    pub async fn import_file(&self, kind: Kind, bytes: Vec<u8>) -> Result<ModelSummary, ModelError> {
        let file = run_in_background(move || ModelFile::read(&bytes)).await??;
        if file.kind() != kind {
            return Err(ModelError::OtherKind { requested: kind, actual: file.kind() });
        }
        self.store_model(kind, file).await
    }

    /// Imports a model of another tool, calibrates it on outcomes or labels, and stores it. It does
    /// not serve.
    ///
    /// # Errors
    /// It is rejected, or there are too few outcomes or labels.
    pub async fn import(
        &self,
        kind: Kind,
        format: Format,
        bytes: Vec<u8>,
        labels: Option<Labels>,
    ) -> Result<ModelSummary, ModelError> {
        let permit = self.training_permit()?;
        let created = self.now()?;
        let trained_by = match format {
            Format::LightGbm => "lightgbm",
            Format::Onnx => "onnx",
        };
        let provenance = Provenance { trained_by: trained_by.to_owned(), ..provenance(created) };
        let samples = if kind == Kind::Frigid { self.samples().await? } else { Vec::new() };
        let file = run_in_background(move || {
            let _permit = permit; // released like a training
            match kind {
                Kind::Frigid => {
                    let names: Vec<String> = feature_names().collect();
                    let model = ImportedModel::read(format, &bytes, &names)?;
                    frigid_file(&samples, &ModelSource::Imported(Box::new(model)), provenance)
                }
                Kind::Sensitivity => {
                    let model = ImportedModel::read(format, &bytes, &COUNTERS.map(str::to_owned))?;
                    let labels = labels.ok_or(ModelError::NoLabels)?;
                    let model = sensitivity::Model::imported(model, &labels.workloads, labels.pdm)?;
                    Ok(sensitivity_file(model, &labels, provenance))
                }
            }
        });
        self.store_model(kind, file.await??).await
    }

    /// Compares a model with the serving one and, unless only validation was requested, makes it
    /// serve.
    ///
    /// # Errors
    /// It does not exist, or is already serving.
    pub async fn promote(
        &self,
        kind: Kind,
        version: u32,
        validate_only: bool,
        actor: Actor,
    ) -> Result<ModelSummary, ModelError> {
        let mut registry = self.registry.lock().await;
        let summary = registry.summary(kind, version)?;
        if summary.is_serving {
            return Err(ModelError::AlreadyServing { kind, version });
        }
        let file = self.file(kind, version).await?;
        let comparison = self.compare(&registry, kind, &file).await?;
        if !validate_only {
            let mut versions = registry.versions(kind);
            versions.promoted.retain(|other| *other != version);
            versions.promoted.push(version);
            let surplus = versions.promoted.len().saturating_sub(ROLLBACK_MODELS_MAX + 1);
            versions.promoted.drain(..surplus);
            self.serve(&mut registry, kind, versions, Some((version, file)), actor).await?;
        }
        Ok(ModelSummary { comparison, ..registry.summary(kind, version)? })
    }

    /// Makes the previous model serve again; after the first model, none.
    ///
    /// # Errors
    /// None serves.
    pub async fn roll_back(&self, kind: Kind, actor: Actor) -> Result<Option<ModelSummary>, ModelError> {
        let mut registry = self.registry.lock().await;
        let mut versions = registry.versions(kind);
        versions.promoted.pop().ok_or(ModelError::NoneServes(kind))?;
        let mut previous = None;
        while let (None, Some(version)) = (&previous, versions.serving()) {
            match self.file(kind, version).await {
                Ok(file) => previous = Some((version, file)),
                Err(ModelError::File(_) | ModelError::NoSuchModel { .. }) => drop(versions.promoted.pop()), // of another version
                Err(other) => return Err(other),
            }
        }
        let version = versions.serving();
        self.serve(&mut registry, kind, versions, previous, actor).await?;
        version.map(|version| registry.summary(kind, version)).transpose()
    }

    /// Makes a change of the serving model durable, then applies it.
    async fn serve(
        &self,
        registry: &mut ModelRegistry,
        kind: Kind,
        versions: ModelVersions,
        model: Option<(u32, ModelFile)>,
        actor: Actor,
    ) -> Result<(), ModelError> {
        let mut calibration = model.as_ref().map(|(_, file)| calibration_of(file)).unwrap_or_default();
        if let Some((version, _)) = model.as_ref().filter(|_| kind == Kind::Frigid) {
            self.stored_outcomes()
                .await?
                .iter()
                .for_each(|(_, vm)| add_to_calibration(&mut calibration, *version, vm));
        }
        let mut inputs = self.read().point_inputs(self.limits());
        match &model {
            Some((_, ModelFile { content: Content::Sensitivity { model, .. }, .. })) => {
                inputs.cutoffs = model.cutoffs().to_vec();
            }
            None if kind == Kind::Sensitivity => inputs.cutoffs.clear(),
            _ => inputs.calibration = calibration.clone(),
        }
        let point = run_in_background(move || inputs.choose()).await?;
        self.driver.write_entries(vec![forecast_rows::put_versions(kind, &versions)]).await?;
        let (version, previous) = (versions.serving(), registry.versions(kind).serving());
        registry.versions.insert(kind, versions);
        match model {
            Some((version, file)) => self.write().serve(version, file, calibration, point),
            None => self.write().serve_none(kind, point),
        }
        self.update_metrics();
        match version {
            Some(version) => tracing::info!(kind = kind.name(), version, "model serves"),
            None => tracing::info!(kind = kind.name(), "no model serves"),
        }
        let what = DecisionKind::ModelChanged { kind: kind.name().to_owned(), version, before: previous };
        let decision = Decision { at: self.now()?, actor, subject: Subject::Rack, what };
        if let Err(error) = self.driver.request(Request::RecordDecision(decision)).await {
            tracing::error!(error = units::chain(&error), "cannot record decision"); // the change is in effect nevertheless
        }
        Ok(())
    }

    /// Compares two models on VMs that started after the serving model was created. For a model
    /// trained on these VMs, predictions of its backtest are used.
    async fn compare(
        &self,
        registry: &ModelRegistry,
        kind: Kind,
        file: &ModelFile,
    ) -> Result<Option<Comparison>, ModelError> {
        let (Some(version), Kind::Frigid) = (registry.versions(kind).serving(), kind) else {
            return Ok(None);
        };
        let serving = match self.file(kind, version).await {
            Ok(file) => file,
            Err(ModelError::File(_) | ModelError::NoSuchModel { .. }) => return Ok(None), // the other model does not serve either
            Err(other) => return Err(other),
        };
        let samples = self.samples().await?;
        let candidate = file.clone();
        let rate = match self.read().point().choice.frigid.op {
            op if op > Fraction::default() => op,
            _ => Fraction::new(COMPARISON_RATE).expect("a fraction"),
        };
        run_in_background(move || Ok(comparison_of(version, &candidate, &serving, &samples, rate))).await?
    }

    async fn store_model(&self, kind: Kind, file: ModelFile) -> Result<ModelSummary, ModelError> {
        let bytes = file.write()?;
        let file = ModelFile::read(&bytes)?; // invalid numbers cannot be read again
        let mut registry = self.registry.lock().await;
        let mut versions = registry.versions(kind);
        let version = versions.next;
        versions.next += 1;
        let size = bytes.len();
        let mut writes = vec![
            forecast_rows::put_model(kind, version, bytes),
            forecast_rows::put_versions(kind, &versions),
        ];
        let surplus = registry.surplus_versions(kind);
        writes.extend(surplus.iter().map(|surplus| forecast_rows::delete_model(kind, *surplus)));
        self.driver.write_entries(writes).await?;
        surplus.iter().for_each(|surplus| drop(registry.models.remove(&(kind, *surplus))));
        registry.versions.insert(kind, versions);
        registry.put(kind, version, &file, size);
        let comparison = self.compare(&registry, kind, &file).await.unwrap_or_default(); // the model is stored nevertheless
        tracing::info!(kind = kind.name(), version, rows = file.provenance.rows, "model stored");
        Ok(ModelSummary { comparison, ..registry.summary(kind, version)? })
    }

    async fn file(&self, kind: Kind, version: u32) -> Result<ModelFile, ModelError> {
        let bytes = self.bytes(kind, version).await?;
        Ok(run_in_background(move || ModelFile::read(&bytes)).await??)
    }

    async fn bytes(&self, kind: Kind, version: u32) -> Result<Vec<u8>, ModelError> {
        let mut snapshot = self.driver.snapshot().await?;
        let permit = self.reading_permit().await?;
        let bytes = run_in_background(move || {
            let _permit = permit;
            forecast_rows::load_model(snapshot.as_mut(), kind, version)
        });
        let bytes = bytes.await?;
        let bytes = bytes.map_err(|error| DriverError::Unreadable(error.into()))?;
        bytes.ok_or(ModelError::NoSuchModel { kind, version })
    }

    /// Reads all stored outcomes.
    pub(super) async fn stored_outcomes(&self) -> Result<Vec<(u64, EndedVm)>, ModelError> {
        let mut snapshot = self.driver.snapshot().await?;
        let permit = self.reading_permit().await?;
        let read = run_in_background(move || {
            let _permit = permit;
            forecast_rows::outcomes(snapshot.as_mut())
        });
        let read = read.await?;
        let read = read.map_err(|error| DriverError::Unreadable(error.into()))?;
        Ok(read)
    }

    async fn reading_permit(&self) -> Result<OwnedSemaphorePermit, ModelError> {
        let permit = Arc::clone(&self.reading_permits).acquire_owned().await;
        Ok(permit.map_err(|_| DriverError::Stopping)?)
    }

    async fn samples(&self) -> Result<Vec<VmSample>, ModelError> {
        let sample =
            |vm: EndedVm| VmSample { request: vm.start.request, outcome: vm.outcome, is_trusted: true };
        Ok(self.stored_outcomes().await?.into_iter().map(|(_, vm)| sample(vm)).collect())
    }

    fn now(&self) -> Result<UnixMs, DriverError> {
        self.driver.read(|_, when| when.wall)
    }
}

/// Runs long work on a thread with low priority.
async fn run_in_background<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, ModelError> {
    let (sender, result) = tokio::sync::oneshot::channel();
    let run = move || {
        // Without the permission to lower its priority it runs normally.
        let _ = rustix::process::setpriority_process(Some(rustix::thread::gettid()), NICE);
        let _ = sender.send(work()); // the caller may have left
    };
    std::thread::Builder::new().name("models".into()).spawn(run).map_err(|_| DriverError::Overloaded)?;
    Ok(result.await.map_err(|_| DriverError::Stopping)?)
}

fn provenance(created: UnixMs) -> Provenance {
    Provenance { made_by: env!("CARGO_PKG_VERSION").to_owned(), made: created, ..Provenance::default() }
}

fn frigid_file(
    samples: &[VmSample],
    source: &ModelSource,
    provenance: Provenance,
) -> Result<ModelFile, ModelError> {
    let rates = RATES.map(|rate| Fraction::new(rate).expect("a fraction"));
    let trained = backtest::train(samples, source, &rates)?;
    let provenance = Provenance {
        rows: trained.outcomes as u64,
        window: Some(trained.window),
        metrics: trained.results,
        ..provenance
    };
    Ok(ModelFile::frigid(provenance, trained.model, trained.calibration))
}

fn sensitivity_file(model: sensitivity::Model, labels: &Labels, provenance: Provenance) -> ModelFile {
    let rows = labels.workloads.len() as u64;
    ModelFile::sensitivity(Provenance { rows, modelled: labels.modelled, ..provenance }, model)
}

/// Adds an outcome to the calibration of a model, if that model predicted it before the VM started.
fn add_to_calibration(calibration: &mut Calibration, version: u32, vm: &EndedVm) {
    if let Some(prediction) = vm.start.prediction.filter(|prediction| prediction.version == version) {
        calibration.add(
            vm.start.request.groups.owner(),
            prediction.prediction.with_outcome(&vm.start.request, &vm.outcome),
        );
    }
}

fn comparison_of(
    version: u32,
    candidate: &ModelFile,
    serving: &ModelFile,
    samples: &[VmSample],
    rate: Fraction,
) -> Option<Comparison> {
    let end = |file: &ModelFile| file.provenance.window.map_or(UnixMs(0), |(_, end)| end);
    let (after, created) = (end(serving), end(candidate));
    // The backtest of a later model used VMs that had ended by its creation.
    let until = if created > after { created } else { UnixMs(u64::MAX) };
    let samples: Vec<VmSample> =
        samples.iter().filter(|sample| sample.outcome.ended <= until).cloned().collect();
    let calibration_after = |file: &ModelFile| {
        let Content::Frigid { model, calibration, .. } = &file.content else { return Calibration::default() };
        if end(file) > after { calibration.after(after) } else { backtest::calibrate(model, &samples, after) }
    };
    let (candidate_calibration, serving_calibration) =
        (calibration_after(candidate), calibration_after(serving));
    let share = |of: &Calibration| Some(of.slice_share(of.risk_limit(rate)?));
    Some(Comparison {
        version,
        vms: candidate_calibration.outcomes().min(serving_calibration.outcomes()),
        rate,
        share: share(&candidate_calibration)?,
        share_of_serving: share(&serving_calibration)?,
    })
}
