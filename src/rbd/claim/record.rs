//! The claim record in the image's metadata under [`KEY`]: JSON that every client with write access to the
//! image can change, so it is validated like any other input. New versions only add fields. Unknown
//! fields are ignored when reading and are lost with the next claim.
//!
//! An image has either the claim of one writer, or the shared claims of several nodes: of writers that know of each
//! other, or of readers. A shared claim that is released stays in the record until the node claims the image again,
//! or a single writer does: a mapping that resumes its device must find its last claim, and no single writer between
//! that claim and the next one.

use serde::{Deserialize, Serialize};

use cleat_backend::claimant::{Claimant, ProcessMark};
use cleat_core::error::{Error, ErrorKind, Result};
use cleat_grants::limits::MAX_HOLDERS;
use cleat_grants::object::{Generation, Mode};
use cleat_grants::record::{Claim as GrantClaim, Record, Refusal, Seal};

/// The metadata key.
pub(crate) const KEY: &str = "cleat.claim";

/// The metadata key of an announcement: the record that a client will write under [`KEY`] once it holds
/// the lock.
pub(crate) const ANNOUNCED: &str = "cleat.claim.next";

/// The version of a record without grants.
const VERSION: u32 = 1;

/// The version of a record with grants: a build that does not know them would claim a sealed image.
const VERSION_GRANTS: u32 = 2;

/// The version of a record with shared claims: a build that does not know them would claim an image that others use.
const VERSION_SHARED: u32 = 3;

/// The maximum number of shared claims in the record, with those that are released.
pub(crate) const MAX_SHARED: usize = MAX_HOLDERS;

/// The maximum number of seals in the record. The controller removes old ones (`Record::seal`).
const MAX_SEALS: usize = 128;

/// The maximum length of a record, in bytes.
const MAX_RECORD: usize = 256 << 10;

/// The maximum length of a text in the record, in bytes.
const MAX_TEXT: usize = 256;

/// The maximum number of fenced clients in the record. `cleat fence clear` needs them to decide whether a
/// client may be removed from the blocklist.
const MAX_CUT: usize = 16;

/// The claim of an image: the client that writes to it, or that has claimed it last.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Claim {
    version: u32,
    /// The image's id. Clones and copies inherit the metadata, and the id shows that the claim is not
    /// theirs.
    image: String,
    #[serde(flatten)]
    pub(crate) client: Client,
    /// Whether the client has released the claim. It then has no request in flight. Always true if the image has
    /// shared claims.
    #[serde(default)]
    pub(crate) released: bool,
    /// The shared claims.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) shared: Vec<SharedClaim>,
    /// The clients that were fenced before, oldest first.
    #[serde(default)]
    pub(crate) cut: Vec<Client>,
    /// What the grants of the volume have left.
    #[serde(default, skip_serializing_if = "Grants::is_empty")]
    grants: Grants,
}

/// The claim of one node in a mode that several nodes may have at the same time.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SharedClaim {
    #[serde(flatten)]
    pub(crate) client: Client,
    pub(crate) mode: Mode,
    /// Whether the client has released the claim. It then has no request in flight.
    #[serde(default)]
    pub(crate) released: bool,
}

/// The part of the record of a granted volume ([`Record`]) that outlives a claim.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
struct Grants {
    generation: Generation,
    lowest: Generation,
    seals: Vec<Seal>,
}

impl Grants {
    fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// A client of the cluster, with the node and the mapping that it wrote for.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Client {
    pub(crate) node: String,
    /// The hash of the node's machine id (`cleat_sys::host::machine_id_hash`), or an empty text. It
    /// distinguishes nodes with the same name.
    pub(crate) machine: String,
    pub(crate) boot_id: String,
    pub(crate) mapping_id: String,
    pub(crate) process: Option<ProcessMark>,
    /// The number of the claim, which increases by one with every claim of the image. 0 for a client
    /// that made no claim.
    pub(crate) generation: u64,
    /// The client's address in the cluster (`IP:PORT/NONCE`), which is also the key of the blocklist.
    pub(crate) address: String,
    /// When the image was claimed, in seconds since the Unix epoch.
    pub(crate) since: u64,
    /// The generation of the grant with which the client has claimed; 0 for a client without one.
    #[serde(skip_serializing_if = "is_zero")]
    pub(crate) grant: u64,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes references")]
fn is_zero(number: &u64) -> bool {
    *number == 0
}

impl Claim {
    /// Parses the metadata `text` of the image with the id `id`. `name` is the image's name in error
    /// messages. Returns `None` for no text, and for the claim of another image that this one is a copy
    /// of.
    ///
    /// # Errors
    /// Returns `Internal` for text that is not a claim, and `Unsupported` for a newer version.
    pub(crate) fn read(text: Option<&str>, id: &str, name: &str) -> Result<Option<Self>> {
        let Some(text) = text else { return Ok(None) };
        let wrong = |kind, why: &str| {
            let message = format!("the claim of {name} (image metadata {KEY}) {why}");
            Error::new(kind, message).with_repair(format!(
                "check whether a client uses the image (rbd status {name}); if none does: rbd \
                 image-meta remove {name} {KEY}"
            ))
        };
        let garbage = |why: &str| wrong(ErrorKind::Internal, why);
        if text.len() > MAX_RECORD {
            return Err(garbage("is too long"));
        }
        let mut claim: Self = serde_json::from_str(text)
            .map_err(|error| garbage("is not valid JSON for a claim").with_source(error))?;
        if claim.version > VERSION_SHARED {
            return Err(wrong(ErrorKind::Unsupported, "was written by a newer version of cleat"));
        }
        claim.cut.drain(..claim.cut.len().saturating_sub(MAX_CUT));
        let is_valid = claim.clients().all(Client::is_valid)
            && claim.client.generation != u64::MAX
            && claim.shared.len() <= MAX_SHARED
            && claim.shared.iter().all(|shared| shared.mode != Mode::ReadWrite)
            && (claim.released || claim.active_shared().next().is_none())
            && claim.grants.is_valid();
        if !is_valid {
            return Err(garbage("has invalid values"));
        }
        Ok((claim.image == id).then_some(claim))
    }

    /// Returns every client that the record names.
    pub(crate) fn clients(&self) -> impl Iterator<Item = &Client> {
        let shared = self.shared.iter().map(|shared| &shared.client);
        std::iter::once(&self.client).chain(&self.cut).chain(shared)
    }

    /// Returns whether the client of the record has a shared claim in it.
    pub(crate) fn is_shared(&self) -> bool {
        self.active_shared().any(|shared| shared.client == self.client)
    }

    /// Returns the shared claims that are not released.
    pub(crate) fn active_shared(&self) -> impl Iterator<Item = &SharedClaim> {
        self.shared.iter().filter(|shared| !shared.released)
    }

    /// Makes the claim of `claimant`, as the only writer, that follows `last`. `fenced` are the addresses of the
    /// clients that were fenced for it, and `since` is the time in seconds since the Unix epoch.
    pub(crate) fn after(
        last: Option<&Self>,
        image: String,
        claimant: &Claimant,
        address: String,
        since: u64,
        fenced: &[String],
    ) -> Self {
        let mut next = Self::next(last, image, claimant, address, since, fenced);
        next.shared.clear();
        // As `Record::admit_claim`.
        next.grants.lowest = next.grants.lowest.max(Generation(next.client.grant));
        next.versioned()
    }

    /// Makes the record of [`Self::next`] the shared claim of its client. It replaces that of the same node. Returns
    /// `None` if the record has the maximum number of shared claims.
    pub(crate) fn beside(self, mode: Mode) -> Option<Self> {
        let mut next = self;
        let client = next.client.clone();
        next.released = true;
        // Also claims of another mode that are released: their mappings must not resume after this claim.
        next.shared
            .retain(|shared| shared.client.node != client.node && shared.mode.is_compatible(mode));
        if next.shared.len() >= MAX_SHARED {
            let oldest = next.shared.iter().position(|shared| shared.released)?;
            next.shared.remove(oldest);
        }
        next.shared.push(SharedClaim { client, mode, released: false });
        Some(next.versioned())
    }

    /// Makes a record that follows `last`, with `claimant` as the last client. It keeps the shared claims except those
    /// of the fenced clients.
    pub(crate) fn next(
        last: Option<&Self>,
        image: String,
        claimant: &Claimant,
        address: String,
        since: u64,
        fenced: &[String],
    ) -> Self {
        let mut known = last.map_or_else(Vec::new, |last| last.cut.clone());
        let mut shared = last.map_or_else(Vec::new, |last| last.shared.clone());
        for address in fenced {
            let of_shared = shared.iter().map(|shared| &shared.client);
            let mut named = last.map(|last| &last.client).into_iter().chain(of_shared);
            let named = named.find(|client| client.address == *address).cloned();
            let unnamed = || Client { address: address.clone(), since, ..Client::default() };
            known.retain(|client| client.address != *address);
            known.push(named.unwrap_or_else(unnamed));
            shared.retain(|shared| shared.client.address != *address);
        }
        known.drain(..known.len().saturating_sub(MAX_CUT));
        let client = Client {
            node: claimant.node.clone(),
            machine: claimant.machine.clone(),
            boot_id: claimant.boot_id.clone(),
            mapping_id: claimant.mapping_id.clone(),
            process: claimant.process,
            // Cannot overflow: `read` rejects the maximum.
            generation: last.map_or(0, |last| last.client.generation) + 1,
            address,
            since,
            grant: claimant.grant.unwrap_or_default(),
        };
        let mut grants = last.map_or_else(Grants::default, |last| last.grants.clone());
        grants.generation = grants.generation.max(Generation(client.grant));
        Self { version: VERSION, image, client, released: false, shared, cut: known, grants }
            .versioned()
    }

    /// Sets the lowest version whose builds understand the record.
    fn versioned(self) -> Self {
        let version = if self.active_shared().next().is_some() {
            VERSION_SHARED
        } else if self.grants.is_empty() {
            VERSION
        } else {
            VERSION_GRANTS
        };
        Self { version, ..self }
    }

    /// Returns the record of the volume. `listed` are the addresses on the blocklist: a seal names a client only
    /// if it is there.
    pub(crate) fn record(&self, listed: &[String]) -> Record {
        let mut record = self.record_as_written();
        for seal in &mut record.seals {
            seal.client.take_if(|client| !listed.contains(client));
        }
        record
    }

    /// Returns the record of the volume. Clients that its seals name may have been removed from the blocklist.
    pub(crate) fn record_as_written(&self) -> Record {
        let Grants { generation, lowest, seals } = self.grants.clone();
        let claim = |client: &Client, mode| {
            let Client { node, grant, address, .. } = client.clone();
            GrantClaim { node, generation: Generation(grant), client: address, mode }
        };
        let alone = (!self.released).then(|| claim(&self.client, Mode::ReadWrite));
        let shared = self.active_shared().map(|shared| claim(&shared.client, shared.mode));
        let mut claims: Vec<GrantClaim> = alone.into_iter().chain(shared).collect();
        claims.sort_by_key(|claim| claim.generation);
        Record { generation, lowest, claims, seals }
    }

    /// Returns why a claim with the grant of `claimant` is not admitted in this mode. A client of another node is not a
    /// reason: [`decide`](super::decision::decide) is stricter about it.
    pub(crate) fn refusal(&self, claimant: &Claimant, mode: Mode) -> Option<Refusal> {
        let (record, grant) = (self.record_as_written(), Generation(claimant.grant?));
        let refusal = record.refusal(&claimant.node, grant, mode);
        refusal.filter(Refusal::is_final)
    }

    /// Returns the claim as released, with the generations, seals and shared claims of `record`.
    pub(crate) fn sealed(mut self, record: &Record) -> Self {
        let Record { generation, lowest, seals, claims } = record.clone();
        let stays = |shared: &SharedClaim| {
            let address = &shared.client.address;
            shared.released || claims.iter().any(|claim| claim.client == *address)
        };
        self.shared.retain(stays);
        let seals = seals.into_iter().map(|seal| self.with_machine(seal)).collect();
        let grants = Grants { generation, lowest, seals };
        Self { released: true, grants, ..self }.versioned()
    }

    /// Adds the machine of the client that was cut off, as that client has recorded it.
    fn with_machine(&self, seal: Seal) -> Seal {
        let is_sealed = |client: &&Client| seal.client.as_ref() == Some(&client.address);
        let known = self.cut.iter().rfind(is_sealed).map(|client| client.machine.clone());
        let known = known.filter(|machine| !machine.is_empty());
        Seal { machine: known.or(seal.machine), ..seal }
    }

    /// Adds what `announced` says about fenced clients that had announced a claim and not written it.
    pub(crate) fn with_details(mut self, announced: Option<&Self>) -> Self {
        let known = || announced.iter().flat_map(|a| std::iter::once(&a.client).chain(&a.cut));
        for client in self.cut.iter_mut().filter(|client| client.generation == 0) {
            if let Some(found) = known().find(|known| known.address == client.address) {
                client.clone_from(found);
            }
        }
        self
    }

    /// Returns the JSON text of the record.
    pub(crate) fn text(&self) -> Result<String> {
        serde_json::to_string(self).map_err(|error| {
            Error::new(ErrorKind::Internal, "cannot write a claim as JSON").with_source(error)
        })
    }

    /// Returns the claim marked as released.
    pub(crate) fn released(&self) -> Self {
        Self { released: true, ..self.clone() }
    }

    /// Returns the record in which the shared claim of `client` is marked as released; `None` if there is none that is
    /// not released.
    pub(crate) fn without(&self, client: &Client) -> Option<Self> {
        let mut record = self.clone();
        let mut shared = record.shared.iter_mut();
        let own = shared.find(|shared| !shared.released && shared.client == *client)?;
        own.released = true;
        Some(record.versioned())
    }

    /// Returns whether the client of `own`, a claim that it has written, has this claim, too: released or not if it is
    /// the claim of a single writer.
    pub(crate) fn is_same(&self, own: &Self) -> bool {
        match own.is_shared() {
            true => self.active_shared().any(|shared| shared.client == own.client),
            false => self.client == own.client,
        }
    }
}

impl Grants {
    fn is_valid(&self) -> bool {
        let seals = &self.seals;
        let is_valid = |seal: &Seal| {
            is_plain(&seal.node)
                && seal.client.as_deref().is_none_or(is_address)
                && seal.machine.as_deref().is_none_or(is_plain)
        };
        // The next generation is one higher.
        let is_bounded = self.generation.0 < u64::MAX && self.lowest.0 < u64::MAX;
        is_bounded && seals.len() <= MAX_SEALS && seals.iter().all(is_valid)
    }
}

fn is_plain(text: &str) -> bool {
    text.len() <= MAX_TEXT && !text.chars().any(char::is_control)
}

impl Client {
    fn is_valid(&self) -> bool {
        let texts = [&self.node, &self.machine, &self.boot_id, &self.mapping_id];
        texts.into_iter().all(|text| is_plain(text)) && is_address(&self.address)
    }

    /// Describes the client for messages: its node, mapping, address and the time of its claim.
    pub(crate) fn describe(&self) -> String {
        let named = |what: &str, name: &str| match name {
            "" => format!("an unnamed {what}"),
            name => format!("the {what} {name}"),
        };
        let (node, mapping) = (named("node", &self.node), named("mapping", &self.mapping_id));
        let since = std::time::UNIX_EPOCH.checked_add(std::time::Duration::from_secs(self.since));
        let since = since.filter(|_| self.since <= LAST_SECOND);
        let since = since.map_or_else(
            || "an unknown time".to_owned(),
            |since| humantime::format_rfc3339_seconds(since).to_string(),
        );
        format!("{node} ({mapping}, client {}, since {since})", self.address)
    }
}

/// The last second of the year 9999, the latest time that `humantime` can format.
const LAST_SECOND: u64 = 253_402_300_799;

/// Returns whether `text` can be the address of one client (`IP:PORT/NONCE`), so that it may be put into a
/// command for the monitors. An entry of the blocklist with port 0 and nonce 0 stands for every client of the
/// host (`OSDMap::is_blocklisted`), and no client has the nonce 0.
pub(crate) fn is_address(text: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"[]:.".contains(&byte);
    let Some((host, nonce)) = text.split_once('/') else { return false };
    let one_client = nonce.bytes().all(|byte| byte.is_ascii_digit())
        && nonce.parse().is_ok_and(|nonce: u64| nonce != 0);
    text.len() <= MAX_TEXT && host.contains(':') && host.bytes().all(plain) && one_client
}

#[cfg(test)]
mod tests;
