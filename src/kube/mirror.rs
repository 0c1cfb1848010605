//! A copy of all objects of one kind, which a watch keeps up to date.
//!
//! A write of the controller goes into the copy at once ([`Mirror::put`]), so that the next decision does not
//! depend on how fast the watch is. Of two states of an object the one with the higher resourceVersion stays. An answer
//! that arrives after the watch has shown the end of the object is dropped: no later event would remove it again.
//!
//! Every event of the watch is a change of what the watch has shown before, also if the copy has that state already:
//! the one who has read or written it may not know everything that depends on it.

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
    /// What the watch has shown last.
    shown: HashMap<String, Arc<K>>,
    /// The highest version of an event of the watch. It has shown every object that had at most this version and is left.
    progress: u64,
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
        let (objects, shown) = (HashMap::new(), HashMap::new());
        let state = State { objects, shown, progress: 0, indexed, listed: None, complete: false };
        Self { name, indexes, state: Mutex::new(state) }
    }

    /// Returns an object.
    pub(crate) fn get(&self, name: &str) -> Option<Arc<K>> {
        self.lock().objects.get(name).cloned()
    }

    /// Returns the last state of an object that the watch has shown. What the watch has not shown yet is later than that:
    /// unlike [`Mirror::get`], which can return the answer of a call, it does not run ahead of other objects.
    pub(crate) fn shown(&self, name: &str) -> Option<Arc<K>> {
        self.lock().shown.get(name).cloned()
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

    /// Takes an object that the API server has returned for a write or a read, unless the watch has shown its end since.
    pub(crate) fn put(&self, object: K) -> Arc<K> {
        let object = Arc::new(object);
        let mut state = self.lock();
        let shown = state.shown.get(&(self.name)(&object));
        let is_shown = shown.is_some_and(|shown| shown.uid() == object.uid());
        if is_shown || revision(&*object) > state.progress {
            self.replace(&mut state, Arc::clone(&object));
        }
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
                self.show(Arc::new(object)).into_iter().collect()
            }
            Event::InitDone => self.end_list(),
            Event::Apply(object) => {
                self.lock().pass(&object);
                self.show(Arc::new(object)).into_iter().collect()
            }
            Event::Delete(object) => {
                let name = (self.name)(&object);
                let mut state = self.lock();
                state.pass(&object);
                let shown = state.shown.remove(&name);
                // Another object may have been made with the same name.
                let is_same = state.objects.get(&name).is_some_and(|k| k.uid() == object.uid());
                let known = if is_same { self.forget(&mut state, &name) } else { None };
                let before = shown.or(known).unwrap_or_else(|| Arc::new(object));
                vec![Change { before: Some(before), after: None }]
            }
        }
    }

    /// Takes a state that the watch shows. Returns `None` if it has shown this one, or a newer one.
    fn show(&self, object: Arc<K>) -> Option<Change<K>> {
        let mut state = self.lock();
        let name = (self.name)(&object);
        if state.shown.get(&name).is_some_and(|shown| !is_newer(&*object, &**shown)) {
            return None;
        }
        self.replace(&mut state, Arc::clone(&object));
        let before = state.shown.insert(name.clone(), object);
        Some(Change { before, after: state.objects.get(&name).cloned() })
    }

    /// Removes what a complete list did not have.
    fn end_list(&self) -> Vec<Change<K>> {
        let mut state = self.lock();
        state.complete = true;
        let listed = state.listed.take().unwrap_or_default();
        let known = state.objects.keys().chain(state.shown.keys());
        let gone: BTreeSet<String> =
            known.filter(|name| !listed.contains(*name)).cloned().collect();
        let removed = gone.iter().map(|name| {
            let known = self.forget(&mut state, name);
            state.shown.remove(name).or(known)
        });
        let changes = removed.map(|before| Change { before, after: None }).collect();
        let newest = state.shown.values().map(|shown| revision(&**shown)).max();
        state.progress = state.progress.max(newest.unwrap_or_default());
        changes
    }

    /// Takes a state, unless the present one is newer or the same.
    fn replace(&self, state: &mut State<K>, object: Arc<K>) {
        let name = (self.name)(&object);
        if state.objects.get(&name).is_some_and(|known| !is_newer(&*object, &**known)) {
            return;
        }
        self.forget(state, &name);
        for (index, key) in self.indexes.iter().enumerate() {
            for key in key(&object) {
                state.indexed[index].entry(key).or_default().insert(name.clone());
            }
        }
        state.objects.insert(name, object);
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

impl<K: ResourceExt> State<K> {
    /// Notes how far the watch has come.
    fn pass(&mut self, object: &K) {
        self.progress = self.progress.max(revision(object));
    }
}

/// Returns whether a state is newer than another one, or one of another object with the same name.
fn is_newer<K: ResourceExt>(object: &K, known: &K) -> bool {
    known.uid() != object.uid() || revision(object) > revision(known)
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
        mirror.apply(Event::Apply(attachment("v", 9, "b")));
        assert_eq!(mirror.find(0, "a").len(), 1);
        assert_eq!(mirror.apply(Event::Apply(attachment("v", 11, "b"))).len(), 1);
        assert_eq!((mirror.find(0, "a").len(), mirror.find(0, "b").len()), (0, 1));
    }

    #[test]
    fn a_state_that_was_read_before_the_watch_has_shown_it_is_a_change() {
        let mirror = by_node();
        mirror.apply(Event::Apply(attachment("v", 1, "a")));
        mirror.put(attachment("v", 2, "b"));
        let changes = mirror.apply(Event::Apply(attachment("v", 2, "b")));
        let node = |known: &Option<Arc<VolumeAttachment>>| {
            known.as_ref().map(|known| known.spec.node_name.clone())
        };
        assert_eq!(node(&changes[0].before).as_deref(), Some("a"));
        assert_eq!(node(&changes[0].after).as_deref(), Some("b"));
        assert!(mirror.apply(Event::Apply(attachment("v", 2, "b"))).is_empty());
        // The same for an object that is known to be gone.
        mirror.remove("v");
        mirror.apply(Event::Init);
        assert_eq!(mirror.apply(Event::InitDone).len(), 1);
        assert!(mirror.apply(Event::InitDone).is_empty());
    }

    #[test]
    fn an_answer_that_arrives_after_the_end_of_its_object_does_not_bring_it_back() {
        let mirror = by_node();
        let with_uid = |version, uid: &str| {
            let mut object = attachment("v", version, "a");
            object.metadata.uid = Some(uid.to_owned());
            object
        };
        mirror.apply(Event::Apply(with_uid(5, "1")));
        mirror.apply(Event::Delete(with_uid(7, "1")));
        mirror.put(with_uid(6, "1"));
        assert!(mirror.get("v").is_none() && mirror.find(0, "a").is_empty());
        // It was made again under its name.
        mirror.put(with_uid(8, "2"));
        assert_eq!(mirror.get("v").unwrap().uid().as_deref(), Some("2"));
        mirror.apply(Event::Apply(with_uid(9, "2")));
        mirror.put(with_uid(6, "1"));
        assert_eq!(mirror.get("v").unwrap().uid().as_deref(), Some("2"));
        // The same after a list that does not have it.
        for event in [Event::Init, Event::InitApply(attachment("other", 20, "a")), Event::InitDone]
        {
            mirror.apply(event);
        }
        mirror.put(with_uid(12, "2"));
        assert!(mirror.get("v").is_none());
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
