//! Files that people give: plain or gzipped, whichever they are.

use std::{
    fs::File,
    io::{self, BufRead, BufReader, Read as _},
    path::Path,
};

use flate2::bufread::MultiGzDecoder;

use crate::Failure;

/// How every gzip file begins.
const GZIP: [u8; 2] = [0x1f, 0x8b];

/// All bytes of a file that may not have more than so many.
pub fn bytes(path: &Path, most: usize) -> Result<Vec<u8>, Failure> {
    read(path, |input| {
        let mut bytes = Vec::new();
        input.take(most as u64 + 1).read_to_end(&mut bytes)?;
        let too_many = || io::Error::other(format!("it has more than {most} bytes"));
        if bytes.len() <= most { Ok(bytes) } else { Err(too_many()) }
    })
}

/// Opens a file and reads it; both ways to fail name it.
pub fn read<T, E>(path: &Path, read: impl FnOnce(Box<dyn BufRead>) -> Result<T, E>) -> Result<T, Failure>
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
