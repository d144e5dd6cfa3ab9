//! Generators: what they promise about rates, bursts, lengths and seeds.

use infercluster_spec::{SimDuration, Trace};
use infercluster_traces::synth::{
    Amount, ArrivalProcess, LengthDistribution, Lengths, SynthSpec, attach_arrivals, synthesise,
};
use infercluster_traces::{TraceError, read, statistics};

const FIXED: Lengths = Lengths::Independent {
    input: LengthDistribution::Fixed { tokens: 100 },
    output: LengthDistribution::Fixed { tokens: 10 },
};

fn spec(arrivals: ArrivalProcess, lengths: Lengths, amount: Amount) -> SynthSpec {
    SynthSpec {
        name: "made",
        arrivals,
        lengths,
        amount,
        seed: 7,
    }
}

fn made(arrivals: ArrivalProcess, lengths: Lengths, amount: Amount) -> Trace {
    synthesise(&spec(arrivals, lengths, amount)).unwrap()
}

#[test]
fn processes_have_their_rate_and_burstiness() {
    // 20,000 gaps: the standard error of the mean is cv / 141, that of cv about the same.
    let cases = [
        (ArrivalProcess::Poisson { rate: 8.0 }, 1.0),
        (ArrivalProcess::Gamma { rate: 8.0, cv: 2.0 }, 2.0),
        (ArrivalProcess::Gamma { rate: 8.0, cv: 0.25 }, 0.25),
        (ArrivalProcess::Constant { rate: 8.0 }, 0.0),
    ];
    for (process, cv) in cases {
        let found = statistics(&made(process, FIXED, Amount::Count(20_001)));
        assert!(
            (found.rate_per_s.unwrap() / 8.0 - 1.0).abs() < 0.05,
            "{process:?} {found:?}"
        );
        assert!((found.gap_cv.unwrap() - cv).abs() < 0.06, "{process:?} {found:?}");
    }
    let closed = made(ArrivalProcess::Closed, FIXED, Amount::Count(3));
    assert!(closed.requests.iter().all(|request| request.arrival.is_none()));
}

#[test]
fn durations_end_before_their_end() {
    let ten = Amount::Until(SimDuration(10_000_000_000_000));
    let constant = made(ArrivalProcess::Constant { rate: 3.0 }, FIXED, ten);
    assert_eq!(constant.requests.len(), 30);
    let poisson = made(ArrivalProcess::Poisson { rate: 100.0 }, FIXED, ten);
    assert!(
        (850..1150).contains(&poisson.requests.len()),
        "{}",
        poisson.requests.len()
    );
    let error = synthesise(&spec(ArrivalProcess::Closed, FIXED, ten)).unwrap_err();
    assert!(error.to_string().contains("closed loop"), "{error}");
}

#[test]
fn lengths_follow_their_distribution() {
    let lengths = Lengths::Independent {
        input: LengthDistribution::LogNormal {
            median: 500.0,
            sigma: 1.0,
            max: 4000,
        },
        output: LengthDistribution::Uniform { min: 3, max: 5 },
    };
    let trace = made(ArrivalProcess::Closed, lengths, Amount::Count(20_000));
    let found = statistics(&trace);
    assert!((found.input.p50 / 500.0 - 1.0).abs() < 0.05, "{found:?}");
    assert_eq!((found.input.max, found.output.max), (4000, 5));
    assert!((found.output.mean - 4.0).abs() < 0.03);
    assert_eq!(
        trace.requests.iter().map(|request| request.output.0).min(),
        Some(3)
    );
}

#[test]
fn resampled_pairs_stay_together() {
    let text = "num_prefill_tokens,num_decode_tokens\n10,1\n20,2\n30,3\n";
    let from = read("t.csv", text.as_bytes()).unwrap().trace;
    let lengths = Lengths::Resampled { from: &from };
    let trace = made(ArrivalProcess::Closed, lengths, Amount::Count(3000));
    for row in 1..=3 {
        let drawn = trace.requests.iter().filter(|request| request.output.0 == row);
        let inputs: Vec<u64> = drawn.map(|request| request.input.0).collect();
        assert!(inputs.iter().all(|input| *input == row * 10));
        assert!((900..1100).contains(&inputs.len()), "row {row}: {}", inputs.len());
    }
}

#[test]
fn a_seed_repeats_and_uses_do_not_disturb_each_other() {
    let poisson = ArrivalProcess::Poisson { rate: 2.0 };
    let arrivals = |trace: &Trace| {
        trace
            .requests
            .iter()
            .map(|request| request.arrival)
            .collect::<Vec<_>>()
    };
    let first = made(poisson, FIXED, Amount::Count(50));
    assert_eq!(first, made(poisson, FIXED, Amount::Count(50)));
    let uniform = LengthDistribution::Uniform { min: 1, max: 9 };
    let other = Lengths::Independent {
        input: uniform,
        output: uniform,
    };
    let second = made(poisson, other, Amount::Count(50));
    assert_eq!(arrivals(&first), arrivals(&second));
    let mut reseeded = spec(poisson, FIXED, Amount::Count(50));
    reseeded.seed = 8;
    assert_ne!(arrivals(&first), arrivals(&synthesise(&reseeded).unwrap()));
    // The same process gives a trace of lengths the same instants.
    let mut lengths_only = made(ArrivalProcess::Closed, other, Amount::Count(50));
    attach_arrivals(&mut lengths_only, poisson, 7).unwrap();
    assert_eq!(lengths_only, second);
}

#[test]
fn parameters_out_of_range_are_refused() {
    let refuse = |arrivals, lengths, amount| {
        let error = synthesise(&spec(arrivals, lengths, amount)).unwrap_err();
        assert!(
            matches!(
                error,
                TraceError::Parameter { .. } | TraceError::ClockRange { .. }
            ),
            "{error}"
        );
    };
    let one = Amount::Count(1);
    for rate in [0.0, -1.0, f64::NAN, f64::INFINITY, 1e-320] {
        refuse(ArrivalProcess::Poisson { rate }, FIXED, one);
        refuse(ArrivalProcess::Constant { rate }, FIXED, one);
    }
    for cv in [0.0, -1.0, f64::NAN, 1e9] {
        refuse(ArrivalProcess::Gamma { rate: 1.0, cv }, FIXED, one);
    }
    refuse(ArrivalProcess::Constant { rate: 1e-9 }, FIXED, Amount::Count(100));
    refuse(ArrivalProcess::Closed, FIXED, Amount::Count(u64::MAX));
    let empty = Trace::default();
    refuse(ArrivalProcess::Closed, Lengths::Resampled { from: &empty }, one);
    let bad = [
        LengthDistribution::Fixed { tokens: 0 },
        LengthDistribution::Fixed { tokens: u64::MAX },
        LengthDistribution::Uniform { min: 5, max: 4 },
        LengthDistribution::LogNormal {
            median: f64::NAN,
            sigma: 1.0,
            max: 5,
        },
        LengthDistribution::LogNormal {
            median: 5.0,
            sigma: -1.0,
            max: 5,
        },
    ];
    for input in bad {
        let output = LengthDistribution::Fixed { tokens: 1 };
        refuse(
            ArrivalProcess::Closed,
            Lengths::Independent { input, output },
            one,
        );
    }
}
