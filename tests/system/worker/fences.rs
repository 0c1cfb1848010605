//! `cleat fence` on images that workers have open.

use std::process::{Command, Output};

use cleat_worker::protocol::{FromWorker, Start, ToWorker};
use serde_json::Value;
use test_kit::ceph::{ID, shared};

use crate::worker::rbd::fresh;
use test_kit::nbd::kernel as nbd;
use test_kit::worker::{Worker, start_message};

fn cleat(arguments: &[&str]) -> Output {
    let cleat = env!("CARGO_BIN_EXE_cleat");
    Command::new(cleat).arg("fence").args(arguments).args(["-o", "json"]).output().unwrap()
}

fn result(arguments: &[&str]) -> Value {
    let output = cleat(arguments);
    let complaint = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{arguments:?}: {complaint}");
    serde_json::from_slice(&output.stdout).unwrap()
}

/// Checks that the command prints no result, and returns its exit code and its standard error output.
fn refused(arguments: &[&str]) -> (i32, String) {
    let output = cleat(arguments);
    assert!(output.stdout.is_empty(), "{output:?}");
    (output.status.code().unwrap(), String::from_utf8(output.stderr).unwrap())
}

fn client(uri: &str, address: &str) -> Value {
    let listed = result(&["ls", uri]);
    let clients = listed["clients"].as_array().unwrap();
    let found = clients.iter().find(|client| client["address"] == address);
    found.unwrap_or_else(|| panic!("{address}: {listed}")).clone()
}

/// Returns the URI with the administrator's key.
fn as_admin(uri: &str) -> String {
    as_client("admin", uri)
}

fn as_client(id: &str, uri: &str) -> String {
    let [own, other] = [ID, id].map(|id| shared().keyring(id).display().to_string());
    uri.replace(&own, &other).replace(&format!("id={ID}"), &format!("id={id}"))
}

#[test]
fn a_client_can_be_fenced_by_hand_and_cleared_once_it_is_dead() {
    let uri = fresh("by-hand");
    let (code, printed) = refused(&["add", &uri, "--yes"]);
    assert!(code == 3 && printed.contains("no client may write"), "{code} {printed}");
    // The claim has this node's boot id, so the command can check whether the process runs.
    let boot_id = cleat_backend::claimant::boot_id().unwrap();
    let start = Start { boot_id, mapping_id: "m".to_owned(), ..start_message(&uri) };
    let mut worker = Worker::launch();
    worker.send_start(&start);
    assert!(matches!(worker.receive(), FromWorker::Ready(_)));
    let sockets = worker.serve(1);
    let listed = result(&["ls", &uri]);
    let address = listed["clients"][0]["address"].as_str().unwrap().to_owned();
    let held = client(&uri, &address);
    assert_eq!((&held["claim"], &held["node"]), (&"held".into(), &"node-a".into()), "{held}");
    assert_eq!((&held["holds_lock"], &held["watches"]), (&true.into(), &true.into()), "{held}");
    assert_eq!(held["cut_off_until"], Value::Null, "{held}");

    // Without `--yes`, or with the address of another client, no client is fenced.
    let (code, printed) = refused(&["add", &uri]);
    assert!(
        code == 2 && printed.contains(&address) && printed.contains("--yes"),
        "{code} {printed}"
    );
    assert_eq!(refused(&["add", &uri, "--address", "1.2.3.4:0/5", "--yes"]).0, 3);
    assert_eq!(nbd::write(&sockets[0], 0, &[1; 4096]), 0);
    assert_eq!(result(&["add", &uri, "--yes"])["cut_off"], Value::from(vec![address.clone()]));
    assert_ne!(nbd::write(&sockets[0], 0, &[2; 4096]), 0);
    assert_eq!(worker.receive(), FromWorker::Fenced);
    let taken = client(&uri, &address);
    assert_eq!((&taken["claim"], &taken["holds_lock"]), (&"taken".into(), &false.into()));
    assert!(taken["cut_off_until"].as_str().unwrap().starts_with("20"), "{taken}");

    // Now another mapping can claim the volume, without a take-over.
    let other = Start { mapping_id: "x".to_owned(), ..start.clone() };
    let mut next = Worker::launch();
    next.send_start(&other);
    assert!(matches!(next.receive(), FromWorker::Ready(_)));
    let theirs = next.serve(1);
    assert!(nbd::read(&theirs[0], 0, 4096) == [1; 4096]);

    // The fence of a running client is not cleared; neither is that of an unknown client.
    let admin = as_admin(&uri);
    let (code, printed) = refused(&["clear", &admin, &address]);
    assert!(code == 5 && printed.contains("not removed from the blocklist"), "{code} {printed}");
    let (code, printed) = refused(&["clear", &admin, "1.2.3.4:0/5"]);
    assert!(code == 5 && printed.contains("whose client"), "{code} {printed}");
    let holder = result(&["ls", &uri])["clients"][0]["address"].as_str().unwrap().to_owned();
    assert_eq!(refused(&["clear", &admin, &holder]).0, 5);
    worker.send(&ToWorker::Stop, &[]);
    assert!(worker.exit().success());
    // The client is dead, but this key has no right to clear its fence.
    let (code, printed) = refused(&["clear", &uri, &address]);
    assert!(code == 7 && printed.contains("blocklistop=rm"), "{code} {printed}");
    // The recommended command grants the right; this key is used by no other test.
    let clerk = as_client("clerk", &uri);
    let caps = ["mon", "profile rbd", "osd", "profile rbd pool=volumes"];
    let keyring = shared().keyring("clerk").display().to_string();
    let get = ["auth", "get-or-create", "client.clerk"];
    shared().ceph(&[&get[..], &caps, &["-o", &keyring]].concat());
    let (code, printed) = refused(&["clear", &clerk, &address]);
    assert!(code == 7 && printed.contains("ceph auth caps client.clerk"), "{code} {printed}");
    // The message is in JSON, so quotes are escaped.
    shared().grant(&printed.replace("\\\"", "\"")).unwrap();
    assert_eq!(result(&["clear", &clerk, &address])["changed"], true);
    assert_eq!(result(&["clear", &admin, &address])["changed"], false);
    assert!(!shared().ceph(&["osd", "blocklist", "ls"]).contains(&address));
}

#[test]
fn fence_refuses_volumes_that_do_not_support_fencing() {
    let (code, printed) = refused(&["ls", "mem:1G"]);
    assert!(code == 8 && printed.contains("do not support fencing"), "{code} {printed}");
    let uri = fresh("unfenced");
    assert_eq!(refused(&["ls", &format!("{uri}&lock=shared")]).0, 2);
    assert_eq!(refused(&["ls", &uri.replace("/unfenced", "/missing")]).0, 3);
    assert_eq!(refused(&["clear", &uri, "somewhere"]).0, 2);
    assert!(result(&["ls", &uri])["clients"].as_array().unwrap().is_empty());
}
