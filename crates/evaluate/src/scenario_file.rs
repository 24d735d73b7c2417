//! JSON files with scenarios of simulations.

use std::{error::Error, io, path::Path};

use cli_runtime::{Failure, open};
use serde::de::DeserializeOwned;
use units::limits::TIERING_SCENARIO_BYTES_MAX;

/// Reads a file, and converts its content with `check`.
///
/// # Errors
/// [`Failure::File`] if the file cannot be read, is not valid JSON, or does not pass the check.
pub(super) fn read<S: DeserializeOwned, T>(
    path: &Path,
    check: impl FnOnce(S) -> Result<T, Box<dyn Error + Send + Sync>>,
) -> Result<T, Failure> {
    let bytes = open::bytes(path, TIERING_SCENARIO_BYTES_MAX)?;
    let checked = serde_json::from_slice(&bytes).map_err(Into::into).and_then(check);
    checked.map_err(|error| Failure::File {
        operation: "read",
        path: path.to_owned(),
        errno: io::Error::new(io::ErrorKind::InvalidData, error),
    })
}
