//! A worker that would compute other bits than its run asks for is refused by name, on both sides.

use std::process::Command;
use std::thread;
use std::time::Duration;

use infercluster_executor::coordinator::{Coordinator, Launch};
use infercluster_executor::launch::WorkerCommand;
use infercluster_executor::model::rope_hash;
use infercluster_executor::wire::{Connection, FromWorker, Hello, Kind, Purpose, Role, ToWorker, handshake};
use infercluster_executor::worker::{self, WorkerOptions};
use infercluster_serving::handover::HandoverId;
use infercluster_spec::GpuId;
use infercluster_spec::layout::{CPU_F32, Reduction};

use crate::support::{WHOLE, layout, made, model, options};

const DEADLINE: Duration = Duration::from_secs(30);

/// Starts a coordinator for a layout in the given profile and plays its worker; what the worker and the caller of
/// the coordinator heard.
fn refused(numerics: &str, play: impl FnOnce(&WorkerOptions) -> String) -> [String; 2] {
    let folder = made();
    let told = folder.path().join("told");
    assert!(Command::new("mkfifo").arg(&told).status().unwrap().success());
    let mut options = options(folder.path(), layout(&WHOLE, Reduction::Invariant));
    options.layout.numerics = numerics.to_owned();
    // The process that is started only says what it was told, and stays until it is killed.
    let script = format!(
        r#"echo "$2 $4 $INFERCLUSTER_TOKEN" > '{}'; exec sleep 1000"#,
        told.display()
    );
    options.launch = Launch::Processes(WorkerCommand {
        program: "sh".into(),
        arguments: vec!["-c".into(), script.into(), "worker".into()],
    });
    thread::scope(|scope| {
        let starting = scope.spawn(|| Coordinator::start(options).unwrap_err().to_string());
        let told = std::fs::read_to_string(&told).unwrap();
        let words: Vec<&str> = told.split_whitespace().collect();
        let worker = WorkerOptions::local(
            words[0].parse().unwrap(),
            GpuId(words[1].parse().unwrap()),
            words[2].parse().unwrap(),
        );
        [play(&worker), starting.join().unwrap()]
    })
}

#[test]
fn another_numerics_profile_is_refused() {
    let heard = refused("gpu-bf16", |worker| worker::run(worker).unwrap_err().to_string());
    let reason = r#"gpu 0 computes in the numerics profile "cpu-f32/1", "gpu-bf16" is asked for"#;
    for heard in &heard {
        assert!(heard.contains(reason), "{heard}");
    }
}

#[test]
fn other_rotations_are_refused() {
    let own = rope_hash(model().rope, model().head_dim);
    let heard = refused(CPU_F32, |worker| {
        let control = Connection::dial(worker.coordinator, DEADLINE).unwrap();
        let hello = Hello {
            token: worker.token.clone(),
            role: Role::Worker,
            gpu: worker.gpu,
            layout: HandoverId(0),
            purpose: Purpose::Control,
            numerics: CPU_F32.to_owned(),
        };
        let asked = handshake::introduce(&control, &hello).unwrap().unwrap();
        assert_eq!(rope_hash(asked.rope(), asked.head_dim()), own);
        let joined = FromWorker::Joined {
            listen: worker.coordinator,
            process: 0,
            rotations: own ^ 1,
        };
        control.send(Kind::Control, &joined).unwrap();
        let heard = control.receive::<ToWorker>(Kind::Control, DEADLINE);
        heard.unwrap_err().to_string()
    });
    let reason = format!(
        "the RoPE table of gpu 0 has hash {:016x}, {own:016x} is asked for",
        own ^ 1
    );
    for heard in &heard {
        assert!(heard.contains(&reason), "{heard}");
    }
}
