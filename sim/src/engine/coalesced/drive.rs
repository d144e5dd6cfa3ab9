//! In which order replicas, arrivals and clients go on.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use infercluster_serving::{NewSequence, RouterPolicy};
use infercluster_spec::{ReplicaId, SequenceId, SimDuration, SimTime};

use super::Engine;
use super::replica::Replica;
use super::world::World;
use crate::scenario::{Load, SimError};

impl Engine<'_> {
    /// Runs to the end of the last request.
    pub(super) fn drive(&mut self) -> Result<(), SimError> {
        match (self.scenario.load, self.scenario.router) {
            (Load::Open, RouterPolicy::RoundRobin) => self.drive_apart(),
            (Load::Open, _) => self.drive_together(Sends::Open),
            (Load::Closed { clients, .. }, _) => {
                if clients == 0 {
                    return Err(SimError::NoClients);
                }
                self.drive_together(Sends::Closed(BinaryHeap::new()))
            }
        }
    }

    /// Round robin does not look at the replicas, so each of them runs alone with its own requests.
    fn drive_apart(&mut self) -> Result<(), SimError> {
        let mut queues: Vec<Vec<u32>> = vec![Vec::new(); self.replicas.len()];
        while let Some(at) = self.next_arrival()? {
            let position = self.next;
            self.next += 1;
            match self.route(position) {
                Some(replica) => {
                    self.world.table.send(position, at);
                    queues[replica.index()].push(position as u32);
                }
                None => self.skipped += 1,
            }
        }
        for (replica, queue) in self.replicas.iter_mut().zip(&queues) {
            self.events += drive_alone(replica, queue, &mut self.world)?;
        }
        Ok(())
    }

    /// When the next request of an open loop arrives; `None` where there is none.
    fn next_arrival(&self) -> Result<Option<SimTime>, SimError> {
        let Some(request) = self.world.trace.get(self.next) else {
            return Ok(None);
        };
        let at = request
            .arrival
            .ok_or(SimError::NoArrival { request: request.id })?;
        let before = self
            .next
            .checked_sub(1)
            .and_then(|before| self.world.trace[before].arrival);
        if before.is_some_and(|before| at < before) {
            return Err(SimError::ArrivalOrder { request: request.id });
        }
        Ok(Some(at))
    }

    /// The replica that takes a request; `None` where none could ever run it.
    fn route(&mut self, position: usize) -> Option<ReplicaId> {
        let request = &self.world.trace[position];
        let input = u32::try_from(request.input.0).ok()?;
        let output = u32::try_from(request.output.0).ok()?;
        let new = NewSequence::new(SequenceId(position as u64), input, output);
        let doors = &self.doors;
        self.router
            .route_where(|replica| doors[replica.index()].check_fit(&new).is_ok())
    }

    /// Everything that happens at one instant before the next: completions, arrivals, plans.
    fn drive_together(&mut self, mut sends: Sends) -> Result<(), SimError> {
        let mut ends = Ends::new(self.replicas.len());
        let mut touched: Vec<u32> = Vec::new();
        if let Load::Closed { clients, .. } = self.scenario.load {
            for _ in 0..clients {
                self.client_sends(SimTime::ZERO, SimDuration::ZERO, &mut sends)?;
            }
        }
        loop {
            let arrival = self.next_send(&sends)?;
            let Some(now) = [ends.soonest(), arrival].into_iter().flatten().min() else {
                return Ok(());
            };
            self.complete_at(now, &mut ends, &mut touched, &mut sends)?;
            self.arrive_at(now, &mut ends, &mut touched, &mut sends)?;
            // A run that an arrival cut short may end at this very boundary; nobody's request ends with it.
            self.complete_at(now, &mut ends, &mut touched, &mut sends)?;
            for index in touched.drain(..) {
                let replica = &mut self.replicas[index as usize];
                if replica.end().is_none() {
                    replica.plan(now, &mut self.world)?;
                    ends.set(index as usize, replica.end());
                }
            }
        }
    }

    fn complete_at(
        &mut self,
        now: SimTime,
        ends: &mut Ends,
        touched: &mut Vec<u32>,
        sends: &mut Sends,
    ) -> Result<(), SimError> {
        while ends.soonest() == Some(now) {
            let index = ends.first();
            self.events += 1;
            let ended = self.replicas[index].complete(&mut self.world)?;
            ends.set(index, None);
            touched.push(index as u32);
            for _ in 0..ended {
                self.router.finished(ReplicaId(index as u32));
                if let Load::Closed { turnaround, .. } = self.scenario.load {
                    self.client_sends(now, turnaround, sends)?;
                }
            }
        }
        Ok(())
    }

    fn arrive_at(
        &mut self,
        now: SimTime,
        ends: &mut Ends,
        touched: &mut Vec<u32>,
        sends: &mut Sends,
    ) -> Result<(), SimError> {
        while self.next_send(sends)? == Some(now) {
            self.events += 1;
            let position = match sends {
                Sends::Open => {
                    self.next += 1;
                    self.next - 1
                }
                Sends::Closed(heap) => heap
                    .pop()
                    .map(|Reverse((_, position))| position)
                    .expect("it was seen"),
            };
            let Some(replica) = self.route(position) else {
                self.skipped += 1;
                if matches!(sends, Sends::Closed(_)) {
                    // A client goes on to its next request at once.
                    self.client_sends(now, SimDuration::ZERO, sends)?;
                }
                continue;
            };
            self.world.table.send(position, now);
            let index = replica.index();
            self.replicas[index].arrive(position as u32, now);
            match self.replicas[index].end() {
                None => touched.push(index as u32),
                end => ends.set(index, end),
            }
        }
        Ok(())
    }

    /// When the next request is sent.
    fn next_send(&self, sends: &Sends) -> Result<Option<SimTime>, SimError> {
        match sends {
            Sends::Open => self.next_arrival(),
            Sends::Closed(heap) => Ok(heap.peek().map(|Reverse((at, _))| *at)),
        }
    }

    /// A client of a closed loop sends the next request so long from now, where there is one and time.
    fn client_sends(&mut self, now: SimTime, wait: SimDuration, sends: &mut Sends) -> Result<(), SimError> {
        let (Sends::Closed(heap), Load::Closed { duration, .. }) = (sends, self.scenario.load) else {
            return Ok(());
        };
        if self.next == self.world.trace.len() {
            return Ok(());
        }
        let at = now
            .0
            .checked_add(wait.0)
            .map(SimTime)
            .ok_or(SimError::ClockEnds)?;
        if duration.is_none_or(|duration| at.since(SimTime::ZERO) < duration) {
            heap.push(Reverse((at, self.next)));
            self.next += 1;
        }
        Ok(())
    }
}

/// Where requests come from.
enum Sends {
    /// The trace, by its arrivals.
    Open,
    /// Clients: when each position of the trace is sent.
    Closed(BinaryHeap<Reverse<(SimTime, usize)>>),
}

/// Runs one replica with requests that nobody else can get; answers how many events that took.
fn drive_alone(replica: &mut Replica, queue: &[u32], world: &mut World) -> Result<u64, SimError> {
    let mut queue = queue.iter().copied().peekable();
    let trace = world.trace;
    let arrival = |request: u32| trace[request as usize].arrival.unwrap_or_default();
    let mut events = queue.len() as u64;
    loop {
        let next = queue.peek().copied();
        let now = match (replica.end(), next) {
            (None, None) => return Ok(events),
            (None, Some(request)) => arrival(request),
            (Some(end), Some(request)) if arrival(request) < end => {
                queue.next();
                replica.arrive(request, arrival(request));
                continue;
            }
            (Some(end), _) => {
                events += 1;
                replica.complete(world)?;
                end
            }
        };
        while let Some(request) = queue.next_if(|request| arrival(*request) == now) {
            replica.arrive(request, now);
        }
        replica.plan(now, world)?;
    }
}

/// When each replica's planned steps end, as a tournament: the soonest is at the root.
struct Ends {
    /// Ends of replicas, padded to a power of two.
    ends: Vec<Option<SimTime>>,
    /// Winners of the matches, the root at 1.
    winners: Vec<u32>,
}

impl Ends {
    fn new(replicas: usize) -> Self {
        let leaves = replicas.next_power_of_two().max(2);
        let mut winners = vec![0; leaves];
        for node in (1..leaves).rev() {
            // Nobody has an end yet, so the left one wins.
            winners[node] = if 2 * node < leaves {
                winners[2 * node]
            } else {
                (2 * node - leaves) as u32
            };
        }
        Self {
            ends: vec![None; leaves],
            winners,
        }
    }

    /// The replica whose steps end first.
    fn first(&self) -> usize {
        self.winners[1] as usize
    }

    fn soonest(&self) -> Option<SimTime> {
        self.ends[self.first()]
    }

    fn set(&mut self, index: usize, end: Option<SimTime>) {
        if self.ends[index] == end {
            return;
        }
        self.ends[index] = end;
        let leaves = self.ends.len();
        let mut node = (leaves + index) / 2;
        while node > 0 {
            let child = |side: usize| {
                let child = 2 * node + side;
                if child < leaves {
                    self.winners[child]
                } else {
                    (child - leaves) as u32
                }
            };
            let (left, right) = (child(0), child(1));
            let key = |leaf: u32| self.ends[leaf as usize].map_or((true, SimTime::ZERO), |end| (false, end));
            self.winners[node] = if key(right) < key(left) { right } else { left };
            node /= 2;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_soonest_end_wins() {
        let mut ends = Ends::new(5);
        assert_eq!(ends.soonest(), None);
        let mut plain = [None; 5];
        for (index, at) in [
            (3, 9),
            (0, 7),
            (4, 8),
            (0, 12),
            (2, 8),
            (4, 0),
            (3, 0),
            (2, 0),
            (1, 3),
        ] {
            plain[index] = (at > 0).then_some(SimTime(at));
            ends.set(index, plain[index]);
            let soonest = plain.iter().flatten().min().copied();
            assert_eq!(ends.soonest(), soonest);
            assert_eq!(plain[ends.first()], soonest);
        }
    }
}
