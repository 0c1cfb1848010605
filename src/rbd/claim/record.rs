//! The claim record in the image's metadata under [`KEY`]: JSON that every client with write access to the
//! image can change, so it is validated like any other input. New versions only add fields. Unknown
//! fields are ignored when reading and are lost with the next claim.

use serde::{Deserialize, Serialize};

use cleat_backend::claimant::{Claimant, ProcessMark};
use cleat_core::error::{Error, ErrorKind, Result};
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

/// The maximum number of seals in the record. The controller removes old ones (`Record::seal`).
const MAX_SEALS: usize = 128;

/// The maximum length of a record, in bytes.
const MAX_RECORD: usize = 64 << 10;

/// The maximum length of a text in the record, in bytes.
const MAX_TEXT: usize = 256;

/// The maximum number of fenced clients in the record. `cleat fence clear` needs them to decide whether a
/// client may be removed from the blocklist.
const MAX_CUT: usize = 16;

/// The claim of an image: the client that writes to it, or wrote to it last.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Claim {
    version: u32,
    /// The image's id. Clones and copies inherit the metadata, and the id shows that the claim is not
    /// theirs.
    image: String,
    #[serde(flatten)]
    pub(crate) client: Client,
    /// Whether the client has released the claim. It then has no request in flight.
    #[serde(default)]
    pub(crate) released: bool,
    /// The clients that were fenced before, oldest first.
    #[serde(default)]
    pub(crate) cut: Vec<Client>,
    /// What the grants of the volume have left.
    #[serde(default, skip_serializing_if = "Grants::is_empty")]
    grants: Grants,
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
        if claim.version > VERSION_GRANTS {
            return Err(wrong(ErrorKind::Unsupported, "was written by a newer version of cleat"));
        }
        claim.cut.drain(..claim.cut.len().saturating_sub(MAX_CUT));
        let clients = || std::iter::once(&claim.client).chain(&claim.cut);
        if claim.client.generation == u64::MAX
            || !clients().all(Client::is_valid)
            || !claim.grants.is_valid()
        {
            return Err(garbage("has invalid values"));
        }
        Ok((claim.image == id).then_some(claim))
    }

    /// Makes the claim of `claimant` that follows `last`. `fenced` are the addresses of the clients that
    /// were fenced for it, and `since` is the time in seconds since the Unix epoch.
    pub(crate) fn after(
        last: Option<&Self>,
        image: String,
        claimant: &Claimant,
        address: String,
        since: u64,
        fenced: &[String],
    ) -> Self {
        let mut known = last.map_or_else(Vec::new, |last| last.cut.clone());
        for address in fenced {
            let named = last.map(|last| &last.client).filter(|client| client.address == *address);
            let unnamed = || Client { address: address.clone(), since, ..Client::default() };
            known.retain(|client| client.address != *address);
            known.push(named.cloned().unwrap_or_else(unnamed));
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
        // As `Record::admit_claim`, for one writer.
        grants.generation = grants.generation.max(Generation(client.grant));
        grants.lowest = grants.lowest.max(Generation(client.grant));
        let version = if grants.is_empty() { VERSION } else { VERSION_GRANTS };
        Self { version, image, client, released: false, cut: known, grants }
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
        let claims = if self.released {
            Vec::new()
        } else {
            let Client { node, grant, address, .. } = self.client.clone();
            let generation = Generation(grant);
            vec![GrantClaim { node, generation, client: address, mode: Mode::ReadWrite }]
        };
        Record { generation, lowest, claims, seals }
    }

    /// Returns why a claim with the grant of `claimant` is not admitted. A client of another node is not a reason:
    /// [`decide`](super::decision::decide) is stricter about it.
    pub(crate) fn refusal(&self, claimant: &Claimant) -> Option<Refusal> {
        let (record, grant) = (self.record_as_written(), Generation(claimant.grant?));
        let refusal = record.refusal(&claimant.node, grant, Mode::ReadWrite);
        refusal.filter(Refusal::is_final)
    }

    /// Returns the claim as released, with the generations and seals of `record`.
    pub(crate) fn sealed(self, record: &Record) -> Self {
        let Record { generation, lowest, seals, .. } = record.clone();
        let grants = Grants { generation, lowest, seals };
        Self { version: VERSION_GRANTS, released: true, grants, ..self }
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

    /// Returns whether both are the same claim, released or not.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        self.client == other.client
    }
}

impl Grants {
    fn is_valid(&self) -> bool {
        let seals = &self.seals;
        let is_valid =
            |seal: &Seal| is_plain(&seal.node) && seal.client.as_deref().is_none_or(is_address);
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
