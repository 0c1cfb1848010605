//! Code inside a worker, on real kernels and under the daemon's default configuration, which demands every layer of
//! the confinement.

use std::net::TcpListener;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{SocketAddr, UnixListener};

use libtest_mimic::Trial;

use crate::fixture::{Image, Node, cleat, cleat_ok, shell, status};
use crate::trial;

pub(crate) fn trials() -> Vec<Trial> {
    vec![trial("isolation_code_inside_a_worker_reaches_nothing", reaches_nothing)]
}

fn reaches_nothing() {
    let mut node = Node::start();
    let file = "/tmp/of-root";
    std::fs::write(file, "secret").expect("a file");
    std::fs::set_permissions(file, PermissionsExt::from_mode(0o600)).expect("its mode");
    let tcp = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = tcp.local_addr().expect("its number").port();
    let name = SocketAddr::from_abstract_name("roads").expect("a name");
    let _abstract = UnixListener::bind_addr(&name).expect("an abstract socket");
    let image = Image::new("jail", "32M");
    for uri in ["mem:32M".to_owned(), image.uri()] {
        let device = cleat_ok(&["map", &uri, "--name", "jail"]);
        let pid = status("jail")["worker_pid"].as_u64().expect("a worker");
        let ids = shell(&format!("grep -E '^(Uid|Gid):' /proc/{pid}/status"));
        assert!(ids.split_whitespace().all(|id| id != "0"), "{ids}");
        assert_eq!(shell(&format!("ls -A /proc/{pid}/root | wc -l")), "0");
        assert_eq!(shell(&format!("wc -l < /proc/{pid}/mountinfo")), "1");
        for process in [1, node.pid()] {
            let targets = format!("break-in {file} /run/cleat/cleat.sock {process} {port} roads");
            let tried = cleat(&["fault", "jail", &targets]);
            assert!(tried.status.success(), "{uri}: {}", String::from_utf8_lossy(&tried.stderr));
        }
        // The worker serves on.
        shell(&format!("dd if=/dev/zero of={device} bs=1M count=4 oflag=direct status=none"));
        assert_eq!(status("jail")["worker_pid"].as_u64(), Some(pid));
        cleat_ok(&["unmap", "jail"]);
    }
    assert_eq!(std::fs::read_to_string(file).expect("the file"), "secret");
    node.terminate();
}
