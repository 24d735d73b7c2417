//! Integers in the text form of the Redis protocol.

/// Parses a decimal integer as Redis does: a minus sign is allowed, but no plus sign, no leading zero and no space.
pub fn parse_integer(text: &[u8]) -> Option<i64> {
    let digits = text.strip_prefix(b"-").unwrap_or(text);
    let is_canonical = match digits {
        [b'0'] => digits.len() == text.len(),
        [b'1'..=b'9', rest @ ..] => rest.iter().all(u8::is_ascii_digit),
        _ => false,
    };
    // Canonical text is ASCII.
    std::str::from_utf8(text).ok().filter(|_| is_canonical)?.parse().ok()
}

/// Appends an integer in decimal form.
pub fn push_integer(to: &mut Vec<u8>, integer: i64) {
    let mut digits = [0; 20];
    let mut start = digits.len();
    let mut rest = integer.unsigned_abs();
    loop {
        start -= 1;
        digits[start] = b'0' + u8::try_from(rest % 10).expect("a digit is below 10");
        rest /= 10;
        if rest == 0 {
            break;
        }
    }
    if integer < 0 {
        to.push(b'-');
    }
    to.extend_from_slice(&digits[start..]);
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn only_canonical_integers_are_parsed() {
        for (text, expected) in [
            ("0", Some(0)),
            ("-1", Some(-1)),
            ("9223372036854775807", Some(i64::MAX)),
            ("-9223372036854775808", Some(i64::MIN)),
            ("9223372036854775808", None),
            ("", None),
            ("-", None),
            ("-0", None),
            ("01", None),
            ("+1", None),
            (" 1", None),
            ("1 ", None),
            ("1.0", None),
            ("0x1", None),
        ] {
            assert_eq!(parse_integer(text.as_bytes()), expected, "{text:?}");
        }
    }

    proptest! {
        #[test]
        fn integer_round_trips_through_its_text(integer in any::<i64>()) {
            let mut text = Vec::new();
            push_integer(&mut text, integer);
            prop_assert_eq!(String::from_utf8(text.clone()).unwrap(), integer.to_string());
            prop_assert_eq!(parse_integer(&text), Some(integer));
        }
    }
}
