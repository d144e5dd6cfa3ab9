//! Ways to deal devices out to ordered stages.

use std::collections::BTreeMap;

use infercluster_spec::{Bytes, GpuId, NodeId};

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

/// Devices that are interchangeable.
struct Class {
    members: Vec<GpuId>,
}

/// Every structure, fewest stages first, up to [`STRUCTURE_LIMIT`].
pub(super) fn structures(problem: &PlanProblem) -> Result<Structures, ReplicaError> {
    let classes = classes(problem)?;
    let most = problem.gpus.len().min(problem.model.layers as usize);
    let counts: Vec<usize> = problem
        .stages
        .map_or_else(|| (1..=most).collect(), |stages| vec![stages]);
    let numbered = classes.iter().enumerate();
    let numbered = numbered.flat_map(|(class, own)| own.members.iter().map(move |gpu| (*gpu, class)));
    let mut dealing = Dealing {
        problem,
        classes: &classes,
        stages: Vec::new(),
        found: Structures {
            structures: Vec::new(),
            classes: numbered.collect(),
            all: true,
        },
    };
    for count in counts {
        let left: Vec<usize> = classes.iter().map(|class| class.members.len()).collect();
        dealing.deal(count, &left);
    }
    Ok(dealing.found)
}

fn classes(problem: &PlanProblem) -> Result<Vec<Class>, ReplicaError> {
    let mut keyed: Vec<(Likeness, Class)> = Vec::new();
    for id in &problem.gpus {
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
        let key = (
            node,
            gpu.device_type.as_str(),
            gpu.speed.value().to_bits(),
            memory,
        );
        match keyed.iter_mut().find(|(other, _)| *other == key) {
            Some((_, class)) => class.members.push(*id),
            None => keyed.push((key, Class { members: vec![*id] })),
        }
    }
    Ok(keyed.into_iter().map(|(_, class)| class).collect())
}

struct Dealing<'a> {
    problem: &'a PlanProblem<'a>,
    classes: &'a [Class],
    /// Devices of each class by stage dealt so far.
    stages: Vec<Vec<usize>>,
    found: Structures,
}

impl Dealing<'_> {
    fn deal(&mut self, stages_left: usize, left: &[usize]) {
        if self.found.structures.len() >= STRUCTURE_LIMIT {
            self.found.all = false;
            return;
        }
        if stages_left == 1 {
            self.stages.push(left.to_vec());
            let structure = self.structure();
            self.found.structures.push(structure);
            self.stages.pop();
            return;
        }
        // What stays must give every later stage a device.
        let total: usize = left.iter().sum();
        let mut own = vec![0; left.len()];
        while next_vector(&mut own, left) {
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

    /// Numbers of devices become devices: lower ones of a class go to earlier stages, and inside a stage the
    /// problem's order holds.
    fn structure(&self) -> Vec<Vec<GpuId>> {
        let mut next = vec![0; self.classes.len()];
        let stage = |own: &Vec<usize>| {
            let mut members = Vec::new();
            for (class, count) in own.iter().enumerate() {
                members.extend_from_slice(&self.classes[class].members[next[class]..next[class] + count]);
                next[class] += count;
            }
            let mut ordered = self.problem.gpus.clone();
            ordered.retain(|gpu| members.contains(gpu));
            ordered
        };
        self.stages.iter().map(stage).collect()
    }
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
