//! Drawing requests: each client's gaps within each of its windows, lengths from its distributions.

use infercluster_spec::{Request, RequestId, SimTime, Tokens, Trace};
use rand::RngExt as _;
use rand_chacha::ChaCha12Rng;
use rand_distr::{Distribution as _, Exp1, Gamma, Weibull};

use super::{Client, ClientPool, GapForm, RateWindow};
use crate::error::{TraceError, clock_limit};
use crate::synth::{REQUESTS_LIMIT, stream};

impl ClientPool {
    /// Draws the requests that arrive between two instants; arrivals count from the first of them.
    ///
    /// Gaps have the fitted form and shape of their window and a mean of one over its rate. A window starts
    /// afresh: no gap reaches over its end.
    pub fn generate(&self, from_s: u64, until_s: u64, seed: u64) -> Result<Trace, TraceError> {
        let mut arrivals: Vec<(f64, u64, u64)> = Vec::new();
        let mut expected = 0.0;
        for client in &self.clients {
            let mut random = stream(seed, &format!("client {}", client.number));
            for (window, end_s) in client.windows() {
                let (start_s, end_s) = (window.start_s.max(from_s), end_s.min(until_s));
                if window.rate <= 0.0 || start_s >= end_s {
                    continue;
                }
                expected += window.rate * (end_s - start_s) as f64;
                if expected > REQUESTS_LIMIT as f64 {
                    return Err(TraceError::Parameter {
                        parameter: "until",
                        found: format!("{until_s} s with some {expected:.0} requests"),
                        expected: "a shorter time: at most 50,000,000 requests are drawn",
                    });
                }
                draw_window(client, window, (start_s, end_s), &mut random, &mut arrivals);
            }
        }
        arrivals.sort_by(|a, b| a.0.total_cmp(&b.0));
        let mut requests = Vec::with_capacity(arrivals.len());
        for (index, (at_s, input, output)) in (0_u64..).zip(arrivals) {
            let picoseconds = ((at_s - from_s as f64) * 1e12).round();
            if picoseconds >= u64::MAX as f64 {
                return Err(TraceError::ClockRange {
                    index,
                    limit: clock_limit(),
                });
            }
            requests.push(Request {
                id: RequestId(index),
                arrival: Some(SimTime(picoseconds.max(0.0) as u64)),
                input: Tokens(input),
                output: Tokens(output),
                block_hashes: Vec::new(),
            });
        }
        if requests.is_empty() {
            return Err(TraceError::Empty {
                file: self.name.clone(),
            });
        }
        Ok(Trace {
            name: self.name.clone(),
            requests,
            hash_block: None,
        })
    }
}

fn draw_window(
    client: &Client,
    window: RateWindow,
    (start_s, end_s): (u64, u64),
    random: &mut ChaCha12Rng,
    arrivals: &mut Vec<(f64, u64, u64)>,
) {
    let Some(lengths) = client.lengths_at(window.start_s) else {
        return;
    };
    let (Some(input), Some(output)) = (&lengths.input, &lengths.output) else {
        return;
    };
    let mean_s = 1.0 / window.rate;
    let mut at_s = start_s as f64;
    // A heavy-tailed form can draw gaps near zero without end; twice what is expected and some is enough.
    let most = (2.0 * window.rate * (end_s - start_s) as f64) as u64 + 1000;
    for _ in 0..most {
        at_s += mean_s * unit_gap(window, random);
        if at_s >= end_s as f64 {
            return;
        }
        let (first, second): (f64, f64) = (random.random(), random.random());
        arrivals.push((at_s, input.at(first).max(1), output.at(second).max(1)));
    }
}

/// A gap with a mean of one.
fn unit_gap(window: RateWindow, random: &mut ChaCha12Rng) -> f64 {
    let drawn = match window.gaps {
        Some((GapForm::Gamma, shape)) => Gamma::new(shape, 1.0 / shape)
            .ok()
            .map(|gaps| gaps.sample(random)),
        Some((GapForm::Weibull, shape)) => {
            let scale = 1.0 / gamma_function(1.0 + 1.0 / shape);
            Weibull::new(scale, shape).ok().map(|gaps| gaps.sample(random))
        }
        None => None,
    };
    match drawn.filter(|gap| gap.is_finite() && *gap >= 0.0) {
        Some(gap) => gap,
        None => Exp1.sample(random),
    }
}

/// The gamma function above one half, by the approximation of Lanczos with seven terms (relative error below
/// 1e-13).
fn gamma_function(x: f64) -> f64 {
    const TERMS: [f64; 9] = [
        0.999_999_999_999_809_9,
        676.520_368_121_885_1,
        -1_259.139_216_722_402_8,
        771.323_428_777_653_1,
        -176.615_029_162_140_6,
        12.507_343_278_686_905,
        -0.138_571_095_265_720_12,
        9.984_369_578_019_572e-6,
        1.505_632_735_149_311_6e-7,
    ];
    let x = x - 1.0;
    let mut sum = TERMS[0];
    for (index, term) in (1..).zip(&TERMS[1..]) {
        sum += term / (x + f64::from(index));
    }
    let t = x + 7.5;
    (2.0 * std::f64::consts::PI).sqrt() * t.powf(x + 0.5) * (-t).exp() * sum
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_gamma_function_has_its_known_values() {
        for (x, expected) in [
            (1.0, 1.0),
            (2.0, 1.0),
            (5.0, 24.0),
            (1.5, 0.886_226_925_452_758),
            (3.5, 3.323_350_970_447_843),
        ] {
            assert!((gamma_function(x) - expected).abs() < 1e-12 * expected, "{x}");
        }
    }
}
