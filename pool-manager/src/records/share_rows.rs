//! Weights as entries of the store: one per host with weights, by its name. Encoded with postcard;
//! a row only gains variants.

use std::{collections::BTreeMap, sync::Arc};

use serde::{Deserialize, Serialize};
use units::{Name, limits::is_weight};

use crate::store::{Scan, StoreError, Table, Write};

/// Weights of one host's tenants, by name; each satisfies [`is_weight`].
pub type Weights = BTreeMap<Name, f64>;

/// Weights by host, for hosts with any.
pub type WeightsByHost = BTreeMap<Name, Arc<Weights>>;

/// Row with its version.
#[derive(Serialize, Deserialize)]
enum Row {
    V1(Weights),
}

/// Returns the change that stores all weights of a host, or deletes them.
pub fn write(host: &Name, weights: &Weights) -> Write {
    let (table, key) = (Table::Weights, host.as_str().as_bytes().to_vec());
    if weights.is_empty() {
        return Write::Delete { table, key };
    }
    let value =
        postcard::to_stdvec(&Row::V1(weights.clone())).expect("rows have sequences of known length only");
    Write::Put { table, key, value }
}

fn read(key: &[u8], value: &[u8]) -> Result<(Name, Weights), postcard::Error> {
    let host = std::str::from_utf8(key).ok().and_then(|host| Name::new(host).ok());
    let Row::V1(weights) = postcard::from_bytes(value)?;
    let is_valid = weights.values().all(|weight| is_weight(*weight));
    host.filter(|_| is_valid).map(|host| (host, weights)).ok_or(postcard::Error::DeserializeBadEncoding)
}

/// Reads all rows, and skips unreadable ones.
///
/// # Errors
/// The store cannot be read.
pub fn load(store: &mut dyn Scan) -> Result<WeightsByHost, StoreError> {
    let mut weights_by_host = WeightsByHost::new();
    store.scan(Table::Weights, &mut |key, value| match read(key, value) {
        Ok((host, weights)) => drop(weights_by_host.insert(host, Arc::new(weights))),
        Err(_) => tracing::error!(table = %Table::Weights, ?key, "entry skipped: not a row of this version"),
    })?;
    Ok(weights_by_host)
}

/// Checks an entry of this table.
///
/// # Errors
/// It is invalid.
pub fn check_row(key: &[u8], value: &[u8]) -> Result<(), postcard::Error> {
    read(key, value).map(drop)
}
