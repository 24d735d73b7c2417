//! Models from their making to their serving: trained on outcomes or labels, taken in from elsewhere, compared with the one that serves,
//! promoted, rolled back. A model is durable before it serves, and every one is kept as the file it was.

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

/// Rates at which a model's like is told.
const RATES: [f64; 4] = [0.01, 0.02, 0.04, 0.1];
/// Where models are compared while nothing says how they are operated.
const RATE_COMPARED: f64 = 0.04;
/// What makes trainings the same for the same rows.
const SEED: u64 = 1;
/// A training takes what others leave of the processors.
const NICE: i32 = 10;

/// Why there is no model.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// There is none of this version.
    #[error("version: {} {version} is not kept: see `tarn get models`", kind.name())]
    NoSuchModel {
        /// Of which kind.
        kind: Kind,
        /// Which version.
        version: u32,
    },
    /// None serves.
    #[error("kind: no model of {} serves", .0.name())]
    NoneServes(Kind),
    /// It serves already.
    #[error("version: {} {version} serves already", kind.name())]
    Serves {
        /// Of which kind.
        kind: Kind,
        /// Which version.
        version: u32,
    },
    /// One at a time.
    #[error("a model is being trained already: one at a time")]
    Busy,
    /// There is too little to learn from.
    #[error("outcomes")]
    TooFew(#[from] TooFewOutcomes),
    /// Labels teach nothing.
    #[error("labels")]
    Untold(#[from] EvaluationError),
    /// Labels are needed.
    #[error("labels: none: must be there for a model of latency sensitivity")]
    Unlabelled,
    /// It is not one.
    #[error("content")]
    File(#[from] FileError),
    /// It is one of another kind.
    #[error("kind: the file is a model of {}: must be of {}", found.name(), asked.name())]
    OtherKind {
        /// What was said.
        asked: Kind,
        /// What it is.
        found: Kind,
    },
    /// It was trained elsewhere, and is not taken.
    #[error("content")]
    Refused(#[from] ImportError),
    /// The store, or the manager ends.
    #[error(transparent)]
    Asked(#[from] Asked),
}

/// What a model is made of.
#[derive(Clone, Debug)]
pub enum Training {
    /// Outcomes, as they are kept.
    Frigid,
    /// Labelled workloads.
    Sensitivity(Labels),
}

/// Labelled workloads.
#[derive(Clone, Debug)]
pub struct Labels {
    /// With local memory, and how much slower with the pool's.
    pub workloads: Vec<Workload>,
    /// The margin.
    pub pdm: Fraction,
    /// Whether they were modelled, and not measured.
    pub modelled: bool,
}

/// A model as it is shown.
#[derive(Clone, Debug)]
pub struct Shown {
    /// Its kind.
    pub kind: Kind,
    /// Its version.
    pub version: u32,
    /// Whether it serves.
    pub serves: bool,
    /// Where it comes from.
    pub about: Provenance,
    /// Its length.
    pub bytes: usize,
    /// Its cuts, if it is of latency sensitivity.
    pub cuts: Vec<sensitivity::Cutoff>,
    /// Against the one that serves.
    pub comparison: Option<Comparison>,
}

/// Two models on the same VMs, which began after the one that serves had been made: each with as much risk as keeps it within the rate.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Comparison {
    /// The one that serves.
    pub version: u32,
    /// VMs that both were held against.
    pub vms: usize,
    /// The rate.
    pub rate: Fraction,
    /// Share of memory, in whole slices.
    pub share: f64,
    /// That of the one that serves.
    pub share_of_serving: f64,
}

/// Which models there are, and which serve.
#[derive(Debug, Default)]
pub(super) struct Shelf {
    lines: BTreeMap<Kind, Line>,
    models: BTreeMap<(Kind, u32), (Provenance, Vec<sensitivity::Cutoff>, usize)>,
}

impl Shelf {
    /// As a store has it. A file that cannot be read stays where it is and does not serve.
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

    /// Who serves.
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

    /// Models that make room for one more: the oldest that do not serve and will not again.
    fn too_many(&self, kind: Kind) -> Vec<u32> {
        let line = self.line(kind);
        let versions = self.models.keys().filter(|(of, _)| *of == kind).map(|(_, version)| *version);
        let idle: Vec<u32> = versions.filter(|version| !line.promoted.contains(version)).collect();
        idle[..(idle.len() + 1).saturating_sub(MODELS_RETAINED_MAX)].to_vec()
    }
}

impl Forecasts {
    /// Every model that is kept.
    pub async fn models(&self) -> Vec<Shown> {
        let shelf = self.shelf.lock().await;
        shelf.models.keys().filter_map(|(kind, version)| shelf.show(*kind, *version).ok()).collect()
    }

    /// One model with its file; without a version the one that serves.
    ///
    /// # Errors
    /// It is not there.
    pub async fn model(&self, kind: Kind, version: Option<u32>) -> Result<(Shown, Vec<u8>), ModelError> {
        let shelf = self.shelf.lock().await;
        let version = version.or(shelf.line(kind).serving()).ok_or(ModelError::NoneServes(kind))?;
        let shown = shelf.show(kind, version)?;
        drop(shelf);
        Ok((shown, self.bytes(kind, version).await?))
    }

    /// Makes a model and keeps it. It does not serve.
    ///
    /// # Errors
    /// There is too little to learn from, or one is being trained already.
    pub async fn train(&self, training: Training) -> Result<Shown, ModelError> {
        let place = self.place_to_train()?;
        let made = self.now()?;
        let (kind, stays) = match &training {
            Training::Frigid => (Kind::Frigid, self.stays().await?),
            Training::Sensitivity(_) => (Kind::Sensitivity, Vec::new()),
        };
        let file = aside(move || {
            let _place = place; // given back when it is over, also if nobody waits any more
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

    /// Takes a file of ours, and keeps it. It does not serve.
    ///
    /// # Errors
    /// It is none, or of another kind.
    pub async fn take(&self, kind: Kind, bytes: Vec<u8>) -> Result<Shown, ModelError> {
        let file = aside(move || ModelFile::read(&bytes)).await??;
        if file.kind() != kind {
            return Err(ModelError::OtherKind { asked: kind, found: file.kind() });
        }
        self.keep(kind, file).await
    }

    /// Takes a model that was trained elsewhere, held against outcomes or labels, and keeps it. It does not serve.
    ///
    /// # Errors
    /// It is refused, or there is too little to hold it against.
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
            let _place = place; // as above
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

    /// How a model compares with the one that serves; then, unless it is only to be said, it serves.
    ///
    /// # Errors
    /// It is not there, or serves already.
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

    /// The model that served before serves again; after the first of all, none.
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

    /// Durable first; then whoever asks next is told by it.
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
            tracing::error!(error = units::chain(&error), "not on record"); // it serves all the same
        }
        Ok(())
    }

    /// On VMs that began after the model that serves had been made; of one that was made of those, too, by what its like said of them
    /// before they ended.
    async fn compare(
        &self,
        shelf: &Shelf,
        kind: Kind,
        file: &ModelFile,
    ) -> Result<Option<Comparison>, ModelError> {
        let (Some(version), Kind::Frigid) = (shelf.line(kind).serving(), kind) else { return Ok(None) };
        let serving = match self.file(kind, version).await {
            Ok(file) => file,
            Err(ModelError::File(_) | ModelError::NoSuchModel { .. }) => return Ok(None), // it does not serve either
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
        let file = ModelFile::read(&bytes)?; // numbers that are none cannot be read again
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
        let comparison = self.compare(&shelf, kind, &file).await.unwrap_or_default(); // it is kept all the same
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

    /// Everything that is kept of VMs that ended.
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

/// On a thread of its own that takes what others leave: it has work for seconds or minutes.
async fn aside<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T, ModelError> {
    let (done, result) = tokio::sync::oneshot::channel();
    let run = move || {
        // Who may not be modest works all the same.
        let _ = rustix::process::setpriority_process(Some(rustix::thread::gettid()), NICE);
        let _ = done.send(work()); // whoever asked may have gone
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

/// An outcome shows how far a model can be trusted that spoke of its VM before it began.
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
    // What a later model's like was held against had ended by its end.
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
