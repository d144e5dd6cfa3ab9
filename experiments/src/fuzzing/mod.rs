//! Readers under changed input: whatever a file holds, a reader answers, within limits of memory and time.
//!
//! A run is made from the seed and its number alone, so that any run can be made again.

mod mutate;
mod readers;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use infercluster_spec::Bytes;
use serde::Serialize;

use crate::memory::Watch;
use mutate::{SplitMix64, mutate};
pub(crate) use readers::{READERS, Reader};

/// Memory that a reader may hold beside the size of its input.
pub(crate) const MEMORY_LIMIT: Bytes = Bytes(64 << 20);
/// Longest time that a reader may take for a megabyte.
const TIME_LIMIT: Duration = Duration::from_secs(10);

/// What a reader did wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Fault {
    /// It panicked.
    Panic,
    /// It held more memory than it may.
    Memory,
    /// It took longer than it may.
    Time,
}

/// One input with what came of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Verdict {
    pub(crate) accepted: bool,
    pub(crate) most_held: u64,
    pub(crate) fault: Option<Fault>,
}

/// Sums over many runs.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Tally {
    pub(crate) runs: u64,
    pub(crate) accepted: u64,
    /// Most bytes that any run held beyond its input.
    pub(crate) most_held: u64,
    /// The first inputs that a reader failed on, one a kind of fault at least, at most eight.
    pub(crate) faults: Vec<(Fault, Vec<u8>)>,
    pub(crate) fault_runs: u64,
}

/// Inputs that are kept of one reader.
const FAULTS_KEPT: usize = 8;

/// Reads one input.
pub(crate) fn judge(reader: &Reader, bytes: &[u8], watch: &Watch) -> Verdict {
    let start = Instant::now();
    let (answer, most_held) = watch.most_held(|| catch_unwind(AssertUnwindSafe(|| (reader.read)(bytes))));
    let took = start.elapsed();
    let held = most_held.saturating_sub(bytes.len() as u64);
    let fault = match &answer {
        Err(_) => Some(Fault::Panic),
        Ok(_) if held > MEMORY_LIMIT.0 => Some(Fault::Memory),
        Ok(_) if took > TIME_LIMIT => Some(Fault::Time),
        Ok(_) => None,
    };
    Verdict {
        accepted: answer.unwrap_or(false),
        most_held: held,
        fault,
    }
}

/// Runs a reader over `runs` changed inputs: its own and those of `corpus`, every one of them unchanged first.
pub(crate) fn run(
    reader: &Reader,
    corpus: &[Vec<u8>],
    seed: u64,
    runs: u64,
    mut progress: impl FnMut(u64),
) -> Tally {
    let mut inputs = (reader.seeds)();
    inputs.extend_from_slice(corpus);
    let watch = Watch::start();
    let quiet = QuietPanics::start();
    let mut tally = Tally::default();
    for number in 0..runs {
        let unchanged = usize::try_from(number)
            .ok()
            .and_then(|at| inputs.get(at))
            .cloned();
        let bytes = unchanged.unwrap_or_else(|| mutate(&inputs, &mut SplitMix64::of_run(seed, number)));
        let verdict = judge(reader, &bytes, &watch);
        tally.runs += 1;
        tally.accepted += u64::from(verdict.accepted);
        tally.most_held = tally.most_held.max(verdict.most_held);
        if let Some(fault) = verdict.fault {
            tally.fault_runs += 1;
            if tally.faults.len() < FAULTS_KEPT {
                tally.faults.push((fault, bytes));
            }
        }
        if number % 1024 == 1023 {
            progress(1024);
        }
    }
    drop(quiet);
    tally
}

/// Reads one input with its panic on the screen.
pub(crate) fn replay(reader: &Reader, bytes: &[u8]) -> Verdict {
    judge(reader, bytes, &Watch::start())
}

type Hook = Box<dyn Fn(&std::panic::PanicHookInfo<'_>) + Sync + Send>;

/// No message for a panic that is caught and counted, until it is dropped.
struct QuietPanics(Option<Hook>);

impl QuietPanics {
    fn start() -> Self {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(|_| {}));
        Self(Some(before))
    }
}

impl Drop for QuietPanics {
    fn drop(&mut self) {
        if let Some(before) = self.0.take() {
            std::panic::set_hook(before);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reader(read: fn(&[u8]) -> bool) -> Reader {
        Reader {
            name: "planted",
            read,
            seeds: || vec![b"good input 123".to_vec()],
        }
    }

    #[test]
    fn planted_faults_are_found_and_kept() {
        let panics = reader(|bytes| {
            assert!(!bytes.contains(&0), "a zero");
            true
        });
        let tally = run(&panics, &[], 1, 3000, |_| {});
        assert!(tally.fault_runs > 0 && tally.faults.iter().all(|(fault, _)| *fault == Fault::Panic));
        assert!(tally.faults.iter().all(|(_, bytes)| bytes.contains(&0)));
        assert_eq!(tally.runs, 3000);
        assert_eq!(
            tally,
            run(&panics, &[], 1, 3000, |_| {}),
            "a seed makes the same runs"
        );
    }

    #[test]
    fn every_reader_takes_some_of_its_own_inputs() {
        for reader in &READERS {
            let seeds = (reader.seeds)();
            let accepted = seeds.iter().filter(|seed| (reader.read)(seed)).count();
            assert!(
                2 * accepted >= seeds.len(),
                "{}: {accepted} of {}",
                reader.name,
                seeds.len()
            );
        }
    }
}
