//! The key of an RBD image reaches a worker over a descriptor, and is renewed over another one.

use std::fs::File;
use std::os::fd::AsFd;
use std::path::Path;

use cleat_core::error::ErrorKind;
use cleat_worker::protocol::{FromWorker, Start, ToWorker};
use test_kit::ceph::{ID, POOL, shared};
use test_kit::nbd::kernel as nbd;
use test_kit::worker::{Worker, failure, start_message};

use super::rbd::fresh;

/// Returns the keyring of the client of the tests, and its key.
fn keyring() -> (String, String) {
    let keyring = std::fs::read_to_string(shared().keyring(ID)).unwrap();
    let key = keyring.lines().find_map(|line| line.trim().strip_prefix("key = ")).unwrap();
    (keyring.clone(), key.to_owned())
}

/// Opens a file with `content` that has no path any more.
fn unnamed(content: &str) -> File {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), content).unwrap();
    file.reopen().unwrap()
}

/// Returns a start message for the image whose keyring is a file that does not exist, with all of the log.
fn start(image: &str, path: &str) -> Start {
    let uri = fresh(image).replace(&shared().keyring(ID).display().to_string(), path);
    assert!(uri.contains(path) && !Path::new(path).exists());
    Start {
        credentials: vec![path.to_owned()],
        log: "human:trace".to_owned(),
        ..start_message(&uri)
    }
}

/// Sends the worker new content of its keyring, and returns the answer.
fn renew(worker: &Worker, path: &str, content: &str) -> FromWorker {
    let command = ToWorker::RenewCredentials { credentials: vec![path.to_owned()] };
    worker.send(&command, &[unnamed(content).as_fd()]);
    worker.receive()
}

#[test]
fn a_worker_gets_the_key_over_a_descriptor_and_shows_it_nowhere() {
    let (path, (keyring, key)) = ("/nowhere/its.keyring", keyring());
    let mut worker = Worker::launch();
    worker.send_start_with(&start("descriptor", path), &[unnamed(&keyring).as_fd()]);
    let opened = worker.receive();
    assert!(matches!(opened, FromWorker::Ready(_)), "{opened:?}");
    let sockets = worker.serve(1);
    assert_eq!(nbd::write(&sockets[0], 0, &[7; 4096]), 0);
    // Only root may read more than the command line of a worker.
    let is_root = nix::unistd::geteuid().is_root();
    for file in ["cmdline", "environ"].into_iter().take(if is_root { 2 } else { 1 }) {
        let text = std::fs::read(worker.proc(file)).unwrap();
        assert!(!String::from_utf8_lossy(&text).contains(&key), "the key is in {file}");
    }
    // The descriptor of the keyring is closed once it has been read.
    for descriptor in std::fs::read_dir(worker.proc("fd")).into_iter().flatten().flatten() {
        let target = std::fs::read_link(descriptor.path()).unwrap_or_default();
        assert!(!target.starts_with(std::env::temp_dir()), "{} is open", target.display());
    }

    // The same key again is no change; another key needs another connection to the cluster.
    assert_eq!(renew(&worker, path, &format!("# again\n{keyring}")), FromWorker::Done);
    let other = keyring.replace(&key[16..24], "AAAAAAAA");
    assert_ne!(other, keyring);
    let answer = renew(&worker, path, &other);
    let FromWorker::Failed(refused) = &answer else { panic!("{answer:?}") };
    let repair = refused.repair.as_deref().unwrap_or_default();
    assert!(repair.contains("cleat upgrade --workers-only --force"), "{refused:?}");
    assert_eq!(failure(answer).0, ErrorKind::Unsupported);
    for (content, kind, part) in [
        (keyring.replace(ID, "other"), ErrorKind::PermissionDenied, "no key of client.volumes"),
        (keyring.replace(&key, &key[..39]), ErrorKind::InvalidArgument, "malformed"),
        (" ".repeat(65537), ErrorKind::InvalidArgument, "longer than 65536 bytes"),
        (String::new(), ErrorKind::InvalidArgument, "empty"),
    ] {
        let (refused, message) = failure(renew(&worker, path, &content));
        assert_eq!(refused, kind, "{message}");
        assert!(message.contains(part), "{message}");
    }
    let none = ToWorker::RenewCredentials { credentials: vec![path.to_owned()] };
    assert_eq!(failure(worker.call(&none)).0, ErrorKind::InvalidArgument);
    assert_eq!(nbd::write(&sockets[0], 0, &[8; 4096]), 0, "the volume is served as before");

    worker.send(&ToWorker::Stop, &[]);
    assert!(worker.exit().success());
    let log = worker.log();
    assert!(log.contains("the credentials are up to date"), "{log}");
    // Neither the key nor a part of it.
    assert!(!log.contains(&key[16..]) && !log.contains(&key[..24]), "the key is in the log");
}

/// In this configuration, librados finds the keyring by itself. It is the file that the other tests name
/// with `keyring=`; the confinement of the worker does not allow its path.
#[test]
fn a_confined_worker_cannot_open_the_path_of_the_keyring() {
    let uri = fresh("pathless");
    let worker = Worker::launch();
    let conf = shared().conf().display().to_string();
    worker.send_start(&start_message(&format!("rbd:{POOL}/pathless?conf={conf}&id={ID}")));
    let (kind, message) = failure(worker.receive());
    let kinds = [ErrorKind::PermissionDenied, ErrorKind::NotFound];
    assert!(kinds.contains(&kind), "{message}");
    // The same path, but over a descriptor.
    let (_worker, ready) = Worker::ready(&uri);
    assert_eq!(ready.size, 8 << 20);
}

#[test]
fn a_start_message_without_the_descriptors_that_it_names_is_refused() {
    let worker = Worker::launch();
    worker.send_start(&start("fewer", "/nowhere/its.keyring"));
    let (kind, message) = failure(worker.receive());
    assert_eq!(kind, ErrorKind::InvalidArgument, "{message}");
    assert!(message.contains("fewer descriptors"), "{message}");
}
