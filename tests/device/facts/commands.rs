//! Commands that do not return, what they block, and what lets them go; what stays when a device is
//! disconnected.

use std::time::{Duration, Instant};

use nix::errno::Errno;

use super::netlink::{self, Family};
use super::peer::{Device, FUA_TRIM_AND_ZEROES, Io, Make, OURS, Peer, SIZE};
use crate::fixture::{PATIENCE, kernel_is_at_least, shell};
use test_kit::nbd::wire::{TRIM, WRITE_ZEROES};
use test_kit::stopwatch::Stopwatch;

pub(super) fn facts() -> Vec<(&'static str, fn())> {
    vec![
        ("a_stuck_disconnect_blocks_every_command_until_the_peer_dies", stuck_disconnect),
        ("disconnect_fails_what_is_under_way", disconnect_fails_requests),
        ("resize_with_a_request_that_is_never_answered", resize_under_load),
        ("an_opener_keeps_a_disconnected_device_configured", opener),
        ("a_reused_device_keeps_the_io_timeout_of_its_last_owner", reused),
        ("a_reused_device_keeps_write_zeroes_of_its_last_owner", features_kept),
    ]
}

const MOMENT: Duration = Duration::from_millis(300);
const SECOND: Duration = Duration::from_secs(1);

/// A peer that does not read, and writes until the socket takes no more: the next command that sends
/// something waits for it, under the lock of all generic netlink.
fn stuck_disconnect() {
    let bystander = Device::connect(Make::default());
    let mut device = Device::connect(Make::default());
    let (deaf, end) = Peer::deaf();
    device.peers.clear();
    std::thread::sleep(MOMENT);
    device.reconfigure_with(vec![end]).expect("RECONFIGURE");
    let writes: Vec<Io> = (0..128).map(|n| device.write(OURS + n * 8192)).collect();
    std::thread::sleep(SECOND);

    let index = device.index;
    let disconnect = Io::start(move || netlink::disconnect(index));
    assert!(disconnect.hangs_for(2 * SECOND), "DISCONNECT does not wait for the peer");
    let reconfigure = {
        let (index, identifier) = (bystander.index, bystander.identifier.clone());
        Io::start(move || netlink::reconfigure(index, Some(&identifier), &[], Some(2 * SIZE)))
    };
    let lookup = Io::start(|| Family::find().map(drop));
    let other_family = Io::start(|| shell("ip tcp_metrics show >/dev/null 2>&1 || true"));
    std::thread::sleep(2 * SECOND);
    println!(
        "figures: behind a stuck DISCONNECT: another device's command hangs: {}, the look for the family: {}, another family's command: {}",
        reconfigure.hangs_for(MOMENT),
        lookup.hangs_for(MOMENT),
        other_family.hangs_for(MOMENT)
    );
    assert!(reconfigure.hangs_for(MOMENT), "commands for another device wait");
    let start = Stopwatch::start();
    assert!(device.attribute("pid").is_some() && bystander.attribute("size").is_some());
    assert!(start.elapsed() < SECOND, "sysfs can be read meanwhile");
    bystander.read(OURS).finish(PATIENCE).0.expect("I/O of other devices goes on");
    assert!(disconnect.hangs_for(5 * SECOND), "no timer ends it");

    let released = Instant::now();
    deaf.die();
    disconnect.finish(PATIENCE).0.expect("the peer's death lets it go");
    assert_eq!(reconfigure.finish(PATIENCE).0, Ok(()), "and all that waited");
    println!("figures: {:.1?} after the peer's death both commands were done", released.elapsed());
    for write in writes {
        write.finish(PATIENCE).0.expect_err("what was under way has failed");
    }
}

/// Requests that a live, silent peer holds fail by DISCONNECT at once, not by a timer.
fn disconnect_fails_requests() {
    let device = Device::connect(Make::default());
    device.peers[0].hold();
    let reads: Vec<Io> = (0..4).map(|n| device.read(OURS + n * 8192)).collect();
    device.peers[0].wait_seen(4);
    netlink::disconnect(device.index).expect("DISCONNECT");
    for read in reads {
        let (result, _) = read.finish(5 * SECOND);
        assert_eq!(result.expect_err("disconnected").raw_os_error(), Some(libc::EIO));
    }
    // Those of a dead socket, too.
    let device = Device::connect(Make::default());
    device.peers[0].hold();
    let lost = device.read(OURS);
    device.peers[0].wait_seen(1);
    device.peers[0].die();
    std::thread::sleep(MOMENT);
    let waiting = device.read(OURS + 8192);
    assert!(waiting.hangs_for(MOMENT) && lost.hangs_for(MOMENT));
    netlink::disconnect(device.index).expect("DISCONNECT");
    lost.finish(5 * SECOND).0.expect_err("disconnected");
    waiting.finish(5 * SECOND).0.expect_err("disconnected");
}

/// Whether a new size waits for requests under way, and with it every other command.
fn resize_under_load() {
    let device = Device::connect(Make::default());
    device.peers[0].hold();
    let held = device.read(OURS);
    device.peers[0].wait_seen(1);
    let resize = {
        let (index, identifier) = (device.index, device.identifier.clone());
        Io::start(move || netlink::reconfigure(index, Some(&identifier), &[], Some(2 * SIZE)))
    };
    let waits = resize.hangs_for(3 * SECOND);
    // From 6.11 on the size is set with the queue frozen (the block layer's atomic limits).
    let expected = kernel_is_at_least(6, 11);
    println!("figures: a resize with a request under way waits: {waits}");
    assert_eq!(waits, expected, "as this kernel was seen to do");
    if waits {
        let lookup = Io::start(|| Family::find().map(drop));
        let other = Io::start(|| netlink::disconnect(9999));
        let read = device.read(OURS + 8192);
        assert!(read.hangs_for(SECOND), "new requests wait behind it");
        assert!(other.hangs_for(SECOND), "commands for other devices, too");
        println!("figures: the look for the family waits: {}", lookup.hangs_for(MOMENT));
        device.peers[0].release();
        resize.finish(PATIENCE).0.expect("once the request is answered");
        assert_eq!(other.finish(PATIENCE).0, Err(Errno::EINVAL), "no such device");
        read.finish(PATIENCE).0.expect("and goes on");
    } else {
        resize_sectors(&device);
        device.peers[0].release();
    }
    held.finish(PATIENCE).0.expect("the held request is answered");
    resize_sectors(&device);
}

fn resize_sectors(device: &Device) {
    assert_eq!(device.attribute("size"), Some((2 * SIZE / 512).to_string()));
}

fn opener() {
    let mut device = Device::connect(Make::default());
    netlink::disconnect(device.index).expect("DISCONNECT");
    std::thread::sleep(SECOND);
    assert!(device.attribute("pid").is_some(), "the opener keeps it");
    device.read(OURS).finish(SECOND).0.expect_err("its requests fail at once");
    let other = Device::connect(Make::default());
    assert_ne!(other.index, device.index, "and it is not given to somebody else");
    drop(other);
    device.close();
    let deadline = Instant::now() + PATIENCE;
    while device.attribute("pid").is_some() {
        assert!(Instant::now() < deadline, "free once the last opener has closed it");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// CONNECT without TIMEOUT leaves the queue's timer as it was; with TIMEOUT=0 it is 30 s again.
fn reused() {
    let first = Device::connect(Make { io_timeout_ms: Some(700), ..Make::default() });
    let index = first.index;
    drop(first);
    let again = Device::connect(Make { timeout_s: None, ..Make::default() });
    assert_eq!(again.index, index, "a free device is used again");
    assert_eq!(again.attribute("queue/io_timeout").as_deref(), Some("700"));
    drop(again);
    let third = Device::connect(Make::default());
    assert_eq!(third.index, index);
    assert_eq!(third.attribute("queue/io_timeout").as_deref(), Some("30000"));
}

/// What an owner does not offer, although its predecessor did: TRIM and FUA are gone, WRITE_ZEROES stays,
/// where the driver knows it, and whoever refuses it makes the request fail.
fn features_kept() {
    let limits = |device: &Device| {
        let value = |name: &str| device.attribute(name).expect(name).parse::<u64>().expect(name);
        ["discard", "write_zeroes"].map(|op| value(&format!("queue/{op}_max_bytes")) > 0)
    };
    let fua = |device: &Device| device.attribute("queue/fua").expect("queue/fua");
    let knows = kernel_is_at_least(6, 12);
    let first = Device::connect(Make { more_flags: FUA_TRIM_AND_ZEROES, ..Make::default() });
    let index = first.index;
    assert_eq!((limits(&first), fua(&first).as_str()), ([true, knows], "1"));
    drop(first);

    let again = Device::connect(Make::default());
    assert_eq!(again.index, index, "a free device is used again");
    println!("figures: [discard, write zeroes] are left: {:?}", limits(&again));
    assert_eq!((limits(&again), fua(&again).as_str()), ([false, knows], "0"));
    netlink::reconfigure(index, Some(&again.identifier), &[], Some(2 * SIZE)).expect("RECONFIGURE");
    assert_eq!(limits(&again), [false, knows], "a new size clears nothing");

    let node = again.node();
    shell(&format!("! blkdiscard -o {OURS} -l 65536 {node} 2>&1"));
    assert!(!again.peers[0].commands().contains(&TRIM), "what is not offered is not sent");
    shell(&format!("blkdiscard -z -o {OURS} -l 65536 {node}"));
    assert_eq!(again.peers[0].commands().contains(&WRITE_ZEROES), knows);
    again.peers[0].refuse(WRITE_ZEROES);
    let refused = shell(&format!("blkdiscard -z -o {OURS} -l 65536 {node} 2>&1 || true"));
    assert_eq!(refused.contains("Input/output error"), knows, "{refused}");
}
