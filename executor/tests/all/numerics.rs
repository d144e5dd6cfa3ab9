//! Whole models on made checkpoints: every layout, batch, chunk, block size and instruction set gives the
//! bits of one device, and that device agrees with plain loops.

use infercluster_executor::backend::{Backend, Cpu, Isa, Reference};
use infercluster_executor::checkpoint::{Checkpoint, make};
use infercluster_executor::inprocess::InProcess;
use infercluster_executor::kv::KvPart;
use infercluster_executor::model::chain_logits;
use infercluster_executor::step::StepItem;
use infercluster_spec::layout::{LayerGroup, Reduction, Replica, ReplicaRole, Shard, Stage};
use infercluster_spec::model::{Family, Rope};
use infercluster_spec::validate::validate_layout;
use infercluster_spec::{Dtype, GpuId, IndexRange, KvBlockId, Layout, Model, ReplicaId, SequenceId, StageId};

const BLOCKS: u32 = 160;

/// A model, layers a stage, query heads a rank, MLP columns a rank.
type Cut = (Model, &'static [u32], &'static [u32], &'static [u32]);

fn llama(dtype: Dtype) -> Model {
    Model {
        name: "made-llama".to_owned(),
        family: Family::Llama,
        layers: 3,
        hidden: 72,
        query_heads: 6,
        kv_heads: 3,
        head_dim: 20,
        ffn: 100,
        vocab: 131,
        tied_embeddings: false,
        qkv_bias: false,
        rms_epsilon: 1e-5,
        rope: Rope {
            theta: 10_000.0,
            llama3: None,
        },
        max_positions: 2048,
        dtype,
        experts: None,
        sliding_window: None,
    }
}

fn qwen2(dtype: Dtype) -> Model {
    Model {
        name: "made-qwen2".to_owned(),
        family: Family::Qwen2,
        query_heads: 10,
        kv_heads: 2,
        head_dim: 16,
        tied_embeddings: true,
        qkv_bias: true,
        ..llama(dtype)
    }
}

/// A made model on disk.
struct Made {
    model: Model,
    checkpoint: Checkpoint,
    _folder: tempfile::TempDir,
}

fn made(model: Model) -> Made {
    let folder = tempfile::tempdir().unwrap();
    make(folder.path(), &model, 7).unwrap();
    Made {
        checkpoint: Checkpoint::open(folder.path()).unwrap(),
        model,
        _folder: folder,
    }
}

/// Cuts `total` at proportions that are given as absolute lengths.
fn cut(lengths: &[u32]) -> Vec<IndexRange> {
    let mut start = 0;
    lengths
        .iter()
        .map(|length| {
            let range = IndexRange::new(start, start + length).unwrap();
            start += length;
            range
        })
        .collect()
}

/// A layout in which every stage has the same shares.
fn layout(model: &Model, reduction: Reduction, stages: &[u32], heads: &[u32], columns: &[u32]) -> Layout {
    let mut layout = Layout::single(model, reduction);
    layout.quantum = 1;
    let ranks = heads.len();
    layout.gpus = (0..(stages.len() * ranks) as u32).map(GpuId).collect();
    // Rows and vocabulary follow the columns; the last rank takes the rest.
    let follow = |total: u32| {
        let mut lengths: Vec<u32> = columns.iter().map(|share| total * share / model.ffn).collect();
        *lengths.last_mut().unwrap() += total - lengths.iter().sum::<u32>();
        cut(&lengths)
    };
    let (heads, columns, rows, vocab) = (
        cut(heads),
        cut(columns),
        follow(model.hidden),
        follow(model.vocab),
    );
    let stage = |(index, layers): (usize, IndexRange)| {
        let shard = |rank: usize| Shard {
            gpu: GpuId((index * ranks + rank) as u32),
            query_heads: heads[rank],
            mlp_columns: columns[rank],
            output_rows: (reduction == Reduction::Invariant).then(|| rows[rank]),
            vocab: (index + 1 == stages.len()).then(|| vocab[rank]),
            experts: Vec::new(),
        };
        Stage {
            layer_groups: vec![LayerGroup {
                layers,
                shards: (0..ranks).map(shard).collect(),
            }],
        }
    };
    layout.replicas = vec![Replica {
        role: ReplicaRole::Mixed,
        stages: cut(stages).into_iter().enumerate().map(stage).collect(),
    }];
    validate_layout(&layout, model, None).unwrap();
    layout
}

fn prompt(seed: u32, len: u32, vocab: u32) -> Vec<u32> {
    (0..len)
        .map(|i| (i.wrapping_mul(2_654_435_761).wrapping_add(seed * 97) >> 7) % vocab)
        .collect()
}

/// A request on its way: its blocks are scattered over the pool.
struct Sequence {
    id: u64,
    known: Vec<u32>,
    computed: usize,
    blocks: Vec<KvBlockId>,
    chain: u64,
    logits: Vec<Vec<f32>>,
}

impl Sequence {
    fn new(id: u64, prompt: Vec<u32>, block_size: u32, max_len: u32) -> Self {
        // Sequence i takes blocks i, i + 3, i + 6, ... from the end of the pool.
        let count = max_len.div_ceil(block_size);
        let blocks = (0..count)
            .map(|n| KvBlockId(BLOCKS - 1 - (id as u32 + 3 * n)))
            .collect();
        Self {
            id,
            known: prompt,
            computed: 0,
            blocks,
            chain: 0,
            logits: Vec::new(),
        }
    }

    fn item(&self, chunk: usize) -> StepItem {
        let end = self.known.len().min(self.computed + chunk);
        StepItem {
            sequence: SequenceId(self.id),
            start: self.computed as u32,
            tokens: self.known[self.computed..end].to_vec(),
            block_table: self.blocks.clone(),
            wants_logits: end == self.known.len(),
        }
    }

    fn take(&mut self, item: &StepItem, logits: &mut impl Iterator<Item = Vec<f32>>) {
        self.computed += item.tokens.len();
        if item.wants_logits {
            let logits = logits.next().unwrap();
            self.chain = chain_logits(self.chain, &logits);
            let best = (0..logits.len()).fold(0, |best, i| if logits[i] > logits[best] { i } else { best });
            self.known.push(best as u32);
            self.logits.push(logits);
        }
    }
}

/// Greedy tokens for every prompt, all of them in one batch, prompts in chunks.
fn generate<B: Backend<Buffer = Vec<f32>>>(
    replica: &mut InProcess<B>,
    prompts: &[Vec<u32>],
    block_size: u32,
    chunk: usize,
    new_tokens: usize,
) -> Vec<Sequence> {
    let mut sequences: Vec<Sequence> = prompts
        .iter()
        .enumerate()
        .map(|(id, prompt)| {
            Sequence::new(
                id as u64,
                prompt.clone(),
                block_size,
                (prompt.len() + new_tokens) as u32,
            )
        })
        .collect();
    while sequences
        .iter()
        .any(|sequence| sequence.logits.len() < new_tokens)
    {
        let (mut active, mut items) = (Vec::new(), Vec::new());
        for sequence in sequences.iter_mut().filter(|one| one.logits.len() < new_tokens) {
            items.push(sequence.item(chunk));
            active.push(sequence);
        }
        let mut logits = replica.step(&items).unwrap().into_iter();
        for (sequence, item) in active.into_iter().zip(&items) {
            sequence.take(item, &mut logits);
        }
    }
    sequences
}

fn load<B: Backend<Buffer = Vec<f32>>>(backend: B, made: &Made, layout: &Layout) -> InProcess<B> {
    InProcess::load(
        &backend,
        &made.checkpoint,
        &made.model,
        layout,
        ReplicaId(0),
        BLOCKS,
    )
    .unwrap()
}

fn prompts(model: &Model) -> Vec<Vec<u32>> {
    [1, 70, 13]
        .iter()
        .zip(0..)
        .map(|(len, seed)| prompt(seed, *len, model.vocab))
        .collect()
}

fn chains(sequences: &[Sequence]) -> Vec<u64> {
    sequences.iter().map(|sequence| sequence.chain).collect()
}

/// Hash chains of each prompt computed alone on one device.
fn alone(made: &Made) -> Vec<u64> {
    let layout = Layout::single(&made.model, Reduction::Invariant);
    let mut replica = load(Cpu::new(), made, &layout);
    prompts(&made.model)
        .into_iter()
        .map(|prompt| generate(&mut replica, &[prompt], 16, 512, 6)[0].chain)
        .collect()
}

#[test]
fn one_device_agrees_with_plain_loops() {
    for model in [llama(Dtype::F32), qwen2(Dtype::Bf16), llama(Dtype::F16)] {
        let made = made(model);
        let mut layout = Layout::single(&made.model, Reduction::Invariant);
        let prompts = prompts(&made.model);
        let found = generate(&mut load(Cpu::new(), &made, &layout), &prompts, 16, 512, 6);
        layout.numerics = Reference.numerics().to_owned();
        let expected = generate(&mut load(Reference, &made, &layout), &prompts, 16, 512, 6);
        for (found, expected) in found.iter().zip(&expected) {
            assert_eq!(found.known, expected.known);
            let pairs = found
                .logits
                .iter()
                .flatten()
                .zip(expected.logits.iter().flatten());
            let largest = pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(largest < 1e-4, "{} differs by {largest}", made.model.name);
        }
        let spread = expected[0].logits[0].iter().copied().fold(0.0, f32::max);
        assert!(
            spread > 3.0,
            "logits of a made model are spread, the largest is {spread}"
        );
    }
}

#[test]
fn invariant_layouts_give_the_bits_of_one_device() {
    let cases: [Cut; 10] = [
        (llama(Dtype::F32), &[3], &[6], &[100]),
        (llama(Dtype::F32), &[3], &[5, 1], &[50, 50]),
        (llama(Dtype::F32), &[3], &[3, 2, 1], &[33, 33, 34]),
        (llama(Dtype::F32), &[3], &[4, 2], &[90, 10]),
        (llama(Dtype::F32), &[2, 1], &[6], &[100]),
        (llama(Dtype::F16), &[1, 2], &[1, 5], &[77, 23]),
        (qwen2(Dtype::Bf16), &[3], &[5, 5], &[50, 50]),
        (qwen2(Dtype::Bf16), &[3], &[10, 0], &[0, 100]),
        (qwen2(Dtype::Bf16), &[2, 1], &[7, 3], &[61, 39]),
        (qwen2(Dtype::F32), &[3], &[4, 0, 6], &[99, 1, 0]),
    ];
    for (model, stages, heads, columns) in cases {
        let made = made(model);
        let layout = layout(&made.model, Reduction::Invariant, stages, heads, columns);
        let mut replica = load(Cpu::new(), &made, &layout);
        let found = generate(&mut replica, &prompts(&made.model), 16, 512, 6);
        let place = format!("{} {stages:?} {heads:?} {columns:?}", made.model.name);
        assert_eq!(chains(&found), alone(&made), "{place}");
    }
}

#[test]
fn fast_layouts_stay_close_to_one_device() {
    let cases: [Cut; 4] = [
        (llama(Dtype::F32), &[3], &[5, 1], &[50, 50]),
        (llama(Dtype::F32), &[2, 1], &[3, 2, 1], &[90, 10, 0]),
        (qwen2(Dtype::Bf16), &[3], &[7, 3], &[61, 39]),
        (qwen2(Dtype::Bf16), &[3], &[10, 0], &[0, 100]),
    ];
    for (model, stages, heads, columns) in cases {
        let made = made(model);
        let single = Layout::single(&made.model, Reduction::Fast);
        let prompts = prompts(&made.model);
        let expected = generate(&mut load(Cpu::new(), &made, &single), &prompts, 16, 512, 1);
        let layout = layout(&made.model, Reduction::Fast, stages, heads, columns);
        let found = generate(&mut load(Cpu::new(), &made, &layout), &prompts, 16, 512, 1);
        for (found, expected) in found.iter().zip(&expected) {
            let pairs = found.logits[0].iter().zip(&expected.logits[0]);
            let largest = pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(
                largest < 1e-4,
                "{} {heads:?} differs by {largest}",
                made.model.name
            );
        }
    }
}

#[test]
fn batch_chunk_block_size_and_instruction_set_leave_no_trace() {
    for model in [llama(Dtype::Bf16), qwen2(Dtype::F32)] {
        let made = made(model);
        let expected = alone(&made);
        let prompts = prompts(&made.model);
        for isa in Isa::ALL {
            let Some(backend) = Cpu::with_isa(isa) else {
                println!("skipped: this machine has no {isa:?}");
                continue;
            };
            for block_size in [8, 16, 32] {
                for chunk in [1, 7, 64, 512] {
                    let mut layout = Layout::single(&made.model, Reduction::Invariant);
                    layout.kv.block_size = block_size;
                    let mut replica = load(backend, &made, &layout);
                    let found = generate(&mut replica, &prompts, block_size, chunk, 6);
                    assert_eq!(chains(&found), expected, "{isa:?} {block_size} {chunk}");
                }
            }
        }
    }
}

/// Everything that the first sequence has in the cache of a one-device replica.
fn cached(replica: &mut InProcess<Cpu>, sequence: &Sequence, model: &Model) -> Vec<u8> {
    let mut bytes = Vec::new();
    let kv = replica.kv(StageId(0)).next().unwrap();
    for layer in 0..model.layers {
        let part = KvPart {
            layer,
            kv_heads: IndexRange::new(0, model.kv_heads).unwrap(),
            tokens: IndexRange::new(0, sequence.computed as u32).unwrap(),
        };
        kv.export(&sequence.blocks, part, &mut bytes).unwrap();
    }
    bytes
}

#[test]
fn kv_recomputed_by_prefill_equals_kv_written_by_decode() {
    let made = made(llama(Dtype::F32));
    let layout = Layout::single(&made.model, Reduction::Invariant);
    let mut replica = load(Cpu::new(), &made, &layout);
    let first = prompt(3, 40, made.model.vocab);
    // 560 positions, so that decode crosses a split of attention.
    let decoded = generate(&mut replica, &[first], 16, 512, 520).swap_remove(0);
    let by_decode = cached(&mut replica, &decoded, &made.model);
    let mut replica = load(Cpu::new(), &made, &layout);
    let known = decoded.known[..decoded.computed].to_vec();
    let prefilled = generate(&mut replica, &[known], 16, 512, 1).swap_remove(0);
    let by_prefill = cached(&mut replica, &prefilled, &made.model);
    assert_eq!(by_decode.len(), by_prefill.len());
    assert!(by_decode == by_prefill, "caches differ");
    assert_eq!(prefilled.logits[0], *decoded.logits.last().unwrap());
}

#[test]
fn kv_moves_between_block_orders_and_sizes_exactly() {
    let made = made(qwen2(Dtype::F32));
    let mut layout = Layout::single(&made.model, Reduction::Invariant);
    let mut source = load(Cpu::new(), &made, &layout);
    let prompt = prompt(5, 77, made.model.vocab);
    let mut sequence = generate(&mut source, &[prompt], 16, 512, 3).swap_remove(0);
    layout.kv.block_size = 8;
    let mut target = load(Cpu::new(), &made, &layout);
    let moved = Sequence::new(1, Vec::new(), 8, 80);
    let range = |start, end| IndexRange::new(start, end).unwrap();
    let from = source.kv(StageId(0)).next().unwrap();
    let to = target.kv(StageId(0)).next().unwrap();
    let end = sequence.computed as u32;
    for layer in 0..made.model.layers {
        // Heads and token ranges travel apart, out of order.
        for (kv_heads, tokens) in [
            (range(1, 2), range(50, end)),
            (range(0, 1), range(0, end)),
            (range(1, 2), range(0, 50)),
        ] {
            let part = KvPart {
                layer,
                kv_heads,
                tokens,
            };
            let mut bytes = Vec::new();
            from.export(&sequence.blocks, part, &mut bytes).unwrap();
            assert_eq!(bytes.len() as u64, from.part_bytes(part).unwrap().0);
            to.import(&moved.blocks, part, &bytes).unwrap();
            assert!(to.import(&moved.blocks, part, &bytes[1..]).is_err());
        }
    }
    let stays = source.step(&[sequence.item(1)]).unwrap();
    sequence.blocks = moved.blocks;
    let moves = target.step(&[sequence.item(1)]).unwrap();
    assert_eq!(stays, moves);
}

#[test]
fn hostile_steps_are_errors() {
    let made = made(llama(Dtype::F32));
    let layout = Layout::single(&made.model, Reduction::Invariant);
    let mut replica = load(Cpu::new(), &made, &layout);
    let good = StepItem {
        sequence: SequenceId(0),
        start: 0,
        tokens: vec![1, 2, 3],
        block_table: vec![KvBlockId(0)],
        wants_logits: true,
    };
    assert!(replica.step(std::slice::from_ref(&good)).is_ok());
    let change = |change: &dyn Fn(&mut StepItem)| {
        let mut item = good.clone();
        change(&mut item);
        item
    };
    let cases = [
        (change(&|item| item.tokens.clear()), "no token"),
        (change(&|item| item.tokens[1] = 131), "token 131 is outside"),
        (change(&|item| item.start = u32::MAX), "longer than the model's"),
        (change(&|item| item.start = 14), "17 tokens need more"),
        (
            change(&|item| item.block_table[0] = KvBlockId(BLOCKS)),
            "outside the pool",
        ),
        (
            change(&|item| item.block_table.clear()),
            "need more than the 0 blocks",
        ),
    ];
    for (item, expected) in cases {
        let found = replica.step(&[item]).unwrap_err().to_string();
        assert!(found.contains(expected), "{found}");
    }
    assert!(replica.step(&[]).is_err());
}
