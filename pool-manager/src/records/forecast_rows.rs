//! Encodes and decodes entries of the prediction service in the store: outcomes of ended VMs,
//! properties and predictions of running VMs, model files, versions of models, and measured moves.
//! Rows are encoded with postcard by position. A changed row needs a new variant of `Row`.

use prediction::{
    file::{FileError, Kind, ModelFile},
    frigid::{Outcome, QuantileCurve, VmRequest},
    qos::MeasuredLoss,
    sensitivity::COUNTER_NAMES,
};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use units::{ReservationId, UnixMs};

use crate::store::{Scan, StoreError, Table, Write};

/// Performance counters of a core, in the order of [`COUNTER_NAMES`]; NaN for counters that were not
/// measured.
pub type Counters = [f64; COUNTER_NAMES.len()];

/// Properties of a VM at its start, and the prediction for it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct VmStart {
    /// Groups, size and start of the VM.
    pub request: VmRequest,
    /// Performance counters of the VM's workload, if they were measured.
    pub counters: Option<Counters>,
    /// Prediction of frigid memory; `None` without a serving model, or if no VM of the owner had
    /// ended.
    pub prediction: Option<ModelPrediction>,
    /// Whether the VM was placed on pool memory only, because it is insensitive to latency.
    pub pool_only: bool,
}

/// Prediction of frigid memory, with the model that made it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct ModelPrediction {
    /// Version of the model that made the prediction.
    pub version: u32,
    /// Predicted quantiles of the VM's untouched fraction.
    pub prediction: QuantileCurve,
}

/// Ended VM with its predicted and actual memory use.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EndedVm {
    /// Properties and prediction at the start of the VM.
    pub start: VmStart,
    /// End of the VM, and the memory that it did not touch.
    pub outcome: Outcome,
}

/// Loss of a VM that was measured by moving its pool memory to local memory.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MeasuredMove {
    /// Name of the VM.
    pub vm: String,
    /// Name of the program in the training set: the VM's customer or application, or its name.
    pub program: String,
    /// Time of the last sample of the measurement.
    pub measured: UnixMs,
    /// Loss and counters.
    pub loss: MeasuredLoss,
}

/// Next version and promoted versions of one kind of model.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelVersions {
    /// Version of the next stored model; versions are never reused.
    pub next: u32,
    /// Promoted versions that were not rolled back; the last version is serving.
    pub promoted: Vec<u32>,
}

impl ModelVersions {
    /// Returns the serving version, if any.
    pub fn serving(&self) -> Option<u32> {
        self.promoted.last().copied()
    }
}

/// Entry with its format version.
#[derive(Serialize, Deserialize)]
enum Row<T> {
    V1(T),
}

/// Entry about a VM with its format version.
#[derive(Serialize, Deserialize)]
enum VmRow<V1, T> {
    /// Predictions also contain a factor for the owner, which is not used any more.
    V1(V1),
    V2(T),
}

/// [`VmStart`] in format version 1: request, counters, prediction (model version, curve, factor for
/// the owner), and whether the VM was placed on pool memory only.
#[derive(Serialize, Deserialize)]
struct VmStartV1(VmRequest, Option<Counters>, Option<(u32, QuantileCurve, f64)>, bool);

/// [`EndedVm`] in format version 1.
#[derive(Serialize, Deserialize)]
struct EndedVmV1(VmStartV1, Outcome);

impl From<VmStartV1> for VmStart {
    fn from(VmStartV1(request, counters, prediction, pool_only): VmStartV1) -> Self {
        let prediction = prediction.map(|(version, prediction, _)| ModelPrediction { version, prediction });
        Self { request, counters, prediction, pool_only }
    }
}

impl From<EndedVmV1> for EndedVm {
    fn from(EndedVmV1(start, outcome): EndedVmV1) -> Self {
        Self { start: start.into(), outcome }
    }
}

fn encode_row<R: Serialize>(row: &R) -> Vec<u8> {
    postcard::to_stdvec(row).expect("postcard fails only for sequences of unknown length")
}

fn decode_row<T: DeserializeOwned>(value: &[u8]) -> Result<T, postcard::Error> {
    postcard::from_bytes(value).map(|Row::V1(row)| row)
}

fn decode_vm_row<V1: DeserializeOwned, T: DeserializeOwned + From<V1>>(
    value: &[u8],
) -> Result<T, postcard::Error> {
    postcard::from_bytes(value).map(|row| match row {
        VmRow::V1(row) => T::from(row),
        VmRow::V2(row) => row,
    })
}

fn decode_start(value: &[u8]) -> Result<VmStart, postcard::Error> {
    decode_vm_row::<VmStartV1, VmStart>(value)
}

fn decode_outcome(value: &[u8]) -> Result<EndedVm, postcard::Error> {
    decode_vm_row::<EndedVmV1, EndedVm>(value)
}

/// Returns the write that stores an ended VM under a unique number.
pub fn put_outcome(number: u64, vm: &EndedVm) -> Write {
    let value = encode_row(&VmRow::<EndedVmV1, _>::V2(vm));
    Write::Put { table: Table::Outcomes, key: number.to_be_bytes().to_vec(), value }
}

/// Returns the write that deletes an ended VM.
pub fn delete_outcome(number: u64) -> Write {
    Write::Delete { table: Table::Outcomes, key: number.to_be_bytes().to_vec() }
}

/// Returns the write that stores a measured move under a unique number.
pub fn put_measured_move(number: u64, moved: &MeasuredMove) -> Write {
    let value = encode_row(&Row::V1(moved));
    Write::Put { table: Table::MeasuredMoves, key: number.to_be_bytes().to_vec(), value }
}

/// Returns the write that deletes a measured move.
pub fn delete_measured_move(number: u64) -> Write {
    Write::Delete { table: Table::MeasuredMoves, key: number.to_be_bytes().to_vec() }
}

/// Returns the write that stores properties and prediction of a running VM.
pub fn put_start(reservation: ReservationId, start: &VmStart) -> Write {
    let value = encode_row(&VmRow::<VmStartV1, _>::V2(start));
    Write::Put { table: Table::Forecasts, key: reservation.0.to_be_bytes().to_vec(), value }
}

/// Returns the write that deletes properties and prediction of a VM.
pub fn delete_start(reservation: ReservationId) -> Write {
    Write::Delete { table: Table::Forecasts, key: reservation.0.to_be_bytes().to_vec() }
}

/// Returns the write that stores the file of a model.
pub fn put_model(kind: Kind, version: u32, bytes: Vec<u8>) -> Write {
    Write::Put { table: Table::Models, key: model_key(kind, version), value: bytes }
}

/// Returns the write that deletes a model.
pub fn delete_model(kind: Kind, version: u32) -> Write {
    Write::Delete { table: Table::Models, key: model_key(kind, version) }
}

/// Returns the write that stores the versions of a kind of model.
pub fn put_versions(kind: Kind, versions: &ModelVersions) -> Write {
    Write::Put { table: Table::Models, key: vec![kind_tag(kind)], value: encode_row(&Row::V1(versions)) }
}

fn model_key(kind: Kind, version: u32) -> Vec<u8> {
    [&[kind_tag(kind)], &version.to_be_bytes()[..]].concat()
}

/// Returns the first byte of keys of this kind. The values are stored and must never change.
fn kind_tag(kind: Kind) -> u8 {
    match kind {
        Kind::Frigid => 1,
        Kind::Sensitivity => 2,
        Kind::Loss => 3,
    }
}

/// All entries of the prediction service in the store.
#[derive(Debug, Default)]
pub struct StoredForecasts {
    /// Ended VMs with their numbers, oldest first.
    pub outcomes: Vec<(u64, EndedVm)>,
    /// Measured moves with their numbers, oldest first.
    pub moves: Vec<(u64, MeasuredMove)>,
    /// Properties and predictions of running VMs.
    pub starts: Vec<(ReservationId, VmStart)>,
    /// Versions of each kind of model.
    pub versions: Vec<(Kind, ModelVersions)>,
    /// Kind, version and file of each model.
    pub models: Vec<(Kind, u32, Vec<u8>)>,
}

/// Reads all entries of the prediction service. Entries that cannot be decoded are logged and
/// ignored, because the rack works without them.
///
/// # Errors
/// [`StoreError`] if the store cannot be read.
pub fn load(store: &mut dyn Scan) -> Result<StoredForecasts, StoreError> {
    let (outcomes, moves) = (load_outcomes(store)?, load_measured_moves(store)?);
    let mut loaded = StoredForecasts { outcomes, moves, ..StoredForecasts::default() };
    store.scan(Table::Forecasts, &mut |key, value| match (
        key.try_into().map(u64::from_be_bytes),
        decode_start(value),
    ) {
        (Ok(id), Ok(start)) => loaded.starts.push((ReservationId(id), start)),
        _ => log_unreadable(Table::Forecasts, key),
    })?;
    store.scan(Table::Models, &mut |key, value| {
        let kind = Kind::ALL.into_iter().find(|kind| key.first() == Some(&kind_tag(*kind)));
        match (kind, &key[1.min(key.len())..]) {
            (Some(kind), []) => match decode_row(value) {
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

/// Returns the file of a model, or `None` if the store does not contain it.
///
/// # Errors
/// [`StoreError`] if the store cannot be read.
pub fn load_model(store: &mut dyn Scan, kind: Kind, version: u32) -> Result<Option<Vec<u8>>, StoreError> {
    let (requested, mut bytes) = (model_key(kind, version), None);
    store.scan(Table::Models, &mut |key, value| {
        if key == requested {
            bytes = Some(value.to_vec());
        }
    })?;
    Ok(bytes)
}

/// Returns the ended VMs with their numbers, in ascending order.
///
/// # Errors
/// [`StoreError`] if the store cannot be read.
pub fn load_outcomes(store: &mut dyn Scan) -> Result<Vec<(u64, EndedVm)>, StoreError> {
    load_numbered(store, Table::Outcomes, decode_outcome)
}

/// Returns the measured moves with their numbers, in ascending order.
///
/// # Errors
/// [`StoreError`] if the store cannot be read.
pub fn load_measured_moves(store: &mut dyn Scan) -> Result<Vec<(u64, MeasuredMove)>, StoreError> {
    load_numbered(store, Table::MeasuredMoves, decode_row)
}

fn load_numbered<T>(
    store: &mut dyn Scan,
    table: Table,
    decode: impl Fn(&[u8]) -> Result<T, postcard::Error>,
) -> Result<Vec<(u64, T)>, StoreError> {
    let mut rows = Vec::new();
    store.scan(table, &mut |key, value| match (key.try_into().map(u64::from_be_bytes), decode(value)) {
        (Ok(number), Ok(row)) => rows.push((number, row)),
        _ => log_unreadable(table, key),
    })?;
    Ok(rows)
}

fn log_unreadable(table: Table, key: &[u8]) {
    tracing::error!(%table, ?key, "ignoring entry of the store: cannot decode it");
}

/// Checks an entry of [`Table::Outcomes`], [`Table::MeasuredMoves`], [`Table::Forecasts`] or
/// [`Table::Models`].
///
/// # Errors
/// Returns an error if the entry cannot be decoded or the model file is damaged.
pub fn check_row(table: Table, key: &[u8], value: &[u8]) -> Result<(), postcard::Error> {
    match table {
        Table::Outcomes => decode_outcome(value).map(drop),
        Table::MeasuredMoves => decode_row::<MeasuredMove>(value).map(drop),
        Table::Forecasts => decode_start(value).map(drop),
        _ if key.len() == 1 => decode_row::<ModelVersions>(value).map(drop),
        _ => match ModelFile::read(value) {
            Ok(_) | Err(FileError::Layout(_) | FileError::Features | FileError::Values) => Ok(()), // a model of another version is not used, which is harmless
            Err(_) => Err(postcard::Error::DeserializeBadEncoding),
        },
    }
}

#[cfg(test)]
mod tests {
    use prediction::frigid::{Groups, QUANTILE_LEVELS, VmUsage};
    use units::{Bytes, Fraction, UnixMs};

    use super::*;

    #[test]
    fn rows_of_format_version_1_are_read() {
        let request =
            VmRequest { groups: Groups::default(), requested: Bytes::gib(8), cores: None, begins: UnixMs(1) };
        let outcome =
            Outcome { ended: UnixMs(2), untouched: Fraction::new(0.5).unwrap(), usage: VmUsage::default() };
        let curve = QuantileCurve::new([0.25; QUANTILE_LEVELS.len()]);
        let old =
            || VmStartV1(request.clone(), Some([0.5; COUNTER_NAMES.len()]), Some((3, curve, 1.5)), true);
        let start = decode_start(&encode_row(&VmRow::<_, VmStart>::V1(old()))).unwrap();
        let prediction = Some(ModelPrediction { version: 3, prediction: curve });
        let counters = Some([0.5; COUNTER_NAMES.len()]);
        assert_eq!(start, VmStart { request: request.clone(), counters, prediction, pool_only: true });
        let ended = decode_outcome(&encode_row(&VmRow::<_, EndedVm>::V1(EndedVmV1(old(), outcome)))).unwrap();
        assert_eq!(ended, EndedVm { start, outcome });
        let Write::Put { value, .. } = put_outcome(1, &ended) else { panic!("an outcome is put") };
        assert_eq!(decode_outcome(&value).unwrap(), ended);
    }
}
