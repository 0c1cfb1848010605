//! `make demo-cluster`: a fail-over that can be watched. It is the test with the frozen node, which says what it does if
//! the variable `CLEAT_TEST_SHOW` is set.

use serde_json::Value;

/// Returns whether everything is to be shown.
pub(crate) fn is_shown() -> bool {
    std::env::var_os("CLEAT_TEST_SHOW").is_some()
}

/// Says what happens next.
pub(crate) fn say(text: &str) {
    if is_shown() {
        println!("\n--- {text}\n");
    }
}

/// Shows a command of kubectl that is about to run.
pub(crate) fn show_command(arguments: &[&str]) {
    if is_shown() {
        println!("$ kubectl {}", shell_words(arguments));
    }
}

/// Shows a command of kubectl that is about to run and reads `object`.
pub(crate) fn show_command_with(arguments: &[&str], object: &Value) {
    if is_shown() {
        println!("$ kubectl {} <<'EOF'\n{object:#}\nEOF", shell_words(arguments));
    }
}

/// Joins the arguments so that a shell takes them apart again.
fn shell_words(arguments: &[&str]) -> String {
    let is_plain =
        |character: char| character.is_ascii_alphanumeric() || "-_=./:,@".contains(character);
    let word = |argument: &&str| match argument.chars().all(is_plain) {
        true => (*argument).to_owned(),
        false => format!("'{}'", argument.replace('\'', "'\\''")),
    };
    arguments.iter().map(word).collect::<Vec<_>>().join(" ")
}

/// Shows the nodes, the pods, the grant and the last records of a pod. `kubectl` runs a command of kubectl.
pub(crate) fn show(kubectl: impl Fn(&[&str]) -> String, pod: &str) {
    if !is_shown() {
        return;
    }
    let last = "tr -d '\\000' </v/records | tail -n 3";
    for command in [
        &["get", "nodes"][..],
        &["get", "pods", "-A", "-o", "wide"],
        &["get", "pvc", "-n", "default"],
        &["get", "volumegrants"],
        &["exec", "-n", "default", pod, "--", "sh", "-c", last],
    ] {
        show_command(command);
        println!("{}", kubectl(command));
    }
}
