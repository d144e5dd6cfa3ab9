//! Ways to deal devices out to ordered stages.

use std::collections::BTreeMap;

use infercluster_sim::cost::CostError;
use infercluster_spec::{Bytes, GpuId, NodeId, Operator};

use super::{PlanProblem, ReplicaError, STRUCTURE_LIMIT};

/// Structures in a fixed order.
pub(super) struct Structures {
    /// Devices by stage.
    pub(super) structures: Vec<Vec<Vec<GpuId>>>,
    /// Which devices are interchangeable.
    pub(super) classes: BTreeMap<GpuId, usize>,
    /// Whether these are all of them.
    pub(super) all: bool,
}

/// What makes devices interchangeable: node, type, bits of the speed, memory.
type Likeness<'a> = (NodeId, &'a str, u64, Bytes);

/// Every structure, fewest stages first, up to [`STRUCTURE_LIMIT`]. Every number of stages has the same right
/// to the limit, and begins with the devices cut in their order into stages of nearly equal number.
pub(super) fn structures(problem: &PlanProblem) -> Result<Structures, ReplicaError> {
    let classes = classes(problem)?;
    let sizes = sizes(&classes);
    let most = problem.gpus.len().min(problem.model.layers as usize);
    let counts = match problem.stages {
        Some(stages) => stages..=stages,
        None => 1..=most,
    };
    let mut found = Structures {
        structures: Vec::new(),
        classes: problem
            .gpus
            .iter()
            .copied()
            .zip(classes.iter().copied())
            .collect(),
        // Elsewhere the ranks of a group may stand in more orders than the one that is tried, or it matters
        // which of some equal devices stand together.
        all: classes.is_sorted() && links_are_alike(problem, &classes)?,
    };
    let numbers = counts.clone().count();
    for (position, count) in counts.enumerate() {
        let limit = (STRUCTURE_LIMIT - found.structures.len()) / (numbers - position);
        let mut dealing = Dealing {
            limit: limit.max(1),
            stages: Vec::new(),
            found: vec![in_order(&classes, &sizes, count)],
            all: true,
        };
        dealing.deal(count, &sizes);
        found.all &= dealing.all;
        let structures = dealing.found.iter();
        found
            .structures
            .extend(structures.map(|dealt| on_devices(&problem.gpus, &classes, dealt)));
    }
    Ok(found)
}

/// The class of every device of the problem, in its order.
fn classes(problem: &PlanProblem) -> Result<Vec<usize>, ReplicaError> {
    let mut known: Vec<Likeness> = Vec::new();
    let mut class = |id: &GpuId| {
        let unknown = || ReplicaError::UnknownMemory {
            gpu: *id,
            cluster: problem.cluster.name.clone(),
        };
        let (node, gpu) = problem
            .cluster
            .gpus()
            .find(|(_, gpu)| gpu.id == *id)
            .ok_or_else(unknown)?;
        let memory = problem.cluster.memory(gpu).ok_or_else(unknown)?;
        let speed = gpu.speed.value().to_bits();
        let likeness = (node, gpu.device_type.as_str(), speed, memory);
        Ok(known
            .iter()
            .position(|other| *other == likeness)
            .unwrap_or_else(|| {
                known.push(likeness);
                known.len() - 1
            }))
    };
    problem.gpus.iter().map(&mut class).collect()
}

/// A transfer that says how fast a way is.
const PROBE: Operator = Operator::Transfer {
    bytes: Bytes(1 << 20),
};

/// Whether devices of one class are equally far from every other device.
fn links_are_alike(problem: &PlanProblem, classes: &[usize]) -> Result<bool, ReplicaError> {
    let gpus = &problem.gpus;
    let time = |from: usize, to: usize| match problem.cost.group(&[gpus[from], gpus[to]]) {
        Ok(group) => Ok(group.seconds(&PROBE)),
        Err(CostError::Topology(_)) => Ok(None),
        Err(error) => Err(ReplicaError::from(error)),
    };
    let mut times = vec![vec![None; gpus.len()]; gpus.len()];
    for (from, row) in times.iter_mut().enumerate() {
        for (to, slot) in row.iter_mut().enumerate() {
            if from != to {
                *slot = time(from, to)?;
            }
        }
    }
    let alike = |one: usize, other: usize| {
        let thirds = (0..gpus.len()).filter(|third| *third != one && *third != other);
        let mut thirds = thirds.map(|third| {
            times[one][third] == times[other][third] && times[third][one] == times[third][other]
        });
        times[one][other] == times[other][one] && thirds.all(|alike| alike)
    };
    let mut pairs = (0..gpus.len()).flat_map(|one| (0..one).map(move |other| (one, other)));
    Ok(pairs.all(|(one, other)| classes[one] != classes[other] || alike(one, other)))
}

/// Devices of each class.
fn sizes(classes: &[usize]) -> Vec<usize> {
    let most = classes.iter().max().map_or(0, |class| class + 1);
    let mut sizes = vec![0; most];
    for class in classes {
        sizes[*class] += 1;
    }
    sizes
}

/// Devices of each class by stage.
type Dealt = Vec<Vec<usize>>;

/// Devices cut in their order into stages of nearly equal number.
fn in_order(classes: &[usize], sizes: &[usize], stages: usize) -> Dealt {
    let devices = classes.len();
    let stage = |stage: usize| {
        let mut own = vec![0; sizes.len()];
        for class in &classes[stage * devices / stages..(stage + 1) * devices / stages] {
            own[*class] += 1;
        }
        own
    };
    (0..stages).map(stage).collect()
}

struct Dealing {
    limit: usize,
    stages: Dealt,
    /// The first of them is met again.
    found: Vec<Dealt>,
    all: bool,
}

impl Dealing {
    fn deal(&mut self, stages_left: usize, left: &[usize]) {
        if stages_left == 1 {
            self.stages.push(left.to_vec());
            if self.stages != self.found[0] {
                if self.found.len() < self.limit {
                    self.found.push(self.stages.clone());
                } else {
                    self.all = false;
                }
            }
            self.stages.pop();
            return;
        }
        // What stays must give every later stage a device.
        let total: usize = left.iter().sum();
        let mut own = vec![0; left.len()];
        while self.all && next_vector(&mut own, left) {
            let taken: usize = own.iter().sum();
            if total - taken < stages_left - 1 {
                continue;
            }
            let rest: Vec<usize> = left.iter().zip(&own).map(|(left, own)| left - own).collect();
            self.stages.push(own.clone());
            self.deal(stages_left - 1, &rest);
            self.stages.pop();
        }
    }
}

/// Numbers of devices become devices: lower ones of a class go to earlier stages, and inside a stage the
/// problem's order holds.
fn on_devices(gpus: &[GpuId], classes: &[usize], dealt: &Dealt) -> Vec<Vec<GpuId>> {
    let mut left = dealt.clone();
    let mut stages = vec![Vec::new(); dealt.len()];
    for (gpu, class) in gpus.iter().zip(classes) {
        let stage = left
            .iter()
            .position(|own| own[*class] > 0)
            .expect("every device is dealt");
        left[stage][*class] -= 1;
        stages[stage].push(*gpu);
    }
    stages
}

/// Counts `vector` up below or at `most`, skipping zero; false after the last.
fn next_vector(vector: &mut [usize], most: &[usize]) -> bool {
    for (digit, most) in vector.iter_mut().zip(most) {
        if *digit < *most {
            *digit += 1;
            return true;
        }
        *digit = 0;
    }
    false
}
