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
    RequestError, StreamEvent, TokenStream,
};

/// What is run.
#[derive(Debug, Clone)]
pub struct MigrationBench {
    /// The service and its first layout.
    pub options: CoordinatorOptions,
    /// The other layout.
    pub other: Layout,
    /// Migrations each way.
    pub rounds: u32,
    /// During how many of all migrations long prompts are sent one after another.
    pub prefills: u32,
    /// Requests that run at once.
    pub clients: u32,
    /// Tokens of a usual prompt.
    pub prompt_tokens: u32,
    /// Tokens that a usual request generates.
    pub new_tokens: u32,
    /// Tokens of a long prompt.
    pub long_prompt_tokens: u32,
    /// Tokens that a request with a long prompt generates: few, so that prefill is what it mostly does.
    pub long_new_tokens: u32,
    /// Seed of prompts and moments.
    pub seed: u64,
}

/// What migrations must have had to count.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MigrationFloors {
    /// Weights of the model.
    pub weight_bytes: Bytes,
    /// Live KV when the step was named.
    pub kv_bytes_at_commit: Bytes,
    /// Steps between the request and the naming of the step.
    pub steps_meanwhile: u64,
    /// Rounds of KV copying.
    pub rounds: u32,
    /// Migrations with a request in prefill when the step was named.
    pub prefills: u64,
}

/// What came out.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct MigrationBenchOutcome {
    /// Weights of the model.
    pub weight_bytes: Bytes,
    /// Requests that ran to their end.
    pub requests: u64,
    /// Migrations during which a prompt was in prefill when the step was named.
    pub prefills: u64,
    /// Each migration, in order.
    pub migrations: Vec<MigrationReport>,
    /// Pauses of all streams over all migrations.
    pub pause_s: Summary,
    /// How much longer each pause was than the median gap of its streams before that migration.
    pub pause_excess_s: Summary,
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
    /// A request of the undisturbed run came without the hash that the others are compared with.
    #[error("request {request} of the set came without a logits hash")]
    NoHash {
        /// Which.
        request: usize,
    },
    /// A model that is too small to show anything.
    #[error("the model has {found} of weights, at least {floor} are asked for")]
    Weights {
        /// What it has.
        found: Bytes,
        /// What is asked for.
        floor: Bytes,
    },
    /// Too few migrations met a prompt in prefill.
    #[error(
        "{found} of {migrations} migrations had a request in prefill when their step was named, at least {floor} \
         are asked for"
    )]
    Prefills {
        /// How many did.
        found: u64,
        /// Of how many.
        migrations: usize,
        /// What is asked for.
        floor: u64,
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
    /// Whether every migration was one that counts, and enough of them met a prompt in prefill.
    pub fn check(&self, floors: MigrationFloors) -> Result<(), MigrationBenchError> {
        if self.weight_bytes < floors.weight_bytes {
            return Err(MigrationBenchError::Weights {
                found: self.weight_bytes,
                floor: floors.weight_bytes,
            });
        }
        if self.prefills < floors.prefills {
            return Err(MigrationBenchError::Prefills {
                found: self.prefills,
                migrations: self.migrations.len(),
                floor: floors.prefills,
            });
        }
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
    number: usize,
    request: GenerationRequest,
    expected: u64,
}

/// Runs it. `progress` hears each migration as it ends.
pub fn migrate(
    bench: &MigrationBench,
    progress: impl FnMut(&MigrationReport),
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
                    if load.stops.load(Ordering::Relaxed) || !load.run(coordinator, &usual[number]) {
                        break;
                    }
                }
            })
        };
        let clients: Vec<_> = (0..bench.clients as usize).map(client).collect();
        let migrations = back_and_forth(bench, &coordinator, &load, long, &mut random, progress);
        load.stop();
        for client in clients {
            // A panic there is one here.
            client.join().expect("clients do not panic");
        }
        let failure = load.failure.lock().unwrap_or_else(PoisonError::into_inner).take();
        (migrations, failure)
    });
    // A failed request says more than the migration that it may have spoilt.
    if let Some(failure) = failure {
        return Err(failure);
    }
    Ok(outcome(bench, migrations?, load.finished.load(Ordering::Relaxed)))
}

fn outcome(bench: &MigrationBench, migrations: Vec<MigrationReport>, requests: u64) -> MigrationBenchOutcome {
    let mut pauses = Vec::new();
    let mut excesses = Vec::new();
    for report in &migrations {
        pauses.extend(&report.pauses_s);
        excesses.extend(
            report
                .pauses_s
                .iter()
                .map(|pause| pause - report.itl_before_s.p50),
        );
    }
    MigrationBenchOutcome {
        weight_bytes: bench.options.model.weight_bytes(),
        requests,
        prefills: migrations
            .iter()
            .filter(|report| report.prefills_at_commit > 0)
            .count() as u64,
        pause_s: Summary::of(pauses),
        pause_excess_s: Summary::of(excesses),
        migrations,
    }
}

/// The set: usual requests, then a long one; run once for their hashes.
fn cases(
    bench: &MigrationBench,
    coordinator: &Coordinator,
    random: &mut ChaCha8Rng,
) -> Result<Vec<Case>, MigrationBenchError> {
    let vocab = bench.options.model.vocab;
    let usual = (0..bench.clients + 2).map(|_| (bench.prompt_tokens, bench.new_tokens));
    let shapes = usual.chain([(bench.long_prompt_tokens, bench.long_new_tokens)]);
    let requests = shapes.map(|(prompt_tokens, max_tokens)| GenerationRequest {
        prompt: (0..prompt_tokens).map(|_| random.next_u32() % vocab).collect(),
        max_tokens,
        ignore_eos: true,
        logits_hash: true,
        prompt_logits: false,
    });
    // All at once, as under load; what runs beside a request does not change it.
    let running: Vec<_> = requests
        .map(|request| (coordinator.submit(request.clone()), request))
        .collect();
    let numbered = running.into_iter().enumerate();
    numbered
        .map(|(number, (mut stream, request))| {
            let expected =
                finish(&mut stream, |_| true)?.ok_or(MigrationBenchError::NoHash { request: number })?;
            Ok(Case {
                number,
                request,
                expected,
            })
        })
        .collect()
}

/// Reads a stream to its end and answers its logits hash; `None` where it has none, or `goes_on` says no to a token.
fn finish(
    stream: &mut TokenStream,
    mut goes_on: impl FnMut(u32) -> bool,
) -> Result<Option<u64>, RequestError> {
    while let Some(event) = stream.next_blocking() {
        match event {
            StreamEvent::Token { token, .. } if goes_on(token) => {}
            StreamEvent::Token { .. } => return Ok(None),
            StreamEvent::PromptLogits(_) => {}
            StreamEvent::Failed(source) => return Err(source),
            StreamEvent::Finished { logits_hash, .. } => return Ok(logits_hash),
        }
    }
    Err(RequestError::Stopped)
}

/// Migrates to the other layout and back, each time after a random number of tokens.
fn back_and_forth(
    bench: &MigrationBench,
    coordinator: &Coordinator,
    load: &Load,
    long: &Case,
    random: &mut ChaCha8Rng,
    mut progress: impl FnMut(&MigrationReport),
) -> Result<Vec<MigrationReport>, MigrationBenchError> {
    let mut migrations = Vec::new();
    let all = 2 * bench.rounds;
    for number in 0..all {
        // Up to half a request's time: the migration before ended at a moment of its own.
        let wait = u64::from(random.next_u32()) % u64::from(bench.clients * bench.new_tokens / 2).max(1);
        if !load.wait_for(load.tokens.load(Ordering::Relaxed) + wait) {
            break;
        }
        let to = if number % 2 == 0 {
            &bench.other
        } else {
            &bench.options.layout
        };
        // Spread evenly over all migrations.
        let with_long = (number + 1) * bench.prefills / all > number * bench.prefills / all;
        let report = if with_long {
            beside_long_prompts(coordinator, load, long, || {
                coordinator.migrate_blocking(to.clone())
            })
        } else {
            coordinator.migrate_blocking(to.clone())
        };
        let report = report.map_err(|source| MigrationBenchError::Migration { number, source })?;
        progress(&report);
        migrations.push(report);
    }
    Ok(migrations)
}

/// Does `work` while long prompts are sent one after another, each to its end; the first is on its way before.
fn beside_long_prompts<T>(
    coordinator: &Coordinator,
    load: &Load,
    long: &Case,
    work: impl FnOnce() -> T,
) -> T {
    let is_done = AtomicBool::new(false);
    thread::scope(|scope| {
        let first = coordinator.submit(long.request.clone());
        let client = scope.spawn(|| {
            let mut goes_on = load.follow(first, long);
            while goes_on && !is_done.load(Ordering::Relaxed) {
                goes_on = load.run(coordinator, long);
            }
        });
        let result = work();
        is_done.store(true, Ordering::Relaxed);
        client.join().expect("clients do not panic");
        result
    })
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
    fn run(&self, coordinator: &Coordinator, case: &Case) -> bool {
        self.follow(coordinator.submit(case.request.clone()), case)
    }

    fn follow(&self, mut stream: TokenStream, case: &Case) -> bool {
        let request = case.number;
        let finished = finish(&mut stream, |_| {
            self.count_token();
            !self.stops.load(Ordering::Relaxed)
        });
        match finished {
            Ok(None) if self.stops.load(Ordering::Relaxed) => return false,
            Ok(None) => self.fail(MigrationBenchError::NoHash { request }),
            Ok(Some(found)) if found != case.expected => self.fail(MigrationBenchError::Hash {
                request,
                found,
                expected: case.expected,
            }),
            Ok(Some(_)) => {
                self.finished.fetch_add(1, Ordering::Relaxed);
                return true;
            }
            Err(source) => self.fail(MigrationBenchError::Request { request, source }),
        }
        false
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

    fn fail(&self, failure: MigrationBenchError) {
        self.failure
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .get_or_insert(failure);
        self.stop();
    }

    fn stop(&self) {
        self.stops.store(true, Ordering::Relaxed);
        drop(self.gate.lock().unwrap_or_else(PoisonError::into_inner));
        self.moved.notify_all();
    }
}
