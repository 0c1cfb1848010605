//! What every kind of home provides: access to the volumes in it.

use std::path::PathBuf;
use std::sync::Arc;

use cleat_backend::{CredentialSet, Network};
use cleat_core::error::Result;
use cleat_object::store::Store;

/// What a process that serves a volume needs.
pub(crate) struct Access {
    /// Files that are read.
    pub(crate) paths: Vec<PathBuf>,
    /// Files that are copied.
    pub(crate) copies: Vec<PathBuf>,
    /// Directories that are written.
    pub(crate) writable: Vec<PathBuf>,
    pub(crate) network: Network,
}

/// Access to a home. It may have threads.
pub(crate) trait Connection: Send + Sync {
    /// Returns the store of a volume, which need not exist.
    ///
    /// # Errors
    /// Returns `NotFound` if there is no volume with this name, and the error of the home otherwise.
    fn store(&self, name: &str) -> Result<Arc<dyn Store>>;

    /// Prepares the place of a new volume.
    ///
    /// # Errors
    /// Returns `AlreadyExists` if the place has something else, and the error of the home otherwise.
    fn prepare(&self, name: &str) -> Result<()>;

    /// Returns names behind `after` in their order, at most `limit` of them, and whether there are more. Some may
    /// not be those of volumes.
    ///
    /// # Errors
    /// Returns the error of the home.
    fn names(&self, after: Option<&str>, limit: usize) -> Result<(Vec<String>, bool)>;

    /// Checks that the place of a volume has nothing that a removal would delete, too.
    ///
    /// # Errors
    /// Returns `InUse` if it has, and the error of the home otherwise.
    fn check_removal(&self, _name: &str) -> Result<()> {
        Ok(())
    }

    /// Removes everything of a volume that no client uses. Can be repeated.
    ///
    /// # Errors
    /// Returns the error of the home, and `Aborted` if `go_on` has returned false.
    fn remove(&self, name: &str, go_on: &mut dyn FnMut(u64) -> bool) -> Result<()>;

    /// Ends removals of volumes that were interrupted when the volumes were not found any more.
    ///
    /// # Errors
    /// Returns the error of the home.
    fn finish_removals(&self) -> Result<()> {
        Ok(())
    }

    /// Removes what processes have left that have crashed.
    fn tidy(&self, name: &str);

    /// Returns how many bytes new data can use, if it is known.
    ///
    /// # Errors
    /// Returns the error of the home.
    fn available_bytes(&self) -> Result<Option<u64>>;

    /// Replaces the credentials.
    ///
    /// # Errors
    /// Returns `InvalidArgument` if they are malformed.
    fn renew(&self, credentials: &CredentialSet) -> Result<()>;

    /// Uses credentials that have changed from now on, without a call of [`Connection::renew`]. Only for a process that may
    /// open their files.
    fn follow(&self) {}
}
