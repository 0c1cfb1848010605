//! How a worker is confined: the user that it becomes, and the layers of the confinement that it may do
//! without. The supervisor passes both as arguments of the process, so they hold before the first message.

use cleat_core::error::{Error, ErrorKind, Result};

/// The names of the layers, as the configuration, messages and logs show them.
pub mod layer {
    /// The process has one thread when it is confined, so that no thread escapes.
    pub const SINGLE_THREAD: &str = "single-thread";
    /// An empty network namespace, for a volume that needs no network.
    pub const EMPTY_NETWORK: &str = "empty-network";
    /// A namespace of its own for System V IPC and POSIX message queues.
    pub const OWN_IPC: &str = "own-ipc";
    /// A root directory that contains only what the volume's backend reads.
    pub const EMPTY_ROOT: &str = "empty-root";
    /// `no_new_privs` of prctl(2).
    pub const NO_NEW_PRIVILEGES: &str = "no-new-privileges";
    /// Landlock.
    pub const LANDLOCK: &str = "landlock";
    /// A user and a group that no other process has.
    pub const OWN_USER: &str = "own-user";
    /// Neither core dumps nor tracing by processes of the same user.
    pub const NOT_DUMPABLE: &str = "not-dumpable";
    /// No capability in any set.
    pub const NO_CAPABILITIES: &str = "no-capabilities";
    /// seccomp.
    pub const SYSTEM_CALL_FILTER: &str = "system-call-filter";

    /// All layers, in the order in which they are applied.
    pub const ALL: [&str; 10] = [
        SINGLE_THREAD,
        EMPTY_NETWORK,
        OWN_IPC,
        EMPTY_ROOT,
        NO_NEW_PRIVILEGES,
        LANDLOCK,
        OWN_USER,
        NOT_DUMPABLE,
        NO_CAPABILITIES,
        SYSTEM_CALL_FILTER,
    ];
}

/// How a worker is confined, beside what its volume needs.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Isolation {
    /// The number of the user and of the group that the worker becomes. `None`: it keeps its user, and the
    /// layer `own-user` is missing.
    pub user: Option<u32>,
    /// The layers that may be missing. A worker without another layer does not start.
    pub allow_missing: Vec<String>,
}

const USER: &str = "user=";
const ALLOW_MISSING: &str = "allow-missing=";

impl Isolation {
    /// Returns the arguments of the worker's process that stand for this value.
    pub fn arguments(&self) -> Vec<String> {
        let user = self.user.map(|user| format!("{USER}{user}"));
        let missing = self.allow_missing.join(",");
        let missing = (!missing.is_empty()).then(|| format!("{ALLOW_MISSING}{missing}"));
        user.into_iter().chain(missing).collect()
    }

    /// Parses the arguments of a worker's process.
    ///
    /// # Errors
    /// Returns `InvalidArgument` for an unknown argument, for user 0, and for a layer that does not exist.
    pub fn from_arguments(arguments: impl IntoIterator<Item = String>) -> Result<Self> {
        let mut isolation = Self::default();
        for argument in arguments {
            let invalid = || {
                let message = format!("{argument:?} is not an argument of a worker");
                Error::new(ErrorKind::InvalidArgument, message)
            };
            if let Some(user) = argument.strip_prefix(USER) {
                let user = user.parse().ok().filter(|user| is_usable(*user));
                isolation.user = Some(user.ok_or_else(invalid)?);
            } else if let Some(layers) = argument.strip_prefix(ALLOW_MISSING) {
                isolation.allow_missing = layers.split(',').map(str::to_owned).collect();
                if !isolation.allow_missing.iter().all(|layer| layer::ALL.contains(&&**layer)) {
                    return Err(invalid());
                }
            } else {
                return Err(invalid());
            }
        }
        Ok(isolation)
    }
}

/// Returns whether a worker may become the user `number`. Root is excluded, and (uid_t) -1, which the kernel
/// takes for "no change" (setresuid(2)).
pub fn is_usable(number: u32) -> bool {
    number != 0 && number != u32::MAX
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(arguments: &[&str]) -> Result<Isolation> {
        Isolation::from_arguments(arguments.iter().map(|argument| (*argument).to_owned()))
    }

    #[test]
    fn arguments_are_parsed_back() {
        let some = Isolation {
            user: Some(2_100_000_000),
            allow_missing: vec![layer::LANDLOCK.to_owned(), layer::OWN_IPC.to_owned()],
        };
        for isolation in [Isolation::default(), some] {
            let arguments = isolation.arguments();
            assert_eq!(Isolation::from_arguments(arguments).unwrap(), isolation);
        }
    }

    #[test]
    fn invalid_arguments_are_refused() {
        for argument in
            ["user=0", "user=4294967295", "user=", "allow-missing=all", "allow-missing=", "x"]
        {
            let error = parse(&[argument]).unwrap_err();
            assert!(error.message().contains(argument), "{error}");
        }
    }
}
