//! A copy of all objects of one kind, which a watch keeps up to date.
//!
//! A write of the controller goes into the copy at once ([`Mirror::put`]), so that the next decision does not
//! depend on how fast the watch is. Of two states of an object the one with the higher resourceVersion stays. An answer
//! that arrives after the watch has shown the end of the object is dropped: no later event would remove it again.
//!
//! An object that cannot be read ([`Guarded`]) is not among the objects, and it is not missing: [`Mirror::unreadable`].
//!
//! Every event of the watch is a change of what the watch has shown before, also if the copy has that state already:
//! the one who has read or written it may not know everything that depends on it.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kube::Resource;
use kube::api::ObjectMeta;
use kube::runtime::watcher::Event;
use serde::de::DeserializeOwned;
use tokio::time::Instant;

use crate::guard::{Guarded, Raw, Unreadable};

/// The time between two lines of the log about objects that cannot be read. The metric has their number.
const WARNING_PERIOD: Duration = Duration::from_secs(10);

/// Returns the names under which an object is found beside its own: the volume of an attachment, for example.
pub(crate) type Index<K> = fn(&K) -> Vec<String>;

/// The objects of one kind.
#[derive(Debug)]
pub(crate) struct Mirror<K: 'static> {
    /// Returns the name of an object in the mirror.
    name: fn(&ObjectMeta) -> String,
    indexes: &'static [Index<K>],
    state: Mutex<State<K>>,
}

#[derive(Debug)]
struct State<K> {
    objects: HashMap<String, Arc<K>>,
    /// What the watch has shown last.
    shown: HashMap<String, Arc<K>>,
    /// The objects that cannot be read.
    unreadable: HashMap<String, Arc<Unreadable>>,
    /// When the log had the last line about one.
    warned: Option<Instant>,
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
    /// The name of the object in the mirror.
    pub(crate) name: String,
    pub(crate) before: Option<Arc<K>>,
    /// `None` also if the object cannot be read any more.
    pub(crate) after: Option<Arc<K>>,
}

impl<K: Resource<DynamicType = ()> + 'static> Mirror<K> {
    /// Makes a mirror of objects whose names differ. Those of several namespaces need `name`.
    pub(crate) fn new(name: fn(&ObjectMeta) -> String, indexes: &'static [Index<K>]) -> Self {
        let state = State {
            objects: HashMap::new(),
            shown: HashMap::new(),
            unreadable: HashMap::new(),
            warned: None,
            progress: 0,
            indexed: indexes.iter().map(|_| BTreeMap::new()).collect(),
            listed: None,
            complete: false,
        };
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

    /// Returns what is known of an object that cannot be read.
    pub(crate) fn unreadable(&self, name: &str) -> Option<Arc<Unreadable>> {
        self.lock().unreadable.get(name).cloned()
    }

    /// Returns the number of objects that cannot be read.
    pub(crate) fn unreadable_len(&self) -> usize {
        self.lock().unreadable.len()
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
        let shown = state.shown.get(&(self.name)(object.meta()));
        let is_shown = shown.is_some_and(|shown| shown.meta().uid == object.meta().uid);
        if is_shown || revision(object.meta()) > state.progress {
            self.replace(&mut state, Arc::clone(&object));
        }
        object
    }

    /// Removes an object that the API server does not have any more.
    pub(crate) fn remove(&self, name: &str) -> Option<Arc<K>> {
        let mut state = self.lock();
        state.unreadable.remove(name);
        self.forget(&mut state, name)
    }

    /// Takes an event of the watch of objects that may not be readable, and returns what has changed. Objects that `keep`
    /// refuses are passed over.
    pub(crate) fn apply_raw(
        &self,
        event: Event<Raw>,
        keep: impl Fn(&Guarded<K>) -> bool,
    ) -> Vec<Change<K>>
    where
        K: DeserializeOwned,
    {
        let changed = match event {
            Event::Init => return self.apply(Event::Init),
            Event::InitDone => return self.apply(Event::InitDone),
            Event::InitApply(object) => match object.into() {
                object if !keep(&object) => None,
                Guarded::Readable(object) => return self.apply(Event::InitApply(object)),
                Guarded::Unreadable(object) => {
                    let mut state = self.lock();
                    if let Some(listed) = &mut state.listed {
                        listed.insert((self.name)(&object.metadata));
                    }
                    self.hide(&mut state, *object)
                }
            },
            Event::Apply(object) => match object.into() {
                object if !keep(&object) => None,
                Guarded::Readable(object) => return self.apply(Event::Apply(object)),
                Guarded::Unreadable(object) => {
                    let mut state = self.lock();
                    state.pass(&object.metadata);
                    self.hide(&mut state, *object)
                }
            },
            Event::Delete(object) => match object.into() {
                Guarded::Readable(object) => return self.apply(Event::Delete(object)),
                Guarded::Unreadable(object) => {
                    let mut state = self.lock();
                    state.pass(&object.metadata);
                    Some(self.end(&mut state, &object.metadata))
                }
            },
        };
        changed.into_iter().collect()
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
                    listed.insert((self.name)(object.meta()));
                }
                self.show(Arc::new(object)).into_iter().collect()
            }
            Event::InitDone => self.end_list(),
            Event::Apply(object) => {
                self.lock().pass(object.meta());
                self.show(Arc::new(object)).into_iter().collect()
            }
            Event::Delete(object) => {
                let mut state = self.lock();
                state.pass(object.meta());
                let mut change = self.end(&mut state, object.meta());
                change.before.get_or_insert_with(|| Arc::new(object));
                vec![change]
            }
        }
    }

    /// Removes an object that was deleted.
    fn end(&self, state: &mut State<K>, metadata: &ObjectMeta) -> Change<K> {
        let name = (self.name)(metadata);
        let shown = state.shown.remove(&name);
        state.unreadable.remove(&name);
        // Another object may have been made with the same name.
        let is_same =
            state.objects.get(&name).is_some_and(|known| known.meta().uid == metadata.uid);
        let known = if is_same { self.forget(state, &name) } else { None };
        Change { name, before: shown.or(known), after: None }
    }

    /// Takes a state that cannot be read. Returns `None` if a newer one is known already.
    fn hide(&self, state: &mut State<K>, object: Unreadable) -> Option<Change<K>> {
        let name = (self.name)(&object.metadata);
        let is_old = |known: &ObjectMeta| !is_newer(&object.metadata, known);
        let known = state.objects.get(&name).map(|known| known.meta());
        let unreadable = state.unreadable.get(&name).map(|known| &known.metadata);
        if known.is_some_and(is_old) || unreadable.is_some_and(is_old) {
            return None;
        }
        match state.unreadable.get(&name) {
            // A node can write it again and again.
            Some(known) if known.metadata.uid == object.metadata.uid => {
                if known.is_reported() {
                    object.report();
                }
            }
            _ => {
                let now = Instant::now();
                if state.warned.is_none_or(|at| now.duration_since(at) >= WARNING_PERIOD) {
                    state.warned = Some(now);
                    tracing::warn!("{}", crate::api::message(&object.error(&K::kind(&()))));
                }
            }
        }
        let known = self.forget(state, &name);
        let before = state.shown.remove(&name).or(known);
        state.unreadable.insert(name.clone(), Arc::new(object));
        Some(Change { name, before, after: None })
    }

    /// Takes a state that the watch shows. Returns `None` if it has shown this one, or a newer one.
    fn show(&self, object: Arc<K>) -> Option<Change<K>> {
        let mut state = self.lock();
        let name = (self.name)(object.meta());
        let shown = state.shown.get(&name);
        if shown.is_some_and(|shown| !is_newer(object.meta(), shown.meta())) {
            return None;
        }
        self.replace(&mut state, Arc::clone(&object));
        let before = state.shown.insert(name.clone(), object);
        let after = state.objects.get(&name).cloned();
        Some(Change { name, before, after })
    }

    /// Removes what a complete list did not have.
    fn end_list(&self) -> Vec<Change<K>> {
        let mut state = self.lock();
        state.complete = true;
        let listed = state.listed.take().unwrap_or_default();
        let known = state.objects.keys().chain(state.shown.keys()).chain(state.unreadable.keys());
        let gone: BTreeSet<String> =
            known.filter(|name| !listed.contains(*name)).cloned().collect();
        let removed = gone.into_iter().map(|name| {
            let known = self.forget(&mut state, &name);
            state.unreadable.remove(&name);
            let before = state.shown.remove(&name).or(known);
            Change { name, before, after: None }
        });
        let changes = removed.collect();
        let shown = state.shown.values().map(|shown| shown.meta());
        let all = shown.chain(state.unreadable.values().map(|object| &object.metadata));
        let newest = all.map(revision).max();
        state.progress = state.progress.max(newest.unwrap_or_default());
        changes
    }

    /// Takes a state, unless the present one is newer or the same.
    fn replace(&self, state: &mut State<K>, object: Arc<K>) {
        let name = (self.name)(object.meta());
        let known = state.objects.get(&name).map(|known| known.meta());
        let unreadable = state.unreadable.get(&name).map(|known| &known.metadata);
        if known.into_iter().chain(unreadable).any(|known| !is_newer(object.meta(), known)) {
            return;
        }
        state.unreadable.remove(&name);
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

impl<K> State<K> {
    /// Notes how far the watch has come.
    fn pass(&mut self, metadata: &ObjectMeta) {
        self.progress = self.progress.max(revision(metadata));
    }
}

/// Returns whether a state is newer than another one, or one of another object with the same name.
fn is_newer(object: &ObjectMeta, known: &ObjectMeta) -> bool {
    known.uid != object.uid || revision(object) > revision(known)
}

/// The resourceVersion as a number. Kubernetes guarantees since 1.35 that the versions of one resource can be
/// compared as numbers; before, etcd's revisions were used in the same way.
fn revision(metadata: &ObjectMeta) -> u64 {
    let version = metadata.resource_version.as_deref();
    version.and_then(|version| version.parse().ok()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::objects::VolumeAttachment;
    use kube::ResourceExt;

    use crate::kind::name_of;

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
        Mirror::new(name_of, by_node)
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

    /// The same without what every attachment has.
    fn unreadable(name: &str, version: u64) -> Raw {
        let metadata = serde_json::json!({ "name": name, "resourceVersion": version.to_string() });
        let object = serde_json::json!({ "metadata": metadata, "spec": 1 });
        serde_json::from_value(object).unwrap()
    }

    #[test]
    fn an_object_that_cannot_be_read_is_neither_there_nor_missing() {
        let mirror = by_node();
        let apply = |event| mirror.apply_raw(event, |_| true);
        mirror.apply(Event::Apply(attachment("v", 5, "a")));
        let changes = apply(Event::Apply(unreadable("v", 6)));
        assert!(changes[0].before.is_some() && changes[0].after.is_none());
        assert_eq!((changes[0].name.as_str(), mirror.len()), ("v", 0));
        assert!(mirror.find(0, "a").is_empty());
        assert!(mirror.unreadable("v").unwrap().report());
        // An answer of a write before it, which is late, and a later state of the same kind.
        mirror.put(attachment("v", 5, "a"));
        assert_eq!((mirror.len(), mirror.unreadable_len()), (0, 1));
        assert_eq!(apply(Event::Apply(unreadable("v", 7))).len(), 1);
        assert!(!mirror.unreadable("v").unwrap().report(), "it is reported once");
        assert!(apply(Event::Apply(unreadable("v", 6))).is_empty());
        // A list has it.
        for event in [Event::Init, Event::InitApply(unreadable("v", 7)), Event::InitDone] {
            assert!(apply(event).is_empty());
        }
        assert!(mirror.is_complete() && mirror.unreadable("v").is_some());
        // The answer of a write that has mended it.
        mirror.put(attachment("v", 8, "b"));
        assert_eq!((mirror.find(0, "b").len(), mirror.unreadable_len()), (1, 0));
        assert!(apply(Event::Apply(unreadable("v", 7))).is_empty());
        assert_eq!(mirror.len(), 1);
    }

    #[test]
    fn an_object_that_cannot_be_read_ends() {
        let mirror = by_node();
        let apply = |event| mirror.apply_raw(event, |_| true).len();
        assert_eq!(apply(Event::Apply(unreadable("v", 5))), 1);
        assert_eq!(apply(Event::Delete(unreadable("v", 6))), 1);
        assert!(mirror.unreadable("v").is_none());
        assert_eq!(apply(Event::Apply(unreadable("v", 7))), 1);
        assert_eq!(apply(Event::Init) + apply(Event::InitDone), 1);
        assert!(mirror.unreadable("v").is_none());
        mirror.remove("v");
        assert_eq!(apply(Event::Apply(unreadable("v", 8))), 1);
        mirror.remove("v");
        assert!(mirror.unreadable("v").is_none());
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
