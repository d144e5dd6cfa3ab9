//! Tokens and logits of checkpoints whose answers are known: one device and uneven layouts, alone and
//! batched. Reference arithmetic is f32 on the stored weights, so every logit lies within 1e-4.

#![expect(
    clippy::print_stdout,
    reason = "a skipped check says so, a passed one how close it came"
)]

use std::path::{Path, PathBuf};

use infercluster_executor::backend::Cpu;
use infercluster_executor::checkpoint::{Checkpoint, make};
use infercluster_executor::inprocess::InProcess;
use infercluster_executor::model::chain_logits;
use infercluster_executor::step::StepItem;
use infercluster_inventory::config;
use infercluster_planner::proportional::{ProportionalRequest, proportional_layout};
use infercluster_spec::layout::Reduction;
use infercluster_spec::model::{Family, Llama3RopeScaling, Rope};
use infercluster_spec::validate::validate_layout;
use infercluster_spec::{Dtype, KvBlockId, Layout, Model, ReplicaId, SequenceId};
use serde::Deserialize;

const LOGIT_TOLERANCE: f32 = 1e-4;
const BLOCK_SIZE: u32 = 16;

#[derive(Deserialize)]
struct Expected {
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    prompt: String,
    ids: Vec<u32>,
    greedy: Vec<u32>,
    logits: Vec<f32>,
}

/// A cut of the model, as `layout make` spells it.
#[derive(Debug, Clone, Copy)]
struct Cut {
    devices: u32,
    stages: Option<&'static str>,
    heads: Option<&'static str>,
    mlp: Option<&'static str>,
    split_groups: bool,
}

const WHOLE: Cut = Cut {
    devices: 1,
    stages: None,
    heads: None,
    mlp: None,
    split_groups: false,
};

#[test]
fn llama_with_grouped_queries_in_f32() {
    let pair = Cut { devices: 2, ..WHOLE };
    check(
        "llama_gqa_f32",
        &[
            WHOLE,
            Cut {
                heads: Some("5:1"),
                ..pair
            },
            Cut {
                devices: 3,
                heads: Some("3:2:1"),
                ..pair
            },
            Cut {
                mlp: Some("90:10"),
                ..pair
            },
            Cut {
                stages: Some("2:1"),
                ..pair
            },
            Cut {
                devices: 4,
                stages: Some("2:1"),
                heads: Some("5:1"),
                mlp: Some("70:30"),
                ..pair
            },
        ],
    );
}

#[test]
fn qwen2_with_biases_in_bf16() {
    let pair = Cut { devices: 2, ..WHOLE };
    check(
        "qwen2_bias_bf16",
        &[
            WHOLE,
            Cut {
                heads: Some("1:1"),
                ..pair
            },
            Cut {
                heads: Some("1:0"),
                ..pair
            },
            Cut {
                devices: 3,
                heads: Some("1:1:0"),
                ..pair
            },
            Cut {
                heads: Some("9:5"),
                split_groups: true,
                ..pair
            },
            Cut {
                stages: Some("3:1"),
                ..pair
            },
            Cut {
                devices: 4,
                stages: Some("3:1"),
                heads: Some("9:5"),
                split_groups: true,
                ..pair
            },
        ],
    );
}

/// Every cut in both reductions gives the expected answers; `invariant` ones the bits of one device, too.
fn check(name: &str, cuts: &[Cut]) {
    let Some(folder) = oracle(name, 2 * cuts.len()) else {
        return;
    };
    let model = config::load(&folder).unwrap().model;
    let checkpoint = Checkpoint::open(&folder).unwrap();
    let text = std::fs::read_to_string(folder.join("expected.json")).unwrap();
    let Expected { cases } = serde_json::from_str(&text).unwrap();
    let mut whole = Vec::new();
    for cut in cuts {
        for reduction in [Reduction::Invariant, Reduction::Fast] {
            let layout = layout(&model, *cut, reduction);
            let batched = run(&checkpoint, &model, &layout, &cases);
            let place = format!("{name} {reduction:?} {cut:?}");
            let largest = compare(&cases, &batched, &place);
            println!("{place}: largest logit difference {largest:.1e}");
            if reduction == Reduction::Fast {
                continue;
            }
            let chains: Vec<u64> = batched.iter().map(|answer| answer.chain).collect();
            if whole.is_empty() {
                for (case, batched) in cases.iter().zip(&batched) {
                    let alone = run(&checkpoint, &model, &layout, std::slice::from_ref(case));
                    assert_eq!(alone[0].chain, batched.chain, "{place} {} alone", case.prompt);
                }
                whole.clone_from(&chains);
            }
            assert_eq!(chains, whole, "{place}: bits differ from one device");
        }
    }
}

/// The largest difference of a logit at a prompt's end.
fn compare(cases: &[Case], answers: &[Answer], place: &str) -> f32 {
    assert_eq!(cases.len(), answers.len());
    let mut largest: f32 = 0.0;
    for (case, answer) in cases.iter().zip(answers) {
        assert_eq!(answer.greedy, case.greedy, "{place} {}", case.prompt);
        assert_eq!(answer.logits.len(), case.logits.len());
        for (id, (found, expected)) in answer.logits.iter().zip(&case.logits).enumerate() {
            let difference = (found - expected).abs();
            assert!(
                difference <= LOGIT_TOLERANCE,
                "{place} {}: logit {id} is {found}, expected {expected}",
                case.prompt
            );
            largest = largest.max(difference);
        }
    }
    largest
}

fn layout(model: &Model, cut: Cut, reduction: Reduction) -> Layout {
    let parse = |text: Option<&str>| text.map(|text| text.parse().unwrap());
    let request = ProportionalRequest {
        stages: parse(cut.stages),
        heads: parse(cut.heads),
        mlp: parse(cut.mlp),
        split_groups: cut.split_groups,
        quantum: 1,
        reduction,
        ..ProportionalRequest::equal(cut.devices)
    };
    let layout = proportional_layout(model, &request).unwrap();
    validate_layout(&layout, model, None).unwrap();
    layout
}

/// What a prompt was answered with.
struct Answer {
    greedy: Vec<u32>,
    /// At the prompt's last position.
    logits: Vec<f32>,
    chain: u64,
}

/// Answers every case, all of them in one batch: prompts first, then token by token.
fn run(checkpoint: &Checkpoint, model: &Model, layout: &Layout, cases: &[Case]) -> Vec<Answer> {
    let lengths = cases
        .iter()
        .map(|case| (case.ids.len() + case.greedy.len()) as u32);
    let tables: Vec<Vec<KvBlockId>> = lengths
        .scan(0, |next, tokens| {
            let first = *next;
            *next += tokens.div_ceil(BLOCK_SIZE);
            Some((first..*next).map(KvBlockId).collect())
        })
        .collect();
    let blocks = tables.iter().map(|table| table.len() as u32).sum();
    let mut replica = InProcess::load(&Cpu::new(), checkpoint, model, layout, ReplicaId(0), blocks).unwrap();
    let mut known: Vec<Vec<u32>> = cases.iter().map(|case| case.ids.clone()).collect();
    let mut computed = vec![0; cases.len()];
    let mut first_logits = vec![Vec::new(); cases.len()];
    let mut chains = vec![0; cases.len()];
    let new_tokens = cases.iter().map(|case| case.greedy.len()).max().unwrap_or(0);
    for _ in 0..new_tokens {
        let item = |(index, known): (usize, &Vec<u32>)| StepItem {
            sequence: SequenceId(index as u64),
            start: computed[index] as u32,
            tokens: known[computed[index]..].to_vec(),
            block_table: tables[index].clone(),
            wants_logits: true,
        };
        let items: Vec<StepItem> = known.iter().enumerate().map(item).collect();
        for (index, logits) in replica.step(&items).unwrap().into_iter().enumerate() {
            computed[index] = known[index].len();
            known[index].push(argmax(&logits));
            chains[index] = chain_logits(chains[index], &logits);
            if first_logits[index].is_empty() {
                first_logits[index] = logits;
            }
        }
    }
    let answers = known.into_iter().zip(first_logits).zip(chains).zip(cases);
    answers
        .map(|(((known, logits), chain), case)| Answer {
            greedy: known[case.ids.len()..].to_vec(),
            logits,
            chain,
        })
        .collect()
}

/// The lowest id of the largest logit.
fn argmax(logits: &[f32]) -> u32 {
    let best = (0..logits.len()).fold(0, |best, id| if logits[id] > logits[best] { id } else { best });
    best as u32
}

/// The folder of an oracle model; prints what is skipped where there is none.
fn oracle(name: &str, checks: usize) -> Option<PathBuf> {
    let root = std::env::var_os("INFERCLUSTER_REFERENCE_DATA").map_or_else(
        || Path::new(env!("CARGO_MANIFEST_DIR")).join("../../shared"),
        PathBuf::from,
    );
    let folder = root.join("oracle").join(name);
    if folder.is_dir() {
        return Some(folder);
    }
    println!("skipped {checks} checks: {} is not there", folder.display());
    None
}

#[test]
fn made_models_read_back_as_they_were_asked_for() {
    let llama = Model {
        name: "made".to_owned(),
        family: Family::Llama,
        layers: 2,
        hidden: 48,
        query_heads: 6,
        kv_heads: 2,
        head_dim: 16,
        ffn: 80,
        vocab: 99,
        tied_embeddings: false,
        qkv_bias: false,
        rms_epsilon: 1e-5,
        rope: Rope {
            theta: 500_000.0,
            llama3: Some(Llama3RopeScaling {
                factor: 8.0,
                low_freq_factor: 1.0,
                high_freq_factor: 4.0,
                original_max_position: 8192,
            }),
        },
        max_positions: 32768,
        dtype: Dtype::F16,
        experts: None,
        sliding_window: None,
    };
    let qwen2 = Model {
        family: Family::Qwen2,
        tied_embeddings: true,
        qkv_bias: true,
        rope: Rope {
            theta: 1e6,
            llama3: None,
        },
        dtype: Dtype::Bf16,
        ..llama.clone()
    };
    for model in [llama, qwen2] {
        let scratch = tempfile::tempdir().unwrap();
        let folder = scratch.path().join("made");
        make(&folder, &model, 1).unwrap();
        assert_eq!(config::load(&folder).unwrap().model, model);
    }
}
