//! What a request hears when a worker is lost, and what strangers at a port change: nothing.

use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use infercluster_executor::coordinator::{
    Coordinator, ExecutorError, GenerationRequest, Launch, RequestError, StreamEvent,
};
use infercluster_executor::launch::WorkerCommand;
use infercluster_executor::worker::{self, WorkerOptions};
use infercluster_spec::GpuId;
use infercluster_spec::layout::Reduction;

use crate::support::{UNEVEN, WHOLE, WORKER, layout, made, options, processes, start};

fn request(prompt: &[u32], max_tokens: u32) -> GenerationRequest {
    GenerationRequest {
        prompt: prompt.to_vec(),
        max_tokens,
        ignore_eos: true,
        ..GenerationRequest::default()
    }
}

fn is_there(process: u32) -> bool {
    std::path::Path::new(&format!("/proc/{process}")).exists()
}

#[test]
fn a_killed_worker_is_named_within_five_seconds_and_nothing_is_orphaned() {
    let folder = made();
    let mut options = options(folder.path(), layout(&UNEVEN, Reduction::Invariant));
    options.launch = processes(WORKER);
    let coordinator = Coordinator::start(options).unwrap();
    let workers = coordinator.status_blocking().unwrap().workers;
    let processes: Vec<u32> = workers.iter().map(|worker| worker.process.unwrap()).collect();
    assert_eq!(processes.len(), 2);

    let mut streams: Vec<_> = (0..3)
        .map(|i| coordinator.submit(request(&[i, 2], 450)))
        .collect();
    assert!(matches!(
        streams[0].next_blocking(),
        Some(StreamEvent::Token { .. })
    ));
    let killed = Instant::now();
    let status = std::process::Command::new("kill")
        .args(["-9", &processes[1].to_string()])
        .status()
        .unwrap();
    assert!(status.success());
    let expected = format!(
        "the worker of gpu 1 (process {}) was killed by signal 9",
        processes[1]
    );
    for stream in &mut streams {
        let last = std::iter::from_fn(|| stream.next_blocking()).last().unwrap();
        let StreamEvent::Failed(error) = last else {
            panic!("{last:?}");
        };
        assert!(matches!(error, RequestError::WorkerLost { gpu: GpuId(1), .. }));
        assert_eq!(error.to_string(), expected);
    }
    assert!(killed.elapsed() < Duration::from_secs(5));

    // The coordinator lives, and says the same to whoever comes later.
    let later = coordinator.submit(request(&[1], 2)).next_blocking();
    assert!(matches!(later, Some(StreamEvent::Failed(error)) if error.to_string() == expected));
    let status = coordinator.status_blocking().unwrap();
    assert!(!status.is_ready());
    assert_eq!(status.replicas[0].failed, 3);
    drop(coordinator);
    assert!(!processes.iter().any(|process| is_there(*process)));
}

#[test]
fn a_worker_that_ends_at_once_is_reported() {
    let folder = made();
    let mut options = options(folder.path(), layout(&WHOLE, Reduction::Invariant));
    options.launch = Launch::Processes(WorkerCommand {
        program: "sh".into(),
        arguments: vec!["-c".into(), "exit 3".into()],
    });
    let error = Coordinator::start(options).unwrap_err();
    assert!(matches!(error, ExecutorError::Lost { gpu: GpuId(0), .. }));
    let expected = "the worker of gpu 0 ended with exit code 3";
    assert!(error.to_string().starts_with(expected), "{error}");
}

#[test]
fn a_cancelled_request_frees_its_place() {
    let folder = made();
    let coordinator = start(folder.path(), &WHOLE);
    let mut dropped = coordinator.submit(request(&[5], 500));
    assert!(dropped.next_blocking().is_some());
    drop(dropped);
    // A later request of one sequence's length runs to its end; then nobody holds anything.
    let mut kept = coordinator.submit(request(&[6], 3));
    assert_eq!(std::iter::from_fn(|| kept.next_blocking()).count(), 4);
    let replica = coordinator.status_blocking().unwrap().replicas.remove(0);
    assert_eq!((replica.cancelled, replica.finished_length), (1, 1));
    assert_eq!((replica.running, replica.kv_blocks_free), (0, replica.kv_blocks));
}

#[test]
fn a_worker_without_a_coordinator_ends() {
    // A listener that closes every connection: no handshake is ever answered.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let closer = thread::spawn(move || drop(listener.accept().unwrap()));
    let token = infercluster_executor::wire::Token::random().unwrap();
    let error = worker::run(&WorkerOptions::local(address, GpuId(0), token)).unwrap_err();
    assert!(
        error
            .to_string()
            .starts_with(&format!("coordinator at {address}: ")),
        "{error}"
    );
    closer.join().unwrap();
}

#[test]
fn noise_at_a_port_changes_nothing() {
    let folder = made();
    let coordinator = start(folder.path(), &UNEVEN);
    let mut stream = coordinator.submit(request(&[1, 2, 3], 200));
    assert!(stream.next_blocking().is_some());
    // Every port that this process listens on belongs to a test: strangers knock at all of them.
    let ports = listening_ports();
    assert!(
        ports.len() >= 3,
        "a control port and two ports for peers: {ports:?}"
    );
    for port in ports {
        if let Ok(mut stranger) = TcpStream::connect(("127.0.0.1", port)) {
            // It may be closed while this writes.
            let _ = stranger.write_all(&[0xa5; 512]);
        }
    }
    let last = std::iter::from_fn(|| stream.next_blocking()).last();
    assert!(matches!(last, Some(StreamEvent::Finished { .. })), "{last:?}");
}

/// Ports that this process listens on, from the kernel's tables.
fn listening_ports() -> Vec<u16> {
    let own: Vec<String> = std::fs::read_dir("/proc/self/fd")
        .unwrap()
        .filter_map(|entry| std::fs::read_link(entry.ok()?.path()).ok())
        .filter_map(|link| {
            Some(
                link.to_str()?
                    .strip_prefix("socket:[")?
                    .strip_suffix(']')?
                    .to_owned(),
            )
        })
        .collect();
    let table = std::fs::read_to_string("/proc/self/net/tcp").unwrap();
    let listening = |line: &str| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let (address, state, socket) = (fields.get(1)?, fields.get(3)?, fields.get(9)?);
        let ours = *state == "0A" && own.iter().any(|own| own == socket);
        ours.then(|| u16::from_str_radix(address.split_once(':')?.1, 16).ok())?
    };
    table.lines().filter_map(listening).collect()
}
