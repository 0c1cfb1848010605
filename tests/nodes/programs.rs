//! The programs of a node, and the images of its pods.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// The image of the pods of the tests.
pub(crate) const BUSYBOX: &str = "cleat.test/busybox:1";

/// What the image of the pods has.
const APPLETS: [&str; 11] = [
    "bin/sh",
    "bin/cat",
    "bin/dd",
    "bin/id",
    "bin/ls",
    "bin/md5sum",
    "bin/sleep",
    "bin/stat",
    "bin/df",
    "bin/tail",
    "bin/tr",
];

/// The image of the container that keeps the namespaces of a pod, as `guest/containerd.toml` names it.
const PAUSE: &str = "cleat.test/pause:1";

/// The size of the disk of a node with images, containers and the state of kubelet and cleat, in bytes. The file is sparse.
const DISK: u64 = 8 << 30;

/// Returns the path of kubectl.
pub(crate) fn kubectl() -> PathBuf {
    kubernetes().join("kubectl")
}

/// Fills the directory that becomes `/payload` in the virtual machines: `images` are those of containers in the manifests,
/// each with the sidecar of CSI that it has. Builds what is not built yet, also the image of the virtual machine.
pub(crate) fn fill(payload: &Path, images: &[(String, String)]) {
    output(&mut Command::new(project("tests/vm/build-image.sh")));
    for directory in ["bin", "images"] {
        std::fs::create_dir_all(payload.join(directory)).unwrap();
    }
    let containerd = test_kit::go::containerd();
    let programs =
        ["containerd", "containerd-shim-runc-v2", "ctr"].map(|name| containerd.join(name));
    for program in programs.into_iter().chain([kubernetes().join("kubelet")]) {
        copy(&program, &payload.join("bin"));
    }
    for entry in std::fs::read_dir(project("tests/nodes/guest")).unwrap() {
        copy(&entry.unwrap().path(), payload);
    }
    let directory = payload.join("images");
    copy(cleat_image(), &directory);
    let busybox = Path::new("/bin/busybox");
    make_image(&directory, PAUSE, "/busybox sleep 2147483647", &[("busybox", busybox)]);
    let applets = APPLETS.map(|applet| (applet, busybox));
    make_image(&directory, BUSYBOX, "/bin/sh", &applets);
    for (image, sidecar) in images {
        let program = test_kit::go::control_plane().join(sidecar);
        make_image(&directory, image, &format!("/{sidecar}"), &[(sidecar.as_str(), &program)]);
    }
}

/// Makes the disk that each node gets a copy of, with the images of `payload`, which are removed there. Where that does not
/// work, the disk is empty, and the nodes import the images themselves.
pub(crate) fn make_disk(payload: &Path, disk: &Path) {
    let empty = || File::create(disk).unwrap().set_len(DISK).unwrap();
    empty();
    let mut command = Command::new(project("tests/nodes/import-images"));
    let done = command.arg(payload).arg(disk).output().unwrap();
    if done.status.success() {
        std::fs::remove_dir_all(payload.join("images")).unwrap();
    } else {
        let errors = String::from_utf8_lossy(&done.stderr);
        println!("the nodes import the images, which takes minutes ({}): {errors}", done.status);
        empty();
    }
}

/// Returns the directory with kubelet and kubectl.
fn kubernetes() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(test_kit::go::node_programs)
}

/// Returns the archive of cleat's image, with the binary under test.
fn cleat_image() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        let directory = Path::new(env!("CARGO_TARGET_TMPDIR")).join("node-images");
        let mut command = Command::new(project("scripts/build-image"));
        command.arg("--for-tests").arg("--output").arg(directory);
        command.arg("--binary").arg(test_kit::binary::cleat());
        PathBuf::from(output(&mut command).trim_end())
    })
}

/// Makes an image of one layer with these files.
fn make_image(directory: &Path, name: &str, program: &str, files: &[(&str, &Path)]) {
    let mut command = Command::new(project("tests/nodes/image"));
    command.arg(directory.join(format!("{}.tar", name.replace(['/', ':'], "-"))));
    command.args([name, program]);
    command.args(files.iter().map(|(path, file)| format!("{path}={}", file.display())));
    output(&mut command);
}

/// Returns the standard output of a command that succeeds.
pub(crate) fn output(command: &mut Command) -> String {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {errors}");
    String::from_utf8(output.stdout).unwrap()
}

/// Returns the path of a file of the project.
pub(crate) fn project(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

fn copy(file: &Path, directory: &Path) {
    let name = file.file_name().expect("a file has a name");
    std::fs::copy(file, directory.join(name))
        .unwrap_or_else(|error| panic!("{}: {error}", file.display()));
}
