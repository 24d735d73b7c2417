//! Reading of input files, plain or gzip-compressed.

use std::{
    fs::File,
    io::{self, BufRead, BufReader, Read as _},
    path::Path,
};

use flate2::bufread::MultiGzDecoder;

use crate::Failure;

/// First bytes of every gzip file (RFC 1952).
const GZIP_MAGIC: [u8; 2] = [0x1f, 0x8b];

/// Reads a whole file, which may have at most `max` bytes after decompression.
///
/// # Errors
/// [`Failure::File`] if the file cannot be read or is longer than `max` bytes.
pub fn bytes(path: &Path, max: usize) -> Result<Vec<u8>, Failure> {
    read(path, |input| {
        let mut bytes = Vec::new();
        input.take(max as u64 + 1).read_to_end(&mut bytes)?;
        let too_long = || io::Error::other(format!("longer than {max} bytes"));
        if bytes.len() <= max { Ok(bytes) } else { Err(too_long()) }
    })
}

/// Opens a file and passes its decompressed content to `read`.
///
/// # Errors
/// [`Failure::File`] with the path if the file cannot be opened or `read` returns an error.
pub fn read<T, E>(path: &Path, read: impl FnOnce(Box<dyn BufRead>) -> Result<T, E>) -> Result<T, Failure>
where
    E: std::error::Error + Send + Sync + 'static,
{
    let failed = |errno| Failure::File { operation: "read", path: path.to_owned(), errno };
    let mut file = BufReader::new(File::open(path).map_err(failed)?);
    let is_gzip = file.fill_buf().map_err(failed)?.starts_with(&GZIP_MAGIC);
    let bytes: Box<dyn BufRead> =
        if is_gzip { Box::new(BufReader::new(MultiGzDecoder::new(file))) } else { Box::new(file) };
    read(bytes).map_err(|error| failed(io::Error::new(io::ErrorKind::InvalidData, error)))
}
