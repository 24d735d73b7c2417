//! Predictions as entries of the store: ended VMs in the order of recording; properties and
//! predictions of running VMs, by reservation; models as files, and the serving ones. Encoded with
//! postcard; a row only gains variants.

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

/// Properties of a VM before its start, with its prediction.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Begun {
    /// Properties.
    pub ask: VmRequest,
    /// Of its workload, if it had been measured.
    pub counters: Option<Counters>,
    /// Prediction, if a model served.
    pub remark: Option<Remark>,
    /// Whether it was placed on the pool whole, as it does not mind.
    pub whole: bool,
}

/// Prediction of one model.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Remark {
    /// Its version.
    pub version: u32,
    /// Value.
    pub said: RiskPrediction,
}

/// A VM that has ended.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Past {
    /// As it began.
    pub begun: Begun,
    /// Outcome.
    pub outcome: Outcome,
}

/// Which models of one kind serve.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Line {
    /// The version that the next model gets; none is given twice.
    pub next: u32,
    /// Those that were promoted and not rolled back; the last serves.
    pub promoted: Vec<u32>,
}

impl Line {
    /// Serving models.
    pub fn serving(&self) -> Option<u32> {
        self.promoted.last().copied()
    }
}

/// A row with its version.
#[derive(Serialize, Deserialize)]
enum Row<T> {
    V1(T),
}

fn put<T: Serialize>(table: Table, key: Vec<u8>, row: T) -> Write {
    let value = postcard::to_stdvec(&Row::V1(row)).expect("a row has a known length everywhere");
    Write::Put { table, key, value }
}

fn row<T: DeserializeOwned>(value: &[u8]) -> Result<T, postcard::Error> {
    postcard::from_bytes(value).map(|Row::V1(row)| row)
}

/// Keeps a VM that has ended, under a number that no other has.
pub fn past(number: u64, past: &Past) -> Write {
    put(Table::Outcomes, number.to_be_bytes().to_vec(), past)
}

/// Forgets one.
pub fn no_past(number: u64) -> Write {
    Write::Delete { table: Table::Outcomes, key: number.to_be_bytes().to_vec() }
}

/// Returns the change that stores properties and prediction of a VM with memory.
pub fn begun(reservation: ReservationId, begun: &Begun) -> Write {
    put(Table::Forecasts, reservation.0.to_be_bytes().to_vec(), begun)
}

/// Forgets it.
pub fn not_begun(reservation: ReservationId) -> Write {
    Write::Delete { table: Table::Forecasts, key: reservation.0.to_be_bytes().to_vec() }
}

/// Keeps a model's file.
pub fn model(kind: Kind, version: u32, bytes: Vec<u8>) -> Write {
    Write::Put { table: Table::Models, key: model_key(kind, version), value: bytes }
}

/// Forgets a model.
pub fn no_model(kind: Kind, version: u32) -> Write {
    Write::Delete { table: Table::Models, key: model_key(kind, version) }
}

/// Keeps which models serve.
pub fn line(kind: Kind, line: &Line) -> Write {
    put(Table::Models, vec![tag(kind)], line)
}

fn model_key(kind: Kind, version: u32) -> Vec<u8> {
    [&[tag(kind)], &version.to_be_bytes()[..]].concat()
}

/// Never changes.
fn tag(kind: Kind) -> u8 {
    match kind {
        Kind::Frigid => 1,
        Kind::Sensitivity => 2,
    }
}

/// Everything that forecasts are made of, as a store has it.
#[derive(Debug, Default)]
pub struct Loaded {
    /// VMs that ended, the latest last.
    pub pasts: Vec<(u64, Past)>,
    /// VMs that had their memory.
    pub begun: Vec<(ReservationId, Begun)>,
    /// Which models serve.
    pub lines: Vec<(Kind, Line)>,
    /// Models, by kind and version.
    pub models: Vec<(Kind, u32, Vec<u8>)>,
}

/// Reads all rows. Unreadable rows are skipped and logged: predictions get worse, and the rack
/// keeps running.
///
/// # Errors
/// The store cannot be read.
pub fn load(store: &mut dyn Scan) -> Result<Loaded, StoreError> {
    let mut loaded = Loaded { pasts: pasts(store)?, ..Loaded::default() };
    store.scan(
        Table::Forecasts,
        &mut |key, value| match (key.try_into().map(u64::from_be_bytes), row(value)) {
            (Ok(id), Ok(begun)) => loaded.begun.push((ReservationId(id), begun)),
            _ => unreadable(Table::Forecasts, key),
        },
    )?;
    store.scan(Table::Models, &mut |key, value| {
        let kind = Kind::ALL.into_iter().find(|kind| key.first() == Some(&tag(*kind)));
        match (kind, &key[1.min(key.len())..]) {
            (Some(kind), []) => match row(value) {
                Ok(line) => loaded.lines.push((kind, line)),
                Err(_) => unreadable(Table::Models, key),
            },
            (Some(kind), version) => match version.try_into().map(u32::from_be_bytes) {
                Ok(version) => loaded.models.push((kind, version, value.to_vec())),
                Err(_) => unreadable(Table::Models, key),
            },
            (None, _) => unreadable(Table::Models, key),
        }
    })?;
    Ok(loaded)
}

/// The file of one model.
///
/// # Errors
/// The store cannot be read.
pub fn load_model(store: &mut dyn Scan, kind: Kind, version: u32) -> Result<Option<Vec<u8>>, StoreError> {
    let (wanted, mut found) = (model_key(kind, version), None);
    store.scan(Table::Models, &mut |key, value| {
        if key == wanted {
            found = Some(value.to_vec());
        }
    })?;
    Ok(found)
}

/// VMs that have ended, in the order in which that became known.
///
/// # Errors
/// The store cannot be read.
pub fn pasts(store: &mut dyn Scan) -> Result<Vec<(u64, Past)>, StoreError> {
    let mut pasts = Vec::new();
    store.scan(
        Table::Outcomes,
        &mut |key, value| match (key.try_into().map(u64::from_be_bytes), row(value)) {
            (Ok(number), Ok(past)) => pasts.push((number, past)),
            _ => unreadable(Table::Outcomes, key),
        },
    )?;
    Ok(pasts)
}

fn unreadable(table: Table, key: &[u8]) {
    tracing::error!(%table, ?key, "entry left out: not a row of this version");
}

/// Whether an entry of these tables is sound.
///
/// # Errors
/// It is not.
pub fn judge(table: Table, key: &[u8], value: &[u8]) -> Result<(), postcard::Error> {
    match table {
        Table::Outcomes => row::<Past>(value).map(drop),
        Table::Forecasts => row::<Begun>(value).map(drop),
        _ if key.len() == 1 => row::<Line>(value).map(drop),
        _ => match ModelFile::read(value) {
            Ok(_) | Err(FileError::Layout(_) | FileError::Features) => Ok(()), // a row of another version is not used, which is harmless
            Err(_) => Err(postcard::Error::DeserializeBadEncoding),
        },
    }
}
