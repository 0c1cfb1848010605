//! Long operations: their progress, and what signals leave of them.

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

/// Waits until a line of its stderr has `text`; what comes later is read there.
fn wait_for(child: &mut Child, text: &str) -> BufReader<std::process::ChildStderr> {
    let mut stderr = BufReader::new(child.stderr.take().expect("it is piped"));
    let mut said = String::new();
    while !said.contains(text) {
        let begun = said.len();
        let read = stderr.read_line(&mut said).expect("it can be read");
        assert!(read > 0, "it ended before {text:?}: {said}");
        assert!(said.len() > begun);
    }
    stderr
}

fn signal(child: &Child, which: Signal) {
    kill(Pid::from_raw(child.id().cast_signed()), which).expect("it runs");
}

/// Runs a command, sends it a signal after its first progress, and gives its code and its last words.
fn interrupted(words: &[&str], which: Signal) -> (Option<i32>, String) {
    let mut child = spawn(words);
    let mut stderr = wait_for(&mut child, "%\n");
    signal(&child, which);
    let mut rest = String::new();
    stderr.read_to_string(&mut rest).expect("it can be read");
    (child.wait().expect("it ends").code(), rest)
}

fn info(name: &str) -> Value {
    rbd(&["info", &format!("{POOL}/{name}")])
}

#[test]
fn a_flattening_and_a_removal_are_ended_and_go_on_when_they_are_repeated() {
    many_objects("long", "32M");
    assert!(changed(&["snapshot", "create", &uri("long@s")]));
    assert!(changed(&["clone", &uri("long@s"), &uri("long-clone")]));
    let (code, said) = interrupted(&["flatten", &uri("long-clone")], Signal::SIGINT);
    assert_eq!(code, Some(6), "{said}");
    assert!(said.contains("SIGINT: ending"), "{said}");
    assert!(said.contains("still the clone that it was"), "{said}");
    assert!(said.contains("repeat the command"), "{said}");
    assert_eq!(info("long-clone")["parent"]["image"], "long");
    assert_eq!(json(&["info", &uri("long-clone")])["locks"], json!([]), "it was closed");
    assert!(changed_with_progress(&["flatten", &uri("long-clone")]));
    assert_eq!(info("long-clone")["parent"], json!(null));

    let (code, said) = interrupted(&["remove", &uri("long-clone"), "--now"], Signal::SIGTERM);
    assert_eq!(code, Some(6), "{said}");
    assert!(said.contains("still listed, with a part of its data gone"), "{said}");
    assert!(listed().contains(&"long-clone".to_owned()));
    assert!(changed_with_progress(&["remove", &uri("long-clone"), "--now"]));
    assert!(!listed().contains(&"long-clone".to_owned()));
    assert!(!changed(&["remove", &uri("long-clone"), "--now"]));

    let (code, said) = interrupted(&["snapshot", "rollback", &uri("long@s")], Signal::SIGINT);
    assert_eq!(code, Some(6), "{said}");
    assert!(changed_with_progress(&["snapshot", "rollback", &uri("long@s")]));
    assert!(changed(&["snapshot", "remove", &uri("long@s")]));

    run_rbd(shared(), &["trash", "mv", &format!("{POOL}/long")]);
    let trash = json(&["trash", "list", &crate::volumes::fixture::place("")])["trash"].clone();
    let entry = trash.as_array().expect("a list").iter().find(|entry| entry["name"] == "long");
    let id = entry.expect("it lies there")["id"].as_str().expect("an id").to_owned();
    let purge = ["trash", "purge", &crate::volumes::fixture::place(""), &id];
    let (code, said) = interrupted(&purge, Signal::SIGINT);
    assert_eq!(code, Some(6), "{said}");
    assert!(said.contains(&format!("{id} (long) is still in the trash")), "{said}");
    assert_eq!(volume(&purge).code, 0);
    assert_eq!(volume(&purge).code, 3, "nothing of it is left");
}

/// Whoever has the volume open does the work, and goes on with it whatever becomes of who asked.
#[test]
fn a_flattening_under_a_user_is_finished_by_it_or_by_repeating() {
    many_objects("flattened", "32M");
    assert!(changed(&["snapshot", "create", &uri("flattened@s")]));
    for (name, which) in [("flattened-told", Signal::SIGINT), ("used-killed", Signal::SIGKILL)] {
        let clone = uri(name);
        assert!(changed(&["clone", &uri("flattened@s"), &clone]));
        let user = User::of(&clone);
        let mut child = spawn(&["flatten", &clone]);
        let mut stderr = wait_for(&mut child, "%\n");
        signal(&child, which);
        let mut said = String::new();
        stderr.read_to_string(&mut said).expect("it can be read");
        match end(child.wait().expect("it ends")) {
            (Some(0), None) => {}
            (Some(6), None) => assert!(said.contains("may still go on"), "{said}"),
            killed => assert_eq!(killed, (None, Some(which as i32)), "{said}"),
        }
        assert!(user.writes());
        let again = volume(&["flatten", &clone]);
        assert_eq!(again.code, 0, "{again:?}");
        assert_eq!(info(name)["parent"], json!(null));
        // Growing is one step, which is done or not.
        let mut child = spawn(&["resize", &clone, "64M"]);
        signal(&child, which);
        child.wait().expect("it ends");
        changed(&["resize", &clone, "64M"]);
        assert_eq!(info(name)["size"], 64 << 20);
        assert!(user.writes());
    }
}

#[test]
fn a_rollback_that_was_killed_is_in_the_way_until_it_is_given_up_or_cut_off() {
    many_objects("torn", "32M");
    assert!(changed(&["snapshot", "create", &uri("torn@s")]));
    let rollback = ["snapshot", "rollback", &uri("torn@s")];
    let mut child = spawn(&rollback);
    drop(wait_for(&mut child, "%\n"));
    signal(&child, Signal::SIGKILL);
    child.wait().expect("it ends");
    let refused = volume(&rollback);
    assert!(refused.error(5).contains("about 30 s later"), "{refused:?}");
    assert!(changed(&[&rollback[..], &["--take-over"]].concat()));
    assert!(changed(&["snapshot", "remove", &uri("torn@s")]));
    assert!(changed(&["remove", &uri("torn"), "--now"]));
}

#[test]
fn the_second_signal_ends_it_at_once() {
    // It takes the OSD of its own away, so that nothing ends by itself.
    let cluster = Cluster::start();
    let image = format!("rbd:{POOL}/stuck?{}", options_of(&cluster, ID));
    assert!(changed(&["create", &image, "64M"]));
    cluster.tell("pause osd");
    let mut child = spawn(&["remove", &image, "--now"]);
    // It catches signals before it does anything else; this one may still come too early for that.
    let begun = std::time::Instant::now();
    let status = format!("/proc/{}/status", child.id());
    while !catches(&status) {
        assert!(begun.elapsed().as_secs() < 120, "it does not catch signals");
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    signal(&child, Signal::SIGINT);
    drop(wait_for(&mut child, "once more ends it at once"));
    signal(&child, Signal::SIGTERM);
    let status = child.wait().expect("it ends");
    assert_eq!(end(status), (None, Some(Signal::SIGTERM as i32)));
    cluster.tell("resume osd");
}

/// Whether SIGINT and SIGTERM are blocked, for a thread of their own.
fn catches(status: &str) -> bool {
    let text = std::fs::read_to_string(status).expect("it runs");
    let line = text.lines().find_map(|line| line.strip_prefix("SigBlk:")).expect("a line");
    let blocked = u64::from_str_radix(line.trim(), 16).expect("a mask");
    let mask = 1 << (Signal::SIGINT as u64 - 1) | 1 << (Signal::SIGTERM as u64 - 1);
    blocked & mask == mask
}

/// Runs a long command to its end, and checks what it tells on the way.
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
    assert!(last > 0, "it told nothing: {run:?}");
    run.json()["changed"].as_bool().expect("a flag")
}

#[test]
fn a_server_whose_volume_does_not_open_ends_when_it_is_told_to() {
    let cluster = Cluster::start();
    let image = format!("rbd:{POOL}/slow?{}", options_of(&cluster, ID));
    assert!(changed(&["create", &image, "8M"]));
    cluster.tell("pause osd");
    let mut ends = Vec::new();
    for which in [Signal::SIGINT, Signal::SIGTERM] {
        // Where the test itself was held up, the limit may have come first.
        let end =
            (0..3).map(|_| told_while_opening(&image, which)).find(|(code, _)| *code != Some(10));
        ends.push(end.expect("the signal is heard before the limit"));
    }
    cluster.tell("resume osd");
    for (code, said) in ends {
        assert_eq!(code, Some(6), "{said}");
        assert!(said.contains("ended by a signal before it was open"), "{said}");
    }
    // What was claimed halfway is in nobody's way.
    assert!(changed(&["remove", &image, "--now"]));
}

/// How a server ends that is told to as soon as it catches signals.
fn told_while_opening(uri: &str, which: Signal) -> (Option<i32>, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_cleat"));
    let command = clean(command.args(["serve", uri, "--listen", "127.0.0.1:0"]));
    let mut server = command.stderr(Stdio::piped()).spawn().expect("it runs");
    let status = format!("/proc/{}/status", server.id());
    let blocks = || {
        let status = std::fs::read_to_string(&status).expect("it runs");
        let mask = status.lines().find_map(|line| line.strip_prefix("SigBlk:")).expect("a mask");
        u64::from_str_radix(mask.trim(), 16).expect("a number") & 1 << (which as i32 - 1) != 0
    };
    while !blocks() {
        std::thread::yield_now();
    }
    signal(&server, which);
    let mut said = String::new();
    let stderr = server.stderr.as_mut().expect("it is piped");
    stderr.read_to_string(&mut said).expect("it can be read");
    (server.wait().expect("it ends").code(), said)
}
