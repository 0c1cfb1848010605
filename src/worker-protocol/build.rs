//! Passes the commit, the profile, the target and the compiler to the crate.

use std::env;
use std::process::Command;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=build.rs");
    let profile = env::var("PROFILE")?;
    // Only a release contains its commit. In other profiles, each commit would rebuild everything.
    let commit = if profile == "release" { commit() } else { "development build".to_owned() };
    let rustc = output(&env::var("RUSTC")?, &["--version"]).unwrap_or_else(|| "rustc".to_owned());
    println!("cargo:rustc-env=CLEAT_COMMIT={commit}");
    println!("cargo:rustc-env=CLEAT_PROFILE={profile}");
    println!("cargo:rustc-env=CLEAT_TARGET={}", env::var("TARGET")?);
    println!("cargo:rustc-env=CLEAT_RUSTC={rustc}");
    Ok(())
}

/// Returns the commit, from the packager (CLEAT_COMMIT) or from git.
fn commit() -> String {
    println!("cargo:rerun-if-env-changed=CLEAT_COMMIT");
    if let Ok(commit) = env::var("CLEAT_COMMIT") {
        return commit;
    }
    if let Some(log) = output("git", &["rev-parse", "--git-path", "logs/HEAD"]) {
        println!("cargo:rerun-if-changed={log}");
    }
    output("git", &["rev-parse", "--short=12", "HEAD"]).unwrap_or_else(|| "no commit".to_owned())
}

fn output(program: &str, arguments: &[&str]) -> Option<String> {
    let output = Command::new(program).args(arguments).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    (output.status.success() && !text.trim().is_empty()).then(|| text.trim().to_owned())
}
