//! Data are not taken from under a claim whose holder is not heard of, and may come back.

use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use serde_json::json;
use test_kit::ceph::POOL;

use crate::volumes::fixture::{User, changed, json, listed, rbd, uri, volume};

/// Waits until the OSDs have given up every client of the image.
fn forgotten(image: &str) {
    let begun = Instant::now();
    while rbd(&["status", &format!("{POOL}/{image}")])["watchers"] != json!([]) {
        assert!(begun.elapsed() < Duration::from_secs(300), "it is watched");
        std::thread::sleep(Duration::from_millis(500));
    }
}

#[test]
fn a_claim_without_a_watcher_is_in_the_way_until_it_is_cut_off() {
    let (frozen_uri, dead_uri) = (uri("frozen"), uri("dead"));
    for image in [&frozen_uri, &dead_uri] {
        assert!(changed(&["create", image, "16M"]));
    }
    let snapshot = uri("frozen@s");
    assert!(changed(&["snapshot", "create", &snapshot]));
    // One that hangs, as it would behind a broken network, and one that has died.
    let (frozen, dead) = (User::of(&frozen_uri), User::of(&dead_uri));
    assert!(frozen.writes());
    frozen.signal(Signal::SIGSTOP);
    dead.die();
    forgotten("frozen");
    forgotten("dead");
    // Its process is gone from this node, which is proof.
    assert!(changed(&["remove", &dead_uri, "--now"]));

    let refused: [&[&str]; 4] = [
        &["snapshot", "rollback", &snapshot],
        &["resize", &frozen_uri, "8M", "--shrink"],
        &["remove", &frozen_uri],
        &["remove", &frozen_uri, "--now"],
    ];
    for words in refused {
        let said = volume(words);
        let said = said.error(5);
        for part in ["is claimed by the node", "the mapping process-", "since 20", "--take-over"] {
            assert!(said.contains(part), "{words:?}: {part}: {said}");
        }
    }
    // What takes nothing away is done all the same, and cuts nobody off.
    assert_eq!(json(&["info", &frozen_uri])["size_bytes"], 16 << 20);

    assert!(changed(&["snapshot", "rollback", &snapshot, "--take-over"]));
    // It comes back, and has lost.
    frozen.signal(Signal::SIGCONT);
    assert!(!frozen.writes(), "it writes over what was rolled back");
    assert!(changed(&["resize", &frozen_uri, "8M", "--shrink"]), "nobody is in the way");
    drop(frozen);
    assert!(changed(&["snapshot", "remove", &snapshot]));
    assert!(changed(&["remove", &frozen_uri, "--now"]));
    assert!(["frozen", "dead"].iter().all(|name| !listed().contains(&(*name).to_owned())));
}

#[test]
fn who_has_it_open_is_cut_off_by_order_only() {
    let image = uri("wanted");
    assert!(changed(&["create", &image, "16M"]));
    let user = User::of(&image);
    let said = volume(&["remove", &image, "--now"]);
    assert!(said.error(5).contains("is in use by the node"), "{said:?}");
    assert!(user.writes(), "a refusal changes nothing");
    assert!(changed(&["resize", &image, "8M", "--shrink", "--take-over"]));
    assert!(!user.writes());
    drop(user);
    assert!(changed(&["remove", &image, "--now", "--take-over"]));
    assert!(!changed(&["remove", &image, "--take-over"]), "it is gone");
}
