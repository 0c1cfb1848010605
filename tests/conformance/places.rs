//! Sources of new volumes: memory, directories, loop devices, a Ceph cluster.

use std::ops::ControlFlow;
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use cleat::backends::REGISTRY;
use cleat_backend::store::{Layout, Page, Removal, Source};
use cleat_backend::uri::VolumeUri;
use cleat_backend::{CacheFiles, OpenOptions};
use librbd::{Cluster, Config, NewImage, Pool};
use tempfile::TempDir;
use test_kit::ceph::{BUCKET, Cluster as TestCluster, ID, POOL, shared};
use test_kit::minio;
use test_kit::temp::on_disk;
use test_kit::wait::wait_until;

/// The size of the suite's volumes, in bytes: twice the longest payload.
pub const SIZE: u64 = 64 << 20;

/// A source of volumes. It removes its volumes when it is dropped.
pub struct Place {
    kind: Kind,
    options: String,
    has_cache: bool,
    directory: TempDir,
    attached: std::cell::RefCell<Vec<String>>,
}

enum Kind {
    Mem,
    File,
    Loop {
        sector: u32,
    },
    /// RBD images with objects of 2^`order` bytes.
    Rbd {
        order: u8,
    },
    /// Volumes on an object store, or in a directory with the same layout.
    Objects {
        store: String,
        layout: Layout,
    },
    /// Clones of empty volumes in a directory.
    Clones {
        store: String,
    },
    Faulty(Box<Place>),
}

impl Place {
    fn new(kind: Kind, directory: PathBuf, options: &str) -> Self {
        Self {
            kind,
            options: options.to_owned(),
            has_cache: false,
            directory: tempfile::Builder::new().prefix("cleat-").tempdir_in(directory).unwrap(),
            attached: std::cell::RefCell::default(),
        }
    }

    pub fn mem() -> Self {
        Self::new(Kind::Mem, on_disk(), "")
    }

    pub fn file(directory: PathBuf, options: &str) -> Self {
        Self::new(Kind::File, directory, options)
    }

    pub fn loop_device(sector: u32, options: &str) -> Self {
        Self::new(Kind::Loop { sector }, on_disk(), options)
    }

    /// Returns a source of RBD images in the cluster that all tests of the process share.
    pub fn rbd(order: u8, options: &str) -> Self {
        Self::new(Kind::Rbd { order }, on_disk(), options)
    }

    /// Returns a source of volumes in a directory of their own.
    pub fn objects() -> Self {
        let mut place = Self::new(Kind::Mem, on_disk(), "");
        let store = format!("dir:{}", place.directory.path().display());
        place.kind = Kind::Objects { store, layout: Layout::default() };
        place
    }

    /// Returns a source of volumes whose data is compressed and encrypted.
    pub fn packed_objects() -> Self {
        let mut place = Self::objects();
        let store = keyed_store(place.directory.path(), "key");
        let layout = Layout { compression: Some("lz4".to_owned()), ..Layout::default() };
        place.kind = Kind::Objects { store, layout };
        place
    }

    /// Returns a source of clones of encrypted volumes.
    pub fn encrypted_clones() -> Self {
        let mut place = Self::clones();
        place.kind = Kind::Clones { store: keyed_store(place.directory.path(), "key") };
        place
    }

    /// Returns the same source, whose volumes are opened with a cache.
    pub fn with_cache(mut self) -> Self {
        self.has_cache = true;
        self
    }

    /// Returns how its volumes are opened. The files of a cache are removed when the volume is closed.
    pub fn open_options(&self) -> OpenOptions {
        let count = if self.has_cache { 4 } else { 0 };
        let file = || OwnedFd::from(tempfile::tempfile_in(self.directory.path()).unwrap());
        let files = (0..count).map(|_| Arc::new(file())).collect();
        let cache = CacheFiles { files, file_bytes: 32 << 20 };
        OpenOptions { cache, ..OpenOptions::default() }
    }

    /// Returns a source of clones in a directory of their own.
    pub fn clones() -> Self {
        let mut place = Self::new(Kind::Mem, on_disk(), "");
        place.kind = Kind::Clones { store: format!("dir:{}", place.directory.path().display()) };
        place
    }

    /// Returns a source of volumes in the object store that all tests of the process share.
    pub fn s3() -> Self {
        let mut place = Self::new(Kind::Mem, on_disk(), "");
        place.kind = Kind::Objects { store: s3_store(&place.name()), layout: Layout::default() };
        place
    }

    /// Returns a source of volumes in the MinIO that all tests of the process share.
    pub fn minio() -> Self {
        let mut place = Self::new(Kind::Mem, on_disk(), "");
        place.kind = Kind::Objects { store: minio_store(&place.name()), layout: Layout::default() };
        place
    }

    #[cfg_attr(not(feature = "fault"), allow(dead_code))]
    pub fn faulty(inner: Self, options: &str) -> Self {
        Self::new(Kind::Faulty(Box::new(inner)), on_disk(), options)
    }

    /// Creates a volume of `size` zero bytes and returns its URI.
    pub fn uri(&self, size: u64) -> VolumeUri {
        let text = match &self.kind {
            Kind::Mem => format!("mem:{size}"),
            Kind::File => format!("file:{}", self.sparse(size)),
            Kind::Loop { sector } => format!("file:{}", self.attach(&self.sparse(size), *sector)),
            Kind::Rbd { order } => self.image(size, *order),
            Kind::Objects { store, layout } => make_objects_with(store, size, layout),
            Kind::Clones { store } => make_clone(store, size),
            Kind::Faulty(inner) => format!("fault:{}", inner.uri(size)),
        };
        let separator = match (text.contains('?'), self.options.is_empty()) {
            (_, true) => "",
            (true, false) => "&",
            (false, false) => "?",
        };
        REGISTRY.volume(&format!("{text}{separator}{}", self.options)).unwrap()
    }

    /// Puts another volume of the same size in the place of `uri`, which no process has open: a file is
    /// replaced by a rename, a loop device is detached and attached again with another file, and an image is
    /// renamed and another one is created. A volume in memory is another one at each open.
    pub fn replace(&self, uri: &VolumeUri) {
        let text = uri.to_string();
        let location = text.split('?').next().unwrap_or(&text);
        match &self.kind {
            Kind::Mem => {}
            Kind::File => {
                let path = location.strip_prefix("file:").unwrap();
                let other = std::fs::File::create(format!("{path}.new")).unwrap();
                other.set_len(std::fs::metadata(path).unwrap().len()).unwrap();
                std::fs::hard_link(path, format!("{path}.old")).unwrap();
                std::fs::rename(format!("{path}.new"), path).unwrap();
            }
            Kind::Loop { sector } => {
                let device = location.strip_prefix("file:").unwrap();
                let file = self.sparse(SIZE);
                let sector = sector.to_string();
                losetup(&["--detach", device]).unwrap();
                // A detached device is busy until udev has closed it.
                wait_until("the device is attached again", || {
                    losetup(&["--sector-size", &sector, device, &file]).is_ok()
                });
            }
            Kind::Rbd { order } => {
                let image = format!("{POOL}/{}-{SIZE}", self.name());
                shared().rbd(&["rename", &image, &format!("{image}-old")]).unwrap();
                self.image(SIZE, *order);
            }
            Kind::Objects { store, layout } => {
                remove_objects(store, "v");
                make_objects_with(store, SIZE, layout);
            }
            Kind::Clones { store } => {
                remove_objects(store, "clone");
                clone_objects(store, "v@s", "clone");
            }
            Kind::Faulty(inner) => {
                let wrapped = location.strip_prefix("fault:").unwrap();
                inner.replace(&REGISTRY.volume(wrapped).unwrap());
            }
        }
    }

    fn sparse(&self, size: u64) -> String {
        let path = self.directory.path().join(format!("{size}.img"));
        std::fs::File::create(&path).unwrap().set_len(size).unwrap();
        path.to_str().unwrap().to_owned()
    }

    fn name(&self) -> String {
        self.directory.path().file_name().unwrap().to_str().unwrap().to_owned()
    }

    fn image(&self, size: u64, order: u8) -> String {
        let name = format!("{}-{size}", self.name());
        let new = NewImage { order: Some(order), ..NewImage::default() };
        pool(shared(), ID).create(&name, size, &new).unwrap();
        image_uri(shared(), &name)
    }

    fn attach(&self, file: &str, sector: u32) -> String {
        needs_root();
        let sector = sector.to_string();
        let arguments = ["--find", "--show", "--sector-size", &sector, file];
        let output = Command::new("losetup").args(arguments).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let device = String::from_utf8(output.stdout).unwrap().trim().to_owned();
        self.attached.borrow_mut().push(device.clone());
        device
    }
}

/// Returns the URI of a part of the shared object store, or of the bucket that `CLEAT_TEST_STORE` names with its options.
pub fn s3_store(prefix: &str) -> String {
    if let Ok(store) = std::env::var("CLEAT_TEST_STORE") {
        let (bucket, options) = store.split_once('?').unwrap_or((&store, ""));
        return format!("{bucket}/{prefix}?{options}");
    }
    let (endpoint, credentials) = shared().s3();
    let credentials = credentials.display();
    format!("s3://{BUCKET}/{prefix}?endpoint=http://{endpoint}&credentials_file={credentials}")
}

/// Returns the URI of a part of the shared MinIO.
pub fn minio_store(prefix: &str) -> String {
    let minio = minio::shared();
    let (bucket, endpoint, keys) = (minio::BUCKET, minio.endpoint(), minio.credentials());
    format!("s3://{bucket}/{prefix}?endpoint=http://{endpoint}&credentials_file={}", keys.display())
}

/// Creates a key file in a directory. Returns the URI of the directory as a store of volumes with this key.
pub fn keyed_store(directory: &Path, file: &str) -> String {
    let key = directory.join(file);
    std::fs::write(&key, format!("{file:x<40}")).unwrap();
    std::fs::set_permissions(&key, std::fs::Permissions::from_mode(0o600)).unwrap();
    format!("dir:{}?key_file={}", directory.display(), key.display())
}

/// Creates the volume `v` in a store of objects, and returns its URI.
pub fn make_objects(store: &str, size: u64) -> String {
    make_objects_with(store, size, &Layout::default())
}

/// As [`make_objects`], with a layout.
pub fn make_objects_with(store: &str, size: u64, layout: &Layout) -> String {
    let store = REGISTRY.store(store).unwrap();
    let made = store.connect().unwrap().create("v", size, layout);
    assert!(made.unwrap_or_else(|error| panic!("{}", error.report())));
    store.volume("v", None).unwrap().to_string()
}

/// Creates the volume `v` with a snapshot, and the clone of it, and returns the URI of the clone.
fn make_clone(store: &str, size: u64) -> String {
    make_objects(store, size);
    let connected = REGISTRY.store(store).unwrap().connect().unwrap();
    assert!(connected.snapshots().unwrap().create("v", "s", &mut |_, _| GO_ON).unwrap());
    clone_objects(store, "v@s", "clone")
}

/// Clones a snapshot in a store of objects, and returns the URI of the clone.
pub fn clone_objects(store: &str, snapshot: &str, name: &str) -> String {
    let spec = REGISTRY.store(store).unwrap();
    let (parent, snapshot) = snapshot.split_once('@').unwrap();
    let source = Source { store: spec.spec(), name: parent, snapshot: Some(snapshot) };
    let connected = spec.connect().unwrap();
    let made =
        connected
            .clones()
            .unwrap()
            .create_clone(&source, name, &Layout::default(), &mut |_, _| GO_ON);
    assert!(made.unwrap_or_else(|error| panic!("{}", error.report())));
    spec.volume(name, None).unwrap().to_string()
}

const GO_ON: ControlFlow<()> = ControlFlow::Continue(());

fn remove_objects(store: &str, name: &str) {
    let store = REGISTRY.store(store).unwrap().connect().unwrap();
    let removed = store.remove(name, Removal::Now, &mut |_, _| GO_ON);
    assert!(removed.unwrap_or_else(|error| panic!("{}", error.report())).changed);
    assert!(store.list(&ALL).unwrap().volumes.iter().all(|volume| volume.name != name));
}

/// The whole list of a store.
pub const ALL: Page = Page { after: None, limit: 1000, details: true };

/// Connects to the cluster as the client `id` and opens the pool.
pub fn pool(cluster: &TestCluster, id: &str) -> Arc<Pool> {
    let config = Config {
        conf: Some(cluster.conf()),
        id: Some(id.to_owned()),
        keyring: Some(cluster.keyring(id)),
        ..Config::default()
    };
    Cluster::connect(&config).unwrap().pool(POOL, None).unwrap()
}

pub fn image_uri(cluster: &TestCluster, image: &str) -> String {
    let (conf, keyring) = (cluster.conf(), cluster.keyring(ID));
    let (conf, keyring) = (conf.display(), keyring.display());
    format!("rbd:{POOL}/{image}?conf={conf}&keyring={keyring}&id={ID}")
}

impl Drop for Place {
    fn drop(&mut self) {
        if let Kind::Rbd { .. } = self.kind {
            let prefix = self.name();
            let pool = pool(shared(), ID);
            for image in pool.list().unwrap_or_default() {
                if image.name.starts_with(&prefix) {
                    let removed = pool.remove(&image.name, &mut |_, _| ControlFlow::Continue(()));
                    assert!(removed.is_ok() || std::thread::panicking(), "{removed:?}");
                }
            }
        }
        for device in self.attached.borrow().iter() {
            let detached = Command::new("losetup").args(["--detach", device]).status();
            assert!(detached.is_ok_and(|status| status.success()) || std::thread::panicking());
        }
    }
}

fn losetup(arguments: &[&str]) -> Result<(), String> {
    let output = Command::new("losetup").args(arguments).output().unwrap();
    let error = || String::from_utf8_lossy(&output.stderr).into_owned();
    if output.status.success() { Ok(()) } else { Err(error()) }
}

/// Fails unless the test runs as root, which loop devices and mounts need.
#[track_caller]
pub fn needs_root() {
    let is_root = nix::unistd::geteuid().is_root();
    assert!(is_root, "this test needs root: run it with sudo, or exclude it with --skip NAME");
}
