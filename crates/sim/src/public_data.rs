//! Access to public data sets for tests. The data sets are optional and not part of the repository.

use std::path::{Path, PathBuf};

/// Opens a gzip-compressed file of the public data. Prints a message and returns `None` if the file
/// cannot be read.
pub(crate) fn open_gz(name: &str) -> Option<impl std::io::BufRead + use<>> {
    let folder = std::env::var_os("TARN_DATA").map_or_else(
        || PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../../shared/data")),
        PathBuf::from,
    );
    let path = folder.join(name);
    let Ok(compressed) = read_file(&path) else {
        eprintln!("SKIPPED: cannot read {}: set TARN_DATA to the folder of public data", path.display());
        return None;
    };
    Some(std::io::BufReader::new(flate2::bufread::MultiGzDecoder::new(std::io::Cursor::new(compressed))))
}

#[expect(clippy::disallowed_methods, reason = "tests that read public files")]
fn read_file(path: &Path) -> std::io::Result<Vec<u8>> {
    std::fs::read(path)
}
