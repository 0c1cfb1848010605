//! Each call is killed between any two operations on its storage, and in the middle of those that a storage executes in
//! several parts. Then a new controller gets the same call again: the result is that of a call that was not
//! interrupted. Or it gets the call that undoes the first one: nothing is left of it.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Duration;

use cleat_backend::CredentialSet;
use cleat_backend::claimant::Claimant;

use super::stepped::{Moment, STEPPED, Steps, install};
use super::*;
use cleat_csi_api::addons::reclaimspace::ControllerReclaimSpaceRequest;
use csi::group_controller_server::GroupController as _;

use crate::controller::group_id::GroupId;
use crate::controller::volumes::content_source;
use crate::volume_id::VolumeId;

/// A call that changes something.
#[derive(Debug, Clone, Copy)]
enum Call {
    /// Creates the volume with this name from this source.
    Create(&'static str, Option<&'static str>),
    Delete(&'static str),
    /// Takes the snapshot with this name of the volume `source`.
    Snapshot(&'static str),
    /// Leaves what a killed call leaves that takes a snapshot of the volume `made`.
    HalfSnapshot,
    DeleteSnapshot(&'static str),
    Expand(&'static str),
    Modify(&'static str),
    Publish(&'static str),
    Unpublish(&'static str),
    /// Takes a group snapshot of the volumes `source` and `made`.
    Group,
    DeleteGroup,
    Reclaim(&'static str),
}

/// The size of the volumes, in bytes. Small, because the test makes hundreds.
const SMALL: i64 = 1 << 20;

/// Where the volume `source` has data.
const DATA_AT: u64 = 8192;

const SOURCE: &str = "file/n1/default/source";
const SNAPSHOT: &str = "file/n1/default/source@csi-first";
const MADE: &str = "file/n1/default/made";
const EMPTY: Call = Call::Create("made", None);
/// The name of a snapshot that its storage cannot have.
const ODD: &str = "an odd/name";

/// A call that is killed. Each case begins with the volume `source`, which has data and the snapshot `first`.
struct Case {
    before: &'static [Call],
    call: Call,
    undo: &'static [Call],
    /// Whether a clone of a volume needs a snapshot, as on RBD.
    clones_snapshots: bool,
    /// The number of points at which the call can be killed.
    points: usize,
}

const CASES: [Case; 17] = [
    // No caller knows the id before the volume is complete.
    Case::new(6, &[], EMPTY, &[EMPTY, Call::Delete(MADE)]),
    Case::new(7, &[], Call::Create("made", Some(SNAPSHOT)), &[Call::Delete(MADE)]),
    Case::new(7, &[], Call::Create("made", Some(SOURCE)), &[Call::Delete(MADE)]),
    Case {
        clones_snapshots: true,
        ..Case::new(12, &[], Call::Create("made", Some(SOURCE)), &[Call::Delete(MADE)])
    },
    Case::new(3, &[EMPTY], Call::Delete(MADE), &[]),
    Case::new(3, &[EMPTY, Call::HalfSnapshot], Call::Delete(MADE), &[]),
    Case::new(3, &[], Call::Snapshot("second"), &[Call::DeleteSnapshot("second")]),
    Case::new(5, &[], Call::Snapshot(ODD), &[Call::DeleteSnapshot(ODD)]),
    Case::new(2, &[Call::Snapshot("second")], Call::DeleteSnapshot("second"), &[]),
    Case::new(4, &[Call::Snapshot(ODD)], Call::DeleteSnapshot(ODD), &[]),
    Case::new(2, &[EMPTY], Call::Expand(MADE), &[Call::Delete(MADE)]),
    Case::new(2, &[EMPTY], Call::Modify(MADE), &[Call::Delete(MADE)]),
    Case::new(2, &[EMPTY], Call::Publish(MADE), &[Call::Unpublish(MADE), Call::Delete(MADE)]),
    Case::new(2, &[EMPTY, Call::Publish(MADE)], Call::Unpublish(MADE), &[Call::Delete(MADE)]),
    // No caller knows the id before the group is complete.
    Case::new(26, &[EMPTY], Call::Group, &[Call::Group, Call::DeleteGroup]),
    // Its volumes can be deleted as long as it has no snapshot.
    Case::new(4, &[EMPTY, Call::Group], Call::DeleteGroup, &[]),
    Case::new(2, &[EMPTY], Call::Reclaim(MADE), &[Call::Delete(MADE)]),
];

impl Case {
    const fn new(
        points: usize,
        before: &'static [Call],
        call: Call,
        undo: &'static [Call],
    ) -> Self {
        Self { before, call, undo, clones_snapshots: false, points }
    }
}

/// A storage and the node, which outlive the controllers.
struct Scene {
    directory: TempDir,
    node: Arc<FakeNode>,
    steps: Arc<Mutex<Steps>>,
}

impl Scene {
    /// Makes a storage with the volume `source`.
    async fn new(case: &Case) -> Self {
        let memory = Path::new("/dev/shm");
        let directory =
            if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() };
        let steps = Steps { clones_snapshots: case.clones_snapshots, ..Steps::default() };
        let scene = Self {
            directory: directory.unwrap(),
            node: Arc::new(FakeNode::default()),
            steps: Arc::new(Mutex::new(steps)),
        };
        install(scene.directory.path().to_owned(), Arc::clone(&scene.steps));
        let service = scene.controller();
        scene.call(&service, Call::Create("source", None)).await.unwrap();
        let file = fs::File::options().write(true).open(scene.volume("source")).unwrap();
        file.write_all_at(b"data", DATA_AT).unwrap();
        for call in [Call::Snapshot("first")].iter().chain(case.before) {
            scene.call(&service, *call).await.unwrap();
        }
        scene
    }

    fn volume(&self, name: &str) -> PathBuf {
        self.directory.path().join("default").join(name)
    }

    /// Starts a controller, which remembers nothing of an earlier one.
    fn controller(&self) -> ControllerService {
        let mut controller = controller_of(&self.directory, Arc::clone(&self.node));
        controller.registry = STEPPED;
        ControllerService(controller)
    }

    /// Makes a call, and returns its answer as text.
    async fn call(&self, service: &ControllerService, call: Call) -> Result<String, Status> {
        let id = |name: &str| match name {
            ODD => format!("{SOURCE}@{}", crate::controller::names::of_snapshot(ODD)),
            name => format!("{SOURCE}@csi-{name}"),
        };
        match call {
            Call::Create(name, source) => {
                let request = csi::CreateVolumeRequest {
                    // A clone grows.
                    capacity_range: range(if source.is_some() { 2 * SMALL } else { SMALL }, 0),
                    volume_content_source: source.map(content_source),
                    mutable_parameters: map(&[("iops", "200")]),
                    ..new_volume(name)
                };
                let answer = service.create_volume(Request::new(request)).await?;
                Ok(format!("{:?}", answer.into_inner()))
            }
            Call::Delete(id) => {
                let request =
                    csi::DeleteVolumeRequest { volume_id: id.to_owned(), ..Default::default() };
                Ok(format!(
                    "{:?}",
                    service.delete_volume(Request::new(request)).await?.into_inner()
                ))
            }
            Call::Snapshot(name) => {
                let request = csi::CreateSnapshotRequest {
                    source_volume_id: SOURCE.to_owned(),
                    name: name.to_owned(),
                    ..Default::default()
                };
                let answer = service.create_snapshot(Request::new(request)).await?.into_inner();
                let snapshot = answer
                    .snapshot
                    .map(|snapshot| csi::Snapshot { creation_time: None, ..snapshot });
                Ok(format!("{snapshot:?}"))
            }
            Call::HalfSnapshot => {
                let directory = self.volume(".cleat/snapshots/made");
                fs::create_dir_all(&directory).unwrap();
                fs::write(directory.join(".half"), "a part").unwrap();
                Ok(String::new())
            }
            Call::DeleteSnapshot(name) => {
                let request =
                    csi::DeleteSnapshotRequest { snapshot_id: id(name), ..Default::default() };
                Ok(format!(
                    "{:?}",
                    service.delete_snapshot(Request::new(request)).await?.into_inner()
                ))
            }
            Call::Group | Call::DeleteGroup => change_group(service, call).await,
            Call::Expand(id)
            | Call::Modify(id)
            | Call::Publish(id)
            | Call::Unpublish(id)
            | Call::Reclaim(id) => change(service, call, id.to_owned()).await,
        }
    }

    /// Makes the call of a case, which is killed at `stop`. Returns the names of its steps, and whether it was killed.
    async fn kill(&self, call: Call, stop: Option<(usize, Moment)>) -> (Vec<String>, bool) {
        {
            let mut steps = self.steps.lock().unwrap();
            (steps.names, steps.stop) = (Vec::new(), stop);
        }
        let answer = self.call(&self.controller(), call).await;
        let mut steps = self.steps.lock().unwrap();
        assert_eq!(answer.is_err(), steps.has_stopped, "{call:?}: {answer:?}");
        steps.stop = None;
        (std::mem::take(&mut steps.names), steps.has_stopped)
    }

    /// Returns all files with their sizes, labels and content, and what the node was told.
    fn state(&self) -> Vec<String> {
        let mut files = Vec::new();
        let mut directories = vec![self.directory.path().join("default")];
        while let Some(directory) = directories.pop() {
            for entry in fs::read_dir(directory).unwrap() {
                let path = entry.unwrap().path();
                if path.is_dir() {
                    directories.push(path);
                } else {
                    files.push(self.shown(&path));
                }
            }
        }
        files.sort();
        files.push(format!("changes: {:?}", self.node.changes.lock().unwrap().last()));
        files
    }

    fn shown(&self, path: &Path) -> String {
        let root = self.directory.path().join("default");
        let (file, name) = (fs::File::open(path).unwrap(), path.strip_prefix(&root).unwrap());
        let mut start = [0; 4];
        let data = file.read_exact_at(&mut start, DATA_AT).is_ok() && start == *b"data";
        let uri = STEPPED.store(&format!("file:{}", root.display())).unwrap();
        let store = uri.spec().connect(&Claimant::default(), CredentialSet::default()).unwrap();
        // Only a volume has labels.
        let labels =
            name.to_str().and_then(|name| store.info(name, None).ok()).map(|info| info.labels);
        let mut labels = labels.unwrap_or_default();
        // It names the directory of this scene.
        labels.remove("cleat.parent");
        let size = file.metadata().unwrap().len();
        format!("{}: {size} bytes, data: {data}, {labels:?}", name.display())
    }
}

/// Makes a call that changes an existing volume, and returns its answer as text.
async fn change(
    service: &ControllerService,
    call: Call,
    volume_id: String,
) -> Result<String, Status> {
    let node_id = "n1".to_owned();
    Ok(match call {
        Call::Expand(_) => {
            let capacity_range = range(2 * SMALL, 0);
            let request = csi::ControllerExpandVolumeRequest {
                volume_id,
                capacity_range,
                ..Default::default()
            };
            format!(
                "{:?}",
                service.controller_expand_volume(Request::new(request)).await?.into_inner()
            )
        }
        Call::Modify(_) => {
            let mutable_parameters = map(&[("iops", "300")]);
            let request = csi::ControllerModifyVolumeRequest {
                volume_id,
                mutable_parameters,
                ..Default::default()
            };
            format!(
                "{:?}",
                service.controller_modify_volume(Request::new(request)).await?.into_inner()
            )
        }
        Call::Publish(_) => {
            let volume_capability = Some(capability(Mode::SingleNodeWriter));
            let request = csi::ControllerPublishVolumeRequest {
                volume_id,
                node_id,
                volume_capability,
                ..Default::default()
            };
            format!(
                "{:?}",
                service.controller_publish_volume(Request::new(request)).await?.into_inner()
            )
        }
        Call::Reclaim(_) => {
            let request = ControllerReclaimSpaceRequest { volume_id, ..Default::default() };
            let deadline = Instant::now() + Duration::from_secs(10);
            let answer = service.0.controller_reclaim_space(request, deadline).await?;
            format!("{:?}", answer.into_inner())
        }
        _ => {
            let request =
                csi::ControllerUnpublishVolumeRequest { volume_id, node_id, ..Default::default() };
            format!(
                "{:?}",
                service.controller_unpublish_volume(Request::new(request)).await?.into_inner()
            )
        }
    })
}

/// Makes or removes the group snapshot, and returns the answer as text.
async fn change_group(service: &ControllerService, call: Call) -> Result<String, Status> {
    let volumes = [SOURCE, MADE];
    let parsed = volumes.map(|id| VolumeId::parse(id).unwrap());
    let group = GroupId::new("group", &parsed);
    if matches!(call, Call::Group) {
        let request = csi::CreateVolumeGroupSnapshotRequest {
            name: "group".to_owned(),
            source_volume_ids: volumes.map(str::to_owned).to_vec(),
            ..Default::default()
        };
        let answer = service.create_volume_group_snapshot(Request::new(request)).await?;
        let mut made = answer.into_inner().group_snapshot.unwrap_or_default();
        made.creation_time = None;
        made.snapshots.iter_mut().for_each(|snapshot| snapshot.creation_time = None);
        return Ok(format!("{made:?}"));
    }
    let request = csi::DeleteVolumeGroupSnapshotRequest {
        group_snapshot_id: group.to_string(),
        snapshot_ids: volumes.map(|id| format!("{id}@{}", group.snapshot())).to_vec(),
        ..Default::default()
    };
    Ok(format!(
        "{:?}",
        service.delete_volume_group_snapshot(Request::new(request)).await?.into_inner()
    ))
}

#[tokio::test]
async fn calls_are_killed_at_every_step() {
    let mut wrong = Vec::new();
    for case in &CASES {
        let title = case.title();
        let scene = Scene::new(case).await;
        let steps = scene.kill(case.call, None).await.0;
        let wanted = (scene.state(), scene.call(&scene.controller(), case.call).await.unwrap());
        assert_eq!(wanted.0, scene.state(), "{title}: the repeated call changes something");
        let mut points = 0;
        for (step, name) in steps.iter().enumerate() {
            for moment in [Moment::Before, Moment::Within(0), Moment::Within(1), Moment::After] {
                let at = format!("{title}, killed {moment:?} {step} ({name})");
                let Some(failure) = case.ends_as(&wanted, (step, moment)).await else { continue };
                points += 1;
                let failures = [failure, case.is_undone((step, moment)).await];
                wrong.extend(failures.into_iter().flatten().map(|what| format!("{at}{what}")));
            }
        }
        assert_eq!(points, case.points, "{title} has the steps {steps:?}");
    }
    assert!(wrong.is_empty(), "{} failures:\n{}", wrong.len(), wrong.join("\n"));
}

impl Case {
    fn title(&self) -> String {
        let how = if self.clones_snapshots { " by a snapshot" } else { "" };
        format!("{:?}{how} after {:?}", self.call, self.before)
    }

    /// Kills the call at `stop`, and repeats it. Returns `None` if the step has no such moment, and otherwise what is
    /// wrong, if anything is.
    async fn ends_as(
        &self,
        wanted: &(Vec<String>, String),
        stop: (usize, Moment),
    ) -> Option<Option<String>> {
        let scene = Scene::new(self).await;
        if !scene.kill(self.call, Some(stop)).await.1 {
            return None;
        }
        let answer = scene.call(&scene.controller(), self.call).await;
        let state = scene.state();
        let is_same = answer.as_ref().ok() == Some(&wanted.1) && state == wanted.0;
        Some(
            (!is_same)
                .then(|| format!(", repeated: {answer:?}, {state:#?} instead of {wanted:#?}")),
        )
    }

    /// Kills the call at `stop`, and undoes it. Then everything is deleted. Returns what is wrong, if anything is.
    async fn is_undone(&self, stop: (usize, Moment)) -> Option<String> {
        let scene = Scene::new(self).await;
        scene.kill(self.call, Some(stop)).await;
        let undo = match self.undo {
            [] => &[self.call][..],
            undo => undo,
        };
        let rest = [Call::DeleteSnapshot("first"), Call::Delete(MADE), Call::Delete(SOURCE)];
        for call in undo.iter().chain(&rest) {
            let answer = scene.call(&scene.controller(), *call).await;
            if answer.is_err() {
                return Some(format!(", then {call:?}: {answer:?}"));
            }
        }
        let left = scene.state();
        (left.len() > 1).then(|| format!(", then everything is deleted: {left:?}"))
    }
}
