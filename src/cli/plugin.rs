//! `kubectl cleat`: kubectl runs the executable `kubectl-cleat`, which is a link to this program.

use std::ffi::OsString;
use std::path::Path;

/// The name of the executable under which this is a plugin of kubectl.
const PLUGIN: &str = "kubectl-cleat";

/// Makes the arguments those of `cleat kubectl` if this process was started as a plugin of kubectl.
pub(super) fn as_plugin(mut arguments: Vec<OsString>) -> Vec<OsString> {
    let program = arguments.first().map(Path::new).and_then(Path::file_name);
    if program.is_some_and(|name| name == PLUGIN) {
        arguments.splice(..1, ["cleat", "kubectl"].map(OsString::from));
    }
    arguments
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_of_the_executable_makes_it_a_plugin() {
        let arguments = |program: &str| as_plugin(vec![program.into(), "volumes".into()]);
        assert_eq!(arguments("/usr/bin/kubectl-cleat"), ["cleat", "kubectl", "volumes"]);
        assert_eq!(arguments("/opt/cleat"), ["/opt/cleat", "volumes"]);
    }
}
