//! The features of this program: parts that a build can leave out. `CONTRIBUTING.md` says how.
//!
//! - Input: the features with which cargo compiles the crate.
//! - Output: their list, the errors for what a build lacks, and the services that the daemon gets from them.
//!
//! The backends are in [`crate::backends`]. No other code asks for a feature, except where a module is declared and
//! where the command line has its commands.

use cleat_core::error::{Error, ErrorKind, Result};
use cleat_node::daemon::Extension;

/// A part of this program that a build can leave out.
#[derive(Debug, Clone, Copy)]
pub struct Feature {
    /// The name of cargo's feature.
    pub name: &'static str,
    /// Whether this build has it.
    pub is_present: bool,
    /// The commands that a build without it lacks.
    pub commands: &'static [&'static str],
}

/// The CSI driver, the controller of a cluster, and their commands.
pub const KUBERNETES: Feature = Feature {
    name: "kubernetes",
    is_present: cfg!(feature = "kubernetes"),
    commands: &["controller", "csi", "kubectl"],
};

/// All features.
pub const ALL: [Feature; 4] = [
    KUBERNETES,
    Feature { name: "object", is_present: cfg!(feature = "object"), commands: &[] },
    Feature { name: "rbd", is_present: cfg!(feature = "rbd"), commands: &[] },
    Feature { name: "fault", is_present: cfg!(feature = "fault"), commands: &["fault"] },
];

/// The services of the daemon beside the control API.
pub const EXTENSIONS: &[Extension] = &[
    #[cfg(feature = "kubernetes")]
    crate::kubernetes::csi,
];

impl Feature {
    /// Returns the feature to which the command `name` belongs; `None` if every build has the command, or none.
    pub fn of_command(name: &str) -> Option<Self> {
        ALL.into_iter().find(|feature| feature.commands.contains(&name))
    }

    /// Checks that this build has the feature, which the action `what` needs.
    ///
    /// # Errors
    /// Returns `Unsupported` if it does not.
    pub fn require(self, what: &str) -> Result<()> {
        if self.is_present { Ok(()) } else { Err(self.absent(what)) }
    }

    /// Returns the error of the action `what` in a build without the feature.
    pub fn absent(self, what: &str) -> Error {
        let name = self.name;
        let message = format!("{what}: this program was built without the feature `{name}`");
        Error::new(ErrorKind::Unsupported, message)
            .with_repair(format!("build it with `cargo build --release --features {name}`"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_build_lacks_is_refused_with_the_command_that_builds_it() {
        let feature = Feature { is_present: false, ..KUBERNETES };
        let error = feature.require("cannot serve CSI").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert!(error.message().starts_with("cannot serve CSI: "), "{error}");
        assert!(error.repair().unwrap().ends_with("--features kubernetes`"), "{error:?}");
        Feature { is_present: true, ..feature }.require("cannot serve CSI").unwrap();
    }
}
