//! `cleat fence` on images that workers have.

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

/// The exit code, and what is said.
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

/// As the administrator, who may do everything.
fn as_admin(uri: &str) -> String {
    as_client("admin", uri)
}

fn as_client(id: &str, uri: &str) -> String {
    let [own, other] = [ID, id].map(|id| shared().keyring(id).display().to_string());
    uri.replace(&own, &other).replace(&format!("id={ID}"), &format!("id={id}"))
}

#[test]
fn a_client_is_cut_off_by_hand_and_let_in_again_once_it_is_gone() {
    let uri = fresh("by-hand");
    let (code, said) = refused(&["add", &uri, "--yes"]);
    assert!(code == 3 && said.contains("nobody may write"), "{code} {said}");
    // On this node, as the command has it: its end can be seen from here.
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

    // Not by accident, and nobody else.
    let (code, said) = refused(&["add", &uri]);
    assert!(code == 2 && said.contains(&address) && said.contains("--yes"), "{code} {said}");
    assert_eq!(refused(&["add", &uri, "--address", "1.2.3.4:0/5", "--yes"]).0, 3);
    assert_eq!(nbd::write(&sockets[0], 0, &[1; 4096]), 0);
    assert_eq!(result(&["add", &uri, "--yes"])["cut_off"], Value::from(vec![address.clone()]));
    assert_ne!(nbd::write(&sockets[0], 0, &[2; 4096]), 0);
    assert_eq!(worker.receive(), FromWorker::Fenced);
    let taken = client(&uri, &address);
    assert_eq!((&taken["claim"], &taken["holds_lock"]), (&"taken".into(), &false.into()));
    assert!(taken["cut_off_until"].as_str().unwrap().starts_with("20"), "{taken}");

    // Everybody may have it now, without being told to.
    let other = Start { mapping_id: "x".to_owned(), ..start.clone() };
    let mut next = Worker::launch();
    next.send_start(&other);
    assert!(matches!(next.receive(), FromWorker::Ready(_)));
    let theirs = next.serve(1);
    assert!(nbd::read(&theirs[0], 0, 4096) == [1; 4096]);

    // The loser lives: it is not let in. Nor is one that nothing is known of.
    let admin = as_admin(&uri);
    let (code, said) = refused(&["clear", &admin, &address]);
    assert!(code == 5 && said.contains("not let in again"), "{code} {said}");
    let (code, said) = refused(&["clear", &admin, "1.2.3.4:0/5"]);
    assert!(code == 5 && said.contains("whose client"), "{code} {said}");
    let holder = result(&["ls", &uri])["clients"][0]["address"].as_str().unwrap().to_owned();
    assert_eq!(refused(&["clear", &admin, &holder]).0, 5);
    worker.send(&ToWorker::Stop, &[]);
    assert!(worker.exit().success());
    // Gone; but this key may not.
    let (code, said) = refused(&["clear", &uri, &address]);
    assert!(code == 7 && said.contains("blocklistop=rm"), "{code} {said}");
    // What is recommended helps; for a key that nobody else uses.
    let clerk = as_client("clerk", &uri);
    let caps = ["mon", "profile rbd", "osd", "profile rbd pool=volumes"];
    let keyring = shared().keyring("clerk").display().to_string();
    let get = ["auth", "get-or-create", "client.clerk"];
    shared().ceph(&[&get[..], &caps, &["-o", &keyring]].concat());
    let (code, said) = refused(&["clear", &clerk, &address]);
    assert!(code == 7 && said.contains("ceph auth caps client.clerk"), "{code} {said}");
    // It is JSON.
    shared().grant(&said.replace("\\\"", "\"")).unwrap();
    assert_eq!(result(&["clear", &clerk, &address])["changed"], true);
    assert_eq!(result(&["clear", &admin, &address])["changed"], false);
    assert!(!shared().ceph(&["osd", "blocklist", "ls"]).contains(&address));
}

#[test]
fn what_cannot_be_fenced_says_so() {
    let (code, said) = refused(&["ls", "mem:1G"]);
    assert!(code == 8 && said.contains("one machine"), "{code} {said}");
    let uri = fresh("unfenced");
    assert_eq!(refused(&["ls", &format!("{uri}&lock=shared")]).0, 2);
    assert_eq!(refused(&["ls", &uri.replace("/unfenced", "/missing")]).0, 3);
    assert_eq!(refused(&["clear", &uri, "somewhere"]).0, 2);
    assert!(result(&["ls", &uri])["clients"].as_array().unwrap().is_empty());
}
