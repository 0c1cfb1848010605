//! Where the keys of a client come from, for messages.

use std::fmt;

/// The source of keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Origin {
    /// The file that the URI names.
    File,
    /// Variables of the process that opened the volume, or the file that they name.
    Environment,
    /// AWS's shared credentials file.
    SharedFile,
    /// A role that was assumed with a token.
    WebIdentity,
    /// The service for the credentials of a container.
    Container,
    /// The metadata service of an instance.
    Instance,
}

impl Origin {
    /// Returns the word for it in the content that the supervisor passes to a worker.
    pub(super) const fn word(self) -> &'static str {
        match self {
            Self::File => "file",
            Self::Environment => "environment",
            Self::SharedFile => "shared-file",
            Self::WebIdentity => "web-identity",
            Self::Container => "container",
            Self::Instance => "instance",
        }
    }

    /// Returns the origin of a word.
    pub(super) fn of_word(word: &str) -> Option<Self> {
        let all = [
            Self::File,
            Self::Environment,
            Self::SharedFile,
            Self::WebIdentity,
            Self::Container,
            Self::Instance,
        ];
        all.into_iter().find(|origin| origin.word() == word)
    }
}

/// Prints it as the end of "the keys from".
impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::File => "the file of credentials_file=",
            Self::Environment => "the environment",
            Self::SharedFile => "the shared credentials file",
            Self::WebIdentity => "the role of AWS_ROLE_ARN",
            Self::Container => "the role of the container",
            Self::Instance => "the role of the instance",
        })
    }
}
