//! Whole groups of workers over real sockets: any cut of the model gives the bits of one worker.

use infercluster_executor::coordinator::{Coordinator, CoordinatorOptions, FinishReason};
use infercluster_executor::generate::{GenerateOptions, Generated, generate};
use infercluster_executor::speed::Speed;
use infercluster_spec::layout::Reduction;
use infercluster_spec::{EngineOptions, GpuId};

use crate::support::{self, Cuts, WHOLE, layout, made, options, start};

const ALL: GenerateOptions = GenerateOptions {
    max_tokens: 12,
    ignore_eos: true,
    logits: true,
    logits_hash: true,
};

fn prompts() -> Vec<Vec<u32>> {
    support::prompts(&[1, 5, 40, 17, 70])
}

fn run(options: CoordinatorOptions, prompts: &[Vec<u32>]) -> Vec<Generated> {
    let coordinator = Coordinator::start(options).unwrap();
    generate(&coordinator, prompts, &ALL).unwrap()
}

const CUTS: [(&str, Cuts); 6] = [
    (
        "two uneven ranks",
        Cuts {
            layers: &[0, 4],
            heads: &[0, 5, 6],
            columns: &[0, 150, 160],
            rows: &[0, 40, 48],
            vocab: &[0, 13, 97],
        },
    ),
    (
        "a rank without heads, another without columns",
        Cuts {
            layers: &[0, 4],
            heads: &[0, 6, 6],
            columns: &[0, 0, 160],
            rows: &[0, 47, 48],
            vocab: &[0, 97, 97],
        },
    ),
    (
        "three ranks that share KV heads",
        Cuts {
            layers: &[0, 4],
            heads: &[0, 1, 3, 6],
            columns: &[0, 1, 100, 160],
            rows: &[0, 0, 7, 48],
            vocab: &[0, 1, 2, 97],
        },
    ),
    (
        "two uneven stages",
        Cuts {
            layers: &[0, 3, 4],
            ..WHOLE
        },
    ),
    (
        "two stages of two ranks",
        Cuts {
            layers: &[0, 1, 4],
            heads: &[0, 2, 6],
            columns: &[0, 64, 160],
            rows: &[0, 16, 48],
            vocab: &[0, 50, 97],
        },
    ),
    (
        "three stages",
        Cuts {
            layers: &[0, 1, 2, 4],
            ..WHOLE
        },
    ),
];

#[test]
fn every_invariant_layout_gives_the_bits_of_one_worker() {
    let folder = made();
    let prompts = prompts();
    let whole = run(
        options(folder.path(), layout(&WHOLE, Reduction::Invariant)),
        &prompts,
    );
    assert!(
        whole
            .iter()
            .all(|one| one.tokens.len() == 12 && one.finish == FinishReason::Length)
    );
    for (name, cuts) in &CUTS {
        let cut = run(
            options(folder.path(), layout(cuts, Reduction::Invariant)),
            &prompts,
        );
        assert_eq!(cut, whole, "{name}");
    }
}

#[test]
fn fast_layouts_stay_close() {
    let folder = made();
    let prompts = prompts();
    let whole = run(options(folder.path(), layout(&WHOLE, Reduction::Fast)), &prompts);
    for (name, cuts) in &CUTS {
        let cut = run(options(folder.path(), layout(cuts, Reduction::Fast)), &prompts);
        for (one, other) in whole.iter().zip(&cut) {
            let (one, other) = (one.logits.as_ref().unwrap(), other.logits.as_ref().unwrap());
            let gap = one
                .iter()
                .zip(other)
                .map(|(a, b)| (a - b).abs())
                .fold(0.0, f32::max);
            assert!(gap < 1e-3, "{name}: logits differ by {gap}");
        }
    }
}

#[test]
fn batching_chunks_blocks_and_preemption_change_no_bit() {
    let folder = made();
    let prompts = prompts();
    let whole = run(
        options(folder.path(), layout(&WHOLE, Reduction::Invariant)),
        &prompts,
    );
    let hashes: Vec<_> = whole.iter().map(|one| one.logits_hash.unwrap()).collect();
    let mut preemptions = 0;
    // (token budget, sequences, block size, blocks); 11 blocks of 8 hold the longest request and little more.
    for (token_budget, max_sequences, block_size, kv_blocks) in [
        (1, 256, 16, None),
        (7, 3, 8, None),
        (64, 256, 32, None),
        (512, 1, 16, None),
        (64, 256, 8, Some(11)),
    ] {
        let mut options = options(folder.path(), layout(&CUTS[0].1, Reduction::Invariant));
        options.engine = EngineOptions {
            token_budget,
            max_sequences,
            max_context: None,
        };
        options.layout.kv.block_size = block_size;
        options.kv_blocks = kv_blocks;
        let cut = run(options, &prompts);
        let found: Vec<_> = cut.iter().map(|one| one.logits_hash.unwrap()).collect();
        assert_eq!(found, hashes, "budget {token_budget}, block size {block_size}");
        preemptions += cut.iter().map(|one| one.preemptions).sum::<u32>();
    }
    assert!(preemptions > 0, "the small pool preempts");
}

#[test]
fn an_emulated_device_is_slow_and_gives_the_same_bits() {
    let folder = made();
    let prompts = prompts();
    let full = options(folder.path(), layout(&CUTS[0].1, Reduction::Invariant));
    let mut slow = full.clone();
    slow.speeds = [(GpuId(1), Speed::try_from(0.4).unwrap())].into();
    let coordinator = Coordinator::start(slow).unwrap();
    assert_eq!(
        generate(&coordinator, &prompts, &ALL).unwrap(),
        run(full, &prompts)
    );
    let measured = coordinator.measurements_blocking().unwrap();
    let checks = measured.speed_checks();
    // What other work took of its core counts against it.
    assert!(
        checks[0].asked == 1.0 && checks[0].achieved.unwrap() <= 1.0,
        "{checks:?}"
    );
    // Waits may overshoot on a busy machine, which is paid back later, but they never fall short.
    assert!(
        checks[1].asked == 0.4 && checks[1].achieved.unwrap() <= 0.4 * 1.001,
        "{checks:?}"
    );
    // Every step has a record in which both ranks say what they computed.
    assert_eq!(measured.steps.len() as u64, measured.workers[&GpuId(0)].steps);
    assert!(
        measured
            .steps
            .iter()
            .all(|step| step.ranks.len() == 2 && step.wall_s > 0.0)
    );
}

#[test]
fn bad_requests_hear_why_and_harm_nobody() {
    let folder = made();
    let coordinator = start(folder.path(), &CUTS[3].1);
    let ask = |prompt: Vec<u32>, max_tokens| {
        let options = GenerateOptions { max_tokens, ..ALL };
        generate(&coordinator, &[prompt], &options)
    };
    let cases = [
        (vec![97], 4, "token 97 is outside the vocabulary of 97"),
        (vec![], 4, "has an empty prompt"),
        (vec![1], 0, "nothing is left to generate"),
        (
            vec![1; 400],
            200,
            "needs a context of 600 tokens, the limit is 512",
        ),
    ];
    for (prompt, max_tokens, expected) in cases {
        let error = ask(prompt, max_tokens).unwrap_err();
        assert!(error.is_bad_request());
        assert!(error.to_string().contains(expected), "{error}");
    }
    assert_eq!(ask(vec![1, 2], 3).unwrap()[0].tokens.len(), 3);
    drop(coordinator);
}

#[test]
fn the_end_of_a_text_ends_a_sequence() {
    let folder = made();
    let prompts = [vec![3, 1, 4]];
    let mut ending = options(folder.path(), layout(&WHOLE, Reduction::Invariant));
    let forced = run(ending.clone(), &prompts);
    ending.eos = vec![forced[0].tokens[4]];
    let first = forced[0]
        .tokens
        .iter()
        .position(|token| *token == ending.eos[0])
        .unwrap();
    let coordinator = Coordinator::start(ending).unwrap();
    let options = GenerateOptions {
        ignore_eos: false,
        ..ALL
    };
    let ended = generate(&coordinator, &prompts, &options).unwrap();
    assert_eq!(ended[0].finish, FinishReason::Stop);
    assert_eq!(ended[0].tokens, forced[0].tokens[..=first]);
}

#[test]
fn a_missing_checkpoint_is_named_by_the_device() {
    let folder = tempfile::tempdir().unwrap();
    let error = Coordinator::start(options(folder.path(), layout(&WHOLE, Reduction::Invariant))).unwrap_err();
    let error = error.to_string();
    assert!(
        error.starts_with("gpu 0 cannot take its seat in epoch 1: "),
        "{error}"
    );
}
