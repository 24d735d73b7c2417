//! Form of a value in the cache: an optional expiry time, followed by the bytes of the client.

use units::UnixMs;

/// First byte of a value without an expiry time.
const PERSISTENT: u8 = 0;
/// First byte of a value with an expiry time, which follows in 8 bytes, little-endian.
const EXPIRING: u8 = 1;
/// Size of the header of a value with an expiry time.
const HEADER_BYTES_MAX: usize = 1 + size_of::<u64>();

/// Header of a value.
#[derive(Clone, Copy, Debug)]
pub struct Header {
    bytes: [u8; HEADER_BYTES_MAX],
    len: usize,
}

impl Header {
    /// Returns the header for an expiry time.
    pub fn new(expiry: Option<UnixMs>) -> Self {
        let mut bytes = [PERSISTENT; HEADER_BYTES_MAX];
        let Some(UnixMs(expiry)) = expiry else { return Self { bytes, len: 1 } };
        bytes[0] = EXPIRING;
        bytes[1..].copy_from_slice(&expiry.to_le_bytes());
        Self { bytes, len: HEADER_BYTES_MAX }
    }

    /// Returns the bytes of the header.
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

/// Splits a stored value into its expiry time and the bytes of the client.
pub fn split_value(stored: &[u8]) -> (Option<UnixMs>, &[u8]) {
    let (kind, rest) = stored.split_first().expect("each value has a header");
    match (*kind, rest.split_first_chunk()) {
        (EXPIRING, Some((expiry, value))) => (Some(UnixMs(u64::from_le_bytes(*expiry))), value),
        _ => (None, rest),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn header_contains_the_expiry_time() {
        for expiry in [None, Some(UnixMs(0)), Some(UnixMs(1_700_000_000_123)), Some(UnixMs(u64::MAX))] {
            for value in [&b""[..], b"value of more than 8 bytes", b"\x01"] {
                let stored = [Header::new(expiry).as_bytes(), value].concat();
                assert_eq!(split_value(&stored), (expiry, value));
            }
        }
    }
}
