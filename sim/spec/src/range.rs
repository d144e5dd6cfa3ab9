//! Half-open index ranges, written `"0..20"` in files: the form of every cut.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

/// The indices `start..end`. Empty where `start == end`; `start <= end` always holds.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct IndexRange {
    start: u32,
    end: u32,
}

impl IndexRange {
    /// `None` where `start > end`.
    pub const fn new(start: u32, end: u32) -> Option<Self> {
        if start <= end {
            Some(Self { start, end })
        } else {
            None
        }
    }
    /// The first index.
    pub const fn start(self) -> u32 {
        self.start
    }
    /// One past the last index.
    pub const fn end(self) -> u32 {
        self.end
    }
    /// How many indices.
    pub const fn len(self) -> u32 {
        self.end - self.start
    }
    /// Whether there is no index.
    pub const fn is_empty(self) -> bool {
        self.start == self.end
    }
    /// Whether `index` lies inside.
    pub const fn contains(self, index: u32) -> bool {
        self.start <= index && index < self.end
    }
    /// The common indices; empty where there are none.
    pub fn intersect(self, other: Self) -> Self {
        let start = self.start.max(other.start);
        Self {
            start,
            end: self.end.min(other.end).max(start),
        }
    }
    /// The indices, in order.
    pub fn iter(self) -> std::ops::Range<u32> {
        self.start..self.end
    }
    /// The indices as slice bounds.
    pub fn as_usize(self) -> std::ops::Range<usize> {
        self.start as usize..self.end as usize
    }
}

impl fmt::Debug for IndexRange {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "{}..{}", self.start, self.end)
    }
}

impl fmt::Display for IndexRange {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.pad(&format!("{}..{}", self.start, self.end))
    }
}

/// A text that is no range.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{text}` is not a range such as 0..20 with its start not above its end")]
pub struct RangeError {
    /// What was found.
    pub text: String,
}

impl FromStr for IndexRange {
    type Err = RangeError;
    fn from_str(text: &str) -> Result<Self, RangeError> {
        text.split_once("..")
            .and_then(|(start, end)| Self::new(start.trim().parse().ok()?, end.trim().parse().ok()?))
            .ok_or_else(|| RangeError {
                text: text.to_owned(),
            })
    }
}

impl Serialize for IndexRange {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for IndexRange {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?
            .parse()
            .map_err(de::Error::custom)
    }
}

/// What [`check_partition`] found wrong with a list of ranges that should cover `0..total` once, in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PartitionFault {
    /// Indices that no range holds.
    Gap(IndexRange),
    /// Indices held twice, or ranges out of order.
    Overlap(IndexRange),
    /// Indices past the end.
    Beyond(IndexRange),
}

/// Every way in which `ranges`, in order, fail to cover `0..total` exactly once.
pub fn check_partition(ranges: impl IntoIterator<Item = IndexRange>, total: u32) -> Vec<PartitionFault> {
    let mut faults = Vec::new();
    let mut covered = 0;
    for range in ranges.into_iter().filter(|range| !range.is_empty()) {
        if range.start > covered {
            faults.push(PartitionFault::Gap(IndexRange {
                start: covered,
                end: range.start,
            }));
        } else if range.start < covered {
            faults.push(PartitionFault::Overlap(IndexRange {
                start: range.start,
                end: covered.min(range.end),
            }));
        }
        if range.end > total {
            faults.push(PartitionFault::Beyond(IndexRange {
                start: range.start.max(total),
                end: range.end,
            }));
        }
        covered = covered.max(range.end);
    }
    if covered < total {
        faults.push(PartitionFault::Gap(IndexRange {
            start: covered,
            end: total,
        }));
    }
    faults
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(text: &str) -> IndexRange {
        text.parse().unwrap()
    }

    #[test]
    fn partitions_are_exact() {
        let check = |texts: &[&str]| check_partition(texts.iter().map(|text| range(text)), 12);
        assert_eq!(check(&["0..10", "10..12"]), []);
        assert_eq!(check(&["0..0", "0..12", "12..12"]), []);
        assert_eq!(check(&["0..5", "6..12"]), [PartitionFault::Gap(range("5..6"))]);
        assert_eq!(
            check(&["0..7", "5..12"]),
            [PartitionFault::Overlap(range("5..7"))]
        );
        assert_eq!(check(&["0..13"]), [PartitionFault::Beyond(range("12..13"))]);
        assert_eq!(check(&[]), [PartitionFault::Gap(range("0..12"))]);
    }

    #[test]
    fn backwards_ranges_are_refused() {
        for text in ["5..3", "0", "-1..2", "0..99999999999", "a..b"] {
            assert!(text.parse::<IndexRange>().is_err(), "{text}");
        }
    }
}
