//! What librbd's errors mean to whoever opens or changes a volume.

use crate::spec::RbdSpec;
use cleat_core::error::{Error, ErrorKind};

/// An error while `name` was opened, with what repairs it.
pub(crate) fn problem(error: librbd::Error, name: &str, spec: &RbdSpec) -> Error {
    let kind = kind(&error);
    let repair = match kind {
        ErrorKind::NotFound => Some(format!(
            "see that the image exists (rbd info {name}), and the configuration and the key of \
             {}; conf=PATH, keyring=PATH and id=NAME in the volume's options say otherwise",
            client(spec)
        )),
        _ => repair(&error, spec),
    };
    let opened = Error::new(kind, format!("cannot open the RBD image {name}")).with_source(error);
    match repair {
        Some(repair) => opened.with_repair(repair),
        None => opened,
    }
}

/// What repairs `error`, wherever it comes from.
pub(crate) fn repair(error: &librbd::Error, spec: &RbdSpec) -> Option<String> {
    match kind(error) {
        ErrorKind::Unsupported => error.load().map(librbd::LoadError::repair),
        ErrorKind::PermissionDenied => Some(lacks_rights(spec, None)),
        ErrorKind::TimedOut => {
            Some("see that the monitors can be reached from here (ceph status)".to_owned())
        }
        ErrorKind::NoSpace => Some(format!(
            "see where there is no room: ceph df, ceph osd pool get-quota {}",
            spec.pool
        )),
        ErrorKind::Fenced => {
            Some("start again as a new client; see `ceph osd blocklist ls`".to_owned())
        }
        _ => None,
    }
}

/// What repairs that a key may not do something with `spec`, or with the pool that its data go to.
pub(crate) fn lacks_rights(spec: &RbdSpec, data_pool: Option<&str>) -> String {
    format!(
        "see that the key of {} is in its keyring (id=NAME and keyring=PATH in the volume's options \
         name others), and that it may use the pool: {}",
        client(spec),
        caps(spec, data_pool, "")
    )
}

/// The command that lets a key use `spec`, and with `more` in its rights at the monitors.
pub(crate) fn caps(spec: &RbdSpec, data_pool: Option<&str>, more: &str) -> String {
    let RbdSpec { pool, namespace, .. } = spec;
    let space = namespace.as_ref().map(|name| format!(" namespace={name}")).unwrap_or_default();
    let data = data_pool.map(|pool| format!(", profile rbd pool={pool}")).unwrap_or_default();
    let client = client(spec);
    format!(
        "ceph auth caps {client} mon 'profile rbd{more}' osd 'profile rbd pool={pool}{space}{data}' \
         (instead of all that it may so far: ceph auth get {client})"
    )
}

/// An error that was made where nobody knew the volume's options, with what repairs it.
pub(crate) fn explained(error: Error, spec: &RbdSpec) -> Error {
    match (error.kind(), error.repair()) {
        (ErrorKind::PermissionDenied, None) => error.with_repair(lacks_rights(spec, None)),
        _ => error,
    }
}

pub(crate) fn client(spec: &RbdSpec) -> String {
    format!("client.{}", spec.id.as_deref().unwrap_or("admin"))
}

/// An error of an image that is open.
pub(crate) fn later(error: librbd::Error, name: &str) -> Error {
    Error::new(kind(&error), format!("the RBD image {name} does not do it")).with_source(error)
}

pub(crate) fn kind(error: &librbd::Error) -> ErrorKind {
    if error.load().is_some() {
        return ErrorKind::Unsupported;
    }
    match error.errno() {
        // A value with a zero byte, or an answer beyond all bounds.
        None | Some(libc::EINVAL) => ErrorKind::InvalidArgument,
        Some(libc::ENOENT) => ErrorKind::NotFound,
        Some(libc::EPERM | libc::EACCES | libc::EROFS) => ErrorKind::PermissionDenied,
        Some(libc::EBUSY | libc::ENOTEMPTY | libc::EMLINK) => ErrorKind::InUse,
        Some(libc::ECANCELED) => ErrorKind::Aborted,
        Some(libc::EEXIST) => ErrorKind::AlreadyExists,
        Some(libc::ETIMEDOUT) => ErrorKind::TimedOut,
        Some(libc::ESHUTDOWN) => ErrorKind::Fenced,
        Some(libc::ENOSPC | libc::EDQUOT) => ErrorKind::NoSpace,
        Some(libc::EOPNOTSUPP | libc::ENOSYS) => ErrorKind::Unsupported,
        Some(libc::ENOTCONN | libc::ECONNREFUSED | libc::ECONNRESET) => ErrorKind::Unavailable,
        Some(_) => ErrorKind::Internal,
    }
}
