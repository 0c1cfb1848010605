//! Volumes that may be clones. The parent of a clone is in the same home, and the clone names it by its name there.

use std::sync::Arc;

use cleat_core::error::ErrorKind;
use cleat_object::encryption::KeyFile;
use cleat_object::name::Nonce;
use cleat_object::store::{Store, StoreError};
use cleat_object::volume::{Failure, Parents, Place};

use crate::connection::Connection;
use crate::naming::is_volume_name;

/// The volumes of a home.
struct InHome<'a>(&'a dyn Connection);

impl Parents for InHome<'_> {
    fn store(&self, location: &str) -> Result<Arc<dyn Store>, StoreError> {
        // The description is written by whoever can write to the store.
        if !is_volume_name(location) {
            return Err(StoreError::Refused("the description names no parent".to_owned()));
        }
        self.0.store(location).map_err(|error| match error.kind() {
            ErrorKind::NotFound => StoreError::NotFound,
            _ => StoreError::Refused(error.report()),
        })
    }
}

/// Finds the volume in `store`.
///
/// # Errors
/// As [`Place::find_clone`].
pub(crate) async fn find(
    home: &dyn Connection,
    store: Arc<dyn Store>,
    nonce: Nonce,
    key: Option<&KeyFile>,
) -> Result<Place, Failure> {
    Place::find_clone(store, nonce, &InHome(home), key).await
}
