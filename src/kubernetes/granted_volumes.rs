//! The volumes that this node may have claimed with a grant: a directory with one file for each, which survives a
//! reboot. After one, the journal of mappings is empty, and no grant has to name the node any more.

use std::io;
use std::path::{Path, PathBuf};

use cleat_core::error::{Error, Result};
use cleat_csi::mapping_name;
use cleat_node::blocking::blocking;
use cleat_node::journal::{Disk, RealDisk};

/// The maximum length of a CSI volume handle, in bytes.
const MAX_HANDLE: usize = 1024;

/// The number of bytes that are read of a file.
const MAX_FILE: u64 = 4096;

/// The maximum number of files that are read. A node has fewer mappings.
const MAX_FILES: usize = 65_536;

/// A directory of granted volumes.
#[derive(Debug, Clone)]
pub(crate) struct GrantedVolumes(PathBuf);

impl GrantedVolumes {
    pub(crate) fn new(directory: PathBuf) -> Self {
        Self(directory)
    }

    /// Returns the handles of all volumes.
    ///
    /// # Errors
    /// Returns an error if a file cannot be read.
    pub(crate) async fn all(&self) -> Result<Vec<String>> {
        let directory = self.0.clone();
        self.run("read", move || {
            let files = match RealDisk.list(&directory) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
                files => files?,
            };
            let complete = files.iter().filter(|path| path.extension().is_none());
            let handles = complete.take(MAX_FILES).map(|path| handle(path));
            handles.filter_map(Result::transpose).collect()
        })
        .await
    }

    /// Adds a volume. It is durable when this returns.
    ///
    /// # Errors
    /// Returns the error of the file system.
    pub(crate) async fn add(&self, handle: &str) -> Result<()> {
        let (directory, path) = (self.0.clone(), self.path(handle));
        let content = handle.to_owned();
        self.run("write", move || {
            std::fs::create_dir_all(&directory)?;
            let new = path.with_extension("new");
            RealDisk.write_synced(&new, content.as_bytes())?;
            RealDisk.rename(&new, &path)?;
            RealDisk.sync_directory(&directory)
        })
        .await
    }

    /// Removes a volume. One that is not there is success.
    ///
    /// # Errors
    /// Returns the error of the file system.
    pub(crate) async fn remove(&self, handle: &str) -> Result<()> {
        let path = self.path(handle);
        self.run("write", move || match RealDisk.remove(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            other => other,
        })
        .await
    }

    fn path(&self, handle: &str) -> PathBuf {
        // The name of a mapping can have dots, and files with an extension are incomplete.
        self.0.join(mapping_name(handle).replace('.', "_"))
    }

    async fn run<T: Send + 'static>(
        &self,
        what: &'static str,
        call: impl FnOnce() -> io::Result<T> + Send + 'static,
    ) -> Result<T> {
        let directory = self.0.clone();
        blocking(move || {
            call().map_err(|error| {
                let shown = directory.display();
                Error::from_io(format!("cannot {what} the granted volumes in {shown}"), error)
                    .with_repair("check the state directory (state_dir)")
            })
        })
        .await
    }
}

/// Returns the handle in a file; `None` for a file that is damaged.
fn handle(path: &Path) -> io::Result<Option<String>> {
    let content = RealDisk.read(path, MAX_FILE)?;
    let text = String::from_utf8(content).unwrap_or_default();
    let is_handle =
        !text.is_empty() && text.len() <= MAX_HANDLE && !text.chars().any(char::is_control);
    if !is_handle {
        let path = path.display();
        tracing::warn!("{path} is damaged: a claim of its volume is found by its grant only");
    }
    Ok(is_handle.then_some(text))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn volumes_are_kept_until_they_are_removed() {
        let directory = tempfile::tempdir().unwrap();
        let volumes = GrantedVolumes::new(directory.path().join("grants"));
        assert!(volumes.all().await.unwrap().is_empty());
        for handle in ["rbd/c/p//v.1", "rbd/c/p//v.2", "rbd/c/p//v.1"] {
            volumes.add(handle).await.unwrap();
        }
        // A write that did not end.
        std::fs::write(directory.path().join("grants/x.new"), "").unwrap();
        let again = GrantedVolumes::new(directory.path().join("grants"));
        let mut all = again.all().await.unwrap();
        all.sort();
        assert_eq!(all, ["rbd/c/p//v.1", "rbd/c/p//v.2"]);
        again.remove("rbd/c/p//v.1").await.unwrap();
        again.remove("rbd/c/p//v.1").await.unwrap();
        assert_eq!(again.all().await.unwrap(), ["rbd/c/p//v.2"]);
        std::fs::write(directory.path().join("grants/damaged"), "\n").unwrap();
        assert_eq!(again.all().await.unwrap(), ["rbd/c/p//v.2"]);
    }
}
