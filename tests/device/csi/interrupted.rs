//! Calls that are interrupted by a SIGKILL of the daemon, and many calls at the same time.

use std::time::{Duration, Instant};

use cleat_csi_api::csi::v1 as csi;
use csi::volume_capability::access_mode::Mode;
use tonic::{Code, Status};

use super::client::Client;
use super::{KUBELET, SOCKET, STAGING, Scene, TARGET, filesystem, mounts};
use crate::fixture::{TIMEOUT, repeat as repeats, shell};

/// The number of moments at which each call is interrupted.
const MOMENTS: u32 = 5;

/// The number of volumes that are staged at the same time: 12, or 100 if `CLEAT_REPEAT` is set.
fn volumes() -> usize {
    if repeats().is_some() { 100 } else { 12 }
}

/// The calls of a volume's life on a node, in order, each with the time between two moments. The volume is empty at first,
/// and has data when it is staged again.
const CALLS: [(Call, Duration); 6] = [
    (Call::Stage, Duration::from_millis(300)),
    (Call::Publish, Duration::from_millis(80)),
    (Call::Unpublish, Duration::from_millis(60)),
    (Call::Unstage, Duration::from_millis(120)),
    (Call::Stage, Duration::from_millis(180)),
    (Call::Unstage, Duration::from_millis(120)),
];

#[derive(Debug, Clone, Copy, PartialEq)]
enum Call {
    Stage,
    Publish,
    Unpublish,
    Unstage,
}

/// Calls once.
fn call(client: &Client, call: Call, id: &str, staging: &str) -> Result<(), Status> {
    let (volume_id, staging_target_path) = (id.to_owned(), staging.to_owned());
    let target_path = TARGET.to_owned();
    let volume_capability = Some(filesystem("ext4", Mode::SingleNodeWriter));
    match call {
        Call::Stage => client.stage(csi::NodeStageVolumeRequest {
            volume_id,
            staging_target_path,
            volume_capability,
            ..Default::default()
        }),
        Call::Publish => client.publish(csi::NodePublishVolumeRequest {
            volume_id,
            staging_target_path,
            target_path,
            volume_capability,
            ..Default::default()
        }),
        Call::Unpublish => {
            client.unpublish(csi::NodeUnpublishVolumeRequest { volume_id, target_path })
        }
        Call::Unstage => {
            client.unstage(csi::NodeUnstageVolumeRequest { volume_id, staging_target_path })
        }
    }
}

/// Repeats a call as kubelet does, until it succeeds: a program of the interrupted call, such as mkfs, may still
/// have the device.
fn repeat(client: &Client, what: Call, id: &str, staging: &str) {
    let end = Instant::now() + 10 * TIMEOUT;
    while let Err(status) = call(client, what, id, staging) {
        let temporary = [
            Code::Aborted,
            Code::Unavailable,
            Code::FailedPrecondition,
            Code::DeadlineExceeded,
            // The timeout of the caller itself.
            Code::Cancelled,
        ];
        assert!(
            temporary.contains(&status.code()) && Instant::now() < end,
            "{what:?} of {id}: {status:?}"
        );
        std::thread::sleep(Duration::from_millis(200));
    }
}

/// The daemon is killed at several moments of each call. The repeated call has the result of an uninterrupted one:
/// no mount is doubled, no device is left, and no volume with data is formatted.
pub(crate) fn killed_at_any_moment() {
    let mut scene = Scene::new();
    for moment in 0..MOMENTS {
        let id = scene.volume(&format!("killed-{moment}"), "64M");
        let data = format!("{STAGING}/file");
        let mut has_data = false;
        for (what, step) in CALLS {
            let (doomed, client) = (id.clone(), Client::connect(SOCKET));
            let caller = std::thread::spawn(move || {
                // It fails, unless it ends before the daemon does.
                let _ = call(&client, what, &doomed, STAGING);
            });
            std::thread::sleep(step * moment);
            scene.node.kill();
            caller.join().expect("the caller ends");
            scene.restart();
            repeat(&scene.client, what, &id, STAGING);
            let expected = match what {
                Call::Stage | Call::Unpublish => (1, 0),
                Call::Publish => (1, 1),
                Call::Unstage => (0, 0),
            };
            assert_eq!((mounts(STAGING), mounts(TARGET)), expected, "{what:?} at moment {moment}");
            match what {
                Call::Stage if has_data => shell(&format!("grep -x {moment} {data}")),
                Call::Stage => {
                    has_data = true;
                    shell(&format!("echo {moment} > {data}"))
                }
                Call::Publish => shell(&format!("grep -x {moment} {TARGET}/file")),
                Call::Unpublish | Call::Unstage => String::new(),
            };
        }
        scene.nothing_is_left();
    }
}

/// Many volumes are staged and unstaged at the same time, and none is left or confused with another one.
pub(crate) fn many_at_once() {
    let (scene, volumes) = (Scene::new(), volumes());
    let limits = format!("/proc/{}/limits", scene.node.pid());
    assert_eq!(shell(&format!("awk '/open files/ {{print $4}}' {limits}")), "65536");
    let ids: Vec<String> =
        (0..volumes).map(|number| scene.volume(&format!("many-{number}"), "8M")).collect();
    let staging = |number: usize| format!("{KUBELET}/many/{number}");
    let at_once = |what: Call| {
        let begun = Instant::now();
        std::thread::scope(|scope| {
            for (number, id) in ids.iter().enumerate() {
                let path = staging(number);
                scope.spawn(move || repeat(&Client::connect(SOCKET), what, id, &path));
            }
        });
        println!("figures: {what:?} of {volumes} volumes at once: {:.1?}", begun.elapsed());
    };
    at_once(Call::Stage);
    for number in 0..volumes {
        shell(&format!("echo {number} > {}/file", staging(number)));
    }
    let memory = shell(&format!("grep VmHWM /proc/{}/status", scene.node.pid()));
    println!("figures: the daemon's largest resident memory: {memory}");
    at_once(Call::Unstage);
    scene.nothing_is_left();
    at_once(Call::Stage);
    for number in 0..volumes {
        assert_eq!(shell(&format!("cat {}/file", staging(number))), number.to_string());
    }
    at_once(Call::Unstage);
    scene.nothing_is_left();
}
