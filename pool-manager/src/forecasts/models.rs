//! Manages models: training, import, comparison with the serving model, promotion and rollback.
//! Models are stored as files in their original format, and are durable before they are used.

use std::{collections::BTreeMap, sync::Arc};

use pool::{
    audit::{Actor, Decision, DecisionKind, Subject},
    manager::Request,
};
use prediction::{
    file::{Content, FileError, Kind, ModelFile, Provenance},
    frigid::{
        Calibration, CalibrationSample, ModelSource,
        backtest::{self, TooFewOutcomes, VmSample},
        feature_names,
    },
    import::{Format, ImportError, ImportedModel},
    qos::{LabelledRun, LossAccuracy, LossModel},
    sensitivity::{self, COUNTER_NAMES, Workload, backtest::EvaluationError},
};
use tokio::sync::OwnedSemaphorePermit;
use units::{
    Fraction, UnixMs,
    limits::{MODELS_RETAINED_MAX, ROLLBACK_MODELS_MAX},
};

use super::{Forecasts, calibration_of};
use crate::{
    driver::DriverError,
    records::forecast_rows::{self, EndedVm, MeasuredMove, ModelVersions},
    store::{Scan, StoreError},
};

/// Target rates of overpredictions for which a backtest reports results.
const OVERPREDICTION_TARGET_RATES: [f64; 4] = [0.01, 0.02, 0.04, 0.1];
/// Target rate of overpredictions for comparisons if the operating point has none.
const COMPARISON_OVERPREDICTION_RATE_DEFAULT: f64 = 0.04;
/// Seed of the random numbers in training; constant, so that training is reproducible.
const TRAINING_SEED: u64 = 1;
/// Nice value of training threads, so that they use otherwise idle processors.
const TRAINING_NICE: i32 = 10;

/// Error of a request to train, import, promote or read a model.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// No model has this kind and version.
    #[error("version: {} {version} does not exist: see `tarn get models`", kind.name())]
    NoSuchModel {
        /// Requested kind of model.
        kind: Kind,
        /// Requested version.
        version: u32,
    },
    /// No model of this kind is serving.
    #[error("kind: no {} model is serving", .0.name())]
    NoServingModel(Kind),
    /// The model is already serving.
    #[error("version: {} {version} is already serving", kind.name())]
    AlreadyServing {
        /// Kind of the model.
        kind: Kind,
        /// Version of the model.
        version: u32,
    },
    /// Another training is in progress.
    #[error("another training is in progress: try again later")]
    Busy,
    /// There are too few outcomes for a training.
    #[error("outcomes")]
    TooFewOutcomes(#[from] TooFewOutcomes),
    /// The labels are not sufficient for a training.
    #[error("labels")]
    Evaluation(#[from] EvaluationError),
    /// The request has no labels.
    #[error("labels: are missing: required for a model of this kind")]
    NoLabels,
    /// Models of this kind cannot be imported from a file of another tool.
    #[error("format: models of {} cannot be imported from another tool: must be MODEL_FORMAT_TARN", .0.name())]
    OwnFormatOnly(Kind),
    /// The file is not a valid model.
    #[error("content")]
    File(#[from] FileError),
    /// The file is a model of another kind.
    #[error("kind: the file contains a model of {}: must be of {}", actual.name(), requested.name())]
    OtherKind {
        /// Kind of model in the request.
        requested: Kind,
        /// Kind of model in the file.
        actual: Kind,
    },
    /// The imported model is invalid or uses unsupported features.
    #[error("content")]
    Import(#[from] ImportError),
    /// The store cannot be read or written, or the manager is stopping.
    #[error(transparent)]
    Driver(#[from] DriverError),
}

/// Training data of a model.
#[derive(Clone, Debug)]
pub enum Training {
    /// Trains a model of frigid memory on the stored outcomes.
    Frigid,
    /// Trains a model of latency sensitivity on labelled workloads.
    Sensitivity(Labels<Workload>),
    /// Trains a model of the loss of running VMs on labelled runs with pool memory.
    Loss(Labels<LabelledRun>),
}

/// Workloads or runs with measured slowdowns, from which a model is trained.
#[derive(Clone, Debug)]
pub struct Labels<T> {
    /// Workloads: their counters with local memory, and their slowdowns with pool memory. Or runs: their
    /// counters and slowdowns with pool memory.
    pub workloads: Vec<T>,
    /// Performance degradation margin: the largest tolerated slowdown.
    pub pdm: Fraction,
    /// Whether the slowdowns come from a processor model instead of measurements.
    pub modelled: bool,
}

/// Properties of a stored model.
#[derive(Clone, Debug)]
pub struct ModelSummary {
    /// Kind of prediction that the model makes.
    pub kind: Kind,
    /// Version, unique among models of this kind.
    pub version: u32,
    /// Whether new VMs are predicted with this model.
    pub is_serving: bool,
    /// Origin of the model, and results of its backtest.
    pub provenance: Provenance,
    /// Size of the stored file, in bytes.
    pub bytes: usize,
    /// Performance degradation margin (PDM) of the model; `None` for a model of frigid memory.
    pub pdm: Option<Fraction>,
    /// Evaluation that the model contains.
    pub evaluation: Evaluation,
    /// Comparison with the serving model, if both could be evaluated.
    pub comparison: Option<Comparison>,
}

/// Evaluation that a model contains.
#[derive(Clone, Debug, PartialEq)]
pub enum Evaluation {
    /// The model contains none. Its provenance has the results of a backtest.
    None,
    /// Decision thresholds of a model of latency sensitivity.
    Cutoffs(Vec<sensitivity::Cutoff>),
    /// Accuracy of a model of the loss of running VMs.
    Accuracy(LossAccuracy),
}

/// Comparison of a model with the serving model on VMs that started after the serving model was
/// created. Each model uses its own risk limit for the same target rate of overpredictions.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Comparison {
    /// Version of the serving model.
    pub version: u32,
    /// Number of VMs in the comparison.
    pub vms: usize,
    /// Target rate of overpredictions.
    pub rate: Fraction,
    /// Fraction of the VMs' memory that the model predicts as frigid, in whole slices.
    pub share: f64,
    /// Fraction of the VMs' memory that the serving model predicts as frigid, in whole slices.
    pub share_of_serving: f64,
}

/// Properties of a stored model.
#[derive(Clone, Debug)]
struct StoredModel {
    provenance: Provenance,
    pdm: Option<Fraction>,
    evaluation: Evaluation,
    bytes: usize,
}

/// Stored models, and the serving model of each kind.
#[derive(Debug, Default)]
pub(super) struct ModelRegistry {
    versions: BTreeMap<Kind, ModelVersions>,
    models: BTreeMap<(Kind, u32), StoredModel>,
}

impl ModelRegistry {
    /// Loads the models from the store. A file that cannot be read is ignored but stays in the
    /// store.
    pub fn of(stored: &forecast_rows::StoredForecasts) -> Self {
        let mut registry =
            Self { versions: stored.versions.iter().cloned().collect(), models: BTreeMap::new() };
        for (kind, version, bytes) in &stored.models {
            match ModelFile::read(bytes) {
                Ok(file) => registry.insert(*kind, *version, &file, bytes.len()),
                Err(error) => {
                    let (kind, error) = (kind.name(), units::chain(&error));
                    tracing::error!(kind, version, error, "ignoring stored model: cannot read its file");
                }
            }
        }
        registry
    }

    /// Returns kind and version of each serving model.
    pub fn serving(&self) -> impl Iterator<Item = (Kind, u32)> {
        self.versions.iter().filter_map(|(kind, versions)| Some((*kind, versions.serving()?)))
    }

    fn versions(&self, kind: Kind) -> ModelVersions {
        let mut versions = self.versions.get(&kind).cloned().unwrap_or_default();
        let numbers = self.models.keys().filter(|(of, _)| *of == kind).map(|(_, version)| *version);
        versions.next = versions.next.max(numbers.max().unwrap_or(0) + 1);
        versions
    }

    fn insert(&mut self, kind: Kind, version: u32, file: &ModelFile, bytes: usize) {
        let (pdm, evaluation) = match &file.content {
            Content::Frigid { .. } => (None, Evaluation::None),
            Content::Sensitivity { model, .. } => {
                (Some(model.pdm), Evaluation::Cutoffs(model.cutoffs().to_vec()))
            }
            Content::Loss { model, .. } => (Some(model.pdm), Evaluation::Accuracy(model.accuracy)),
        };
        let provenance = file.provenance.clone();
        self.models.insert((kind, version), StoredModel { provenance, pdm, evaluation, bytes });
    }

    fn summary(&self, kind: Kind, version: u32) -> Result<ModelSummary, ModelError> {
        let model = self.models.get(&(kind, version));
        let StoredModel { provenance, pdm, evaluation, bytes } =
            model.cloned().ok_or(ModelError::NoSuchModel { kind, version })?;
        let is_serving = self.versions(kind).serving() == Some(version);
        Ok(ModelSummary { kind, version, is_serving, provenance, bytes, pdm, evaluation, comparison: None })
    }

    /// Returns the versions of the oldest models, which must be deleted before a model is added.
    /// Serving models and models for a rollback are never included.
    fn surplus_versions(&self, kind: Kind) -> Vec<u32> {
        let versions = self.versions(kind);
        let stored = self.models.keys().filter(|(of, _)| *of == kind).map(|(_, version)| *version);
        let idle: Vec<u32> = stored.filter(|version| !versions.promoted.contains(version)).collect();
        idle[..(idle.len() + 1).saturating_sub(MODELS_RETAINED_MAX)].to_vec()
    }
}

impl Forecasts {
    /// Returns the properties of all stored models.
    pub async fn list_models(&self) -> Vec<ModelSummary> {
        let registry = self.registry.lock().await;
        registry.models.keys().filter_map(|(kind, version)| registry.summary(*kind, *version).ok()).collect()
    }

    /// Returns the properties and the file of a model, or of the serving model if `version` is
    /// `None`.
    ///
    /// # Errors
    /// [`ModelError`] if the model does not exist or the store cannot be read.
    pub async fn model_with_file(
        &self,
        kind: Kind,
        version: Option<u32>,
    ) -> Result<(ModelSummary, Vec<u8>), ModelError> {
        let registry = self.registry.lock().await;
        let version =
            version.or(registry.versions(kind).serving()).ok_or(ModelError::NoServingModel(kind))?;
        let summary = registry.summary(kind, version)?;
        drop(registry);
        Ok((summary, self.read_model_bytes(kind, version).await?))
    }

    /// Trains a model and stores it, without promoting it. `with_measured_moves` adds the measured moves of
    /// this rack's VMs to the labels.
    ///
    /// # Errors
    /// [`ModelError`] if there is too little training data, another training is in progress, or the
    /// store fails.
    pub async fn train(
        &self,
        training: Training,
        with_measured_moves: bool,
    ) -> Result<ModelSummary, ModelError> {
        let permit = self.acquire_training_permit()?;
        let created = self.now()?;
        let kind = match &training {
            Training::Frigid => Kind::Frigid,
            Training::Sensitivity(_) => Kind::Sensitivity,
            Training::Loss(_) => Kind::Loss,
        };
        let (samples, moves) = match kind {
            Kind::Frigid => (self.load_samples().await?, Vec::new()),
            _ if with_measured_moves => (Vec::new(), self.load_measured_moves().await?),
            _ => (Vec::new(), Vec::new()),
        };
        let file = run_in_background(move || {
            let _permit = permit; // held until the training ends, even if the caller disconnects
            let provenance = Provenance { trained_by: "tarn".to_owned(), ..new_provenance(created) };
            match training {
                Training::Frigid => frigid_model_file(&samples, &ModelSource::Trained, provenance),
                Training::Sensitivity(mut labels) => {
                    let measured_moves =
                        labels.add_moves(&moves, |moved| moved.loss.workload(moved.program.clone()));
                    let model = sensitivity::Model::train(&labels.workloads, labels.pdm, TRAINING_SEED)?;
                    let provenance = Provenance { measured_moves, ..labels.add_to(provenance) };
                    Ok(ModelFile::sensitivity(provenance, model))
                }
                Training::Loss(mut labels) => {
                    let labelled =
                        |moved: &MeasuredMove| Some(moved.loss.labelled_run(moved.program.clone()));
                    let measured_moves = labels.add_moves(&moves, labelled);
                    let model = LossModel::train(&labels.workloads, labels.pdm, TRAINING_SEED)?;
                    let provenance = Provenance { measured_moves, ..labels.add_to(provenance) };
                    Ok(ModelFile::loss(provenance, model))
                }
            }
        });
        self.store_model(kind, file.await??).await
    }

    fn acquire_training_permit(&self) -> Result<OwnedSemaphorePermit, ModelError> {
        Arc::clone(&self.training_permits).try_acquire_owned().map_err(|_| ModelError::Busy)
    }

    /// Stores a model file in Tarn's format, without promoting the model.
    ///
    /// # Errors
    /// [`ModelError`] if the file is invalid or contains another kind of model, or the store fails.
    pub async fn import_model_file(&self, kind: Kind, bytes: Vec<u8>) -> Result<ModelSummary, ModelError> {
        let file = run_in_background(move || ModelFile::read(&bytes)).await??;
        if file.kind() != kind {
            return Err(ModelError::OtherKind { requested: kind, actual: file.kind() });
        }
        self.store_model(kind, file).await
    }

    /// Imports a model that another tool trained. Calibrates it on outcomes or labels, and stores
    /// it without promoting it.
    ///
    /// # Errors
    /// [`ModelError`] if the model is rejected, there are too few outcomes or labels, another
    /// training is in progress, or the store fails.
    pub async fn import(
        &self,
        kind: Kind,
        format: Format,
        bytes: Vec<u8>,
        labels: Option<Labels<Workload>>,
    ) -> Result<ModelSummary, ModelError> {
        let permit = self.acquire_training_permit()?;
        let created = self.now()?;
        let trained_by = match format {
            Format::LightGbm => "lightgbm",
            Format::Onnx => "onnx",
        };
        let provenance = Provenance { trained_by: trained_by.to_owned(), ..new_provenance(created) };
        let samples = if kind == Kind::Frigid { self.load_samples().await? } else { Vec::new() };
        let file = run_in_background(move || {
            let _permit = permit; // held until the import ends
            match kind {
                Kind::Frigid => {
                    let names: Vec<String> = feature_names().collect();
                    let model = ImportedModel::read(format, &bytes, &names)?;
                    frigid_model_file(&samples, &ModelSource::Imported(Box::new(model)), provenance)
                }
                Kind::Sensitivity => {
                    let model = ImportedModel::read(format, &bytes, &COUNTER_NAMES.map(str::to_owned))?;
                    let labels = labels.ok_or(ModelError::NoLabels)?;
                    let model = sensitivity::Model::imported(model, &labels.workloads, labels.pdm)?;
                    Ok(ModelFile::sensitivity(labels.add_to(provenance), model))
                }
                Kind::Loss => Err(ModelError::OwnFormatOnly(kind)),
            }
        });
        self.store_model(kind, file.await??).await
    }

    /// Compares a model with the serving model and, unless `validate_only` is set, makes it the
    /// serving model.
    ///
    /// # Errors
    /// [`ModelError`] if the model does not exist or is already serving, or the store fails.
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
        let file = self.read_model_file(kind, version).await?;
        let comparison = self.compare(&registry, kind, &file).await?;
        if !validate_only {
            let mut versions = registry.versions(kind);
            versions.promoted.retain(|other| *other != version);
            versions.promoted.push(version);
            let surplus = versions.promoted.len().saturating_sub(ROLLBACK_MODELS_MAX + 1);
            versions.promoted.drain(..surplus);
            self.set_serving_model(&mut registry, kind, versions, Some((version, file)), actor).await?;
        }
        Ok(ModelSummary { comparison, ..registry.summary(kind, version)? })
    }

    /// Returns to the previously serving model. Returns `None` if there is none, so that no model
    /// is serving.
    ///
    /// # Errors
    /// [`ModelError::NoServingModel`] if no model is serving, or another [`ModelError`] if the
    /// store fails.
    pub async fn roll_back(&self, kind: Kind, actor: Actor) -> Result<Option<ModelSummary>, ModelError> {
        let mut registry = self.registry.lock().await;
        let mut versions = registry.versions(kind);
        versions.promoted.pop().ok_or(ModelError::NoServingModel(kind))?;
        let mut previous = None;
        while let (None, Some(version)) = (&previous, versions.serving()) {
            match self.read_model_file(kind, version).await {
                Ok(file) => previous = Some((version, file)),
                Err(ModelError::File(_) | ModelError::NoSuchModel { .. }) => drop(versions.promoted.pop()), // written by another version of Tarn
                Err(other) => return Err(other),
            }
        }
        let version = versions.serving();
        self.set_serving_model(&mut registry, kind, versions, previous, actor).await?;
        version.map(|version| registry.summary(kind, version)).transpose()
    }

    /// Writes a change of the serving model to the store, and applies it. A `model` of `None`
    /// removes the serving model.
    async fn set_serving_model(
        &self,
        registry: &mut ModelRegistry,
        kind: Kind,
        versions: ModelVersions,
        model: Option<(u32, ModelFile)>,
        actor: Actor,
    ) -> Result<(), ModelError> {
        let mut calibration = model.as_ref().map(|(_, file)| calibration_of(file)).unwrap_or_default();
        if let Some((version, _)) = model.as_ref().filter(|_| kind == Kind::Frigid) {
            self.load_outcomes()
                .await?
                .iter()
                .for_each(|(_, vm)| add_to_calibration(&mut calibration, *version, vm));
        }
        let mut inputs = self.read_state().operating_point_inputs(self.limits());
        match (kind, model.as_ref().map(|(_, file)| &file.content)) {
            (_, Some(Content::Sensitivity { model, .. })) => inputs.cutoffs = model.cutoffs().to_vec(),
            (Kind::Sensitivity, _) => inputs.cutoffs.clear(),
            (Kind::Frigid, _) => inputs.calibration = calibration.clone(),
            (Kind::Loss, _) => {} // it does not affect the placement of VMs
        }
        let point = run_in_background(move || inputs.choose()).await?;
        self.driver.write_entries(vec![forecast_rows::put_versions(kind, &versions)]).await?;
        let (version, previous) = (versions.serving(), registry.versions(kind).serving());
        registry.versions.insert(kind, versions);
        match model {
            Some((version, file)) => self.write_state().set_serving_model(version, file, calibration, point),
            None => self.write_state().remove_serving_model(kind, point),
        }
        self.update_metrics();
        match version {
            Some(version) => tracing::info!(kind = kind.name(), version, "serving model changed"),
            None => tracing::info!(kind = kind.name(), "serving model removed"),
        }
        let what = DecisionKind::ModelChanged { kind: kind.name().to_owned(), version, before: previous };
        let decision = Decision { at: self.now()?, actor, subject: Subject::Rack, what };
        if let Err(error) = self.driver.request(Request::RecordDecision(decision)).await {
            tracing::error!(error = units::chain(&error), "cannot record decision"); // the change stays in effect
        }
        Ok(())
    }

    /// Compares `file` with the serving model on VMs that started after the serving model was
    /// created. If one of the models was trained on these VMs, the predictions of its backtest are
    /// used. Returns `None` if the comparison is not possible.
    async fn compare(
        &self,
        registry: &ModelRegistry,
        kind: Kind,
        file: &ModelFile,
    ) -> Result<Option<Comparison>, ModelError> {
        let (Some(version), Kind::Frigid) = (registry.versions(kind).serving(), kind) else {
            return Ok(None);
        };
        let serving = match self.read_model_file(kind, version).await {
            Ok(file) => file,
            Err(ModelError::File(_) | ModelError::NoSuchModel { .. }) => return Ok(None), // an unreadable model makes no predictions
            Err(other) => return Err(other),
        };
        let samples = self.load_samples().await?;
        let candidate = file.clone();
        let rate = match self.read_state().operating_point().choice.frigid.op {
            op if op > Fraction::default() => op,
            _ => Fraction::new(COMPARISON_OVERPREDICTION_RATE_DEFAULT).expect("a fraction"),
        };
        run_in_background(move || Ok(compute_comparison(version, &candidate, &serving, &samples, rate)))
            .await?
    }

    async fn store_model(&self, kind: Kind, file: ModelFile) -> Result<ModelSummary, ModelError> {
        let bytes = file.write()?;
        let file = ModelFile::read(&bytes)?; // detects values that the file format rejects
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
        registry.insert(kind, version, &file, size);
        let comparison = self.compare(&registry, kind, &file).await.unwrap_or_default(); // without a comparison the model is still usable
        tracing::info!(kind = kind.name(), version, rows = file.provenance.rows, "model stored");
        Ok(ModelSummary { comparison, ..registry.summary(kind, version)? })
    }

    async fn read_model_file(&self, kind: Kind, version: u32) -> Result<ModelFile, ModelError> {
        let bytes = self.read_model_bytes(kind, version).await?;
        Ok(run_in_background(move || ModelFile::read(&bytes)).await??)
    }

    async fn read_model_bytes(&self, kind: Kind, version: u32) -> Result<Vec<u8>, ModelError> {
        let bytes = self.read_store(move |store| forecast_rows::load_model(store, kind, version)).await?;
        bytes.ok_or(ModelError::NoSuchModel { kind, version })
    }

    /// Reads all stored outcomes with their numbers.
    pub(super) async fn load_outcomes(&self) -> Result<Vec<(u64, EndedVm)>, ModelError> {
        self.read_store(forecast_rows::load_outcomes).await
    }

    /// Reads all measured moves with their numbers.
    pub(super) async fn load_measured_moves(&self) -> Result<Vec<(u64, MeasuredMove)>, ModelError> {
        self.read_store(forecast_rows::load_measured_moves).await
    }

    async fn read_store<T: Send + 'static>(
        &self,
        read: impl FnOnce(&mut dyn Scan) -> Result<T, StoreError> + Send + 'static,
    ) -> Result<T, ModelError> {
        let mut snapshot = self.driver.snapshot().await?;
        let permit = self.acquire_reading_permit().await?;
        let read = run_in_background(move || {
            let _permit = permit;
            read(snapshot.as_mut())
        });
        Ok(read.await?.map_err(|error| DriverError::Unreadable(error.into()))?)
    }

    async fn acquire_reading_permit(&self) -> Result<OwnedSemaphorePermit, ModelError> {
        let permit = Arc::clone(&self.reading_permits).acquire_owned().await;
        Ok(permit.map_err(|_| DriverError::Stopping)?)
    }

    async fn load_samples(&self) -> Result<Vec<VmSample>, ModelError> {
        let sample =
            |vm: EndedVm| VmSample { request: vm.start.request, outcome: vm.outcome, is_trusted: true };
        Ok(self.load_outcomes().await?.into_iter().map(|(_, vm)| sample(vm)).collect())
    }

    fn now(&self) -> Result<UnixMs, DriverError> {
        self.driver.read(|_, when| when.wall)
    }
}

/// Runs `work` on a new thread with low priority, and waits for the result.
async fn run_in_background<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, ModelError> {
    let (sender, result) = tokio::sync::oneshot::channel();
    let run = move || {
        // If the priority cannot be lowered, the work runs with normal priority.
        let _ = rustix::process::setpriority_process(Some(rustix::thread::gettid()), TRAINING_NICE);
        let _ = sender.send(work()); // the caller may be gone
    };
    std::thread::Builder::new().name("models".into()).spawn(run).map_err(|_| DriverError::Overloaded)?;
    Ok(result.await.map_err(|_| DriverError::Stopping)?)
}

fn new_provenance(created: UnixMs) -> Provenance {
    Provenance { made_by: env!("CARGO_PKG_VERSION").to_owned(), made: created, ..Provenance::default() }
}

fn frigid_model_file(
    samples: &[VmSample],
    source: &ModelSource,
    provenance: Provenance,
) -> Result<ModelFile, ModelError> {
    let rates = OVERPREDICTION_TARGET_RATES.map(|rate| Fraction::new(rate).expect("a fraction"));
    let trained = backtest::train(samples, source, &rates)?;
    let provenance = Provenance {
        rows: trained.outcomes as u64,
        window: Some(trained.window),
        metrics: trained.results,
        ..provenance
    };
    Ok(ModelFile::frigid(provenance, trained.model, trained.calibration))
}

impl<T> Labels<T> {
    /// Adds the measured moves of which `convert` makes labels, and returns their number.
    fn add_moves(
        &mut self,
        moves: &[(u64, MeasuredMove)],
        convert: impl Fn(&MeasuredMove) -> Option<T>,
    ) -> u64 {
        let before = self.workloads.len();
        self.workloads.extend(moves.iter().filter_map(|(_, moved)| convert(moved)));
        (self.workloads.len() - before) as u64
    }

    /// Completes the provenance of a model that was trained on these labels.
    fn add_to(&self, provenance: Provenance) -> Provenance {
        Provenance { rows: self.workloads.len() as u64, modelled: self.modelled, ..provenance }
    }
}

/// Adds the outcome of a VM to the calibration of a model, if this model made the prediction at the
/// start of the VM.
fn add_to_calibration(calibration: &mut Calibration, version: u32, vm: &EndedVm) {
    if let Some(prediction) = vm.start.prediction.filter(|prediction| prediction.version == version) {
        calibration.add(CalibrationSample::new(&vm.start.request, &vm.outcome, prediction.prediction));
    }
}

fn compute_comparison(
    version: u32,
    candidate: &ModelFile,
    serving: &ModelFile,
    samples: &[VmSample],
    rate: Fraction,
) -> Option<Comparison> {
    let end = |file: &ModelFile| file.provenance.window.map_or(UnixMs(0), |(_, end)| end);
    let (after, created) = (end(serving), end(candidate));
    // A newer candidate was backtested only on VMs that ended before its creation.
    let until = if created > after { created } else { UnixMs(u64::MAX) };
    let samples: Vec<VmSample> =
        samples.iter().filter(|sample| sample.outcome.ended <= until).cloned().collect();
    let calibration_after = |file: &ModelFile| {
        let Content::Frigid { model, calibration, .. } = &file.content else { return Calibration::default() };
        if end(file) > after { calibration.after(after) } else { backtest::calibrate(model, &samples, after) }
    };
    let (candidate_calibration, serving_calibration) =
        (calibration_after(candidate), calibration_after(serving));
    let share = |of: &Calibration| Some(of.slice_share(&of.risk_limit(rate)?));
    Some(Comparison {
        version,
        vms: candidate_calibration.outcomes().min(serving_calibration.outcomes()),
        rate,
        share: share(&candidate_calibration)?,
        share_of_serving: share(&serving_calibration)?,
    })
}
