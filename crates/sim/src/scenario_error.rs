//! Checks of the fields of a scenario that a user wrote.

use std::fmt;

use units::{QuotedText, limits::NAME_BYTES_MAX};

/// Error for an invalid scenario.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("invalid {field} = {value}: {rule}")]
pub struct ScenarioError {
    /// Path of the field.
    pub field: String,
    /// Value of the field, shortened.
    pub value: String,
    /// Rule that the value violates.
    pub rule: String,
}

impl ScenarioError {
    pub(crate) fn new(field: impl Into<String>, value: impl fmt::Display, rule: impl Into<String>) -> Self {
        Self { field: field.into(), value: value.to_string(), rule: rule.into() }
    }
}

pub(crate) fn check_name(field: &str, name: &str) -> Result<(), ScenarioError> {
    let is_valid = !name.is_empty() && name.len() <= NAME_BYTES_MAX;
    let rule = || format!("must have from 1 to {NAME_BYTES_MAX} bytes");
    if is_valid { Ok(()) } else { Err(ScenarioError::new(field, QuotedText(name), rule())) }
}

/// Checks that a number is in a range. NaN is in no range.
pub(crate) fn check_range(field: &str, value: f64, min: f64, max: f64) -> Result<(), ScenarioError> {
    if (min..=max).contains(&value) {
        return Ok(());
    }
    Err(ScenarioError::new(field, format!("{value:?}"), format!("must be a number from {min} to {max}")))
}
