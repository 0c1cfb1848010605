//! A copy of all objects of one kind, which a watch keeps up to date.
//!
//! A write of the controller goes into the copy at once ([`Mirror::put`]), so that the next decision does not
//! depend on how fast the watch is. Of two states of an object the one with the higher resourceVersion stays.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kube::ResourceExt;
use kube::runtime::watcher::Event;

/// Returns the names under which an object is found beside its own: the volume of an attachment, for example.
pub(crate) type Index<K> = fn(&K) -> Vec<String>;

/// The objects of one kind.
#[derive(Debug)]
pub(crate) struct Mirror<K: 'static> {
    /// Returns the name of an object in the mirror.
    name: fn(&K) -> String,
    indexes: &'static [Index<K>],
    state: Mutex<State<K>>,
}

#[derive(Debug)]
struct State<K> {
    objects: HashMap<String, Arc<K>>,
    /// For each index: the names of the objects by their key.
    indexed: Vec<BTreeMap<String, BTreeSet<String>>>,
    /// The objects of a list that is being read.
    listed: Option<BTreeSet<String>>,
    /// Whether a list was read to its end.
    complete: bool,
}

/// A change of an object.
#[derive(Debug)]
pub(crate) struct Change<K> {
    pub(crate) before: Option<Arc<K>>,
    pub(crate) after: Option<Arc<K>>,
}

impl<K: ResourceExt + 'static> Mirror<K> {
    /// Makes a mirror of objects whose names differ. Those of several namespaces need `name`.
    pub(crate) fn new(name: fn(&K) -> String, indexes: &'static [Index<K>]) -> Self {
        let indexed = indexes.iter().map(|_| BTreeMap::new()).collect();
        let objects = HashMap::new();
        let state = State { objects, indexed, listed: None, complete: false };
        Self { name, indexes, state: Mutex::new(state) }
    }

    /// Returns an object.
    pub(crate) fn get(&self, name: &str) -> Option<Arc<K>> {
        self.lock().objects.get(name).cloned()
    }

    /// Returns all objects.
    pub(crate) fn all(&self) -> Vec<Arc<K>> {
        self.lock().objects.values().cloned().collect()
    }

    /// Returns the number of objects.
    pub(crate) fn len(&self) -> usize {
        self.lock().objects.len()
    }

    /// Returns the objects with this key in the index number `index`.
    pub(crate) fn find(&self, index: usize, key: &str) -> Vec<Arc<K>> {
        let state = self.lock();
        let names = state.indexed[index].get(key).into_iter().flatten();
        names.filter_map(|name| state.objects.get(name).cloned()).collect()
    }

    /// Returns whether all objects were listed once.
    pub(crate) fn is_complete(&self) -> bool {
        self.lock().complete
    }

    /// Takes an object that the API server has returned for a write or a read.
    pub(crate) fn put(&self, object: K) -> Arc<K> {
        let object = Arc::new(object);
        self.replace(Arc::clone(&object));
        object
    }

    /// Removes an object that the API server does not have any more.
    pub(crate) fn remove(&self, name: &str) -> Option<Arc<K>> {
        let mut state = self.lock();
        self.forget(&mut state, name)
    }

    /// Takes an event of the watch, and returns what has changed.
    pub(crate) fn apply(&self, event: Event<K>) -> Vec<Change<K>> {
        match event {
            Event::Init => {
                self.lock().listed = Some(BTreeSet::new());
                Vec::new()
            }
            Event::InitApply(object) => {
                if let Some(listed) = &mut self.lock().listed {
                    listed.insert((self.name)(&object));
                }
                self.replace(Arc::new(object)).into_iter().collect()
            }
            Event::InitDone => self.end_list(),
            Event::Apply(object) => self.replace(Arc::new(object)).into_iter().collect(),
            Event::Delete(object) => {
                let before = self.remove(&(self.name)(&object));
                vec![Change { before: before.or(Some(Arc::new(object))), after: None }]
            }
        }
    }

    /// Removes what a complete list did not have.
    fn end_list(&self) -> Vec<Change<K>> {
        let mut state = self.lock();
        state.complete = true;
        let listed = state.listed.take().unwrap_or_default();
        let gone = state.objects.keys().filter(|name| !listed.contains(*name));
        let gone: Vec<String> = gone.cloned().collect();
        let removed = gone.iter().map(|name| self.forget(&mut state, name));
        removed.map(|before| Change { before, after: None }).collect()
    }

    /// Returns `None` if the present state is newer, or the same.
    fn replace(&self, object: Arc<K>) -> Option<Change<K>> {
        let mut state = self.lock();
        let name = (self.name)(&object);
        let known = state.objects.get(&name);
        let is_old = known.is_some_and(|known| {
            known.uid() == object.uid() && revision(known.as_ref()) >= revision(object.as_ref())
        });
        if is_old {
            return None;
        }
        let before = self.forget(&mut state, &name);
        for (index, key) in self.indexes.iter().enumerate() {
            for key in key(&object) {
                state.indexed[index].entry(key).or_default().insert(name.clone());
            }
        }
        state.objects.insert(name, Arc::clone(&object));
        Some(Change { before, after: Some(object) })
    }

    fn forget(&self, state: &mut State<K>, name: &str) -> Option<Arc<K>> {
        let known = state.objects.remove(name)?;
        for (index, key) in self.indexes.iter().enumerate() {
            for key in key(&known) {
                let names = state.indexed[index].get_mut(&key);
                let is_empty = names.is_some_and(|names| {
                    names.remove(name);
                    names.is_empty()
                });
                if is_empty {
                    state.indexed[index].remove(&key);
                }
            }
        }
        Some(known)
    }

    fn lock(&self) -> MutexGuard<'_, State<K>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The resourceVersion as a number. Kubernetes guarantees since 1.35 that the versions of one resource can be
/// compared as numbers; before, etcd's revisions were used in the same way.
fn revision<K: ResourceExt>(object: &K) -> u64 {
    object.resource_version().and_then(|version| version.parse().ok()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use k8s_openapi::api::storage::v1::VolumeAttachment;

    fn attachment(name: &str, version: u64, node: &str) -> VolumeAttachment {
        let mut attachment = VolumeAttachment::default();
        attachment.metadata.name = Some(name.to_owned());
        attachment.metadata.resource_version = Some(version.to_string());
        attachment.spec.node_name = node.to_owned();
        attachment
    }

    fn by_node() -> Mirror<VolumeAttachment> {
        let by_node =
            &[(|known: &VolumeAttachment| vec![known.spec.node_name.clone()]) as Index<_>];
        Mirror::new(ResourceExt::name_any, by_node)
    }

    #[test]
    fn an_older_state_does_not_replace_a_newer_one() {
        let mirror = by_node();
        mirror.put(attachment("v", 10, "a"));
        assert!(mirror.apply(Event::Apply(attachment("v", 9, "b"))).is_empty());
        assert_eq!(mirror.find(0, "a").len(), 1);
        assert_eq!(mirror.apply(Event::Apply(attachment("v", 11, "b"))).len(), 1);
        assert_eq!((mirror.find(0, "a").len(), mirror.find(0, "b").len()), (0, 1));
    }

    #[test]
    fn a_list_removes_what_it_does_not_have() {
        let mirror = by_node();
        mirror.put(attachment("old", 1, "a"));
        assert!(!mirror.is_complete());
        mirror.apply(Event::Init);
        assert_eq!(mirror.apply(Event::InitApply(attachment("new", 2, "a"))).len(), 1);
        let changes = mirror.apply(Event::InitDone);
        assert_eq!(changes.len(), 1);
        assert!(changes[0].after.is_none() && mirror.get("old").is_none());
        assert!(mirror.is_complete());
        assert_eq!(mirror.len(), 1);
    }
}
