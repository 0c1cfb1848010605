//! Fencing for administrators: lists the clients of a volume, and fences them without opening the volume.
//!
//! A client is fenced by a later epoch that is claimed for this purpose only: the seals of the engine end the log of
//! the earlier epoch for ever. The claim of the later epoch shows that the client has lost the volume, so that its
//! mapping does not resume. There is nothing to remove afterwards: the same node may claim the volume again, with
//! a new epoch.

use std::sync::Arc;
use std::time::Instant;

use cleat_backend::CredentialSet;
use cleat_backend::claimant::Claimant;
use cleat_backend::fence::{Client, Fence, Standing, Target};
use cleat_backend::uri::invalid;
use cleat_core::clock::SystemClock;
use cleat_core::error::{Error, ErrorKind, Result};
use cleat_object::store::Store;
use cleat_object::volume::Place;

use crate::claim::decision::Purpose;
use crate::claim::record::{self, ADDRESS, Seen, Use};
use crate::claim::{Attempt, newest};
use crate::errors::{failed, is_damage, no_answer, wait};
use crate::executor::block_until;
use crate::nonce::nonce;
use crate::spec::VolumeAt;

/// Access to the clients of a volume, which is found anew for each call.
pub(crate) struct ObjectFence(pub(crate) VolumeAt);

impl ObjectFence {
    /// Finds the volume.
    ///
    /// # Errors
    /// Returns `NotFound` if it does not exist, and otherwise the error of the store.
    pub(crate) fn place(&self, deadline: Instant) -> Result<Place> {
        let spec = &self.0;
        let credentials = CredentialSet::load(&spec.home.credential_files())?;
        let store: Arc<dyn Store> = spec.home.connect(&credentials, None)?.store(&spec.name)?;
        wait(&spec.shown(), deadline, Place::find_alone(store, nonce()?))
    }
}

impl Fence for ObjectFence {
    fn clients(&self, deadline: Instant) -> Result<Vec<Client>> {
        let place = self.place(deadline)?;
        wait(&self.0.shown(), deadline, newest(&place)).map(|seen| clients(&seen))
    }

    fn targets(&self, address: Option<&str>, deadline: Instant) -> Result<Vec<Target>> {
        let name = self.0.shown();
        let chosen = |client: &Client| match address {
            Some(address) => client.address == address,
            None => client.claim == Some(Standing::Held),
        };
        let found = self.clients(deadline)?.into_iter().filter(chosen);
        let target = |client: Client| Target { consequence: consequence(&client, &name), client };
        let targets: Vec<Target> = found.map(target).collect();
        match (targets.is_empty(), address) {
            (false, _) => Ok(targets),
            (true, None) => {
                Err(Error::new(ErrorKind::NotFound, format!("no client may write to {name} now")))
            }
            (true, Some(address)) => {
                let message = format!("no client {address} uses {name}");
                Err(Error::new(ErrorKind::NotFound, message)
                    .with_repair("cleat fence ls shows the clients"))
            }
        }
    }

    fn fence(&self, targets: &[Target], claimant: &Claimant, deadline: Instant) -> Result<()> {
        let place = self.place(deadline)?;
        let epochs = targets.iter().map(|target| epoch_of(&target.client.address));
        let epochs = epochs.collect::<Result<Vec<u64>>>()?;
        end(&place, &self.0.shown(), claimant, Use::Fence, Some(&epochs), deadline)
    }

    fn unfence(&self, address: &str, _here: &Claimant, _deadline: Instant) -> Result<bool> {
        epoch_of(address)?;
        let message = format!("{address} stays fenced: the end of its log cannot be removed");
        Err(Error::new(ErrorKind::Unsupported, message).with_repair(
            "nothing keeps its node from the volume: map the volume there again, which claims a new epoch",
        ))
    }
}

/// Ends the log of every client that may write, and leaves the volume without a claim. With `only`, returns an error
/// if the client of another epoch may write.
///
/// # Errors
/// Returns `InUse` if a client that must not be fenced may write, and otherwise the error of the store.
pub(crate) fn end(
    place: &Place,
    name: &str,
    claimant: &Claimant,
    usage: Use,
    only: Option<&[u64]>,
    deadline: Instant,
) -> Result<()> {
    let purpose = if usage == Use::Remove { Purpose::Change } else { Purpose::Open };
    let attempt = Attempt { place, name, claimant, purpose, usage, only, clock: &SystemClock };
    let ended = block_until(deadline, async {
        let epoch = attempt.acquire().await?.map_err(|lost| {
            Error::new(ErrorKind::Internal, format!("internal: cannot claim {name}: {lost}"))
        })?;
        let ended = place.end_earlier(epoch).await;
        // Only now nobody can write any more. A removal is not released: nobody may claim the volume then. It needs no
        // log: a part may be lost, or may have been deleted by a removal that was interrupted.
        let released = match (ended, usage) {
            (Ok(()), Use::Serve | Use::Fence) => place.release(epoch).await,
            (Err(failure), Use::Remove) if is_damage(&failure) => Ok(()),
            (other, _) => other,
        };
        released.map_err(|failure| failed(name, failure))
    });
    ended.unwrap_or_else(|| Err(no_answer(name)))
}

/// Lists the client of the newest claim, and those that were fenced before.
fn clients(seen: &Seen) -> Vec<Client> {
    let Some(owner) = &seen.owner else {
        let claim = seen.is_held().then_some(Standing::Held);
        let unknown =
            Client { address: format!("{ADDRESS}{}", seen.epoch), claim, ..Client::default() };
        return if seen.epoch > 0 { vec![unknown] } else { Vec::new() };
    };
    let standing = if seen.is_held() { Standing::Held } else { Standing::Released };
    let newest = (owner.usage == Use::Serve).then(|| client(&owner.client, standing));
    let fenced = owner.fenced.iter().map(|fenced| client(fenced, Standing::Taken));
    newest.into_iter().chain(fenced).collect()
}

fn client(client: &record::Client, standing: Standing) -> Client {
    let named = |text: &str| (!text.is_empty()).then(|| text.to_owned());
    Client {
        address: client.address(),
        node: named(&client.node),
        boot_id: named(&client.boot_id),
        mapping_id: named(&client.mapping_id),
        generation: Some(client.epoch),
        since_s: Some(client.since),
        claim: Some(standing),
        cut_off_until: (standing == Standing::Taken).then(|| "for ever".to_owned()),
        ..Client::default()
    }
}

/// Describes the consequence of fencing a client in a sentence.
fn consequence(client: &Client, name: &str) -> String {
    let on = |what: &str, text: &Option<String>| {
        text.as_ref().map(|text| format!(" of the {what} {text}")).unwrap_or_default()
    };
    let (node, mapping) = (on("node", &client.node), on("mapping", &client.mapping_id));
    format!(
        "the client {}{mapping}{node} is cut off from {name}: data that it has not yet written is lost, and \
         file systems on the device there fail",
        client.address
    )
}

pub(crate) fn epoch_of(address: &str) -> Result<u64> {
    let epoch = address.strip_prefix(ADDRESS).and_then(|epoch| epoch.parse().ok());
    epoch.ok_or_else(|| {
        invalid(format!("{address:?} is not the address of a client"))
            .with_repair("write epoch-NUMBER; cleat fence ls shows the addresses")
    })
}
