//! Predictions as entries of the store: ended VMs in the order of recording; properties and
//! predictions of running VMs, by reservation; models as files, and the serving versions. Encoded
//! with postcard by position; a row only gains variants.

use prediction::{
    file::{FileError, Kind, ModelFile},
    frigid::{Outcome, RiskPrediction, VmRequest},
    sensitivity::COUNTERS,
};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use units::ReservationId;

use crate::store::{Scan, StoreError, Table, Write};

/// Counters of a core; NaN where one was not measured.
pub type Counters = [f64; COUNTERS.len()];

/// Properties of a VM before its start, with the prediction for it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct VmStart {
    /// Properties.
    pub request: VmRequest,
    /// Counters of its workload, if measured.
    pub counters: Option<Counters>,
    /// Prediction, if a model served.
    pub prediction: Option<ModelPrediction>,
    /// The VM was placed on pool memory as far as possible, as insensitive to latency.
    pub pool_only: bool,
}

/// Prediction of one model.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct ModelPrediction {
    /// Version of the model.
    pub version: u32,
    /// Predicted risk curve.
    pub prediction: RiskPrediction,
}

/// Ended VM.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EndedVm {
    /// Properties before its start.
    pub start: VmStart,
    /// Outcome.
    pub outcome: Outcome,
}

/// Versions of the models of one kind.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelVersions {
    /// Version of the next model; versions are never reused.
    pub next: u32,
    /// Promoted versions that were not rolled back; the last one serves.
    pub promoted: Vec<u32>,
}

impl ModelVersions {
    /// Returns the serving version.
    pub fn serving(&self) -> Option<u32> {
        self.promoted.last().copied()
    }
}

/// Row with its format version.
#[derive(Serialize, Deserialize)]
enum Row<T> {
    V1(T),
}

fn put<T: Serialize>(table: Table, key: Vec<u8>, row: T) -> Write {
    let value = postcard::to_stdvec(&Row::V1(row)).expect("rows have sequences of known length only");
    Write::Put { table, key, value }
}

fn row<T: DeserializeOwned>(value: &[u8]) -> Result<T, postcard::Error> {
    postcard::from_bytes(value).map(|Row::V1(row)| row)
}

/// Returns the change that stores an ended VM under a unique number.
pub fn put_outcome(number: u64, vm: &EndedVm) -> Write {
    put(Table::Outcomes, number.to_be_bytes().to_vec(), vm)
}

/// Returns the change that deletes an ended VM.
pub fn delete_outcome(number: u64) -> Write {
    Write::Delete { table: Table::Outcomes, key: number.to_be_bytes().to_vec() }
}

/// Returns the change that stores properties and prediction of a VM with memory.
pub fn put_start(reservation: ReservationId, start: &VmStart) -> Write {
    put(Table::Forecasts, reservation.0.to_be_bytes().to_vec(), start)
}

/// Returns the change that deletes the properties of a VM.
pub fn delete_start(reservation: ReservationId) -> Write {
    Write::Delete { table: Table::Forecasts, key: reservation.0.to_be_bytes().to_vec() }
}

/// Returns the change that stores a model's file.
pub fn put_model(kind: Kind, version: u32, bytes: Vec<u8>) -> Write {
    Write::Put { table: Table::Models, key: model_key(kind, version), value: bytes }
}

/// Returns the change that deletes a model.
pub fn delete_model(kind: Kind, version: u32) -> Write {
    Write::Delete { table: Table::Models, key: model_key(kind, version) }
}

/// Returns the change that stores the versions of a kind.
pub fn put_versions(kind: Kind, versions: &ModelVersions) -> Write {
    put(Table::Models, vec![tag(kind)], versions)
}

fn model_key(kind: Kind, version: u32) -> Vec<u8> {
    [&[tag(kind)], &version.to_be_bytes()[..]].concat()
}

/// Key prefix of a kind; never changes.
fn tag(kind: Kind) -> u8 {
    match kind {
        Kind::Frigid => 1,
        Kind::Sensitivity => 2,
    }
}

/// Stored predictions.
#[derive(Debug, Default)]
pub struct StoredForecasts {
    /// Ended VMs, the latest last.
    pub outcomes: Vec<(u64, EndedVm)>,
    /// VMs with memory.
    pub starts: Vec<(ReservationId, VmStart)>,
    /// Versions by kind.
    pub versions: Vec<(Kind, ModelVersions)>,
    /// Models, by kind and version.
    pub models: Vec<(Kind, u32, Vec<u8>)>,
}

/// Reads all rows. Unreadable rows are skipped and logged: predictions get worse, and the rack
/// keeps running.
///
/// # Errors
/// The store cannot be read.
pub fn load(store: &mut dyn Scan) -> Result<StoredForecasts, StoreError> {
    let mut loaded = StoredForecasts { outcomes: outcomes(store)?, ..StoredForecasts::default() };
    store.scan(
        Table::Forecasts,
        &mut |key, value| match (key.try_into().map(u64::from_be_bytes), row(value)) {
            (Ok(id), Ok(start)) => loaded.starts.push((ReservationId(id), start)),
            _ => log_unreadable(Table::Forecasts, key),
        },
    )?;
    store.scan(Table::Models, &mut |key, value| {
        let kind = Kind::ALL.into_iter().find(|kind| key.first() == Some(&tag(*kind)));
        match (kind, &key[1.min(key.len())..]) {
            (Some(kind), []) => match row(value) {
                Ok(versions) => loaded.versions.push((kind, versions)),
                Err(_) => log_unreadable(Table::Models, key),
            },
            (Some(kind), version) => match version.try_into().map(u32::from_be_bytes) {
                Ok(version) => loaded.models.push((kind, version, value.to_vec())),
                Err(_) => log_unreadable(Table::Models, key),
            },
            (None, _) => log_unreadable(Table::Models, key),
        }
    })?;
    Ok(loaded)
}

/// Reads the file of a model; `None` if it is not stored.
///
/// # Errors
/// The store cannot be read.
pub fn load_model(store: &mut dyn Scan, kind: Kind, version: u32) -> Result<Option<Vec<u8>>, StoreError> {
    let (wanted, mut bytes) = (model_key(kind, version), None);
    store.scan(Table::Models, &mut |key, value| {
        if key == wanted {
            bytes = Some(value.to_vec());
        }
    })?;
    Ok(bytes)
}

/// Reads the ended VMs, in the order of recording.
///
/// # Errors
/// The store cannot be read.
pub fn outcomes(store: &mut dyn Scan) -> Result<Vec<(u64, EndedVm)>, StoreError> {
    let mut outcomes = Vec::new();
    store.scan(
        Table::Outcomes,
        &mut |key, value| match (key.try_into().map(u64::from_be_bytes), row(value)) {
            (Ok(number), Ok(vm)) => outcomes.push((number, vm)),
            _ => log_unreadable(Table::Outcomes, key),
        },
    )?;
    Ok(outcomes)
}

fn log_unreadable(table: Table, key: &[u8]) {
    tracing::error!(%table, ?key, "entry skipped: not a row of this version");
}

/// Checks an entry of these tables.
///
/// # Errors
/// The entry is not a row of this version, or the file is damaged.
pub fn check_row(table: Table, key: &[u8], value: &[u8]) -> Result<(), postcard::Error> {
    match table {
        Table::Outcomes => row::<EndedVm>(value).map(drop),
        Table::Forecasts => row::<VmStart>(value).map(drop),
        _ if key.len() == 1 => row::<ModelVersions>(value).map(drop),
        _ => match ModelFile::read(value) {
            Ok(_) | Err(FileError::Layout(_) | FileError::Features) => Ok(()), // a model of another version is unused, which is harmless
            Err(_) => Err(postcard::Error::DeserializeBadEncoding),
        },
    }
}
