//! The text of a claim: JSON that every client with access to the store can write, so it is validated like any
//! other input. New versions only add fields.

use serde::{Deserialize, Serialize};

use cleat_backend::claimant::{Claimant, ProcessMark};
use cleat_core::error::{Error, ErrorKind, Result};

/// The version of the record.
const VERSION: u32 = 1;

/// The maximum length of a text in the record, in bytes.
const MAX_TEXT: usize = 256;

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

    fn is_valid(&self) -> bool {
        [&self.node, &self.machine, &self.boot_id, &self.mapping_id]
            .iter()
            .all(|text| text.len() <= MAX_TEXT && !text.contains(char::is_control))
    }
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
        };
        Self {
            version: VERSION,
            usage,
            client,
            fenced: fenced.take(MAX_EARLIER).cloned().collect(),
        }
    }

    /// Parses the text of a claim. `None` if no build of this version has written it.
    pub(crate) fn read(text: &str) -> Option<Self> {
        let owner: Self = serde_json::from_str(text).ok()?;
        let is_known = owner.version == VERSION && owner.fenced.len() <= MAX_EARLIER;
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
