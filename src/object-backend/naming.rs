//! The names of volumes and snapshots.

use cleat_backend::uri::{invalid, shown};
use cleat_core::error::Result;

/// The option of a URI that names the key file.
pub(crate) const KEY_FILE: &str = "key_file";

/// The maximum length of a volume's name, in bytes.
pub(crate) const MAX_NAME: usize = 200;

/// Whether a volume may have the name.
pub(crate) fn is_name(name: &str) -> bool {
    let begins_well = name.starts_with(char::is_alphanumeric);
    begins_well && name.len() <= MAX_NAME && !name.contains(|c: char| c == '/' || c.is_control())
}

/// Checks the name of a snapshot.
///
/// # Errors
/// Returns `InvalidArgument` for a name that a snapshot cannot have.
pub(crate) fn check_name(snapshot: &str) -> Result<()> {
    if is_name(snapshot) && !snapshot.contains('@') {
        return Ok(());
    }
    let message = format!("{:?} cannot be the name of a snapshot", shown(snapshot));
    Err(invalid(message).with_repair(format!(
        "names have 1 to {MAX_NAME} bytes, begin with a letter or digit, and have no /, no @ and no control \
         characters"
    )))
}
