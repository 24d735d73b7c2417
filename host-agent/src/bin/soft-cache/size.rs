//! Sizes of memory in the notation of Redis and of the other programs of the rack.

/// Parses a size in bytes with an optional unit in any case: of Redis, such as `100mb`, or binary, such as `100MiB`. As
/// in Redis, `mb` is 2^20 bytes and `m` is 10^6 bytes.
pub fn parse_size(text: &[u8]) -> Option<u64> {
    let text = std::str::from_utf8(text).ok()?.to_ascii_lowercase();
    let unit_start = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (digits, unit) = text.split_at(unit_start);
    let unit = match unit {
        "" | "b" => 1,
        "k" => 1000,
        "kb" | "kib" => 1 << 10,
        "m" => 1_000_000,
        "mb" | "mib" => 1 << 20,
        "g" => 1_000_000_000,
        "gb" | "gib" => 1 << 30,
        _ => return None,
    };
    digits.parse::<u64>().ok()?.checked_mul(unit)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_the_units_of_redis_or_binary_units() {
        for (text, expected) in [
            ("100", Some(100)),
            ("1k", Some(1000)),
            ("1Kb", Some(1024)),
            ("3MB", Some(3 << 20)),
            ("16MiB", Some(16 << 20)),
            ("2g", Some(2_000_000_000)),
            ("1gb", Some(1 << 30)),
            ("4GiB", Some(4 << 30)),
            ("", None),
            ("mb", None),
            ("-1", None),
            ("1tb", None),
            ("1.5gb", None),
            ("99999999999gb", None),
        ] {
            assert_eq!(parse_size(text.as_bytes()), expected, "{text:?}");
        }
    }
}
