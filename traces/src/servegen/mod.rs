//! Folders of clients as ServeGen publishes them: for each client a file of arrival rates in windows
//! (`chunk-N-trace.csv`) and a file of length distributions in longer windows (`chunk-N-dataset.json`).
//!
//! They hold no requests but what requests are drawn from: [`ClientPool::statistics`] gives expected values,
//! [`ClientPool::generate`] draws a trace from a seed.

mod distribution;
mod generate;
mod read;

use crate::statistics::LengthStatistics;
pub use distribution::Distribution;
pub use read::{lengths, load, rates};

/// The clients of a folder, in order of their numbers.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct ClientPool {
    /// The name of the folder.
    pub name: String,
    /// The clients.
    pub clients: Vec<Client>,
}

/// One client.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Client {
    /// Its number in the file names.
    pub number: u64,
    /// Its arrival rates, ascending.
    pub rates: Vec<RateWindow>,
    /// Its lengths, ascending.
    pub lengths: Vec<LengthWindow>,
}

/// How a client sends from one instant on.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RateWindow {
    /// Start in seconds.
    pub start_s: u64,
    /// Requests a second; zero where it is idle.
    pub rate: f64,
    /// Standard deviation over mean of the gaps.
    pub cv: f64,
    /// The fitted form of the gaps, with its shape parameter; exponential where there is none.
    pub gaps: Option<(GapForm, f64)>,
}

/// Form of a gap distribution.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GapForm {
    /// Gamma.
    Gamma,
    /// Weibull.
    Weibull,
}

/// How long requests are from one instant on.
#[derive(Debug, Clone, PartialEq)]
pub struct LengthWindow {
    /// Start in seconds.
    pub start_s: u64,
    /// Prompt tokens; `None` where the client is idle.
    pub input: Option<Distribution>,
    /// Tokens to generate.
    pub output: Option<Distribution>,
}

/// What a folder holds.
#[derive(Debug, Clone, PartialEq)]
pub struct PoolStatistics {
    /// Windows of arrival rates, equal ones of several clients counted once.
    pub windows: u64,
    /// Clients.
    pub clients: u64,
    /// Requests that the rates promise over all windows.
    pub expected_requests: f64,
    /// Prompt tokens of the requests to expect.
    pub input: Option<LengthStatistics>,
    /// Tokens to generate of the requests to expect.
    pub output: Option<LengthStatistics>,
}

/// Seconds that the last window of a client lasts, where no other tells: the published step.
const LAST_WINDOW_S: u64 = 600;

impl Client {
    /// Windows with their ends.
    fn windows(&self) -> impl Iterator<Item = (RateWindow, u64)> + '_ {
        let ends = self.rates.iter().skip(1).map(|window| window.start_s);
        let step = match self.rates.as_slice() {
            [.., before, last] => last.start_s - before.start_s,
            _ => LAST_WINDOW_S,
        };
        let last = self
            .rates
            .last()
            .map(|window| window.start_s.saturating_add(step));
        self.rates.iter().copied().zip(ends.chain(last))
    }

    /// The lengths that hold at an instant.
    fn lengths_at(&self, start_s: u64) -> Option<&LengthWindow> {
        let after = self.lengths.partition_point(|window| window.start_s <= start_s);
        self.lengths.get(after.checked_sub(1)?)
    }
}

impl ClientPool {
    /// Expected values over all windows, each client weighted by what it sends.
    pub fn statistics(&self) -> PoolStatistics {
        let mut starts: Vec<u64> = self
            .clients
            .iter()
            .flat_map(|client| client.rates.iter().map(|window| window.start_s))
            .collect();
        starts.sort_unstable();
        starts.dedup();
        let (mut input, mut output) = (Vec::new(), Vec::new());
        let mut expected_requests = 0.0;
        for client in &self.clients {
            for (window, end_s) in client.windows() {
                let weight = window.rate * (end_s - window.start_s) as f64;
                expected_requests += weight;
                let Some(lengths) = client.lengths_at(window.start_s).filter(|_| weight > 0.0) else {
                    continue;
                };
                input.extend(lengths.input.as_ref().map(|lengths| (weight, lengths)));
                output.extend(lengths.output.as_ref().map(|lengths| (weight, lengths)));
            }
        }
        PoolStatistics {
            windows: starts.len() as u64,
            clients: self.clients.len() as u64,
            expected_requests,
            input: distribution::mixture(&input),
            output: distribution::mixture(&output),
        }
    }
}
