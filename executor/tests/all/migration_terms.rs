//! What a reign that is over still says changes nothing on a worker.

use std::net::Ipv4Addr;
use std::sync::Mutex;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use infercluster_executor::speed::Speed;
use infercluster_executor::step::{StepDescriptor, StepItem};
use infercluster_executor::wire::message::{DocumentText, Prepare, StepOrder, StepOutput, Wants};
use infercluster_executor::wire::{
    Admission, Connection, FromWorker, Kind, Listener, Rotations, ToWorker, Token,
};
use infercluster_executor::worker::{self, WorkerOptions};
use infercluster_serving::handover::{Answer, Command, HandoverId, Notice, Order, Stamp};
use infercluster_spec::layout::{CPU_F32, Reduction};
use infercluster_spec::{Epoch, GpuId, KvBlockId, SequenceId, StepId, Term};

use crate::support::{WHOLE, layout, made, model};

const DEADLINE: Duration = Duration::from_secs(60);
const LAYOUT: HandoverId = HandoverId(7);

/// A coordinator that is played: it says what the test says.
struct Played {
    control: Connection,
    folder: tempfile::TempDir,
}

impl Played {
    fn tell(&self, message: &ToWorker) {
        self.control.send(Kind::Control, message).unwrap();
    }

    fn hear(&self) -> FromWorker {
        self.control.receive(Kind::Control, DEADLINE).unwrap()
    }

    fn order(&self, term: u64, command: Command) {
        let stamp = stamp(term);
        self.tell(&ToWorker::Order(Order { stamp, command }));
    }

    fn adopt(&self, term: u64, next_step: u64) {
        self.tell(&ToWorker::Prepare(Box::new(self.prepare(term))));
        let next_step = StepId(next_step);
        self.order(
            term,
            Command::Adopt {
                layout: LAYOUT,
                next_step,
            },
        );
    }

    fn prepare(&self, term: u64) -> Prepare {
        Prepare {
            term: Term(term),
            layout_id: LAYOUT,
            epoch: Epoch(1),
            model: DocumentText::of(&model()),
            layout: DocumentText::of(&layout(&WHOLE, Reduction::Invariant)),
            model_dir: self.folder.path().to_owned(),
            kv_blocks: 4,
            token_budget: 64,
            peers: Default::default(),
            peer_deadline: DEADLINE,
            speed: Speed::FULL,
            memory: None,
            shadow: None,
        }
    }

    /// Has a step computed that reads nothing of any before; its output.
    fn step(&self, term: u64, step: u64) -> StepOutput {
        self.tell(&ToWorker::Step(step_order(term, step)));
        match self.hear() {
            FromWorker::StepDone {
                term: by,
                step: done,
                mut outputs,
                ..
            } => {
                assert_eq!((by, done), (Term(term), StepId(step)));
                outputs.pop().unwrap()
            }
            other => panic!("{other:?}"),
        }
    }

    /// Waits until everything that was said is dealt with, and finds that nothing was answered to it.
    fn nothing_happened(&self) {
        self.tell(&ToWorker::TakeTimes);
        match self.hear() {
            FromWorker::Times(times) => assert_eq!(times.steps, 0, "no step was computed"),
            other => panic!("{other:?}"),
        }
    }
}

fn stamp(term: u64) -> Stamp {
    Stamp {
        term: Term(term),
        epoch: Epoch(1),
    }
}

fn step_order(term: u64, step: u64) -> StepOrder {
    let item = StepItem {
        sequence: SequenceId(step),
        start: 0,
        tokens: vec![5, 6, 7],
        block_table: vec![KvBlockId(0)],
        wants_logits: true,
    };
    StepOrder {
        descriptor: StepDescriptor {
            term: Term(term),
            epoch: Epoch(1),
            step: StepId(step),
            items: vec![item],
        },
        wants: vec![Wants {
            logits: false,
            hash: true,
        }],
        incarnations: vec![0],
        released: Vec::new(),
        carried: None,
    }
}

/// Starts a worker and plays its coordinator.
fn played(play: impl FnOnce(&Played)) {
    let token = Token::random().unwrap();
    let admission = Admission {
        token: token.clone(),
        numerics: CPU_F32.to_owned(),
        rotations: Some(Rotations::new(model().rope, model().head_dim)),
    };
    let (joined, joins) = mpsc::channel();
    let joined = Mutex::new(joined);
    let listener = Listener::start(
        Ipv4Addr::LOCALHOST.into(),
        admission,
        |_| true,
        move |_, admitted| joined.lock().unwrap().send(admitted.unwrap()).unwrap(),
    )
    .unwrap();
    let worker = WorkerOptions::local(listener.address(), GpuId(0), token);
    thread::scope(|scope| {
        let working = scope.spawn(|| worker::run(&worker));
        let played = Played {
            control: joins.recv_timeout(DEADLINE).unwrap(),
            folder: made(),
        };
        assert!(matches!(played.hear(), FromWorker::Joined { .. }));
        play(&played);
        played.tell(&ToWorker::Stop);
        working.join().unwrap().unwrap();
    });
}

/// The next word is that the reign's layout is adopted.
fn hear_adopted(played: &Played, term: u64) {
    let expected = Answer {
        term: Term(term),
        notice: Notice::Adopted,
    };
    loop {
        match played.hear() {
            FromWorker::Loaded { .. } => {}
            FromWorker::Answer(answer) => {
                assert_eq!(answer, expected);
                return;
            }
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn a_worker_refuses_every_kind_of_message_of_an_earlier_reign() {
    played(|played| {
        played.adopt(5, 0);
        hear_adopted(played, 5);
        let first = played.step(5, 0);
        played.tell(&ToWorker::TakeTimes);
        assert!(matches!(played.hear(), FromWorker::Times(times) if times.steps == 1));
        // Whatever a stopped and continued coordinator of reign 4 wants: drop all, serve nothing, load, compute.
        played.tell(&ToWorker::GiveUp { term: Term(4) });
        played.order(4, Command::Retire);
        played.adopt(4, 1);
        played.tell(&ToWorker::Step(step_order(4, 1)));
        played.nothing_happened();
        // The present reign computes on, on the shards that it had loaded.
        let second = played.step(5, 1);
        assert_eq!(first.logits_hash, second.logits_hash);
        assert!(first.logits_hash.is_some());
    });
}

#[test]
fn a_new_reign_ends_the_one_before_it() {
    played(|played| {
        played.adopt(5, 0);
        hear_adopted(played, 5);
        let first = played.step(5, 0);
        // The shards stay, the KV is void.
        played.adopt(6, 1);
        hear_adopted(played, 6);
        played.tell(&ToWorker::TakeTimes);
        assert!(matches!(played.hear(), FromWorker::Times(_)));
        played.tell(&ToWorker::Step(step_order(5, 1)));
        played.nothing_happened();
        assert_eq!(played.step(6, 1).logits_hash, first.logits_hash);
    });
}
