//! The memory of workers.

use super::file;
use test_kit::worker::Worker;

#[test]
fn the_private_memory_of_a_worker_is_limited() {
    let (_directory, uri) = file("a.img", 1 << 20);
    let (worker, _sockets) = Worker::serving(&uri, 1);
    let limits = std::fs::read_to_string(worker.proc("limits")).unwrap();
    let data = limits.lines().find(|line| line.starts_with("Max data size")).unwrap();
    let values: Vec<&str> = data.split_whitespace().skip(3).take(2).collect();
    assert_eq!(values, ["4294967296", "4294967296"], "{data}");
}
