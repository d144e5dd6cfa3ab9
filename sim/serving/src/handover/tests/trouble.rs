//! What the outside does to the world: requests, handovers, crashes; and the tiny run in a fixed order.

use std::collections::{BTreeMap, BTreeSet};

use infercluster_spec::{GpuId, SequenceId, Term};
use rand::RngExt;

use super::super::fault::Planted;
use super::super::*;
use super::world::{Job, SLICES, Tally, Trouble, World};
use crate::scheduler::NewSequence;

impl World {
    pub(super) fn request(&mut self) {
        let (prompt, output) = (self.random.random_range(1..13), self.random.random_range(1..12));
        let id = SequenceId(self.next_sequence);
        self.next_sequence += 1;
        if self.received.len() < 6 && self.scheduler.add(NewSequence::new(id, prompt, output)).is_ok() {
            self.received.insert(id, 0);
        }
    }

    pub(super) fn cancel(&mut self) {
        if let Some((id, _)) = self.received.pop_first() {
            self.scheduler.cancel(id);
        }
    }

    /// A handover to a random layout, where none is under way.
    pub(super) fn begin_random(&mut self) -> Result<(), String> {
        let gpus = self.devices.len() as u32;
        let roster: BTreeSet<GpuId> = (0..3).map(|_| GpuId(self.random.random_range(0..gpus))).collect();
        let members: Vec<GpuId> = roster.iter().copied().collect();
        let mut placement: BTreeMap<GpuId, BTreeSet<u32>> = BTreeMap::new();
        for slice in 0..SLICES {
            for _ in 0..self.random.random_range(1..3) {
                let owner = members[self.random.random_range(0..members.len())];
                placement.entry(owner).or_default().insert(slice);
            }
        }
        self.begin(roster, placement);
        Ok(())
    }

    pub(super) fn begin(&mut self, roster: BTreeSet<GpuId>, placement: BTreeMap<GpuId, BTreeSet<u32>>) {
        let id = HandoverId(self.next_handover);
        let old = self.layouts[&self.record.layout].clone();
        let mut lanes = Vec::new();
        for (&to, slices) in &placement {
            for &slice in slices {
                let holders: Vec<GpuId> = old
                    .iter()
                    .filter(|(_, held)| held.contains(&slice))
                    .map(|(gpu, _)| *gpu)
                    .collect();
                if !holders.contains(&to) {
                    let from = holders[self.random.random_range(0..holders.len())];
                    let lane = LaneId(lanes.len() as u32);
                    lanes.push(Lane { id: lane, from, to });
                    self.lane_slices.insert((id, lane), (slice, from, to));
                }
            }
        }
        let plan = HandoverPlan {
            id,
            old: self.record.roster.clone(),
            new: roster,
            lanes,
        };
        if let Ok(actions) = self.coordinator.begin(plan) {
            self.next_handover += 1;
            self.layouts.insert(id, placement);
            self.carry_out(actions);
        }
    }

    /// The device loses everything; the coordinator hears of it later.
    pub(super) fn crash_rank(&mut self, gpu: GpuId) -> Result<(), String> {
        let planted = self.planted;
        let device = self.device(gpu);
        device.machine = Participant::with_fault(gpu, planted);
        device.shards.clear();
        device.kv.clear();
        device.term = Term(0);
        self.jobs
            .retain(|job| !matches!(job, Job::Load(worker, _) | Job::Compute(worker, _) if *worker == gpu));
        for (lane, queue) in &mut self.lanes {
            let (_, from, to) = self.lane_slices[lane];
            if from == gpu || to == gpu {
                queue.clear();
            }
        }
        self.jobs.push(Job::RankLost(gpu));
        Ok(())
    }

    /// Another coordinator takes a term, reads the record and goes on from the journal.
    pub(super) fn crash_coordinator(&mut self) -> Result<(), String> {
        self.reign += 1;
        self.term = Term(self.term.0 + 1);
        self.lose_kv();
        let others = self
            .devices
            .keys()
            .filter(|gpu| !self.record.roster.contains(gpu))
            .copied()
            .collect();
        let next_step = self.scheduler.next_step();
        self.coordinator =
            Coordinator::new(self.term, &self.record, others, next_step).with_fault(self.planted);
        Ok(())
    }
}

/// One request of three steps on worker 0, whose layout goes over to workers 0 and 1 meanwhile; in a fixed
/// order, but for a crash after an event (of worker 0, worker 1 or the coordinator) and a message that is put
/// off to the end.
pub(super) fn tiny(crash: Option<(u32, u32)>, late: Option<u32>) -> Result<Tally, String> {
    let mut world = World::new(0, Planted::default(), Trouble::None);
    while !world.coordinator.is_settled() {
        world.tick_all()?;
        while world.progress()? {}
    }
    world.tally.events = 0;
    let id = SequenceId(0);
    world
        .scheduler
        .add(NewSequence::new(id, 6, 6))
        .map_err(|refusal| refusal.to_string())?;
    world.received.insert(id, 0);
    let placement = [(GpuId(0), [0, 1].into()), (GpuId(1), [1, 2, 3].into())].into();
    world.begin([GpuId(0), GpuId(1)].into(), placement);
    let mut put_off = None;
    for event in 0.. {
        if Some(event) == late && !world.packets.is_empty() {
            put_off = Some(world.packets.remove(0));
        }
        if let Some((_, victim)) = crash.filter(|(at, _)| *at == event) {
            match victim {
                2 => world.crash_coordinator()?,
                gpu => world.crash_rank(GpuId(gpu))?,
            }
        }
        // Work and network take turns, so that steps run while KV moves.
        if event % 3 == 0 {
            world.dispatch()?;
        }
        if event % 2 == 0 && !world.jobs.is_empty() {
            let job = world.jobs.remove(0);
            world.work(job)?;
        } else if !world.progress()? {
            break;
        }
    }
    let events = world.tally.events;
    if let Some(packet) = put_off {
        world.deliver(packet)?;
    }
    let mut tally = world.calm_down()?;
    tally.events = events;
    Ok(tally)
}
