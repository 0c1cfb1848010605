//! Mounts of the driver in other mount namespaces, as a cluster has them: the daemon runs in a pod that has kubelet's
//! directory with bidirectional propagation, other pods have it with that from the host, and one has a private copy.

use std::process::{Child, Command};
use std::time::Instant;

use csi::volume_capability::access_mode::Mode;
use tonic::Code;

use super::*;
use crate::fixture::{TIMEOUT, promised};

/// Kubelet's directory, as a shared mount of the host. Removed when it is dropped.
struct SharedKubelet;

impl SharedKubelet {
    fn new() -> Self {
        shell(&format!(
            "rm -rf {KUBELET}; mkdir -p {KUBELET}; mount --bind {KUBELET} {KUBELET}
             mount --make-private {KUBELET}; mount --make-shared {KUBELET}"
        ));
        Self
    }
}

impl Drop for SharedKubelet {
    fn drop(&mut self) {
        shell(&format!("umount --recursive --lazy {KUBELET} || true"));
    }
}

/// A pod: a process in a mount namespace of its own. It ends when it is dropped.
struct Pod(Child);

impl Pod {
    /// Starts a pod whose mounts have this propagation: `slave` or `private`.
    fn start(propagation: &str) -> Self {
        let mut command = Command::new("unshare");
        command.args(["--mount", "--propagation", propagation, "sleep", "infinity"]);
        let pod = Self(command.spawn().expect("unshare starts"));
        let done = Instant::now() + TIMEOUT;
        while shell(&format!("cat /proc/{}/comm", pod.pid())) != "sleep" {
            assert!(Instant::now() < done, "the pod does not start");
        }
        pod
    }

    fn pid(&self) -> u32 {
        self.0.id()
    }

    /// Returns the number of mounts at a path in this pod.
    fn mounts(&self, path: &str) -> usize {
        let table = std::fs::read_to_string(format!("/proc/{}/mountinfo", self.pid()));
        count(&table.expect("mountinfo"), path)
    }

    /// Returns what `command` prints in this pod.
    fn run(&self, command: &str) -> String {
        shell(&format!("nsenter --mount --target {} {command}", self.pid()))
    }
}

impl Drop for Pod {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The command of a daemon in a pod whose volume has `mountPropagation: Bidirectional`.
fn daemon_in_pod() -> Command {
    let mut command = Command::new("unshare");
    command.args(["--mount", "--propagation", "unchanged"]);
    command.args(["./cleat", "node", "--config", CONFIG]);
    command
}

/// What the driver mounts appears in other pods and disappears there. A pod with a copy of its own keeps the device,
/// and is named.
pub(crate) fn reaches_other_namespaces() {
    let _kubelet = SharedKubelet::new();
    let scene =
        Scene::with_daemon(&format!("directories = {{ d = \"{VOLUMES}\" }}"), daemon_in_pod());
    let pod = Pod::start("slave");
    let capability = filesystem("ext4", Mode::SingleNodeWriter);
    let id = scene.volume("seen", "64M");
    scene.stage(&id, &capability).expect("stage");
    scene.publish(&id, &capability, TARGET).expect("publish");
    shell(&format!("echo data > {TARGET}/file"));
    assert_eq!(pod.run(&format!("cat {TARGET}/file")), "data");
    // This one gets the mounts as copies.
    let late = Pod::start("slave");
    let everywhere = |path: &str| (mounts(path), pod.mounts(path), late.mounts(path));
    assert_eq!((everywhere(STAGING), everywhere(TARGET)), ((1, 1, 1), (1, 1, 1)));
    scene.unpublish(&id, TARGET);
    assert_eq!((everywhere(STAGING), everywhere(TARGET)), ((1, 1, 1), (0, 0, 0)));
    scene.unstage(&id);
    assert_eq!(everywhere(STAGING), (0, 0, 0));

    let raw = scene.volume("raw-seen", "64M");
    let block = block(Mode::SingleNodeWriter);
    scene.stage(&raw, &block).expect("stage");
    scene.publish(&raw, &block, TARGET).expect("publish");
    pod.run(&format!("test -b {TARGET}"));
    scene.unpublish(&raw, TARGET);
    assert_eq!(everywhere(TARGET), (0, 0, 0));
    scene.unstage(&raw);

    scene.stage(&id, &capability).expect("stage");
    let private = Pod::start("private");
    let began = Instant::now();
    let refused = scene.client.unstage(csi::NodeUnstageVolumeRequest {
        volume_id: id.clone(),
        staging_target_path: STAGING.to_owned(),
    });
    let refused = refused.expect_err("a pod has the volume mounted");
    promised(began.elapsed(), std::time::Duration::from_secs(10), "the refusal");
    assert_eq!(refused.code(), Code::FailedPrecondition, "{refused:?}");
    let named = [STAGING.to_owned(), private.pid().to_string()];
    assert!(named.iter().all(|name| refused.message().contains(name)), "{refused:?}");
    assert_eq!((mounts(STAGING), pod.mounts(STAGING), private.mounts(STAGING)), (0, 0, 1));
    drop(private);
    scene.unstage(&id);
    drop((pod, late));
    let listed = shell("./cleat ls -o json");
    assert!(listed.contains("\"mappings\":[]") || listed.contains("\"mappings\": []"), "{listed}");
}
