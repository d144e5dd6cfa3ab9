//! Proportions such as `5:1`, and whole units shared out in proportion.

use std::fmt;
use std::str::FromStr;

/// Non-negative whole weights, at least one of them positive: `5:1`, `70:30`, `1:1:0`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Proportions(Vec<u32>);

/// Why a list of weights is no [`Proportions`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ProportionsError {
    /// A part that is no whole number.
    #[error("`{part}` in `{text}` is not a whole number below 2^32, write proportions such as 70:30")]
    Part {
        /// What was found.
        text: String,
        /// The part of it that cannot be read.
        part: String,
    },
    /// No weight at all, or only zeros.
    #[error("proportions `{text}` need at least one weight above 0")]
    NothingToShare {
        /// What was found.
        text: String,
    },
    /// More weights than a layout can have devices.
    #[error("{parts} proportions were given, at most {limit} are accepted")]
    TooMany {
        /// How many were given.
        parts: usize,
        /// How many are accepted.
        limit: usize,
    },
}

impl Proportions {
    /// Most weights that one list may have.
    pub const MAX_PARTS: usize = 4096;

    /// Checks a list of weights.
    pub fn new(weights: Vec<u32>) -> Result<Self, ProportionsError> {
        let candidate = Self(weights);
        if candidate.len() > Self::MAX_PARTS {
            return Err(ProportionsError::TooMany {
                parts: candidate.len(),
                limit: Self::MAX_PARTS,
            });
        }
        if candidate.0.iter().all(|weight| *weight == 0) {
            return Err(ProportionsError::NothingToShare {
                text: candidate.to_string(),
            });
        }
        Ok(candidate)
    }

    /// `parts` equal weights; `None` for zero parts or more than [`Self::MAX_PARTS`].
    pub fn equal(parts: usize) -> Option<Self> {
        (1..=Self::MAX_PARTS)
            .contains(&parts)
            .then(|| Self(vec![1; parts]))
    }

    /// The weights, in rank or stage order.
    pub fn weights(&self) -> &[u32] {
        &self.0
    }

    /// How many weights there are, at least one.
    #[expect(clippy::len_without_is_empty, reason = "proportions are never empty")]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Shares `total` units by largest remainder; equal remainders go to the lower position first.
    ///
    /// The arithmetic is exact. A weight of zero never receives a unit: with `r` units left over, more
    /// than `r` positions have a positive remainder, and those come first.
    ///
    /// ```
    /// use infercluster_planner::proportions::Proportions;
    /// let proportions: Proportions = "9:5".parse()?;
    /// assert_eq!(proportions.share(14), [9, 5]);
    /// assert_eq!(proportions.share(3), [2, 1]);
    /// # Ok::<(), infercluster_planner::proportions::ProportionsError>(())
    /// ```
    pub fn share(&self, total: u32) -> Vec<u32> {
        let sum: u64 = self.0.iter().map(|&weight| u64::from(weight)).sum();
        let exact = |weight: u32| u64::from(total) * u64::from(weight);
        let mut shares: Vec<u32> = self
            .0
            .iter()
            .map(|&weight| (exact(weight) / sum) as u32)
            .collect();
        let mut by_remainder: Vec<usize> = (0..self.0.len()).collect();
        by_remainder.sort_by_key(|&part| (std::cmp::Reverse(exact(self.0[part]) % sum), part));
        let left = total - shares.iter().sum::<u32>();
        for &part in by_remainder.iter().take(left as usize) {
            shares[part] += 1;
        }
        shares
    }
}

impl FromStr for Proportions {
    type Err = ProportionsError;
    fn from_str(text: &str) -> Result<Self, ProportionsError> {
        let weights: Result<Vec<u32>, _> = text
            .split(':')
            .map(|part| {
                part.trim().parse().map_err(|_| ProportionsError::Part {
                    text: text.to_owned(),
                    part: part.to_owned(),
                })
            })
            .collect();
        Self::new(weights?)
    }
}

impl fmt::Display for Proportions {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let parts: Vec<String> = self.0.iter().map(u32::to_string).collect();
        f.pad(&parts.join(":"))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn share(text: &str, total: u32) -> Vec<u32> {
        text.parse::<Proportions>().unwrap().share(total)
    }

    #[test]
    fn shares_by_hand() {
        // 5 units of 90:10 are 4.5 and 0.5: a tie, which the lower position takes.
        assert_eq!(share("90:10", 5), [5, 0]);
        assert_eq!(share("90:10", 320), [288, 32]);
        assert_eq!(share("3:2:1", 12), [6, 4, 2]);
        assert_eq!(share("2:1", 3), [2, 1]);
        // 7 units of 3:2:1 are 3.5, 2.33, 1.17: the one left over goes to the first.
        assert_eq!(share("3:2:1", 7), [4, 2, 1]);
        assert_eq!(share("1:1:1", 2), [1, 1, 0]);
        assert_eq!(share("0:1", 7), [0, 7]);
    }

    #[test]
    fn bad_proportions_are_refused() {
        for text in ["", "1:", "a:b", "-1:2", "0:0", "1.5:1", "4294967296:1"] {
            assert!(text.parse::<Proportions>().is_err(), "{text}");
        }
        assert!(Proportions::new(Vec::new()).is_err());
        assert!(Proportions::new(vec![1; Proportions::MAX_PARTS + 1]).is_err());
    }

    proptest! {
        #[test]
        fn shares_are_within_one_of_exact(weights in prop::collection::vec(any::<u32>(), 1..9), total: u32) {
            prop_assume!(weights.iter().any(|weight| *weight > 0));
            let shares = Proportions::new(weights.clone()).unwrap().share(total);
            prop_assert_eq!(shares.iter().map(|&share| u64::from(share)).sum::<u64>(), u64::from(total));
            let sum: u128 = weights.iter().map(|&weight| u128::from(weight)).sum();
            for (&weight, &share) in weights.iter().zip(&shares) {
                let exact = u128::from(total) * u128::from(weight);
                prop_assert!(u128::from(share) * sum < exact + sum && exact < (u128::from(share) + 1) * sum);
                prop_assert!(weight > 0 || share == 0);
            }
        }
    }
}
