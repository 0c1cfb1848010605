//! The management of volumes in their home. A volume is found anew for each call.

use std::ops::ControlFlow;
use std::sync::Arc;

use cleat_backend::CredentialSet;
use cleat_backend::changes::ChangeStore;
use cleat_backend::claimant::Claimant;
use cleat_backend::store::{
    CheckStore, CloneStore, Entry, Failure, Info, LabelStore, Labels, Layout, Listing, Page,
    Progress, Removal, Removed, SnapshotStore, Store, Watcher,
};
use cleat_backend::uri::{Size, VolumeUri, invalid};
use cleat_core::error::{Error, ErrorKind, Result};
use cleat_object::codec::{Compression, Description, MAX_MAP_PAGES};
use cleat_object::encryption::KeyFile;
use cleat_object::name::{Name, VolumeId};
use cleat_object::store as objects;
use cleat_object::volume::{Config, Place, Volume};

use crate::ask::{Change, Writer, ask, execute};
use crate::claim::record::Use;
use crate::claim::{incomplete, newest, removed};
use crate::connection::Connection;
use crate::errors::{is_damage, no_snapshot, wait};
use crate::executor::block_until;
use crate::fence::end;
use crate::home::Home;
use crate::image::identity;
use crate::labels::VolumeLabels;
use crate::nonce::{key, nonce, random};
use crate::parents;
use crate::spec::VolumeAt;
use crate::table::described;
use crate::timeouts::{CALL_TIMEOUT, after};
use crate::writer::change;

/// The range of the volume that a page of the map covers, in bytes.
const PAGE_BYTES: u32 = 1 << 20;

/// The encryption, for people.
const ENCRYPTION: &str = "aes-256-gcm";

/// A home with its volumes.
pub(crate) struct ObjectStore {
    pub(crate) home: Home,
    pub(crate) connection: Arc<dyn Connection>,
    pub(crate) claimant: Claimant,
    /// The key file of encrypted volumes.
    pub(crate) key: Option<KeyFile>,
}

impl ObjectStore {
    /// Gets access to the home.
    ///
    /// # Errors
    /// Returns the error of missing credentials.
    pub(crate) fn connect(
        home: &Home,
        claimant: &Claimant,
        mut credentials: CredentialSet,
    ) -> Result<Self> {
        credentials.complete(&home.credential_files())?;
        let connection = home.connect(&credentials, None)?;
        connection.follow();
        let key = home.key(&credentials)?;
        Ok(Self { home: home.clone(), connection, claimant: claimant.clone(), key })
    }

    pub(crate) fn volume(&self, name: &str) -> Result<VolumeAt> {
        VolumeAt::new(self.home.clone(), name)
    }

    /// Finds a volume; `None` if there is none, or if its parent was removed after a removal of it had begun.
    pub(crate) fn find(&self, name: &str) -> Result<Option<(VolumeAt, Place)>> {
        let volume = self.volume(name)?;
        let found = self.connection.store(name).and_then(|store| {
            let found = parents::find(&*self.connection, store, nonce()?, self.key.as_ref());
            wait(&volume.shown(), after(CALL_TIMEOUT), found)
        });
        Ok(if_found(found)?.map(|place| (volume, place)))
    }

    /// Finds a volume without its parent; `None` if there is none.
    pub(crate) fn find_alone(&self, name: &str) -> Result<Option<(VolumeAt, Place)>> {
        let volume = self.volume(name)?;
        let found = self.connection.store(name).and_then(|store| {
            wait(&volume.shown(), after(CALL_TIMEOUT), Place::find_alone(store, nonce()?))
        });
        Ok(if_found(found)?.map(|place| (volume, place)))
    }

    /// Finds a volume.
    ///
    /// # Errors
    /// Returns `NotFound` if it does not exist.
    pub(crate) fn existing(&self, name: &str) -> Result<(VolumeAt, Place)> {
        self.find(name)?.ok_or_else(|| {
            let message = format!("{} does not exist", self.home.shown(name));
            Error::new(ErrorKind::NotFound, message)
        })
    }

    /// The volume as it is now.
    pub(crate) fn view(volume: &VolumeAt, place: &Place) -> Result<Volume> {
        wait(&volume.shown(), after(CALL_TIMEOUT), place.view(Config::default()))
    }

    /// Carries out a change of the volume. Returns whether anything has changed.
    ///
    /// # Errors
    /// Fails as [`ask`] does if a client serves the volume, and otherwise as [`change`] does.
    pub(crate) fn change_content(
        &self,
        volume: &VolumeAt,
        place: &Place,
        wanted: &Change,
    ) -> Result<bool> {
        let shown = volume.shown();
        let changed = change(place, &shown, &self.claimant, async |opened| {
            execute(&opened, wanted).await.map(|outcome| outcome.changed)
        });
        let seen = match changed {
            Err(error) if error.kind() == ErrorKind::InUse => {
                let seen = wait(&shown, after(CALL_TIMEOUT), newest(place))?;
                if !seen.is_held() {
                    return Err(error);
                }
                seen
            }
            other => return other,
        };
        let store = self.connection.store(&volume.name)?;
        let client = seen.owner.as_ref().map(|owner| &owner.client);
        let has_ended = || client.is_some_and(|client| client.has_ended(&self.claimant));
        let writer = Writer { epoch: seen.epoch, has_ended: &has_ended };
        let outcome = ask(&*store, &shown, (&writer, wanted), after(CALL_TIMEOUT))?;
        Ok(outcome.changed)
    }

    /// Reads the labels of a volume.
    ///
    /// # Errors
    /// Fails as [`VolumeLabels::read`] does.
    pub(crate) fn labels_of(&self, name: &str, place: &Place) -> Result<Labels> {
        self.with_labels(name, place, |labels| labels.read())
    }

    /// Checks that an existing volume has the labels of a new one.
    ///
    /// # Errors
    /// Fails as [`VolumeLabels::check`] does.
    pub(crate) fn check_labels(&self, name: &str, place: &Place, wanted: &Labels) -> Result<()> {
        self.with_labels(name, place, |labels| labels.check(wanted))
    }

    fn with_labels<T>(
        &self,
        name: &str,
        place: &Place,
        work: impl FnOnce(VolumeLabels<'_>) -> Result<T>,
    ) -> Result<T> {
        let (store, shown) = (self.connection.store(name)?, self.home.shown(name));
        let volume = place.description().volume;
        work(VolumeLabels { store: &*store, shown: &shown, volume })
    }

    fn entry(&self, name: String, details: bool) -> Result<Entry> {
        let volume = self.volume(&name)?;
        let uri = VolumeUri::new(Arc::new(volume)).to_string();
        let mut entry = Entry { name, uri, ..Entry::default() };
        if details {
            match self.info(&entry.name, None) {
                Ok(info) => {
                    entry.id = info.id;
                    entry.size_bytes = Some(info.size_bytes);
                    entry.watchers = Some(info.watchers.len());
                    entry.snapshots = Some(info.snapshots.len());
                    entry.parent = info.parent.map(|parent| parent.to_string());
                }
                Err(error) => entry.error = Some(Failure::from(&error)),
            }
        }
        Ok(entry)
    }
}

fn if_found<T>(found: Result<T>) -> Result<Option<T>> {
    match found {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        other => other.map(Some),
    }
}

impl Store for ObjectStore {
    fn create(&self, name: &str, size: u64, layout: &Layout) -> Result<bool> {
        let compression = check_layout(layout)?;
        if let Some((volume, place)) = self.find(name)? {
            let shown = volume.shown();
            if wait(&shown, after(CALL_TIMEOUT), newest(&place))?.is_being_removed() {
                return Err(removed(&shown));
            }
            // An earlier call may have been killed before it has checked the store.
            let store = self.connection.store(name)?;
            check_conditional(&*store, &shown, place.description())?;
            let now = Self::view(&volume, &place)?.size();
            if now == size {
                check_compression(&volume, &place, compression)?;
                self.check_labels(name, &place, &layout.labels)?;
                return Ok(false);
            }
            let (now, size) = (Size(now), Size(size));
            let message = format!("{shown} exists with a size of {now}, not {size}");
            return Err(Error::new(ErrorKind::AlreadyExists, message)
                .with_repair("use another name, or the present size"));
        }
        let shown = self.volume(name)?.shown();
        check_size(&shown, size)?;
        self.connection.prepare(name)?;
        let store = self.connection.store(name)?;
        let volume = VolumeId(random()?);
        let mut description = Description {
            compression: compression.flatten(),
            ..Description::new(volume, nonce()?, size, PAGE_BYTES)
        };
        if let Some(file) = &self.key {
            description.key = Some(file.wrap(&description, &*key()?));
        }
        let labels = VolumeLabels { store: &*store, shown: &shown, volume };
        labels.set(&layout.labels)?;
        let created = Volume::create(Arc::clone(&store), &description);
        wait(&shown, after(CALL_TIMEOUT), created)?;
        if let Err(error) = check_conditional(&*store, &shown, &description) {
            // Otherwise a call that is repeated would find a volume.
            self.connection.remove(name, &mut |_| true)?;
            return Err(error);
        }
        Ok(true)
    }

    fn remove(&self, name: &str, how: Removal, progress: Progress<'_>) -> Result<Removed> {
        let nothing = Removed { changed: false, trash: None };
        let Some((volume, alone)) = self.find_alone(name)? else {
            self.connection.finish_removals()?;
            return Ok(nothing);
        };
        if how != Removal::Now {
            let message = "volumes on an object store have no trash";
            return Err(Error::new(ErrorKind::Unsupported, message)
                .with_repair("repeat with --now, which deletes the volume for good"));
        }
        let shown = volume.shown();
        self.connection.check_removal(name)?;
        // A removal that was interrupted goes on.
        if !wait(&shown, after(CALL_TIMEOUT), newest(&alone))?.is_being_removed()
            && let Some((_, place)) = self.find(name)?
        {
            check_unneeded(&shown, &place)?;
        }
        end(&alone, &shown, &self.claimant, Use::Remove, None, after(CALL_TIMEOUT))?;
        // Nobody can open it any more, so it does not need its parent.
        if let Some((_, place)) = self.find(name)? {
            self.remove_pin(&place)?;
        }
        self.connection.remove(name, &mut |done| progress(done, 0) == ControlFlow::Continue(()))?;
        Ok(Removed { changed: true, ..nothing })
    }

    fn resize(&self, name: &str, size: u64, shrink: bool, _progress: Progress<'_>) -> Result<bool> {
        let (volume, place) = self.existing(name)?;
        let shown = volume.shown();
        let now = Self::view(&volume, &place)?.size();
        if size == now {
            return Ok(false);
        }
        if size < now {
            let (size, now) = (Size(size), Size(now));
            let message = format!("{shown} has {now}, which is more than {size}");
            return Err(match shrink {
                true => Error::new(ErrorKind::Unsupported, format!("{message}; it cannot shrink")),
                false => invalid(message),
            });
        }
        self.change_content(&volume, &place, &Change::Grow { size })
    }

    fn list(&self, page: &Page) -> Result<Listing> {
        let (names, has_more) = self.connection.names(page.after.as_deref(), page.limit)?;
        let next = names.last().filter(|_| has_more).cloned();
        let entries = names.into_iter().map(|name| self.entry(name, page.details));
        Ok(Listing { volumes: entries.collect::<Result<_>>()?, next })
    }

    fn info(&self, name: &str, snapshot: Option<&str>) -> Result<Info> {
        let (volume, place) = self.existing(name)?;
        let shown = volume.shown();
        let seen = wait(&shown, after(CALL_TIMEOUT), newest(&place))?;
        if seen.is_being_removed() {
            let error = Error::new(ErrorKind::NotFound, format!("{shown} is being removed"));
            return Err(error.with_repair("cleat volume remove with --now ends the removal"));
        }
        if !wait(&shown, after(CALL_TIMEOUT), place.is_pinned())? {
            return Err(incomplete(ErrorKind::NotFound, &shown));
        }
        let labels = self.labels_of(name, &place)?;
        let view = Self::view(&volume, &place)?;
        let snapshots = view.snapshots();
        if let Some(snapshot) = snapshot {
            let found = snapshots.into_iter().find(|found| found.name == snapshot);
            let found = found.ok_or_else(|| no_snapshot(&shown, snapshot))?;
            let clones = self.clones_of(&volume, &place, &found)?;
            let found = described(found);
            return Ok(Info {
                name: format!("{name}@{snapshot}"),
                uri: VolumeUri::new(Arc::new(volume.at(snapshot))).to_string(),
                size_bytes: found.size_bytes,
                created_at_s: Some(found.created_at_s),
                clones: Some(clones),
                ..Info::default()
            });
        }
        let mut clones = Vec::new();
        for snapshot in &snapshots {
            clones.extend(self.clones_of(&volume, &place, snapshot)?);
        }
        let status = view.status();
        let held = seen.owner.as_ref().filter(|_| seen.is_held());
        let watcher = held.map(|owner| Watcher {
            client: owner.client.describe(),
            address: format!("epoch-{}", owner.client.epoch),
        });
        let claim = held.map(serde_json::to_value).transpose().map_err(|error| {
            Error::new(ErrorKind::Internal, "internal: cannot print a claim").with_source(error)
        })?;
        Ok(Info {
            name: name.to_owned(),
            uri: VolumeUri::new(Arc::new(volume)).to_string(),
            id: Some(identity(place.description().volume).to_string()),
            size_bytes: view.size(),
            used_bytes: Some(status.live_bytes),
            objects: u64::try_from(status.objects).ok(),
            compression: place.description().compression.map(|used| used.name().to_owned()),
            encryption: place.description().key.map(|_| ENCRYPTION.to_owned()),
            claim,
            watchers: watcher.into_iter().collect(),
            parent: Self::parent(&place),
            snapshots: snapshots.into_iter().map(described).collect(),
            clones: Some(clones),
            labels,
            ..Info::default()
        })
    }

    fn snapshots(&self) -> Option<&dyn SnapshotStore> {
        Some(self)
    }

    fn clones(&self) -> Option<&dyn CloneStore> {
        Some(self)
    }

    fn labels(&self) -> Option<&dyn LabelStore> {
        Some(self)
    }

    fn checks(&self) -> Option<&dyn CheckStore> {
        Some(self)
    }

    fn changes(&self) -> Option<&dyn ChangeStore> {
        Some(self)
    }

    fn available_bytes(&self) -> Result<Option<u64>> {
        self.connection.available_bytes()
    }
}

impl LabelStore for ObjectStore {
    fn set(&self, name: &str, changes: &Labels) -> Result<bool> {
        let (_, place) = self.existing(name)?;
        self.with_labels(name, &place, |labels| labels.set(changes))
    }
}

/// Checks that nothing needs a volume that is to be removed. If its snapshots cannot be read because it is damaged, only
/// those with clones are needed.
///
/// # Errors
/// Returns `InUse` if a snapshot or a clone exists.
fn check_unneeded(shown: &str, place: &Place) -> Result<()> {
    let snapshots = wait(shown, after(CALL_TIMEOUT), async {
        match place.view(Config::default()).await {
            Ok(view) => Ok(Some(view.snapshots().len())),
            Err(failure) if is_damage(&failure) => Ok(None),
            Err(failure) => Err(failure),
        }
    })?;
    let message = match snapshots {
        Some(0) => return Ok(()),
        Some(count) => format!("{shown} has {count} snapshots"),
        None if wait(shown, after(CALL_TIMEOUT), place.has_clones())? => {
            let message = format!("{shown} is damaged, and has clones that need it");
            return Err(Error::new(ErrorKind::InUse, message)
                .with_repair("flatten them first, or remove them: cleat volume flatten"));
        }
        None => return Ok(()),
    };
    Err(Error::new(ErrorKind::InUse, message)
        .with_repair("remove them first: cleat volume snapshot ls shows them"))
}

/// Checks that a new volume is to have no layout but labels and a compression. Returns the compression, if the layout
/// chooses it.
///
/// # Errors
/// Returns `Unsupported` for another layout, and `InvalidArgument` for an unknown compression.
pub(crate) fn check_layout(layout: &Layout) -> Result<Option<Option<Compression>>> {
    let (labels, compression) = (layout.labels.clone(), layout.compression.clone());
    if *layout != (Layout { labels, compression, ..Layout::default() }) {
        let message = "volumes on an object store have no layout";
        return Err(Error::new(ErrorKind::Unsupported, message)
            .with_repair("remove these options, or create an RBD image"));
    }
    let Some(name) = &layout.compression else { return Ok(None) };
    let known = [None, Some(Compression::Lz4)];
    let found = known.into_iter().find(|known| shown_compression(*known) == name);
    found.map(Some).ok_or_else(|| {
        invalid(format!("there is no compression {:?}", cleat_backend::uri::shown(name)))
            .with_repair("use lz4 or none")
    })
}

fn shown_compression(compression: Option<Compression>) -> &'static str {
    compression.map_or("none", Compression::name)
}

/// Checks that an existing volume has the compression that a layout chooses.
///
/// # Errors
/// Returns `AlreadyExists` for another one.
pub(crate) fn check_compression(
    volume: &VolumeAt,
    place: &Place,
    wanted: Option<Option<Compression>>,
) -> Result<()> {
    let is = place.description().compression;
    match wanted.is_none_or(|wanted| wanted == is) {
        true => Ok(()),
        false => {
            let (name, is) = (volume.shown(), shown_compression(is));
            let message = format!("{name} exists with the compression {is}, which cannot change");
            Err(Error::new(ErrorKind::AlreadyExists, message)
                .with_repair("use another name, or the present compression"))
        }
    }
}

/// Checks the size of a new volume.
fn check_size(shown: &str, size: u64) -> Result<()> {
    Volume::check_size(size, PAGE_BYTES).map_err(|failure| {
        let most = Size(MAX_MAP_PAGES * u64::from(PAGE_BYTES));
        invalid(format!("cannot create {shown} with {size} bytes: {failure}"))
            .with_repair(format!("choose a multiple of 512 bytes, at most {most}"))
    })
}

/// Checks that the store does not create an object under a name that exists: the protocol between writers depends on
/// it.
///
/// # Errors
/// Returns `Unsupported` if the store has created the description again.
fn check_conditional(
    store: &dyn objects::Store,
    name: &str,
    description: &Description,
) -> Result<()> {
    let (bytes, name_of_description) = (description.encode(), Name::Description.to_string());
    let again = store.create(&name_of_description, &bytes);
    match block_until(after(CALL_TIMEOUT), again) {
        Some(Ok(())) => {
            let message = format!(
                "{name} cannot be used: its store creates objects again that exist (it ignores If-None-Match)"
            );
            Err(Error::new(ErrorKind::Unsupported, message)
                .with_repair("use a store with conditional puts (If-None-Match)"))
        }
        // Without an answer nothing is known; the store fails then anyway.
        _ => Ok(()),
    }
}
