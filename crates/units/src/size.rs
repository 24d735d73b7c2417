//! Types for sizes in bytes and for fractions. The name of a function that rounds states the
//! direction of rounding.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::QuotedText;

/// Size of a slice, the unit of ownership of pool memory: 1 GiB.
pub const SLICE: Bytes = Bytes::gib(1);

/// Size in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Bytes(u64);

impl Bytes {
    /// Zero bytes.
    pub const ZERO: Self = Self(0);

    /// Creates a size of `bytes` bytes.
    pub const fn new(bytes: u64) -> Self {
        Self(bytes)
    }

    /// Creates a size of `n` MiB. Saturates at `u64::MAX` bytes.
    pub const fn mib(n: u64) -> Self {
        Self(n.saturating_mul(1 << 20))
    }

    /// Creates a size of `n` GiB. Saturates at `u64::MAX` bytes.
    pub const fn gib(n: u64) -> Self {
        Self(n.saturating_mul(1 << 30))
    }

    /// Creates the size of `n` pages of 4 KiB. Saturates at `u64::MAX` bytes.
    pub const fn pages(n: u64) -> Self {
        Self(n.saturating_mul(4 << 10))
    }

    /// Creates the size of `n` slices.
    pub const fn slices(n: u32) -> Self {
        Self((n as u64) << 30)
    }

    /// Returns the number of bytes.
    pub const fn get(self) -> u64 {
        self.0
    }

    /// Rounds the size down to a multiple of [`SLICE`].
    pub const fn slices_floor(self) -> Self {
        Self(self.0 / SLICE.0 * SLICE.0)
    }

    /// Returns the number of slices in this size, or `None` if the size is not a multiple of
    /// [`SLICE`] or the number exceeds `u32::MAX`.
    pub fn as_slices(self) -> Option<u32> {
        if self.0.is_multiple_of(SLICE.0) { u32::try_from(self.0 / SLICE.0).ok() } else { None }
    }

    /// Returns whether the size is a multiple of 1 MiB.
    pub const fn is_whole_mib(self) -> bool {
        self.0.is_multiple_of(1 << 20)
    }

    /// Returns the sum, or `None` if it exceeds `u64::MAX`.
    pub const fn checked_add(self, other: Self) -> Option<Self> {
        match self.0.checked_add(other.0) {
            Some(sum) => Some(Self(sum)),
            None => None,
        }
    }

    /// Returns the difference, or `None` if `other` is larger.
    pub const fn checked_sub(self, other: Self) -> Option<Self> {
        match self.0.checked_sub(other.0) {
            Some(difference) => Some(Self(difference)),
            None => None,
        }
    }

    /// Returns the sum, or `u64::MAX` bytes if it is larger.
    pub const fn saturating_add(self, other: Self) -> Self {
        Self(self.0.saturating_add(other.0))
    }

    /// Returns the difference, or 0 if `other` is larger.
    pub const fn saturating_sub(self, other: Self) -> Self {
        Self(self.0.saturating_sub(other.0))
    }
}

impl std::iter::Sum for Bytes {
    fn sum<I: Iterator<Item = Self>>(sizes: I) -> Self {
        Self(sizes.fold(0, |sum, size| sum.saturating_add(size.0)))
    }
}

impl fmt::Display for Bytes {
    /// Formats in the largest unit that divides the size: `4GiB`, `512MiB`, `1000B`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            0 => f.write_str("0B"),
            n if n.is_multiple_of(1 << 30) => write!(f, "{}GiB", n >> 30),
            n if n.is_multiple_of(1 << 20) => write!(f, "{}MiB", n >> 20),
            n if n.is_multiple_of(1 << 10) => write!(f, "{}KiB", n >> 10),
            n => write!(f, "{n}B"),
        }
    }
}

/// Error for text that is not a valid size. The message contains the value, shortened, and the
/// rule.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SizeError {
    /// The text is not a whole number with a unit.
    #[error(
        "{} is not a size: must be a whole number with B, KiB, MiB, GiB or TiB (or K, M, G, T for the same powers of 1024), \
         such as 4GiB or 4G",
        QuotedText(.0)
    )]
    Malformed(String),
    /// The number of bytes exceeds `u64::MAX`.
    #[error("{} is too large: must be less than 16777216TiB", QuotedText(.0))]
    TooLarge(String),
}

impl std::str::FromStr for Bytes {
    type Err = SizeError;

    fn from_str(text: &str) -> Result<Self, SizeError> {
        let malformed = || SizeError::Malformed(text.to_owned());
        let too_large = || SizeError::TooLarge(text.to_owned());
        let unit_start = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
        let (digits, unit) = text.split_at(unit_start);
        let shift = match unit {
            "" | "B" => 0,
            "KiB" | "K" => 10,
            "MiB" | "M" => 20,
            "GiB" | "G" => 30,
            "TiB" | "T" => 40,
            _ => return Err(malformed()),
        };
        if digits.is_empty() {
            return Err(malformed());
        }
        let n: u64 = digits.parse().map_err(|_| too_large())?; // the text consists of digits
        n.checked_mul(1 << shift).map(Self).ok_or_else(too_large)
    }
}

/// Fraction, from 0 to 1. [`Fraction::new`] rejects other values and NaN.
#[derive(Clone, Copy, Debug, Default, PartialEq, PartialOrd, Serialize, Deserialize)]
#[serde(try_from = "f64", into = "f64")]
pub struct Fraction(f64);

/// Error for a number that is not between 0 and 1. The message contains the number and the rule.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
#[error("{0} is not a fraction: must be between 0 and 1")]
pub struct FractionError(f64);

impl Fraction {
    /// Creates a fraction from a number between 0 and 1.
    ///
    /// # Errors
    /// [`FractionError`] if the number is outside `0.0..=1.0` or NaN.
    pub fn new(x: f64) -> Result<Self, FractionError> {
        if (0.0..=1.0).contains(&x) { Ok(Self(x)) } else { Err(FractionError(x)) }
    }

    /// Returns the fraction as a number between 0 and 1.
    pub const fn get(self) -> f64 {
        self.0
    }

    /// Multiplies a size by this fraction, rounded down to whole bytes.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "the result is at most `whole`"
    )]
    #[expect(clippy::cast_precision_loss, reason = "sizes of real machines are below 2^53")]
    pub fn of(self, whole: Bytes) -> Bytes {
        Bytes((self.0 * whole.0 as f64) as u64)
    }
}

impl TryFrom<f64> for Fraction {
    type Error = FractionError;

    fn try_from(x: f64) -> Result<Self, FractionError> {
        Self::new(x)
    }
}

impl From<Fraction> for f64 {
    fn from(x: Fraction) -> f64 {
        x.0
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn size_accepts_common_notations() {
        assert_eq!("4GiB".parse(), Ok(Bytes::gib(4)));
        assert_eq!("512M".parse(), Ok(Bytes::mib(512)));
        assert_eq!("7".parse(), Ok(Bytes::new(7)));
        for invalid_text in ["", "GiB", "4 GiB", "-1GiB", "4.5GiB", "4gib", "99999999999TiB"] {
            assert!(invalid_text.parse::<Bytes>().is_err(), "{invalid_text:?} was accepted as a size");
        }
    }

    #[test]
    fn too_large_size_is_rejected_with_the_limit() {
        assert_eq!("16777215TiB".parse::<Bytes>().map(Bytes::get), Ok((u64::MAX >> 40) << 40));
        assert_eq!("18446744073709551615".parse(), Ok(Bytes::new(u64::MAX)));
        for text in ["16777216TiB", "99999999TiB", "18446744073709551616", "99999999999999999999GiB"] {
            let error = text.parse::<Bytes>().unwrap_err().to_string();
            assert_eq!(error, format!("{text:?} is too large: must be less than 16777216TiB"));
        }
    }

    proptest! {
        #[test]
        fn size_round_trips_through_its_text(bytes in any::<u64>()) {
            prop_assert_eq!(Bytes::new(bytes).to_string().parse(), Ok(Bytes::new(bytes)));
        }

        #[test]
        fn fraction_of_a_size_does_not_exceed_it(part in 0.0..=1.0f64, whole in 0..1u64 << 50) {
            prop_assert!(Fraction::new(part).unwrap().of(Bytes::new(whole)) <= Bytes::new(whole));
        }
    }
}
