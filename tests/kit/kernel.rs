//! The test suite of the `Kernel` trait, run against the real kernel and the simulated one.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use cleat_core::error::ErrorKind;
use cleat_kernel::{ConnectSpec, DeviceIndex, DevicePaths, Holder, Identity, Kernel, KernelEvent};

use crate::nbd::server::{FLAGS, Server, hangs_up};
use crate::wait::LIMIT;

/// The size of the test devices, in bytes.
pub const SIZE: u64 = 4 << 20;

/// A mapped device and the server of its connections.
pub struct Mapped<'a> {
    pub kernel: &'a dyn Kernel,
    pub index: DeviceIndex,
    pub identity: Identity,
    pub server: Server,
}

/// Returns the deadline of a call that must succeed: [`LIMIT`] from now.
pub fn soon() -> Instant {
    Instant::now() + LIMIT
}

/// Returns the identity of the mapping `name`, unique to this process.
pub fn identity(name: &str) -> Identity {
    Identity::new(&format!("{:08x}", std::process::id()), name)
}

/// Returns the specification of a device of [`SIZE`] bytes with these sockets.
pub fn spec(name: &str, sockets: Vec<OwnedFd>) -> ConnectSpec {
    ConnectSpec {
        sockets,
        size: SIZE,
        block_size: 4096,
        transmission_flags: FLAGS,
        identity: identity(name),
        dead_connection_timeout: LIMIT,
        request_timeout: Duration::ZERO,
        replay_delay: Some(Duration::from_millis(500)),
    }
}

/// Connects a device with `connections` sockets to a new server.
pub fn connect<'a>(kernel: &'a dyn Kernel, name: &str, connections: usize) -> Mapped<'a> {
    let server = Server::new(SIZE);
    let sockets = (0..connections).map(|_| server.connection()).collect();
    let index = kernel.connect(spec(name, sockets)).unwrap();
    Mapped { kernel, index, identity: identity(name), server }
}

impl Mapped<'_> {
    /// Returns whether the kernel lists the device with its identity.
    pub fn is_listed(&self) -> bool {
        let devices = self.kernel.devices().unwrap();
        let ours = Some(&self.identity);
        devices.iter().any(|d| d.index == self.index && d.identity().as_ref() == ours)
    }

    /// Waits until the device is usable and returns its paths.
    pub fn ready(&self) -> DevicePaths {
        self.kernel.wait_ready(self.index, &self.identity, SIZE, soon()).unwrap()
    }

    /// Disconnects the device and checks that the kernel does not list it any more.
    pub fn disconnect(&self) {
        self.kernel.disconnect(self.index, &self.identity, soon()).unwrap();
        assert!(!self.is_listed(), "the device is listed after its disconnect");
    }
}

/// Runs all checks.
pub fn suite(kernel: &dyn Kernel) {
    a_device_is_connected_and_disconnected(kernel);
    two_devices_are_independent(kernel);
    devices_connect_and_disconnect_concurrently(kernel);
    another_identity_is_refused(kernel);
    a_device_is_open_exclusively_until_its_disconnect(kernel);
    an_unneeded_replacement_socket_is_closed(kernel);
    a_dead_connection_is_reported_and_replaced(kernel);
    a_resize_changes_the_device_size(kernel);
    a_connect_without_sockets_or_with_size_0_is_refused(kernel);
}

fn a_device_is_connected_and_disconnected(kernel: &dyn Kernel) {
    let mapped = connect(kernel, "lives", 1);
    let paths = mapped.ready();
    assert_eq!(paths.node.to_str().unwrap(), format!("/dev/nbd{}", mapped.index));
    assert_eq!(paths.symlink.to_str().unwrap(), "/dev/disk/by-id/cleat-lives");
    let devices = kernel.devices().unwrap();
    let device = devices.iter().find(|device| device.index == mapped.index).unwrap();
    assert!(device.connected && device.size == SIZE, "{device:?}");
    kernel.flush(mapped.index, soon()).unwrap();
    assert_eq!(settled_holders(kernel, mapped.index), []);
    mapped.disconnect();
    assert!(mapped.server.ended_in_order(1), "the kernel sends NBD_CMD_DISC");
    mapped.disconnect();
    assert!(!paths.symlink.exists(), "{} still exists", paths.symlink.display());
}

/// Returns the holders of the device after udev's probes have closed it.
pub fn settled_holders(kernel: &dyn Kernel, index: DeviceIndex) -> Vec<Holder> {
    let deadline = soon();
    loop {
        let holders = kernel.holders(index).unwrap();
        if holders.is_empty() || Instant::now() > deadline {
            return holders;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn a_device_is_open_exclusively_until_its_disconnect(kernel: &dyn Kernel) {
    let mapped = connect(kernel, "exclusive", 1);
    mapped.ready();
    let attempt = |identity: &Identity| kernel.open_exclusively(mapped.index, identity);
    assert_eq!(attempt(&identity("another")).unwrap_err().kind(), ErrorKind::NotFound);
    let open = attempt(&mapped.identity).unwrap().expect("nothing has claimed it");
    let claimed = attempt(&mapped.identity).unwrap().expect_err("it is open exclusively");
    assert!(matches!(claimed.as_slice(), [Holder::Kernel { .. }]), "{claimed:?}");
    kernel.flush(mapped.index, soon()).unwrap();
    drop(open);
    let deadline = soon();
    let open = loop {
        match attempt(&mapped.identity).unwrap() {
            Ok(open) => break open,
            Err(claimed) => assert!(Instant::now() < deadline, "{claimed:?}"),
        }
        std::thread::sleep(Duration::from_millis(20));
    };
    // The open device alone would stay configured.
    kernel.disconnect_exclusively(mapped.index, &mapped.identity, open, soon()).unwrap();
    assert!(!mapped.is_listed(), "the device is listed after its disconnect");
}

fn two_devices_are_independent(kernel: &dyn Kernel) {
    let (one, two) = (connect(kernel, "one", 1), connect(kernel, "two", 4));
    assert_ne!(one.index, two.index);
    assert_ne!(one.ready().symlink, two.ready().symlink);
    one.disconnect();
    assert!(two.is_listed());
    two.disconnect();
    assert!(two.server.ended_in_order(4), "the kernel ends each connection");
}

fn devices_connect_and_disconnect_concurrently(kernel: &dyn Kernel) {
    let names: Vec<String> = (0..20).map(|n| format!("many-{n}")).collect();
    std::thread::scope(|scope| {
        for name in &names {
            scope.spawn(move || {
                let mapped = connect(kernel, name, 1);
                mapped.ready();
                mapped.disconnect();
            });
        }
    });
    let ours = identity("many-");
    let mut left = kernel.devices().unwrap();
    left.retain(|d| d.backend.as_ref().is_some_and(|b| b.starts_with(ours.as_str())));
    assert_eq!(left, []);
}

fn another_identity_is_refused(kernel: &dyn Kernel) {
    let mapped = connect(kernel, "mine", 1);
    mapped.ready();
    let other = Identity::new("ffffffff", "mine");
    let refused = kernel.reconfigure(mapped.index, &other, vec![mapped.server.connection()]);
    assert_eq!(refused.unwrap_err().kind(), ErrorKind::NotFound);
    let refused = kernel.resize(mapped.index, &other, 2 * SIZE);
    assert_eq!(refused.unwrap_err().kind(), ErrorKind::NotFound);
    // The call succeeds because that identity is not connected, and the device is unchanged.
    kernel.disconnect(mapped.index, &other, soon()).unwrap();
    assert!(mapped.is_listed());
    mapped.ready();
    mapped.disconnect();
    let gone = kernel.reconfigure(mapped.index, &mapped.identity, vec![mapped.server.connection()]);
    assert_eq!(gone.unwrap_err().kind(), ErrorKind::NotFound);
}

fn an_unneeded_replacement_socket_is_closed(kernel: &dyn Kernel) {
    let mapped = connect(kernel, "enough", 2);
    mapped.ready();
    let (ours, theirs) = UnixStream::pair().unwrap();
    kernel.reconfigure(mapped.index, &mapped.identity, vec![OwnedFd::from(theirs)]).unwrap();
    assert!(hangs_up(&ours, LIMIT), "the kernel keeps a socket that it does not need");
    kernel.flush(mapped.index, soon()).unwrap();
    mapped.disconnect();
}

fn a_dead_connection_is_reported_and_replaced(kernel: &dyn Kernel) {
    let events = kernel.events().unwrap();
    let mapped = connect(kernel, "revived", 1);
    mapped.ready();
    mapped.server.cut();
    let deadline = soon();
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        match events.recv_timeout(left).expect("an event for the dead connection") {
            KernelEvent::LinkDead(index) if index == mapped.index => break,
            _ => {}
        }
    }
    assert!(mapped.is_listed(), "a device remains without connections");
    let replacement = mapped.server.connection();
    kernel.reconfigure(mapped.index, &mapped.identity, vec![replacement]).unwrap();
    kernel.flush(mapped.index, soon()).unwrap();
    assert_eq!(mapped.server.connections_alive(), 1, "the new socket is in place");
    mapped.disconnect();
}

fn a_resize_changes_the_device_size(kernel: &dyn Kernel) {
    let mapped = connect(kernel, "grows", 1);
    mapped.ready();
    mapped.server.grow(2 * SIZE);
    kernel.resize(mapped.index, &mapped.identity, 2 * SIZE).unwrap();
    kernel.wait_ready(mapped.index, &mapped.identity, 2 * SIZE, soon()).unwrap();
    let deadline = Instant::now() + Duration::from_millis(100);
    let wrong = kernel.wait_ready(mapped.index, &mapped.identity, SIZE, deadline).unwrap_err();
    assert_eq!(wrong.kind(), ErrorKind::TimedOut, "the size is checked");
    mapped.disconnect();
}

fn a_connect_without_sockets_or_with_size_0_is_refused(kernel: &dyn Kernel) {
    let none = kernel.connect(spec("impossible", Vec::new())).unwrap_err();
    assert_eq!(none.kind(), ErrorKind::InvalidArgument);
    let server = Server::new(SIZE);
    let empty = ConnectSpec { size: 0, ..spec("impossible", vec![server.connection()]) };
    assert_eq!(kernel.connect(empty).unwrap_err().kind(), ErrorKind::InvalidArgument);
}
