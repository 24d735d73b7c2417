//! Section `[prediction]`: risk limits, and retention of outcomes.

use prediction::operating_point::OperatorLimits;
use units::{
    Fraction, Ns,
    limits::{OUTCOME_RETENTION_DEFAULT, OUTCOME_RETENTION_MAX},
};

use crate::forecasts::Settings;
use config_file::{Field, Section};

/// Minimum retention of outcomes: one day, because a model needs a day of data.
const OUTCOME_RETENTION_MIN: Ns = Ns::secs(24 * 3600);

impl Default for Settings {
    fn default() -> Self {
        Self { limits: OperatorLimits::default(), retention: OUTCOME_RETENTION_DEFAULT }
    }
}

pub(super) fn parse_prediction_settings(mut section: Section<'_>) -> Option<Settings> {
    let default = Settings::default();
    let exceed_max = section.take_optional("exceed_max", parse_fraction);
    let exceeds = section.take_optional("overpredicted_exceeds", parse_fraction);
    let retention = section
        .take_optional("keep_s", |field| field.to_duration(OUTCOME_RETENTION_MIN..=OUTCOME_RETENTION_MAX));
    section.reject_unknown_keys();
    Some(Settings {
        limits: OperatorLimits {
            exceed_max: exceed_max?.unwrap_or(default.limits.exceed_max),
            overpredicted_exceeds: exceeds?.unwrap_or(default.limits.overpredicted_exceeds),
        },
        retention: retention?.unwrap_or(default.retention),
    })
}

pub(super) fn parse_fraction(field: &Field<'_>) -> Result<Fraction, String> {
    let fraction = field.to_number().ok().and_then(|number| Fraction::new(number).ok());
    fraction.ok_or_else(|| "must be a fraction from 0 to 1".to_owned())
}
