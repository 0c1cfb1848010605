//! The names of volumes and snapshots.

use cleat_backend::uri::{invalid, shown};
use cleat_core::error::Result;
use cleat_object::name::Name;

/// The option of a URI that names the key file.
pub(crate) const KEY_FILE: &str = "key_file";

/// The maximum length of a volume's name, in bytes.
pub(crate) const MAX_NAME: usize = 200;

/// Whether a part of a key may have the name.
pub(crate) fn is_name(name: &str) -> bool {
    let begins_well = name.starts_with(char::is_alphanumeric);
    begins_well && name.len() <= MAX_NAME && !name.contains(|c: char| c == '/' || c.is_control())
}

/// Whether a volume or a snapshot may have the name. What follows an @ in a URI is a snapshot.
pub(crate) fn is_volume_name(name: &str) -> bool {
    is_name(name) && !name.contains('@')
}

/// Whether an object below the prefix of a volume belongs to the volume.
pub(crate) fn is_object(name: &str) -> bool {
    const FURTHER: [&str; 3] = ["ask", "answer", "label"];
    let is_hex = |part: &str| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_hexdigit());
    let further = name.split_once('/').filter(|(kind, _)| FURTHER.contains(kind));
    Name::parse(name).is_some() || further.is_some_and(|(_, rest)| rest.split('/').all(is_hex))
}

/// Checks the name of a snapshot.
///
/// # Errors
/// Returns `InvalidArgument` for a name that a snapshot cannot have.
pub(crate) fn check_name(snapshot: &str) -> Result<()> {
    if is_volume_name(snapshot) {
        return Ok(());
    }
    let message = format!("{:?} cannot be the name of a snapshot", shown(snapshot));
    Err(invalid(message).with_repair(format!(
        "names have 1 to {MAX_NAME} bytes, begin with a letter or digit, and have no /, no @ and no control \
         characters"
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_objects_of_a_volume_are_told_from_others() {
        let number = "0000000000000001";
        let own = [
            "desc".to_owned(),
            format!("log/{number}/{number}"),
            format!("ask/{number}"),
            format!("answer/{number}"),
            format!("label/{number}{number}/{number}"),
        ];
        assert!(own.iter().all(|name| is_object(name)), "{own:?}");
        for other in
            ["", "notes.txt", "b/desc", "log/desc", "desc/a", "ask/all", "ask//", "label/a/x"]
        {
            assert!(!is_object(other), "{other}");
        }
    }
}
