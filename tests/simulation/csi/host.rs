//! A host whose mounts, files and volumes outlive the supervisor, as those of a real one outlive the daemon.

use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use cleat_core::error::{Error, ErrorKind, Result};
use cleat_csi::host::{
    CheckPolicy, Content, DeviceNumber, Find, Found, Host, Kind, MountInfo, NewMount, Unlocked,
    Usage,
};
use cleat_node::executor::MapSpec;
use tokio::time::{Instant, sleep};

use super::machine::{Decrypted, Machine, Mount, Path as Entry, Shown, Stored};
use super::steps::{Moment, Steps, kill};
use crate::world::World;

/// How long a program, or the kernel on its behalf, works on a device after the supervisor was killed.
const WORK: Duration = Duration::from_secs(2);

/// The moments of a step that the supervisor executes by itself, and of one that takes a program some time.
const OWN: &[Moment] = &[Moment::Before, Moment::After];
const PROGRAM: &[Moment] = &[Moment::Before, Moment::During, Moment::After];

/// The host of one supervisor. The machine below it outlives the supervisor.
pub(crate) struct SimHost {
    pub(crate) world: World,
    pub(crate) machine: Arc<Mutex<Machine>>,
    pub(crate) steps: Steps,
}

type Effect = Box<dyn FnOnce(&mut Machine) + Send>;

impl SimHost {
    fn machine(&self) -> MutexGuard<'_, Machine> {
        let mut machine = self.machine.lock().unwrap_or_else(PoisonError::into_inner);
        machine.settle();
        machine
    }

    /// Executes a step that has no error, and is killed before or after it.
    async fn step(&self, name: String, effect: impl FnOnce(&mut Machine)) {
        let moment = self.steps.pass(&name, OWN);
        if moment == Some(Moment::Before) {
            kill(&self.world).await;
        }
        effect(&mut self.machine());
        if moment.is_some() {
            kill(&self.world).await;
        }
    }

    /// Executes a step by a program that uses the device `index` meanwhile.
    async fn program(&self, name: String, index: u32, effect: Effect) {
        match self.steps.pass(&name, PROGRAM) {
            Some(Moment::Before) => kill(&self.world).await,
            Some(Moment::During) => {
                self.machine().work(index, name, WORK, effect);
                kill(&self.world).await;
            }
            Some(Moment::After) => {
                effect(&mut self.machine());
                kill(&self.world).await;
            }
            None => effect(&mut self.machine()),
        }
    }

    /// Waits until no program uses the device, as the kernel does before a second mount of it.
    async fn wait_for_programs(&self, index: u32) {
        while self.machine().worked_on(index).is_some() {
            sleep(WORK / 8).await;
        }
    }

    fn index(&self, device: &Path) -> Result<u32> {
        let number = self.device_number(device).map(|number| number.minor);
        number.ok_or_else(|| Error::new(ErrorKind::NotFound, "the device is not connected"))
    }

    /// Returns the device and the volume on it, unless a program uses the device.
    fn unused(&self, device: &Path) -> Result<(u32, String)> {
        let index = self.index(device)?;
        if let Some(program) = self.machine().worked_on(index) {
            let message = format!("{} is in use by {program}", device.display());
            return Err(Error::new(ErrorKind::InUse, message));
        }
        Ok((index, self.machine().volume_on(index)?))
    }

    fn refuse_mount_point(&self, target: &Path) -> Result<()> {
        if self.machine().mount_at(target).is_none() {
            return Ok(());
        }
        let message = format!("something is mounted at {} already", target.display());
        Err(Error::new(ErrorKind::AlreadyExists, message))
    }

    fn require(&self, path: &Path, wanted: Entry) -> Result<()> {
        if self.machine().paths.get(path) == Some(&wanted) {
            return Ok(());
        }
        Err(Error::new(ErrorKind::NotFound, format!("{} does not exist", path.display())))
    }

    fn violation(&self, what: String) {
        self.world.violation(what);
    }
}

#[tonic::async_trait]
impl Host for SimHost {
    async fn find(&self, _: &str, find: Find, _: Instant) -> Result<MapSpec> {
        find()
    }

    fn device_number(&self, node: &Path) -> Option<DeviceNumber> {
        let node = node.to_str()?;
        let index = node.strip_prefix("/dev/nbd").or_else(|| node.strip_prefix("/dev/dm-"))?;
        let index = index.parse().ok()?;
        self.machine().volume_on(index).ok()?;
        Some(Machine::number(index))
    }

    async fn mount_at(&self, path: &Path) -> Result<Option<MountInfo>> {
        Ok(self.machine().mount_at(path).map(Mount::info))
    }

    async fn mounts(&self) -> Result<Vec<MountInfo>> {
        Ok(self.machine().mounts.iter().map(Mount::info).collect())
    }

    async fn block_device(&self, path: &Path, _: Instant) -> Result<Option<DeviceNumber>> {
        let machine = self.machine();
        let mount = machine.mount_at(path).filter(|mount| mount.shown == Shown::Node);
        Ok(mount.map(|mount| Machine::number(mount.index)))
    }

    async fn make_directory(&self, path: &Path, _: Instant) -> Result<()> {
        let made = path.to_owned();
        let name = format!("make the directory {}", path.display());
        self.step(name, move |machine| machine.make(made, Entry::Directory)).await;
        Ok(())
    }

    async fn make_file(&self, path: &Path, _: Instant) -> Result<()> {
        let made = path.to_owned();
        let name = format!("make the file {}", path.display());
        self.step(name, move |machine| machine.make(made, Entry::File)).await;
        Ok(())
    }

    async fn remove(&self, path: &Path, _: Instant) -> Result<()> {
        if self.machine().mount_at(path).is_some() {
            let message = format!("{} is a mount point", path.display());
            return Err(Error::new(ErrorKind::InUse, message));
        }
        let name = format!("remove {}", path.display());
        self.step(name, |machine| machine.remove(path)).await;
        Ok(())
    }

    async fn content(&self, device: &Path, _: Instant) -> Result<Content> {
        let index = self.index(device)?;
        let machine = self.machine();
        Ok(match machine.stored(index)? {
            Stored::Empty if machine.worked_on(index).is_some() => {
                let message = format!("{} is in use", device.display());
                return Err(Error::new(ErrorKind::InUse, message));
            }
            Stored::Empty => Content::Empty,
            Stored::Filesystem { kind, .. } => {
                let kind = kind.name().to_owned();
                Content::Filesystem(Found { kind, uuid: None, label: None })
            }
            Stored::Data => Content::Unknown("data at byte 5".to_owned()),
            Stored::Encrypted => Content::Other("crypto_LUKS".to_owned()),
        })
    }

    async fn unlocked(&self, name: &str, _: Instant) -> Result<Option<Unlocked>> {
        let machine = self.machine();
        let found = machine.unlocked.iter().find(|device| device.name == name);
        Ok(found.map(|device| Unlocked {
            node: format!("/dev/dm-{}", Machine::above(device.below)).into(),
            number: Machine::number(Machine::above(device.below)),
            below: vec![Machine::number(device.below)],
            size: device.size,
        }))
    }

    async fn encrypt(&self, device: &Path, _: &[u8], _: Instant) -> Result<()> {
        let (index, volume) = self.unused(device)?;
        let content = self.machine().stored(index)?;
        if content != Stored::Empty {
            self.violation(format!("{volume} contains {content:?} and is encrypted"));
        }
        let effect = move |machine: &mut Machine| machine.store(volume, Stored::Encrypted);
        self.program("encrypt".to_owned(), index, Box::new(effect)).await;
        Ok(())
    }

    async fn unlock(&self, device: &Path, name: &str, _: &[u8], _: bool, _: Instant) -> Result<()> {
        let index = self.index(device)?;
        self.wait_for_programs(index).await;
        if self.machine().unlocked.iter().any(|other| other.name == name) {
            return Err(Error::new(ErrorKind::AlreadyExists, format!("{name} exists")));
        }
        if self.machine().stored(index)? != Stored::Encrypted {
            return Err(Error::new(ErrorKind::Internal, "it is not encrypted"));
        }
        let made =
            Decrypted { name: name.to_owned(), below: index, size: self.machine().size(index)? };
        let effect = move |machine: &mut Machine| machine.unlock(made);
        self.program("unlock".to_owned(), index, Box::new(effect)).await;
        Ok(())
    }

    async fn lock(&self, name: &str, _: bool, _: Instant) -> Result<()> {
        let found = self.machine().unlocked.iter().find(|device| device.name == name).cloned();
        let Some(found) = found else { return Ok(()) };
        let index = Machine::above(found.below);
        let is_mounted = self.machine().mounts.iter().any(|mount| mount.index == index);
        if is_mounted || self.machine().worked_on(index).is_some() {
            return Err(Error::new(ErrorKind::InUse, format!("{name} is in use")));
        }
        let name = name.to_owned();
        self.step("lock".to_owned(), move |machine| machine.lock(&name)).await;
        Ok(())
    }

    async fn grow_unlocked(&self, name: &str, _: Instant) -> Result<()> {
        let found = self.machine().unlocked.iter().find(|device| device.name == name).cloned();
        let found = found.ok_or_else(|| Error::new(ErrorKind::NotFound, "it is not unlocked"))?;
        let grown = Decrypted { size: self.machine().size(found.below)?, ..found };
        let effect = move |machine: &mut Machine| {
            machine.lock(&grown.name);
            machine.unlock(grown);
        };
        self.step("grow the decrypted device".to_owned(), effect).await;
        Ok(())
    }

    async fn format(&self, device: &Path, kind: Kind, _: Instant) -> Result<()> {
        let (index, volume) = self.unused(device)?;
        let content = self.machine().stored(index)?;
        if content != Stored::Empty {
            self.violation(format!("{volume} contains {content:?} and is formatted"));
        }
        let size = self.machine().size(index)?;
        let made = Stored::Filesystem { kind, size, data: 0, group: 0 };
        let effect = move |machine: &mut Machine| machine.store(volume, made);
        self.program("format".to_owned(), index, Box::new(effect)).await;
        Ok(())
    }

    async fn check(&self, device: &Path, kind: Kind, _: CheckPolicy, _: Instant) -> Result<()> {
        // As `cleat-filesystem`, with the policy that is the default.
        if kind != Kind::Ext4 {
            return Ok(());
        }
        let (index, volume) = self.unused(device)?;
        if self.machine().mounts.iter().any(|mount| mount.index == index) {
            return Err(Error::new(ErrorKind::InUse, format!("{volume} is mounted")));
        }
        self.program("check".to_owned(), index, Box::new(|_| ())).await;
        Ok(())
    }

    async fn mount(&self, mount: NewMount<'_>, _: Instant) -> Result<()> {
        self.require(mount.target, Entry::Directory)?;
        self.refuse_mount_point(mount.target)?;
        let index = self.index(mount.device)?;
        self.wait_for_programs(index).await;
        match self.machine().stored(index)? {
            Stored::Filesystem { kind, .. } if kind == mount.kind => {}
            other => {
                let message = format!("wrong fs type: {other:?}");
                return Err(Error::new(ErrorKind::Internal, message));
            }
        }
        let made = Mount {
            path: mount.target.to_owned(),
            index,
            shown: Shown::Filesystem(mount.kind),
            read_only: mount.read_only,
        };
        let effect = move |machine: &mut Machine| machine.push(made);
        self.program("mount".to_owned(), index, Box::new(effect)).await;
        Ok(())
    }

    async fn bind(&self, source: &Path, target: &Path, read_only: bool, _: Instant) -> Result<()> {
        self.require(target, Entry::Directory)?;
        self.refuse_mount_point(target)?;
        let Some(staged) = self.machine().mount_at(source).cloned() else {
            self.violation(format!("{} is published and is no mount", source.display()));
            return Ok(());
        };
        let read_only = read_only || staged.read_only;
        let made = Mount { path: target.to_owned(), read_only, ..staged };
        self.step("bind".to_owned(), move |machine| machine.push(made)).await;
        Ok(())
    }

    async fn bind_device(&self, device: &Path, target: &Path, _: Instant) -> Result<()> {
        self.require(target, Entry::File)?;
        self.refuse_mount_point(target)?;
        let (path, index) = (target.to_owned(), self.index(device)?);
        let made = Mount { path, index, shown: Shown::Node, read_only: false };
        self.step("bind the device".to_owned(), move |machine| machine.push(made)).await;
        Ok(())
    }

    async fn unmount(&self, path: &Path, _: Instant) -> Result<()> {
        loop {
            let Some(mount) = self.machine().mount_at(path).cloned() else { return Ok(()) };
            let (name, index) = (format!("unmount {}", path.display()), mount.index);
            let is_last =
                self.machine().mounts.iter().filter(|other| other.index == index).count() == 1;
            if mount.shown == Shown::Node || !is_last {
                self.step(name, |machine| machine.pop(path)).await;
                continue;
            }
            // The kernel removes the mount first, and then writes what is dirty.
            match self.steps.pass(&name, PROGRAM) {
                Some(Moment::Before) => kill(&self.world).await,
                moment => {
                    self.machine().pop(path);
                    if moment == Some(Moment::During) {
                        self.machine().work(index, name, WORK, Box::new(|_| ()));
                    }
                    if moment.is_some() {
                        kill(&self.world).await;
                    }
                }
            }
        }
    }

    async fn detach(&self, path: &Path, _: Instant) -> Result<()> {
        while self.machine().mount_at(path).is_some() {
            self.step(format!("detach {}", path.display()), |machine| machine.pop(path)).await;
        }
        Ok(())
    }

    async fn grow(&self, device: &Path, at: &Path, wanted: Kind, _: Instant) -> Result<()> {
        let (index, volume) = self.unused(device)?;
        let is_mounted = self.machine().mount_at(at).is_some_and(|mount| mount.index == index);
        if !is_mounted {
            return Err(Error::new(ErrorKind::InvalidArgument, "it is not mounted there"));
        }
        let size = self.machine().size(index)?;
        let stored = self.machine().stored(index)?;
        if let Stored::Filesystem { kind, size: old, data, group } = stored
            && kind == wanted
            && old < size
        {
            let grown = Stored::Filesystem { kind, size, data, group };
            let effect = move |machine: &mut Machine| machine.store(volume, grown);
            self.program("grow".to_owned(), index, Box::new(effect)).await;
        }
        Ok(())
    }

    async fn apply_group(&self, at: &Path, group: u32, _: Instant) -> Result<()> {
        let mount = self.machine().mount_at(at).cloned();
        let mount = mount.ok_or_else(|| Error::new(ErrorKind::NotFound, "nothing is mounted"))?;
        let volume = self.machine().volume_on(mount.index)?;
        self.step("change the group".to_owned(), move |machine| {
            if let Some(Stored::Filesystem { group: owner, .. }) = machine.volumes.get_mut(&volume)
            {
                *owner = group;
            }
        })
        .await;
        Ok(())
    }

    async fn trim(&self, _: &Path, _: Instant) -> Result<u64> {
        Ok(0)
    }

    async fn usage(&self, _: &Path, _: Instant) -> Result<Usage> {
        Ok(Usage::default())
    }
}
