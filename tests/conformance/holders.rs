//! RBD images that several nodes hold with grants, on a real cluster: writers that share an image, and readers. Each is
//! fenced alone, and a single writer is refused until all of them are gone.

use cleat::backends::REGISTRY;
use cleat_backend::OpenOptions;
use cleat_backend::claimant::{Claimant, ProcessMark, boot_id};
use cleat_backend::fence::Standing;
use cleat_core::error::ErrorKind;
use cleat_core::request::{IoError, Op};
use cleat_grants::object::{Generation, Mode};
use cleat_grants::record::{Record, Target};
use cleat_grants::storage::Fencing;
use librbd::Open;
use test_kit::ceph::{ID, shared};

use crate::checks::pattern;
use crate::client::{Local, Volume, job, write};
use crate::grants::{check_refused, deadline, granted, record_of, target};
use crate::places::pool;
use crate::rbd::{MIB, fresh};

fn reading(node: &str, generation: u64) -> OpenOptions {
    OpenOptions { read_only: true, ..granted(node, generation) }
}

fn resuming(options: OpenOptions) -> OpenOptions {
    let claimant = Claimant { resumes: true, ..options.claimant };
    OpenOptions { claimant, ..options }
}

fn read(storage: &dyn Fencing) -> Record {
    storage.record(deadline()).unwrap()
}

/// The nodes of the claims, which all have the mode `mode`.
fn holders(storage: &dyn Fencing, mode: Mode) -> Vec<String> {
    let claims = read(storage).claims;
    assert!(claims.iter().all(|claim| claim.mode == mode), "{claims:?}");
    claims.into_iter().map(|claim| claim.node).collect()
}

#[test]
fn writers_that_share_an_image_are_fenced_one_by_one() {
    let alone = fresh(shared(), "holders-shared", 8 * MIB);
    let uri = format!("{alone}&lock=shared");
    let (storage, volume) = (record_of(&uri), REGISTRY.volume(&uri).unwrap());
    let (a, b) = (Local::open(&volume, granted("a", 1)), Local::open(&volume, granted("b", 2)));
    let (mut of_a, mut of_b) = (a.client(), b.client());
    // librbd passes its lock on with each write.
    for byte in 1..4 {
        of_a.one(write(0, &pattern(byte, 4096)));
        of_b.one(write(4096, &pattern(byte + 1, 4096)));
    }
    assert_eq!(holders(&*storage, Mode::SharedReadWrite), ["a", "b"]);
    check_refused(&alone, &granted("c", 3), "is claimed by the node");
    check_refused(&alone, &reading("c", 3), "is claimed by the node");

    let of_mode = Target { mode: Mode::SharedReadWrite, ..target("b", 2) };
    storage.fence(&of_mode, deadline()).unwrap();
    let proof = read(&*storage).proof_of(&of_mode).unwrap();
    assert!(proof.contains("is sealed"), "{proof}");
    assert_eq!(of_b.try_one(write(4096, &pattern(9, 4096))), Err(IoError::Fenced));
    of_a.one(write(8192, &pattern(5, 4096)));
    assert_eq!(holders(&*storage, Mode::SharedReadWrite), ["a"]);
    check_refused(&uri, &granted("b", 2), "the generation was fenced");
    // A controller with an old view.
    storage.fence(&of_mode, deadline()).unwrap();

    // The next worker of a node whose worker has crashed cuts the last one off.
    let next = Local::open(&volume, resuming(granted("a", 1)));
    assert_eq!(of_a.try_one(write(0, &pattern(9, 4096))), Err(IoError::Fenced));
    next.client().one(write(12288, &pattern(6, 4096)));
    let content = next.client().read(0, 16384);
    assert!(content[..4096] == pattern(3, 4096) && content[4096..8192] == pattern(4, 4096));
    assert!(content[8192..12288] == pattern(5, 4096) && content[12288..] == pattern(6, 4096));
    assert_eq!(holders(&*storage, Mode::SharedReadWrite), ["a"]);
    drop((of_a, of_b, a, b));
    drop(next);
    assert!(read(&*storage).claims.is_empty(), "closing released the claim");
    drop(Local::open(&REGISTRY.volume(&alone).unwrap(), granted("c", 3)));
    check_refused(&uri, &granted("a", 1), "the storage is at generation 3 already");
}

#[test]
fn a_writer_is_refused_until_all_readers_are_gone_and_readers_until_it_is() {
    let uri = fresh(shared(), "holders-read", 8 * MIB);
    let (storage, volume) = (record_of(&uri), REGISTRY.volume(&uri).unwrap());
    let writer = Local::open(&volume, granted("a", 1));
    writer.client().one(write(0, &pattern(1, 4096)));
    check_refused(&uri, &reading("b", 2), "is claimed by the node a");
    drop(writer);
    let (b, c) = (Local::open(&volume, reading("b", 2)), Local::open(&volume, reading("c", 3)));
    let (mut of_b, mut of_c) = (b.client(), c.client());
    assert!(of_b.read(0, 4096) == pattern(1, 4096) && of_c.read(0, 4096) == pattern(1, 4096));
    assert_eq!(holders(&*storage, Mode::ReadOnly), ["b", "c"]);
    check_refused(&uri, &granted("a", 4), "is claimed by the node");
    check_refused(&format!("{uri}&lock=shared"), &granted("a", 4), "is claimed by the node");

    let of_mode = Target { mode: Mode::ReadOnly, ..target("b", 2) };
    storage.fence(&of_mode, deadline()).unwrap();
    let record = read(&*storage);
    assert!(record.proof_of(&of_mode).is_some());
    assert!(record.seal_of(Generation(2)).unwrap().client.is_some());
    assert_eq!(of_b.try_one(job(Op::Read, 0, 4096)), Err(IoError::Fenced));
    check_refused(&uri, &reading("b", 2), "the generation was fenced");
    // The other reader stays, and keeps the writer out.
    assert!(of_c.read(0, 4096) == pattern(1, 4096));
    check_refused(&uri, &granted("a", 4), "is claimed by the node c");
    drop((of_b, b));
    drop((of_c, c));
    assert!(read(&*storage).claims.is_empty());
    let writer = Local::open(&volume, granted("a", 4));
    writer.client().one(write(0, &pattern(2, 4096)));
}

#[test]
fn the_claim_of_one_ended_client_is_released_and_an_administrator_fences_one() {
    let alone = fresh(shared(), "holders-released", 8 * MIB);
    let uri = format!("{alone}&lock=shared");
    let (storage, volume) = (record_of(&uri), REGISTRY.volume(&uri).unwrap());
    // A client whose process has ended, as far as its record says.
    let mut ended = granted("a", 1);
    ended.claimant.boot_id = boot_id().unwrap();
    ended.claimant.process = ProcessMark::own().map(|own| ProcessMark { pid: u32::MAX, ..own });
    let a = Local::open(&volume, ended);
    let (b, c) = (Local::open(&volume, granted("b", 2)), Local::open(&volume, granted("c", 3)));
    let client = |node: &str| read(&*storage).claim_of(node).unwrap().client.clone();
    let (of_a, of_b) = (client("a"), client("b"));
    let error = storage.release("b", &of_b, deadline()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InUse, "{}", error.report());
    storage.release("a", &of_a, deadline()).unwrap();
    storage.release("a", &of_a, deadline()).unwrap();
    let write_to = |volume: &Local| volume.client().try_one(write(0, &pattern(1, 4096)));
    assert_eq!((write_to(&a), write_to(&b), write_to(&c)), (Err(IoError::Fenced), Ok(()), Ok(())));

    let fence = REGISTRY.volume(&alone).unwrap().spec().fence().unwrap().unwrap();
    let clients = fence.clients(deadline()).unwrap();
    let held = clients.iter().filter(|client| client.claim == Some(Standing::Held));
    let held: Vec<_> = held.map(|client| client.node.clone().unwrap()).collect();
    assert_eq!(held, ["b", "c"]);
    let targets = fence.targets(Some(&of_b), deadline()).unwrap();
    fence.fence(&targets, &Claimant::alone("", true).unwrap(), deadline()).unwrap();
    assert_eq!((write_to(&b), write_to(&c)), (Err(IoError::Fenced), Ok(())));
    assert_eq!(holders(&*storage, Mode::SharedReadWrite), ["c"]);
    // The generation is not sealed.
    drop((a, b));
    drop(Local::open(&volume, granted("a", 1)));
}

/// In a handover that is cancelled, the old worker claims the image again. If it cannot, no fence would find it.
#[test]
fn a_worker_that_cannot_claim_again_uses_a_shared_image_no_more() {
    for (image, options) in
        [("holders-resumed", granted("a", 1)), ("holders-reread", reading("a", 1))]
    {
        let uri = format!("{}&lock=shared", fresh(shared(), image, 8 * MIB));
        let volume = REGISTRY.volume(&uri).unwrap().open(&options).unwrap();
        let op = if options.read_only { job(Op::Read, 0, 4096) } else { write(0, &[1; 4096]) };
        let used = || Local::of(volume.clone()).client().try_one(op.clone());
        let handover = volume.handover().unwrap();
        handover.release().unwrap();
        assert!(read(&*record_of(&uri)).claims.is_empty());
        handover.resume().unwrap();
        assert_eq!((read(&*record_of(&uri)).claims.len(), used()), (1, Ok(())));

        handover.release().unwrap();
        // A record of a later version.
        let metadata = pool(shared(), ID).open(image, None, Open::Write).unwrap();
        metadata.metadata_put("cleat.claim", r#"{"version":99,"image":""}"#).unwrap();
        let error = handover.resume().unwrap_err();
        assert!(matches!(error.kind(), ErrorKind::Unsupported), "{}", error.report());
        assert_eq!(used(), Err(IoError::Fenced));
    }
}
