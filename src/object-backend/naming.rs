//! The names of volumes.

/// The maximum length of a volume's name, in bytes.
pub(crate) const MAX_NAME: usize = 200;

/// Whether a volume may have the name.
pub(crate) fn is_name(name: &str) -> bool {
    let begins_well = name.starts_with(char::is_alphanumeric);
    begins_well && name.len() <= MAX_NAME && !name.contains(|c: char| c == '/' || c.is_control())
}
