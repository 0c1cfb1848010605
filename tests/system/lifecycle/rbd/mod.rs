//! Mapped RBD images in a real cluster with faults: the OSD and the monitor die and restart, the cluster
//! is full, a client is fenced, images are changed by other clients.

mod changes;
mod clients;
mod credentials;
mod encrypted;
mod full;
mod health;
mod kinds;
mod load;
mod outages;
mod quiesce;
mod refused;
mod rivals;

use cleat_api::v1::{MapRequest, Mapping};
use test_kit::ceph::{Cluster, ID, POOL};

use load::Load;
use test_kit::node::{Machine, Supervisor, index_of, request};

const MIB: u64 = 1 << 20;

/// A simulated machine with a supervisor, and a cluster.
struct Scene<'a> {
    supervisor: Supervisor,
    machine: Machine,
    cluster: &'a Cluster,
}

impl<'a> Scene<'a> {
    fn on(cluster: &'a Cluster) -> Self {
        let machine = Machine::new();
        let supervisor = machine.start();
        Self { supervisor, machine, cluster }
    }

    /// Creates an image of [`load::SIZE`] bytes.
    fn image(&self, image: &str) {
        let size = format!("{}B", load::SIZE);
        self.cluster.rbd(&["create", &spec(image), "--size", &size]).unwrap();
    }

    fn uri(&self, image: &str) -> String {
        let (conf, keyring) = (self.cluster.conf(), self.cluster.keyring(ID));
        let (conf, keyring) = (conf.display(), keyring.display());
        format!("rbd:{POOL}/{image}?conf={conf}&keyring={keyring}&id={ID}")
    }

    /// Maps an image under the image's name.
    fn map(&self, image: &str) -> Mapping {
        self.supervisor.map_with(self.request(image)).unwrap()
    }

    fn request(&self, image: &str) -> MapRequest {
        self.named(image, image)
    }

    fn named(&self, name: &str, image: &str) -> MapRequest {
        let mut request = request(name, &self.uri(image));
        let options = request.options.as_mut().unwrap();
        options.connections = u32::try_from(load::WRITERS).unwrap();
        // No request may fail before the OSDs have removed the watch of a killed client.
        options.dead_connection_timeout_s = 600;
        request
    }

    fn load(&self, mapping: &Mapping) -> Load {
        Load::start(&self.machine.kernel, index_of(mapping))
    }

    /// Reads the whole content of an image or a snapshot with `rbd export`.
    fn content(&self, image: &str) -> Vec<u8> {
        self.cluster.rbd(&["export", "--no-progress", &spec(image), "-"]).unwrap()
    }

    /// Returns the address of the client that holds an image's lock.
    fn owner(&self, image: &str) -> String {
        let listed = self.cluster.rbd(&["lock", "ls", &spec(image), "--format", "json"]).unwrap();
        let locks: serde_json::Value = serde_json::from_slice(&listed).unwrap();
        locks[0]["address"].as_str().unwrap_or_else(|| panic!("no lock: {locks}")).to_owned()
    }
}

fn spec(image: &str) -> String {
    format!("{POOL}/{image}")
}
