//! Failures of the engine as errors for people and for requests.

use std::time::Instant;

use cleat_core::error::{Error, ErrorKind, Result};
use cleat_core::request::IoError;
use cleat_object::codec::Damage;
use cleat_object::name::Name;
use cleat_object::store::StoreError;
use cleat_object::volume::Failure;

use crate::executor::block_until;

/// Returns the error for a failure of the volume `name`.
pub(crate) fn failed(name: &str, failure: Failure) -> Error {
    let (kind, message, repair) = match &failure {
        Failure::Fenced => (
            ErrorKind::Fenced,
            format!("another client has taken {name} over"),
            "cleat fence ls shows the clients",
        ),
        Failure::Lost(Name::Description) => (
            ErrorKind::NotFound,
            format!("{name} does not exist"),
            "cleat volume ls shows the volumes; cleat volume create makes one",
        ),
        Failure::Store { error: StoreError::Refused(_), .. } => (
            ErrorKind::PermissionDenied,
            format!("the store of {name} refuses an operation"),
            "check the permissions and the credentials",
        ),
        Failure::Store { .. } => (
            ErrorKind::Unavailable,
            format!("the store of {name} fails"),
            "check that the store can be reached, then repeat the command",
        ),
        Failure::Unsupported(_) | Failure::Damaged { damage: Damage::Features(_), .. } => (
            ErrorKind::Unsupported,
            format!("{name} was written by another build"),
            "use the build of cleat that has written the volume, or a later one",
        ),
        Failure::Lost(_) | Failure::Damaged { .. } => (
            ErrorKind::Internal,
            format!("{name} is damaged"),
            "cleat volume fsck --repair repairs what is safe; else restore the object that the error names, or the volume, \
             from a backup",
        ),
        Failure::Locked | Failure::WrongKey | Failure::NotEncrypted => key_error(name, &failure),
        Failure::NoSnapshot => {
            return Error::new(ErrorKind::NotFound, format!("{name}: the snapshot does not exist"))
                .with_repair("cleat volume snapshot ls shows the snapshots");
        }
        Failure::HasClones => {
            return Error::new(ErrorKind::InUse, format!("{name}: the snapshot has clones"))
                .with_repair("remove the clones first, or flatten them: cleat volume flatten");
        }
        Failure::NeedParent(_) => (
            ErrorKind::InUse,
            format!("{name} cannot be made independent of its parent"),
            "remove these snapshots first: cleat volume snapshot remove; then repeat the command",
        ),
        Failure::Stale { .. } => (
            ErrorKind::Fenced,
            format!("another client has written to {name} since this mapping has"),
            "unmap it with --force, then map it again; cleat fence ls shows the clients",
        ),
        Failure::TailMemory(_) => (
            ErrorKind::Internal,
            format!("the writes to {name} that were not in the store cannot be read"),
            "unmap it with --force, which gives these writes up, then map it again",
        ),
        Failure::Invalid(why) => {
            return Error::new(ErrorKind::InvalidArgument, format!("{name}: {why}"));
        }
    };
    Error::new(kind, message).with_source(failure).with_repair(repair)
}

/// Whether a part of the volume is lost or damaged for ever.
pub(crate) fn is_damage(failure: &Failure) -> bool {
    match failure {
        Failure::Lost(name) => *name != Name::Description,
        Failure::Damaged { damage, .. } => !matches!(damage, Damage::Features(_)),
        _ => false,
    }
}

/// Returns the kind, the message and the repair for a key file that is missing or wrong.
fn key_error(name: &str, failure: &Failure) -> (ErrorKind, String, &'static str) {
    match failure {
        Failure::Locked => (
            ErrorKind::InvalidArgument,
            format!("{name} needs its key file"),
            "add key_file=/PATH to the URI",
        ),
        Failure::NotEncrypted => (
            ErrorKind::InvalidArgument,
            format!("{name} has no key"),
            "remove key_file= from the URI, or use another volume",
        ),
        _ => (
            ErrorKind::PermissionDenied,
            format!("{name} cannot be decrypted"),
            "use the key file with which the volume was created",
        ),
    }
}

/// Returns the error for a volume that has no such snapshot.
pub(crate) fn no_snapshot(name: &str, snapshot: &str) -> Error {
    let message = format!("{name} has no snapshot {}", cleat_backend::uri::shown(snapshot));
    Error::new(ErrorKind::NotFound, message)
        .with_repair("cleat volume snapshot ls shows the snapshots")
}

/// Returns how a request ends that the engine has failed. `Retry` only for a request that changes nothing: nothing
/// of it is in flight then.
pub(crate) fn io_error(failure: &Failure, modifies: bool) -> IoError {
    match failure {
        Failure::Fenced | Failure::Stale { .. } => IoError::Fenced,
        Failure::Store { .. } if !modifies => IoError::Retry,
        Failure::Invalid(_) => IoError::Invalid,
        _ => IoError::Broken,
    }
}

/// Returns the error for a store that has not answered in time.
pub(crate) fn no_answer(name: &str) -> Error {
    Error::new(ErrorKind::TimedOut, format!("the store of {name} does not answer"))
        .with_repair("check that the store can be reached, then repeat the command")
}

/// Runs an operation on the volume `name` until `deadline`.
///
/// # Errors
/// Returns `TimedOut` if the operation has not ended, and otherwise its failure as an error.
pub(crate) fn wait<T>(
    name: &str,
    deadline: Instant,
    operation: impl Future<Output = std::result::Result<T, Failure>>,
) -> Result<T> {
    match block_until(deadline, operation) {
        Some(result) => result.map_err(|failure| failed(name, failure)),
        None => Err(no_answer(name)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_volume_of_a_later_build_is_not_called_damaged() {
        for (damage, kind) in [
            (Damage::Features(1 << 31), ErrorKind::Unsupported),
            // The version is read before the checksum is verified.
            (Damage::Version(2), ErrorKind::Internal),
            (Damage::Checksum, ErrorKind::Internal),
        ] {
            let name = Name::Description;
            let error = failed("v", Failure::Damaged { name, range: None, damage });
            assert_eq!(error.kind(), kind, "{}", error.report());
        }
    }
}
