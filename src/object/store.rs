//! The store that a volume needs: four operations on named objects, and a wait before a retry.
//!
//! The crate has no runtime and no clock. Operations are futures of the embedder: of a simulation, of blocking
//! file operations ([`directory`]), or of a client of an object store.

use std::future::Future;
use std::ops::Range;
use std::pin::Pin;

pub mod directory;
pub mod pool;

/// An operation in progress.
pub type Pending<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// Why an operation of a store failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum StoreError {
    /// No object has the name.
    #[error("the object does not exist")]
    NotFound,
    /// An object has the name already. The store may also report this for the object that the same call has
    /// created, if it repeats a request by itself.
    #[error("the object exists already")]
    Exists,
    /// The operation may or may not have been executed, and may still be executed later. A retry can succeed.
    #[error("the store did not answer as expected: {0}")]
    Unclear(String),
    /// The store refuses the operation, for example because of missing permissions. A retry is of no use until
    /// an administrator has changed something.
    #[error("the store refuses: {0}")]
    Refused(String),
}

/// A place for the objects of volumes. Names are relative to the volume's prefix.
pub trait Store: Send + Sync {
    /// Creates the object if no object has the name. When the future returns `Ok`, the object is durable.
    fn create<'a>(&'a self, name: &'a str, bytes: &'a [u8]) -> Pending<'a, Result<(), StoreError>>;

    /// Reads a range of the object; less than that if the object ends before the range does.
    fn read<'a>(
        &'a self,
        name: &'a str,
        range: Range<u64>,
    ) -> Pending<'a, Result<Vec<u8>, StoreError>>;

    /// Lists names that begin with `prefix` and are greater than `after`, in the order of their bytes. Returns
    /// as many as the store gives at once, and none only if there are no more. An object whose creation has
    /// returned before is listed.
    fn list<'a>(
        &'a self,
        prefix: &'a str,
        after: &'a str,
    ) -> Pending<'a, Result<Vec<String>, StoreError>>;

    /// Deletes the object. Succeeds if there is none.
    fn delete<'a>(&'a self, name: &'a str) -> Pending<'a, Result<(), StoreError>>;

    /// Returns a number that differs between two places that may have a volume and a copy of it, with the same identity.
    /// A cache has it in its keys. 0 where no cache is used for several places.
    fn place(&self) -> u64 {
        0
    }

    /// Waits before an operation is tried again; `attempt` is the number of failures, from 1.
    fn back_off(&self, attempt: u32) -> Pending<'_, ()>;
}
