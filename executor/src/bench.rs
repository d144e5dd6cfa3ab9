//! `bench migrate`: a service under load whose layout goes back and forth at seeded random moments, and whose every
//! request must come out as if nothing had happened.
//!
//! Clients draw requests from a fixed set. The set is first run undisturbed on the first layout; each request's
//! chain of logits hashes is what every later run of it must give, whatever runs beside it and moves meanwhile.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::thread;

use infercluster_spec::stats::Summary;
use infercluster_spec::{Bytes, Layout};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};
use serde::Serialize;

use crate::coordinator::{
    Coordinator, CoordinatorOptions, ExecutorError, GenerationRequest, MigrationError, MigrationReport,
    RequestError, StreamEvent,
};
use crate::generate::{GenerateOptions, generate};

/// What is run.
#[derive(Debug, Clone)]
pub struct MigrationBench {
    /// The service and its first layout.
    pub options: CoordinatorOptions,
    /// The other layout.
    pub other: Layout,
    /// Migrations each way.
    pub rounds: u32,
    /// How many of all migrations begin together with a long prompt, so that it is in prefill meanwhile.
    pub prefills: u32,
    /// Requests that run at once.
    pub clients: u32,
    /// Tokens of a usual prompt.
    pub prompt_tokens: u32,
    /// Tokens that a request generates.
    pub new_tokens: u32,
    /// Tokens of a long prompt.
    pub long_prompt_tokens: u32,
    /// Seed of prompts and moments.
    pub seed: u64,
}

/// What a migration must have had to count.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MigrationFloors {
    /// Live KV when the step was named.
    pub kv_bytes_at_commit: Bytes,
    /// Steps between the request and the naming of the step.
    pub steps_meanwhile: u64,
    /// Rounds of KV copying.
    pub rounds: u32,
}

/// What came out.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct MigrationBenchOutcome {
    /// Requests that ran to their end.
    pub requests: u64,
    /// Migrations during which a prompt was in prefill when the step was named.
    pub prefills: u64,
    /// Each migration, in order.
    pub migrations: Vec<MigrationReport>,
    /// Pauses of all streams over all migrations.
    pub pause_s: Summary,
}

/// Why it failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MigrationBenchError {
    /// The service does not start.
    #[error(transparent)]
    Start(#[from] ExecutorError),
    /// A request of the undisturbed run failed.
    #[error("undisturbed: {0}")]
    Undisturbed(#[from] RequestError),
    /// A request failed.
    #[error("request {request} of the set failed: {source}")]
    Request {
        /// Which.
        request: usize,
        /// Why.
        source: RequestError,
    },
    /// A request came out differently.
    #[error(
        "request {request} of the set has the logits hash {found:016x}, undisturbed it has {expected:016x}"
    )]
    Hash {
        /// Which.
        request: usize,
        /// What came out.
        found: u64,
        /// What comes out undisturbed.
        expected: u64,
    },
    /// A migration failed.
    #[error("migration {number}: {source}")]
    Migration {
        /// Which, from 0.
        number: u32,
        /// Why.
        source: MigrationError,
    },
    /// A migration that shows nothing.
    #[error("migration {number} had {what} {found}, at least {floor} are asked for")]
    Floor {
        /// Which, from 0.
        number: usize,
        /// What there was too little of.
        what: &'static str,
        /// What there was.
        found: u64,
        /// What is asked for.
        floor: u64,
    },
}

impl MigrationBenchOutcome {
    /// Whether every migration was one that counts.
    pub fn check(&self, floors: MigrationFloors) -> Result<(), MigrationBenchError> {
        for (number, migration) in self.migrations.iter().enumerate() {
            let found = [
                (
                    "bytes of live KV",
                    migration.kv_bytes_at_commit.0,
                    floors.kv_bytes_at_commit.0,
                ),
                (
                    "steps meanwhile",
                    migration.steps_meanwhile,
                    floors.steps_meanwhile,
                ),
                (
                    "rounds of copying",
                    u64::from(migration.rounds),
                    u64::from(floors.rounds),
                ),
            ];
            if let Some((what, found, floor)) = found.into_iter().find(|(_, found, floor)| found < floor) {
                return Err(MigrationBenchError::Floor {
                    number,
                    what,
                    found,
                    floor,
                });
            }
        }
        Ok(())
    }
}

/// A request of the set.
struct Case {
    prompt: Vec<u32>,
    expected: u64,
}

/// Runs it. `progress` hears each migration as it ends.
pub fn migrate(
    bench: &MigrationBench,
    mut progress: impl FnMut(&MigrationReport),
) -> Result<MigrationBenchOutcome, MigrationBenchError> {
    let coordinator = Coordinator::start(bench.options.clone())?;
    let mut random = ChaCha8Rng::seed_from_u64(bench.seed);
    let cases = cases(bench, &coordinator, &mut random)?;
    let (long, usual) = cases.split_last().expect("the set has a long request");
    let load = Load::default();
    let (migrations, failure) = thread::scope(|scope| {
        let client = |index: usize| {
            let (load, coordinator) = (&load, &coordinator);
            scope.spawn(move || {
                let numbers = (index..).step_by(bench.clients as usize).map(|n| n % usual.len());
                for number in numbers {
                    if !load.run(coordinator, bench, number, &usual[number]) {
                        break;
                    }
                }
            })
        };
        let clients: Vec<_> = (0..bench.clients as usize).map(client).collect();
        let long_number = usual.len();
        let with_long =
            |is_wanted: bool, work: &mut dyn FnMut() -> Result<MigrationReport, MigrationError>| {
                let (load, coordinator) = (&load, &coordinator);
                let request = is_wanted.then(|| {
                    let (started, begun) = std::sync::mpsc::sync_channel(1);
                    let request = scope.spawn(move || {
                        // The stream exists: the request is queued before the migration is.
                        load.run_with(coordinator, bench, long_number, long, || {
                            // The other end waits for exactly this.
                            let _ = started.send(());
                        })
                    });
                    // A request that failed at once has nothing to say.
                    let _ = begun.recv();
                    request
                });
                let report = work();
                if let Some(request) = request {
                    // A panic there is one here.
                    request.join().expect("clients do not panic");
                }
                report
            };
        let migrations = back_and_forth(bench, &coordinator, &load, &mut random, with_long, &mut progress);
        load.stop();
        for client in clients {
            client.join().expect("clients do not panic");
        }
        let failure = load.failure.lock().unwrap_or_else(PoisonError::into_inner).take();
        (migrations, failure)
    });
    // A failed request says more than the migration that it may have spoilt.
    if let Some(failure) = failure {
        return Err(failure);
    }
    let migrations = migrations?;
    let pauses = migrations
        .iter()
        .flat_map(|report| report.pauses_s.iter().copied());
    Ok(MigrationBenchOutcome {
        requests: load.finished.load(Ordering::Relaxed),
        prefills: migrations
            .iter()
            .filter(|report| report.prefills_at_commit > 0)
            .count() as u64,
        pause_s: Summary::of(pauses.collect()),
        migrations,
    })
}

/// The set: usual requests, then a long one; run once for their hashes.
fn cases(
    bench: &MigrationBench,
    coordinator: &Coordinator,
    random: &mut ChaCha8Rng,
) -> Result<Vec<Case>, MigrationBenchError> {
    let vocab = bench.options.model.vocab;
    let lengths = (0..bench.clients + 2)
        .map(|_| bench.prompt_tokens)
        .chain([bench.long_prompt_tokens]);
    let prompts: Vec<Vec<u32>> = lengths
        .map(|length| (0..length).map(|_| random.next_u32() % vocab).collect())
        .collect();
    let options = GenerateOptions {
        max_tokens: bench.new_tokens,
        ignore_eos: true,
        logits: false,
        logits_hash: true,
    };
    let generated = generate(coordinator, &prompts, &options)?;
    let expected = generated.iter().map(|one| one.logits_hash.unwrap_or(0));
    let cases = prompts.into_iter().zip(expected);
    Ok(cases
        .map(|(prompt, expected)| Case { prompt, expected })
        .collect())
}

/// Migrates to the other layout and back, each time after a random number of tokens.
fn back_and_forth(
    bench: &MigrationBench,
    coordinator: &Coordinator,
    load: &Load,
    random: &mut ChaCha8Rng,
    with_long: impl Fn(
        bool,
        &mut dyn FnMut() -> Result<MigrationReport, MigrationError>,
    ) -> Result<MigrationReport, MigrationError>,
    progress: &mut impl FnMut(&MigrationReport),
) -> Result<Vec<MigrationReport>, MigrationBenchError> {
    let mut migrations = Vec::new();
    let all = 2 * bench.rounds;
    for number in 0..all {
        // At least the prompts are in, at most every client has nearly finished a request.
        let tokens = u64::from(bench.clients * bench.new_tokens);
        let wait = tokens / 2 + u64::from(random.next_u32()) % (tokens / 2).max(1);
        if !load.wait_for(load.tokens.load(Ordering::Relaxed) + wait) {
            break;
        }
        let to = if number % 2 == 0 {
            &bench.other
        } else {
            &bench.options.layout
        };
        // Spread evenly over all migrations.
        let is_prefill = (number + 1) * bench.prefills / all > number * bench.prefills / all;
        let report = with_long(is_prefill, &mut || coordinator.migrate_blocking(to.clone()))
            .map_err(|source| MigrationBenchError::Migration { number, source })?;
        progress(&report);
        migrations.push(report);
    }
    Ok(migrations)
}

/// What the clients share.
#[derive(Default)]
struct Load {
    tokens: AtomicU64,
    finished: AtomicU64,
    stops: AtomicBool,
    failure: Mutex<Option<MigrationBenchError>>,
    moved: Condvar,
    gate: Mutex<()>,
}

impl Load {
    /// Runs a request to its end; `false` where there is to be no other.
    fn run(&self, coordinator: &Coordinator, bench: &MigrationBench, number: usize, case: &Case) -> bool {
        self.run_with(coordinator, bench, number, case, || {})
    }

    fn run_with(
        &self,
        coordinator: &Coordinator,
        bench: &MigrationBench,
        number: usize,
        case: &Case,
        submitted: impl FnOnce(),
    ) -> bool {
        let mut stream = coordinator.submit(GenerationRequest {
            prompt: case.prompt.clone(),
            max_tokens: bench.new_tokens,
            ignore_eos: true,
            logits_hash: true,
            prompt_logits: false,
        });
        submitted();
        while let Some(event) = stream.next_blocking() {
            match event {
                StreamEvent::Token { .. } => self.count_token(),
                StreamEvent::PromptLogits(_) => {}
                StreamEvent::Failed(source) => {
                    return self.fail(MigrationBenchError::Request {
                        request: number,
                        source,
                    });
                }
                StreamEvent::Finished { logits_hash, .. } => {
                    let found = logits_hash.unwrap_or(0);
                    if found != case.expected {
                        return self.fail(MigrationBenchError::Hash {
                            request: number,
                            found,
                            expected: case.expected,
                        });
                    }
                    self.finished.fetch_add(1, Ordering::Relaxed);
                }
            }
            if self.stops.load(Ordering::Relaxed) {
                return false;
            }
        }
        true
    }

    fn count_token(&self) {
        self.tokens.fetch_add(1, Ordering::Relaxed);
        drop(self.gate.lock().unwrap_or_else(PoisonError::into_inner));
        self.moved.notify_all();
    }

    /// Waits until so many tokens have come; `false` where they will not.
    fn wait_for(&self, tokens: u64) -> bool {
        let gate = self.gate.lock().unwrap_or_else(PoisonError::into_inner);
        let is_short =
            |(): &mut ()| self.tokens.load(Ordering::Relaxed) < tokens && !self.stops.load(Ordering::Relaxed);
        drop(
            self.moved
                .wait_while(gate, is_short)
                .unwrap_or_else(PoisonError::into_inner),
        );
        !self.stops.load(Ordering::Relaxed)
    }

    fn fail(&self, failure: MigrationBenchError) -> bool {
        self.failure
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .get_or_insert(failure);
        self.stop();
        false
    }

    fn stop(&self) {
        self.stops.store(true, Ordering::Relaxed);
        drop(self.gate.lock().unwrap_or_else(PoisonError::into_inner));
        self.moved.notify_all();
    }
}
