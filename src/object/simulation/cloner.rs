//! A node that clones a snapshot, uses the clone, and may flatten it. The clone has the content of the snapshot, with
//! its own writes, whatever happens to the parent.

use std::sync::Arc;

use zeroize::Zeroizing;

use super::actor::{Actor, SECTOR, read_all, sector};
use super::oracle::{Image, SECTORS};
use super::store::Client;
use crate::name::VolumeId;
use crate::store::{Pending, Store, StoreError};
use crate::volume::{Failure, Flattening, NewClone, Parents, Place, Volume};

/// The rounds of writes and reads of a clone that is not flattened.
const ROUNDS: u64 = 6;

impl Parents for Client {
    fn store(&self, location: &str) -> Result<Arc<dyn Store>, StoreError> {
        Ok(Arc::new(self.of_volume(location)))
    }
}

/// Clones a snapshot of the volume, if there is one, works with the clone for a while, and may flatten it.
pub(super) async fn live(actor: Actor, flattens: bool) {
    let Ok(Some((store, name))) = create(&actor).await else { return };
    let Some(image) = actor.oracle().taken(&name) else {
        return actor.oracle().violate(format!("snapshot {name} was never taken"));
    };
    actor.note(|| format!("has cloned {name}"));
    let mut clone = Clone { store, name, image, taken: None };
    if let Err(failure) = work(&actor, &mut clone, flattens).await {
        actor.judge(&failure);
    }
}

/// Creates a clone. Returns its store, and the name of the snapshot.
async fn create(actor: &Actor) -> Result<Option<(Client, String)>, Failure> {
    let parent = actor.find().await?;
    let snapshots = parent.view(actor.config.clone()).await?.snapshots();
    if snapshots.is_empty() {
        return Ok(None);
    }
    let chosen = &snapshots[actor.index(snapshots.len())];
    let store = actor.client.of_volume(&format!("clone-{}/", actor.client.actor));
    let mut volume = [1; 16];
    volume[..8].copy_from_slice(&(actor.client.actor as u64).to_le_bytes());
    let new = NewClone {
        volume: VolumeId(volume),
        store: Arc::new(store.clone()),
        location: String::new(),
        compression: parent.description().compression,
        key: actor.key.clone().map(|file| (file, Zeroizing::new([4; 32]))),
    };
    parent.create_clone(chosen.id, &new).await?;
    Ok(Some((store, chosen.name.clone())))
}

/// A clone that a node uses.
struct Clone {
    store: Client,
    /// The name of the snapshot.
    name: String,
    image: Image,
    /// What the snapshot of the clone has, if there is one.
    taken: Option<Image>,
}

async fn work(actor: &Actor, clone: &mut Clone, flattens: bool) -> Result<(), Failure> {
    let (place, volume) = open(actor, clone).await?;
    if actor.random(2) == 0 {
        volume.start_flatten();
    }
    let rounds = if flattens { 1 } else { ROUNDS };
    with(actor, &volume, write_and_read(actor, &volume, clone, rounds)).await?;
    drop(volume);
    if flattens {
        return flatten(actor, clone).await;
    }
    actor.note(|| format!("ends the clone of {}", clone.name));
    place.unpin().await
}

async fn open(actor: &Actor, clone: &Clone) -> Result<(Place, Volume), Failure> {
    let store = Arc::new(clone.store.clone());
    let place = Place::find_clone(store, actor.nonce(), &actor.client, actor.key.as_ref()).await?;
    let epoch = place.claim_next("clone").await?;
    let volume = place.open(epoch, actor.config.clone()).await?;
    Ok((place, volume))
}

/// Runs `work` beside the work of the volume.
async fn with<T: Send>(
    actor: &Actor,
    volume: &Volume,
    work: impl Future<Output = Result<T, Failure>> + Send,
) -> Result<T, Failure> {
    let parts: Vec<Pending<'_, Result<T, Failure>>> =
        vec![Box::pin(async { Err(volume.run().await) }), Box::pin(work)];
    crate::volume::race(parts).await.inspect_err(|failure| actor.judge_open(volume, failure))
}

/// Flattens the clone, in processes that end at any moment, and reads it again some time after its pin was removed.
async fn flatten(actor: &Actor, clone: &mut Clone) -> Result<(), Failure> {
    loop {
        let (place, volume) = open(actor, clone).await?;
        if with(actor, &volume, flatten_for_some_time(actor, &volume, clone)).await? {
            drop(volume);
            place.make_independent().await?;
            break;
        }
    }
    actor.note(|| format!("has flattened the clone of {}", clone.name));
    for _ in 0..actor.random(100) {
        actor.client.back_off(1).await;
    }
    let (_, volume) = open(actor, clone).await?;
    with(actor, &volume, read(actor, &volume, clone)).await?;
    actor.oracle().flattened += 1;
    Ok(())
}

/// Returns whether the clone is flattened. The process ends otherwise.
async fn flatten_for_some_time(
    actor: &Actor,
    volume: &Volume,
    clone: &mut Clone,
) -> Result<bool, Failure> {
    read(actor, volume, clone).await?;
    volume.start_flatten();
    for _ in 0..actor.random(300) {
        match volume.flattening() {
            Flattening::Done => return Ok(true),
            Flattening::Failed(Failure::NeedParent(_)) => {
                for snapshot in volume.snapshots() {
                    volume.delete_snapshot(snapshot.id).await?;
                }
                clone.taken = None;
                volume.start_flatten();
            }
            Flattening::Failed(failure) => return Err(failure),
            Flattening::Idle | Flattening::Running { .. } => {}
        }
        actor.client.back_off(1).await;
    }
    Ok(false)
}

/// Compares the clone and its snapshot with what they must have.
async fn read(actor: &Actor, volume: &Volume, clone: &Clone) -> Result<(), Failure> {
    let found = read_all(volume).await?;
    actor.oracle().read_clone(&clone.name, &clone.image, &found);
    for snapshot in volume.snapshots() {
        let view = volume.view_snapshot(snapshot.id, actor.config.clone()).await?;
        let (found, name) = (read_all(&view).await?, format!("{} (snapshot)", clone.name));
        if let Some(taken) = &clone.taken {
            actor.oracle().read_clone(&name, taken, &found);
        }
    }
    Ok(())
}

async fn write_and_read(
    actor: &Actor,
    volume: &Volume,
    clone: &mut Clone,
    rounds: u64,
) -> Result<(), Failure> {
    for round in 0..rounds {
        read(actor, volume, clone).await?;
        let first = actor.index(SECTORS);
        let end = SECTORS.min(first + 1 + actor.index(8));
        let stamp = actor.oracle().next_stamp();
        let data: Vec<u8> = (first..end).flat_map(|at| sector(stamp, at)).collect();
        volume.write((first * SECTOR) as u64, &data).await?;
        clone.image[first..end].fill(stamp);
        if round == 0 && actor.random(4) == 0 {
            clone.taken = Some(clone.image);
            volume.take_snapshot("of the clone", 0).await?;
        }
        volume.request_checkpoint();
        volume.flush().await?;
        for _ in 0..actor.random(20) {
            actor.client.back_off(1).await;
        }
    }
    Ok(())
}
