//! Why nothing fits, and what would.

use std::collections::BTreeMap;
use std::fmt;

use infercluster_sim::cost::CostError;
use infercluster_spec::{Bytes, GpuId};

use super::bytes::ShareBytes;
use super::stage::usable_memory;
use super::structures::Structures;
use super::{PlanProblem, ReplicaError, Workload};
use crate::apportion::is_held;

/// What rules every layout out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InfeasibleConstraint {
    /// No way to form stages has links between the devices that exchange something.
    Links,
    /// All devices together have too little memory.
    Memory,
    /// All devices together have the memory, but no cut into whole heads, columns, rows and layers fits each.
    Cut,
}

impl fmt::Display for InfeasibleConstraint {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(match self {
            Self::Links => "links between the devices",
            Self::Memory => "memory of all devices together",
            Self::Cut => "memory of single devices",
        })
    }
}

impl fmt::Display for Infeasible {
    /// The constraint and the nearest that would fit, in one sentence.
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "no layout fits, bound by the {}", self.constraint)?;
        match self.constraint {
            InfeasibleConstraint::Links => return Ok(()),
            InfeasibleConstraint::Memory => write!(f, ": {} are missing", self.missing)?,
            InfeasibleConstraint::Cut => write!(f, ": every cut into whole units leaves one short")?,
        }
        match (self.nearest_sequences, self.nearest_context) {
            (None, None) => write!(f, "; not even the weights and one short sequence fit"),
            (sequences, context) => {
                let sequences = sequences.map(|count| format!("{count} sequences of this context"));
                let context = context.map(|tokens| format!("contexts of {tokens} tokens"));
                let nearest: Vec<String> = sequences.into_iter().chain(context).collect();
                write!(f, "; {} would fit", nearest.join(", or "))
            }
        }
    }
}

/// Why no layout holds the workload, and what would fit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Infeasible {
    /// What rules every layout out.
    pub constraint: InfeasibleConstraint,
    /// Bytes of weights and KV beyond the memory of all devices together; zero where the sum would fit, but no
    /// way to cut it does.
    pub missing: Bytes,
    /// The most sequences of the same mean context that fit; `None` where not one does.
    pub nearest_sequences: Option<u32>,
    /// The longest mean context at which the same number of sequences fits; `None` where no context does.
    pub nearest_context: Option<u64>,
}

/// The answer to a problem that no structure holds.
pub(super) fn nearest(problem: &PlanProblem, list: &Structures) -> Result<Infeasible, ReplicaError> {
    let linked = Linked::new(problem, list)?;
    let missing = missing(problem)?;
    let constraint = if linked.structures.is_empty() {
        InfeasibleConstraint::Links
    } else if missing > Bytes::ZERO {
        InfeasibleConstraint::Memory
    } else {
        InfeasibleConstraint::Cut
    };
    Ok(Infeasible {
        constraint,
        missing,
        nearest_sequences: nearest_sequences(problem, &linked)?,
        nearest_context: nearest_context(problem, &linked)?,
    })
}
/// Bytes of weights and KV beyond the memory of all devices together.
fn missing(problem: &PlanProblem) -> Result<Bytes, ReplicaError> {
    let model = problem.model;
    let head = (u64::from(model.vocab) + 1) * u64::from(model.hidden);
    let params = u64::from(model.layers) * model.layer_params() + head;
    let kv_tokens = problem.workload.kv_tokens(problem.kv.block_size);
    let kv = u128::from(model.kv_bytes_per_token(problem.kv.dtype).0) * u128::from(kv_tokens);
    let needed = u128::from(model.dtype.bytes(params).0) + kv;
    let memory = usable_memory(problem, &problem.gpus)?;
    let there: u128 = memory.iter().map(|bytes| u128::from(bytes.0)).sum();
    Ok(Bytes(
        u64::try_from(needed.saturating_sub(there)).unwrap_or(u64::MAX),
    ))
}

/// Structures whose devices are linked.
struct Linked<'a> {
    classes: &'a BTreeMap<GpuId, usize>,
    structures: Vec<&'a [Vec<GpuId>]>,
}

impl<'a> Linked<'a> {
    fn new(problem: &PlanProblem, list: &'a Structures) -> Result<Self, ReplicaError> {
        let mut known: BTreeMap<Vec<usize>, bool> = BTreeMap::new();
        let mut is_linked = |gpus: &[GpuId]| -> Result<bool, ReplicaError> {
            let key = gpus.iter().map(|gpu| list.classes[gpu]).collect();
            if let Some(known) = known.get(&key) {
                return Ok(*known);
            }
            let linked = match problem.cost.group(gpus) {
                Ok(_) => true,
                Err(CostError::Topology(_)) => false,
                Err(error) => return Err(error.into()),
            };
            known.insert(key, linked);
            Ok(linked)
        };
        let mut structures = Vec::new();
        for structure in &list.structures {
            let mut linked = true;
            for gpus in structure {
                linked = linked && is_linked(gpus)?;
            }
            for pair in structure.windows(2) {
                for (rank, receiver) in pair[1].iter().enumerate() {
                    linked = linked && is_linked(&[pair[0][rank % pair[0].len()], *receiver])?;
                }
            }
            if linked {
                structures.push(&structure[..]);
            }
        }
        Ok(Self {
            classes: &list.classes,
            structures,
        })
    }

    /// Whether some structure certainly holds the problem with another workload.
    fn holds(&self, problem: &PlanProblem, workload: Workload) -> Result<bool, ReplicaError> {
        let problem = PlanProblem {
            workload,
            ..problem.clone()
        };
        let bytes = ShareBytes::new(&problem);
        let layers = problem.model.layers;
        let mut known: BTreeMap<(Vec<usize>, bool), u32> = BTreeMap::new();
        for structure in &self.structures {
            let mut held = 0_u64;
            for (position, gpus) in structure.iter().enumerate() {
                let is_last = position + 1 == structure.len();
                let classes = gpus.iter().map(|gpu| self.classes[gpu]).collect();
                let memory = usable_memory(&problem, gpus)?;
                let most = *known
                    .entry((classes, is_last))
                    .or_insert_with(|| bytes.most_layers(layers, is_last, &memory, is_held));
                if most == 0 {
                    held = 0;
                    break;
                }
                held += u64::from(most);
            }
            if held >= u64::from(layers) {
                return Ok(true);
            }
        }
        Ok(false)
    }
}

/// The largest value in `1..limit` that fits, for something that fits less the larger it is.
fn largest_fitting(
    limit: u64,
    mut fits: impl FnMut(u64) -> Result<bool, ReplicaError>,
) -> Result<Option<u64>, ReplicaError> {
    let (mut low, mut high) = (0, limit);
    while low + 1 < high {
        let middle = low + (high - low) / 2;
        if fits(middle)? {
            low = middle;
        } else {
            high = middle;
        }
    }
    Ok(Some(low).filter(|largest| *largest > 0))
}

fn nearest_sequences(problem: &PlanProblem, linked: &Linked) -> Result<Option<u32>, ReplicaError> {
    let asked = problem.workload;
    let largest = largest_fitting(u64::from(asked.sequences), |sequences| {
        let sequences = sequences as u32;
        linked.holds(problem, Workload { sequences, ..asked })
    })?;
    Ok(largest.map(|sequences| sequences as u32))
}

fn nearest_context(problem: &PlanProblem, linked: &Linked) -> Result<Option<u64>, ReplicaError> {
    let asked = problem.workload;
    let block = u64::from(problem.kv.block_size);
    let blocks = asked.mean_context.div_ceil(block);
    let largest = largest_fitting(blocks, |blocks| {
        let mean_context = blocks * block;
        linked.holds(
            problem,
            Workload {
                mean_context,
                ..asked
            },
        )
    })?;
    Ok(largest.map(|blocks| blocks * block))
}
