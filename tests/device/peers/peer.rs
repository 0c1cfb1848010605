//! The compared products: each provides a block device through a server process. And the actions of a user
//! on such a device.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use super::{End, run};
use crate::fixture::{Image, Node, TIMEOUT, cleat_ok, shell, signal, status};

/// The compared products and their options.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Setup {
    Cleat,
    Plain,
    Persist,
    PersistByIoctl,
    PersistWithTimeout,
}

impl Setup {
    pub(crate) const ALL: [Self; 5] =
        [Self::Cleat, Self::Plain, Self::Persist, Self::PersistByIoctl, Self::PersistWithTimeout];

    pub(crate) fn title(self) -> &'static str {
        match self {
            Self::Cleat => "cleat",
            Self::Plain => "nbd-client",
            Self::Persist => "nbd-client -persist",
            Self::PersistByIoctl => "nbd-client -nonetlink -persist",
            Self::PersistWithTimeout => "nbd-client -nonetlink -persist -timeout 5",
        }
    }

    /// Whether the forced detach of this setup is tested.
    pub(crate) fn detaches(self) -> bool {
        matches!(self, Self::Cleat | Self::Plain | Self::PersistByIoctl)
    }

    fn options(self) -> &'static str {
        match self {
            Self::Cleat | Self::Plain => "",
            Self::Persist => "-persist",
            Self::PersistByIoctl => "-nonetlink -persist",
            Self::PersistWithTimeout => "-nonetlink -persist -timeout 5",
        }
    }
}

/// A peer, with the daemon that it needs.
pub(crate) struct Peer {
    setup: Setup,
    _node: Option<Node>,
}

const NAME: &str = "peers";
const OTHER: &str = "another";

impl Peer {
    pub(crate) fn new(setup: Setup) -> Self {
        let node = (setup == Setup::Cleat).then(Node::start);
        Self { setup, _node: node }
    }

    /// Makes a device with its server.
    pub(crate) fn up(&self) -> Up {
        self.make(NAME)
    }

    fn make(&self, name: &str) -> Up {
        let image = Image::new(name, "128M");
        if self.setup == Setup::Cleat {
            let device = cleat_ok(&["map", &image.uri(), "--name", name]);
            return Up { setup: self.setup, name: name.to_owned(), image, device, server: None };
        }
        let server = Server::start(name, image.path());
        // Each device is used only once, because it may be stuck.
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let device = format!("/dev/nbd{}", 2 + NEXT.fetch_add(1, Ordering::Relaxed));
        shell(&format!(
            "nbd-client -unix /tmp/{name}.sock {device} -b 4096 {} >/dev/null",
            self.setup.options()
        ));
        let up =
            Up { setup: self.setup, name: name.to_owned(), image, device, server: Some(server) };
        let deadline = Instant::now() + TIMEOUT;
        while !up.is_configured() {
            assert!(Instant::now() < deadline, "nbd-client does not connect {}", up.device);
            std::thread::sleep(Duration::from_millis(20));
        }
        up
    }

    /// Whether the product can make, write and read another device now.
    pub(crate) fn another_works(&self) -> bool {
        let image = format!("/tmp/{OTHER}.img");
        let (make, device, end) = if self.setup == Setup::Cleat {
            let make = format!("./cleat map file:{image} --name {OTHER}");
            (
                make,
                "$(readlink -f /dev/disk/by-id/cleat-another)".to_owned(),
                format!("./cleat unmap {OTHER}"),
            )
        } else {
            let make = format!(
                "rm -f /tmp/{OTHER}.sock; nbdkit -U /tmp/{OTHER}.sock -P /tmp/{OTHER}.pid file {image}
                 nbd-client -unix /tmp/{OTHER}.sock /dev/nbd1 -b 4096 {}",
                self.setup.options()
            );
            let end = format!("nbd-client -d /dev/nbd1; kill $(cat /tmp/{OTHER}.pid)");
            (make, "/dev/nbd1".to_owned(), end)
        };
        let script = format!(
            "set -e; rm -f {image} /tmp/{OTHER}.pid; truncate -s 16M {image}; {make}; sleep 0.5; device={device}
                 dd if=/dev/urandom of=$device bs=64k count=8 oflag=direct
                 dd if=$device of=/dev/null bs=64k count=8 iflag=direct; {end}"
        );
        run(&script, Duration::from_secs(20)) == End::Success
    }
}

/// A device and its server. Dropping it removes both in any state.
pub(crate) struct Up {
    setup: Setup,
    name: String,
    image: Image,
    pub(crate) device: String,
    server: Option<Server>,
}

impl Up {
    /// The process that serves the device.
    pub(crate) fn server(&self) -> u32 {
        match &self.server {
            Some(server) => server.pid(),
            None => worker(&self.name).expect("a worker"),
        }
    }

    /// Kills the server, which its supervisor then restarts.
    pub(crate) fn kill_server(&self) {
        signal("KILL", self.server());
    }

    pub(crate) fn wake_server(&self) {
        match &self.server {
            Some(server) => signal("CONT", server.pid()),
            // The mapping may be gone, and its worker with it.
            None => drop(shell("pkill -CONT -f '[c]leat worker' || true")),
        }
    }

    /// The commands with which a user removes the device. nbd-client does not handle mounts.
    pub(crate) fn detach_script(&self, mounted: Option<&str>) -> String {
        if self.setup == Setup::Cleat {
            return format!("./cleat unmap {} --force --deadline 5s || test $? = 22", self.name);
        }
        let unmount = mounted.map(|path| format!("umount -l {path}; ")).unwrap_or_default();
        format!("{unmount}nbd-client -d {}", self.device)
    }

    pub(crate) fn is_configured(&self) -> bool {
        let name = self.device.trim_start_matches("/dev/");
        Path::new(&format!("/sys/block/{name}/pid")).exists()
    }

    /// The checksum of the data that the server has stored.
    pub(crate) fn checksum(&self) -> String {
        shell(&format!("sha256sum {}", self.image.path()))
    }
}

impl Drop for Up {
    fn drop(&mut self) {
        let device = &self.device;
        self.wake_server();
        // The last resort of a user: unmount, disconnect, and kill the client.
        if self.server.take().is_some() {
            let script = format!(
                "umount -l {device}; timeout 20 nbd-client -d {device}; pkill -x nbd-client"
            );
            let _ = run(&script, TIMEOUT);
        }
    }
}

fn worker(name: &str) -> Option<u32> {
    let deadline = Instant::now() + TIMEOUT;
    loop {
        let pid = status(name)["worker_pid"].as_u64().filter(|pid| *pid > 0);
        if pid.is_some() || Instant::now() > deadline {
            return pid.and_then(|pid| pid.try_into().ok());
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// nbdkit with its file plugin, and a loop that restarts it at once whenever it ends.
struct Server {
    looping: Child,
    name: String,
}

impl Server {
    fn start(name: &str, image: &str) -> Self {
        let script = format!(
            "while :; do rm -f /tmp/{name}.sock; nbdkit -f -U /tmp/{name}.sock -P /tmp/{name}.pid file {image}; done"
        );
        shell(&format!("rm -f /tmp/{name}.sock /tmp/{name}.pid"));
        let mut command = Command::new("bash");
        command
            .args(["-c", &script])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        let looping = command.spawn().expect("bash starts");
        let server = Self { looping, name: name.to_owned() };
        let deadline = Instant::now() + TIMEOUT;
        while !Path::new(&format!("/tmp/{name}.pid")).exists() {
            assert!(Instant::now() < deadline, "nbdkit does not start");
            std::thread::sleep(Duration::from_millis(20));
        }
        server
    }

    fn pid(&self) -> u32 {
        shell(&format!("cat /tmp/{}.pid", self.name)).parse().expect("nbdkit's pid")
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let pid = self.pid();
        let _ = self.looping.kill();
        let _ = self.looping.wait();
        signal("KILL", pid);
    }
}
