//! Who may write to a volume, as the storage has it, and who was cut off: for the command line and for
//! controllers; the daemon is not needed for it.

use serde::Serialize;

use super::claimant::Claimant;
use cleat_core::error::Result;

/// A volume whose writers are kept apart by its storage.
pub trait Fence {
    /// Every client that has to do with the volume.
    ///
    /// # Errors
    /// What the backend gives.
    fn clients(&self) -> Result<Vec<Client>>;

    /// Cuts off whoever may write, `address` if that is given, in such a way that its mapping never
    /// writes again, and leaves the volume unclaimed. What must be agreed to first is told to `agree`,
    /// a sentence for each client. Returns the addresses that were cut off.
    ///
    /// # Errors
    /// `NotFound` when nobody may; what `agree` gives; what the backend gives.
    fn add(
        &self,
        address: Option<&str>,
        claimant: &Claimant,
        agree: &dyn Fn(&[String]) -> Result<()>,
    ) -> Result<Vec<String>>;

    /// Lets a client in again that is proved gone, judged from where `here` is. Says whether it was cut
    /// off.
    ///
    /// # Errors
    /// `InUse`, with what is not proved; what the backend gives.
    fn clear(&self, address: &str, here: &Claimant) -> Result<bool>;
}

/// A client of the storage, and what it has to do with a volume.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Client {
    /// As the storage knows it.
    pub address: String,
    /// Where it ran; `None` where it made no claim that is remembered.
    pub node: Option<String>,
    /// The boot of that node.
    pub boot_id: Option<String>,
    /// The mapping that it served.
    pub mapping_id: Option<String>,
    /// Of its claim; the highest is the newest.
    pub generation: Option<u64>,
    /// When it claimed the volume, in seconds since the epoch.
    pub since_s: Option<u64>,
    /// What became of its claim.
    pub claim: Option<Standing>,
    /// It holds the volume's lock.
    pub holds_lock: bool,
    /// It has the volume open.
    pub watches: bool,
    /// Until when it is cut off, as the storage says it.
    pub cut_off_until: Option<String>,
}

/// What became of a claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Standing {
    /// It holds.
    Held,
    /// Its client has let go.
    Released,
    /// It was taken over.
    Taken,
}
