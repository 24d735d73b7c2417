//! Parses SHA-256 hashes in hexadecimal.

/// Decodes a SHA-256 hash from 64 lower-case hexadecimal digits. Returns `None` for other text.
pub fn parse_sha256(digits: &str) -> Option<[u8; 32]> {
    let value = |digit: &u8| match digit {
        b'0'..=b'9' => Some(digit - b'0'),
        b'a'..=b'f' => Some(digit - b'a' + 10),
        _ => None,
    };
    let pairs: &[[u8; 2]; 32] = digits.as_bytes().as_chunks().0.try_into().ok()?;
    let mut bytes = [0; 32];
    for (byte, [high, low]) in bytes.iter_mut().zip(pairs) {
        *byte = value(high)? << 4 | value(low)?;
    }
    (digits.len() == 64).then_some(bytes)
}
