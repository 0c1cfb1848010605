//! Every fuzz target on a stable compiler: inputs that failed before, the corpus, and mutations of the
//! corpus from a seed.
//!
//! `CLEAT_FUZZ_RUNS` sets the mutations for each target, `CLEAT_FUZZ_SEED` another seed. An input
//! that fails is written to `fuzz/artifacts/<target>/`; each later run starts with it, and libFuzzer
//! takes it as an argument.
#![allow(clippy::unwrap_used)]

use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use cleat_core::random::Random;

/// The number of mutations for each target, unless `CLEAT_FUZZ_RUNS` is set.
const RUNS: u64 = 4000;

/// The maximum length of a mutated input, in bytes.
const LENGTH_MAX: usize = 8 << 10;

/// Targets run one at a time, since each measures the memory of the whole process.
static ALONE: Mutex<()> = Mutex::new(());

macro_rules! smoke {
    ($($name:ident),*) => {
        $(#[test]
        fn $name() {
            smoke(stringify!($name));
        })*

        /// Returns a target without a smoke test would never run.
        #[test]
        fn every_target_is_here() {
            let known: Vec<_> = cleat_fuzz::TARGETS.iter().map(|(name, _)| *name).collect();
            assert_eq!(known, [$(stringify!($name)),*]);
        }
    };
}

smoke!(
    handshake,
    transmission,
    structured_replies,
    kernel_files,
    volume_uri,
    journal_record,
    worker_messages,
    claim_record,
    object_headers
);

fn smoke(target: &str) {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    for (path, input) in inputs("artifacts", target) {
        run(target, &input, Some(&path));
    }
    let corpus = inputs("corpus", target);
    assert!(!corpus.is_empty(), "{target} has no corpus");
    for (path, input) in &corpus {
        run(target, input, Some(path));
    }
    let seed = number("CLEAT_FUZZ_SEED", 1);
    let random = Random::seeded(seed);
    for _ in 0..number("CLEAT_FUZZ_RUNS", RUNS) {
        run(target, &mutate(&corpus, &random), None);
    }
}

fn run(target: &str, input: &[u8], path: Option<&Path>) {
    let ran = catch_unwind(AssertUnwindSafe(|| cleat_fuzz::run(target, input)));
    if ran.is_err() {
        let path = path.map_or_else(|| keep(target, input), Path::to_owned);
        panic!(
            "{} fails: replay it with `cargo test -p cleat-fuzz --test fuzz {target}`",
            path.display()
        );
    }
}

/// Writes a failing input to a file.
fn keep(target: &str, input: &[u8]) -> PathBuf {
    let directory = directory("artifacts", target);
    fs::create_dir_all(&directory).unwrap();
    let hash = input.iter().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3)
    });
    let path = directory.join(format!("smoke-{hash:016x}"));
    fs::write(&path, input).unwrap();
    path
}

/// Returns the files of a target, by name.
fn inputs(kind: &str, target: &str) -> Vec<(PathBuf, Vec<u8>)> {
    let Ok(entries) = fs::read_dir(directory(kind, target)) else { return Vec::new() };
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    paths.into_iter().map(|path| (path.clone(), fs::read(path).unwrap())).collect()
}

fn directory(kind: &str, target: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(kind).join(target)
}

fn number(variable: &str, default: u64) -> u64 {
    std::env::var(variable).map_or(default, |text| text.parse().unwrap())
}

/// Changes an input of the corpus in one to eight places.
fn mutate(corpus: &[(PathBuf, Vec<u8>)], random: &Random) -> Vec<u8> {
    let below = |bound: usize| usize::try_from(random.next() >> 1).unwrap() % bound.max(1);
    let pick = |random_index: usize| &corpus[random_index].1;
    let mut input = pick(below(corpus.len())).clone();
    for _ in 0..1 + below(8) {
        let at = below(input.len() + 1);
        let end = at + below((input.len() - at).min(64) + 1);
        match below(7) {
            0 if at < input.len() => input[at] ^= 1 << below(8),
            1 if at < input.len() => input[at] = random.next().to_le_bytes()[0],
            2 => drop(input.drain(at..end)),
            3 => {
                let piece = input[at..end].to_vec();
                input.splice(at..at, piece);
            }
            4 => {
                let other = pick(below(corpus.len()));
                let from = below(other.len() + 1);
                input.splice(at.., other[from..].iter().copied());
            }
            5 if at + 4 <= input.len() => {
                let bytes = INTERESTING[below(INTERESTING.len())].to_be_bytes();
                input[at..at + 4].copy_from_slice(&bytes);
            }
            _ => input.insert(at, random.next().to_le_bytes()[0]),
        }
    }
    input.truncate(LENGTH_MAX);
    input
}

/// Numbers at which lengths and flags change their meaning.
const INTERESTING: [u32; 12] =
    [0, 1, 2, 3, 7, 8, 512, 4096, 16 << 10, (16 << 10) + 1, 32 << 20, u32::MAX];
