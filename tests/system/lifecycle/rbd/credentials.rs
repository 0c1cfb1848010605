//! The keyring of a mapped image: the supervisor opens it for each worker, and its key is written nowhere.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use cleat_api::v1::upgrade_event::Outcome;
use cleat_api::v1::{MapRequest, MappingState, SetOptionsRequest, UpgradeRequest};
use nix::sys::signal::Signal;
use test_kit::ceph::{ID, POOL, shared};
use test_kit::node::{index_of, kill, repair, wait_until};
use tonic::{Code, Status};

use super::Scene;

impl Scene<'_> {
    /// Writes a keyring that only the supervisor's user may read.
    fn keyring_file(&self, content: &str) -> PathBuf {
        let path = self.machine.path("own.keyring");
        std::fs::write(&path, content).unwrap();
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o600)).unwrap();
        path
    }

    fn with_keyring(&self, image: &str, keyring: &Path, id: &str) -> MapRequest {
        let conf = self.cluster.conf();
        let (conf, keyring) = (conf.display(), keyring.display());
        let uri = format!("rbd:{POOL}/{image}?conf={conf}&keyring={keyring}&id={id}");
        MapRequest { uri, ..self.request(image) }
    }

    fn renew(&self, target: &str) -> Result<(), Status> {
        let target = target.to_owned();
        let request =
            SetOptionsRequest { target, renew_credentials: true, ..SetOptionsRequest::default() };
        let supervisor = &self.supervisor;
        supervisor.block_on(supervisor.client().set_options(request)).map(drop)
    }
}

/// Returns the key in a keyring with one entry.
fn key(keyring: &str) -> String {
    keyring.lines().find_map(|line| line.trim().strip_prefix("key = ")).unwrap().to_owned()
}

#[test]
fn the_key_is_in_no_record_environment_and_command_line() {
    let scene = Scene::on(shared());
    scene.image("keyed");
    let keyring = std::fs::read_to_string(scene.cluster.keyring(ID)).unwrap();
    let path = scene.keyring_file(&keyring);
    let mapping = scene.supervisor.map_with(scene.with_keyring("keyed", &path, ID)).unwrap();
    scene.machine.kernel.write(index_of(&mapping), 0, &[7; 4096]).unwrap();
    let mut search = Command::new("grep");
    search.args(["-r", "-s", "-a", "-l", "-F", &key(&keyring)]);
    search.arg(scene.machine.directory.path());
    for pid in [mapping.worker_pid, std::process::id()] {
        search.args(["cmdline", "environ"].map(|file| format!("/proc/{pid}/{file}")));
    }
    let found = search.output().unwrap();
    let found = String::from_utf8_lossy(&found.stdout).into_owned();
    assert_eq!(found, format!("{}\n", path.display()), "the key is only in the keyring");

    scene.renew("keyed").unwrap();
    // The worker has read the file: it is served without it, but its successor is not.
    let refused = |mode: u32, code: Code, part: &str| {
        std::fs::set_permissions(&path, PermissionsExt::from_mode(mode)).unwrap();
        let status = scene.renew("keyed").unwrap_err();
        assert_eq!(status.code(), code, "{status}");
        assert!(repair(&status).contains(part), "{:?}", repair(&status));
    };
    refused(0o622, Code::PermissionDenied, "chmod go-w");
    std::fs::set_permissions(&path, PermissionsExt::from_mode(0o600)).unwrap();
    std::fs::remove_file(&path).unwrap();
    assert_eq!(scene.renew("keyed").unwrap_err().code(), Code::NotFound);
    scene.machine.kernel.write(index_of(&mapping), 0, &[8; 4096]).unwrap();
    scene.keyring_file(&keyring);
    kill(mapping.worker_pid, Signal::SIGKILL);
    wait_until("another worker serves the device", || {
        let now = scene.supervisor.get("keyed").unwrap();
        now.state() == MappingState::Mapped && ![0, mapping.worker_pid].contains(&now.worker_pid)
    });
    scene.machine.kernel.write(index_of(&mapping), 0, &[9; 4096]).unwrap();
    scene.supervisor.unmap("keyed").unwrap();
    scene.machine.assert_clean();
}

/// The key of a client is replaced in the cluster and in the keyring while its image is mapped.
#[test]
fn a_new_key_is_used_by_the_next_worker() {
    let scene = Scene::on(shared());
    scene.image("rotated");
    let caps = ["mon", "profile rbd", "osd", "profile rbd pool=volumes"];
    let create = ["auth", "get-or-create", "client.rotated"];
    let keyring = scene.cluster.ceph(&[&create[..], &caps].concat());
    let path = scene.keyring_file(&keyring);
    let request = scene.with_keyring("rotated", &path, "rotated");
    let mapping = scene.supervisor.map_with(request).unwrap();
    let write = |byte| scene.machine.kernel.write(index_of(&mapping), 0, &[byte; 4096]).unwrap();
    write(1);

    let first = key(&keyring);
    // Another time of creation, which is not secret, and another secret.
    let second: String = first.chars().rev().skip(2).take(20).collect();
    let second = format!("{}{second}==", &first[..18]);
    assert_eq!(first.len(), second.len());
    let caps = "caps mon = \"profile rbd\"\ncaps osd = \"profile rbd pool=volumes\"";
    scene.keyring_file(&format!("[client.rotated]\nkey = {second}\n{caps}\n"));
    scene.cluster.ceph(&["auth", "import", "-i", &path.display().to_string()]);
    write(2);
    let status = scene.renew("rotated").unwrap_err();
    assert_eq!(status.code(), Code::Unimplemented, "{status}");
    assert!(repair(&status).contains("cleat upgrade --workers-only --force"), "{status:?}");
    assert!(!format!("{status:?}").contains(&second[..24]), "the error shows the key");

    let targets = vec!["rotated".to_owned()];
    let upgrade = UpgradeRequest { force: true, workers_only: true, targets };
    let event = scene.supervisor.upgrade_with(upgrade).unwrap().pop().unwrap();
    assert_eq!(event.outcome(), Outcome::HandedOver, "{event:?}");
    write(3);
    scene.renew("rotated").unwrap();
    // A worker with the first key would not be admitted any more.
    scene.keyring_file(&keyring);
    let upgrade =
        UpgradeRequest { force: true, workers_only: true, targets: vec!["rotated".to_owned()] };
    let event = scene.supervisor.upgrade_with(upgrade).unwrap().pop().unwrap();
    assert_eq!(event.outcome(), Outcome::Failed, "{event:?}");
    write(4);
    scene.supervisor.unmap("rotated").unwrap();
    scene.machine.assert_clean();
}
