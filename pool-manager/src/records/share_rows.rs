//! Encodes and decodes the weights of tenants as entries of the store. Each host with weights has
//! one entry, whose key is the host's name. A changed entry needs a new variant of `Row`.

use std::{collections::BTreeMap, sync::Arc};

use serde::{Deserialize, Serialize};
use units::{Name, limits::is_weight};

use crate::store::{Scan, StoreError, Table, Write};

/// Weights of one host's tenants, by tenant; each weight satisfies [`is_weight`].
pub type Weights = BTreeMap<Name, f64>;

/// Weights of all hosts that have weights, by host.
pub type WeightsByHost = BTreeMap<Name, Arc<Weights>>;

/// Entry with its format version.
#[derive(Serialize, Deserialize)]
enum Row {
    V1(Weights),
}

/// Returns the write that stores the weights of a host, or deletes the entry if there are none.
pub fn write(host: &Name, weights: &Weights) -> Write {
    let (table, key) = (Table::Weights, host.as_str().as_bytes().to_vec());
    if weights.is_empty() {
        return Write::Delete { table, key };
    }
    let value = postcard::to_stdvec(&Row::V1(weights.clone()))
        .expect("postcard fails only for sequences of unknown length");
    Write::Put { table, key, value }
}

fn read(key: &[u8], value: &[u8]) -> Result<(Name, Weights), postcard::Error> {
    let host = std::str::from_utf8(key).ok().and_then(|host| Name::new(host).ok());
    let Row::V1(weights) = postcard::from_bytes(value)?;
    let is_valid = weights.values().all(|weight| is_weight(*weight));
    host.filter(|_| is_valid).map(|host| (host, weights)).ok_or(postcard::Error::DeserializeBadEncoding)
}

/// Reads the weights of all hosts. Entries that cannot be decoded are logged and ignored.
///
/// # Errors
/// [`StoreError`] if the store cannot be read.
pub fn load(store: &mut dyn Scan) -> Result<WeightsByHost, StoreError> {
    let mut weights_by_host = WeightsByHost::new();
    store.scan(Table::Weights, &mut |key, value| match read(key, value) {
        Ok((host, weights)) => drop(weights_by_host.insert(host, Arc::new(weights))),
        Err(_) => {
            tracing::error!(table = %Table::Weights, ?key, "ignoring entry of the store: cannot decode it")
        }
    })?;
    Ok(weights_by_host)
}

/// Checks an entry of [`Table::Weights`].
///
/// # Errors
/// Returns an error if the entry cannot be decoded or contains an invalid weight.
pub fn check_row(key: &[u8], value: &[u8]) -> Result<(), postcard::Error> {
    read(key, value).map(drop)
}
