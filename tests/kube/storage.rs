//! The storage of the tests: records in memory, with the rules of `cleat_grants`.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use cleat_core::error::{Error, ErrorKind, Result};
use cleat_grants::object::{Generation, Mode};
use cleat_grants::record::{Claim, FencePlan, Record, Refusal, Target};
use cleat_kube::storage::{Backing, Fencing, Storage};

/// All volumes of a test. `shared/NAME` can be fenced, `local/NODE/NAME` exists on the node NODE only,
/// `rbd/…` is an image of a Ceph cluster, and `by-hand` a static volume of one. Every other volume is refused.
#[derive(Debug, Default)]
pub(crate) struct TestStorage(Mutex<BTreeMap<String, Arc<Image>>>);

/// A volume.
#[derive(Debug, Default)]
pub(crate) struct Image {
    record: Mutex<Record>,
    cut: Mutex<BTreeSet<String>>,
}

impl TestStorage {
    /// Returns the volume `handle`.
    pub(crate) fn image(&self, handle: &str) -> Arc<Image> {
        Arc::clone(self.0.lock().unwrap().entry(handle.to_owned()).or_default())
    }
}

impl Storage for TestStorage {
    fn find(&self, handle: &str) -> Result<Backing> {
        match handle.split('/').collect::<Vec<_>>()[..] {
            ["shared", _] => Ok(Backing::Granted(self.image(handle))),
            ["local", node, _] => Ok(Backing::Local { node_id: node.to_owned() }),
            ["rbd", ..] | ["by-hand"] => crate::rbd::volumes().find(handle),
            _ => Err(Error::new(
                ErrorKind::Unsupported,
                format!("cannot attach volume {handle}: its clients cannot be fenced"),
            )),
        }
    }
}

impl Image {
    /// Claims the volume as a client of `node`, which is named after it.
    pub(crate) fn claim(&self, node: &str, generation: Generation) -> Result<(), Refusal> {
        let mut record = self.record.lock().unwrap();
        let (client, node) = (client(node), node.to_owned());
        let mode = Mode::ReadWrite;
        *record = record.admit_claim(Claim { node, generation, client, mode })?.record;
        Ok(())
    }

    /// Releases the claim of `node`.
    pub(crate) fn release_claim(&self, node: &str) {
        let mut record = self.record.lock().unwrap();
        *record = record.release(&client(node)).expect("the node has a claim");
    }

    /// Returns the record.
    pub(crate) fn read(&self) -> Record {
        self.record.lock().unwrap().clone()
    }

    /// Returns whether the client of `node` is cut off.
    pub(crate) fn is_cut(&self, node: &str) -> bool {
        self.cut.lock().unwrap().contains(&client(node))
    }
}

fn client(node: &str) -> String {
    format!("client-of-{node}")
}

impl Fencing for Image {
    fn record(&self, _: Instant) -> Result<Record> {
        Ok(self.read())
    }

    fn fence(&self, target: &Target, _: Instant) -> Result<()> {
        let mut record = self.record.lock().unwrap();
        if let FencePlan::Cut(client) = record.plan_fence(target) {
            self.cut.lock().unwrap().extend(client.clone());
            *record = record.seal(target, client);
        }
        Ok(())
    }

    fn unfence(&self, client: &str, _: Instant) -> Result<()> {
        let mut record = self.record.lock().unwrap();
        if let Some(clean) = record.unfence(client) {
            self.cut.lock().unwrap().remove(client);
            *record = clean;
        }
        Ok(())
    }

    fn release(&self, _: &str, client: &str, _: Instant) -> Result<()> {
        let mut record = self.record.lock().unwrap();
        if let Some(released) = record.release(client) {
            self.cut.lock().unwrap().insert(client.to_owned());
            *record = released;
        }
        Ok(())
    }
}
