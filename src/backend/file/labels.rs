//! The labels of a file: one extended attribute of the file, with JSON.
//!
//! An attribute is removed with its file and follows it through a rename. A clone of the extents does not copy
//! it, but programs that copy files may (`cp --preserve=xattr`).

use std::fs::File;
use std::io;

use rustix::io::Errno;

use crate::store::Labels;
use cleat_core::error::{Error, ErrorKind, Result};

/// The name of the attribute. Users with write access to the file can change it.
const ATTRIBUTE: &str = "user.cleat.labels";

/// The maximum length of an attribute in bytes (xattr(7)).
const MAX_VALUE: usize = 64 << 10;

/// Reads the labels of a file. A file system without attributes has no labels.
///
/// # Errors
/// Returns `Internal` for an attribute that is not JSON with texts, and the kernel's error otherwise.
pub(super) fn read(file: &File, path: &str) -> Result<Labels> {
    let mut value = vec![0; MAX_VALUE];
    let length = match rustix::fs::fgetxattr(file, ATTRIBUTE, &mut value[..]) {
        Ok(length) => length,
        Err(Errno::NODATA | Errno::OPNOTSUPP) => return Ok(Labels::new()),
        Err(error) => {
            let message = format!("cannot read the labels of {path}");
            return Err(Error::from_io(message, error.into()));
        }
    };
    serde_json::from_slice(&value[..length]).map_err(|error| {
        let message = format!("the labels of {path} are not valid JSON");
        Error::new(ErrorKind::Internal, message)
            .with_repair(format!("look at them: getfattr -n {ATTRIBUTE} {path}"))
            .with_source(error)
    })
}

/// Replaces the labels of a file, which must be open for writing. The change is durable after the next sync of
/// the file.
///
/// # Errors
/// Returns `Unsupported` if the file system has no such attributes, and the kernel's error otherwise.
pub(super) fn write(file: &File, path: &str, labels: &Labels) -> Result<()> {
    let written = if labels.is_empty() {
        match rustix::fs::fremovexattr(file, ATTRIBUTE) {
            Err(Errno::NODATA | Errno::OPNOTSUPP) => Ok(()),
            other => other,
        }
    } else {
        let text = serde_json::to_vec(labels).map_err(|error| {
            Error::new(ErrorKind::Internal, "cannot write labels as JSON").with_source(error)
        })?;
        rustix::fs::fsetxattr(file, ATTRIBUTE, &text, rustix::fs::XattrFlags::empty())
    };
    written.map_err(|error| match error {
        Errno::OPNOTSUPP => {
            let message = format!("the file system of {path} cannot store labels");
            Error::new(ErrorKind::Unsupported, message)
                .with_repair(
                    "use a file system with extended attributes, such as ext4, xfs or btrfs",
                )
                .with_source(io::Error::from(error))
        }
        _ => Error::from_io(format!("cannot store the labels of {path}"), error.into()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_are_stored_replaced_and_removed() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a");
        let file = File::create_new(&path).unwrap();
        let shown = path.display().to_string();
        assert_eq!(read(&file, &shown).unwrap(), Labels::new());
        let labels = Labels::from([("csi.name".to_owned(), "a \"name\" ä".to_owned())]);
        write(&file, &shown, &labels).unwrap();
        assert_eq!(read(&file, &shown).unwrap(), labels);
        write(&file, &shown, &Labels::new()).unwrap();
        write(&file, &shown, &Labels::new()).unwrap();
        assert_eq!(read(&file, &shown).unwrap(), Labels::new());
        rustix::fs::fsetxattr(&file, ATTRIBUTE, b"[]", rustix::fs::XattrFlags::empty()).unwrap();
        assert_eq!(read(&file, &shown).unwrap_err().kind(), ErrorKind::Internal);
    }
}
