//! Distributions of whole numbers, as the files write them: a Python dict of value and probability.

use std::collections::BTreeMap;

use crate::TOKENS_LIMIT;
use crate::statistics::LengthStatistics;

/// Values with their probabilities, ascending, the sum of probabilities above zero.
#[derive(Debug, Clone, PartialEq)]
pub struct Distribution {
    values: Vec<(u64, f64)>,
    total: f64,
}

impl Distribution {
    /// Reads `{9: 0.25, 10: 0.75}`; `Ok(None)` for `{}`.
    pub(super) fn parse(text: &str) -> Result<Option<Self>, String> {
        let inner = text
            .trim()
            .strip_prefix('{')
            .and_then(|rest| rest.strip_suffix('}'));
        let inner = inner.ok_or("not in braces")?.trim();
        if inner.is_empty() {
            return Ok(None);
        }
        let mut values = BTreeMap::new();
        for pair in inner.split(',').map(str::trim).filter(|pair| !pair.is_empty()) {
            let (value, share) = pair.split_once(':').ok_or_else(|| quoted(pair))?;
            let value = whole(value).ok_or_else(|| quoted(value))?;
            let share: f64 = share.trim().parse().map_err(|_| quoted(share))?;
            if !share.is_finite() || share < 0.0 {
                return Err(quoted(pair));
            }
            *values.entry(value).or_insert(0.0) += share;
        }
        let values: Vec<(u64, f64)> = values.into_iter().filter(|(_, share)| *share > 0.0).collect();
        let total: f64 = values.iter().map(|(_, share)| share).sum();
        if !(total.is_finite() && total > 0.0) {
            return Err("probabilities that sum to nothing".to_owned());
        }
        Ok(Some(Self { values, total }))
    }

    /// The value at a share of the whole between 0 and 1.
    pub(super) fn at(&self, share: f64) -> u64 {
        let mut left = share * self.total;
        for (value, weight) in &self.values {
            if left < *weight {
                return *value;
            }
            left -= weight;
        }
        self.values.last().map_or(1, |(value, _)| *value)
    }
}

/// Counts of tokens are written as whole numbers, now and then with `.0`.
fn whole(text: &str) -> Option<u64> {
    let text = text.trim();
    let text = text.strip_suffix(".0").unwrap_or(text);
    text.parse().ok().filter(|value| *value <= TOKENS_LIMIT)
}

fn quoted(text: &str) -> String {
    format!("`{}`", text.chars().take(60).collect::<String>())
}

/// Statistics of what is drawn from distributions with weights.
pub(super) fn mixture(parts: &[(f64, &Distribution)]) -> Option<LengthStatistics> {
    let mut merged: BTreeMap<u64, f64> = BTreeMap::new();
    for (weight, distribution) in parts {
        for (value, share) in &distribution.values {
            *merged.entry(*value).or_insert(0.0) += weight * share / distribution.total;
        }
    }
    let total: f64 = merged.values().sum();
    let mean = merged
        .iter()
        .map(|(value, weight)| *value as f64 * weight)
        .sum::<f64>()
        / total;
    let quantile = |share: f64| {
        let mut below = 0.0;
        let found = merged.iter().find(|(_, weight)| {
            below += **weight;
            below >= share * total
        });
        found.or(merged.last_key_value()).map(|(value, _)| *value as f64)
    };
    Some(LengthStatistics {
        mean,
        p50: quantile(0.5)?,
        p99: quantile(0.99)?,
        max: *merged.last_key_value()?.0,
    })
    .filter(|found| found.mean.is_finite())
}
