//! ControllerPublishVolume, ControllerUnpublishVolume and ValidateVolumeCapabilities: which node may use a volume.
//!
//! [`Controller::decide`] and [`Controller::release`] are the only places that decide. They know this node, what
//! this process has mapped, and what the storage says about a claim. So two things cannot be decided here: a volume
//! is not fenced for another node, and a node other than this one is not known to exist. `published` stores which
//! volumes this node may use, and in which mode.

use std::collections::BTreeMap;

use cleat_backend::store::Info;
use cleat_core::error::{Error, ErrorKind, Result};
use cleat_csi_api::csi::v1 as csi;
use csi::volume_capability::access_mode::Mode;
use serde::Deserialize;

use super::Controller;
use super::labels::Made;
use super::parameters::Mutable;
use super::places::{Located, Place};
use super::refused::Answer;
use super::volumes::missing;
use crate::attributes::{Attributes, READ_ONLY};
use crate::capability::Capability;
use crate::secrets::Secrets;
use crate::volume_id::VolumeId;

/// The part of a claim that matters here.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Claim {
    /// The claim of an RBD image (`cleat_rbd`, claim/record.rs).
    Image {
        /// The id of the image. Clones inherit the claim of their parent.
        image: String,
        #[serde(default)]
        node: String,
        /// Whether the client has released the claim. It then has no request in flight.
        #[serde(default)]
        released: bool,
    },
    /// The claim of a volume on an object store that its client has not released (`cleat_object_backend`,
    /// claim/record.rs).
    Object { client: Client },
}

#[derive(Debug, Deserialize)]
struct Client {
    node: String,
}

/// Returns the node with the active claim of a volume.
pub(crate) fn holder(info: &Info) -> Option<String> {
    match serde_json::from_value(info.claim.clone()?).ok()? {
        Claim::Image { image, node, released } => {
            (Some(&image) == info.id.as_ref() && !released).then_some(node)
        }
        Claim::Object { client } => Some(client.node),
    }
}

/// Checks a capability that a volume in `place` must have.
///
/// # Errors
/// Returns `InvalidArgument` for one that is incomplete, or that volumes there cannot have.
pub(crate) fn check_capability(
    place: Option<&Place>,
    capability: Option<csi::VolumeCapability>,
) -> Result<Capability> {
    let mode = capability.as_ref().and_then(|capability| capability.access_mode);
    let mode = mode.and_then(|mode| Mode::try_from(mode.mode).ok()).unwrap_or(Mode::Unknown);
    let parsed = Capability::parse(capability)?;
    let refused = |message: &str| {
        Err(Error::new(ErrorKind::InvalidArgument, message)
            .with_repair("use the access mode ReadWriteOnce or ReadWriteOncePod"))
    };
    let is_local = place.is_some_and(Place::is_local);
    match mode {
        _ if parsed.shared && matches!(place, Some(Place::Object { .. })) => {
            refused("a volume on an object store has one writer")
        }
        _ if parsed.shared && is_local => {
            refused("a file volume exists on one node, and others cannot write it")
        }
        Mode::MultiNodeReaderOnly if is_local => {
            refused("a file volume exists on one node, and others cannot read it")
        }
        _ => Ok(parsed),
    }
}

/// How a node wants to use a volume.
pub(crate) struct Wanted {
    pub(crate) capability: Option<csi::VolumeCapability>,
    pub(crate) read_only: bool,
}

/// Returns the publish context of a volume with these mutable parameters.
fn published_context(
    mut mutable: BTreeMap<String, String>,
    read_only: bool,
) -> BTreeMap<String, String> {
    if read_only {
        mutable.insert(READ_ONLY.to_owned(), "true".to_owned());
    }
    mutable
}

impl Controller {
    /// Permits a node to use a volume. Returns what the node needs to know besides the volume's attributes: the
    /// present values of mutable parameters, and whether the node may only read.
    pub(crate) fn publish(
        &self,
        id: &str,
        node: &str,
        wanted: Wanted,
        attributes: &Attributes,
        secrets: &Secrets,
    ) -> Answer<BTreeMap<String, String>> {
        let Some(parsed) = VolumeId::parse(id) else {
            check_capability(None, wanted.capability)?;
            if attributes.uri.is_none() && !attributes.static_volume {
                let message =
                    format!("volume {id} does not exist: this driver did not make its id");
                return Err(Error::new(ErrorKind::NotFound, message).into());
            }
            // A static volume, which the node finds by its attributes.
            self.decide(id, node, None)?;
            return Ok(published_context(BTreeMap::new(), wanted.read_only));
        };
        let Located { place, name } = self.locate(&parsed)?;
        check_capability(Some(&place), wanted.capability)?;
        let open = self.open(&place, secrets)?;
        let info = open.find(&name)?.ok_or_else(|| missing(&parsed))?;
        self.decide(id, node, Some(&info))?;
        self.store_published(id, &info, &open, wanted.read_only, secrets)?;
        let mutable = Made::read(&info).map(|made| made.mutable).unwrap_or_default();
        Ok(published_context(mutable, wanted.read_only))
    }

    /// Decides whether `node` may use a volume now. `info` is `None` for a static volume.
    ///
    /// # Errors
    /// Returns `NotFound` for a node that is not known, and `InUse`, with its name, if another node has the volume.
    fn decide(&self, id: &str, node: &str, info: Option<&Info>) -> Result<()> {
        if node != self.node {
            let message =
                format!("the node {node} is not known to the controller on {}", self.node);
            return Err(Error::new(ErrorKind::NotFound, message)
                .with_repair("a controller in cleat node serves only volumes of its own node"));
        }
        match info.and_then(holder) {
            Some(holder) if holder != node => {
                let message = format!("volume {id} is claimed by the node {holder}");
                Err(Error::new(ErrorKind::InUse, message).with_repair(format!(
                    "unmap it on {holder}; if that node is lost: cleat fence"
                )))
            }
            _ => Ok(()),
        }
    }

    /// Ends the permission of a node, or of every node if `node` is empty. A volume that does not exist is success.
    pub(crate) fn unpublish(&self, id: &str, node: &str, secrets: &Secrets) -> Answer<()> {
        let Some(parsed) = VolumeId::parse(id) else {
            return Ok(self.release(id, node, None)?);
        };
        if let VolumeId::File { node: owner, .. } = &parsed
            && *owner != node
            && !node.is_empty()
        {
            // No other node can ever have used the file.
            return Ok(());
        }
        let Located { place, name } = self.locate(&parsed)?;
        let found = match self.open(&place, secrets) {
            Ok(open) => open.find(&name)?.map(|info| (open, info)),
            Err(error) if error.kind() == ErrorKind::NotFound => None,
            Err(error) => return Err(error.into()),
        };
        self.release(id, node, found.as_ref().map(|(_, info)| info))?;
        if let Some((open, info)) = found {
            self.remove_published(id, &info, &open, node)?;
        }
        Ok(())
    }

    /// Decides whether it is proved that `node` does not write to a volume any more. `info` is `None` for a static
    /// volume, and for one that does not exist.
    ///
    /// # Errors
    /// Returns `InUse` if the node has the volume, or had it and may still write to it.
    fn release(&self, id: &str, node: &str, info: Option<&Info>) -> Result<()> {
        let is_meant = |other: &str| node.is_empty() || node == other;
        if is_meant(&self.node) && self.local.health(id).is_some() {
            let message = format!("volume {id} is still staged on the node {}", self.node);
            return Err(Error::new(ErrorKind::InUse, message)
                .with_repair("end the pods that use it; kubelet then unstages it"));
        }
        match info.and_then(holder) {
            // This process has no mapping of it, so nothing on this node writes to it through cleat.
            Some(holder) if holder != self.node && is_meant(&holder) => {
                let message = format!("the node {holder} has not released volume {id}");
                Err(Error::new(ErrorKind::InUse, message).with_repair(format!(
                    "unmap it on {holder}; if that node is lost: cleat fence"
                )))
            }
            _ => Ok(()),
        }
    }

    /// Checks whether a volume can be used as a request wants. Returns what is wrong.
    pub(crate) fn validate(
        &self,
        id: &VolumeId,
        wanted: &csi::ValidateVolumeCapabilitiesRequest,
        secrets: &Secrets,
    ) -> Answer<Option<String>> {
        let Located { place, name } = self.locate(id)?;
        self.open(&place, secrets)?.find(&name)?.ok_or_else(|| missing(id))?;
        let capabilities = wanted
            .volume_capabilities
            .iter()
            .map(|capability| check_capability(Some(&place), Some(capability.clone())).map(drop));
        let checks = || -> Result<()> {
            capabilities.collect::<Result<()>>()?;
            Attributes::parse(&wanted.volume_context)?;
            Mutable::parse(wanted.mutable_parameters.clone())?;
            if !wanted.parameters.is_empty() {
                self.parameters(wanted.parameters.clone(), BTreeMap::new())?;
            }
            Ok(())
        };
        Ok(checks().err().map(|error| error.message().to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::controller::tests::{capability, controller};
    use csi::volume_capability::{AccessType, BlockVolume};

    fn rbd() -> Place {
        let (cluster, pool) = ("c1".to_owned(), "p".to_owned());
        Place::Rbd { cluster, pool, namespace: String::new() }
    }

    #[test]
    fn access_modes_that_the_storage_does_not_have_are_refused() {
        let file = Place::File { directory: "fast".to_owned() };
        for (place, mode, permitted) in [
            (&file, Mode::SingleNodeWriter, true),
            (&file, Mode::SingleNodeMultiWriter, true),
            (&file, Mode::MultiNodeReaderOnly, false),
            (&rbd(), Mode::MultiNodeReaderOnly, true),
            (&rbd(), Mode::Unknown, false),
        ] {
            let checked = check_capability(Some(place), Some(capability(mode)));
            assert_eq!(checked.is_ok(), permitted, "{place} {mode:?}");
        }
        // Several nodes write only to block volumes of RBD.
        for mode in [Mode::MultiNodeSingleWriter, Mode::MultiNodeMultiWriter] {
            let block = || csi::VolumeCapability {
                access_type: Some(AccessType::Block(BlockVolume {})),
                ..capability(mode)
            };
            assert!(check_capability(Some(&rbd()), Some(capability(mode))).is_err());
            assert!(check_capability(Some(&file), Some(block())).is_err());
            assert!(check_capability(Some(&rbd()), Some(block())).unwrap().shared);
        }
    }

    fn claimed(json: &str) -> Info {
        let claim = Some(serde_json::from_str(json).unwrap());
        Info { id: Some("i1".to_owned()), claim, ..Info::default() }
    }

    #[test]
    fn the_holder_is_the_node_of_an_active_claim() {
        let active = claimed(r#"{"version":1,"image":"i1","node":"n2","generation":3}"#);
        assert_eq!(holder(&active).as_deref(), Some("n2"));
        let released = claimed(r#"{"version":1,"image":"i1","node":"n2","released":true}"#);
        assert_eq!(holder(&released), None);
        let object = claimed(r#"{"version":1,"use":"serve","client":{"epoch":3,"node":"n2"}}"#);
        assert_eq!(holder(&object).as_deref(), Some("n2"));
        let inherited = claimed(r#"{"version":1,"image":"parent","node":"n2"}"#);
        assert_eq!(holder(&inherited), None);
        assert_eq!(holder(&Info::default()), None);
    }

    #[test]
    fn a_claim_of_another_node_keeps_the_volume() {
        let directory = tempfile::tempdir().unwrap();
        let controller = controller(&directory);
        let other = claimed(r#"{"version":1,"image":"i1","node":"n2"}"#);
        let own = claimed(r#"{"version":1,"image":"i1","node":"n1"}"#);
        let error = controller.decide("v", "n1", Some(&other)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InUse);
        assert!(error.message().contains("the node n2"), "{error}");
        controller.decide("v", "n1", Some(&own)).unwrap();
        controller.decide("v", "n1", None).unwrap();
        let unknown = controller.decide("v", "n3", None).unwrap_err();
        assert_eq!(unknown.kind(), ErrorKind::NotFound);

        // The claim is that of n2, so a stale call for n1 or n3 succeeds and takes nothing from n2.
        for node in ["n1", "n3"] {
            controller.release("v", node, Some(&other)).unwrap();
        }
        for node in ["n2", ""] {
            let error = controller.release("v", node, Some(&other)).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InUse, "{node:?}");
        }
    }
}
