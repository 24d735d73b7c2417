//! Validates the VM properties that are inputs of predictions.

use std::collections::HashMap;

use prediction::{
    frigid::Groups,
    sensitivity::{COUNTER_NAMES, counter_range},
};
use proto::v1 as wire;
use units::limits::{NAME_BYTES_MAX, VM_ATTRIBUTE_BYTES_MAX};

use super::InvalidField;
use crate::records::forecast_rows::Counters;

/// Validates the properties of a VM: names of its groups, and performance counters if present.
///
/// # Errors
/// [`InvalidField`] if a name is malformed, or a counter is unknown or out of range.
pub fn parse_profile(
    vm: String,
    profile: Option<wire::VmProfile>,
) -> Result<(Groups, Option<Counters>), InvalidField> {
    let wire::VmProfile { key, kind, place, counters } = profile.unwrap_or_default();
    let groups = Groups {
        vm: check_group_name("vm", vm)?,
        key: check_group_name("profile.key", key)?,
        kind: check_group_name("profile.kind", kind)?,
        place: check_group_name("profile.place", place)?,
    };
    let counters =
        if counters.is_empty() { None } else { Some(parse_counters("profile.counters", &counters)?) };
    Ok((groups, counters))
}

/// Validates the name of a group: at most [`VM_ATTRIBUTE_BYTES_MAX`] bytes, without control characters.
///
/// # Errors
/// [`InvalidField`] if the name is too long or contains control characters.
pub fn check_group_name(field: &'static str, text: String) -> Result<String, InvalidField> {
    if text.len() > VM_ATTRIBUTE_BYTES_MAX {
        let rule = format!("bytes: must be at most {VM_ATTRIBUTE_BYTES_MAX}");
        Err(InvalidField::new(field, text.len(), rule))
    } else if text.chars().any(char::is_control) {
        Err(InvalidField::new(field, format!("{text:?}"), "must not contain control characters"))
    } else {
        Ok(text)
    }
}

/// Returns the counters in the order of [`COUNTER_NAMES`]; missing counters are NaN.
///
/// # Errors
/// [`InvalidField`] if a counter is unknown or its value out of range.
pub fn parse_counters(field: &'static str, named: &HashMap<String, f64>) -> Result<Counters, InvalidField> {
    let mut counters = [f64::NAN; COUNTER_NAMES.len()];
    for (name, number) in named {
        let at = COUNTER_NAMES.iter().position(|counter| counter == name);
        let at = at.ok_or_else(|| {
            let name: String = name.chars().take(NAME_BYTES_MAX).collect();
            InvalidField::new(
                field,
                format!("{name:?}"),
                format!("must be one of {}", COUNTER_NAMES.join(", ")),
            )
        })?;
        let range = counter_range(at);
        if !range.contains(number) {
            let rule = format!("must be a number from {} to {}", range.start(), range.end());
            return Err(InvalidField::new(field, format!("{name} = {number}"), rule));
        }
        counters[at] = *number;
    }
    Ok(counters)
}
