//! Tokens and logits of two made models, recorded: a change of numerics shows here without any reference data.

use std::fmt::Write as _;

use infercluster_executor::checkpoint::make;
use infercluster_executor::coordinator::Coordinator;
use infercluster_executor::generate::{GenerateOptions, generate};
use infercluster_spec::layout::Reduction;
use infercluster_spec::model::{Family, Llama3RopeScaling, Rope};
use infercluster_spec::{Dtype, Layout, Model};

use crate::support::{UNEVEN, layout, model, options, prompts};

/// What is recorded; its head says when and how it may be renewed.
const RECORDED: &str = include_str!("../data/golden.txt");

/// The other family, stored in half the bits, with stretched rotations and one table for words in and out.
fn stretched() -> Model {
    let llama3 = Llama3RopeScaling {
        factor: 8.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_max_position: 64,
    };
    Model {
        name: "stretched".to_owned(),
        family: Family::Llama,
        qkv_bias: false,
        tied_embeddings: true,
        dtype: Dtype::Bf16,
        rope: Rope {
            theta: 500_000.0,
            llama3: Some(llama3),
        },
        ..model()
    }
}

/// One line a prompt: its length, the greedy tokens, the chained hash of all logits.
fn lines(model: &Model, layout: Layout) -> String {
    let folder = tempfile::tempdir().unwrap();
    make(folder.path(), model, 11).unwrap();
    let mut options = options(folder.path(), layout);
    options.model = model.clone();
    let coordinator = Coordinator::start(options).unwrap();
    let asked = GenerateOptions {
        max_tokens: 8,
        ignore_eos: true,
        logits: false,
        logits_hash: true,
    };
    let prompts = prompts(&[1, 17, 150]);
    let mut lines = String::new();
    for (prompt, one) in prompts
        .iter()
        .zip(generate(&coordinator, &prompts, &asked).unwrap())
    {
        let hash = one.logits_hash.unwrap();
        writeln!(
            lines,
            "{} {} {:?} {hash:016x}",
            model.name,
            prompt.len(),
            one.tokens
        )
        .unwrap();
    }
    lines
}

#[test]
fn recorded_bits_still_hold() {
    let found = [
        lines(&model(), layout(&UNEVEN, Reduction::Invariant)),
        lines(&stretched(), Layout::single(&stretched(), Reduction::Invariant)),
    ]
    .concat();
    let recorded: String = RECORDED
        .split_inclusive('\n')
        .filter(|line| !line.starts_with('#'))
        .collect();
    assert!(
        found == recorded,
        "the bits have changed, tests/data/golden.txt says when they may; found:\n{found}recorded:\n{recorded}"
    );
}
