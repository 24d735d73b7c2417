//! Scales of axes: positions of values, range and labels.

/// Scale of an axis.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Scale {
    /// Fractions, shown in percent.
    Percent,
    /// Numbers.
    Number,
    /// Positive numbers on a logarithmic scale.
    Powers,
    /// Names, by their index.
    Names(Vec<String>),
}

/// Range of an axis, in positions.
#[derive(Clone, Copy, Debug)]
pub(super) struct Span {
    pub from: f64,
    pub to: f64,
}

/// Number of names that fit side by side.
const NAMES_SIDE_BY_SIDE: usize = 4;
const LABELS: usize = 11;
/// Length of vertical names, in line heights.
const UPRIGHT_PX: u32 = 142;

impl Scale {
    /// Returns the position of a value.
    pub(super) fn place(&self, value: f64) -> f64 {
        match self {
            Self::Percent => 100.0 * value,
            Self::Powers => value.log10(),
            Self::Number | Self::Names(_) => value,
        }
    }

    /// Returns an axis that contains all values.
    pub(super) fn span(&self, values: impl Iterator<Item = f64>) -> Span {
        let places = values.map(|value| self.place(value));
        let (low, high) = places
            .fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), place| (low.min(place), high.max(place)));
        match self {
            Self::Names(names) => Span { from: -0.5, to: names.len() as f64 - 0.5 },
            Self::Powers => {
                let from = if low.is_finite() { low.floor() } else { 0.0 };
                Span { from, to: high.ceil().max(from + 1.0) }
            }
            Self::Percent | Self::Number => {
                let from = if low < 0.0 { -round_up(-low) } else { 0.0 };
                let to = if high <= 0.0 && from < 0.0 { 0.0 } else { round_up(high) };
                Span { from, to }
            }
        }
    }

    /// Returns the label of a position.
    pub(super) fn label(&self, place: f64) -> String {
        match self {
            Self::Percent | Self::Number => format!("{}", (place * 100.0).round() / 100.0),
            Self::Powers if (place - place.round()).abs() < 1e-6 => power(place.round()),
            Self::Powers | Self::Names(_) => String::new(),
        }
    }

    /// Returns the maximum number of labels.
    pub(super) fn labels(&self, span: Span) -> usize {
        match self {
            Self::Percent | Self::Number => LABELS,
            #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "powers of ten")]
            Self::Powers => (span.to - span.from) as usize + 1,
            Self::Names(_) => 0,
        }
    }

    /// Returns the additional space of labels compared with numbers.
    pub(super) fn extra_label_px(&self) -> u32 {
        if self.names_are_upright() { UPRIGHT_PX } else { 0 }
    }

    /// Returns whether the names do not fit side by side.
    pub(super) fn names_are_upright(&self) -> bool {
        matches!(self, Self::Names(names) if names.len() > NAMES_SIDE_BY_SIDE)
    }
}

/// Returns this power of ten.
fn power(exponent: f64) -> String {
    let digits = exponent.abs();
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "digits of a number")]
    let digits = digits as usize;
    if exponent >= 0.0 {
        format!("1{}", "0".repeat(digits))
    } else {
        format!("0.{}1", "0".repeat(digits - 1))
    }
}

/// Returns the next round number (1, 2 or 5 times a power of ten), so that an axis ends with a
/// label.
fn round_up(value: f64) -> f64 {
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
        let span = scale.span(values.iter().copied());
        (span.from, span.to)
    }

    #[test]
    fn axis_starts_at_zero_or_below_and_ends_with_round_number() {
        assert_eq!(ends(&Scale::Percent, &[0.031, 0.42]), (0.0, 50.0));
        assert_eq!(ends(&Scale::Percent, &[-0.03, 0.018]), (-3.0, 2.0));
        assert_eq!(ends(&Scale::Number, &[1.0, 40.0]), (0.0, 40.0));
        assert_eq!(ends(&Scale::Number, &[-7.0, -1.0]), (-7.0, 0.0));
        assert_eq!(ends(&Scale::Number, &[]), (0.0, 0.1));
    }

    #[test]
    fn powers_of_ten_are_labelled_without_values_between() {
        let span = Scale::Powers.span([0.3, 1536.0].into_iter());
        assert_eq!((span.from, span.to, Scale::Powers.labels(span)), (-1.0, 4.0, 6));
        let labels = [-2.0, -1.0, 0.0, 0.5, 4.0].map(|place| Scale::Powers.label(place));
        assert_eq!(labels, ["0.01", "0.1", "1", "", "10000"]);
        assert_eq!(ends(&Scale::Powers, &[]), (0.0, 1.0));
    }

    #[test]
    fn names_are_centred_and_vertical_when_many() {
        let names = |count: usize| Scale::Names(vec!["a".to_owned(); count]);
        assert_eq!(ends(&names(3), &[7.0]), (-0.5, 2.5));
        assert!(!names(4).names_are_upright() && names(5).names_are_upright());
        assert_eq!((names(4).extra_label_px(), Scale::Percent.extra_label_px()), (0, 0));
    }
}
