//! Which sockets RECONFIGURE replaces, and how the kernel reports a dead or dropped socket.

use std::time::Duration;

use nix::errno::Errno;
use nix::sched::{CloneFlags, unshare};

use super::netlink::{self, Family, Links};
use super::peer::{Device, Io, Make, OURS, Peer};
use crate::fixture::{TIMEOUT, kernel_is_at_least};

pub(super) fn facts() -> Vec<(&'static str, fn())> {
    vec![
        ("reconfigure_replaces_dead_sockets_and_drops_others_silently", replaces_the_dead),
        ("reconfigure_right_after_a_death_may_come_too_early", too_early),
        ("reconfigure_is_refused_for_another_identifier_and_after_disconnect", refused),
        ("a_dead_socket_is_reported_only_by_multicast", reported),
        ("another_network_namespace_gets_no_events", namespace),
        ("a_duplicate_of_the_workers_socket_hides_its_death", hidden),
    ]
}

const MOMENT: Duration = Duration::from_millis(300);
const SECOND: Duration = Duration::from_secs(1);

fn works(device: &Device) {
    device.read(OURS).finish(TIMEOUT).0.expect("the device works");
}

fn replaces_the_dead() {
    let one = Device::connect(Make::default());
    let surplus = one.reconfigure();
    assert!(surplus.hangs_up(SECOND), "with no dead connection, the socket is dropped");
    works(&one);
    assert_eq!(one.peers[0].seen().len(), 1, "the old one stays in use");

    let four = Device::connect(Make { connections: 4, ..Make::default() });
    four.peers[2].die();
    std::thread::sleep(MOMENT);
    let (peers, ends): (Vec<_>, Vec<_>) = (0..3).map(|_| Peer::new()).unzip();
    four.reconfigure_with(ends).expect("more sockets than dead ones are no error");
    let dropped: Vec<bool> = peers.iter().map(|peer| peer.hangs_up(SECOND)).collect();
    assert_eq!(dropped, [false, true, true], "one socket for each dead one, in order");
    works(&four);
    for dead in [0, 1, 3] {
        four.peers[dead].die();
    }
    std::thread::sleep(MOMENT);
    works(&four);
    assert!(!peers[0].seen().is_empty(), "the accepted socket serves all requests");
}

/// The kernel's receiving thread detects the death of a socket a moment later.
fn too_early() {
    let mut dropped = 0;
    for _ in 0..20 {
        let device = Device::connect(Make::default());
        device.peers[0].die();
        let (_replacement, early) = device.replace();
        dropped += early;
        works(&device);
    }
    println!("figures: 20 deaths, each replaced at once: {dropped} sockets were sent too early");
}

fn refused() {
    let mut device = Device::connect(Make::default());
    device.peers[0].die();
    std::thread::sleep(MOMENT);
    let (peer, end) = Peer::new();
    let ends = [end];
    for identifier in [Some("facts.other"), None] {
        let refused = netlink::reconfigure(device.index, identifier, &ends, None);
        assert_eq!(refused, Err(Errno::EINVAL), "{identifier:?}");
    }
    device.reconfigure_with(ends.into()).expect("by the right identifier");
    assert!(!peer.hangs_up(MOMENT), "the refused socket was not used up");
    works(&device);

    netlink::disconnect(device.index).expect("DISCONNECT");
    assert!(device.attribute("pid").is_some(), "our opener keeps the configuration");
    let (late, end) = Peer::new();
    assert_eq!(device.reconfigure_with(vec![end]), Err(Errno::EINVAL), "after DISCONNECT");
    assert!(late.hangs_up(SECOND));
    device.read(OURS).finish(SECOND).0.expect_err("after DISCONNECT requests fail at once");
    device.close();
}

fn reported() {
    let links = Links::join(Family::find().expect("the family").group).expect("the group");
    let device = Device::connect(Make::default());
    device.peers[0].die();
    assert_eq!(links.next(TIMEOUT), Some(device.index), "LINK_DEAD");
    assert!(device.attribute("pid").is_some(), "sysfs shows it as configured all the same");
    assert_eq!(device.attribute("backend"), Some(device.identifier.clone()));
    assert_eq!(links.next(SECOND), None, "one event per death");
    let (_replacement, _) = device.replace();
    works(&device);
    // Several dead sockets cause one event each.
    let four = Device::connect(Make { connections: 4, ..Make::default() });
    four.peers[1].die();
    four.peers[3].die();
    assert_eq!([links.next(TIMEOUT), links.next(TIMEOUT)], [Some(four.index); 2]);
    assert_eq!(links.next(SECOND), None);
    // DISCONNECT causes no event; the peers receive NBD_CMD_DISC.
    netlink::disconnect(four.index).expect("DISCONNECT");
    assert_eq!(links.next(SECOND), None);
    assert!(four.peers[0].disconnected() && four.peers[2].disconnected());
}

/// As in a pod without hostNetwork: no event arrives there, and 6.1 accepts no commands from there.
fn namespace() {
    let group = Family::find().expect("the family").group;
    let here = Links::join(group).expect("the group");
    let device = Device::connect(Make::default());
    let (ready, started) = std::sync::mpsc::channel();
    let (go, gone) = std::sync::mpsc::channel();
    let (index, identifier) = (device.index, device.identifier.clone());
    let elsewhere = Io::start(move || {
        unshare(CloneFlags::CLONE_NEWNET).expect("a network namespace of its own");
        let links = Links::join(group).expect("the group can be joined");
        ready.send(()).expect("the test waits");
        let event = links.next(3 * SECOND);
        gone.recv().expect("the test continues");
        let (peer, end) = Peer::new();
        let commanded = netlink::reconfigure(index, Some(&identifier), &[end], None);
        (event, commanded, peer)
    });
    started.recv_timeout(TIMEOUT).expect("the thread has its namespace");
    device.peers[0].die();
    assert_eq!(here.next(TIMEOUT), Some(device.index));
    go.send(()).expect("the thread waits");
    let (event, commanded, _replacement) = elsewhere.finish(TIMEOUT).0;
    assert_eq!(event, None, "the event does not arrive there");
    if kernel_is_at_least(6, 12) {
        commanded.expect("RECONFIGURE");
        works(&device);
    } else {
        assert_eq!(commanded, Err(Errno::ENOENT), "there is no such family there");
    }
}

/// This would happen if a service manager's descriptor store held the sockets of workers.
fn hidden() {
    let links = Links::join(Family::find().expect("the family").group).expect("the group");
    let (ours, theirs) = std::os::unix::net::UnixStream::pair().expect("a pair");
    let mut device = Device::connect(Make::default());
    // The first peer answers the requests of the first open; a peer that never reads replaces it.
    device.peers.remove(0);
    assert_eq!(links.next(TIMEOUT), Some(device.index));
    device.reconfigure_with(vec![theirs.into()]).expect("RECONFIGURE");
    let copy = ours.try_clone().expect("a second descriptor");
    drop(ours);
    let read = device.read(OURS);
    assert_eq!(links.next(2 * SECOND), None, "the kernel sees a live connection");
    assert!(device.reconfigure().hangs_up(SECOND), "and accepts no other socket");
    assert!(read.hangs_for(MOMENT), "while no request is answered");
    drop(copy);
    assert_eq!(links.next(TIMEOUT), Some(device.index), "the last copy was what counted");
    let (_replacement, _) = device.replace();
    works(&device);
}
