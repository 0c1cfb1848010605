//! Converts librbd's errors into errors of cleat, with hints for the administrator.

use std::sync::Arc;

use librbd::{Cluster, Subject};

use crate::spec::RbdSpec;
use cleat_core::error::{Error, ErrorKind};

/// Converts an error from opening the image `name`, with a hint.
pub(crate) fn open_error(error: librbd::Error, name: &str, spec: &RbdSpec) -> Error {
    let kind = kind(&error);
    let repair = repair(&error, spec).or_else(|| {
        (kind == ErrorKind::NotFound)
            .then(|| format!("check that the image exists: rbd info {name}"))
    });
    let opened = Error::new(kind, format!("cannot open the RBD image {name}")).with_source(error);
    match repair {
        Some(repair) => opened.with_repair(repair),
        None => opened,
    }
}

/// Returns a better error for one from opening the image of `spec`, if its namespace does not exist: then the
/// library only reports that the image does not.
pub(crate) fn missing_namespace(
    error: &librbd::Error,
    cluster: &Arc<Cluster>,
    spec: &RbdSpec,
) -> Option<Error> {
    let name = spec.namespace.as_deref().filter(|_| error.errno() == Some(libc::ENOENT))?;
    // A client that may only use this namespace cannot read the list.
    let exists = cluster.pool(&spec.pool, None).ok()?.has_namespace(name).ok()?;
    (!exists).then(|| no_namespace(&spec.pool, name))
}

/// Returns the error for a namespace that does not exist.
pub(crate) fn no_namespace(pool: &str, name: &str) -> Error {
    let message = format!("the pool {pool} has no namespace {name}");
    Error::new(ErrorKind::NotFound, message).with_repair(format!(
        "create it (rbd namespace create {pool}/{name}), or list the existing ones (rbd namespace ls \
         {pool})"
    ))
}

/// Returns the hint for `error`, for those errors whose hint does not depend on the operation.
pub(crate) fn repair(error: &librbd::Error, spec: &RbdSpec) -> Option<String> {
    match (kind(error), error.subject()) {
        (ErrorKind::InvalidArgument, Subject::Option) => {
            return Some(
                "correct or remove that config.OPTION of the volume; ceph config ls lists the options, and \
                 ceph config help OPTION explains one"
                    .to_owned(),
            );
        }
        (_, Subject::Configuration) => {
            return Some(
                "check the file; conf=PATH in the volume's options names another one".to_owned(),
            );
        }
        (_, Subject::Key) => return Some(newer_library(spec)),
        (ErrorKind::Internal, Subject::Connection) if error.errno() == Some(libc::EIO) => {
            return Some(format!(
                "if the key of {} begins with Ag, it is of the type aes256k: {}",
                client_name(spec),
                newer_library(spec)
            ));
        }
        (ErrorKind::NotFound, Subject::Connection) => {
            return Some(format!(
                "check Ceph's configuration, and that the key of {} is in its keyring; conf=PATH, \
                 keyring=PATH and id=NAME in the volume's options select others",
                client_name(spec)
            ));
        }
        (ErrorKind::NotFound, Subject::Pool) => {
            return Some("check that the pool exists: ceph osd pool ls".to_owned());
        }
        _ => {}
    }
    match kind(error) {
        ErrorKind::Unsupported => error.load().map(librbd::LoadError::repair),
        ErrorKind::PermissionDenied => Some(missing_caps_repair(spec, None)),
        ErrorKind::TimedOut => {
            Some("check that the monitors can be reached from here (ceph status)".to_owned())
        }
        ErrorKind::NoSpace => Some(format!(
            "check the free space and the quota: ceph df, ceph osd pool get-quota {}",
            spec.pool
        )),
        ErrorKind::Fenced => Some(
            "this client is on the blocklist (ceph osd blocklist ls); repeat the command, which \
                 then runs as a new client"
                .to_owned(),
        ),
        _ => None,
    }
}

/// Returns the hint for a key of the type aes256k and a library that cannot read it.
fn newer_library(spec: &RbdSpec) -> String {
    let client = client_name(spec);
    format!(
        "install librbd and librados of Ceph 20 on this machine; or allow keys of the older type in the cluster (ceph mon \
         set auth_allowed_ciphers aes,aes256k), and make a key of the type aes for {client}"
    )
}

/// Returns the hint for a key without the capabilities for `spec` or for the pool with its data.
pub(crate) fn missing_caps_repair(spec: &RbdSpec, data_pool: Option<&str>) -> String {
    format!(
        "check that the key of {} is in its keyring (id=NAME and keyring=PATH in the volume's options \
         select others), and that it may use the pool: {}",
        client_name(spec),
        caps_command(spec, data_pool, "")
    )
}

/// Returns the command that gives a key the capabilities for `spec`, with `more` appended to those at the
/// monitors.
pub(crate) fn caps_command(spec: &RbdSpec, data_pool: Option<&str>, more: &str) -> String {
    let RbdSpec { pool, namespace, .. } = spec;
    let space = namespace.as_ref().map(|name| format!(" namespace={name}")).unwrap_or_default();
    let data = data_pool.map(|pool| format!(", profile rbd pool={pool}")).unwrap_or_default();
    let client = client_name(spec);
    format!(
        "ceph auth caps {client} mon 'profile rbd{more}' osd 'profile rbd pool={pool}{space}{data}' \
         (this replaces its present capabilities: ceph auth get {client})"
    )
}

/// Adds the hint about capabilities to an error that was made without access to the volume's options.
pub(crate) fn with_caps_repair(error: Error, spec: &RbdSpec) -> Error {
    match (error.kind(), error.repair()) {
        (ErrorKind::PermissionDenied, None) => error.with_repair(missing_caps_repair(spec, None)),
        _ => error,
    }
}

pub(crate) fn client_name(spec: &RbdSpec) -> String {
    format!("client.{}", spec.id.as_deref().unwrap_or("admin"))
}

/// Converts an error of an operation on the open image `name`.
pub(crate) fn image_error(error: librbd::Error, name: &str) -> Error {
    Error::new(kind(&error), format!("an operation on the RBD image {name} failed"))
        .with_source(error)
}

pub(crate) fn kind(error: &librbd::Error) -> ErrorKind {
    if error.load().is_some() {
        return ErrorKind::Unsupported;
    }
    match error.errno() {
        // The library knows no such option.
        Some(libc::ENOENT) if error.subject() == Subject::Option => ErrorKind::InvalidArgument,
        // No errno: a value with a zero byte, or an answer that exceeds every limit.
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
