//! What is written reads back, and what a format cannot hold is said.

use infercluster_spec::{Request, RequestId, SimTime, Tokens, Trace};
use infercluster_traces::transform::{LengthLimits, clip_lengths, cut_window, scale_time};
use infercluster_traces::{TraceError, TraceFormat, Written, read, write};
use proptest::prelude::*;

/// Gaps in picoseconds, lengths, and blocks of 512 tokens with their hashes.
fn trace(rows: &[(u64, u64, u64)], hashes: bool) -> Trace {
    let mut now = 0_u64;
    let requests = rows.iter().enumerate().map(|(index, &(gap, input, output))| {
        // The first request stands at the zero of the clock, as datetimes have it.
        now += if index == 0 { 0 } else { gap };
        let blocks = if hashes { input.div_ceil(512) } else { 0 };
        Request {
            id: RequestId(index as u64),
            arrival: Some(SimTime(now)),
            input: Tokens(input),
            output: Tokens(output),
            block_hashes: (0..blocks).map(|block| block * 31 + input).collect(),
        }
    });
    Trace {
        name: "made".to_owned(),
        requests: requests.collect(),
        hash_block: hashes.then_some(512),
    }
}

fn round_trip(trace: &Trace, format: TraceFormat) -> (Trace, Written) {
    let mut bytes = Vec::new();
    let written = write(trace, format, "made", &mut bytes).unwrap();
    let loaded = read("made.txt", bytes.as_slice()).unwrap();
    assert_eq!(loaded.format, format);
    (loaded.trace, written)
}

fn rows(unit: u64) -> impl Strategy<Value = Vec<(u64, u64, u64)>> {
    let gap = (0..100_000_000_000_u64).prop_map(move |units| units % (100_000_000_000_000_000 / unit) * unit);
    prop::collection::vec((gap, 1..5_000_u64, 1..3_000_u64), 1..40)
}

proptest! {
    #[test]
    fn own_lines_lose_nothing(rows in rows(1), hashes: bool) {
        let trace = trace(&rows, hashes);
        prop_assert_eq!(round_trip(&trace, TraceFormat::Lines).0, trace);
    }

    #[test]
    fn vidur_keeps_picoseconds(rows in rows(1)) {
        let trace = trace(&rows, false);
        let (back, written) = round_trip(&trace, TraceFormat::Vidur);
        prop_assert_eq!(back, trace);
        prop_assert_eq!(written.rounded, 0);
    }

    #[test]
    fn azure_keeps_100_ns(rows in rows(100_000)) {
        let trace = trace(&rows, false);
        prop_assert_eq!(round_trip(&trace, TraceFormat::Azure).0, trace);
    }

    #[test]
    fn mooncake_keeps_milliseconds_and_hashes(rows in rows(1_000_000_000), hashes: bool) {
        let trace = trace(&rows, hashes);
        prop_assert_eq!(round_trip(&trace, TraceFormat::Mooncake).0, trace);
    }

    #[test]
    fn scaled_time_stays_in_order(rows in rows(1), factor in 1e-3..1e2_f64) {
        let mut trace = trace(&rows, false);
        scale_time(&mut trace, factor).unwrap();
        prop_assert!(trace.requests.is_sorted_by_key(|request| request.arrival));
    }
}

#[test]
fn what_a_format_cannot_hold_is_said() {
    let made = trace(&[(0, 600, 5), (1_500_000_000, 10, 5)], true);
    let (back, written) = round_trip(&made, TraceFormat::Vidur);
    assert_eq!((written.hashes_dropped, back.hash_block), (2, None));
    // 1.5 ms rounds half up to 2 ms.
    let (back, written) = round_trip(&made, TraceFormat::Mooncake);
    assert_eq!((written.rounded, written.rows), (1, 2));
    assert_eq!(back.requests[1].arrival, Some(SimTime(2_000_000_000)));
    let refuse = |trace: &Trace, format: TraceFormat| write(trace, format, "made", Vec::new()).unwrap_err();
    let mut other_block = made.clone();
    other_block.hash_block = Some(16);
    assert!(matches!(
        refuse(&other_block, TraceFormat::Mooncake),
        TraceError::Unwritable { .. }
    ));
    assert!(matches!(
        refuse(&made, TraceFormat::BurstGpt),
        TraceError::Unwritable { .. }
    ));
    let mut closed = made;
    closed
        .requests
        .iter_mut()
        .for_each(|request| request.arrival = None);
    assert!(matches!(
        refuse(&closed, TraceFormat::Azure),
        TraceError::NoArrivals { .. }
    ));
    assert_eq!(round_trip(&closed, TraceFormat::Lines).0, closed);
}

#[test]
fn windows_and_clips_by_hand() {
    let second = 1_000_000_000_000;
    let mut made = trace(&[(0, 600, 5), (second, 1200, 50), (second, 10, 500)], true);
    cut_window(&mut made, SimTime(second), SimTime(2 * second + 1)).unwrap();
    let arrivals: Vec<_> = made.requests.iter().map(|request| request.arrival).collect();
    assert_eq!(arrivals, [Some(SimTime(0)), Some(SimTime(second))]);
    assert_eq!(made.requests[0].id, RequestId(0));
    let limits = LengthLimits {
        input: Some(Tokens(513)),
        output: Some(Tokens(60)),
    };
    assert_eq!(clip_lengths(&mut made, limits).unwrap(), 2);
    let lengths: Vec<_> = made
        .requests
        .iter()
        .map(|request| (request.input.0, request.output.0, request.block_hashes.len()))
        .collect();
    assert_eq!(lengths, [(513, 50, 2), (10, 60, 1)]);
    assert!(scale_time(&mut made, 0.0).is_err() && scale_time(&mut made, f64::NAN).is_err());
    assert!(matches!(
        scale_time(&mut made, 1e9),
        Err(TraceError::ClockRange { index: 1, .. })
    ));
    scale_time(&mut made, 0.5).unwrap();
    assert_eq!(made.requests[1].arrival, Some(SimTime(second / 2)));
    assert!(cut_window(&mut made, SimTime(1), SimTime(1)).is_err());
}
