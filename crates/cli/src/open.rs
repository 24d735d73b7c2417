//! Files that people give: plain or gzipped, whichever they are.

use std::{
    fs::File,
    io::{self, BufRead, BufReader},
    path::Path,
};

use flate2::bufread::MultiGzDecoder;

use crate::Failure;

/// How every gzip file begins.
const GZIP: [u8; 2] = [0x1f, 0x8b];

/// Opens a file and reads it; both ways to fail name it.
pub(crate) fn read<T, E>(
    path: &Path,
    read: impl FnOnce(Box<dyn BufRead>) -> Result<T, E>,
) -> Result<T, Failure>
where
    E: std::error::Error + Send + Sync + 'static,
{
    let failed = |errno| Failure::File { tried: "read", path: path.to_owned(), errno };
    let mut file = BufReader::new(File::open(path).map_err(failed)?);
    let packed = file.fill_buf().map_err(failed)?.starts_with(&GZIP);
    let bytes: Box<dyn BufRead> =
        if packed { Box::new(BufReader::new(MultiGzDecoder::new(file))) } else { Box::new(file) };
    read(bytes).map_err(|wrong| failed(io::Error::new(io::ErrorKind::InvalidData, wrong)))
}
