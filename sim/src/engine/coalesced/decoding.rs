//! The sequences that decode on one replica: who ends when, who came last.
//!
//! Every one of them gets a token in every step, so one counter stands for all their positions: a sequence
//! keeps its distance to it, and ends where the counter reaches a value that is known when it begins.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// The decoding sequences of a replica.
#[derive(Debug, Default)]
pub(super) struct Decoding {
    /// Decode steps so far.
    decoded: u64,
    slots: Vec<Slot>,
    vacant: Vec<u32>,
    /// In order of arrival, with places of those that left.
    order: Vec<Place>,
    /// Soonest end first, with places of those that were preempted.
    ends: BinaryHeap<Reverse<(u64, Place)>>,
    count: u32,
    /// Tokens in the cache of all of them.
    tokens: u64,
}

/// A slot while one sequence has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Place {
    slot: u32,
    /// How often the slot had been given back.
    term: u32,
}

#[derive(Debug, Clone, Copy)]
struct Slot {
    request: u32,
    term: u32,
    is_taken: bool,
    /// Computed tokens minus `decoded`, modulo 2^64.
    offset: u64,
    /// `decoded` when it began.
    since: u64,
}

/// A sequence that leaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Leaver {
    /// Its position in the trace.
    pub(super) request: u32,
    /// Tokens in its cache.
    pub(super) computed: u32,
    /// Decode steps that the replica had done when it began.
    pub(super) since: u64,
}

impl Decoding {
    /// How many decode.
    pub(super) fn count(&self) -> u32 {
        self.count
    }

    /// Decode steps so far.
    pub(super) fn decoded(&self) -> u64 {
        self.decoded
    }

    /// Tokens in the cache of all in the next step, the new ones included.
    pub(super) fn next_kv_tokens(&self) -> u64 {
        self.tokens + u64::from(self.count)
    }

    /// Takes in a sequence that arrived after all the others here.
    pub(super) fn join(&mut self, request: u32, computed: u32, remaining: u32) {
        let slot = Slot {
            request,
            term: 0,
            is_taken: true,
            offset: u64::from(computed).wrapping_sub(self.decoded),
            since: self.decoded,
        };
        let place = match self.vacant.pop() {
            Some(index) => {
                let term = self.slots[index as usize].term;
                self.slots[index as usize] = Slot { term, ..slot };
                Place { slot: index, term }
            }
            None => {
                self.slots.push(slot);
                Place {
                    slot: (self.slots.len() - 1) as u32,
                    term: 0,
                }
            }
        };
        self.ends
            .push(Reverse((self.decoded + u64::from(remaining), place)));
        self.order.push(place);
        self.count += 1;
        self.tokens += u64::from(computed);
        if self.order.len() > 2 * self.count as usize + 64 {
            let slots = &self.slots;
            self.order
                .retain(|place| slots[place.slot as usize].holds(*place));
        }
    }

    /// Every one computes so many tokens.
    pub(super) fn advance(&mut self, steps: u32) {
        self.decoded += u64::from(steps);
        self.tokens += u64::from(steps) * u64::from(self.count);
    }

    /// Steps until the next one ends; `None` where nobody decodes.
    pub(super) fn steps_to_end(&mut self) -> Option<u32> {
        while let Some(Reverse((end, place))) = self.ends.peek() {
            if self.slots[place.slot as usize].holds(*place) {
                return Some((end - self.decoded) as u32);
            }
            self.ends.pop();
        }
        None
    }

    /// Takes out one that has all its tokens.
    pub(super) fn pop_ended(&mut self) -> Option<Leaver> {
        if self.steps_to_end()? > 0 {
            return None;
        }
        let Reverse((_, place)) = self.ends.pop()?;
        Some(self.vacate(place))
    }

    /// Takes out the one that arrived last.
    pub(super) fn pop_latest(&mut self) -> Option<Leaver> {
        loop {
            let place = self.order.pop()?;
            if self.slots[place.slot as usize].holds(place) {
                return Some(self.vacate(place));
            }
        }
    }

    fn vacate(&mut self, place: Place) -> Leaver {
        let slot = &mut self.slots[place.slot as usize];
        let computed = slot.offset.wrapping_add(self.decoded);
        slot.is_taken = false;
        slot.term = slot.term.wrapping_add(1);
        self.vacant.push(place.slot);
        self.count -= 1;
        self.tokens -= computed;
        Leaver {
            request: slot.request,
            computed: computed as u32,
            since: slot.since,
        }
    }

    /// Positions in the trace of all, in no order that matters.
    pub(super) fn requests(&self) -> impl Iterator<Item = u32> {
        self.slots
            .iter()
            .filter(|slot| slot.is_taken)
            .map(|slot| slot.request)
    }
}

impl Slot {
    fn holds(&self, place: Place) -> bool {
        self.is_taken && self.term == place.term
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_soonest_ends_and_the_latest_is_preempted() {
        let mut decoding = Decoding::default();
        decoding.join(10, 5, 3);
        decoding.join(11, 7, 1);
        assert_eq!(
            (decoding.steps_to_end(), decoding.next_kv_tokens()),
            (Some(1), 14)
        );
        decoding.advance(1);
        let leaver = |request, computed, since| {
            Some(Leaver {
                request,
                computed,
                since,
            })
        };
        assert_eq!(decoding.pop_ended(), leaver(11, 8, 0));
        assert_eq!(decoding.pop_ended(), None);
        // Takes the slot that became free; who had it before is not found again.
        decoding.join(12, 2, 9);
        decoding.join(13, 4, 1);
        assert_eq!(decoding.requests().collect::<Vec<_>>(), [10, 12, 13]);
        assert_eq!(decoding.pop_latest(), leaver(13, 4, 1));
        // The end of 13 is still in the heap, but not its own any more.
        assert_eq!(decoding.steps_to_end(), Some(2));
        decoding.advance(2);
        assert_eq!(decoding.pop_ended(), leaver(10, 8, 0));
        assert_eq!(decoding.pop_latest(), leaver(12, 4, 1));
        assert_eq!((decoding.pop_latest(), decoding.steps_to_end()), (None, None));
        assert_eq!((decoding.count(), decoding.next_kv_tokens()), (0, 0));
    }
}
