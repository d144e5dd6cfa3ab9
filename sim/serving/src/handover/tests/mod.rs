//! The protocol under fire: first everything breaks and safety is demanded, then nothing breaks any more and
//! progress is demanded. Every planted bug must be caught.

mod by_hand;
mod trouble;
mod world;

use super::fault::{Fault, Planted};
use trouble::tiny;
use world::{Tally, Trouble, World};

/// Steps of the first phase.
const STORM: u32 = 1_500;

fn storm(seed: u64, planted: Planted) -> Result<Tally, String> {
    let mut world = World::new(seed, planted, Trouble::Storm);
    for _ in 0..STORM {
        world.happen()?;
    }
    world.calm_down()
}

#[test]
fn the_swarm_keeps_every_promise() {
    let mut sum = Tally::default();
    for seed in 0..400 {
        match storm(seed, Planted::default()) {
            Ok(tally) => sum.add(&tally),
            Err(violation) => unreachable!("seed {seed}: {violation}"),
        }
    }
    // The storm must have reached what it is there for.
    assert!(sum.tokens > 10_000 && sum.preemptions > 500, "{sum:?}");
    assert!(sum.committed > 300 && sum.aborted > 100, "{sum:?}");
    assert!(sum.committed_with_loss > 20 && sum.carried > 500, "{sum:?}");
}

#[test]
fn every_planted_bug_is_caught() {
    let faults = [
        Fault::SkipTail,
        Fault::ReadyBeforeVerify,
        Fault::AcceptStaleTerm,
        Fault::ReleaseEarly,
        Fault::SwitchWithoutMarks,
        Fault::DispatchBeforeRecord,
        Fault::AbortAfterRecord,
        Fault::ForgetIncarnation,
        Fault::PastStep,
        Fault::AcceptGap,
    ];
    for fault in faults {
        let planted = Planted { fault: Some(fault) };
        let caught = (0..400).find_map(|seed| storm(seed, planted).err().map(|violation| (seed, violation)));
        let (seed, violation) = caught.unwrap_or_else(|| unreachable!("{fault:?} was not caught"));
        println!("{fault:?}: seed {seed}: {violation}");
    }
}

/// One request, two workers, one handover: the undisturbed run, event by event, with a crash of each machine
/// after each event, and with each message put off to the end.
#[test]
fn a_tiny_handover_survives_a_crash_at_every_event() {
    let length = tiny(None, None).expect("the undisturbed run is safe").events;
    let mut runs = 0;
    for crash_at in 0..length {
        for victim in 0..3 {
            let crash = Some((crash_at, victim));
            for late in std::iter::once(None).chain((crash_at.saturating_sub(8)..crash_at + 8).map(Some)) {
                if let Err(violation) = tiny(crash, late) {
                    unreachable!(
                        "crash of {victim} after event {crash_at}, message {late:?} late: {violation}"
                    );
                }
                runs += 1;
            }
        }
    }
    for late in 0..length {
        if let Err(violation) = tiny(None, Some(late)) {
            unreachable!("message {late} late: {violation}");
        }
    }
    println!("{runs} runs of about {length} events");
    assert!(length > 40, "{length} events are too few for a handover");
}
