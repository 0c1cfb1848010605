//! What a VolumeAttachment asks for: the volume, and how the node is to use it.

use cleat_core::error::{Error, ErrorKind, Result};
use cleat_grants::controller::Request;
use cleat_grants::object::Mode;
use k8s_openapi::api::storage::v1::CSINode;
use kube::ResourceExt;

use crate::grant::VOLUME_ANNOTATION;
use crate::objects::{PersistentVolume, PersistentVolumeSpec, VolumeAttachment};

/// The annotation of external-attacher with the node id of a VolumeAttachment.
pub(crate) const NODE_ID_ANNOTATION: &str = "csi.alpha.kubernetes.io/node-id";

/// The annotation with the mode of a request: it must not change when the PersistentVolume does.
pub(crate) const MODE_ANNOTATION: &str = "cleat.csi.storage/mode";

/// A volume as a PersistentVolume or an inline specification names it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Source {
    /// The CSI volume handle.
    pub(crate) handle: String,
    /// How the node is to use it.
    pub(crate) mode: Mode,
}

impl Source {
    /// Reads the specification of a volume of the driver `driver`. `what` names the object in errors.
    ///
    /// # Errors
    /// Returns `InvalidArgument` if it is a volume of another driver, or has access modes that no mode of a grant
    /// corresponds to.
    pub(crate) fn read(spec: &PersistentVolumeSpec, driver: &str, what: &str) -> Result<Self> {
        let Some(csi) = spec.csi.as_ref().filter(|csi| csi.driver == driver) else {
            return Err(invalid(format!("{what} is not a volume of the driver {driver}")));
        };
        let mode = mode(spec, csi.read_only.unwrap_or_default(), what)?;
        Ok(Self { handle: csi.volume_handle.clone(), mode })
    }
}

/// Returns the mode for the access modes of a volume, in the order of external-attacher.
fn mode(spec: &PersistentVolumeSpec, is_read_only: bool, what: &str) -> Result<Mode> {
    let modes = spec.access_modes.as_deref().unwrap_or_default();
    let has = |wanted: &str| modes.iter().any(|mode| mode == wanted);
    let is_block = spec.volume_mode.as_deref() == Some("Block");
    if is_read_only {
        return Ok(Mode::ReadOnly);
    }
    if has("ReadWriteMany") {
        let error = invalid(format!(
            "{what} has the access mode ReadWriteMany: a filesystem cannot be written by several nodes"
        ));
        let repair = "use the access mode ReadWriteOnce, or volumeMode: Block";
        return if is_block { Ok(Mode::SharedReadWrite) } else { Err(error.with_repair(repair)) };
    }
    if has("ReadOnlyMany") && has("ReadWriteOnce") {
        let message =
            "has both access modes ReadOnlyMany and ReadWriteOnce, which CSI does not have";
        return Err(invalid(format!("{what} {message}")));
    }
    if has("ReadOnlyMany") {
        return Ok(Mode::ReadOnly);
    }
    if has("ReadWriteOnce") || has("ReadWriteOncePod") {
        return Ok(Mode::ReadWrite);
    }
    Err(invalid(format!("{what} has no access mode that CSI has: {modes:?}")))
}

/// Returns the volume of an attachment. `volume` is its PersistentVolume, if it names one that exists.
///
/// # Errors
/// Returns `InvalidArgument` for an attachment without exactly one source, and `NotFound` if its PersistentVolume
/// does not exist.
pub(crate) fn of_attachment(
    attachment: &VolumeAttachment,
    volume: Option<&PersistentVolume>,
) -> Result<Source> {
    let driver = &attachment.spec.attacher;
    let source = &attachment.spec.source;
    match (&source.persistent_volume_name, &source.inline_volume_spec) {
        (Some(_), Some(_)) => Err(invalid(
            "both inlineVolumeSpec and persistentVolumeName are specified in the source",
        )),
        (None, None) => Err(invalid(
            "neither inlineVolumeSpec nor persistentVolumeName is specified in the source",
        )),
        (None, Some(spec)) => Source::read(spec, driver, "the inline volume"),
        (Some(name), None) => {
            let what = format!("PersistentVolume {name}");
            let missing = || Error::new(ErrorKind::NotFound, format!("{what} does not exist"));
            let spec = volume.and_then(|volume| volume.spec.as_ref()).ok_or_else(missing)?;
            Source::read(spec, driver, &what)
        }
    }
}

/// Returns the request of an attachment; `None` if it is not one: it has no finalizer of ours yet, so that its end
/// might not be seen, or it is being deleted.
pub(crate) fn request(attachment: &VolumeAttachment, finalizer: &str) -> Option<Request> {
    let is_kept = attachment.finalizers().iter().any(|known| known == finalizer);
    if !is_kept || attachment.metadata.deletion_timestamp.is_some() {
        return None;
    }
    attachment.annotations().get(VOLUME_ANNOTATION)?;
    let mode = attachment.annotations().get(MODE_ANNOTATION)?;
    let mode = [Mode::ReadWrite, Mode::SharedReadWrite, Mode::ReadOnly]
        .into_iter()
        .find(|known| format!("{known:?}") == *mode)?;
    Some(Request { node: attachment.spec.node_name.clone(), mode, pod_uids: Vec::new() })
}

/// Returns the node id of an attachment: from CSINode or, if the node is gone, from the annotation.
///
/// # Errors
/// Returns `Unavailable` if the driver is not registered on the node.
pub(crate) fn node_id(attachment: &VolumeAttachment, node: Option<&CSINode>) -> Result<String> {
    let (driver, name) = (&attachment.spec.attacher, &attachment.spec.node_name);
    let drivers = node.into_iter().flat_map(|node| &node.spec.drivers);
    let registered = drivers.filter(|known| known.name == *driver).map(|known| &known.node_id);
    let recorded = attachment.annotations().get(NODE_ID_ANNOTATION);
    registered.into_iter().next().or(recorded).cloned().ok_or_else(|| {
        let message = format!("the driver {driver} is not registered on node {name}");
        Error::new(ErrorKind::Unavailable, message)
            .with_repair(format!("start the agent on node {name}: cleat node"))
    })
}

/// Returns the finalizer of external-attacher for a driver: its name with every other character than letters,
/// digits and `-` replaced, and with an X after a last `-`.
pub(crate) fn finalizer(driver: &str) -> String {
    let plain = |c: char| if c.is_ascii_alphanumeric() { c } else { '-' };
    let mut name: String = driver.chars().map(plain).collect();
    if name.ends_with('-') {
        name.push('X');
    }
    format!("external-attacher/{name}")
}

fn invalid(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidArgument, message)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::objects::CSIPersistentVolumeSource;

    const DRIVER: &str = "cleat.csi.storage";

    fn volume(modes: &[&str], volume_mode: &str, read_only: bool) -> PersistentVolumeSpec {
        let csi = CSIPersistentVolumeSource {
            driver: DRIVER.to_owned(),
            volume_handle: "rbd/c/p//v".to_owned(),
            read_only: Some(read_only),
        };
        PersistentVolumeSpec {
            access_modes: Some(modes.iter().map(ToString::to_string).collect()),
            volume_mode: Some(volume_mode.to_owned()),
            csi: Some(csi),
            ..PersistentVolumeSpec::default()
        }
    }

    fn read(modes: &[&str], volume_mode: &str, read_only: bool) -> Result<Mode> {
        let spec = volume(modes, volume_mode, read_only);
        Source::read(&spec, DRIVER, "PersistentVolume v").map(|source| source.mode)
    }

    #[test]
    fn access_modes_become_modes_of_a_grant() {
        assert_eq!(read(&["ReadWriteOnce"], "Filesystem", false).unwrap(), Mode::ReadWrite);
        assert_eq!(read(&["ReadWriteOncePod"], "Block", false).unwrap(), Mode::ReadWrite);
        assert_eq!(read(&["ReadOnlyMany"], "Filesystem", false).unwrap(), Mode::ReadOnly);
        assert_eq!(read(&["ReadWriteOnce"], "Filesystem", true).unwrap(), Mode::ReadOnly);
        let many = ["ReadWriteOnce", "ReadWriteMany"];
        assert_eq!(read(&many, "Block", false).unwrap(), Mode::SharedReadWrite);
        for (modes, volume_mode, cause) in [
            (&["ReadWriteMany"][..], "Filesystem", "cannot be written by several nodes"),
            (&["ReadOnlyMany", "ReadWriteOnce"], "Filesystem", "which CSI does not have"),
            (&[], "Filesystem", "no access mode"),
        ] {
            let error = read(modes, volume_mode, false).unwrap_err();
            assert!(error.message().contains(cause), "{error}");
        }
    }

    #[test]
    fn a_volume_of_another_driver_is_refused() {
        let spec = volume(&["ReadWriteOnce"], "Block", false);
        let error = Source::read(&spec, "other.csi", "PersistentVolume v").unwrap_err();
        assert_eq!(error.message(), "PersistentVolume v is not a volume of the driver other.csi");
    }

    #[test]
    fn the_finalizer_is_that_of_external_attacher() {
        assert_eq!(finalizer(DRIVER), "external-attacher/cleat-csi-storage");
        assert_eq!(finalizer("a/b-"), "external-attacher/a-b-X");
    }

    #[test]
    fn an_attachment_asks_only_when_its_end_will_be_seen() {
        let mut attachment = VolumeAttachment::default();
        attachment.spec.node_name = "a".to_owned();
        let annotations = attachment.annotations_mut();
        annotations.insert(VOLUME_ANNOTATION.to_owned(), "v".to_owned());
        annotations.insert(MODE_ANNOTATION.to_owned(), "ReadOnly".to_owned());
        assert_eq!(request(&attachment, "f"), None);
        attachment.finalizers_mut().push("f".to_owned());
        let known = request(&attachment, "f").unwrap();
        assert_eq!((known.node.as_str(), known.mode), ("a", Mode::ReadOnly));
    }
}
