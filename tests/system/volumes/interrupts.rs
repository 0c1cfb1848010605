//! Long operations: their progress, and their state after an interruption by a signal.

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, Stdio};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};
use test_kit::ceph::{Cluster, ID, POOL, shared};

use crate::volumes::fixture::{
    User, changed, clean, end, json, listed, many_objects, options_of, rbd, run_rbd, spawn, uri,
    volume,
};

/// Reads the child's stderr until it contains `text`, and returns the reader for the rest.
fn wait_for(child: &mut Child, text: &str) -> BufReader<std::process::ChildStderr> {
    let mut stderr = BufReader::new(child.stderr.take().expect("standard error is piped"));
    let mut printed = String::new();
    while !printed.contains(text) {
        let begun = printed.len();
        let read = stderr.read_line(&mut printed).expect("standard error is readable");
        assert!(read > 0, "cleat exited before {text:?}: {printed}");
        assert!(printed.len() > begun);
    }
    stderr
}

fn signal(child: &Child, which: Signal) {
    kill(Pid::from_raw(child.id().cast_signed()), which).expect("cleat runs");
}

/// Runs a command, sends it a signal after its first progress line, and returns its exit code and its
/// later output.
fn interrupted(words: &[&str], which: Signal) -> (Option<i32>, String) {
    let mut child = spawn(words);
    let mut stderr = wait_for(&mut child, "%\n");
    signal(&child, which);
    let mut rest = String::new();
    stderr.read_to_string(&mut rest).expect("standard error is readable");
    (child.wait().expect("cleat exits").code(), rest)
}

fn info(name: &str) -> Value {
    rbd(&["info", &format!("{POOL}/{name}")])
}

#[test]
fn interrupted_operations_continue_when_they_are_repeated() {
    many_objects("long", "32M");
    assert!(changed(&["snapshot", "create", &uri("long@s")]));
    assert!(changed(&["clone", &uri("long@s"), &uri("long-clone")]));
    let (code, printed) = interrupted(&["flatten", &uri("long-clone")], Signal::SIGINT);
    assert_eq!(code, Some(6), "{printed}");
    assert!(printed.contains("SIGINT: stopping"), "{printed}");
    assert!(printed.contains("it is still a clone"), "{printed}");
    assert!(printed.contains("repeat the command"), "{printed}");
    assert_eq!(info("long-clone")["parent"]["image"], "long");
    assert_eq!(json(&["info", &uri("long-clone")])["locks"], json!([]), "the image was closed");
    assert!(changed_with_progress(&["flatten", &uri("long-clone")]));
    assert_eq!(info("long-clone")["parent"], json!(null));

    let (code, printed) = interrupted(&["remove", &uri("long-clone"), "--now"], Signal::SIGTERM);
    assert_eq!(code, Some(6), "{printed}");
    assert!(printed.contains("still listed, with a part of its data removed"), "{printed}");
    assert!(listed().contains(&"long-clone".to_owned()));
    assert!(changed_with_progress(&["remove", &uri("long-clone"), "--now"]));
    assert!(!listed().contains(&"long-clone".to_owned()));
    assert!(!changed(&["remove", &uri("long-clone"), "--now"]));

    let (code, printed) = interrupted(&["snapshot", "rollback", &uri("long@s")], Signal::SIGINT);
    assert_eq!(code, Some(6), "{printed}");
    assert!(changed_with_progress(&["snapshot", "rollback", &uri("long@s")]));
    assert!(changed(&["snapshot", "remove", &uri("long@s")]));

    run_rbd(shared(), &["trash", "mv", &format!("{POOL}/long")]);
    let trash = json(&["trash", "list", &crate::volumes::fixture::place("")])["trash"].clone();
    let entry = trash.as_array().expect("a list").iter().find(|entry| entry["name"] == "long");
    let id = entry.expect("the image is in the trash")["id"].as_str().expect("an id").to_owned();
    let purge = ["trash", "purge", &crate::volumes::fixture::place(""), &id];
    let (code, printed) = interrupted(&purge, Signal::SIGINT);
    assert_eq!(code, Some(6), "{printed}");
    assert!(printed.contains(&format!("{id} (long) is still in the trash")), "{printed}");
    assert_eq!(volume(&purge).code, 0);
    assert_eq!(volume(&purge).code, 3, "the image does not exist any more");
}

/// The client that has the volume open executes the operation, and completes it if the command is killed.
#[test]
fn a_flatten_of_a_volume_in_use_completes_there_or_when_it_is_repeated() {
    many_objects("flattened", "32M");
    assert!(changed(&["snapshot", "create", &uri("flattened@s")]));
    for (name, which) in [("flattened-stopped", Signal::SIGINT), ("used-killed", Signal::SIGKILL)] {
        let clone = uri(name);
        assert!(changed(&["clone", &uri("flattened@s"), &clone]));
        let user = User::of(&clone);
        let mut child = spawn(&["flatten", &clone]);
        let mut stderr = wait_for(&mut child, "%\n");
        signal(&child, which);
        let mut printed = String::new();
        stderr.read_to_string(&mut printed).expect("standard error is readable");
        match end(child.wait().expect("cleat exits")) {
            (Some(0), None) => {}
            (Some(6), None) => assert!(printed.contains("may still continue"), "{printed}"),
            killed => assert_eq!(killed, (None, Some(which as i32)), "{printed}"),
        }
        assert!(user.writes());
        let again = volume(&["flatten", &clone]);
        assert_eq!(again.code, 0, "{again:?}");
        assert_eq!(info(name)["parent"], json!(null));
        // A resize is one step: it is done completely or not at all.
        let mut child = spawn(&["resize", &clone, "64M"]);
        signal(&child, which);
        child.wait().expect("cleat exits");
        changed(&["resize", &clone, "64M"]);
        assert_eq!(info(name)["size"], 64 << 20);
        assert!(user.writes());
    }
}

#[test]
fn a_killed_rollback_holds_the_volume_until_its_watch_expires_or_take_over() {
    many_objects("torn", "32M");
    assert!(changed(&["snapshot", "create", &uri("torn@s")]));
    let rollback = ["snapshot", "rollback", &uri("torn@s")];
    let mut child = spawn(&rollback);
    drop(wait_for(&mut child, "%\n"));
    signal(&child, Signal::SIGKILL);
    child.wait().expect("cleat exits");
    let refused = volume(&rollback);
    assert!(refused.error(5).contains("about 30 s later"), "{refused:?}");
    assert!(changed(&[&rollback[..], &["--take-over"]].concat()));
    assert!(changed(&["snapshot", "remove", &uri("torn@s")]));
    assert!(changed(&["remove", &uri("torn"), "--now"]));
}

#[test]
fn a_second_signal_kills_the_command_at_once() {
    // The OSD of a separate cluster is paused, so that the command does not end by itself.
    let cluster = Cluster::start();
    let image = format!("rbd:{POOL}/stuck?{}", options_of(&cluster, ID));
    assert!(changed(&["create", &image, "64M"]));
    cluster.tell("pause osd");
    let mut child = spawn(&["remove", &image, "--now"]);
    // The command catches signals at its start; wait for that, so that the signal is not too early.
    let begun = std::time::Instant::now();
    let status = format!("/proc/{}/status", child.id());
    while !catches_signals(&status) {
        assert!(begun.elapsed().as_secs() < 120, "cleat does not catch signals");
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    signal(&child, Signal::SIGINT);
    drop(wait_for(&mut child, "send it again to stop at once"));
    signal(&child, Signal::SIGTERM);
    let status = child.wait().expect("cleat exits");
    assert_eq!(end(status), (None, Some(Signal::SIGTERM as i32)));
    cluster.tell("resume osd");
}

/// Returns whether SIGINT and SIGTERM are blocked, as the signal thread needs it.
fn catches_signals(status: &str) -> bool {
    let text = std::fs::read_to_string(status).expect("cleat runs");
    let line = text.lines().find_map(|line| line.strip_prefix("SigBlk:")).expect("a line");
    let blocked = u64::from_str_radix(line.trim(), 16).expect("a mask");
    let mask = 1 << (Signal::SIGINT as u64 - 1) | 1 << (Signal::SIGTERM as u64 - 1);
    blocked & mask == mask
}

/// Runs a long command to its end, checks its progress output, and returns whether it changed anything.
fn changed_with_progress(words: &[&str]) -> bool {
    let run = volume(&[words, &["-o", "json"]].concat());
    assert_eq!(run.code, 0, "{run:?}");
    let mut last = 0;
    for line in run.stderr.lines() {
        let step: Value = serde_json::from_str(line).expect("JSON");
        let number = |key: &str| step["progress"][key].as_u64().expect("a number");
        assert!(number("done") >= last && number("done") <= number("total"), "{}", run.stderr);
        last = number("done");
    }
    assert!(last > 0, "no progress was printed: {run:?}");
    run.json()["changed"].as_bool().expect("a flag")
}

#[test]
fn a_server_that_opens_its_volume_exits_on_a_signal() {
    let cluster = Cluster::start();
    let image = format!("rbd:{POOL}/slow?{}", options_of(&cluster, ID));
    assert!(changed(&["create", &image, "8M"]));
    cluster.tell("pause osd");
    let mut ends = Vec::new();
    for which in [Signal::SIGINT, Signal::SIGTERM] {
        // If the test was delayed, the time limit may have expired before the signal.
        let end =
            (0..3).map(|_| signal_while_opening(&image, which)).find(|(code, _)| *code != Some(10));
        ends.push(end.expect("the signal arrives before the time limit"));
    }
    cluster.tell("resume osd");
    for (code, printed) in ends {
        assert_eq!(code, Some(6), "{printed}");
        assert!(printed.contains("a signal arrived before the volume was open"), "{printed}");
    }
    // The incomplete claim does not block the removal.
    assert!(changed(&["remove", &image, "--now"]));
}

/// Starts a server, sends it a signal as soon as it catches signals, and returns its code and its log.
fn signal_while_opening(uri: &str, which: Signal) -> (Option<i32>, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_cleat"));
    let command = clean(command.args(["serve", uri, "--listen", "127.0.0.1:0"]));
    let mut server = command.stderr(Stdio::piped()).spawn().expect("cleat runs");
    let status = format!("/proc/{}/status", server.id());
    let blocks = || {
        let status = std::fs::read_to_string(&status).expect("cleat runs");
        let mask = status.lines().find_map(|line| line.strip_prefix("SigBlk:")).expect("a mask");
        u64::from_str_radix(mask.trim(), 16).expect("a number") & 1 << (which as i32 - 1) != 0
    };
    while !blocks() {
        std::thread::yield_now();
    }
    signal(&server, which);
    let mut printed = String::new();
    let stderr = server.stderr.as_mut().expect("standard error is piped");
    stderr.read_to_string(&mut printed).expect("standard error is readable");
    (server.wait().expect("cleat exits").code(), printed)
}
