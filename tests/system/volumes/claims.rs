//! Destructive commands on a claimed volume are refused while its holder may still run.

use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use serde_json::json;
use test_kit::ceph::POOL;

use crate::volumes::fixture::{User, changed, json, listed, rbd, uri, volume};

/// Waits until every watch of the image has timed out on the OSDs.
fn wait_for_watches_to_expire(image: &str) {
    let begun = Instant::now();
    while rbd(&["status", &format!("{POOL}/{image}")])["watchers"] != json!([]) {
        assert!(begun.elapsed() < Duration::from_secs(300), "the image is still watched");
        std::thread::sleep(Duration::from_millis(500));
    }
}

#[test]
fn a_claim_without_a_watcher_refuses_changes_until_take_over() {
    let (frozen_uri, dead_uri) = (uri("claim-frozen"), uri("dead"));
    for image in [&frozen_uri, &dead_uri] {
        assert!(changed(&["create", image, "16M"]));
    }
    let snapshot = uri("claim-frozen@s");
    assert!(changed(&["snapshot", "create", &snapshot]));
    // One client hangs, as behind a broken network, and one has died.
    let (frozen, dead) = (User::of(&frozen_uri), User::of(&dead_uri));
    assert!(frozen.writes());
    frozen.signal(Signal::SIGSTOP);
    dead.die();
    wait_for_watches_to_expire("claim-frozen");
    wait_for_watches_to_expire("dead");
    // The claim's process does not run on this node any more, so no client uses the volume.
    assert!(changed(&["remove", &dead_uri, "--now"]));

    let refused: [&[&str]; 4] = [
        &["snapshot", "rollback", &snapshot],
        &["resize", &frozen_uri, "8M", "--shrink"],
        &["remove", &frozen_uri],
        &["remove", &frozen_uri, "--now"],
    ];
    for words in refused {
        let printed = volume(words);
        let printed = printed.error(5);
        for part in ["is claimed by the node", "the mapping process-", "since 20", "--take-over"] {
            assert!(printed.contains(part), "{words:?}: {part}: {printed}");
        }
    }
    // Read-only commands succeed and do not fence the client.
    assert_eq!(json(&["info", &frozen_uri])["size_bytes"], 16 << 20);

    assert!(changed(&["snapshot", "rollback", &snapshot, "--take-over"]));
    // The stopped client resumes, and is fenced.
    frozen.signal(Signal::SIGCONT);
    assert!(!frozen.writes(), "the fenced client wrote to the rolled-back volume");
    assert!(changed(&["resize", &frozen_uri, "8M", "--shrink"]), "no client claims the volume");
    drop(frozen);
    assert!(changed(&["snapshot", "remove", &snapshot]));
    assert!(changed(&["remove", &frozen_uri, "--now"]));
    assert!(["claim-frozen", "dead"].iter().all(|name| !listed().contains(&(*name).to_owned())));
}

#[test]
fn a_client_is_fenced_only_with_take_over() {
    let image = uri("claim-wanted");
    assert!(changed(&["create", &image, "16M"]));
    let user = User::of(&image);
    let printed = volume(&["remove", &image, "--now"]);
    assert!(printed.error(5).contains("is in use by the node"), "{printed:?}");
    assert!(user.writes(), "a refusal does not fence the client");
    assert!(changed(&["resize", &image, "8M", "--shrink", "--take-over"]));
    assert!(!user.writes());
    drop(user);
    assert!(changed(&["remove", &image, "--now", "--take-over"]));
    assert!(!changed(&["remove", &image, "--take-over"]), "the volume does not exist any more");
}
