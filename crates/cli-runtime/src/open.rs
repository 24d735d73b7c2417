//! Reading of input files with limits: credentials, files, and tables. Files and tables may be
//! gzip-compressed.

use std::{
    borrow::Cow,
    fs::{self, File},
    io::{self, BufRead, BufReader, Read},
    path::Path,
};

use flate2::bufread::MultiGzDecoder;
use units::limits::{TABLE_BYTES_MAX, TABLE_LINE_BYTES_MAX};

use crate::Failure;

/// First bytes of every gzip file (RFC 1952).
const GZIP_MAGIC: [u8; 2] = [0x1f, 0x8b];

/// Size of the buffers between a file and the reader of a table, in bytes.
const READ_BUFFER_BYTES: usize = 64 << 10;

/// Reads the credentials file given by a command-line option. It must be a regular file of at most
/// `max` bytes.
///
/// # Errors
/// [`Failure::InvalidValue`] if the file violates a rule, [`Failure::File`] if it cannot be read.
pub fn credentials(option: &'static str, path: &Path, max: usize) -> Result<Vec<u8>, Failure> {
    let failed = |errno| Failure::File { operation: "read", path: path.to_owned(), errno };
    let invalid = |rule: Cow<'static, str>| Failure::InvalidValue {
        field: option,
        value: path.display().to_string(),
        rule,
    };
    // Opening a pipe would block until another process writes to it.
    if !fs::metadata(path).map_err(failed)?.is_file() {
        return Err(invalid("must be a regular file".into()));
    }
    let contents = File::open(path).and_then(|file| units::read_limited(file, max)).map_err(failed)?;
    contents.ok_or_else(|| invalid(format!("must have at most {max} bytes").into()))
}

/// Reads a whole file of at most `max` bytes after decompression.
///
/// # Errors
/// [`Failure::File`] if the file cannot be read or is longer than `max` bytes.
pub fn bytes(path: &Path, max: usize) -> Result<Vec<u8>, Failure> {
    read_decompressed(
        path,
        |file| Box::new(file),
        |input| units::read_limited(input, max)?.ok_or_else(|| too_long_error(max as u64)),
    )
}

/// Opens a table, a text file with one row per line, and passes its decompressed content to
/// `read_table`. The table may have at most [`TABLE_BYTES_MAX`] bytes, and each row at most
/// [`TABLE_LINE_BYTES_MAX`] bytes: a line, or several lines with line breaks in quotes.
///
/// # Errors
/// [`Failure::File`] with the path if the file cannot be opened or `read_table` returns an error.
pub fn table<T, E>(
    path: &Path,
    read_table: impl FnOnce(Box<dyn BufRead>) -> Result<T, E>,
) -> Result<T, Failure>
where
    E: std::error::Error + Send + Sync + 'static,
{
    table_through(path, |file| Box::new(file), read_table)
}

/// Opens a table as [`table`] does. The file is read through the reader that `wrap` returns, for
/// example to show progress.
///
/// # Errors
/// [`Failure::File`] with the path if the file cannot be opened or `read_table` returns an error.
pub fn table_through<T, E>(
    path: &Path,
    wrap: impl FnOnce(File) -> Box<dyn Read>,
    read_table: impl FnOnce(Box<dyn BufRead>) -> Result<T, E>,
) -> Result<T, Failure>
where
    E: std::error::Error + Send + Sync + 'static,
{
    let read =
        |input| read_table(Box::new(BufReader::with_capacity(READ_BUFFER_BYTES, TableReader::new(input))));
    read_decompressed(path, wrap, read)
}

fn read_decompressed<T, E>(
    path: &Path,
    wrap: impl FnOnce(File) -> Box<dyn Read>,
    read: impl FnOnce(Box<dyn BufRead>) -> Result<T, E>,
) -> Result<T, Failure>
where
    E: std::error::Error + Send + Sync + 'static,
{
    let failed = |errno| Failure::File { operation: "read", path: path.to_owned(), errno };
    let mut file = BufReader::with_capacity(READ_BUFFER_BYTES, wrap(File::open(path).map_err(failed)?));
    let is_gzip = file.fill_buf().map_err(failed)?.starts_with(&GZIP_MAGIC);
    let bytes: Box<dyn BufRead> =
        if is_gzip { Box::new(BufReader::new(MultiGzDecoder::new(file))) } else { Box::new(file) };
    read(bytes).map_err(|error| failed(io::Error::new(io::ErrorKind::InvalidData, error)))
}

fn too_long_error(max: u64) -> io::Error {
    io::Error::other(format!("longer than {max} bytes"))
}

/// Reader that limits the length of a table and of its rows. Lines end with `\n`, `\r` or `\r\n`. A line break in a
/// quoted field does not end the row.
struct TableReader<R> {
    input: R,
    bytes: u64,
    /// Number of the current line, from 1.
    line: u64,
    /// Length of the current row so far.
    row_bytes: u64,
    /// Whether the last byte was `\r`.
    after_cr: bool,
    field: FieldState,
}

/// Position in a field of CSV (RFC 4180).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FieldState {
    Start,
    Unquoted,
    Quoted,
    /// After the closing quote, or after the first of two quotes in a quoted field.
    AfterQuote,
}

impl FieldState {
    const fn after(self, byte: u8) -> Self {
        match (self, byte) {
            (Self::Quoted, b'"') => Self::AfterQuote,
            (Self::Start | Self::AfterQuote, b'"') | (Self::Quoted, _) => Self::Quoted,
            (_, b',' | b'\n' | b'\r') => Self::Start,
            _ => Self::Unquoted,
        }
    }
}

impl<R> TableReader<R> {
    const fn new(input: R) -> Self {
        Self { input, bytes: 0, line: 1, row_bytes: 0, after_cr: false, field: FieldState::Start }
    }

    /// Counts a byte, and returns whether the current row is within its limit.
    fn count_byte(&mut self, byte: u8) -> bool {
        self.field = self.field.after(byte);
        let is_quoted = self.field == FieldState::Quoted;
        match byte {
            b'\n' if self.after_cr => {}
            b'\n' | b'\r' => {
                self.line += 1;
                self.row_bytes = if is_quoted { self.row_bytes + 1 } else { 0 };
            }
            _ => self.row_bytes += 1,
        }
        self.after_cr = byte == b'\r';
        self.row_bytes <= TABLE_LINE_BYTES_MAX
    }

    fn row_error(&self) -> io::Error {
        io::Error::other(if self.field == FieldState::Quoted {
            format!(
                "a row is longer than {TABLE_LINE_BYTES_MAX} bytes, for example because a quote is missing"
            )
        } else {
            format!("line {} is longer than {TABLE_LINE_BYTES_MAX} bytes", self.line)
        })
    }
}

impl<R: Read> Read for TableReader<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.input.read(buffer)?;
        self.bytes += read as u64;
        if self.bytes > TABLE_BYTES_MAX {
            return Err(too_long_error(TABLE_BYTES_MAX));
        }
        if buffer[..read].iter().all(|byte| self.count_byte(*byte)) {
            return Ok(read);
        }
        Err(self.row_error())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reads a table whose lines have the given lengths. Returns the length of the table.
    fn read_lines(lengths: &[u64], line_break: &str) -> Result<usize, String> {
        let lines = lengths.iter().map(|bytes| "x".repeat(usize::try_from(*bytes).unwrap()) + line_break);
        let text: String = lines.collect();
        TableReader::new(text.as_bytes()).read_to_end(&mut Vec::new()).map_err(|error| error.to_string())
    }

    #[test]
    fn line_longer_than_its_limit_is_an_error() {
        const MAX: u64 = TABLE_LINE_BYTES_MAX;
        for line_break in ["\n", "\r", "\r\n"] {
            let bytes = 2 * (MAX + line_break.len() as u64);
            assert_eq!(read_lines(&[MAX, MAX], line_break), Ok(usize::try_from(bytes).unwrap()));
            let error = read_lines(&[3, MAX + 1, 3], line_break).unwrap_err();
            assert_eq!(error, format!("line 2 is longer than {MAX} bytes"));
        }
    }

    fn read(text: &str) -> Result<usize, String> {
        TableReader::new(text.as_bytes()).read_to_end(&mut Vec::new()).map_err(|error| error.to_string())
    }

    #[test]
    fn row_of_many_lines_longer_than_its_limit_is_an_error() {
        let row = |line_break: &str, lines| format!("a,b\n\"a{}\",0,1\n", line_break.repeat(lines));
        for line_break in ["\n", "\r"] {
            assert!(read(&row(line_break, 1 << 19)).is_ok());
            let error = read(&row(line_break, 2 << 20)).unwrap_err();
            assert!(error.contains("a row is longer than 1048576 bytes"), "{error}");
        }
        // The second quote of each pair and quotes inside unquoted fields open no quoted field.
        for line in ["\"a\"\"b\",1\n", "a\"b,1\n", "a\"\"b,1\n", "\"\",1\n"] {
            assert!(read(&line.repeat(1 << 18)).is_ok(), "{line}");
        }
    }

    #[test]
    fn table_longer_than_its_limit_is_an_error() {
        let mut table = TableReader { bytes: TABLE_BYTES_MAX - 1, ..TableReader::new(b"ab".as_slice()) };
        let error = table.read_to_end(&mut Vec::new()).unwrap_err().to_string();
        assert_eq!(error, format!("longer than {TABLE_BYTES_MAX} bytes"));
    }
}
