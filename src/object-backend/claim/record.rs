//! The text of a claim: JSON that every client with access to the store can write, so it is validated like any
//! other input. New versions only add fields.

use serde::{Deserialize, Serialize};

use cleat_backend::claimant::{Claimant, ProcessMark};
use cleat_core::error::{Error, ErrorKind, Result};
use cleat_grants::object::{Generation, Mode};
use cleat_grants::record::{Claim, Record, Refusal, Seal};

/// The version of a record without grants.
const VERSION: u32 = 1;

/// The version of a record with grants: a build that does not know them would claim a sealed volume.
const VERSION_GRANTS: u32 = 2;

/// The maximum number of seals in the record. The controller removes old ones (`Record::seal`).
const MAX_SEALS: usize = 128;

/// The maximum length of a text in the record, in bytes.
const MAX_TEXT: usize = 256;

/// Begins the address of a client.
pub(crate) const ADDRESS: &str = "epoch-";

/// The earlier clients that a record names.
const MAX_EARLIER: usize = 16;

/// What a claim is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Use {
    /// The client serves the volume.
    Serve,
    /// The client only fences the ones before it.
    Fence,
    /// The client removes the volume.
    Remove,
}

/// The client of an epoch.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Client {
    /// The epoch.
    pub(crate) epoch: u64,
    pub(crate) node: String,
    pub(crate) machine: String,
    pub(crate) boot_id: String,
    pub(crate) mapping_id: String,
    pub(crate) process: Option<ProcessMark>,
    /// The time of the claim, in seconds since the Unix epoch. For people.
    pub(crate) since: u64,
    /// The generation of the grant with which the client has claimed; 0 for a client without one.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub(crate) grant: u64,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes references")]
fn is_zero(number: &u64) -> bool {
    *number == 0
}

/// What the grants of the volume have left: the part of [`Record`] that outlives a claim.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
struct Grants {
    generation: Generation,
    lowest: Generation,
    seals: Vec<Seal>,
}

/// The record.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Owner {
    version: u32,
    /// What the claim is for.
    #[serde(rename = "use")]
    pub(crate) usage: Use,
    /// The client that has made the claim.
    pub(crate) client: Client,
    /// The clients that had a claim when a later one fenced them, the newest first.
    #[serde(default)]
    pub(crate) fenced: Vec<Client>,
    #[serde(default, skip_serializing_if = "Grants::is_empty")]
    grants: Grants,
}

impl Grants {
    fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    fn is_valid(&self) -> bool {
        // The next generation is one higher.
        let is_bounded = self.generation.0 < u64::MAX && self.lowest.0 < u64::MAX;
        let is_valid =
            |seal: &Seal| is_plain(&seal.node) && seal.client.is_none() && seal.machine.is_none();
        is_bounded && self.seals.len() <= MAX_SEALS && self.seals.iter().all(is_valid)
    }
}

/// The newest epoch of a volume.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Seen {
    /// The epoch; 0 if the volume was never claimed.
    pub(crate) epoch: u64,
    /// Its claim; `None` if the claim is missing, or if this build does not know it.
    pub(crate) owner: Option<Owner>,
    /// Whether the client has stopped.
    pub(crate) is_released: bool,
}

impl Seen {
    /// Whether a client has begun to remove the volume.
    pub(crate) fn is_being_removed(&self) -> bool {
        self.owner.as_ref().is_some_and(|owner| owner.usage == Use::Remove)
    }

    /// Whether a client may write.
    pub(crate) fn is_held(&self) -> bool {
        let serves = |owner: &Owner| owner.usage == Use::Serve;
        self.epoch > 0 && !self.is_released && self.owner.as_ref().is_none_or(serves)
    }

    /// Returns the record of the grants. A claim that only fences counts when its client has stated that the earlier
    /// logs have ended; until then, the client that it fences may still write.
    pub(crate) fn record(&self) -> Record {
        let Some(owner) = &self.owner else { return Record::default() };
        let Grants { generation, lowest, seals } = owner.grants.clone();
        let holder = match owner.usage {
            Use::Serve => Some(&owner.client),
            Use::Fence | Use::Remove => owner.fenced.first(),
        };
        let claim = |client: &Client| Claim {
            node: client.node.clone(),
            generation: Generation(client.grant),
            client: client.address(),
            mode: Mode::ReadWrite,
        };
        let claims = holder.filter(|_| !self.is_released).map(claim).into_iter().collect();
        Record { generation, lowest, claims, seals }
    }

    /// Returns why a claim with the grant of `claimant` is not admitted. A client of another node is not a reason:
    /// [`decide`](super::decision::decide) is stricter about it.
    pub(crate) fn refusal(&self, claimant: &Claimant) -> Option<Refusal> {
        let grant = Generation(claimant.grant?);
        let refusal = self.record().refusal(&claimant.node, grant, Mode::ReadWrite);
        refusal.filter(Refusal::is_final)
    }
}

impl Client {
    /// Describes the client in messages.
    pub(crate) fn describe(&self) -> String {
        let or_unknown = |text: &str| if text.is_empty() { "unknown" } else { text }.to_owned();
        let pid = self.process.map(|process| format!(", process {}", process.pid));
        format!(
            "mapping {} on node {}{} (epoch {})",
            or_unknown(&self.mapping_id),
            or_unknown(&self.node),
            pid.unwrap_or_default(),
            self.epoch,
        )
    }

    /// Returns whether it is proved that the process of the client has ended, which `claimant` can do in the same boot of the
    /// same node. False proves nothing.
    pub(crate) fn has_ended(&self, claimant: &Claimant) -> bool {
        let is_here = !self.boot_id.is_empty() && self.boot_id == claimant.boot_id;
        is_here && self.process.is_some_and(|process| process.has_ended(claimant.process.as_ref()))
    }

    /// Returns the client as `cleat fence` and the record of the grants name it.
    pub(crate) fn address(&self) -> String {
        format!("{ADDRESS}{}", self.epoch)
    }

    fn is_valid(&self) -> bool {
        let texts = [&self.node, &self.machine, &self.boot_id, &self.mapping_id];
        texts.into_iter().all(|text| is_plain(text))
    }
}

fn is_plain(text: &str) -> bool {
    text.len() <= MAX_TEXT && !text.contains(char::is_control)
}

impl Owner {
    /// Returns the record with which `claimant` follows what it has seen.
    pub(crate) fn after(seen: &Seen, claimant: &Claimant, usage: Use, now_s: u64) -> Self {
        let before = seen.owner.iter();
        let held = before.clone().filter(|_| seen.is_held()).map(|owner| &owner.client);
        let fenced = held.chain(before.flat_map(|owner| &owner.fenced));
        let client = Client {
            epoch: seen.epoch + 1,
            node: claimant.node.clone(),
            machine: claimant.machine.clone(),
            boot_id: claimant.boot_id.clone(),
            mapping_id: claimant.mapping_id.clone(),
            process: claimant.process,
            since: now_s,
            grant: claimant.grant.unwrap_or_default(),
        };
        let fenced = fenced.take(MAX_EARLIER).cloned().collect();
        let mut grants =
            seen.owner.as_ref().map_or_else(Grants::default, |owner| owner.grants.clone());
        // As `Record::admit_claim`, for one writer.
        grants.generation = grants.generation.max(Generation(client.grant));
        grants.lowest = grants.lowest.max(Generation(client.grant));
        Self { version: VERSION, usage, client, fenced, grants }.versioned()
    }

    /// Returns the record with the generations and seals of `record`.
    pub(crate) fn sealed(self, record: &Record) -> Self {
        let Record { generation, lowest, seals, .. } = record.clone();
        Self { grants: Grants { generation, lowest, seals }, ..self }.versioned()
    }

    fn versioned(self) -> Self {
        let version = if self.grants.is_empty() { VERSION } else { VERSION_GRANTS };
        Self { version, ..self }
    }

    /// Parses the text of a claim. `None` if no build of this version has written it.
    pub(crate) fn read(text: &str) -> Option<Self> {
        let owner: Self = serde_json::from_str(text).ok()?;
        let is_known = (VERSION..=VERSION_GRANTS).contains(&owner.version);
        let is_known = is_known && owner.fenced.len() <= MAX_EARLIER && owner.grants.is_valid();
        let mut clients = std::iter::once(&owner.client).chain(&owner.fenced);
        (is_known && clients.all(Client::is_valid)).then_some(owner)
    }

    /// Returns the text of the claim.
    ///
    /// # Errors
    /// Returns `InvalidArgument` for a node or mapping with a name that is too long.
    pub(crate) fn text(&self) -> Result<String> {
        if !self.client.is_valid() {
            let message = format!(
                "the names of the node and of the mapping must have at most {MAX_TEXT} printable bytes"
            );
            return Err(Error::new(ErrorKind::InvalidArgument, message));
        }
        serde_json::to_string(self).map_err(|error| {
            Error::new(ErrorKind::Internal, "internal: cannot print a claim").with_source(error)
        })
    }
}
