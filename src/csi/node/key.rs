//! The Ceph client of a volume on this node, from the secret of the call that stages it. The client's keyring stays in a
//! key of the kernel until the volume is unstaged, for workers that start later.

use std::path::PathBuf;

use cleat_backend::KernelKey;
use cleat_core::error::{Error, ErrorKind, Result};

use crate::secrets::Secrets;
use crate::volume_id::mapping_name;

/// A Ceph client of one volume.
#[derive(Debug)]
pub(crate) struct NodeClient {
    /// The name, without `client.`.
    pub(crate) user: String,
    /// The value of the option `keyring`.
    pub(crate) keyring: PathBuf,
}

/// Stores the client in `secrets`, and returns it. Without one, returns that of an earlier call for the volume;
/// `None` if no call has named one, so that the configured client is used. `mapped` says that the volume is mapped.
///
/// # Errors
/// Returns `AlreadyExists` if the volume is mapped as another client, and `PermissionDenied` if the kernel or the
/// container forbids keys.
pub(crate) fn client(id: &str, secrets: &Secrets, mapped: bool) -> Result<Option<NodeClient>> {
    let key = KernelKey::new(&mapping_name(id))?;
    let stored = match key.secret() {
        Ok(stored) => stored,
        // What cannot be read has not been stored.
        Err(error) if secrets.keyring().is_none() => {
            tracing::debug!(volume = id, "{error}");
            None
        }
        Err(error) => return Err(error),
    };
    let stored_user = stored.as_ref().and_then(Secrets::user_in);
    let user = match secrets.keyring() {
        None => stored_user,
        Some((user, _)) if mapped && stored_user.as_deref() != Some(user) => {
            return Err(staged_as(id, stored_user.as_deref(), user));
        }
        Some((user, keyring)) => {
            key.store(keyring)?;
            Some(user.to_owned())
        }
    };
    Ok(user.map(|user| NodeClient { user, keyring: key.path() }))
}

/// Removes the client of a volume that is no longer mapped. An error is only logged: the key costs little memory,
/// and the next call that stages the volume replaces it.
pub(crate) fn forget(id: &str) {
    if let Err(error) = KernelKey::new(&mapping_name(id)).and_then(|key| key.remove()) {
        tracing::debug!(volume = id, "{error}");
    }
}

fn staged_as(id: &str, stored: Option<&str>, user: &str) -> Error {
    let present = stored.map_or_else(
        || "the client of the file of clusters".to_owned(),
        |stored| format!("client.{stored}"),
    );
    let message = format!("volume {id} is staged as {present}, and the secret names client.{user}");
    Error::new(ErrorKind::AlreadyExists, message).with_repair("unstage it first")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn secrets(user: &str, key: &str) -> Secrets {
        let pairs = [("userID", user), ("userKey", key)];
        Secrets::take(pairs.map(|(key, value)| (key.to_owned(), value.to_owned())).into()).unwrap()
    }

    #[test]
    fn a_client_is_kept_until_the_volume_is_unstaged() {
        let id = &format!("rbd/c/p//key-test-{}", std::process::id());
        assert!(client(id, &Secrets::default(), false).unwrap().is_none());
        let error = client(id, &secrets("a", "AQ=="), true).unwrap_err();
        assert!(error.message().contains("the client of the file of clusters"), "{error}");

        assert_eq!(client(id, &secrets("a", "AQ=="), false).unwrap().unwrap().user, "a");
        let kept = client(id, &Secrets::default(), true).unwrap().unwrap();
        assert_eq!(kept.user, "a");
        assert_eq!(
            KernelKey::of_path(&kept.keyring).unwrap().secret().unwrap().unwrap().bytes(),
            b"[client.a]\n\tkey = AQ==\n"
        );

        let error = client(id, &secrets("b", "AR=="), true).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::AlreadyExists);
        assert!(error.message().contains("staged as client.a,"), "{error}");
        client(id, &secrets("a", "AR=="), true).unwrap();
        assert_eq!(client(id, &secrets("b", "AS=="), false).unwrap().unwrap().user, "b");

        forget(id);
        forget(id);
        assert!(client(id, &Secrets::default(), false).unwrap().is_none());
    }
}
