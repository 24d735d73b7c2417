//! Limit on the size of a row. A row with line breaks in quotes has several lines.

use std::io;

use units::limits::TABLE_LINE_BYTES_MAX;

/// Bytes that a reader of CSV reads at once. The last of them can belong to the next row.
pub(super) const READ_BYTES: usize = 64 << 10;

/// Input that fails if a row is longer than [`TABLE_LINE_BYTES_MAX`], by at least [`READ_BYTES`].
#[derive(Debug)]
pub(super) struct RowLimit<R> {
    input: R,
    /// Bytes that were read since the end of the last row.
    row_bytes: u64,
}

impl<R> RowLimit<R> {
    /// Limits the rows of an input.
    pub fn new(input: R) -> Self {
        Self { input, row_bytes: 0 }
    }

    /// Records the end of a row.
    pub fn end_row(&mut self) {
        self.row_bytes = 0;
    }
}

impl<R: io::Read> io::Read for RowLimit<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.input.read(buffer)?;
        self.row_bytes += read as u64;
        if self.row_bytes > TABLE_LINE_BYTES_MAX + READ_BYTES as u64 {
            let message = format!(
                "a row is longer than {TABLE_LINE_BYTES_MAX} bytes, for example because a quote is missing"
            );
            return Err(io::Error::other(message));
        }
        Ok(read)
    }
}
