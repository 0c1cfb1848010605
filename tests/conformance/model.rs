//! Random requests on a volume, compared with a model: an array of bytes.

use cleat_core::request::{Flags, IoError, Op};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

use crate::checks::pattern;
use crate::client::{Client, Job, Volume, job, write};

/// The number of zones that the used part of the volume is divided into. Requests that run at the same
/// time use different zones, so that the result is determined.
const ZONES: u64 = 8;
const ZONE: u64 = 128 << 10;

#[derive(Debug, Clone)]
struct Action {
    op: Op,
    flags: Flags,
    /// The start of the range in 1/1024 of the zone, rounded to the block size of the volume.
    start: u64,
    length: u64,
    seed: u64,
}

/// Actions that run at the same time, at most one per zone, on one of two clients.
type Batch = (usize, Vec<(u64, Action)>);

fn action() -> impl Strategy<Value = Action> {
    let op = prop::sample::select(&Op::ALL[..]);
    let flags = (any::<bool>(), any::<bool>(), any::<bool>())
        .prop_map(|(fua, no_hole, fast_zero)| Flags { fua, no_hole, fast_zero });
    (op, flags, 0_u64..1024, 1_u64..=1024, 0_u64..1000).prop_map(
        |(op, flags, start, length, seed)| Action {
            op,
            flags,
            start,
            length: length.min(1024 - start),
            seed,
        },
    )
}

fn batch() -> impl Strategy<Value = Batch> {
    let actions = prop::collection::btree_map(0..ZONES, action(), 1..ZONES as usize)
        .prop_map(|actions| actions.into_iter().collect());
    (0..2_usize, actions)
}

/// Runs random sequences and compares the volume with the model. On failure the runner prints the
/// shortest sequence and the seed that replays it (`PROPTEST_RNG_SEED`). `PROPTEST_CASES` sets the
/// number of sequences.
pub fn random_requests_give_the_same_content_as_the_model(volume: &dyn Volume) {
    let config = Config { cases: 24, failure_persistence: None, ..Config::default() };
    let mut runner = TestRunner::new(config);
    let outcome = runner.run(&prop::collection::vec(batch(), 1..25), |batches| {
        replay(volume, &batches);
        Ok(())
    });
    if let Err(failure) = outcome {
        panic!("{failure}");
    }
}

fn replay(volume: &dyn Volume, batches: &[Batch]) {
    let mut clients = [volume.client(), volume.client()];
    let mut model = vec![0_u8; (ZONES * ZONE) as usize];
    clients[0].one(job(Op::WriteZeroes, 0, ZONES * ZONE));
    for (client, actions) in batches {
        step(&mut *clients[*client], volume, &mut model, actions);
    }
    assert!(clients[1].read(0, ZONES * ZONE) == model, "the whole content at the end");
}

fn step(client: &mut dyn Client, volume: &dyn Volume, model: &mut [u8], actions: &[(u64, Action)]) {
    let block = u64::from(volume.blocks().minimum);
    let jobs: Vec<Job> =
        actions.iter().map(|(zone, action)| to_job(*zone, action, block)).collect();
    let ends = client.run(jobs.clone());
    for (job, done) in jobs.iter().zip(ends) {
        let request = job.request;
        let range = request.offset as usize..(request.offset + request.length) as usize;
        if request.flags.fast_zero
            && request.op == Op::WriteZeroes
            && done.result == Err(IoError::Unsupported)
        {
            continue;
        }
        assert_eq!(done.result, Ok(()), "{request:?}");
        match request.op {
            Op::Read => assert!(done.data.unwrap() == model[range], "{request:?}"),
            Op::Write => model[range].copy_from_slice(job.data.as_ref().unwrap()),
            Op::WriteZeroes => model[range].fill(0),
            // A trimmed byte keeps its value or becomes 0. The value read now must not change later.
            Op::Trim => {
                let now = client.read(request.offset, request.length);
                let plausible = now.iter().zip(&model[range.clone()]);
                assert!({ plausible }.all(|(now, was)| *now == 0 || now == was), "{request:?}");
                model[range].copy_from_slice(&now);
            }
            Op::Flush | Op::Cache => {}
        }
    }
}

fn to_job(zone: u64, action: &Action, block: u64) -> Job {
    let unit = ZONE / 1024;
    let start = (action.start * unit) / block * block;
    let length = (action.length * unit).next_multiple_of(block).min(ZONE - start);
    let offset = zone * ZONE + start;
    match action.op {
        Op::Flush => job(Op::Flush, 0, 0),
        Op::Write => write(offset, &pattern(action.seed, length)).with(action.flags),
        op => job(op, offset, length).with(action.flags),
    }
}
