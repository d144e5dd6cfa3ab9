//! Threads as ranks, over real loopback sockets.

use std::net::{TcpListener, TcpStream};
use std::thread;
use std::time::Duration;

use infercluster_spec::Rank;

use super::*;
use crate::backend::Cpu;

type Comm = Box<dyn Communicator<Cpu>>;

const PATIENT: Duration = Duration::from_secs(20);

/// A connected pair of sockets.
fn pair() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let dialed = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    (dialed, listener.accept().unwrap().0)
}

/// A communicator a rank, all connected.
fn group(ranks: usize, deadline: Duration) -> Vec<Comm> {
    let mut sockets: Vec<Vec<Option<TcpStream>>> =
        (0..ranks).map(|_| (0..ranks).map(|_| None).collect()).collect();
    let pairs = (0..ranks).flat_map(|low| (low + 1..ranks).map(move |high| (low, high)));
    for (low, high) in pairs {
        let (dialed, accepted) = pair();
        sockets[low][high] = Some(dialed);
        sockets[high][low] = Some(accepted);
    }
    let ranks = sockets.into_iter().enumerate();
    ranks
        .map(|(rank, peers)| {
            Box::new(TcpCommunicator::new(Rank(rank as u32), peers, deadline).unwrap()) as Comm
        })
        .collect()
}

/// Runs `body` on every rank at once and returns the results in rank order.
fn on_all<T: Send>(ranks: usize, body: impl Fn(Comm) -> T + Sync) -> Vec<T> {
    let body = &body;
    thread::scope(|scope| {
        let threads: Vec<_> = group(ranks, PATIENT)
            .into_iter()
            .map(|comm| scope.spawn(move || body(comm)))
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// A value that tells rank and place.
fn value(rank: usize, index: usize) -> f32 {
    (rank * 1_000_000 + index) as f32
}

#[test]
fn gathers_are_uneven_and_in_rank_order() {
    let cases: [&[usize]; 6] = [&[3, 5], &[0, 4], &[7, 0, 2], &[0, 0, 0], &[1], &[1, 2, 3, 4]];
    for counts in cases {
        let wanted: Vec<f32> = counts
            .iter()
            .enumerate()
            .flat_map(|(rank, &count)| (0..count).map(move |index| value(rank, index)))
            .collect();
        let results = on_all(counts.len(), |mut comm| {
            let rank = comm.rank().index();
            // One element more than its share, which must not travel.
            let mine: Vec<f32> = (0..=counts[rank]).map(|index| value(rank, index)).collect();
            let mut out = Vec::new();
            for _ in 0..3 {
                comm.all_gather(&mine, counts, &mut out).unwrap();
            }
            out
        });
        for out in results {
            assert_eq!(out, wanted, "{counts:?}");
        }
    }
}

#[test]
fn sums_have_the_same_bits_on_every_rank_and_follow_rank_order() {
    // 9,001 elements take the sliced way with three ranks, 100 the whole one.
    for (ranks, len) in [(2, 9_001), (3, 9_001), (3, 100), (4, 4_099), (1, 5)] {
        let element =
            |rank: usize, index: usize| ((rank * 7 + index) as f32).sin() * 10_f32.powi(rank as i32 * 3);
        let wanted: Vec<u32> = (0..len)
            .map(|index| {
                let first = element(0, index);
                (1..ranks)
                    .fold(first, |sum, rank| sum + element(rank, index))
                    .to_bits()
            })
            .collect();
        let results = on_all(ranks, |mut comm| {
            let rank = comm.rank().index();
            let mut data: Vec<f32> = (0..len).map(|index| element(rank, index)).collect();
            comm.all_reduce(&mut data, len).unwrap();
            data.into_iter().map(f32::to_bits).collect::<Vec<_>>()
        });
        for bits in results {
            assert!(bits == wanted, "{ranks} ranks, {len} elements");
        }
    }
}

#[test]
fn large_messages_do_not_wait_for_each_other() {
    // 16 MiB each way is far more than the sockets buffer.
    let count = 4 << 20;
    let results = on_all(3, |mut comm| {
        let mine = vec![comm.rank().0 as f32; count];
        let mut out = Vec::new();
        comm.all_gather(&mine, &[count; 3], &mut out).unwrap();
        (out[0], out[count], out[3 * count - 1])
    });
    assert_eq!(results, [(0.0, 1.0, 2.0); 3]);
}

#[test]
fn a_silent_peer_is_named_within_the_deadline() {
    let mut group = group(3, Duration::from_millis(200)).into_iter();
    let (mut first, mut second, _silent) = (
        group.next().unwrap(),
        group.next().unwrap(),
        group.next().unwrap(),
    );
    let other = thread::spawn(move || second.all_gather(&vec![2.0], &[1, 1, 1], &mut Vec::new()));
    let started = crate::clock::now();
    let error = first
        .all_gather(&vec![1.0], &[1, 1, 1], &mut Vec::new())
        .unwrap_err();
    assert!(
        matches!(error, CommError::Silent { peer: Rank(2), .. }),
        "{error}"
    );
    assert!(started.elapsed() < Duration::from_secs(5));
    assert_eq!(other.join().unwrap().unwrap_err().peer(), Rank(2));
}

#[test]
fn a_dead_peer_is_named_at_once() {
    let mut group = group(2, PATIENT).into_iter();
    let (mut first, second) = (group.next().unwrap(), group.next().unwrap());
    drop(second);
    let started = crate::clock::now();
    let error = first.all_reduce(&mut vec![1.0], 1).unwrap_err();
    assert!(
        matches!(error, CommError::Closed { peer: Rank(1), .. }),
        "{error}"
    );
    assert!(started.elapsed() < PATIENT / 2);
}

#[test]
fn ranks_that_disagree_notice() {
    // Rank 0 expects two elements from rank 1, which sends three.
    let results = on_all(2, |mut comm| {
        let counts = if comm.rank() == Rank(0) { [1, 2] } else { [1, 3] };
        comm.all_gather(&vec![0.0; 3], &counts, &mut Vec::new())
    });
    assert!(matches!(
        results[0],
        Err(CommError::Mismatch {
            peer: Rank(1),
            found: 12,
            expected: 8,
            ..
        })
    ));
}

#[test]
fn links_carry_tensors_in_order() {
    let (dialed, accepted) = pair();
    let mut sender = TensorLink::new(Rank(1), dialed, PATIENT).unwrap();
    let mut receiver = TensorLink::new(Rank(0), accepted, PATIENT).unwrap();
    let large = vec![1.5_f32; 1 << 20];
    let thread = thread::spawn(move || {
        sender.send(&large).unwrap();
        sender.send(&[2.0, 3.0]).unwrap();
    });
    let (mut first, mut second) = (vec![0.0; 1 << 20], [0.0; 2]);
    receiver.receive(&mut first).unwrap();
    receiver.receive(&mut second).unwrap();
    thread.join().unwrap();
    assert_eq!((first[0], first[(1 << 20) - 1], second), (1.5, 1.5, [2.0, 3.0]));
}
