//! One replica of one stage, from step boundary to step boundary.
//!
//! What the scheduler of `serving` does, said in numbers: running sequences are the oldest of all that live,
//! since admission takes the oldest waiting one and preemption the latest running one. All but at most the
//! last of them decode, one token each in every step; the last may be in the middle of its prefill. So a step
//! is either one in which somebody prefills, or the first of a run of equal ones that goes on until a
//! sequence ends, the pool is dry, the step time leaves its line, or somebody arrives who could be admitted.

use std::collections::VecDeque;

use infercluster_serving::Scheduler;
use infercluster_spec::spans::SpanRun;
use infercluster_spec::{BatchShape, EngineOptions, GpuId, ReplicaId, SimDuration, SimTime};

use super::decoding::{Decoding, Leaver};
use super::gaps::LongestGaps;
use super::pool::Pool;
use super::world::World;
use crate::engine::outcome::BusyGpu;
use crate::engine::step_times::{DecodeRun, progression_sum};
use crate::scenario::{ReplicaOutcome, SimError};

/// The state of one replica.
pub(super) struct Replica {
    id: ReplicaId,
    options: EngineOptions,
    /// Which of the world's stage times are its own.
    times: usize,
    pool: Pool,
    decoding: Decoding,
    /// The running sequence whose prefill needs more than one step.
    partial: Option<Chunk>,
    /// Positions in the trace, oldest first.
    waiting: VecDeque<u32>,
    ahead: Option<Ahead>,
    /// Prefills of the step ahead, in order of arrival.
    chunks: Vec<Chunk>,
    longest: LongestGaps,
    /// Its devices in rank order, and how long each computed.
    gpus: Vec<GpuId>,
    busy: Vec<SimDuration>,
    steps: u64,
    computed_tokens: u64,
    running_peak: u32,
}

/// A sequence in prefill.
#[derive(Debug, Clone, Copy)]
struct Chunk {
    request: u32,
    /// Prompt and output tokens that are known.
    known: u32,
    /// Tokens in the cache before the step.
    start: u32,
    /// Tokens in the cache behind it.
    end: u32,
}

/// The steps that are planned.
#[derive(Debug, Clone, Copy)]
struct Ahead {
    start: SimTime,
    end: SimTime,
    run: DecodeRun,
    steps: u32,
    /// Whether somebody who arrives could enter a step before the last.
    is_open: bool,
}

impl Replica {
    /// As empty as `scheduler`, whose options and pool it takes over.
    pub(super) fn new(
        id: ReplicaId,
        options: EngineOptions,
        scheduler: &Scheduler,
        times: usize,
        gpus: Vec<GpuId>,
    ) -> Self {
        let ledger = scheduler.ledger();
        Self {
            id,
            options,
            times,
            pool: Pool::new(ledger.total(), ledger.block_size()),
            decoding: Decoding::default(),
            partial: None,
            waiting: VecDeque::new(),
            ahead: None,
            chunks: Vec::new(),
            longest: LongestGaps::default(),
            busy: vec![SimDuration::ZERO; gpus.len()],
            gpus,
            steps: 0,
            computed_tokens: 0,
            running_peak: 0,
        }
    }

    /// When the planned steps end; `None` where nothing is planned.
    pub(super) fn end(&self) -> Option<SimTime> {
        self.ahead.map(|ahead| ahead.end)
    }

    /// A request arrives. Where it could be admitted before the planned steps end, they end earlier.
    pub(super) fn arrive(&mut self, request: u32, now: SimTime) {
        self.waiting.push_back(request);
        let Some(ahead) = &mut self.ahead else { return };
        if std::mem::replace(&mut ahead.is_open, false) {
            ahead.cut(now);
        }
    }

    /// Plans from a step boundary on, where there is anything to do.
    pub(super) fn plan(&mut self, now: SimTime, world: &mut World) -> Result<(), SimError> {
        assert!(
            self.ahead.is_none() && self.chunks.is_empty(),
            "{} plans twice",
            self.id
        );
        let preempted = self.make_room(now, world);
        let mut budget = self.options.token_budget - self.decoding.count();
        let mut spare = self.pool.free() - self.pool.demand();
        let preempted = self.continue_partial(&mut budget, &mut spare, world) || preempted;
        if !preempted {
            self.admit(&mut budget, &mut spare, world);
        }
        let running = self.decoding.count() + self.chunks.len() as u32;
        self.running_peak = self.running_peak.max(running);
        if !self.chunks.is_empty() {
            return self.plan_prefill(now, spare, world);
        }
        match self.decoding.steps_to_end() {
            Some(limit) => self.plan_decodes(now, if preempted { 1 } else { limit }, world),
            None => {
                assert!(
                    self.waiting.is_empty(),
                    "{} is idle while somebody waits",
                    self.id
                );
                Ok(())
            }
        }
    }

    /// Preempts the latest sequences until the others can decode; answers whether there were any.
    ///
    /// The scheduler goes from the oldest on and preempts the latest whenever a block is missing. Who stays is
    /// the longest prefix of the running sequences that finds its blocks once all others gave theirs back,
    /// which is what this loop finds.
    fn make_room(&mut self, now: SimTime, world: &mut World) -> bool {
        let mut preempted = false;
        while self.pool.demand() > self.pool.free() {
            preempted = true;
            if let Some(partial) = self.partial.take() {
                self.preempt_partial(partial, world);
                continue;
            }
            let leaver = self
                .decoding
                .pop_latest()
                .expect("blocks are missing for somebody");
            self.pool.leave(leaver.computed);
            let position = leaver.request as usize;
            self.settle(leaver, now, world);
            world.table.preempt(position);
            self.waiting.push_front(leaver.request);
        }
        preempted
    }

    fn preempt_partial(&mut self, partial: Chunk, world: &mut World) {
        self.pool.give(partial.end);
        world.table.preempt(partial.request as usize);
        self.waiting.push_front(partial.request);
    }

    /// Writes down what a sequence that stops decoding has got.
    fn settle(&mut self, leaver: Leaver, now: SimTime, world: &mut World) {
        let request = &world.trace[leaver.request as usize];
        // All known tokens but the last are computed.
        let tokens = leaver.computed + 1 - request.input.0 as u32;
        world.table.decoded(leaver.request as usize, tokens, now);
        if let Some(gap) = self.longest.since(leaver.since) {
            world.table.widen_gap(leaver.request as usize, gap);
        }
    }

    /// Gives the sequence in the middle of its prefill its next chunk; answers whether it lost its place for
    /// want of blocks.
    fn continue_partial(&mut self, budget: &mut u32, spare: &mut u32, world: &mut World) -> bool {
        let Some(partial) = self.partial.take() else {
            return false;
        };
        let start = partial.end;
        let count = (partial.known - start).min(*budget);
        let end = start + count;
        let wanted = self.pool.blocks_for(end) - self.pool.blocks_for(start);
        if wanted > *spare {
            self.preempt_partial(partial, world);
            return true;
        }
        (*budget, *spare) = (*budget - count, *spare - wanted);
        self.chunks.push(Chunk {
            start,
            end,
            ..partial
        });
        false
    }

    /// Admits waiting sequences, oldest first, until one does not fit.
    fn admit(&mut self, budget: &mut u32, spare: &mut u32, world: &mut World) {
        while *budget > 0 && self.decoding.count() + (self.chunks.len() as u32) < self.options.max_sequences {
            let Some(&request) = self.waiting.front() else {
                return;
            };
            let tokens = world.table.tokens(request as usize);
            let known = world.trace[request as usize].input.0 as u32 + tokens;
            if self.pool.blocks_for(known) > *spare {
                return;
            }
            let end = known.min(*budget);
            (*budget, *spare) = (*budget - end, *spare - self.pool.blocks_for(end));
            self.waiting.pop_front();
            self.chunks.push(Chunk {
                request,
                known,
                start: 0,
                end,
            });
        }
    }

    /// One step with prefills, of which the blocks down to `spare` are taken.
    fn plan_prefill(&mut self, now: SimTime, spare: u32, world: &mut World) -> Result<(), SimError> {
        let decodes = u64::from(self.decoding.count());
        let mut shape = BatchShape {
            new_tokens: decodes,
            decode_sequences: decodes,
            decode_kv_tokens: self.decoding.next_kv_tokens(),
            logits_rows: decodes,
            ..BatchShape::default()
        };
        for chunk in &self.chunks {
            let (start, new) = (u64::from(chunk.start), u64::from(chunk.end - chunk.start));
            shape.add_prefill(new, start, chunk.end == chunk.known);
        }
        self.pool.take(self.pool.free() - self.pool.demand() - spare);
        self.pool.advance(1);
        let span = world.times[self.times].step(&shape, &mut self.busy)?;
        let end = now
            .0
            .checked_add(span.0)
            .map(SimTime)
            .ok_or(SimError::ClockEnds)?;
        self.computed_tokens += shape.prefill_new;
        self.ahead = Some(Ahead {
            start: now,
            end,
            run: DecodeRun {
                first: span.0,
                increment: 0,
                valid_steps: 1,
            },
            steps: 1,
            is_open: false,
        });
        Ok(())
    }

    /// A run of at most `limit` steps in which everybody decodes.
    fn plan_decodes(&mut self, now: SimTime, limit: u32, world: &mut World) -> Result<(), SimError> {
        let (sequences, kv_tokens) = (self.decoding.count(), self.decoding.next_kv_tokens());
        let run = world.times[self.times].decode_run(u64::from(sequences), kv_tokens)?;
        let limit = u32::try_from(run.valid_steps).map_or(limit, |valid| valid.min(limit));
        let mut ahead = Ahead {
            start: now,
            end: now,
            run,
            steps: self.pool.steps_that_fit(limit),
            // With somebody in front of him who does not fit, or every place taken, nobody enters before a
            // sequence ends.
            is_open: self.waiting.is_empty() && sequences < self.options.max_sequences,
        };
        ahead.end = ahead.boundary(ahead.steps).ok_or(SimError::ClockEnds)?;
        self.ahead = Some(ahead);
        Ok(())
    }

    /// Lets the planned steps have happened; answers how many requests ended with them.
    pub(super) fn complete(&mut self, world: &mut World) -> Result<u32, SimError> {
        let ahead = self.ahead.take().expect("only planned steps complete");
        let is_decode_run = self.chunks.is_empty();
        let sequences = self.decoding.count();
        if is_decode_run {
            let kv_tokens = self.decoding.next_kv_tokens();
            let (sequences, steps) = (u64::from(sequences), u64::from(ahead.steps));
            world.times[self.times].add_busy(sequences, kv_tokens, steps, &mut self.busy)?;
            self.pool.advance(ahead.steps);
        }
        self.steps += u64::from(ahead.steps);
        self.computed_tokens += u64::from(ahead.steps) * u64::from(sequences);
        self.decode(&ahead, world);
        let mut ended = 0;
        while let Some(leaver) = self.decoding.pop_ended() {
            self.pool.leave(leaver.computed);
            self.settle(leaver, ahead.end, world);
            world.finish(leaver.request);
            ended += 1;
        }
        let mut chunks = std::mem::take(&mut self.chunks);
        for chunk in chunks.drain(..) {
            ended += u32::from(self.complete_chunk(chunk, ahead.end, world));
        }
        self.chunks = chunks;
        Ok(ended)
    }

    /// Everybody who decodes gets a token in each of the steps.
    fn decode(&mut self, ahead: &Ahead, world: &mut World) {
        if self.decoding.count() == 0 {
            return;
        }
        self.decoding.advance(ahead.steps);
        let gaps = SpanRun {
            first: ahead.run.first,
            increment: ahead.run.increment,
            length: ahead.steps,
            times: self.decoding.count(),
        };
        world.gaps.push_run(gaps);
        if world.table.keeps_longest_gaps() {
            let longest = gaps.first.max(gaps.at(gaps.length - 1));
            self.longest.push(self.decoding.decoded(), SimDuration(longest));
        }
        if let Some(times) = &mut world.token_times {
            for request in self.decoding.requests() {
                let boundaries = (1..=ahead.steps).map(|steps| ahead.boundary(steps));
                times[request as usize].extend(boundaries.map(|at| at.expect("it is not past the end")));
            }
        }
    }

    /// A chunk is in the cache; answers whether its request ended.
    fn complete_chunk(&mut self, chunk: Chunk, now: SimTime, world: &mut World) -> bool {
        if chunk.end < chunk.known {
            self.partial = Some(chunk);
            return false;
        }
        let position = chunk.request as usize;
        if let Some(gap) = world.table.token(position, now) {
            world.gaps.push(gap, 1);
            world.table.widen_gap(position, gap);
        }
        if let Some(times) = &mut world.token_times {
            times[position].push(now);
        }
        let remaining = world.trace[position].output.0 as u32 - world.table.tokens(position);
        if remaining == 0 {
            self.pool.give(chunk.end);
            world.finish(chunk.request);
            return true;
        }
        self.pool.join(chunk.end);
        self.decoding.join(chunk.request, chunk.end, remaining);
        false
    }

    /// Nobody is here and no block is missing.
    pub(super) fn verify_end(&self) {
        let is_empty = self.ahead.is_none() && self.waiting.is_empty() && self.partial.is_none();
        assert!(
            is_empty && self.decoding.count() == 0,
            "{} has sequences that never ended",
            self.id
        );
        assert!(self.pool.is_whole(), "{} has blocks without a sequence", self.id);
    }

    /// Time in which each rank computed.
    pub(super) fn busy(&self) -> impl Iterator<Item = BusyGpu> {
        let pairs = self.gpus.iter().zip(&self.busy);
        pairs.map(|(gpu, busy)| BusyGpu {
            gpu: *gpu,
            busy: *busy,
        })
    }

    /// What it did.
    pub(super) fn outcome(&self) -> ReplicaOutcome {
        ReplicaOutcome {
            steps: self.steps,
            computed_tokens: self.computed_tokens,
            kv_blocks: self.pool.total(),
            kv_blocks_peak: self.pool.peak(),
            running_peak: self.running_peak,
        }
    }
}

impl Ahead {
    /// When so many of the steps are done; `None` past the clock.
    fn boundary(&self, steps: u32) -> Option<SimTime> {
        let span = progression_sum(self.run.first, self.run.increment, u64::from(steps))?;
        self.start.0.checked_add(span).map(SimTime)
    }

    /// Keeps the steps up to the first boundary that is not before `now`.
    fn cut(&mut self, now: SimTime) {
        let until = |steps: u32| self.boundary(steps).expect("it is not past the end");
        let (mut too_few, mut enough) = (0, self.steps);
        while enough - too_few > 1 {
            let middle = too_few + (enough - too_few) / 2;
            if until(middle) < now {
                too_few = middle;
            } else {
                enough = middle;
            }
        }
        self.end = until(enough);
        self.steps = enough;
    }
}
