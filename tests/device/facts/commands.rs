//! Commands that block: what they block in turn, and what ends them. And the state that a device keeps
//! after it is disconnected.

use std::time::{Duration, Instant};

use nix::errno::Errno;

use super::netlink::{self, Family};
use super::peer::{Device, FUA_TRIM_AND_ZEROES, Io, Make, OURS, Peer, SIZE};
use crate::fixture::{TIMEOUT, kernel_is_at_least, shell};
use test_kit::nbd::wire::{TRIM, WRITE_ZEROES};
use test_kit::stopwatch::Stopwatch;

pub(super) fn facts() -> Vec<(&'static str, fn())> {
    vec![
        ("a_stuck_disconnect_blocks_every_command_until_the_peer_dies", stuck_disconnect),
        ("disconnect_fails_requests_in_flight", disconnect_fails_requests),
        ("resize_with_a_request_that_is_never_answered", resize_under_load),
        ("an_opener_keeps_a_disconnected_device_configured", opener),
        ("a_reused_device_keeps_the_io_timeout_of_its_last_owner", reused),
        ("a_reused_device_keeps_write_zeroes_of_its_last_owner", features_kept),
    ]
}

const MOMENT: Duration = Duration::from_millis(300);
const SECOND: Duration = Duration::from_secs(1);

/// The peer does not read, and writes fill the socket. The next command that sends to the peer blocks, and
/// holds the lock of all generic netlink commands.
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
        "figures: behind a stuck DISCONNECT: another device's command hangs: {}, the lookup of the family: {}, another family's command: {}",
        reconfigure.hangs_for(MOMENT),
        lookup.hangs_for(MOMENT),
        other_family.hangs_for(MOMENT)
    );
    assert!(reconfigure.hangs_for(MOMENT), "commands for another device wait");
    let start = Stopwatch::start();
    assert!(device.attribute("pid").is_some() && bystander.attribute("size").is_some());
    assert!(start.elapsed() < SECOND, "sysfs can be read meanwhile");
    bystander.read(OURS).finish(TIMEOUT).0.expect("I/O of other devices continues");
    assert!(disconnect.hangs_for(5 * SECOND), "no timer ends it");

    let released = Instant::now();
    deaf.die();
    disconnect.finish(TIMEOUT).0.expect("the peer's death ends it");
    assert_eq!(reconfigure.finish(TIMEOUT).0, Ok(()), "and every waiting command");
    println!("figures: {:.1?} after the peer's death both commands were done", released.elapsed());
    for write in writes {
        write.finish(TIMEOUT).0.expect_err("requests in flight have failed");
    }
}

/// Requests that a live peer does not answer fail at the DISCONNECT, not by a timer.
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
    // The same applies to the requests of a dead socket.
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

/// Tests whether a resize waits for requests in flight and blocks all other commands meanwhile.
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
    println!("figures: a resize with a request in flight waits: {waits}");
    assert_eq!(waits, expected, "as observed on this kernel");
    if waits {
        let lookup = Io::start(|| Family::find().map(drop));
        let other = Io::start(|| netlink::disconnect(9999));
        let read = device.read(OURS + 8192);
        assert!(read.hangs_for(SECOND), "new requests wait behind it");
        assert!(other.hangs_for(SECOND), "commands for other devices, too");
        println!("figures: the lookup of the family waits: {}", lookup.hangs_for(MOMENT));
        device.peers[0].release();
        resize.finish(TIMEOUT).0.expect("once the request is answered");
        assert_eq!(other.finish(TIMEOUT).0, Err(Errno::EINVAL), "no such device");
        read.finish(TIMEOUT).0.expect("new requests continue");
    } else {
        resize_sectors(&device);
        device.peers[0].release();
    }
    held.finish(TIMEOUT).0.expect("the held request is answered");
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
    assert_ne!(other.index, device.index, "CONNECT does not choose the device meanwhile");
    drop(other);
    device.close();
    let deadline = Instant::now() + TIMEOUT;
    while device.attribute("pid").is_some() {
        assert!(Instant::now() < deadline, "free once the last opener has closed it");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Connects the device `index` once more. CONNECT chooses a free device, and a process that opens a disconnected
/// device makes it busy for a moment (nbd_open); then this tries again.
fn connect_again(index: u32, timeout_s: Option<u64>) -> Device {
    for _ in 0..50 {
        let device = Device::connect(Make { timeout_s, ..Make::default() });
        if device.index == index {
            return device;
        }
        drop(device);
        std::thread::sleep(Duration::from_millis(100));
    }
    panic!("a free device is used again");
}

/// CONNECT without TIMEOUT keeps the queue's timer; with TIMEOUT=0 it resets the timer to 30 s.
fn reused() {
    let first = Device::connect(Make { io_timeout_ms: Some(700), ..Make::default() });
    let index = first.index;
    drop(first);
    let again = connect_again(index, None);
    assert_eq!(again.attribute("queue/io_timeout").as_deref(), Some("700"));
    drop(again);
    let third = connect_again(index, Make::default().timeout_s);
    assert_eq!(third.attribute("queue/io_timeout").as_deref(), Some("30000"));
}

/// The next owner of a device offers fewer features than the last one. TRIM and FUA are cleared.
/// WRITE_ZEROES stays, if the driver supports it, and an owner that refuses it makes the request fail.
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
    let again = connect_again(index, Make::default().timeout_s);
    println!("figures: [discard, write zeroes] are left: {:?}", limits(&again));
    assert_eq!((limits(&again), fua(&again).as_str()), ([false, knows], "0"));
    netlink::reconfigure(index, Some(&again.identifier), &[], Some(2 * SIZE)).expect("RECONFIGURE");
    assert_eq!(limits(&again), [false, knows], "a new size clears nothing");

    let node = again.node();
    shell(&format!("fails blkdiscard -o {OURS} -l 65536 {node}"));
    assert!(!again.peers[0].commands().contains(&TRIM), "what is not offered is not sent");
    shell(&format!("blkdiscard -z -o {OURS} -l 65536 {node}"));
    assert_eq!(again.peers[0].commands().contains(&WRITE_ZEROES), knows);
    again.peers[0].refuse(WRITE_ZEROES);
    let refused = shell(&format!("blkdiscard -z -o {OURS} -l 65536 {node} 2>&1 || true"));
    assert_eq!(refused.contains("Input/output error"), knows, "{refused}");
}
