//! The host's part: build a payload, boot the VM twice (our small init, and systemd), run there.

use std::path::{Path, PathBuf};
use std::process::Command;

/// Set for the run under systemd.
pub(crate) const SYSTEMD: &str = "CLEAT_TEST_SYSTEMD";

/// Adds the comparison with others, which takes many minutes, most of them theirs.
pub(crate) const COMPARISON: &str = "CLEAT_COMPARISON";

/// Boots the VM and runs this program in it; returns the exit status to pass on.
pub(crate) fn run_in_vm() -> i32 {
    let payload = tempfile::tempdir().expect("a temporary directory for the payload");
    fill(payload.path());
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let fast = boot(payload.path(), "fast", &arguments);
    let systemd = boot(payload.path(), "systemd", &arguments);
    if fast != 0 { fast } else { systemd }
}

fn fill(payload: &Path) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    install(Path::new(env!("CARGO_BIN_EXE_cleat")), &payload.join("cleat"));
    install(&std::env::current_exe().expect("the path of this program"), &payload.join("device"));
    std::fs::copy(root.join("tests/kit/ceph/cluster"), payload.join(crate::rbd::CLUSTER))
        .expect("copying the script of the test cluster");
    for file in std::fs::read_dir(root.join("systemd")).expect("the systemd directory") {
        let file = file.expect("an entry of the systemd directory").path();
        std::fs::copy(&file, payload.join(file.file_name().expect("a file has a name")))
            .expect("copying a file of the systemd directory");
    }
}

/// Copies a program without its debug information, which would only make the payload large.
fn install(program: &Path, target: &Path) {
    let status =
        Command::new("strip").arg("--strip-debug").arg("-o").arg(target).arg(program).status();
    assert!(status.expect("strip, of binutils").success(), "strip {}", program.display());
}

fn boot(payload: &Path, init: &str, arguments: &[String]) -> i32 {
    let harness = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/vm/run");
    let mut vm = Command::new(&harness);
    vm.args(["--init", init, "--memory", "3G", "--timeout", &timeout_s(), "--disk", "1G"]);
    if let Some(out) = std::env::var_os("CLEAT_VM_OUT") {
        vm.arg("--out").arg(PathBuf::from(out).join(init));
    }
    if let Some(kernel) = std::env::var_os("CLEAT_VM_KERNEL") {
        vm.arg("--kernel").arg(kernel);
    }
    vm.arg("--payload").arg(payload).args(["--", "env", "CLEAT_TEST_REAL_KERNEL=1"]);
    if init == "systemd" {
        vm.arg(format!("{SYSTEMD}=1"));
    }
    for name in ["CLEAT_VERIFY_SECONDS", "CLEAT_REPEAT", COMPARISON] {
        if let Ok(value) = std::env::var(name) {
            vm.arg(format!("{name}={value}"));
        }
    }
    let status = vm.arg("./device").args(arguments).status();
    let status = status.unwrap_or_else(|error| {
        panic!(
            "{}: {error}; its parts are installed by scripts/install-deps.sh vm",
            harness.display()
        )
    });
    status.code().unwrap_or(1)
}

/// The bound of a run: generous, since tcg's speed varies, and longer with what was asked for.
fn timeout_s() -> String {
    let number = |name| -> u64 {
        std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or_default()
    };
    let comparison = if std::env::var_os(COMPARISON).is_some() { 1800 } else { 0 };
    let asked = 4 * number("CLEAT_VERIFY_SECONDS") + 60 * number("CLEAT_REPEAT") + comparison;
    (2700 + asked).to_string()
}
