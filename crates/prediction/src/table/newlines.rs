//! Normalization of line breaks to `\n`, so that line numbers in errors match those of an editor.
//! The CSV reader counts a `\r\n` only when it reads the byte after it.

use std::io;

/// Reader that replaces each `\r\n` and `\r` by `\n`.
pub(crate) struct NewlineNormalizer<R> {
    input: R,
    /// Whether the last byte read from the input was `\r`.
    after_cr: bool,
}

impl<R> NewlineNormalizer<R> {
    pub(crate) fn new(input: R) -> Self {
        Self { input, after_cr: false }
    }
}

impl<R: io::Read> io::Read for NewlineNormalizer<R> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        loop {
            let read = self.input.read(bytes)?;
            let mut kept = 0;
            for at in 0..read {
                let (byte, is_lf_of_crlf) = (bytes[at], self.after_cr && bytes[at] == b'\n');
                self.after_cr = byte == b'\r';
                if !is_lf_of_crlf {
                    bytes[kept] = if self.after_cr { b'\n' } else { byte };
                    kept += 1;
                }
            }
            // A result of 0 bytes would signal the end of the input.
            if kept > 0 || read == 0 {
                return Ok(kept);
            }
        }
    }
}
