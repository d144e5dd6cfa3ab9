//! Replays a trace against real workers and reports in the simulator's words.
//!
//! Prompts are random ids from a seed and the request's number, so the same request asks the same thing in every
//! run; output lengths are those of the trace, since the end of a text is ignored. Requests that can never fit are
//! counted and not sent.

mod target;

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use infercluster_spec::report::{Report, RequestRecord, Slo};
use infercluster_spec::{Request, RequestId, SimTime, StepRecord, Tokens, Trace};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use target::{Received, Sender};
pub use target::{ServedModel, Target};

use crate::clock::{self, RunClock};
use crate::speed::SpeedCheck;

/// Stack of a thread that waits for one answer.
const THREAD_STACK: usize = 256 << 10;
/// Requests that an open-loop replay keeps open at once.
const OPEN_LIMIT: usize = 4096;

/// When requests are sent.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Pace {
    /// At the trace's arrival times, multiplied by `stretch`: 1 is true time, 0.5 twice the rate.
    Open {
        /// Factor on every arrival time, above 0.
        stretch: f64,
    },
    /// So many at a time, the next as soon as one ends.
    Closed {
        /// Requests under way.
        concurrency: usize,
        /// Send for so long, from the start again after the last request; `None` sends each request once.
        duration: Option<Duration>,
    },
}

/// How a trace is replayed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ReplayOptions {
    /// When requests are sent.
    pub pace: Pace,
    /// Seed of the prompts.
    pub seed: u64,
    /// Longest context; longer requests are skipped.
    pub max_context: u32,
    /// Size of the vocabulary.
    pub vocab: u32,
    /// Ask for the chain over all logits.
    pub logits_hash: bool,
    /// Limits for goodput.
    pub slo: Option<Slo>,
}

/// Why a replay does not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReplayError {
    /// A trace of lengths only cannot be replayed at its times.
    #[error("{request} of trace {trace} has no arrival time: replay it with a fixed concurrency")]
    NoArrival {
        /// The trace.
        trace: String,
        /// The first request without a time.
        request: RequestId,
    },
    /// A factor that stretches nothing.
    #[error("arrival times cannot be multiplied by {stretch}, a finite factor above 0 is needed")]
    Stretch {
        /// What was asked for.
        stretch: f64,
    },
    /// Nobody would send anything.
    #[error("a concurrency of 0 sends nothing, at least 1 is needed")]
    Concurrency,
    /// The service does not answer as one.
    #[error("{url}: {reason}")]
    Service {
        /// Where.
        url: String,
        /// Why.
        reason: String,
    },
}

/// What one request got.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answered {
    /// Which request of the trace.
    pub id: RequestId,
    /// Its tokens.
    pub tokens: Vec<u32>,
    /// The chain over all logits, where it was asked for.
    pub logits_hash: Option<u64>,
    /// Why it failed.
    pub error: Option<String>,
}

/// A finished replay.
#[derive(Debug, Clone, PartialEq)]
pub struct ReplayOutcome {
    /// What happened to each request that was sent, in the order of their ends.
    pub records: Vec<RequestRecord>,
    /// What each of them got, in the same order.
    pub answers: Vec<Answered>,
    /// The same report as a simulation's.
    pub report: Report,
    /// Whether emulated devices had their speeds.
    pub speeds: Vec<SpeedCheck>,
    /// The latest steps, where the workers belong to this process's coordinator: what calibration reads.
    pub steps: Vec<StepRecord>,
}

impl ReplayOutcome {
    /// Whether the figures may be quoted: every emulated device had its speed.
    pub fn is_valid(&self) -> bool {
        self.speeds.iter().all(SpeedCheck::is_valid)
    }
}

/// Asks a service for what [`ReplayOptions`] needs to know about its model.
pub fn served_model(url: &str) -> Result<ServedModel, ReplayError> {
    Sender::new(Target::Url(url)).model(url)
}

/// The prompt of a request: random ids from the seed and the request's number.
pub fn prompt_of(request: &Request, seed: u64, vocab: u32) -> Vec<u32> {
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    random.set_stream(request.id.0);
    (0..request.input.0)
        .map(|_| random.random_range(0..vocab.max(1)))
        .collect()
}

/// Replays a trace; `progress` hears how many requests have ended.
pub fn replay(
    target: Target<'_>,
    trace: &Trace,
    options: &ReplayOptions,
    progress: &(dyn Fn(usize) + Sync),
) -> Result<ReplayOutcome, ReplayError> {
    check(trace, options)?;
    let fits = |request: &&Request| {
        let context = request.input.0.saturating_add(request.output.0);
        context <= u64::from(options.max_context)
    };
    let requests: Vec<&Request> = trace.requests.iter().filter(fits).collect();
    let skipped = trace.requests.len() - requests.len();
    let sender = Sender::new(target);
    // Starts a new window of measurement.
    let _ = sender.times();
    let run = Run {
        sender: &sender,
        options,
        clock: RunClock::start(),
        ended: Mutex::default(),
        progress,
    };
    match options.pace {
        Pace::Open { stretch } => run.open(&requests, stretch),
        Pace::Closed {
            concurrency,
            duration,
        } => run.closed(&requests, concurrency, duration),
    }
    let times = sender.times();
    let ended = run.ended.into_inner().unwrap_or_else(PoisonError::into_inner);
    let (records, answers): (Vec<_>, Vec<_>) = ended.into_iter().unzip();
    let mut report = Report::from_records(&records, options.slo);
    report.skipped = skipped as u64;
    report.busy_fraction = times.as_ref().map(|times| times.busy_fraction.clone());
    let (speeds, steps) = times.map_or_else(Default::default, |times| (times.speeds, times.steps));
    Ok(ReplayOutcome {
        records,
        answers,
        report,
        speeds,
        steps,
    })
}

fn check(trace: &Trace, options: &ReplayOptions) -> Result<(), ReplayError> {
    match options.pace {
        Pace::Open { stretch } => {
            if !(stretch > 0.0 && stretch.is_finite()) {
                return Err(ReplayError::Stretch { stretch });
            }
            match trace.requests.iter().find(|request| request.arrival.is_none()) {
                Some(request) => Err(ReplayError::NoArrival {
                    trace: trace.name.clone(),
                    request: request.id,
                }),
                None => Ok(()),
            }
        }
        Pace::Closed { concurrency: 0, .. } => Err(ReplayError::Concurrency),
        Pace::Closed { .. } => Ok(()),
    }
}

/// A replay under way.
struct Run<'a> {
    sender: &'a Sender<'a>,
    options: &'a ReplayOptions,
    clock: RunClock,
    ended: Mutex<Vec<(RequestRecord, Answered)>>,
    progress: &'a (dyn Fn(usize) + Sync),
}

impl Run<'_> {
    /// Every request on a thread of its own from its arrival on.
    fn open(&self, requests: &[&Request], stretch: f64) {
        let first = requests
            .first()
            .and_then(|request| request.arrival)
            .unwrap_or_default();
        let open = AtomicUsize::new(0);
        thread::scope(|scope| {
            for request in requests {
                let offset = request.arrival.unwrap_or_default().since(first);
                let arrival = SimTime((offset.0 as f64 * stretch) as u64);
                // Past the limit a request starts late; its latency still counts from its arrival.
                while open.load(Ordering::Acquire) >= OPEN_LIMIT {
                    thread::park_timeout(Duration::from_millis(1));
                }
                let wait = self
                    .clock
                    .instant(arrival)
                    .saturating_duration_since(clock::now());
                thread::sleep(wait);
                open.fetch_add(1, Ordering::AcqRel);
                let open = &open;
                let send = move || {
                    self.send(request, arrival);
                    open.fetch_sub(1, Ordering::AcqRel);
                };
                if let Err(error) = thread::Builder::new()
                    .stack_size(THREAD_STACK)
                    .spawn_scoped(scope, send)
                {
                    tracing::warn!("{} is not sent: {error}", request.id);
                    open.fetch_sub(1, Ordering::AcqRel);
                    let error = Some(format!("no thread for it: {error}"));
                    self.note(
                        request,
                        arrival,
                        Received {
                            error,
                            ..Received::default()
                        },
                    );
                }
            }
        });
    }

    /// `concurrency` threads, each sends the next request when its last one ended.
    fn closed(&self, requests: &[&Request], concurrency: usize, duration: Option<Duration>) {
        if requests.is_empty() {
            return;
        }
        let next = AtomicUsize::new(0);
        let over = AtomicBool::new(false);
        let end = duration.map(|duration| clock::now() + duration);
        let work = || {
            while !over.load(Ordering::Acquire) {
                let index = next.fetch_add(1, Ordering::AcqRel);
                let is_over = match end {
                    Some(end) => clock::now() >= end,
                    None => index >= requests.len(),
                };
                if is_over {
                    over.store(true, Ordering::Release);
                    return;
                }
                self.send(requests[index % requests.len()], self.clock.at(clock::now()));
            }
        };
        thread::scope(|scope| {
            for _ in 0..concurrency {
                if let Err(error) = thread::Builder::new()
                    .stack_size(THREAD_STACK)
                    .spawn_scoped(scope, work)
                {
                    tracing::warn!("a sender is missing, the concurrency is lower than asked: {error}");
                }
            }
        });
    }

    fn send(&self, request: &Request, arrival: SimTime) {
        let prompt = prompt_of(request, self.options.seed, self.options.vocab);
        let max_tokens = u32::try_from(request.output.0).unwrap_or(u32::MAX);
        let received = self.sender.send(prompt, max_tokens, self.options.logits_hash);
        self.note(request, arrival, received);
    }

    fn note(&self, request: &Request, arrival: SimTime, received: Received) {
        let completed = received.error.is_none() && received.tokens.len() as u64 == request.output.0;
        let record = RequestRecord {
            id: request.id,
            arrival,
            input: Tokens(request.input.0),
            // The clock of a report does not go back behind an arrival that was late by rounding.
            token_times: received
                .times
                .iter()
                .map(|at| self.clock.at(*at).max(arrival))
                .collect(),
            preemptions: received.preemptions,
            completed,
        };
        let answer = Answered {
            id: request.id,
            tokens: received.tokens,
            logits_hash: received.logits_hash,
            error: received.error,
        };
        let mut ended = self.ended.lock().unwrap_or_else(PoisonError::into_inner);
        ended.push((record, answer));
        (self.progress)(ended.len());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(id: u64, input: u64) -> Request {
        Request {
            id: RequestId(id),
            arrival: None,
            input: Tokens(input),
            output: Tokens(1),
            block_hashes: Vec::new(),
        }
    }

    #[test]
    fn prompts_depend_on_seed_and_request_alone() {
        let prompt = prompt_of(&request(3, 50), 7, 97);
        assert_eq!(prompt, prompt_of(&request(3, 50), 7, 97));
        assert!(prompt.len() == 50 && prompt.iter().all(|id| *id < 97));
        assert_ne!(prompt, prompt_of(&request(4, 50), 7, 97));
        assert_ne!(prompt, prompt_of(&request(3, 50), 8, 97));
    }

    #[test]
    fn what_cannot_be_replayed_is_refused() {
        let trace = Trace {
            name: "t".to_owned(),
            requests: vec![request(5, 1)],
            hash_block: None,
        };
        let check = |pace| {
            let options = ReplayOptions {
                pace,
                seed: 0,
                max_context: 10,
                vocab: 10,
                logits_hash: false,
                slo: None,
            };
            super::check(&trace, &options).map_err(|error| error.to_string())
        };
        let closed = |concurrency| Pace::Closed {
            concurrency,
            duration: None,
        };
        assert!(check(closed(1)).is_ok() && check(closed(0)).is_err());
        assert!(check(Pace::Open { stretch: f64::NAN }).is_err());
        let error = check(Pace::Open { stretch: 1.0 }).unwrap_err();
        assert!(
            error.contains("request 5 of trace t has no arrival time"),
            "{error}"
        );
    }
}
