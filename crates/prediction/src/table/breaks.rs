//! Line breaks of any system as one byte each, so that the lines that are counted are those that an editor shows: a reader of CSV counts
//! a break of two bytes only once it reads on.

use std::io;

/// Bytes with each break of `\r\n` or `\r` as `\n`.
pub(crate) struct Breaks<R> {
    input: R,
    /// Whether the last byte was the first of what may be two.
    is_half: bool,
}

impl<R> Breaks<R> {
    pub(crate) fn new(input: R) -> Self {
        Self { input, is_half: false }
    }
}

impl<R: io::Read> io::Read for Breaks<R> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        loop {
            let read = self.input.read(bytes)?;
            let mut kept = 0;
            for at in 0..read {
                let (byte, is_second) = (bytes[at], self.is_half && bytes[at] == b'\n');
                self.is_half = byte == b'\r';
                if !is_second {
                    bytes[kept] = if self.is_half { b'\n' } else { byte };
                    kept += 1;
                }
            }
            // Nothing kept of something read is no end.
            if kept > 0 || read == 0 {
                return Ok(kept);
            }
        }
    }
}
