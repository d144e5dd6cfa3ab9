//! Which replica takes a request.
//!
//! A replica may be taken out and put back (a lost worker, a migration). Ties go to the lower id.

use infercluster_spec::ReplicaId;

/// How replicas are chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RouterPolicy {
    /// One after the other.
    RoundRobin,
    /// Where the fewest requests are under way.
    LeastOutstanding,
    /// Where the requests under way, this one included, are the fewest in proportion to capacity. It equals
    /// [`Self::LeastOutstanding`] on equal replicas and keeps unequal ones equally loaded.
    #[default]
    CapacityWeighted,
}

/// Chooses replicas and remembers how many requests each has under way.
#[derive(Debug, Clone)]
pub struct Router {
    policy: RouterPolicy,
    replicas: Vec<Lane>,
    /// Where the round goes on.
    next: usize,
}

#[derive(Debug, Clone, Copy)]
struct Lane {
    capacity: u64,
    outstanding: u64,
    available: bool,
}

impl Router {
    /// One capacity a replica, in any unit that compares them; 0 counts as the smallest that is there.
    pub fn new(policy: RouterPolicy, capacities: &[u64]) -> Self {
        let lane = |&capacity: &u64| Lane {
            capacity: capacity.max(1),
            outstanding: 0,
            available: true,
        };
        Self {
            policy,
            replicas: capacities.iter().map(lane).collect(),
            next: 0,
        }
    }

    /// Chooses a replica for a request and counts the request as under way; `None` where none is available.
    pub fn route(&mut self) -> Option<ReplicaId> {
        self.route_where(|_| true)
    }

    /// The same among the replicas that `can_take` the request.
    pub fn route_where(&mut self, can_take: impl Fn(ReplicaId) -> bool) -> Option<ReplicaId> {
        let count = self.replicas.len();
        let is_open = |&index: &usize| self.replicas[index].available && can_take(ReplicaId(index as u32));
        let open = (0..count).filter(is_open);
        let chosen = match self.policy {
            RouterPolicy::RoundRobin => (self.next..count).chain(0..self.next).find(is_open)?,
            RouterPolicy::LeastOutstanding => open.min_by_key(|&index| self.replicas[index].outstanding)?,
            RouterPolicy::CapacityWeighted => open.min_by(|&left, &right| {
                let (left, right) = (&self.replicas[left], &self.replicas[right]);
                // (a + 1) / x against (b + 1) / y without rounding.
                let load_left = (u128::from(left.outstanding) + 1) * u128::from(right.capacity);
                let load_right = (u128::from(right.outstanding) + 1) * u128::from(left.capacity);
                load_left.cmp(&load_right)
            })?,
        };
        self.next = (chosen + 1) % count;
        self.replicas[chosen].outstanding += 1;
        Some(ReplicaId(chosen as u32))
    }

    /// A request of that replica ended, however it did.
    ///
    /// # Panics
    /// Where that replica has no request under way.
    pub fn finished(&mut self, replica: ReplicaId) {
        let lane = &mut self.replicas[replica.index()];
        assert!(lane.outstanding > 0, "{replica} has no request under way");
        lane.outstanding -= 1;
    }

    /// Takes a replica out or puts it back.
    pub fn set_available(&mut self, replica: ReplicaId, available: bool) {
        self.replicas[replica.index()].available = available;
    }

    /// Requests under way on a replica.
    pub fn outstanding(&self, replica: ReplicaId) -> u64 {
        self.replicas[replica.index()].outstanding
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn routed(router: &mut Router, requests: usize) -> Vec<u32> {
        (0..requests)
            .filter_map(|_| router.route().map(|replica| replica.0))
            .collect()
    }

    #[test]
    fn the_round_skips_who_is_out() {
        let mut router = Router::new(RouterPolicy::RoundRobin, &[1, 1, 1]);
        assert_eq!(routed(&mut router, 4), [0, 1, 2, 0]);
        router.set_available(ReplicaId(1), false);
        assert_eq!(routed(&mut router, 3), [2, 0, 2]);
        router.set_available(ReplicaId(1), true);
        assert_eq!(routed(&mut router, 2), [0, 1]);
    }

    #[test]
    fn the_least_loaded_wins_and_ties_go_low() {
        let mut router = Router::new(RouterPolicy::LeastOutstanding, &[1, 1]);
        assert_eq!(routed(&mut router, 3), [0, 1, 0]);
        router.finished(ReplicaId(0));
        router.finished(ReplicaId(0));
        assert_eq!(routed(&mut router, 2), [0, 0]);
    }

    #[test]
    fn shares_follow_capacity() {
        // Loads after each choice, capacities 3 and 1: (1/3, 0), (2/3, 0), then 3/3 against 1/1 ties low,
        // then replica 1, since 4/3 > 1.
        let mut router = Router::new(RouterPolicy::CapacityWeighted, &[3, 1]);
        assert_eq!(routed(&mut router, 4), [0, 0, 0, 1]);
        assert_eq!(
            routed(&mut router, 396)
                .iter()
                .filter(|replica| **replica == 1)
                .count(),
            99
        );
    }

    #[test]
    fn nobody_is_an_answer() {
        let mut router = Router::new(RouterPolicy::CapacityWeighted, &[5]);
        router.set_available(ReplicaId(0), false);
        assert_eq!(router.route(), None);
        assert_eq!(Router::new(RouterPolicy::RoundRobin, &[]).route(), None);
    }
}
