//! Section `[prediction]`: risk limits, and retention of outcomes.

use units::{
    Fraction, Ns,
    limits::{OUTCOME_RETENTION_DEFAULT, OUTCOME_RETENTION_MAX},
};

use super::written::{Field, Section};
use crate::forecasts::{Rules, Settings};

/// Minimum retention of outcomes, in seconds: a model needs a day of data.
const KEEP_MIN: Ns = Ns::secs(24 * 3600);

impl Default for Settings {
    fn default() -> Self {
        Self { rules: Rules::default(), keep: OUTCOME_RETENTION_DEFAULT }
    }
}

pub(super) fn settings(mut section: Section<'_>) -> Option<Settings> {
    let default = Settings::default();
    let exceed_max = section.optional("exceed_max", share);
    let exceeds = section.optional("overpredicted_exceeds", share);
    let keep = section.optional("keep_s", |field| field.seconds(KEEP_MIN..=OUTCOME_RETENTION_MAX));
    section.end();
    Some(Settings {
        rules: Rules {
            exceed_max: exceed_max?.unwrap_or(default.rules.exceed_max),
            overpredicted_exceeds: exceeds?.unwrap_or(default.rules.overpredicted_exceeds),
        },
        keep: keep?.unwrap_or(default.keep),
    })
}

pub(super) fn share(field: &Field<'_>) -> Result<Fraction, String> {
    Fraction::new(field.number()?).map_err(|_| "must be a fraction between 0 and 1".to_owned())
}
