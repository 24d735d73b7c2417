//! Sizes and shares. A size is never a page count and never a slice count; rounding is in the name.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The unit of pooling: 1 GiB of one device, one extent, one owner.
pub const SLICE: Bytes = Bytes::gib(1);

/// A size in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Bytes(u64);

impl Bytes {
    /// Nothing.
    pub const ZERO: Self = Self(0);

    /// So many bytes.
    pub const fn new(bytes: u64) -> Self {
        Self(bytes)
    }

    /// So many MiB. Saturates at `u64::MAX` bytes.
    pub const fn mib(n: u64) -> Self {
        Self(n.saturating_mul(1 << 20))
    }

    /// So many GiB. Saturates at `u64::MAX` bytes.
    pub const fn gib(n: u64) -> Self {
        Self(n.saturating_mul(1 << 30))
    }

    /// The size of so many slices.
    pub const fn slices(n: u32) -> Self {
        Self((n as u64) << 30)
    }

    /// In bytes.
    pub const fn get(self) -> u64 {
        self.0
    }

    /// The whole slices inside this size, as a size.
    pub const fn slices_floor(self) -> Self {
        Self(self.0 / SLICE.0 * SLICE.0)
    }

    /// How many slices this size is, or `None` if it is not whole slices or more than a `u32` counts.
    pub fn as_slices(self) -> Option<u32> {
        if self.0.is_multiple_of(SLICE.0) { u32::try_from(self.0 / SLICE.0).ok() } else { None }
    }

    /// Whether this is a whole number of MiB.
    pub const fn is_whole_mib(self) -> bool {
        self.0.is_multiple_of(1 << 20)
    }

    /// The sum, or `None` past `u64::MAX`.
    pub const fn checked_add(self, other: Self) -> Option<Self> {
        match self.0.checked_add(other.0) {
            Some(sum) => Some(Self(sum)),
            None => None,
        }
    }

    /// What is left, or `None` if `other` is larger.
    pub const fn checked_sub(self, other: Self) -> Option<Self> {
        match self.0.checked_sub(other.0) {
            Some(rest) => Some(Self(rest)),
            None => None,
        }
    }

    /// What is left, at least nothing.
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
    /// In the largest unit that divides it: `4GiB`, `512MiB`, `1000B`.
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

/// Not a size: what was read and the rule.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} is not a size: must be a whole number with B, KiB, MiB, GiB or TiB (or K, M, G, T for the same powers of 1024), \
     such as 4GiB or 4G"
)]
pub struct SizeError(String);

impl std::str::FromStr for Bytes {
    type Err = SizeError;

    fn from_str(text: &str) -> Result<Self, SizeError> {
        let no = || SizeError(text.to_owned());
        let at = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
        let (digits, unit) = text.split_at(at);
        let n: u64 = digits.parse().map_err(|_| no())?;
        let shift = match unit {
            "" | "B" => 0,
            "KiB" | "K" => 10,
            "MiB" | "M" => 20,
            "GiB" | "G" => 30,
            "TiB" | "T" => 40,
            _ => return Err(no()),
        };
        n.checked_mul(1 << shift).map(Self).ok_or_else(no)
    }
}

/// A part of a whole, `0.0..=1.0`. A NaN or 1.2 never gets past the door.
#[derive(Clone, Copy, Debug, Default, PartialEq, PartialOrd, Serialize, Deserialize)]
#[serde(try_from = "f64", into = "f64")]
pub struct Fraction(f64);

/// Not a share of anything.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
#[error("{0} is not a fraction: must be between 0 and 1")]
pub struct FractionError(f64);

impl Fraction {
    /// Checks the range.
    ///
    /// # Errors
    /// [`FractionError`] outside `0.0..=1.0` and for NaN.
    pub fn new(x: f64) -> Result<Self, FractionError> {
        if (0.0..=1.0).contains(&x) { Ok(Self(x)) } else { Err(FractionError(x)) }
    }

    /// As a plain number.
    pub const fn get(self) -> f64 {
        self.0
    }

    /// This part of a size, rounded down to the byte.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a fraction of a size is a smaller size"
    )]
    #[expect(clippy::cast_precision_loss, reason = "sizes of real machines are far below 2^53")]
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
    fn sizes_are_read_as_operators_write_them() {
        assert_eq!("4GiB".parse(), Ok(Bytes::gib(4)));
        assert_eq!("512M".parse(), Ok(Bytes::mib(512)));
        assert_eq!("7".parse(), Ok(Bytes::new(7)));
        for wrong in ["", "GiB", "4 GiB", "-1GiB", "4.5GiB", "4gib", "99999999999TiB"] {
            assert!(wrong.parse::<Bytes>().is_err(), "{wrong:?} was taken for a size");
        }
    }

    proptest! {
        #[test]
        fn a_size_reads_back_as_it_prints(bytes in any::<u64>()) {
            prop_assert_eq!(Bytes::new(bytes).to_string().parse(), Ok(Bytes::new(bytes)));
        }

        #[test]
        fn a_part_is_not_larger_than_its_whole(part in 0.0..=1.0f64, whole in 0..1u64 << 50) {
            prop_assert!(Fraction::new(part).unwrap().of(Bytes::new(whole)) <= Bytes::new(whole));
        }
    }
}
