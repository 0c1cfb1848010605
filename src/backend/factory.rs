//! From a URI to an open volume: the only place that names concrete backends.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use super::claimant::Claimant;
#[cfg(feature = "fault")]
use super::fault;
use super::fence::Fence;
use super::file::{FileImage, FileStore};
use super::manage::Store;
use super::mem::MemImage;
use super::rbd::{self, RbdFence, RbdImage, RbdStore};
use super::uri::{Spec, StoreSpec, StoreUri, VolumeUri};
use super::{HandoverFiles, Image};
use cleat_core::error::{Error, ErrorKind, Result};

/// How a volume is opened, beyond what its URI says.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct OpenOptions {
    /// Nothing is ever written, and no claim is made.
    pub read_only: bool,
    /// Who makes the claim, where a volume has one that outlives processes.
    pub claimant: Claimant,
    /// Snapshots of it are to be told ([`SnapshotQuiesce`](super::SnapshotQuiesce)).
    pub snapshots: bool,
}

/// When a process that serves a volume can give up its access to the system, and what must stay.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Confinement {
    /// After [`open`], which starts no thread: everything that will ever be used is open.
    AfterOpen,
    /// Before [`open`], because it starts threads, which can only be confined from birth on.
    BeforeOpen {
        /// Files and directories that will be read.
        paths: Vec<PathBuf>,
        /// Whether AF_INET, AF_INET6 and AF_UNIX sockets will be needed.
        network: bool,
    },
}

/// Opens a volume. Blocks; starts no thread where [`confinement`] says `AfterOpen`.
///
/// # Errors
/// `NotFound`, `InUse`, `PermissionDenied`, `Unsupported`, or what the backend gives.
pub fn open(uri: &VolumeUri, options: &OpenOptions) -> Result<Arc<dyn Image>> {
    Ok(match uri.spec() {
        Spec::Mem(spec) => Arc::new(MemImage::create(spec, options.read_only)?),
        Spec::File(spec) => Arc::new(FileImage::open(spec, options.read_only)?),
        Spec::Rbd(spec) => Arc::new(RbdImage::open(spec, options)?),
        #[cfg(feature = "fault")]
        Spec::Fault(spec) => {
            Arc::new(fault::FaultImage::wrap(open(&spec.inner, options)?, spec.plan.clone()))
        }
    })
}

/// Reaches a place that volumes are kept in, for nobody in particular. Blocks, within a limit.
///
/// # Errors
/// `NotFound`, `PermissionDenied`, `TimedOut`, `Unsupported`, or what the backend gives.
pub fn store(uri: &StoreUri) -> Result<Box<dyn Store>> {
    store_for(&Claimant::default(), uri)
}

/// The same for somebody, who may take data from under those that [`open`] would take a volume from.
///
/// # Errors
/// As [`store`].
pub fn store_for(claimant: &Claimant, uri: &StoreUri) -> Result<Box<dyn Store>> {
    Ok(match uri.spec() {
        StoreSpec::File(directory) => Box::new(FileStore::open(uri, directory)?),
        StoreSpec::Rbd(spec) => Box::new(RbdStore::connect(uri, spec, claimant)?),
    })
}

/// Where the writers of `uri` are kept apart, to be looked at and changed.
///
/// # Errors
/// `Unsupported` for a volume whose writers the kernel keeps apart.
pub fn fence(uri: &VolumeUri) -> Result<Box<dyn Fence>> {
    match uri.spec() {
        Spec::Rbd(spec) => Ok(Box::new(RbdFence::of(spec)?)),
        Spec::Mem(_) | Spec::File(_) => {
            let message = format!("{}: volumes are of one machine, and fence nobody", uri.scheme());
            Err(Error::new(ErrorKind::Unsupported, message)
                .with_repair("see who holds the mapping: cleat status NAME"))
        }
        #[cfg(feature = "fault")]
        Spec::Fault(spec) => fence(&spec.inner),
    }
}

/// Reads what a process may not be able to read any more when it opens `uri`: libraries. Starts no
/// thread, and touches nothing of the volume.
///
/// # Errors
/// `Unsupported` when a library is missing; the repair names it.
pub fn prepare(uri: &VolumeUri) -> Result<()> {
    match uri.spec() {
        Spec::Mem(_) | Spec::File(_) => Ok(()),
        Spec::Rbd(_) => rbd::preload().map(drop),
        #[cfg(feature = "fault")]
        Spec::Fault(spec) => prepare(&spec.inner),
    }
}

/// The library that `rbd:` volumes need, with its version; `None` where it is not installed.
///
/// # Errors
/// `Unsupported` when it is there and cannot be used.
pub fn rbd_library() -> Result<Option<String>> {
    rbd::library()
}

/// Opens a volume that another process still serves, with what that one's [`Handover::prepare`](super::Handover::prepare) returned.
/// Nothing is written before [`Handover::take_over`](super::Handover::take_over).
///
/// # Errors
/// As [`open`]; `InvalidArgument` for descriptors that are not the volume's.
pub fn inherit(
    uri: &VolumeUri,
    options: &OpenOptions,
    files: HandoverFiles,
) -> Result<Arc<dyn Image>> {
    Ok(match uri.spec() {
        Spec::Mem(_) => Arc::new(MemImage::inherit(files, options.read_only)?),
        Spec::File(spec) => Arc::new(FileImage::inherit(spec, files, options.read_only)?),
        // Its claim is released and acquired; there is nothing to be passed on.
        Spec::Rbd(spec) => Arc::new(RbdImage::inherit(spec, options)?),
        #[cfg(feature = "fault")]
        Spec::Fault(spec) => {
            let inner = inherit(&spec.inner, options, files)?;
            Arc::new(fault::FaultImage::wrap(inner, spec.plan.clone()))
        }
    })
}

/// The most that [`unlocking`] gives.
pub const MAX_UNLOCKING: Duration = rbd::MAX_UNLOCKING;

/// How much longer than others a volume may take to open, since its key is derived from a passphrase.
pub fn unlocking(uri: &VolumeUri) -> Duration {
    match uri.spec() {
        Spec::Mem(_) | Spec::File(_) => Duration::ZERO,
        Spec::Rbd(spec) => rbd::unlocking(spec),
        #[cfg(feature = "fault")]
        Spec::Fault(spec) => unlocking(&spec.inner),
    }
}

/// When a process can be confined that is about to open `uri`.
pub fn confinement(uri: &VolumeUri) -> Confinement {
    match uri.spec() {
        Spec::Mem(_) | Spec::File(_) => Confinement::AfterOpen,
        Spec::Rbd(spec) => Confinement::BeforeOpen { paths: rbd::files(spec), network: true },
        // Its timer thread starts with the first queue, after the opening.
        #[cfg(feature = "fault")]
        Spec::Fault(spec) => confinement(&spec.inner),
    }
}
