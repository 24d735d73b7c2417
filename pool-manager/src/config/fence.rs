//! Settings for EMCs that cannot revoke access: the serial number of such an EMC, and the command
//! that fences a host.

use units::limits::{FENCE_ARGUMENTS_MAX, FENCE_TIMEOUT_DEFAULT, FENCE_TIMEOUT_MAX, FENCE_TIMEOUT_MIN};

use crate::{
    device::Driver,
    fence_command::{FenceCommand, HOST_PLACEHOLDER},
};
use config_file::{Field, Section};

/// Maximum number of hexadecimal digits of a serial number, which has 64 bits.
const SERIAL_DIGITS_MAX: usize = 16;

/// Reads section `[fence]`.
pub(super) fn parse_fence_command(mut section: Section<'_>) -> Option<FenceCommand> {
    let is_present = section.contains("command");
    let command =
        section.take_list("command", FENCE_ARGUMENTS_MAX, |field| field.as_str().map(str::to_owned));
    let within =
        section.take_optional("within_s", |field| field.to_duration(FENCE_TIMEOUT_MIN..=FENCE_TIMEOUT_MAX));
    let present = section.check(is_present, "command", "is missing");
    let command = command.and_then(|command| {
        let has_program = !is_present || command.first().is_some_and(|program| !program.is_empty());
        section.check(has_program, "command", "must begin with a program")?;
        let has_placeholder =
            !is_present || command.iter().any(|argument| argument.contains(HOST_PLACEHOLDER));
        section.check(
            has_placeholder,
            "command",
            "must have {host} in one of its arguments, which is replaced by the host's name",
        )?;
        Some(command)
    });
    section.reject_unknown_keys();
    present?;
    Some(FenceCommand { command: command?, within: within?.unwrap_or(FENCE_TIMEOUT_DEFAULT) })
}

/// Parses a serial number in the format of `/sys/bus/cxl/devices/memN/serial`, because hosts report
/// serial numbers in this format.
pub(super) fn parse_serial_number(field: &Field<'_>) -> Result<String, String> {
    let text = field.as_str()?;
    let digits = text.strip_prefix("0x").unwrap_or_default();
    let is_canonical = digits == "0" || !digits.starts_with('0');
    let is_hex = digits.bytes().all(|digit| matches!(digit, b'0'..=b'9' | b'a'..=b'f'));
    let fits = (1..=SERIAL_DIGITS_MAX).contains(&digits.len());
    (is_canonical && is_hex && fits).then(|| text.to_owned()).ok_or_else(|| {
        format!(
            "must be 0x and 1 to {SERIAL_DIGITS_MAX} hexadecimal digits (0-9, a-f) without leading zeros, as in sysfs"
        )
    })
}

/// Returns the error for an EMC that has a serial number although its driver can revoke access.
pub(super) fn describe_disallowed_serial(driver: Driver) -> String {
    let allowed: Vec<_> =
        Driver::ALL.into_iter().filter(|driver| !driver.can_revoke()).map(Driver::name).collect();
    format!("not allowed with driver {}, only with {}", driver.name(), allowed.join(", "))
}
