//! The `[csi]` section of the configuration: the CSI driver, which the crate `cleat-csi` implements.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Deserialize;

use crate::config_values::{duration, path_or_none};

/// The `csi` section.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CsiConfig {
    /// Whether the daemon serves CSI.
    pub enabled: bool,
    /// The name of the driver, as in StorageClass.provisioner.
    pub driver: String,
    /// The root directory of kubelet (`--root-dir`).
    pub kubelet_dir: PathBuf,
    /// The socket of the CSI services; `None`: `plugins/DRIVER/csi.sock` in kubelet's directory.
    #[serde(deserialize_with = "path_or_none")]
    pub socket: Option<PathBuf>,
    /// Whether the daemon registers the driver with kubelet.
    pub register: bool,
    /// Whether the daemon also serves the Controller service, on the same socket.
    pub controller: bool,
    /// The file with the monitors of each clusterID.
    pub clusters: PathBuf,
    /// The directories of file volumes, by name.
    pub directories: BTreeMap<String, PathBuf>,
    /// Whether a volume that several nodes reach needs a grant of the controller.
    pub grants: bool,
    /// The kubeconfig file for the grants; `None`: the service account of the pod.
    #[serde(deserialize_with = "path_or_none")]
    pub kubeconfig: Option<PathBuf>,
    /// How long a revoked volume may stay in use before it is unmapped by force. Zero: until it is fenced.
    #[serde(deserialize_with = "duration")]
    pub force_revoked_after: Duration,
}

/// The maximum length of a driver's name (CSI, GetPluginInfo).
const MAX_NAME: usize = 63;

impl Default for CsiConfig {
    fn default() -> Self {
        Self {
            enabled: false,
            driver: "cleat.csi.storage".to_owned(),
            kubelet_dir: PathBuf::from("/var/lib/kubelet"),
            socket: None,
            register: true,
            controller: false,
            clusters: PathBuf::from("/etc/cleat/clusters.json"),
            directories: BTreeMap::new(),
            grants: false,
            kubeconfig: None,
            force_revoked_after: Duration::ZERO,
        }
    }
}

impl CsiConfig {
    /// Returns the path of the socket of the CSI services.
    pub fn socket(&self) -> PathBuf {
        let default = || self.kubelet_dir.join("plugins").join(&self.driver).join("csi.sock");
        self.socket.clone().unwrap_or_else(default)
    }

    /// Returns the path of the socket on which kubelet looks for the driver.
    ///
    /// kubelet sends this path, percent-encoded, as the `:authority` of its requests (grpc-go, `encodeAuthority`). The
    /// crate `http` accepts `%` only before an `@`, so a request for a name without one would be refused with
    /// PROTOCOL_ERROR.
    pub fn registration_socket(&self) -> PathBuf {
        self.kubelet_dir.join("plugins_registry").join(format!("csi@{}-reg.sock", self.driver))
    }

    /// Returns the key of the topology segment that names a node.
    pub fn topology_key(&self) -> String {
        format!("topology.{}/node", self.driver)
    }

    /// Checks the values. Returns the key of the first invalid one, and what is wrong with it.
    ///
    /// # Errors
    /// Returns the key and the reason.
    pub(crate) fn check(&self) -> Result<(), (String, String)> {
        let name = self.driver.as_bytes();
        let ends = |byte: Option<&u8>| byte.is_some_and(u8::is_ascii_alphanumeric);
        let inside = |byte: &u8| byte.is_ascii_alphanumeric() || b"-.".contains(byte);
        if name.len() > MAX_NAME
            || !ends(name.first())
            || !name.last().is_some_and(u8::is_ascii_alphabetic)
            || !name.iter().all(inside)
        {
            let why = "must be at most 63 letters, digits, '-' and '.', and end with a letter";
            return Err(("csi.driver".to_owned(), why.to_owned()));
        }
        let paths = [
            ("csi.kubelet_dir".to_owned(), Some(&self.kubelet_dir)),
            ("csi.socket".to_owned(), self.socket.as_ref()),
            ("csi.clusters".to_owned(), Some(&self.clusters)),
            ("csi.kubeconfig".to_owned(), self.kubeconfig.as_ref()),
        ];
        let directories = self.directories.iter();
        let directories =
            directories.map(|(name, path)| (format!("csi.directories.{name}"), Some(path)));
        for (key, path) in paths.into_iter().chain(directories) {
            if path.is_some_and(|path| !is_plain(path)) {
                return Err((key, "must be an absolute path without \"..\"".to_owned()));
            }
        }
        Ok(())
    }
}

fn is_plain(path: &Path) -> bool {
    path.is_absolute() && !path.components().any(|part| part == std::path::Component::ParentDir)
}
