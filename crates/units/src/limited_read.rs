//! Reading of input with a limit.

use std::io::{self, Read};

/// Reads an input to its end. Returns `None` if it is longer than `max` bytes. At most one byte more
/// than the limit is read.
///
/// # Errors
/// The error of `input`.
pub fn read_limited(input: impl Read, max: usize) -> io::Result<Option<Vec<u8>>> {
    let mut bytes = Vec::new();
    input.take(max as u64 + 1).read_to_end(&mut bytes)?;
    Ok((bytes.len() <= max).then_some(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn input_is_read_up_to_the_limit() {
        assert_eq!(read_limited(b"1234".as_slice(), 4).unwrap().unwrap(), b"1234");
        assert_eq!(read_limited(b"1234".as_slice(), 3).unwrap(), None);
        assert_eq!(read_limited(io::repeat(0), 3).unwrap(), None);
    }
}
