//! The layout of a service changes while it answers, and no request notices.

use infercluster_executor::bench::{MigrationBench, MigrationBenchOutcome, MigrationFloors, migrate};
use infercluster_executor::coordinator::{
    Coordinator, CoordinatorOptions, GenerationRequest, MigrationError, MigrationPhase, StreamEvent,
    TokenStream,
};
use infercluster_executor::generate::{GenerateOptions, Generated, generate};
use infercluster_spec::layout::Reduction;
use infercluster_spec::{Bytes, EngineOptions, GpuId, Layout};

use crate::support::{self, Cuts, EVEN, UNEVEN, WHOLE, WORKER, layout, made, options, processes};

const LONG_FIRST: Cuts = Cuts {
    layers: &[0, 3, 4],
    ..WHOLE
};
const LONG_LAST: Cuts = Cuts {
    layers: &[0, 1, 4],
    ..WHOLE
};

fn bench(folder: &std::path::Path, from: &Cuts, to: &Cuts) -> MigrationBench {
    let mut options = options(folder, layout(from, Reduction::Invariant));
    // Small steps, so that a prompt is in prefill for many of them.
    options.engine = EngineOptions {
        token_budget: 12,
        max_sequences: 16,
        max_context: None,
    };
    MigrationBench {
        options,
        other: layout(to, Reduction::Invariant),
        rounds: 4,
        prefills: 4,
        clients: 5,
        prompt_tokens: 60,
        new_tokens: 120,
        long_prompt_tokens: 390,
        long_new_tokens: 20,
        seed: 5,
    }
}

fn check(from: &Cuts, to: &Cuts) {
    let folder = made();
    let outcome = migrate(&bench(folder.path(), from, to), |_| {}).unwrap();
    assert_eq!(outcome.migrations.len(), 8);
    let floors = MigrationFloors {
        weight_bytes: Bytes(100_000),
        kv_bytes_at_commit: Bytes(10_000),
        steps_meanwhile: 2,
        rounds: 2,
        prefills: 2,
    };
    outcome.check(floors).unwrap();
    check_floors(&outcome, floors);
    assert!(outcome.requests > 0);
    for migration in &outcome.migrations {
        assert_eq!(migration.phase, MigrationPhase::Done);
        assert!(migration.kv_bytes_moved > Bytes::ZERO && migration.kv_bytes_kept > Bytes::ZERO);
    }
}

/// Each floor is one that a run can miss.
fn check_floors(outcome: &MigrationBenchOutcome, floors: MigrationFloors) {
    let missed = [
        MigrationFloors {
            weight_bytes: Bytes(outcome.weight_bytes.0 + 1),
            ..floors
        },
        MigrationFloors {
            kv_bytes_at_commit: Bytes(u64::MAX),
            ..floors
        },
        MigrationFloors {
            steps_meanwhile: u64::MAX,
            ..floors
        },
        MigrationFloors {
            rounds: u32::MAX,
            ..floors
        },
        MigrationFloors {
            prefills: outcome.prefills + 1,
            ..floors
        },
    ];
    for floors in missed {
        assert!(outcome.check(floors).is_err(), "{floors:?}");
    }
}

#[test]
fn tensor_parallel_shares_change_under_load() {
    check(&EVEN, &UNEVEN);
}

#[test]
fn pipeline_cuts_change_under_load() {
    check(&LONG_FIRST, &LONG_LAST);
}

#[test]
fn stages_become_ranks_under_load() {
    check(&LONG_FIRST, &UNEVEN);
}

const ALL: GenerateOptions = GenerateOptions {
    max_tokens: 150,
    ignore_eos: true,
    logits: false,
    logits_hash: true,
};

fn prompts() -> Vec<Vec<u32>> {
    support::prompts(&[3, 30, 71])
}

/// A service with a made model and what it answers undisturbed.
fn service(
    from: Layout,
    change: impl FnOnce(&mut CoordinatorOptions),
) -> (tempfile::TempDir, Coordinator, Vec<Generated>) {
    let folder = made();
    let mut options = options(folder.path(), from);
    change(&mut options);
    let coordinator = Coordinator::start(options).unwrap();
    let undisturbed = generate(&coordinator, &prompts(), &ALL).unwrap();
    (folder, coordinator, undisturbed)
}

/// Begins `prompts` and waits until every one has a token; gives the streams back.
fn begin(coordinator: &Coordinator) -> Vec<TokenStream> {
    let mut streams: Vec<_> = prompts()
        .into_iter()
        .map(|prompt| {
            coordinator.submit(GenerationRequest {
                prompt,
                max_tokens: ALL.max_tokens,
                ignore_eos: true,
                logits_hash: true,
                prompt_logits: false,
            })
        })
        .collect();
    for stream in &mut streams {
        assert!(matches!(stream.next_blocking(), Some(StreamEvent::Token { .. })));
    }
    streams
}

fn hash(mut stream: TokenStream) -> u64 {
    loop {
        match stream.next_blocking() {
            Some(StreamEvent::Finished { logits_hash, .. }) => return logits_hash.unwrap(),
            Some(StreamEvent::Token { .. }) => {}
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn requests_that_are_cancelled_end_and_arrive_meanwhile_change_nothing() {
    let (_folder, coordinator, undisturbed) = service(layout(&EVEN, Reduction::Invariant), |_| {});
    for to in [&UNEVEN, &EVEN, &UNEVEN] {
        let mut streams = begin(&coordinator);
        let short = coordinator.submit(GenerationRequest {
            prompt: vec![1, 2, 3],
            max_tokens: 5,
            ignore_eos: true,
            ..GenerationRequest::default()
        });
        let migrated = std::thread::scope(|scope| {
            let migration = scope.spawn(|| coordinator.migrate_blocking(layout(to, Reduction::Invariant)));
            drop(streams.remove(1));
            drop(short);
            streams.extend(begin(&coordinator));
            migration.join().unwrap()
        });
        assert_eq!(migrated.unwrap().phase, MigrationPhase::Done);
        let found: Vec<_> = streams.into_iter().map(hash).collect();
        let expected: Vec<_> = undisturbed.iter().map(|one| one.logits_hash.unwrap()).collect();
        assert_eq!(found, [&expected[..1], &expected[2..], &expected[..]].concat());
    }
}

#[test]
fn an_idle_service_changes_its_layout_too() {
    let (_folder, coordinator, undisturbed) = service(layout(&LONG_FIRST, Reduction::Invariant), |_| {});
    for to in [&LONG_LAST, &UNEVEN, &LONG_FIRST] {
        coordinator
            .migrate_blocking(layout(to, Reduction::Invariant))
            .unwrap();
        assert_eq!(generate(&coordinator, &prompts(), &ALL).unwrap(), undisturbed);
    }
}

#[test]
fn a_shadow_that_computes_something_else_is_found_and_the_old_layout_stays() {
    let (folder, coordinator, undisturbed) = service(layout(&EVEN, Reduction::Invariant), |_| {});
    corrupt(folder.path(), "model.layers.2.mlp.up_proj.weight");
    let streams = begin(&coordinator);
    let error = coordinator
        .migrate_blocking(layout(&UNEVEN, Reduction::Invariant))
        .unwrap_err();
    let text = error.to_string();
    assert!(
        text.contains("epoch 1 stays in force") && text.contains("first in layer 2"),
        "{text}"
    );
    let found: Vec<_> = streams.into_iter().map(hash).collect();
    let expected: Vec<_> = undisturbed.iter().map(|one| one.logits_hash.unwrap()).collect();
    assert_eq!(found, expected);
    assert_eq!(generate(&coordinator, &prompts(), &ALL).unwrap(), undisturbed);
}

/// Changes a few numbers of a tensor in place.
fn corrupt(folder: &std::path::Path, tensor: &str) {
    let path = folder.join("model.safetensors");
    let mut bytes = std::fs::read(&path).unwrap();
    let header_len = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: serde_json::Value = serde_json::from_slice(&bytes[8..8 + header_len]).unwrap();
    let from = 8 + header_len + header[tensor]["data_offsets"][0].as_u64().unwrap() as usize;
    for number in bytes[from..from + 400].chunks_exact_mut(4) {
        number.copy_from_slice(&1.5_f32.to_le_bytes());
    }
    // In place: the service has the file mapped.
    use std::os::unix::fs::FileExt;
    let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
    file.write_all_at(&bytes[from..from + 400], from as u64).unwrap();
}

#[test]
fn what_cannot_be_done_is_refused_with_the_reason() {
    let from = layout(&EVEN, Reduction::Invariant);
    let (_folder, coordinator, undisturbed) = service(from.clone(), |_| {});
    let fast = layout(&UNEVEN, Reduction::Fast);
    let mut blocks = layout(&UNEVEN, Reduction::Invariant);
    blocks.kv.block_size = 8;
    let mut two = from.clone();
    let mut copy = two.replicas[0].clone();
    for shard in copy.stages[0]
        .layer_groups
        .iter_mut()
        .flat_map(|group| &mut group.shards)
    {
        shard.gpu = GpuId(shard.gpu.0 + 2);
    }
    two.replicas.push(copy);
    two.gpus = (0..4).map(GpuId).collect();
    let mut broken = from.clone();
    broken.replicas[0].stages[0].layer_groups[0].shards[1].vocab = None;
    let three = layout(
        &Cuts {
            layers: &[0, 1, 2, 4],
            ..WHOLE
        },
        Reduction::Invariant,
    );
    let cases = [
        (from, "the new layout is the one in force"),
        (
            fast,
            "the reduction cannot change in a migration: it is invariant, the new layout has fast",
        ),
        (
            blocks,
            "the KV block size cannot change in a migration: it is 16, the new layout has 8",
        ),
        (two, "one replica to one replica, the layouts have 1 and 2"),
        (three, "gpu 2 has no worker in this service"),
        (broken, "vocab"),
    ];
    for (to, expected) in cases {
        let error = coordinator.migrate_blocking(to).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
    assert_eq!(generate(&coordinator, &prompts(), &ALL).unwrap(), undisturbed);
}

#[test]
fn memory_that_is_short_is_refused_with_the_shortage() {
    let from = layout(&EVEN, Reduction::Invariant);
    // Room for one layout and a bit.
    let (_folder, coordinator, undisturbed) = service(from, |options| {
        options.kv_blocks = Some(64);
        let seats = infercluster_spec::memory::seats(&options.layout, &options.model);
        let largest = seats
            .iter()
            .map(|seat| seat.memory.weights.0 + 64 * seat.memory.kv_block.0)
            .max();
        options.memory = Some(Bytes(largest.unwrap() * 3 / 2));
    });
    let error = coordinator
        .migrate_blocking(layout(&UNEVEN, Reduction::Invariant))
        .unwrap_err();
    assert!(matches!(error, MigrationError::Aborted { .. }), "{error}");
    let text = error.to_string();
    assert!(text.contains("are missing"), "{text}");
    // The same again: what was begun is gone.
    let again = coordinator.migrate_blocking(layout(&UNEVEN, Reduction::Invariant));
    assert!(matches!(again, Err(MigrationError::Aborted { .. })));
    assert_eq!(generate(&coordinator, &prompts(), &ALL).unwrap(), undisturbed);
}

/// The uneven layout with its second rank on a device that has no seat before.
fn onto_a_spare() -> Layout {
    let mut to = layout(&UNEVEN, Reduction::Invariant);
    to.gpus.push(GpuId(2));
    for group in &mut to.replicas[0].stages[0].layer_groups {
        group.shards[1].gpu = GpuId(2);
    }
    to
}

fn with_a_spare() -> (tempfile::TempDir, Coordinator, Vec<Generated>) {
    let mut from = layout(&EVEN, Reduction::Invariant);
    from.gpus.push(GpuId(2));
    service(from, |options| options.launch = processes(WORKER))
}

#[test]
fn a_device_can_join_and_another_leave() {
    let (_folder, coordinator, undisturbed) = with_a_spare();
    let streams = begin(&coordinator);
    let report = coordinator.migrate_blocking(onto_a_spare()).unwrap();
    assert_eq!(report.phase, MigrationPhase::Done);
    let found: Vec<_> = streams.into_iter().map(hash).collect();
    let expected: Vec<_> = undisturbed.iter().map(|one| one.logits_hash.unwrap()).collect();
    assert_eq!(found, expected);
    // And back: device 1 has no shard and no KV any more.
    coordinator
        .migrate_blocking(layout(&EVEN, Reduction::Invariant))
        .unwrap();
    assert_eq!(generate(&coordinator, &prompts(), &ALL).unwrap(), undisturbed);
}

fn process_of(coordinator: &Coordinator, gpu: GpuId) -> libc::pid_t {
    let workers = coordinator.status_blocking().unwrap().workers;
    let worker = workers.iter().find(|worker| worker.gpu == gpu).unwrap();
    worker.process.unwrap() as libc::pid_t
}

/// Kills a device's worker once a migration has come so far, and waits for every end.
fn lose(victim: GpuId, phase: MigrationPhase) {
    let (_folder, coordinator, undisturbed) = with_a_spare();
    let process = process_of(&coordinator, victim);
    let mut streams = begin(&coordinator);
    let migrated = std::thread::scope(|scope| {
        let migration = scope.spawn(|| coordinator.migrate_blocking(onto_a_spare()));
        while coordinator
            .migration_blocking()
            .unwrap()
            .is_none_or(|report| report.phase < phase)
        {}
        // SAFETY: a signal to a child of this test that is not reaped before the coordinator goes.
        assert_eq!(unsafe { libc::kill(process, libc::SIGKILL) }, 0);
        migration.join().unwrap()
    });
    let case = format!("{victim} killed in {phase:?}, the migration ended with {migrated:?}");
    let lost = format!("the worker of {victim}");
    let mut failed = 0;
    for (stream, expected) in streams.iter_mut().zip(&undisturbed) {
        loop {
            match stream.next_blocking() {
                Some(StreamEvent::Token { .. }) => {}
                Some(StreamEvent::Finished { logits_hash, .. }) => {
                    assert_eq!(logits_hash, expected.logits_hash, "{case}");
                    break;
                }
                Some(StreamEvent::Failed(error)) => {
                    assert!(error.to_string().contains(&lost), "{case}: {error}");
                    failed += 1;
                    break;
                }
                other => panic!("{case}: {other:?}"),
            }
        }
    }
    // Whoever holds no shard of the layout in force takes no request with it. A migration goes on while the signal is
    // under way, so its end says which layout that is.
    let (joins, leaves) = (victim == GpuId(2), victim == GpuId(1));
    let stays = matches!(migrated, Err(MigrationError::Aborted { .. }));
    if joins && stays || leaves && phase == MigrationPhase::Releasing {
        assert_eq!(failed, 0, "{case}");
    }
    // What is asked next is answered, or refused with the reason.
    match generate(&coordinator, &prompts(), &ALL) {
        Ok(again) => assert_eq!(again, undisturbed, "{case}"),
        Err(error) => assert!(error.to_string().contains(&lost), "{case}: {error}"),
    }
}

#[test]
fn a_worker_may_die_in_any_phase() {
    use MigrationPhase as Phase;
    let phases = [
        Phase::Preparing,
        Phase::Copying,
        Phase::Switching,
        Phase::Releasing,
    ];
    for victim in [GpuId(0), GpuId(1), GpuId(2)] {
        for phase in phases {
            lose(victim, phase);
        }
    }
}

#[test]
fn a_pool_that_the_new_layout_has_no_room_for_is_refused_with_the_numbers() {
    const POOL: u64 = 40;
    let from = layout(&EVEN, Reduction::Invariant);
    let (_folder, coordinator, undisturbed) = service(from, |options| {
        let seats = infercluster_spec::memory::seats(&options.layout, &options.model);
        let needs = seats
            .iter()
            .map(|seat| seat.memory.weights.0 + POOL * seat.memory.kv_block.0);
        options.memory = needs.max().map(Bytes);
    });
    let error = coordinator
        .migrate_blocking(layout(&UNEVEN, Reduction::Invariant))
        .unwrap_err();
    let MigrationError::Pool {
        fitting, total, used, ..
    } = error
    else {
        panic!("{error:?}");
    };
    assert!(fitting < POOL && u64::from(total) == POOL && used == 0, "{error}");
    let text = format!("room for {fitting} KV blocks within");
    assert!(error.to_string().contains(&text), "{error}");
    assert_eq!(generate(&coordinator, &prompts(), &ALL).unwrap(), undisturbed);
}

#[test]
fn a_target_that_dies_before_the_commit_ends_the_migration_and_not_the_service() {
    let (_folder, coordinator, undisturbed) = with_a_spare();
    let process = process_of(&coordinator, GpuId(2));
    let signal = |signal| {
        // SAFETY: a signal to a child of this test that is not reaped before the coordinator goes.
        assert_eq!(unsafe { libc::kill(process, signal) }, 0);
    };
    // Stopped, it cannot get ready, so the migration cannot be over before it is killed.
    signal(libc::SIGSTOP);
    let streams = begin(&coordinator);
    let error = std::thread::scope(|scope| {
        let migration = scope.spawn(|| coordinator.migrate_blocking(onto_a_spare()));
        while coordinator.migration_blocking().unwrap().is_none() {
            assert!(!migration.is_finished(), "it was refused");
        }
        signal(libc::SIGKILL);
        migration.join().unwrap().unwrap_err()
    });
    let text = error.to_string();
    assert!(
        text.contains("stays in force") && text.contains("the worker of gpu 2"),
        "{text}"
    );
    let found: Vec<_> = streams.into_iter().map(hash).collect();
    let expected: Vec<_> = undisturbed.iter().map(|one| one.logits_hash.unwrap()).collect();
    assert_eq!(found, expected, "every request goes on, its KV computed again");
    // The service serves on and can still change its layout.
    coordinator
        .migrate_blocking(layout(&UNEVEN, Reduction::Invariant))
        .unwrap();
    assert_eq!(generate(&coordinator, &prompts(), &ALL).unwrap(), undisturbed);
}
