//! Volumes that only one pod may use (ReadWriteOncePod).

use std::sync::PoisonError;

use cleat_csi::host::Kind;
use tonic::Code;

use super::calls::{Call, TARGET, Volume};
use super::life::Play;
use super::machine::Mount;
use super::{EMPTY, filesystem};

/// The target path of another pod.
const OTHER: &str = "/kubelet/pods/2/volume";

/// kubelet makes further mounts of a volume that it has published: of a directory in it (`subPath`), or of its device.
/// They do not keep the volume from being published again for the same pod, as after a restart of kubelet. Another pod
/// is refused until the first one has ended.
#[test]
fn kubelets_own_mounts_are_no_second_pod() {
    let _turn = crate::ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let formatted = Volume { content: filesystem(Kind::Ext4), ..EMPTY };
    let block = Volume { block: true, ..EMPTY };
    for (volume, path) in [
        (formatted, "/kubelet/pods/1/volume-subpaths/v/main/0"),
        (block, "/kubelet/plugins/volumeDevices/v/dev/1"),
    ] {
        let volume = Volume { one_pod: true, ..volume };
        let play = Play::new(volume);
        play.one_life(async |driver| {
            for call in [Call::Stage, Call::Publish] {
                volume.call(driver, call).await.unwrap();
            }
            let machine = || play.machine.lock().unwrap_or_else(PoisonError::into_inner);
            let published = machine().mount_at(TARGET.as_ref()).cloned().unwrap();
            machine().push(Mount { path: path.into(), ..published });
            volume.call(driver, Call::Publish).await.unwrap();
            let other = volume.call_at(driver, Call::Publish, OTHER).await.unwrap_err();
            assert_eq!(other.code(), Code::FailedPrecondition, "{other:?}");

            machine().pop(path.as_ref());
            volume.call_at(driver, Call::Publish, OTHER).await.unwrap_err();
            volume.call(driver, Call::Unpublish).await.unwrap();
            volume.call_at(driver, Call::Publish, OTHER).await.unwrap();
            volume.call_at(driver, Call::Unpublish, OTHER).await.unwrap();
            volume.call(driver, Call::Unstage).await.unwrap();
        });
        assert_eq!(play.world.violations(), Vec::<String>::new());
    }
}
