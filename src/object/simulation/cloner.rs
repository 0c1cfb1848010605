//! A node that clones a snapshot and uses the clone. Its content is that of the snapshot, whatever happens to the parent.

use std::sync::Arc;

use zeroize::Zeroizing;

use super::actor::{Actor, SECTOR, read_all, sector};
use super::oracle::{Image, SECTORS};
use super::store::Client;
use crate::name::VolumeId;
use crate::store::{Pending, Store, StoreError};
use crate::volume::{Failure, NewClone, Parents, Place, Volume};

/// The rounds of writes and reads of a clone.
const ROUNDS: u64 = 6;

impl Parents for Client {
    fn store(&self, location: &str) -> Result<Arc<dyn Store>, StoreError> {
        Ok(Arc::new(self.of_volume(location)))
    }
}

/// Clones a snapshot of the volume, if there is one, and works with the clone for a while.
pub(super) async fn live(actor: Actor) {
    let Ok(Some((store, name))) = create(&actor).await else { return };
    let Some(image) = actor.oracle().taken(&name) else {
        return actor.oracle().violate(format!("snapshot {name} was never taken"));
    };
    actor.note(|| format!("has cloned {name}"));
    if let Err(failure) = work(&actor, store, &name, image).await {
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

async fn work(actor: &Actor, store: Client, name: &str, image: Image) -> Result<(), Failure> {
    let key = actor.key.as_ref();
    let find = Place::find_clone(Arc::new(store), actor.nonce(), &actor.client, key).await;
    let place = find?;
    let epoch = place.claim_next("clone").await?;
    let volume = place.open(epoch, actor.config.clone()).await?;
    let parts: Vec<Pending<'_, Result<(), Failure>>> = vec![
        Box::pin(async { Err(volume.run().await) }),
        Box::pin(write_and_read(actor, &volume, name, image)),
    ];
    crate::volume::race(parts).await.inspect_err(|failure| actor.judge_open(&volume, failure))?;
    drop(volume);
    actor.note(|| format!("ends the clone of {name}"));
    place.unpin().await
}

async fn write_and_read(
    actor: &Actor,
    volume: &Volume,
    name: &str,
    mut image: Image,
) -> Result<(), Failure> {
    for _ in 0..ROUNDS {
        let found = read_all(volume).await?;
        actor.oracle().read_clone(name, &image, &found);
        let first = actor.index(SECTORS);
        let end = SECTORS.min(first + 1 + actor.index(8));
        let stamp = actor.oracle().next_stamp();
        let data: Vec<u8> = (first..end).flat_map(|at| sector(stamp, at)).collect();
        volume.write((first * SECTOR) as u64, &data).await?;
        image[first..end].fill(stamp);
        volume.request_checkpoint();
        volume.flush().await?;
        for _ in 0..actor.random(20) {
            actor.client.back_off(1).await;
        }
    }
    Ok(())
}
