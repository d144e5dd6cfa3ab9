//! Runs that predictions are compared with: every case as often as every other, in turns, so that what drifts on
//! the machine meets all of them alike. A noisy run is repeated, up to a limit.

use std::collections::VecDeque;
use std::thread;

use infercluster_executor::speed::SpeedCheck;
use infercluster_spec::{Layout, Trace};

use super::quiet::{self, Quiet};
use super::{ClosedLoop, Observed, Rig};
use crate::screen::Screen;

/// What is run.
#[derive(Clone, Copy)]
pub(crate) struct Case<'a> {
    /// Its name.
    pub(crate) name: &'a str,
    /// The layout.
    pub(crate) layout: &'a Layout,
    /// The requests.
    pub(crate) trace: &'a Trace,
    /// The clients.
    pub(crate) load: ClosedLoop,
}

/// How often.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Repeats {
    /// Runs of each case.
    pub(crate) runs: usize,
    /// Runs that may be repeated, of all cases together.
    pub(crate) spare: usize,
}

/// One run.
#[derive(Debug, Clone)]
pub(crate) struct Run {
    /// What came out.
    pub(crate) observed: Observed,
    /// Asked and achieved speeds.
    pub(crate) speeds: Vec<SpeedCheck>,
    /// The share of its best speed that the machine had before or after, whichever was less.
    pub(crate) machine: f64,
}

impl Run {
    /// Whether the machine was the model's alone.
    pub(crate) fn is_quiet(&self) -> bool {
        quiet::is_quiet(self.machine) && self.speeds.iter().all(SpeedCheck::is_undisturbed)
    }
}

/// Runs of one case.
#[derive(Debug, Clone, Default)]
pub(crate) struct Measured {
    /// Those that count, noisy ones among them where the spare runs were used up.
    pub(crate) runs: Vec<Run>,
    /// Noisy ones that were repeated.
    pub(crate) set_aside: usize,
}

impl Measured {
    /// Median, least and most of one figure over the runs.
    pub(crate) fn spread(&self, figure: impl Fn(&Observed) -> f64) -> Spread {
        Spread::of(self.runs.iter().map(|run| figure(&run.observed)).collect())
    }
}

/// Median, least and most.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Spread {
    pub(crate) median: f64,
    pub(crate) least: f64,
    pub(crate) most: f64,
}

impl Spread {
    /// Of some values; all zero where there are none.
    pub(crate) fn of(mut values: Vec<f64>) -> Self {
        values.sort_by(f64::total_cmp);
        let at = |p| infercluster_spec::stats::percentile(&values, p).unwrap_or(0.0);
        Self {
            median: at(50.0),
            least: at(0.0),
            most: at(100.0),
        }
    }
}

/// Runs the cases in turns; answers them in the same order. `progress` hears what runs next.
pub(crate) fn judge(
    rig: &Rig,
    cases: &[Case],
    repeats: Repeats,
    screen: &Screen,
    progress: &mut dyn FnMut(&str),
) -> anyhow::Result<Vec<Measured>> {
    let mut measured = vec![Measured::default(); cases.len()];
    let mut turns: VecDeque<usize> = (0..repeats.runs).flat_map(|_| 0..cases.len()).collect();
    let mut spare = repeats.spare;
    let mut quiet = Quiet::default();
    let cores = rig
        .cluster
        .gpus()
        .count()
        .min(thread::available_parallelism().map_or(1, usize::from));
    quiet.probe(cores)?;
    while let Some(turn) = turns.pop_front() {
        let case = cases[turn];
        progress(case.name);
        let before = quiet.share();
        let outcome = rig.run(case.layout, case.trace, case.load)?;
        let after = quiet.probe(cores)?;
        let run = Run {
            observed: case.load.observe(outcome.report, &outcome.records),
            speeds: outcome.speeds,
            machine: before.min(after),
        };
        if run.is_quiet() || spare == 0 {
            measured[turn].runs.push(run);
            continue;
        }
        spare -= 1;
        screen.say(format!(
            "{}: a noisy run is repeated, {}",
            case.name,
            reason(&run)
        ));
        measured[turn].set_aside += 1;
        turns.push_back(turn);
    }
    Ok(measured)
}

fn reason(run: &Run) -> String {
    match run.speeds.iter().find(|check| !check.is_undisturbed()) {
        Some(missed) => format!(
            "{} was to run at speed {} and ran at {:.3}",
            missed.gpu,
            missed.asked,
            missed.achieved.unwrap_or_default()
        ),
        None => format!(
            "the machine itself ran at {:.0} % of its best speed",
            100.0 * run.machine
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_spread_by_hand() {
        let spread = Spread::of(vec![5.0, 1.0, 3.0, 2.0]);
        assert_eq!((spread.median, spread.least, spread.most), (2.5, 1.0, 5.0));
    }
}
