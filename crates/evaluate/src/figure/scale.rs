//! Scales of axes: conversion of values to positions, range of an axis, and labels.

/// Scale of an axis.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Scale {
    /// Linear scale of fractions, labelled in percent.
    Percent,
    /// Linear scale of fractions, labelled in percent. The axis does not start at 0, so that small
    /// differences are visible.
    PercentDetail,
    /// Linear scale of numbers.
    Number,
    /// Logarithmic scale of positive numbers, labelled with powers of ten.
    Logarithmic,
    /// Scale of names. The value of a name is its index.
    Names(Vec<String>),
}

/// Range of an axis, as positions.
#[derive(Clone, Copy, Debug)]
pub(super) struct AxisRange {
    pub from: f64,
    pub to: f64,
}

/// Maximum number of names that fit side by side, written horizontally.
const HORIZONTAL_NAMES_MAX: usize = 4;
/// Maximum number of labels of a linear axis.
const AXIS_LABELS_MAX: usize = 11;
/// Number of steps between the smallest and the largest value of a detail.
const DETAIL_STEPS: f64 = 5.0;
/// Additional space below the axis for vertical names, in pixels.
const VERTICAL_NAME_PX: u32 = 142;

impl Scale {
    /// Converts a value to its position on the axis.
    pub(super) fn position(&self, value: f64) -> f64 {
        match self {
            Self::Percent | Self::PercentDetail => 100.0 * value,
            Self::Logarithmic => value.log10(),
            Self::Number | Self::Names(_) => value,
        }
    }

    /// Returns the range of an axis that contains all values.
    pub(super) fn axis_range(&self, values: impl Iterator<Item = f64>) -> AxisRange {
        let positions = values.map(|value| self.position(value));
        let (low, high) = positions.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), position| {
            (low.min(position), high.max(position))
        });
        match self {
            Self::Names(names) => AxisRange { from: -0.5, to: names.len() as f64 - 0.5 },
            Self::Logarithmic => {
                let from = if low.is_finite() { low.floor() } else { 0.0 };
                AxisRange { from, to: high.ceil().max(from + 1.0) }
            }
            Self::PercentDetail if low.is_finite() => {
                let step = round_up_to_label(((high - low) / DETAIL_STEPS).max(0.1));
                AxisRange { from: (low / step).floor() * step, to: ((high / step).floor() + 1.0) * step }
            }
            Self::Percent | Self::PercentDetail | Self::Number => {
                let from = if low < 0.0 { -round_up_to_label(-low) } else { 0.0 };
                let to = if high <= 0.0 && from < 0.0 { 0.0 } else { round_up_to_label(high) };
                AxisRange { from, to }
            }
        }
    }

    /// Returns the label at a position; empty if the position has no label.
    pub(super) fn label(&self, position: f64) -> String {
        match self {
            Self::Percent | Self::PercentDetail | Self::Number => {
                format!("{}", (position * 100.0).round() / 100.0)
            }
            Self::Logarithmic if (position - position.round()).abs() < 1e-6 => {
                format_power_of_ten(position.round())
            }
            Self::Logarithmic | Self::Names(_) => String::new(),
        }
    }

    /// Returns the maximum number of labels of an axis with this range.
    pub(super) fn labels_max(&self, span: AxisRange) -> usize {
        match self {
            Self::Percent | Self::PercentDetail | Self::Number => AXIS_LABELS_MAX,
            #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "powers of ten")]
            Self::Logarithmic => (span.to - span.from) as usize + 1,
            Self::Names(_) => 0,
        }
    }

    /// Returns the space that labels need in addition to the space for numbers, in pixels.
    pub(super) fn extra_label_height_px(&self) -> u32 {
        if self.are_names_vertical() { VERTICAL_NAME_PX } else { 0 }
    }

    /// Returns whether the names are written vertically, because they do not fit side by side.
    pub(super) fn are_names_vertical(&self) -> bool {
        matches!(self, Self::Names(names) if names.len() > HORIZONTAL_NAMES_MAX)
    }
}

/// Formats a power of ten as a decimal number, such as 0.01 for the exponent -2.
fn format_power_of_ten(exponent: f64) -> String {
    let digits = exponent.abs();
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "digits of a number")]
    let digits = digits as usize;
    if exponent >= 0.0 {
        format!("1{}", "0".repeat(digits))
    } else {
        format!("0.{}1", "0".repeat(digits - 1))
    }
}

/// Rounds a value up to a multiple of 1, 2 or 5 times a power of ten, so that an axis ends with a
/// label.
fn round_up_to_label(value: f64) -> f64 {
    let value = value.max(0.1);
    let magnitude = 10_f64.powf(value.log10().floor() - 1.0);
    let steps = [1.0, 2.0, 5.0, 10.0, 20.0, 50.0].map(|step| step * magnitude);
    let step = steps.into_iter().find(|step| value / step <= 8.0).unwrap_or(value);
    (value / step - 1e-9).ceil() * step
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ends(scale: &Scale, values: &[f64]) -> (f64, f64) {
        let span = scale.axis_range(values.iter().copied());
        (span.from, span.to)
    }

    #[test]
    fn linear_axis_starts_at_zero_or_below_and_ends_at_round_number() {
        assert_eq!(ends(&Scale::Percent, &[0.031, 0.42]), (0.0, 50.0));
        assert_eq!(ends(&Scale::Percent, &[-0.03, 0.018]), (-3.0, 2.0));
        assert_eq!(ends(&Scale::Number, &[1.0, 40.0]), (0.0, 40.0));
        assert_eq!(ends(&Scale::Number, &[-7.0, -1.0]), (-7.0, 0.0));
        assert_eq!(ends(&Scale::Number, &[]), (0.0, 0.1));
        assert_eq!(ends(&Scale::PercentDetail, &[0.914, 1.0]), (90.0, 102.0));
        assert_eq!(ends(&Scale::PercentDetail, &[]), (0.0, 0.1));
    }

    #[test]
    fn logarithmic_axis_has_labels_only_at_powers_of_ten() {
        let span = Scale::Logarithmic.axis_range([0.3, 1536.0].into_iter());
        assert_eq!((span.from, span.to, Scale::Logarithmic.labels_max(span)), (-1.0, 4.0, 6));
        let labels = [-2.0, -1.0, 0.0, 0.5, 4.0].map(|position| Scale::Logarithmic.label(position));
        assert_eq!(labels, ["0.01", "0.1", "1", "", "10000"]);
        assert_eq!(ends(&Scale::Logarithmic, &[]), (0.0, 1.0));
    }

    #[test]
    fn names_are_vertical_above_four_names() {
        let names = |count: usize| Scale::Names(vec!["a".to_owned(); count]);
        assert_eq!(ends(&names(3), &[7.0]), (-0.5, 2.5));
        assert!(!names(4).are_names_vertical() && names(5).are_names_vertical());
        assert_eq!((names(4).extra_label_height_px(), Scale::Percent.extra_label_height_px()), (0, 0));
    }
}
