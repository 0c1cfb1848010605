//! The command line: messages, exit codes and output formats, without a daemon, with a wrong server, and
//! with a scripted daemon.

pub(crate) mod csi;
mod daemon;
mod node;

use std::fs;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use cleat_api::v1::{self, MappingState, Unmount};
use serde_json::Value;
use tempfile::TempDir;
use tonic::Code;

use daemon::{Daemon, REPAIR, Script, Seen, mapping};

const NOWHERE: &str = "/nonexistent/cleat.sock";

#[test]
fn each_wrong_input_has_a_message_of_its_own() {
    let cases = [
        ("", "no command was given"),
        ("frob", "unrecognized subcommand 'frob'"),
        ("map", "required arguments were not provided: <URI>"),
        ("map mem:1G --conections 2", "unexpected argument '--conections'"),
        ("map mem:1G --connections 0", "0 is not in 1..=16"),
        ("map mem:1G --block-size 513", "512, 1024, 2048 or 4096"),
        ("map mem:1G --timeout 5", "time unit needed"),
        ("map mem:1G --timeout 25h", "between 1ms and 24h"),
        ("map nonsense", "the volume \"nonsense\" has no scheme"),
        ("map floppy:a", "the volume scheme \"floppy\" is unknown"),
        ("map mem:lots", "\"lots\" is not a size"),
        ("map mem:0", "a size must be greater than zero"),
        ("map file:relative.img", "file: needs an absolute path, not \"relative.img\""),
        ("map file:/tmp/a?colour=red", "has no option \"colour\""),
        ("map file:/tmp/a?direct=perhaps", "direct is true or false, not \"perhaps\""),
        ("resize a 10X", "\"10X\" is not a size"),
        ("stats --interval 1ms", "at least 100ms"),
        ("stats --count 0", "0 is not in 1.."),
        ("ls -o xml", "invalid value 'xml'"),
        ("completions tcsh", "invalid value 'tcsh'"),
        ("csi NodeStage", "there is no call \"NodeStage\""),
        ("csi Probe", "several services have the call Probe"),
        ("csi NodeGetInfo {", "the request is not a NodeGetInfoRequest"),
        ("csi NodeGetInfo --endpoint tcp:1", "not the path of a unix socket"),
    ];
    let mut messages = Vec::new();
    for (line, cause) in cases {
        let run = cleat(line, Path::new(NOWHERE));
        assert_eq!(run.code, 2, "cleat {line}: {}", run.stderr);
        assert_eq!(run.stdout, "", "cleat {line}");
        assert!(run.stderr.starts_with("cleat: error: "), "cleat {line}: {}", run.stderr);
        assert!(run.stderr.contains(cause), "cleat {line}: {}", run.stderr);
        assert!(run.stderr.contains("\n  repair: "), "cleat {line}: {}", run.stderr);
        messages.push(run.stderr);
    }
    messages.sort();
    messages.dedup();
    assert_eq!(messages.len(), cases.len(), "two inputs have the same message");
}

#[test]
fn without_a_daemon_the_error_names_the_command_that_starts_it() {
    let directory = TempDir::new().expect("a directory");
    let missing = cleat("ls", &directory.path().join("cleat.sock"));
    assert_eq!(missing.code, 9, "{}", missing.stderr);
    assert!(missing.stderr.contains("there is no socket at"), "{}", missing.stderr);
    assert!(missing.stderr.contains("systemctl start cleat"), "{}", missing.stderr);

    // A daemon that was killed leaves its socket behind.
    let left_behind = directory.path().join("left.sock");
    drop(UnixListener::bind(&left_behind).expect("a socket"));
    let dead = cleat("ls", &left_behind);
    assert_eq!(dead.code, 9, "{}", dead.stderr);
    assert!(dead.stderr.contains("no process listens"), "{}", dead.stderr);
}

#[test]
fn a_path_that_is_not_the_daemons_socket_is_reported() {
    let directory = TempDir::new().expect("a directory");
    let file = directory.path().join("file");
    fs::write(&file, "").expect("a file");
    let run = cleat("ls", &file);
    assert_eq!(run.code, 2, "{}", run.stderr);
    assert!(run.stderr.contains("is not a unix socket"), "{}", run.stderr);

    let run = cleat("ls", &directory.path().join("x".repeat(120)));
    assert_eq!(run.code, 2, "{}", run.stderr);
    assert!(run.stderr.contains("107 bytes"), "{}", run.stderr);

    // A server with another protocol.
    let path = directory.path().join("other.sock");
    let listener = UnixListener::bind(&path).expect("a socket");
    let other = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().expect("the client");
        stream.write_all(b"220 mail.example ESMTP\r\n").expect("the client reads");
    });
    let run = cleat("ls", &path);
    other.join().expect("the server thread succeeds");
    assert_eq!(run.code, 9, "{}", run.stderr);
    assert!(run.stderr.contains("\n  repair: "), "{}", run.stderr);
}

#[test]
fn serve_never_takes_the_daemons_socket() {
    let directory = TempDir::new().expect("a directory");
    let socket = directory.path().join("cleat.sock");
    let run = cleat("serve mem:1M", &socket);
    assert_eq!(run.code, 2, "{}", run.stderr);
    assert!(run.stderr.contains("--socket <PATH>"), "{}", run.stderr);
    let mut server = command("serve mem:1M --listen 127.0.0.1:0", &socket)
        .stdout(Stdio::piped())
        .spawn()
        .expect("the binary runs");
    let mut uri = String::new();
    let stdout = server.stdout.take().expect("standard output is piped");
    std::io::BufRead::read_line(&mut std::io::BufReader::new(stdout), &mut uri).expect("a line");
    let taken = socket.exists();
    server.kill().expect("the server runs");
    server.wait().expect("the server exits");
    assert!(uri.starts_with("nbd://127.0.0.1:") && !taken, "{uri}");
}

#[test]
fn missing_permission_on_the_socket_is_reported() {
    let daemon = Daemon::start(Script::default());
    let directory = daemon.directory.path();
    fs::set_permissions(directory, fs::Permissions::from_mode(0o755)).expect("chmod");
    let mut command = if nix::unistd::geteuid().is_root() {
        fs::set_permissions(&daemon.socket, fs::Permissions::from_mode(0o600)).expect("chmod");
        // Run as another user than the socket's owner. Copy the binary, because that user may not have
        // access to the build directory. Another process copies it: children that other tests start at this moment
        // would inherit a descriptor that is open for writing, and the copy could not be executed (ETXTBSY).
        let copy = directory.join("cleat");
        let copied = Command::new("cp").arg(env!("CARGO_BIN_EXE_cleat")).arg(&copy).status();
        assert!(copied.expect("cp runs").success());
        let mut command = Command::new(copy);
        command.uid(65534).gid(65534);
        command
    } else {
        fs::set_permissions(&daemon.socket, fs::Permissions::from_mode(0o0)).expect("chmod");
        Command::new(env!("CARGO_BIN_EXE_cleat"))
    };
    command.arg("ls").env("CLEAT_SOCKET", &daemon.socket);
    let run = Run::from(command.output().expect("the binary runs"));
    assert_eq!(run.code, 7, "{}", run.stderr);
    assert!(run.stderr.contains("no permission to connect to the daemon"), "{}", run.stderr);
    assert!(run.stderr.contains("as root"), "{}", run.stderr);
}

#[test]
fn with_json_output_errors_are_json_too() {
    for line in ["ls -o json", "frob -o json", "map floppy:a --output=json"] {
        let run = cleat(line, Path::new(NOWHERE));
        let error = &json(&run.stderr)["error"];
        assert_eq!(error["exit_code"], run.code, "cleat {line}");
        for field in ["kind", "message", "repair"] {
            assert!(error[field].is_string(), "cleat {line}: {error}");
        }
    }
}

#[test]
fn map_prints_only_the_device() {
    let daemon = Daemon::start(Script::default());
    let line = "map mem:1G --name data --connections 4 --block-size 4K --read-only --timeout 7s \
                --dead-connection-timeout 1500ms";
    let run = cleat(line, &daemon.socket);
    assert_eq!((run.code, run.stdout.as_str(), run.stderr.as_str()), (0, "/dev/nbd0\n", ""));
    let Seen::Map(seen) = daemon.seen() else { panic!("the daemon was asked to map") };
    assert_eq!((seen.uri.as_str(), seen.name.as_str()), ("mem:1G", "data"));
    assert_eq!(seen.timeout_ms, 7000);
    let options = seen.options.expect("options are sent");
    assert_eq!((options.connections, options.block_size, options.read_only), (4, 4096, true));
    assert_eq!(options.dead_connection_timeout_s, 2, "rounded up");
}

#[test]
fn an_empty_name_is_refused() {
    let words = ["map", "mem:1G", "--name", ""];
    let output = Command::new(env!("CARGO_BIN_EXE_cleat")).args(words).output().expect("it runs");
    let message = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{message}");
    assert!(message.contains("the name is empty") && message.contains("omit --name"), "{message}");
}

#[test]
fn a_volume_beyond_the_machines_memory_is_mapped_with_a_warning() {
    let daemon = Daemon::start(Script::default());
    let run = cleat("map mem:4E", &daemon.socket);
    assert_eq!((run.code, run.stdout.as_str()), (0, "/dev/nbd0\n"));
    assert!(run.stderr.starts_with("cleat: warning: mem:4E is larger than"), "{}", run.stderr);
    let quiet = cleat("map mem:4E -o json", &daemon.socket);
    assert_eq!((quiet.code, quiet.stderr.as_str()), (0, ""));
}

#[test]
fn a_mapping_in_json_has_the_documented_fields() {
    let daemon = Daemon::start(Script::default());
    let mapping = json(&cleat("map mem:1G -o json", &daemon.socket).stdout);
    let fields: Vec<&str> =
        mapping.as_object().expect("an object").keys().map(String::as_str).collect();
    let documented = "block_size busy_poll bytes_per_s connections dead_connection_timeout_s device \
                      fenced generation holders iops last_worker_end mapped_at_s mapping_id message name \
                      on_outage outage quiesce quiet read_only size_bytes space state symlink sync_failed unsaved_bytes uri \
                      worker_pid worker_version";
    assert_eq!(fields, documented.split_whitespace().collect::<Vec<_>>());
    assert_eq!(mapping["size_bytes"], 1_u64 << 30);
    assert_eq!(mapping["device"], "/dev/nbd0");
    assert_eq!(mapping["message"], Value::Null);
    let manual = cleat("man", &daemon.socket).stdout.replace('\\', "");
    for field in fields {
        assert!(manual.contains(field), "the manual does not describe {field}");
    }
}

#[test]
fn mappings_are_listed_by_name_without_control_characters() {
    let mut orphan = mapping("zulu", 3);
    orphan.set_state(MappingState::Orphan);
    orphan.uri = "file:/evil\x1b[2J".into();
    let script = Script { mappings: vec![orphan, mapping("alpha", 1)], ..Script::default() };
    let daemon = Daemon::start(script);
    let table = cleat("ls", &daemon.socket);
    assert_eq!(
        table.stdout,
        "NAME   DEVICE        SIZE  STATE   URI\n\
         alpha  /dev/nbd1  1.0 GiB  mapped  mem:1G\n\
         zulu   /dev/nbd3  1.0 GiB  orphan  file:/evil\\u{1b}[2J\n"
    );
    let wide = cleat("ls -o wide", &daemon.socket);
    assert!(wide.stdout.contains("/dev/disk/by-id/cleat-alpha"), "{}", wide.stdout);
    let listing = json(&cleat("ls -o json", &daemon.socket).stdout);
    assert_eq!(listing["mappings"][1]["state"], "orphan");
}

#[test]
fn unmap_of_a_busy_device_prints_the_holders_and_exits_with_5() {
    let busy = "data (/dev/nbd0) is in use: mounted at /mnt (ext4)";
    let script = Script { refuse: Some((Code::FailedPrecondition, busy)), ..Script::default() };
    let daemon = Daemon::start(script);
    let run = cleat("unmap data", &daemon.socket);
    assert_eq!((run.code, run.stdout.as_str()), (5, ""));
    assert_eq!(run.stderr, format!("cleat: error: {busy}\n  repair: {REPAIR}\n"));
}

#[test]
fn each_status_of_the_daemon_has_its_exit_code() {
    let codes = [
        (Code::Internal, 1),
        (Code::InvalidArgument, 2),
        (Code::NotFound, 3),
        (Code::AlreadyExists, 4),
        (Code::FailedPrecondition, 5),
        (Code::Aborted, 6),
        (Code::PermissionDenied, 7),
        (Code::Unimplemented, 8),
        (Code::Unavailable, 9),
        (Code::DeadlineExceeded, 10),
        (Code::ResourceExhausted, 11),
    ];
    for (code, expected) in codes {
        let daemon = Daemon::start(Script { refuse: Some((code, "cause")), ..Script::default() });
        let run = cleat("map mem:1G -o json", &daemon.socket);
        assert_eq!(run.code, expected, "{code:?}: {}", run.stderr);
        let error = json(&run.stderr);
        assert_eq!(error["error"]["message"], "cause", "{code:?}");
        assert_eq!(error["error"]["repair"], REPAIR, "{code:?}");
    }
}

#[test]
fn unmap_sends_its_deadline_and_prints_the_remaining_holders() {
    let daemon = Daemon::start(Script::default());
    let run = cleat("unmap data --force", &daemon.socket);
    // The mapping is removed, but a holder remains.
    assert_eq!(run.code, 22);
    assert_eq!(
        run.stderr,
        "cleat: data: no longer mounted at /mnt (ext4)\ncleat: data: fail I/O: late\n\
         cleat: data is unmapped, and its name and volume are free; /dev/nbd7 remains, and all \
         its I/O fails, until its holders close it: mounted at /mnt (ext4)\n"
    );
    let Seen::Unmap(seen) = daemon.seen() else { panic!("the daemon was asked to unmap") };
    assert_eq!((seen.target.as_str(), seen.force, seen.timeout_ms), ("data", true, 5000));
    assert_eq!(seen.unmount(), Unmount::Unspecified);

    let options = "--force --unmount own --deadline 250ms -o json";
    let run = cleat(&format!("unmap data {options}"), &daemon.socket);
    assert_eq!(run.code, 22);
    let unmapped = json(&run.stdout);
    assert_eq!(unmapped["was_mapped"], true);
    assert_eq!(unmapped["remaining_holders"][0]["kind"], "mount");
    assert_eq!(unmapped["steps"][0]["took_ms"], 7);
    assert_eq!(unmapped["unmounted"][0]["path"], "/mnt");
    assert_eq!(
        (&unmapped["device_left"], &unmapped["unproven"]),
        (&"/dev/nbd7".into(), &Value::Null)
    );
    let Seen::Unmap(seen) = daemon.seen() else { panic!("the daemon was asked to unmap") };
    assert_eq!((seen.timeout_ms, seen.unmount()), (250, Unmount::Own));
    assert_eq!(cleat("unmap data --unmount own", &daemon.socket).code, 2);

    let run = cleat("unmap other", &daemon.socket);
    assert_eq!((run.code, run.stderr.as_str()), (0, "cleat: other was not mapped\n"));
}

#[test]
fn an_upgrade_continues_with_the_restarted_daemon() {
    let daemon = Daemon::start(Script::default());
    let run = cleat("upgrade", &daemon.socket);
    assert_eq!(run.code, 9, "{}", run.stderr);
    let lines = "daemon: restarted, 1 (a) -> 2 (b)\n\
                 data: handed over, paused 12.3 ms, 1 (a) -> 2 (b)\n\
                 other: not upgraded: its backend hangs\n";
    assert_eq!(run.stdout, lines);
    assert!(run.stderr.contains("1 of 3 parts were not upgraded"), "{}", run.stderr);

    let run = cleat("upgrade -o json --workers-only", &daemon.socket);
    assert_eq!(run.code, 9);
    let upgraded = json(&run.stdout);
    assert_eq!(upgraded["daemon"], Value::Null);
    assert_eq!(upgraded["volumes"][0]["outcome"], "handed_over");
    assert_eq!(upgraded["volumes"][0]["paused_us"], 12_300);
    assert_eq!(upgraded["volumes"][1]["outcome"], "failed");
    assert_eq!(upgraded["volumes"][1]["message"], "its backend hangs");
}

#[test]
fn resize_sends_the_size_in_bytes() {
    let daemon = Daemon::start(Script::default());
    let run = cleat("resize data 2G", &daemon.socket);
    assert_eq!((run.code, run.stdout.as_str()), (0, "2147483648\n"));
    let Seen::Resize(seen) = daemon.seen() else { panic!("the daemon was asked to resize") };
    assert_eq!((seen.target.as_str(), seen.size_bytes), ("data", 2 << 30));
    cleat("resize data", &daemon.socket);
    let Seen::Resize(seen) = daemon.seen() else { panic!("the daemon was asked to resize") };
    assert_eq!(seen.size_bytes, 0, "the backend's own size");
}

#[test]
fn set_sends_only_the_given_options() {
    let daemon = Daemon::start(Script::default());
    let run = cleat("set data --on-outage queue:90s --bps 50M", &daemon.socket);
    assert_eq!((run.code, run.stdout.as_str()), (0, ""), "{}", run.stderr);
    let Seen::SetOptions(seen) = daemon.seen() else { panic!("the daemon was asked to set") };
    assert_eq!((seen.target.as_str(), seen.on_outage.as_str()), ("data", "queue:1m30s"));
    assert_eq!((seen.iops, seen.bytes_per_s), (None, Some(50 << 20)));
    cleat("set data --iops 0", &daemon.socket);
    let Seen::SetOptions(seen) = daemon.seen() else { panic!("the daemon was asked to set") };
    assert_eq!((seen.on_outage.as_str(), seen.iops, seen.bytes_per_s), ("", Some(0), None));
    cleat("set data --busy-poll off", &daemon.socket);
    let Seen::SetOptions(seen) = daemon.seen() else { panic!("the daemon was asked to set") };
    assert_eq!((seen.busy_poll.as_str(), seen.iops, seen.bytes_per_s), ("off", None, None));
    for wrong in [
        "set data",
        "set data --on-outage perhaps",
        "set data --bps fast",
        "set data --busy-poll on",
    ] {
        let run = cleat(wrong, &daemon.socket);
        assert_eq!(run.code, 2, "{wrong}: {}", run.stderr);
    }
}

#[test]
fn ls_and_status_show_an_outage() {
    let outage = v1::Outage {
        since_unix_ms: 1000,
        reason: "no route".into(),
        queued: 17,
        policy: "queue".into(),
    };
    let mapping = v1::Mapping {
        outage: Some(outage),
        last_worker_end: "worker 7 was killed by SIGKILL".into(),
        ..mapping("data", 0)
    };
    let daemon = Daemon::start(Script { mappings: vec![mapping], ..Script::default() });
    let listed = cleat("ls", &daemon.socket);
    assert!(listed.stdout.contains("(outage)"), "{}", listed.stdout);
    let json: Value =
        serde_json::from_str(&cleat("ls -o json", &daemon.socket).stdout).expect("JSON");
    assert_eq!(json["mappings"][0]["outage"]["queued"], 17);
    assert_eq!(json["mappings"][0]["last_worker_end"], "worker 7 was killed by SIGKILL");
    let status = cleat("status data", &daemon.socket).stdout;
    assert!(status.contains("since 1970-01-01T00:00:01Z"), "{status}");
    assert!(status.contains("no route; 17 requests wait; policy: queue"), "{status}");
    assert!(status.contains("was killed by SIGKILL"), "{status}");
}

#[test]
fn status_shows_the_amplification_of_a_volume_that_counts_it() {
    let counted = |space: v1::SpaceUse| v1::Mapping { space: Some(space), ..mapping("data", 0) };
    let used = v1::SpaceUse {
        put_bytes: 4 << 20,
        written_bytes: 3 << 20,
        object_bytes: 5 << 20,
        live_bytes: 2 << 20,
        copied_bytes: 1 << 20,
        copy_rate: 50 << 20,
    };
    let daemon = Daemon::start(Script { mappings: vec![counted(used)], ..Script::default() });
    let status = cleat("status data", &daemon.socket).stdout;
    assert!(status.contains("  1.33 (4.0 MiB put to the store, 3.0 MiB written)\n"), "{status}");
    assert!(status.contains("  2.50 (5.0 MiB of data in objects, 2.0 MiB needed)\n"), "{status}");
    assert!(status.contains("  1.0 MiB copied (at most 50.0 MiB a second)\n"), "{status}");
    let space = json(&cleat("status data -o json", &daemon.socket).stdout)["space"].clone();
    assert_eq!(
        (&space["write_amplification"], &space["space_amplification"]),
        (&1.33.into(), &2.5.into())
    );
    let (copied, rate) = (&space["copied_bytes"], &space["copy_rate"]);
    assert_eq!((copied, rate), (&(1 << 20).into(), &(50 << 20).into()));
    assert_eq!((&space["put_bytes"], &space["live_bytes"]), (&(4 << 20).into(), &(2 << 20).into()));

    let new = v1::SpaceUse { written_bytes: 0, live_bytes: 0, copy_rate: 0, ..used };
    let daemon = Daemon::start(Script { mappings: vec![counted(new)], ..Script::default() });
    let status = cleat("status data", &daemon.socket).stdout;
    assert!(status.contains("  none (4.0 MiB put to the store, 0 B written)\n"), "{status}");
    assert!(status.contains("  1.0 MiB copied (no limit)\n"), "{status}");
    let space = json(&cleat("status data -o json", &daemon.socket).stdout)["space"].clone();
    assert_eq!(space["copy_rate"], Value::Null);
    assert_eq!(
        (&space["write_amplification"], &space["space_amplification"]),
        (&Value::Null, &Value::Null)
    );

    let daemon = Daemon::start(Script { mappings: vec![mapping("data", 0)], ..Script::default() });
    let status = cleat("status data", &daemon.socket).stdout;
    assert!(!status.contains("amplification"), "{status}");
    assert_eq!(json(&cleat("status data -o json", &daemon.socket).stdout)["space"], Value::Null);
}

#[test]
fn status_shows_the_daemon_or_a_mapping_with_its_holders() {
    let daemon = Daemon::start(Script::default());
    let health = cleat("status", &daemon.socket);
    assert!(health.stdout.contains("warning  udev    rules are missing\n"), "{}", health.stdout);
    assert!(health.stdout.contains("repair: make install\n"), "{}", health.stdout);
    let mapping = cleat("status data", &daemon.socket);
    assert!(mapping.stdout.contains("mounted at /mnt (ext4)"), "{}", mapping.stdout);
    let missing = cleat("status missing", &daemon.socket);
    assert_eq!(missing.code, 3, "{}", missing.stderr);
}

#[test]
fn stats_prints_rates_one_line_per_reading() {
    let daemon = Daemon::start(Script::default());
    let run = cleat("stats --interval 100ms --count 2 -o json", &daemon.socket);
    assert_eq!(run.code, 0, "{}", run.stderr);
    let lines: Vec<Value> = run.stdout.lines().map(json).collect();
    assert_eq!(lines.len(), 2);
    let read = &lines[1]["volumes"][0]["rates"]["read"];
    assert_eq!(read["iops"], 500.0);
    assert_eq!(read["bytes_per_s"], 2_048_000.0);
    assert_eq!(read["mean_latency_us"], 100.0);
    let text = cleat("stats --interval 100ms --count 2", &daemon.socket);
    assert_eq!(text.stdout.lines().count(), 3, "a heading and two lines: {}", text.stdout);
    assert_eq!(read["latency"]["p99_us"], 128.0);
    let text = cleat("stats --interval 100ms --count 1 --latency", &daemon.socket);
    assert!(text.stdout.contains("P99.9") && text.stdout.contains("128 us"), "{}", text.stdout);
    let total = json(&cleat("stats --total -o json", &daemon.socket).stdout);
    assert_eq!(total["volumes"][0]["rates"], Value::Null);
}

#[test]
fn a_closed_standard_output_is_no_error() {
    let daemon = Daemon::start(Script::default());
    let mut child = command("stats --interval 100ms", &daemon.socket)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the binary runs");
    drop(child.stdout.take());
    let run = Run::from(child.wait_with_output().expect("cleat exits by itself"));
    assert_eq!((run.code, run.stderr.as_str()), (0, ""));
}

#[test]
fn completions_and_manual_pages_exist_for_every_command() {
    let nowhere = Path::new(NOWHERE);
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let run = cleat(&format!("completions {shell}"), nowhere);
        assert_eq!(run.code, 0);
        assert!(run.stdout.contains("unmap"), "{shell}");
    }
    let directory = TempDir::new().expect("a directory");
    let pages = directory.path().join("man1");
    let run = cleat(&format!("man --directory {}", pages.display()), nowhere);
    assert_eq!(run.code, 0, "{}", run.stderr);
    let mut written = 0;
    for page in fs::read_dir(&pages).expect("the directory was created") {
        let path = page.expect("an entry").path();
        let page = fs::read_to_string(&path).expect("a page");
        for section in ["NAME", "SYNOPSIS", "EXAMPLES", "\"EXIT STATUS\"", "FILES", "ENVIRONMENT"] {
            let heading = format!(".SH {section}\n");
            assert!(page.contains(&heading), "{} has no {section}", path.display());
        }
        written += 1;
    }
    assert!(written >= 9, "{written} pages");
}

#[test]
fn doctor_needs_no_daemon_and_its_exit_code_is_its_worst_finding() {
    let run = cleat("doctor -o json", Path::new(NOWHERE));
    let findings = json(&run.stdout);
    let expected = match findings["worst"].as_str().expect("a verdict") {
        "ok" => 0,
        "warning" => 20,
        "error" => 21,
        other => panic!("unknown verdict {other}"),
    };
    assert_eq!(run.code, expected, "{}", run.stderr);
    let checks = findings["checks"].as_array().expect("an array");
    assert!(checks.len() > 5, "{findings}");
    for check in checks {
        let well = check["verdict"] == "ok";
        assert_eq!(check["repair"].is_null(), well, "{check}");
    }

    let run = cleat("doctor --config /nonexistent/cleat.toml", Path::new(NOWHERE));
    assert_eq!(run.code, 21);
    let first = run.stdout.lines().next().unwrap_or_default();
    assert!(first.starts_with("error") && first.contains("/nonexistent/cleat.toml"), "{first}");
}

#[test]
fn the_version_names_the_build() {
    let run = cleat("--version", Path::new(NOWHERE));
    assert!(run.stdout.starts_with(concat!("cleat ", env!("CARGO_PKG_VERSION"), " (")));
    assert!(run.stdout.contains("rustc") && run.stdout.contains("features: "), "{}", run.stdout);
}

struct Run {
    code: i32,
    stdout: String,
    stderr: String,
}

impl From<Output> for Run {
    fn from(output: Output) -> Self {
        Self {
            code: output.status.code().expect("an exit code"),
            stdout: String::from_utf8(output.stdout).expect("UTF-8"),
            stderr: String::from_utf8(output.stderr).expect("UTF-8"),
        }
    }
}

fn cleat(line: &str, socket: &Path) -> Run {
    command(line, socket).output().expect("the binary runs").into()
}

fn command(line: &str, socket: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_cleat"));
    command.args(line.split_whitespace()).env("CLEAT_SOCKET", socket).stdin(Stdio::null());
    command
}

fn json(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|error| panic!("invalid JSON ({error}): {text}"))
}
