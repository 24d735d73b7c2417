//! Lifecycle of models: training on outcomes or labels, import, comparison with the serving model,
//! promotion, rollback. A model is durable before it serves, and stored as its original file.

use std::{collections::BTreeMap, sync::Arc};

use pool::{
    audit::{Actor, Decision, Subject, What},
    manager::Ask,
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

use super::{
    Forecasts, calibration_of,
    rows::{self, Line, Past},
};
use crate::driver::Asked;

/// Target rates of a backtest.
const RATES: [f64; 4] = [0.01, 0.02, 0.04, 0.1];
/// Target rate of comparisons without a configured operating point.
const RATE_COMPARED: f64 = 0.04;
/// Seed, so that trainings on the same rows are equal.
const SEED: u64 = 1;
/// Nice value of trainings, which use idle processors.
const NICE: i32 = 10;

/// Error of a model operation.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// There is no model of this version.
    #[error("version: {} {version} is not kept: see `tarn get models`", kind.name())]
    NoSuchModel {
        /// Kind.
        kind: Kind,
        /// Version.
        version: u32,
    },
    /// No model serves.
    #[error("kind: no model of {} serves", .0.name())]
    NoneServes(Kind),
    /// The model serves already.
    #[error("version: {} {version} serves already", kind.name())]
    Serves {
        /// Kind.
        kind: Kind,
        /// Version.
        version: u32,
    },
    /// Another training is in progress.
    #[error("a model is being trained already: one at a time")]
    Busy,
    /// There are too few outcomes.
    #[error("outcomes")]
    TooFew(#[from] TooFewOutcomes),
    /// The labels cannot be trained on.
    #[error("labels")]
    Untold(#[from] EvaluationError),
    /// Labels are missing.
    #[error("labels: none: must be there for a model of latency sensitivity")]
    Unlabelled,
    /// The file is no model.
    #[error("content")]
    File(#[from] FileError),
    /// The file is a model of another kind.
    #[error("kind: the file is a model of {}: must be of {}", found.name(), asked.name())]
    OtherKind {
        /// Kind in the request.
        asked: Kind,
        /// Kind of the file.
        found: Kind,
    },
    /// The imported model is rejected.
    #[error("content")]
    Refused(#[from] ImportError),
    /// The store failed, or the manager is stopping.
    #[error(transparent)]
    Asked(#[from] Asked),
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
pub struct Shown {
    /// Kind.
    pub kind: Kind,
    /// Version.
    pub version: u32,
    /// It serves.
    pub serves: bool,
    /// Source.
    pub about: Provenance,
    /// Size in bytes.
    pub bytes: usize,
    /// Thresholds of a sensitivity model.
    pub cuts: Vec<sensitivity::Cutoff>,
    /// Comparison with the serving model.
    pub comparison: Option<Comparison>,
}

/// Two models on the same VMs, which started after the serving model was created, each at the risk
/// that keeps it within the target rate.
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
    /// The same of the serving model.
    pub share_of_serving: f64,
}

/// Stored models, and the serving ones.
#[derive(Debug, Default)]
pub(super) struct Shelf {
    lines: BTreeMap<Kind, Line>,
    models: BTreeMap<(Kind, u32), (Provenance, Vec<sensitivity::Cutoff>, usize)>,
}

impl Shelf {
    /// Loads models from the store. A file that cannot be read stays stored and does not serve.
    pub fn of(loaded: &rows::Loaded) -> Self {
        let mut shelf = Self { lines: loaded.lines.iter().cloned().collect(), models: BTreeMap::new() };
        for (kind, version, bytes) in &loaded.models {
            match ModelFile::read(bytes) {
                Ok(file) => shelf.put(*kind, *version, &file, bytes.len()),
                Err(error) => {
                    let (kind, error) = (kind.name(), units::chain(&error));
                    tracing::error!(kind, version, error, "model left out");
                }
            }
        }
        shelf
    }

    /// Returns the serving models.
    pub fn serving(&self) -> impl Iterator<Item = (Kind, u32)> {
        self.lines.iter().filter_map(|(kind, line)| Some((*kind, line.serving()?)))
    }

    fn line(&self, kind: Kind) -> Line {
        let mut line = self.lines.get(&kind).cloned().unwrap_or_default();
        let versions = self.models.keys().filter(|(of, _)| *of == kind).map(|(_, version)| *version);
        line.next = line.next.max(versions.max().unwrap_or(0) + 1);
        line
    }

    fn put(&mut self, kind: Kind, version: u32, file: &ModelFile, bytes: usize) {
        let cuts = match &file.content {
            Content::Sensitivity { model, .. } => model.cutoffs().to_vec(),
            Content::Frigid { .. } => Vec::new(),
        };
        self.models.insert((kind, version), (file.provenance.clone(), cuts, bytes));
    }

    fn show(&self, kind: Kind, version: u32) -> Result<Shown, ModelError> {
        let model = self.models.get(&(kind, version));
        let (about, cuts, bytes) = model.cloned().ok_or(ModelError::NoSuchModel { kind, version })?;
        let serves = self.line(kind).serving() == Some(version);
        Ok(Shown { kind, version, serves, about, bytes, cuts, comparison: None })
    }

    /// Returns the oldest models that neither serve nor may serve again, to be deleted for a new
    /// one.
    fn too_many(&self, kind: Kind) -> Vec<u32> {
        let line = self.line(kind);
        let versions = self.models.keys().filter(|(of, _)| *of == kind).map(|(_, version)| *version);
        let idle: Vec<u32> = versions.filter(|version| !line.promoted.contains(version)).collect();
        idle[..(idle.len() + 1).saturating_sub(MODELS_RETAINED_MAX)].to_vec()
    }
}

impl Forecasts {
    /// Returns all stored models.
    pub async fn models(&self) -> Vec<Shown> {
        let shelf = self.shelf.lock().await;
        shelf.models.keys().filter_map(|(kind, version)| shelf.show(*kind, *version).ok()).collect()
    }

    /// Returns a model with its file; without a version the serving one.
    ///
    /// # Errors
    /// It does not exist.
    pub async fn model(&self, kind: Kind, version: Option<u32>) -> Result<(Shown, Vec<u8>), ModelError> {
        let shelf = self.shelf.lock().await;
        let version = version.or(shelf.line(kind).serving()).ok_or(ModelError::NoneServes(kind))?;
        let shown = shelf.show(kind, version)?;
        drop(shelf);
        Ok((shown, self.bytes(kind, version).await?))
    }

    /// Trains a model and stores it. It does not serve.
    ///
    /// # Errors
    /// Too few outcomes, or another training is in progress.
    pub async fn train(&self, training: Training) -> Result<Shown, ModelError> {
        let place = self.place_to_train()?;
        let made = self.now()?;
        let (kind, stays) = match &training {
            Training::Frigid => (Kind::Frigid, self.stays().await?),
            Training::Sensitivity(_) => (Kind::Sensitivity, Vec::new()),
        };
        let file = aside(move || {
            let _place = place; // released when the training ends, also without a waiting caller
            let about = Provenance { trained_by: "tarn".to_owned(), ..about(made) };
            match training {
                Training::Frigid => frigid_file(&stays, &ModelSource::Trained, about),
                Training::Sensitivity(labels) => {
                    let model = sensitivity::Model::train(&labels.workloads, labels.pdm, SEED)?;
                    Ok(sensitivity_file(model, &labels, about))
                }
            }
        });
        self.keep(kind, file.await??).await
    }

    fn place_to_train(&self) -> Result<OwnedSemaphorePermit, ModelError> {
        Arc::clone(&self.training).try_acquire_owned().map_err(|_| ModelError::Busy)
    }

    /// Stores an imported file of Tarn. It does not serve.
    ///
    /// # Errors
    /// It is no model, or of another kind.
    pub async fn take(&self, kind: Kind, bytes: Vec<u8>) -> Result<Shown, ModelError> {
        let file = aside(move || ModelFile::read(&bytes)).await??;
        if file.kind() != kind {
            return Err(ModelError::OtherKind { asked: kind, found: file.kind() });
        }
        self.keep(kind, file).await
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
    ) -> Result<Shown, ModelError> {
        let place = self.place_to_train()?;
        let made = self.now()?;
        let trained_by = match format {
            Format::LightGbm => "lightgbm",
            Format::Onnx => "onnx",
        };
        let about = Provenance { trained_by: trained_by.to_owned(), ..about(made) };
        let stays = if kind == Kind::Frigid { self.stays().await? } else { Vec::new() };
        let file = aside(move || {
            let _place = place; // released like a training
            match kind {
                Kind::Frigid => {
                    let names: Vec<String> = feature_names().collect();
                    let model = ImportedModel::read(format, &bytes, &names)?;
                    frigid_file(&stays, &ModelSource::Imported(Box::new(model)), about)
                }
                Kind::Sensitivity => {
                    let model = ImportedModel::read(format, &bytes, &COUNTERS.map(str::to_owned))?;
                    let labels = labels.ok_or(ModelError::Unlabelled)?;
                    let model = sensitivity::Model::imported(model, &labels.workloads, labels.pdm)?;
                    Ok(sensitivity_file(model, &labels, about))
                }
            }
        });
        self.keep(kind, file.await??).await
    }

    /// Compares a model with the serving one and, unless only validation was requested, makes it
    /// serve.
    ///
    /// # Errors
    /// It does not exist, or serves already.
    pub async fn promote(
        &self,
        kind: Kind,
        version: u32,
        only_say: bool,
        actor: Actor,
    ) -> Result<Shown, ModelError> {
        let mut shelf = self.shelf.lock().await;
        let shown = shelf.show(kind, version)?;
        if shown.serves {
            return Err(ModelError::Serves { kind, version });
        }
        let file = self.file(kind, version).await?;
        let comparison = self.compare(&shelf, kind, &file).await?;
        if !only_say {
            let mut line = shelf.line(kind);
            line.promoted.retain(|other| *other != version);
            line.promoted.push(version);
            let forgotten = line.promoted.len().saturating_sub(ROLLBACK_MODELS_MAX + 1);
            line.promoted.drain(..forgotten);
            self.serve(&mut shelf, kind, line, Some((version, file)), actor).await?;
        }
        Ok(Shown { comparison, ..shelf.show(kind, version)? })
    }

    /// Makes the previous model serve again; after the first model, none.
    ///
    /// # Errors
    /// None serves.
    pub async fn roll_back(&self, kind: Kind, actor: Actor) -> Result<Option<Shown>, ModelError> {
        let mut shelf = self.shelf.lock().await;
        let mut line = shelf.line(kind);
        line.promoted.pop().ok_or(ModelError::NoneServes(kind))?;
        let mut before = None;
        while let (None, Some(version)) = (&before, line.serving()) {
            match self.file(kind, version).await {
                Ok(file) => before = Some((version, file)),
                Err(ModelError::File(_) | ModelError::NoSuchModel { .. }) => drop(line.promoted.pop()), // of another version
                Err(other) => return Err(other),
            }
        }
        let version = line.serving();
        self.serve(&mut shelf, kind, line, before, actor).await?;
        version.map(|version| shelf.show(kind, version)).transpose()
    }

    /// Writes the change, then applies it.
    async fn serve(
        &self,
        shelf: &mut Shelf,
        kind: Kind,
        line: Line,
        model: Option<(u32, ModelFile)>,
        actor: Actor,
    ) -> Result<(), ModelError> {
        let mut calibration = model.as_ref().map(|(_, file)| calibration_of(file)).unwrap_or_default();
        if let Some((version, _)) = model.as_ref().filter(|_| kind == Kind::Frigid) {
            self.pasts().await?.iter().for_each(|(_, past)| judge(&mut calibration, *version, past));
        }
        let mut basis = self.read().basis(self.rules());
        match &model {
            Some((_, ModelFile { content: Content::Sensitivity { model, .. }, .. })) => {
                basis.cuts = model.cutoffs().to_vec();
            }
            None if kind == Kind::Sensitivity => basis.cuts.clear(),
            _ => basis.calibration = calibration.clone(),
        }
        let point = aside(move || basis.choose()).await?;
        self.driver.keep(vec![rows::line(kind, &line)]).await?;
        let (version, before) = (line.serving(), shelf.line(kind).serving());
        shelf.lines.insert(kind, line);
        match model {
            Some((version, file)) => self.write().serve(version, file, calibration, point),
            None => self.write().serve_none(kind, point),
        }
        self.show();
        match version {
            Some(version) => tracing::info!(kind = kind.name(), version, "model serves"),
            None => tracing::info!(kind = kind.name(), "no model serves"),
        }
        let what = What::ModelServes { kind: kind.name().to_owned(), version, before };
        let decision = Decision { at: self.now()?, actor, subject: Subject::Rack, what };
        if let Err(error) = self.driver.ask(Ask::Note(decision)).await {
            tracing::error!(error = units::chain(&error), "not on record"); // it serves nevertheless
        }
        Ok(())
    }

    /// Compares two models on VMs that started after the serving model was created. For a model
    /// trained on these VMs, predictions of its backtest are used.
    async fn compare(
        &self,
        shelf: &Shelf,
        kind: Kind,
        file: &ModelFile,
    ) -> Result<Option<Comparison>, ModelError> {
        let (Some(version), Kind::Frigid) = (shelf.line(kind).serving(), kind) else { return Ok(None) };
        let serving = match self.file(kind, version).await {
            Ok(file) => file,
            Err(ModelError::File(_) | ModelError::NoSuchModel { .. }) => return Ok(None), // the other model does not serve either
            Err(other) => return Err(other),
        };
        let stays = self.stays().await?;
        let candidate = file.clone();
        let rate = match self.read().point().choice.frigid.op {
            op if op > Fraction::default() => op,
            _ => Fraction::new(RATE_COMPARED).expect("a share"),
        };
        aside(move || Ok(compared(version, &candidate, &serving, &stays, rate))).await?
    }

    async fn keep(&self, kind: Kind, file: ModelFile) -> Result<Shown, ModelError> {
        let bytes = file.write()?;
        let file = ModelFile::read(&bytes)?; // invalid numbers cannot be read again
        let mut shelf = self.shelf.lock().await;
        let mut line = shelf.line(kind);
        let version = line.next;
        line.next += 1;
        let length = bytes.len();
        let mut writes = vec![rows::model(kind, version, bytes), rows::line(kind, &line)];
        let old = shelf.too_many(kind);
        writes.extend(old.iter().map(|old| rows::no_model(kind, *old)));
        self.driver.keep(writes).await?;
        old.iter().for_each(|old| drop(shelf.models.remove(&(kind, *old))));
        shelf.lines.insert(kind, line);
        shelf.put(kind, version, &file, length);
        let comparison = self.compare(&shelf, kind, &file).await.unwrap_or_default(); // the model is stored nevertheless
        tracing::info!(kind = kind.name(), version, rows = file.provenance.rows, "model kept");
        Ok(Shown { comparison, ..shelf.show(kind, version)? })
    }

    async fn file(&self, kind: Kind, version: u32) -> Result<ModelFile, ModelError> {
        let bytes = self.bytes(kind, version).await?;
        Ok(aside(move || ModelFile::read(&bytes)).await??)
    }

    async fn bytes(&self, kind: Kind, version: u32) -> Result<Vec<u8>, ModelError> {
        let mut snapshot = self.driver.snapshot().await?;
        let place = self.place_to_read().await?;
        let found = aside(move || {
            let _place = place;
            rows::load_model(snapshot.as_mut(), kind, version)
        });
        let found = found.await?;
        let found = found.map_err(|error| Asked::Unreadable(error.into()))?;
        found.ok_or(ModelError::NoSuchModel { kind, version })
    }

    /// Reads all stored outcomes.
    pub(super) async fn pasts(&self) -> Result<Vec<(u64, Past)>, ModelError> {
        let mut snapshot = self.driver.snapshot().await?;
        let place = self.place_to_read().await?;
        let read = aside(move || {
            let _place = place;
            rows::pasts(snapshot.as_mut())
        });
        let read = read.await?;
        let read = read.map_err(|error| Asked::Unreadable(error.into()))?;
        Ok(read)
    }

    async fn place_to_read(&self) -> Result<OwnedSemaphorePermit, ModelError> {
        let place = Arc::clone(&self.reading).acquire_owned().await;
        Ok(place.map_err(|_| Asked::Stopping)?)
    }

    async fn stays(&self) -> Result<Vec<VmSample>, ModelError> {
        let stay = |past: Past| VmSample { request: past.begun.ask, outcome: past.outcome, is_trusted: true };
        Ok(self.pasts().await?.into_iter().map(|(_, past)| stay(past)).collect())
    }

    fn now(&self) -> Result<UnixMs, Asked> {
        self.driver.look(|_, when| when.wall)
    }
}

/// Runs long work on a thread with low priority.
async fn aside<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T, ModelError> {
    let (done, result) = tokio::sync::oneshot::channel();
    let run = move || {
        // Without the permission to lower its priority it runs normally.
        let _ = rustix::process::setpriority_process(Some(rustix::thread::gettid()), NICE);
        let _ = done.send(work()); // the caller may have left
    };
    std::thread::Builder::new().name("models".into()).spawn(run).map_err(|_| Asked::Overloaded)?;
    Ok(result.await.map_err(|_| Asked::Stopping)?)
}

fn about(made: UnixMs) -> Provenance {
    Provenance { made_by: env!("CARGO_PKG_VERSION").to_owned(), made, ..Provenance::default() }
}

fn frigid_file(
    stays: &[VmSample],
    teacher: &ModelSource,
    about: Provenance,
) -> Result<ModelFile, ModelError> {
    let rates = RATES.map(|rate| Fraction::new(rate).expect("a share"));
    let trained = backtest::train(stays, teacher, &rates)?;
    let about = Provenance {
        rows: trained.outcomes as u64,
        window: Some(trained.window),
        metrics: trained.results,
        ..about
    };
    Ok(ModelFile::frigid(about, trained.model, trained.calibration))
}

fn sensitivity_file(model: sensitivity::Model, labels: &Labels, about: Provenance) -> ModelFile {
    let rows = labels.workloads.len() as u64;
    ModelFile::sensitivity(Provenance { rows, modelled: labels.modelled, ..about }, model)
}

/// Calibration uses only outcomes of VMs that started after the prediction.
fn judge(calibration: &mut Calibration, version: u32, past: &Past) {
    if let Some(remark) = past.begun.remark.filter(|remark| remark.version == version) {
        calibration
            .add(past.begun.ask.groups.owner(), remark.said.with_outcome(&past.begun.ask, &past.outcome));
    }
}

fn compared(
    version: u32,
    candidate: &ModelFile,
    serving: &ModelFile,
    stays: &[VmSample],
    rate: Fraction,
) -> Option<Comparison> {
    let end = |file: &ModelFile| file.provenance.window.map_or(UnixMs(0), |(_, end)| end);
    let (after, made) = (end(serving), end(candidate));
    // The backtest of a later model used VMs that had ended by its creation.
    let until = if made > after { made } else { UnixMs(u64::MAX) };
    let stays: Vec<VmSample> = stays.iter().filter(|stay| stay.outcome.ended <= until).cloned().collect();
    let held = |file: &ModelFile| {
        let Content::Frigid { model, calibration, .. } = &file.content else { return Calibration::default() };
        if end(file) > after { calibration.after(after) } else { backtest::calibrate(model, &stays, after) }
    };
    let (ours, theirs) = (held(candidate), held(serving));
    let share = |of: &Calibration| Some(of.slice_share(of.risk_limit(rate)?));
    Some(Comparison {
        version,
        vms: ours.outcomes().min(theirs.outcomes()),
        rate,
        share: share(&ours)?,
        share_of_serving: share(&theirs)?,
    })
}
