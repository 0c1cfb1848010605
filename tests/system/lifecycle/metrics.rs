//! The metrics endpoint, with the requests of Prometheus and with invalid ones.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::{Duration, Instant};

use cleat_api::v1::MappingState;
use cleat_kernel::Kernel;
use cleat_node::config::Listen;

use crate::lifecycle::openmetrics::Metrics;
use test_kit::node::{Machine, SIZE, index_of, kill, wait_until};

/// Sends a request and returns the status line, the headers and the body of the response.
fn ask(mut stream: impl Read + Write, request: &str) -> (String, String, String) {
    stream.write_all(request.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").expect("a head and a body");
    let (status, head) = head.split_once("\r\n").unwrap_or((head, ""));
    (status.to_owned(), head.to_lowercase(), body.to_owned())
}

fn get(stream: impl Read + Write) -> Metrics {
    // The request of Prometheus.
    let request = "GET /metrics HTTP/1.1\r\nHost: cleat\r\nAccept: application/openmetrics-text;\
                   version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.2,*/*;q=0.1\r\n\r\n";
    let (status, head, body) = ask(stream, request);
    assert_eq!(status, "HTTP/1.1 200 OK");
    assert!(head.contains("content-type: application/openmetrics-text; version=1.0.0"), "{head}");
    assert!(head.contains(&format!("content-length: {}", body.len())), "{head}");
    Metrics::read(&body)
}

fn socket(machine: &Machine) -> UnixStream {
    let stream = UnixStream::connect(machine.config.runtime_dir.join("metrics.sock")).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    stream
}

pub(crate) fn scrape(machine: &Machine) -> Metrics {
    get(socket(machine))
}

#[test]
fn a_volume_has_metrics_from_map_to_unmap() {
    let machine = Machine::new();
    let supervisor = machine.start();
    let empty = scrape(&machine);
    assert_eq!(empty.value("cleat_mappings", &[("state", "mapped")]), Some(0.0));
    assert_eq!(
        empty.value("cleat_build_info", &[("version", env!("CARGO_PKG_VERSION"))]),
        Some(1.0)
    );
    assert!(empty.labels("cleat_volume_state").is_empty());

    // A path with all characters that must be escaped in a label.
    let uri = machine.volume("a \"b\" \\c").replace(' ', "%20").replace('"', "%22");
    let mapping = supervisor.map("a", &uri).unwrap();
    let index = index_of(&mapping);
    machine.kernel.write(index, 4096, &[7; 8192]).unwrap();
    machine.kernel.read(index, 0, 4096).unwrap();
    let metrics = scrape(&machine);
    let of = |name: &str, label: &str, value: &str| {
        metrics.value(name, &[("volume", "a"), (label, value)])
    };
    assert_eq!(of("cleat_volume_operations_total", "op", "write"), Some(1.0));
    assert_eq!(of("cleat_volume_bytes_total", "op", "write"), Some(8192.0));
    assert_eq!(of("cleat_volume_operations_total", "op", "read"), Some(1.0));
    assert_eq!(of("cleat_volume_request_duration_seconds_count", "op", "read"), Some(1.0));
    let spent = of("cleat_volume_request_duration_seconds_sum", "op", "read").unwrap();
    assert!(spent > 0.0 && spent < 20.0, "{spent}");
    assert_eq!(of("cleat_volume_operations_total", "op", "flush"), Some(0.0));
    assert_eq!(of("cleat_volume_operations_total", "op", "trim"), None);
    assert_eq!(of("cleat_volume_state", "state", "mapped"), Some(1.0));
    assert_eq!(of("cleat_volume_state", "state", "failed"), Some(0.0));
    let alone = |name: &str| metrics.value(name, &[("volume", "a")]);
    assert_eq!(alone("cleat_volume_size_bytes"), Some(SIZE as f64));
    assert_eq!(alone("cleat_volume_connections"), Some(1.0));
    assert_eq!(alone("cleat_volume_in_flight_requests"), Some(0.0));
    assert_eq!(alone("cleat_volume_oldest_request_seconds"), Some(0.0));
    assert_eq!(alone("cleat_volume_fenced"), Some(0.0));
    assert_eq!(metrics.value("cleat_mappings", &[("state", "mapped")]), Some(1.0));
    let labels = metrics.labels("cleat_volume_info");
    assert_eq!((labels.len(), &labels[0]["uri"], &labels[0]["device"]), (1, &uri, &mapping.device));
    let calls = metrics.value("cleat_api_calls_total", &[("method", "Map"), ("code", "OK")]);
    assert_eq!(calls, Some(1.0));

    supervisor.unmap("a").unwrap();
    let gone = scrape(&machine);
    for name in ["cleat_volume_state", "cleat_volume_info", "cleat_volume_operations_total"] {
        assert!(gone.labels(name).is_empty(), "{name}");
    }
    machine.assert_clean();
}

#[test]
fn counters_survive_workers_and_supervisors() {
    let machine = Machine::new();
    let supervisor = machine.start();
    let mapping = supervisor.map("a", &machine.volume("a")).unwrap();
    let write = || machine.kernel.write(index_of(&mapping), 0, &[1; 512]).unwrap();
    write();
    kill(mapping.worker_pid, nix::sys::signal::Signal::SIGKILL);
    wait_until("another worker serves", || supervisor.get("a").unwrap().generation == 2);
    supervisor.wait_for("a", MappingState::Mapped);
    write();
    supervisor.crash();
    let supervisor = machine.start();
    write();
    let metrics = scrape(&machine);
    let written =
        metrics.value("cleat_volume_operations_total", &[("volume", "a"), ("op", "write")]);
    // The simulated kernel does not repeat requests by itself, so a write that was in flight at the
    // crash would be counted twice.
    assert_eq!(written, Some(3.0));
    assert_eq!(metrics.value("cleat_volume_reconnects_total", &[("volume", "a")]), Some(1.0));
    assert_eq!(metrics.value("cleat_volume_worker_starts_total", &[("volume", "a")]), Some(2.0));
    supervisor.unmap("a").unwrap();
    machine.assert_clean();
}

#[test]
fn a_hung_request_is_shown_while_it_hangs() {
    let machine = Machine::new();
    let supervisor = machine.start();
    let uri = format!("fault:{}?fault.hang=true&fault.ops=write", machine.volume("a"));
    let mapping = supervisor.map("a", &uri).unwrap();
    std::thread::scope(|scope| {
        let write = scope.spawn(|| machine.kernel.write(index_of(&mapping), 0, &[1; 512]));
        let now = |name: &str| scrape(&machine).value(name, &[("volume", "a")]).unwrap();
        wait_until("the request is in flight", || now("cleat_volume_in_flight_requests") == 1.0);
        let began = Instant::now();
        let before = now("cleat_volume_oldest_request_seconds");
        std::thread::sleep(Duration::from_millis(300));
        let older = now("cleat_volume_oldest_request_seconds") - before;
        assert!(older >= 0.3 && older <= began.elapsed().as_secs_f64(), "{older}");
        supervisor.set_fault("");
        write.join().unwrap().unwrap();
        wait_until("no request is in flight", || now("cleat_volume_oldest_request_seconds") == 0.0);
    });
    supervisor.unmap("a").unwrap();
    machine.assert_clean();
}

#[test]
fn errors_and_a_fenced_volume_are_shown() {
    let machine = Machine::new();
    let supervisor = machine.start();
    let uri = format!("fault:{}?fault.error=fenced&fault.ops=write", machine.volume("a"));
    let mapping = supervisor.map("a", &uri).unwrap();
    machine.kernel.write(index_of(&mapping), 0, &[1; 512]).unwrap_err();
    supervisor.wait_for("a", MappingState::Failed);
    let metrics = scrape(&machine);
    let fenced = metrics.value("cleat_volume_errors_total", &[("volume", "a"), ("kind", "fenced")]);
    assert_eq!(fenced, Some(1.0));
    assert_eq!(metrics.value("cleat_volume_fenced", &[("volume", "a")]), Some(1.0));
    assert_eq!(metrics.value("cleat_mappings", &[("state", "failed")]), Some(1.0));
    supervisor.unmap("a").unwrap();
    machine.assert_clean();
}

#[test]
fn invalid_requests_are_refused_and_the_socket_is_private() {
    let machine = Machine::new();
    let supervisor = machine.start();
    let mode = |path: &std::path::Path| path.metadata().unwrap().permissions().mode() & 0o777;
    let path = machine.config.runtime_dir.join("metrics.sock");
    assert_eq!(mode(&path), 0o600);
    let (plain, head, text) = ask(socket(&machine), "GET /metrics HTTP/1.0\r\n\r\n");
    assert!(plain.contains("200") && head.contains("text/plain; version=0.0.4"), "{plain} {head}");
    assert!(text.contains("# TYPE cleat_build_info gauge\n") && !text.contains("# EOF"), "{text}");
    let status = |request: &str| ask(socket(&machine), request).0;
    assert!(status("GET / HTTP/1.1\r\nHost: a\r\n\r\n").contains("404"));
    assert!(status("GET /metrics/../x HTTP/1.1\r\nHost: a\r\n\r\n").contains("404"));
    let (post, head, _) =
        ask(socket(&machine), "POST /metrics HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n\r\n");
    assert!(post.contains("405") && head.contains("allow: get"), "{post} {head}");
    assert!(status("nonsense\r\n\r\n").contains("400"));
    let long = format!("GET /metrics HTTP/1.1\r\nHost: a\r\nX: {}\r\n\r\n", "x".repeat(100_000));
    let mut stream = socket(&machine);
    // The request is refused before all of it is read, so the connection may be reset.
    let _ = stream.write_all(long.as_bytes());
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    assert!(answer.is_empty() || answer.starts_with(b"HTTP/1.1 431"), "{answer:?}");
    scrape(&machine);
    supervisor.shut_down();
    assert!(!path.exists());
}

#[test]
fn a_liveness_probe_fails_while_csi_cannot_be_reached() {
    let health =
        |machine: &Machine| ask(socket(machine), "GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n");
    let machine = Machine::new();
    let supervisor = machine.start();
    let (status, _, text) = health(&machine);
    assert!(status.contains("200") && text == "ok\n", "{status} {text}");
    supervisor.shut_down();

    let mut machine = Machine::new();
    let path = machine.path("csi.sock");
    machine.config.csi.enabled = true;
    machine.config.csi.socket = Some(path.clone());
    let supervisor = machine.start();
    let (status, _, text) = health(&machine);
    assert!(status.contains("503") && text.contains("csi.sock does not work: No such"), "{text}");
    let listener = UnixListener::bind(&path).unwrap();
    assert!(health(&machine).0.contains("200"));
    drop(listener);
    assert!(health(&machine).0.contains("503"));
    supervisor.shut_down();
}

#[test]
fn idle_connections_are_closed_and_do_not_block_requests() {
    let machine = Machine::new();
    let supervisor = machine.start();
    let idle: Vec<UnixStream> = (0..32).map(|_| socket(&machine)).collect();
    let asked = Instant::now();
    scrape(&machine);
    assert!(asked.elapsed() < Duration::from_secs(60), "{:?}", asked.elapsed());
    // The control API still works.
    supervisor.map("a", "mem:1M").unwrap();
    supervisor.unmap("a").unwrap();
    drop(idle);
    machine.assert_clean();
}

#[test]
fn metrics_can_be_served_over_tcp_or_disabled() {
    let mut machine = Machine::new();
    machine.config.metrics.listen = Listen::Tcp("127.0.0.1:0".parse().unwrap());
    let supervisor = machine.start();
    let address = supervisor.metrics_address().unwrap();
    let metrics = get(TcpStream::connect(address).unwrap());
    assert!(metrics.value("cleat_start_time_seconds", &[]).unwrap() > 1e9);
    assert_eq!(metrics.families["cleat_kernel_calls"], "gauge");
    assert!(!machine.config.runtime_dir.join("metrics.sock").exists());
    supervisor.shut_down();

    machine.config.metrics.listen = Listen::Off;
    let supervisor = machine.start();
    assert!(supervisor.metrics_address().is_none());
    assert!(machine.kernel.devices().is_ok());
    assert!(!machine.config.runtime_dir.join("metrics.sock").exists());
    supervisor.shut_down();
}
