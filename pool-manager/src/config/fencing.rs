//! Settings for EMCs that cannot revoke access: a serial number under which hosts see them, and a
//! fence command.

use units::limits::{FENCE_ARGUMENTS_MAX, FENCE_WITHIN_DEFAULT, FENCE_WITHIN_MAX, FENCE_WITHIN_MIN};

use super::written::{Field, Section};
use crate::{
    device::Driver,
    power_off::{HOST, StopCommand},
};

/// Maximum of hexadecimal digits of a serial number.
const SERIAL_DIGITS_MAX: usize = 16;

/// Section `[fence]`.
pub(super) fn command(mut section: Section<'_>) -> Option<StopCommand> {
    let there = section.has("command");
    let words = section.list("command", FENCE_ARGUMENTS_MAX, |field| field.str().map(str::to_owned));
    let within = section.optional("within_s", |field| field.seconds(FENCE_WITHIN_MIN..=FENCE_WITHIN_MAX));
    let known = section.rule(there, "command", "is missing");
    let words = words.and_then(|words| {
        let runs = !there || words.first().is_some_and(|program| !program.is_empty());
        section.rule(runs, "command", "must begin with a program")?;
        let names = !there || words.iter().any(|word| word.contains(HOST));
        section.rule(
            names,
            "command",
            "must have {host} in one of its words, which the host's name replaces",
        )?;
        Some(words)
    });
    section.end();
    known?;
    Some(StopCommand { words: words?, within: within?.unwrap_or(FENCE_WITHIN_DEFAULT) })
}

/// Parses a serial number in the form of `/sys/bus/cxl/devices/memN/serial`, so that reports of
/// hosts can be compared with it.
pub(super) fn serial(field: &Field<'_>) -> Result<String, String> {
    let text = field.str()?;
    let digits = text.strip_prefix("0x").unwrap_or_default();
    let plain = digits == "0" || !digits.starts_with('0');
    let hex = digits.bytes().all(|digit| matches!(digit, b'0'..=b'9' | b'a'..=b'f'));
    let fits = (1..=SERIAL_DIGITS_MAX).contains(&digits.len());
    (plain && hex && fits).then(|| text.to_owned()).ok_or_else(|| {
        format!(
            "must be 0x and 1 to {SERIAL_DIGITS_MAX} digits of 0-9 a-f, the first not 0, as sysfs shows it"
        )
    })
}

/// Returns the reason why a device of this driver has no serial number.
pub(super) fn no_serial(driver: Driver) -> String {
    let with: Vec<_> =
        Driver::ALL.into_iter().filter(|driver| !driver.cuts_off()).map(Driver::name).collect();
    format!("must not be there with driver {}, only with {}", driver.name(), with.join(", "))
}
