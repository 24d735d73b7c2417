//! The public files, where they lie; never part of the project.

use std::path::{Path, PathBuf};

/// A file of the folder of public data, unpacked; none if it is not there, which is said.
pub(crate) fn unpacked(name: &str) -> Option<impl std::io::BufRead + use<>> {
    let folder = std::env::var_os("TARN_DATA").map_or_else(
        || PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../../shared/data")),
        PathBuf::from,
    );
    let path = folder.join(name);
    let Ok(packed) = bytes(&path) else {
        eprintln!("SKIPPED: no {}: set TARN_DATA to the folder of public data", path.display());
        return None;
    };
    Some(std::io::BufReader::new(flate2::bufread::MultiGzDecoder::new(std::io::Cursor::new(packed))))
}

#[expect(clippy::disallowed_methods, reason = "tests that read public files")]
fn bytes(path: &Path) -> std::io::Result<Vec<u8>> {
    std::fs::read(path)
}
