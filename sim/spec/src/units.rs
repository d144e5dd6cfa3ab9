//! Quantities with units. Files write them as text (`"450 GB/s"`, `"80 GiB"`, `"2 us"`); a bare number is
//! refused with the accepted units. Counts and clock values are integers, rates are checked `f64`.
//!
//! Invariants: a rate is finite and at least zero, a [`Fraction`] lies in `[0, 1]`, so no comparison
//! later has to wonder about NaN. The clock counts picoseconds; only reports round.

use std::fmt;
use std::ops::{Add, AddAssign, Div, Mul, Sub, SubAssign};
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

/// Why a text is not the quantity that was asked for.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum UnitError {
    /// A number stands where a number with a unit belongs.
    #[error("`{text}` has no unit, write one of {accepted}")]
    MissingUnit {
        /// What was found.
        text: String,
        /// The accepted units.
        accepted: &'static str,
    },
    /// The unit is not one of this quantity.
    #[error("`{text}` has unit `{unit}`, accepted are {accepted}")]
    UnknownUnit {
        /// What was found.
        text: String,
        /// The unit part of it.
        unit: String,
        /// The accepted units.
        accepted: &'static str,
    },
    /// The number part is no finite number of at least zero.
    #[error("`{text}` is not a finite number of at least zero followed by one of {accepted}")]
    BadNumber {
        /// What was found.
        text: String,
        /// The accepted units.
        accepted: &'static str,
    },
    /// The value does not fit the quantity.
    #[error("`{text}` is out of range, the limit is {limit}")]
    OutOfRange {
        /// What was found.
        text: String,
        /// The largest accepted value.
        limit: String,
    },
}

/// Splits `"450 GB/s"` into its number and the factor of its unit.
fn split_quantity(
    text: &str,
    units: &[(&str, f64)],
    accepted: &'static str,
) -> Result<(f64, f64), UnitError> {
    let trimmed = text.trim();
    // A letter ends the number, but `e` may belong to an exponent ("1e9 B").
    let bytes = trimmed.as_bytes();
    let is_number_byte = |i: usize| {
        let exponent = matches!(bytes[i], b'e' | b'E')
            && i > 0
            && bytes[i - 1].is_ascii_digit()
            && bytes
                .get(i + 1)
                .is_some_and(|next| next.is_ascii_digit() || matches!(next, b'+' | b'-'));
        bytes[i].is_ascii_digit() || matches!(bytes[i], b'.' | b'+' | b'-' | b'_') || exponent
    };
    let end = (0..bytes.len())
        .find(|&i| !is_number_byte(i))
        .unwrap_or(bytes.len());
    let (number, unit) = (trimmed[..end].replace('_', ""), trimmed[end..].trim());
    let value: f64 = number.parse().map_err(|_| UnitError::BadNumber {
        text: text.to_owned(),
        accepted,
    })?;
    if !value.is_finite() || value < 0.0 {
        return Err(UnitError::BadNumber {
            text: text.to_owned(),
            accepted,
        });
    }
    if unit.is_empty() {
        return Err(UnitError::MissingUnit {
            text: text.to_owned(),
            accepted,
        });
    }
    match units.iter().find(|(name, _)| *name == unit) {
        Some((_, factor)) => Ok((value, *factor)),
        None => Err(UnitError::UnknownUnit {
            text: text.to_owned(),
            unit: unit.to_owned(),
            accepted,
        }),
    }
}

/// Deserialises a text with a unit; everything else is answered with the accepted units.
fn deserialize_quantity<'de, T, D>(deserializer: D, accepted: &'static str) -> Result<T, D::Error>
where
    T: FromStr<Err = UnitError>,
    D: Deserializer<'de>,
{
    struct Visitor<T>(&'static str, std::marker::PhantomData<T>);
    impl<T: FromStr<Err = UnitError>> Visitor<T> {
        fn bare<E: de::Error>(&self, number: impl fmt::Display) -> E {
            E::custom(UnitError::MissingUnit {
                text: number.to_string(),
                accepted: self.0,
            })
        }
    }
    impl<T: FromStr<Err = UnitError>> de::Visitor<'_> for Visitor<T> {
        type Value = T;
        fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
            write!(f, "a text such as \"1 X\" with X one of {}", self.0)
        }
        fn visit_str<E: de::Error>(self, text: &str) -> Result<T, E> {
            text.parse().map_err(E::custom)
        }
        fn visit_u64<E: de::Error>(self, number: u64) -> Result<T, E> {
            Err(self.bare(number))
        }
        fn visit_i64<E: de::Error>(self, number: i64) -> Result<T, E> {
            Err(self.bare(number))
        }
        fn visit_f64<E: de::Error>(self, number: f64) -> Result<T, E> {
            Err(self.bare(number))
        }
    }
    let visitor = Visitor(accepted, std::marker::PhantomData);
    if deserializer.is_human_readable() {
        deserializer.deserialize_any(visitor)
    } else {
        // Binary formats hold the same text but cannot say what comes next.
        deserializer.deserialize_str(visitor)
    }
}

/// The text of an integer quantity: the largest unit that divides it exactly, so nothing is lost.
fn integer_text(value: u64, units: &[(&str, u64)]) -> String {
    let exact = units
        .iter()
        .rev()
        .find(|(_, factor)| value != 0 && value.is_multiple_of(*factor));
    let (name, factor) = exact.unwrap_or(&units[0]);
    format!("{} {name}", value / factor)
}

/// A number with `decimals` decimals in the largest unit not above it: for people, not for files.
fn rounded_text(value: f64, units: &[(&str, f64)]) -> String {
    let (name, factor) = units
        .iter()
        .rev()
        .find(|(_, factor)| value >= *factor)
        .unwrap_or(&units[0]);
    let scaled = value / factor;
    let decimals = if scaled >= 100.0 || scaled.fract() == 0.0 {
        0
    } else if scaled >= 10.0 {
        1
    } else {
        2
    };
    format!("{scaled:.decimals$} {name}")
}

macro_rules! integer_unit {
    ($(#[$doc:meta])* $name:ident, exact: $exact:expr, text: $text:expr, people: $people:expr, accepted: $accepted:expr) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
        pub struct $name(pub u64);

        impl $name {
            /// Nothing.
            pub const ZERO: Self = Self(0);
            /// Units accepted in files.
            pub const ACCEPTED_UNITS: &'static str = $accepted;

            /// The exact text that files hold.
            pub fn to_file_text(self) -> String {
                integer_text(self.0, $exact)
            }
            /// Sum, or `None` past the range.
            pub fn checked_add(self, other: Self) -> Option<Self> {
                self.0.checked_add(other.0).map(Self)
            }
            /// Product with a count, or `None` past the range.
            pub fn checked_mul(self, count: u64) -> Option<Self> {
                self.0.checked_mul(count).map(Self)
            }
            /// Difference, or zero where it would be negative.
            pub fn saturating_sub(self, other: Self) -> Self {
                Self(self.0.saturating_sub(other.0))
            }
            /// The value as `f64`, for cost formulas.
            pub fn as_f64(self) -> f64 {
                self.0 as f64
            }
        }
        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.pad(&rounded_text(self.0 as f64, $people))
            }
        }
        impl FromStr for $name {
            type Err = UnitError;
            fn from_str(text: &str) -> Result<Self, UnitError> {
                let (value, factor) = split_quantity(text, $text, $accepted)?;
                let scaled = value * factor;
                // 2^53: past it an f64 no longer holds every integer.
                if scaled > 9_007_199_254_740_992.0 && exact_integer(text, $text).is_none() {
                    return Err(UnitError::OutOfRange { text: text.to_owned(), limit: Self(1 << 53).to_file_text() });
                }
                Ok(Self(exact_integer(text, $text).unwrap_or(scaled.round() as u64)))
            }
        }
        impl Serialize for $name {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.serialize_str(&self.to_file_text())
            }
        }
        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                deserialize_quantity(deserializer, $accepted)
            }
        }
        impl Add for $name {
            type Output = Self;
            fn add(self, other: Self) -> Self {
                Self(self.0.checked_add(other.0).expect("sum of quantities fits 64 bits"))
            }
        }
        impl AddAssign for $name {
            fn add_assign(&mut self, other: Self) {
                *self = *self + other;
            }
        }
        impl Sub for $name {
            type Output = Self;
            fn sub(self, other: Self) -> Self {
                Self(self.0.checked_sub(other.0).expect("difference of quantities is not negative"))
            }
        }
        impl SubAssign for $name {
            fn sub_assign(&mut self, other: Self) {
                *self = *self - other;
            }
        }
        impl Mul<u64> for $name {
            type Output = Self;
            fn mul(self, count: u64) -> Self {
                Self(self.0.checked_mul(count).expect("product of a quantity and a count fits 64 bits"))
            }
        }
        impl std::iter::Sum for $name {
            fn sum<I: Iterator<Item = Self>>(items: I) -> Self {
                items.fold(Self::ZERO, Add::add)
            }
        }
    };
}

/// A whole number of a unit, such as `123 KiB` or `40h`, without the detour over `f64`.
fn exact_integer(text: &str, units: &[(&str, f64)]) -> Option<u64> {
    let text = text.trim();
    let (number, unit) = text.split_at(text.find(|letter: char| !letter.is_ascii_digit())?);
    let (_, factor) = units.iter().find(|(name, _)| *name == unit.trim())?;
    // Every factor of an integer unit is a whole number that `f64` holds.
    number.parse::<u64>().ok()?.checked_mul(*factor as u64)
}

const BYTES_EXACT: &[(&str, u64)] = &[
    ("B", 1),
    ("KiB", 1 << 10),
    ("MiB", 1 << 20),
    ("GiB", 1 << 30),
    ("TiB", 1 << 40),
];
const BYTES_TEXT: &[(&str, f64)] = &[
    ("B", 1.0),
    ("KiB", 1024.0),
    ("MiB", 1_048_576.0),
    ("GiB", 1_073_741_824.0),
    ("TiB", 1_099_511_627_776.0),
    ("kB", 1e3),
    ("KB", 1e3),
    ("MB", 1e6),
    ("GB", 1e9),
    ("TB", 1e12),
];
const BYTES_PEOPLE: &[(&str, f64)] = &[
    ("B", 1.0),
    ("KiB", 1024.0),
    ("MiB", 1_048_576.0),
    ("GiB", 1_073_741_824.0),
    ("TiB", 1_099_511_627_776.0),
];
integer_unit!(
    /// A number of bytes.
    Bytes, exact: BYTES_EXACT, text: BYTES_TEXT, people: BYTES_PEOPLE,
    accepted: "B, KiB, MiB, GiB, TiB, kB, MB, GB, TB"
);

const TIME_EXACT: &[(&str, u64)] = &[
    ("ps", 1),
    ("ns", 1_000),
    ("us", 1_000_000),
    ("ms", 1_000_000_000),
    ("s", 1_000_000_000_000),
];
const TIME_TEXT: &[(&str, f64)] = &[
    ("ps", 1.0),
    ("ns", 1e3),
    ("us", 1e6),
    ("ms", 1e9),
    ("s", 1e12),
    ("min", 6e13),
    ("h", 3.6e15),
];
const TIME_PEOPLE: &[(&str, f64)] = &[("ps", 1.0), ("ns", 1e3), ("us", 1e6), ("ms", 1e9), ("s", 1e12)];
integer_unit!(
    /// A span of time in picoseconds: the clock of every simulated event. 64 bits reach 213 days.
    SimDuration, exact: TIME_EXACT, text: TIME_TEXT, people: TIME_PEOPLE,
    accepted: "ps, ns, us, ms, s, min, h"
);

impl SimDuration {
    /// Rounds seconds to the picosecond; `None` for NaN, negatives and spans past 64 bits.
    pub fn from_seconds(seconds: f64) -> Option<Self> {
        let picoseconds = (seconds * 1e12).round();
        (picoseconds >= 0.0 && picoseconds < u64::MAX as f64).then_some(Self(picoseconds as u64))
    }

    /// Seconds, for formulas and reports.
    pub fn as_seconds(self) -> f64 {
        self.0 as f64 * 1e-12
    }

    /// Rounded to whole nanoseconds, as reports print it.
    pub fn as_nanoseconds(self) -> u64 {
        self.0 / 1_000 + u64::from(self.0 % 1_000 >= 500)
    }
}

/// An instant: picoseconds since the start of the run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct SimTime(pub u64);

impl SimTime {
    /// The start of the run.
    pub const ZERO: Self = Self(0);

    /// Span since an earlier instant.
    ///
    /// # Panics
    /// Where `earlier` is later: the clock never goes back.
    pub fn since(self, earlier: Self) -> SimDuration {
        SimDuration(self.0.checked_sub(earlier.0).expect("the clock never goes back"))
    }

    /// Seconds since the start.
    pub fn as_seconds(self) -> f64 {
        self.0 as f64 * 1e-12
    }
}

impl Add<SimDuration> for SimTime {
    type Output = Self;
    fn add(self, span: SimDuration) -> Self {
        Self(
            self.0
                .checked_add(span.0)
                .expect("instant fits 64 bits of picoseconds"),
        )
    }
}

impl Sub for SimTime {
    type Output = SimDuration;
    fn sub(self, earlier: Self) -> SimDuration {
        self.since(earlier)
    }
}

macro_rules! count_unit {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(pub u64);
        impl $name {
            /// None.
            pub const ZERO: Self = Self(0);
            /// The value as `f64`, for cost formulas.
            pub fn as_f64(self) -> f64 {
                self.0 as f64
            }
        }
        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
                fmt::Display::fmt(&self.0, f)
            }
        }
        impl Add for $name {
            type Output = Self;
            fn add(self, other: Self) -> Self {
                Self(self.0.checked_add(other.0).expect("sum of counts fits 64 bits"))
            }
        }
        impl AddAssign for $name {
            fn add_assign(&mut self, other: Self) {
                *self = *self + other;
            }
        }
        impl std::iter::Sum for $name {
            fn sum<I: Iterator<Item = Self>>(items: I) -> Self {
                items.fold(Self::ZERO, Add::add)
            }
        }
    };
}
count_unit!(
    /// A number of tokens. Its name carries the unit, so files hold a plain integer.
    Tokens
);
count_unit!(
    /// A number of floating-point operations (a fused multiply-add counts as two).
    Flops
);

macro_rules! rate_unit {
    ($(#[$doc:meta])* $name:ident, $units:expr, $accepted:expr) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, PartialOrd)]
        pub struct $name(f64);

        impl $name {
            /// Units accepted in files.
            pub const ACCEPTED_UNITS: &'static str = $accepted;

            /// `None` for NaN, infinities and negatives.
            pub fn new(per_second: f64) -> Option<Self> {
                (per_second.is_finite() && per_second >= 0.0).then_some(Self(per_second))
            }
            /// The rate per second.
            pub fn per_second(self) -> f64 {
                self.0
            }
            /// The text that files hold: the largest unit whose number reads back to the same rate.
            pub fn to_file_text(self) -> String {
                let units: &[(&str, f64)] = $units;
                units
                    .iter()
                    .rev()
                    .filter(|(_, factor)| self.0 >= *factor)
                    .map(|(name, factor)| format!("{} {name}", self.0 / factor))
                    .find(|text| text.parse::<Self>().is_ok_and(|read| read.0 == self.0))
                    .unwrap_or_else(|| format!("{} {}", self.0, units[0].0))
            }
        }
        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.pad(&rounded_text(self.0, $units))
            }
        }
        impl FromStr for $name {
            type Err = UnitError;
            fn from_str(text: &str) -> Result<Self, UnitError> {
                let accepted = Self::ACCEPTED_UNITS;
                let units: Vec<(&str, f64)> = $units.iter().chain(EXTRA_RATE_UNITS).copied().collect();
                let usable: Vec<_> =
                    units.into_iter().filter(|(name, _)| accepted.split(", ").any(|one| one == *name)).collect();
                let (value, factor) = split_quantity(text, &usable, accepted)?;
                Self::new(value * factor).ok_or_else(|| UnitError::BadNumber { text: text.to_owned(), accepted })
            }
        }
        impl Serialize for $name {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.serialize_str(&self.to_file_text())
            }
        }
        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                deserialize_quantity(deserializer, $accepted)
            }
        }
    };
}

/// Bit rates, as NICs are sold: read, never written.
const EXTRA_RATE_UNITS: &[(&str, f64)] =
    &[("Gbit/s", 1.25e8), ("Mbit/s", 1.25e5), ("GiB/s", 1_073_741_824.0)];

rate_unit!(
    /// Bytes per second, one direction.
    BytesPerSec,
    &[("B/s", 1.0), ("kB/s", 1e3), ("MB/s", 1e6), ("GB/s", 1e9), ("TB/s", 1e12)],
    "B/s, kB/s, MB/s, GB/s, TB/s, GiB/s, Mbit/s, Gbit/s"
);
rate_unit!(
    /// Floating-point operations per second, dense.
    FlopsPerSec,
    &[("FLOP/s", 1.0), ("MFLOP/s", 1e6), ("GFLOP/s", 1e9), ("TFLOP/s", 1e12), ("PFLOP/s", 1e15)],
    "FLOP/s, MFLOP/s, GFLOP/s, TFLOP/s, PFLOP/s"
);

impl Div<BytesPerSec> for Bytes {
    type Output = Option<SimDuration>;
    /// Transfer time without latency; `None` at rate zero.
    fn div(self, rate: BytesPerSec) -> Option<SimDuration> {
        SimDuration::from_seconds(self.as_f64() / rate.per_second())
    }
}

impl Div<FlopsPerSec> for Flops {
    type Output = Option<SimDuration>;
    /// Compute time at that rate; `None` at rate zero.
    fn div(self, rate: FlopsPerSec) -> Option<SimDuration> {
        SimDuration::from_seconds(self.as_f64() / rate.per_second())
    }
}

/// A share in `[0, 1]`.
#[derive(Debug, Clone, Copy, PartialEq, PartialOrd, Serialize)]
#[serde(transparent)]
pub struct Fraction(f64);

impl Fraction {
    /// Nothing.
    pub const ZERO: Self = Self(0.0);
    /// The whole.
    pub const ONE: Self = Self(1.0);

    /// `None` outside `[0, 1]` and for NaN.
    pub fn new(value: f64) -> Option<Self> {
        (0.0..=1.0).contains(&value).then_some(Self(value))
    }
    /// The value.
    pub fn value(self) -> f64 {
        self.0
    }
}

impl<'de> Deserialize<'de> for Fraction {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let value = f64::deserialize(deserializer)?;
        Self::new(value).ok_or_else(|| de::Error::custom(format!("{value} is not a share between 0 and 1")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantities_read_back_from_their_file_text() {
        assert_eq!("40h".parse(), Ok(SimDuration(144_000_000_000_000_000)));
        for value in [0, 1, 1023, 1024, 3 << 30, 80_000_000_000, u64::MAX] {
            assert_eq!(Bytes(value).to_file_text().parse(), Ok(Bytes(value)));
            assert_eq!(SimDuration(value).to_file_text().parse(), Ok(SimDuration(value)));
        }
        for value in [0.0, 1.0, 0.1, 450e9, 1.0 / 3.0, 989e12, 123_456_789.123] {
            let rate = BytesPerSec::new(value).unwrap();
            assert_eq!(rate.to_file_text().parse(), Ok(rate));
            let rate = FlopsPerSec::new(value).unwrap();
            assert_eq!(rate.to_file_text().parse(), Ok(rate));
        }
        assert_eq!(Bytes(80 << 30).to_file_text(), "80 GiB");
        assert_eq!(BytesPerSec::new(450e9).unwrap().to_file_text(), "450 GB/s");
    }

    #[test]
    fn bits_and_decimal_bytes_follow_the_rules() {
        assert_eq!("400 Gbit/s".parse(), Ok(BytesPerSec::new(50e9).unwrap()));
        assert_eq!("80 GB".parse(), Ok(Bytes(80_000_000_000)));
        assert_eq!("1.5KiB".parse(), Ok(Bytes(1536)));
        assert_eq!("2 us".parse(), Ok(SimDuration(2_000_000)));
        assert_eq!("1e3 B".parse(), Ok(Bytes(1000)));
    }

    #[test]
    fn what_is_no_quantity_says_which_units_are() {
        let bare = serde_json::from_str::<BytesPerSec>("450")
            .unwrap_err()
            .to_string();
        assert!(bare.contains("no unit") && bare.contains("GB/s"), "{bare}");
        for text in ["NaN GB/s", "inf GB/s", "-1 GB/s", "1 TFLOP/s", "1 GB", "GB/s", ""] {
            assert!(text.parse::<BytesPerSec>().is_err(), "{text}");
        }
        assert!("1e300 TiB".parse::<Bytes>().is_err());
        assert!("1e400 B".parse::<Bytes>().is_err());
    }

    #[test]
    fn clock_rounds_once() {
        assert_eq!(SimDuration::from_seconds(1.5e-12), Some(SimDuration(2)));
        assert_eq!(SimDuration::from_seconds(-1.0), None);
        assert_eq!(SimDuration::from_seconds(f64::NAN), None);
        assert_eq!(SimDuration(1_499).as_nanoseconds(), 1);
        assert_eq!(SimDuration(1_500).as_nanoseconds(), 2);
        assert_eq!(
            Bytes(450).div(BytesPerSec::new(450e9).unwrap()),
            Some(SimDuration(1_000))
        );
        assert_eq!(Bytes(1).div(BytesPerSec::new(0.0).unwrap()), None);
    }
}
