//! The features of this program: parts that a build can leave out. `CONTRIBUTING.md` says how.
//!
//! - Input: the features with which cargo compiles the crate.
//! - Output: their list, and the errors for what a build lacks.
//!
//! The backends are in [`crate::backends`]. No other code asks for a feature, except where a module is declared and
//! where the command line has its commands.

use cleat_core::error::{Error, ErrorKind};

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

/// All features.
pub const ALL: [Feature; 3] = [
    Feature { name: "object", is_present: cfg!(feature = "object"), commands: &[] },
    Feature { name: "rbd", is_present: cfg!(feature = "rbd"), commands: &[] },
    Feature { name: "fault", is_present: cfg!(feature = "fault"), commands: &["fault"] },
];

impl Feature {
    /// Returns the feature to which the command `name` belongs; `None` if every build has the command, or none.
    pub fn of_command(name: &str) -> Option<Self> {
        ALL.into_iter().find(|feature| feature.commands.contains(&name))
    }

    /// Returns the error of the action `what` in a build without the feature.
    pub fn absent(self, what: &str) -> Error {
        let name = self.name;
        let message = format!("{what}: this program was built without the feature `{name}`");
        Error::new(ErrorKind::Unsupported, message)
            .with_repair(format!("build it with `cargo build --release --features {name}`"))
    }
}
