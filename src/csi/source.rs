//! Where a volume is: the request to map it, from its id and its attributes.

use std::collections::BTreeMap;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use cleat_backend::uri::Encoded;
use cleat_core::error::{Error, ErrorKind, Result};
use cleat_node::csi_config::CsiConfig;
use cleat_node::executor::MapSpec;
use serde::Deserialize;

use crate::attributes::Attributes;
use crate::capability::Capability;
use crate::node::key::{self, NodeClient};
use crate::secrets::Secrets;
use crate::volume_id::{VolumeId, mapping_name};

/// The maximum size of the file of clusters, in bytes.
const MAX_CLUSTERS: u64 = 1 << 20;

/// The option of a URI with which several nodes write to an image.
const SHARED: &str = "lock=shared";

/// The options of the URI of an RBD image that come from the file of clusters or from the secret of a call.
const CEPH_ACCESS: [&str; 3] = [MONITORS, "id", "keyring"];

/// The option with the addresses of the monitors, separated by commas.
const MONITORS: &str = "config.mon_host";

/// The options that say which object store has a bucket of this name.
const STORE_PLACE: [&str; 2] = ["endpoint", "account"];

/// The beginnings of the URIs of object stores.
const OBJECT_STORES: [&str; 4] = ["dir:", "s3:", "gs:", "az:"];

/// One entry of the file of clusters, in the form of ceph-csi's `config.json`, with fields of its own that
/// ceph-csi ignores. Other fields of ceph-csi are ignored. The entry of an object store has `store` and none of the
/// fields of a Ceph cluster.
#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Cluster {
    #[serde(rename = "clusterID")]
    cluster_id: String,
    #[serde(default)]
    monitors: Vec<String>,
    /// The URI of an object store.
    #[serde(default)]
    pub(crate) store: Option<String>,
    #[serde(default)]
    pub(crate) rbd: ClusterRbd,
    /// The Ceph client, without `client.`; absent: admin.
    #[serde(default, rename = "userID")]
    user_id: Option<String>,
    /// The path of the client's keyring; absent: librados looks for it in /etc/ceph.
    #[serde(default)]
    keyring: Option<PathBuf>,
    /// The pools whose volumes the controller lists: POOL or POOL/NAMESPACE. The first one also leads to the cluster
    /// for calls without a pool.
    #[serde(default)]
    pub(crate) pools: Vec<String>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(crate) struct ClusterRbd {
    pub(crate) rados_namespace: String,
}

impl Cluster {
    /// Checks that the entry is that of a Ceph cluster or of an object store.
    fn check(&self) -> Result<()> {
        let id = &self.cluster_id;
        let problem = match &self.store {
            None if self.monitors.is_empty() => "has neither monitors nor a store",
            None => return Ok(()),
            Some(_) if !(self.monitors.is_empty() && self.pools.is_empty()) => {
                "has a store, and so neither monitors nor pools"
            }
            Some(store) if OBJECT_STORES.iter().any(|scheme| store.starts_with(scheme)) => {
                return Ok(());
            }
            Some(_) => "has a store that is not the URI of an object store",
        };
        Err(Error::new(ErrorKind::InvalidArgument, format!("the cluster {id:?} {problem}"))
            .with_repair(
                "write \"monitors\": [\"HOST:PORT\"] for Ceph, or \"store\": \"s3://BUCKET?endpoint=…\"",
            ))
    }

    /// Returns the options of a URI that reach the cluster as the configured client, or as `client` with the
    /// keyring at that path.
    fn options(&self, client: Option<(&str, &Path)>) -> String {
        let part = |text: &[u8]| Encoded(text).to_string();
        let mut options = format!("{MONITORS}={}", part(self.monitors.join(",").as_bytes()));
        let configured = (self.user_id.as_deref(), self.keyring.as_deref());
        let (user, keyring) =
            client.map_or(configured, |(user, keyring)| (Some(user), Some(keyring)));
        for (key, value) in [
            ("id", user.map(str::as_bytes)),
            ("keyring", keyring.map(|path| path.as_os_str().as_bytes())),
        ] {
            if let Some(value) = value {
                options.push_str(&format!("&{key}={}", part(value)));
            }
        }
        options
    }
}

/// Returns the request to map a volume. Reads the file of clusters, and blocks as that does.
///
/// # Errors
/// Returns `NotFound` for an id that names no volume of this driver and has no attributes of a static
/// volume, for a directory or a cluster that this node does not have, `InvalidArgument` for incomplete
/// attributes, and `InUse` for a volume of another node.
pub(crate) fn map_spec(
    config: &CsiConfig,
    node: &str,
    id: &str,
    attributes: &Attributes,
    client: Option<&NodeClient>,
    capability: &Capability,
) -> Result<MapSpec> {
    let mut uri = uri(config, node, id, attributes, client)?;
    if capability.shared {
        uri = shared(uri, id)?;
    }
    let read_only = capability.read_only;
    let spec = MapSpec {
        name: mapping_name(id),
        uri,
        read_only,
        connections: attributes.connections,
        block_size: attributes.block_size,
        dead_connection_timeout_s: 0,
        policy: attributes.policy,
        take_over: false,
        quiesce: attributes.quiesce && !read_only,
        grant: 0,
    };
    spec.check()?;
    Ok(spec)
}

/// Returns the URI with which several nodes write to an RBD image.
///
/// # Errors
/// Returns `InvalidArgument` for a volume that several nodes cannot write.
fn shared(uri: String, id: &str) -> Result<String> {
    if !uri.starts_with("rbd:") {
        let message =
            format!("volume {id} is not an RBD image, so several nodes cannot write to it");
        return Err(Error::new(ErrorKind::InvalidArgument, message)
            .with_repair("use the access mode ReadWriteOnce"));
    }
    Ok(match uri.contains('?') {
        _ if is_shared(&uri) => uri,
        true => format!("{uri}&{SHARED}"),
        false => format!("{uri}?{SHARED}"),
    })
}

/// Returns whether several nodes write to the volume `uri`.
pub fn is_shared(uri: &str) -> bool {
    let options = uri.split_once('?').map(|(_, options)| options);
    options.is_some_and(|options| options.split('&').any(|option| option == SHARED))
}

/// Returns whether nothing else can write to a volume that is mapped read-only, without a grant. A reader of an RBD image
/// has no claim, so this holds for snapshots only.
pub(crate) fn keeps_writers_away(uri: &str) -> bool {
    let place = uri.split('?').next().unwrap_or_default();
    !place.starts_with("rbd:") || place.contains('@')
}

/// Returns whether the URI `present` of the mapping of the volume `id`, and the URI `wanted` that was made for it now,
/// lead to the same volume in the same way, and differ only in what the file of clusters says: the addresses, the
/// client, and how an object store is used.
///
/// An id that the driver has made names the cluster. That of a static volume does not, so it is compared: the monitors
/// by having one in common.
pub(crate) fn leads_to_same(
    id: &str,
    attributes: &Attributes,
    present: &str,
    wanted: &str,
) -> bool {
    let [(place, present), (wanted_place, wanted)] = [present, wanted].map(|uri| {
        let (place, options) = uri.split_once('?').unwrap_or((uri, ""));
        let options = options.split('&').filter_map(|option| option.split_once('='));
        (place, options.collect::<BTreeMap<&str, &str>>())
    });
    if place != wanted_place || attributes.uri.is_some() {
        return false;
    }
    let names_cluster = VolumeId::parse(id).is_some() && !attributes.static_volume;
    let are_same = |names: &[&str]| names.iter().all(|name| present.get(name) == wanted.get(name));
    if place.starts_with("rbd:") {
        let all = present.keys().chain(wanted.keys());
        let others: Vec<&str> = all.copied().filter(|name| !CEPH_ACCESS.contains(name)).collect();
        return are_same(&others) && (names_cluster || have_common_monitor(&present, &wanted));
    }
    let is_object = OBJECT_STORES.iter().any(|scheme| place.starts_with(scheme));
    is_object && (names_cluster || are_same(&STORE_PLACE))
}

fn have_common_monitor(one: &BTreeMap<&str, &str>, other: &BTreeMap<&str, &str>) -> bool {
    let [one, other] = [one, other].map(|options| options.get(MONITORS).copied());
    let mut monitors = one.unwrap_or_default().split(',').filter(|monitor| !monitor.is_empty());
    monitors.any(|monitor| other.is_some_and(|all| all.split(',').any(|other| other == monitor)))
}

/// Returns whether a volume is an RBD image whose Ceph client the secrets of a call can name.
///
/// # Errors
/// Returns `InvalidArgument` if the secrets name a client, and the attributes have the URI of the volume.
pub(crate) fn uses_secrets(id: &str, attributes: &Attributes, secrets: &Secrets) -> Result<bool> {
    if attributes.uri.is_none() {
        let is_rbd = matches!(VolumeId::parse(id), Some(VolumeId::Rbd { .. }));
        return Ok(attributes.static_volume || is_rbd);
    }
    if secrets.keyring().is_some() {
        let message =
            format!("volume {id} has the attribute uri, and its secret names a Ceph client");
        return Err(Error::new(ErrorKind::InvalidArgument, message).with_repair(
            "name the client in the uri (id=NAME&keyring=PATH), or use staticVolume, clusterID and pool",
        ));
    }
    Ok(false)
}

/// Returns the URI of a volume whose id the driver has made, with the Ceph client of the call that has staged it last
/// or, if that is unstaged, with the configured one. Blocks as reading the file of clusters does.
///
/// # Errors
/// Fails as [`map_spec`] does.
pub(crate) fn uri_of(config: &CsiConfig, node: &str, id: &str) -> Result<String> {
    let client = key::client(id, &Secrets::default(), true)?;
    uri(config, node, id, &Attributes::default(), client.as_ref())
}

fn uri(
    config: &CsiConfig,
    node: &str,
    id: &str,
    attributes: &Attributes,
    client: Option<&NodeClient>,
) -> Result<String> {
    if let Some(uri) = &attributes.uri {
        return Ok(uri.clone());
    }
    if attributes.static_volume {
        let cluster = attributes.cluster.clone().ok_or_else(|| missing("clusterID"))?;
        let name = attributes.image.as_deref().unwrap_or(id);
        let Some(pool) = &attributes.pool else {
            return match self::cluster(config, &cluster)?.store {
                Some(_) => object(config, &cluster, name),
                None => Err(missing("pool")),
            };
        };
        return rbd(config, (&cluster, pool, attributes.namespace.as_deref(), name), client);
    }
    match VolumeId::parse(id) {
        None => Err(unknown(id)),
        Some(VolumeId::File { node: owner, directory, name }) => {
            if owner != node {
                let message =
                    format!("volume {id} is on the node {owner}, and this node is {node}");
                return Err(Error::new(ErrorKind::InUse, message).with_repair(
                    "schedule its pods to that node: the PersistentVolume needs its nodeAffinity",
                ));
            }
            let path = file_path(config, &directory, &name, id)?;
            let direct = if attributes.direct_io { "?direct=true" } else { "" };
            Ok(format!("file:{}{direct}", Encoded(path.as_os_str().as_bytes())))
        }
        Some(VolumeId::Rbd { cluster, pool, namespace, image }) => {
            rbd(config, (&cluster, &pool, Some(&namespace), &image), client)
        }
        Some(VolumeId::Object { cluster, name }) => object(config, &cluster, &name),
    }
}

/// Returns the URI of a volume that several nodes reach, for a process that is no node and has no secrets of the volume.
/// `clusters` is the path of the file of clusters. Returns `None` for the id of a file. Blocks as reading the file does.
///
/// # Errors
/// Returns `NotFound` for a cluster that is not in the file, and the errors of reading the file.
pub fn remote_uri(clusters: &Path, id: &VolumeId) -> Result<Option<String>> {
    let config = CsiConfig { clusters: clusters.to_owned(), ..CsiConfig::default() };
    match id {
        VolumeId::File { .. } => Ok(None),
        VolumeId::Rbd { cluster, pool, namespace, image } => {
            rbd(&config, (cluster, pool, Some(namespace), image), None).map(Some)
        }
        VolumeId::Object { cluster, name } => object(&config, cluster, name).map(Some),
    }
}

fn missing(attribute: &str) -> Error {
    let message = format!("a static volume needs the attribute {attribute}");
    Error::new(ErrorKind::InvalidArgument, message)
}

fn unknown(id: &str) -> Error {
    let message = format!("volume {id} does not exist: this driver did not make its id");
    Error::new(ErrorKind::NotFound, message).with_repair(
        "a static volume needs volumeAttributes: uri, or staticVolume, clusterID and pool",
    )
}

/// Returns the path of a file volume. `name` is one component of a path.
fn file_path(config: &CsiConfig, directory: &str, name: &str, id: &str) -> Result<PathBuf> {
    let base = config.directories.get(directory).ok_or_else(|| {
        let known: Vec<&str> = config.directories.keys().map(String::as_str).collect();
        let message = format!(
            "volume {id} is in the directory {directory:?}, which this node does not have; it has: {}",
            known.join(", ")
        );
        Error::new(ErrorKind::NotFound, message).with_repair("add it to [csi.directories]")
    })?;
    if name.contains('/') || name == "." || name == ".." || name.contains('\0') {
        return Err(unknown(id));
    }
    Ok(base.join(name))
}

/// Returns the URI of a pool of `cluster`, or of a namespace in it, with the client of `secrets`.
pub(crate) fn pool_uri(
    cluster: &Cluster,
    pool: &str,
    namespace: &str,
    secrets: &Secrets,
) -> String {
    let part = |text: &str| Encoded(text.as_bytes()).to_string();
    let slash = if namespace.is_empty() { "" } else { "/" };
    let options = cluster.options(secrets.client());
    format!("rbd:{}{slash}{}?{options}", part(pool), part(namespace))
}

fn rbd(
    config: &CsiConfig,
    (cluster, pool, namespace, image): (&str, &str, Option<&str>, &str),
    client: Option<&NodeClient>,
) -> Result<String> {
    let found = self::cluster(config, cluster)?;
    if found.store.is_some() {
        let message = format!("{cluster} is an object store, which has no pool {pool:?}");
        return Err(Error::new(ErrorKind::InvalidArgument, message)
            .with_repair("use the clusterID of a Ceph cluster, or no pool"));
    }
    let part = |text: &str| Encoded(text.as_bytes()).to_string();
    let namespace = namespace.unwrap_or(&found.rbd.rados_namespace);
    let namespace = match namespace {
        "" => String::new(),
        name => format!("{}/", part(name)),
    };
    let options = found.options(client.map(|client| (&*client.user, &*client.keyring)));
    Ok(format!("rbd:{}/{namespace}{}?{options}", part(pool), part(image)))
}

/// Returns the URI of a volume on an object store.
fn object(config: &CsiConfig, cluster: &str, name: &str) -> Result<String> {
    let Some(store) = self::cluster(config, cluster)?.store else {
        let message = format!("{cluster} is a Ceph cluster, not an object store");
        return Err(Error::new(ErrorKind::InvalidArgument, message)
            .with_repair("set the parameter pool, or use the clusterID of an object store"));
    };
    let (location, options) = store.split_once('?').unwrap_or((&store, ""));
    let question = if options.is_empty() { "" } else { "?" };
    let (location, name) = (location.trim_end_matches('/'), Encoded(name.as_bytes()));
    Ok(format!("{location}/{name}{question}{options}"))
}

/// Returns the entry of a cluster in the file of clusters.
///
/// # Errors
/// Returns `NotFound` for a cluster that is not in the file, and the errors of reading the file.
pub(crate) fn cluster(config: &CsiConfig, id: &str) -> Result<Cluster> {
    let mut known = clusters(&config.clusters)?;
    known.remove(id).ok_or_else(|| {
        let names: Vec<&str> = known.keys().map(String::as_str).collect();
        let message = format!(
            "the cluster {id:?} is not in {}; it has: {}",
            config.clusters.display(),
            names.join(", ")
        );
        Error::new(ErrorKind::NotFound, message)
            .with_repair("add the clusterID and its monitors to the file")
    })
}

/// Reads the file of clusters.
///
/// # Errors
/// Returns `InvalidArgument` if it is not a list of clusters, and the error of the read otherwise.
pub(crate) fn clusters(path: &Path) -> Result<BTreeMap<String, Cluster>> {
    let shown = path.display();
    let failed = |error| {
        Error::from_io(format!("cannot read the clusters in {shown}"), error).with_repair(
            "write a JSON list: [{\"clusterID\": \"ID\", \"monitors\": [\"HOST:PORT\"]}]",
        )
    };
    let length = std::fs::metadata(path).map_err(failed)?.len();
    if length > MAX_CLUSTERS {
        let message = format!("{shown} is longer than {MAX_CLUSTERS} bytes");
        return Err(Error::new(ErrorKind::InvalidArgument, message));
    }
    let text = std::fs::read(path).map_err(failed)?;
    let list: Vec<Cluster> = serde_json::from_slice(&text).map_err(|error| {
        let message = format!("{shown} is not a list of clusters: {error}");
        Error::new(ErrorKind::InvalidArgument, message)
    })?;
    list.iter().try_for_each(Cluster::check)?;
    Ok(list.into_iter().map(|cluster| (cluster.cluster_id.clone(), cluster)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(directory: &tempfile::TempDir) -> CsiConfig {
        let clusters = directory.path().join("clusters.json");
        let list = r#"[{"clusterID": "c1", "monitors": ["10.0.0.1:6789", "10.0.0.2:6789"],
            "rbd": {"radosNamespace": "tenant"}, "cephFS": {"subvolumeGroup": "x"}},
            {"clusterID": "s3", "store": "s3://bucket/prefix?endpoint=https://store:9000"},
            {"clusterID": "dir", "store": "dir:/srv/volumes/"}]"#;
        std::fs::write(&clusters, list).unwrap();
        let directories = [("fast".to_owned(), PathBuf::from("/srv/fast"))].into();
        CsiConfig { clusters, directories, ..CsiConfig::default() }
    }

    fn uri_of(id: &str, attributes: &Attributes) -> Result<String> {
        let directory = tempfile::tempdir().unwrap();
        uri(&config(&directory), "n1", id, attributes, None)
    }

    #[test]
    fn ids_of_the_driver_give_uris() {
        let plain = Attributes::default();
        assert_eq!(uri_of("file/n1/fast/a%20b", &plain).unwrap(), "file:/srv/fast/a%20b");
        assert_eq!(
            uri_of("rbd/c1/pool/ns/img", &plain).unwrap(),
            "rbd:pool/ns/img?config.mon_host=10.0.0.1:6789,10.0.0.2:6789"
        );
        assert_eq!(
            uri_of("object/s3/a%20b", &plain).unwrap(),
            "s3://bucket/prefix/a%20b?endpoint=https://store:9000"
        );
        assert_eq!(uri_of("object/dir/a", &plain).unwrap(), "dir:/srv/volumes/a");
        let direct = Attributes { direct_io: true, ..Attributes::default() };
        assert_eq!(uri_of("file/n1/fast/a", &direct).unwrap(), "file:/srv/fast/a?direct=true");
    }

    #[test]
    fn a_static_volume_of_ceph_csi_is_the_image_of_its_handle() {
        let attributes = Attributes {
            static_volume: true,
            cluster: Some("c1".into()),
            pool: Some("pool".into()),
            ..Attributes::default()
        };
        let uri = uri_of("my-image", &attributes).unwrap();
        assert!(uri.starts_with("rbd:pool/tenant/my-image?"), "{uri}");
        let on_objects = Some("dir".into());
        let objects = Attributes { cluster: on_objects, pool: None, ..attributes.clone() };
        assert_eq!(uri_of("my-volume", &objects).unwrap(), "dir:/srv/volumes/my-volume");
        let no_pool = Attributes { pool: None, ..attributes };
        assert!(uri_of("my-image", &no_pool).unwrap_err().message().contains("pool"));
    }

    #[test]
    fn a_mapped_volume_stays_the_same_when_the_file_of_clusters_is_changed() {
        use super::leads_to_same as same;

        let made = Attributes::default();
        let is_static = Attributes { static_volume: true, ..Attributes::default() };
        let with_uri = Attributes { uri: Some("rbd:p/i".into()), ..Attributes::default() };
        let (id, old) = ("rbd/c1/p//i", "rbd:p/i?config.mon_host=a,b&id=u&keyring=/k");
        let others = ["rbd:p/i?config.mon_host=b,c&id=v&keyring=/l", "rbd:p/i?config.mon_host=b"];
        for new in others.into_iter().chain([old]) {
            assert!(same(id, &made, old, new), "{new}");
            assert!(same("i", &is_static, old, new), "{new}");
            assert!(!same("i", &with_uri, old, new), "{new}");
        }
        // The id names the cluster, and that of a static volume does not.
        let moved = "rbd:p/i?config.mon_host=c,d&id=u&keyring=/k";
        assert!(same(id, &made, old, moved));
        assert!(!same("i", &is_static, old, moved));
        assert!(!same(id, &is_static, old, moved));
        for other in [
            "rbd:p/j?config.mon_host=a,b&id=u&keyring=/k",
            "rbd:p/n/i?config.mon_host=a,b&id=u&keyring=/k",
            "rbd:p/i?config.mon_host=a,b&id=u&keyring=/k&lock=shared",
        ] {
            assert!(!same(id, &made, old, other) && !same(id, &made, other, old), "{other}");
        }
        let shared = format!("{old}&lock=shared");
        assert!(same(id, &made, &shared, &format!("{moved}&lock=shared")));

        let (id, old) = ("object/s3/v", "s3://b/v?endpoint=http://h&credentials_file=/k");
        let renewed = "s3://b/v?endpoint=http://h&credentials_file=/l&hedge=50ms";
        let moved = "s3://b/v?endpoint=http://i&credentials_file=/k";
        assert!(same(id, &made, old, renewed) && same("v", &is_static, old, renewed));
        assert!(same(id, &made, old, moved) && !same("v", &is_static, old, moved));
        assert!(!same(id, &made, old, "s3://c/v?endpoint=http://h&credentials_file=/k"));
        // The file of clusters says nothing of files.
        assert!(!same("file/n/d/v", &made, "file:/d/v", "file:/d/v?direct=true"));
        assert!(!same("file/n/d/v", &made, "file:/d/v", "file:/e/v"));
    }

    #[test]
    fn an_image_that_is_no_snapshot_may_have_a_writer_beside_its_readers() {
        for (uri, expected) in [
            ("rbd:p/i?config.mon_host=a", false),
            ("rbd:p/i?keyring=/a@b", false),
            ("rbd:p/i@s?config.mon_host=a", true),
            ("s3://b/v?endpoint=http://h", true),
            ("file:/d/v", true),
        ] {
            assert_eq!(keeps_writers_away(uri), expected, "{uri}");
        }
    }

    #[test]
    fn only_images_are_written_by_several_nodes() {
        for (uri, expected) in [
            ("rbd:p/i", "rbd:p/i?lock=shared"),
            ("rbd:p/i?id=a", "rbd:p/i?id=a&lock=shared"),
            ("rbd:p/i?lock=shared", "rbd:p/i?lock=shared"),
            ("rbd:p/lock=shared", "rbd:p/lock=shared?lock=shared"),
        ] {
            assert_eq!(shared(uri.to_owned(), "v").unwrap(), expected);
        }
        let error = shared("file:/srv/a".to_owned(), "v").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    }

    #[test]
    fn a_cluster_has_monitors_or_an_object_store() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("clusters.json");
        for (entry, part) in [
            ("", "neither monitors nor a store"),
            (r#", "monitors": ["a"], "store": "s3://b""#, "neither monitors nor pools"),
            (r#", "store": "rbd:pool""#, "not the URI of an object store"),
        ] {
            std::fs::write(&path, format!(r#"[{{"clusterID": "c1"{entry}}}]"#)).unwrap();
            let error = clusters(&path).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidArgument);
            assert!(error.message().contains(part), "{error}");
        }
    }

    #[test]
    fn volumes_that_this_node_does_not_have() {
        let plain = Attributes::default();
        for (id, kind, part) in [
            ("fake", ErrorKind::NotFound, "did not make its id"),
            ("file/n2/fast/a", ErrorKind::InUse, "on the node n2"),
            ("file/n1/slow/a", ErrorKind::NotFound, "it has: fast"),
            ("file/n1/fast/..", ErrorKind::NotFound, "does not exist"),
            ("file/n1/fast/..%2Fa", ErrorKind::NotFound, "does not exist"),
            ("rbd/c2/pool//img", ErrorKind::NotFound, "it has: c1"),
            ("rbd/s3/pool//img", ErrorKind::InvalidArgument, "is an object store"),
            ("object/c1/a", ErrorKind::InvalidArgument, "is a Ceph cluster"),
        ] {
            let error = uri_of(id, &plain).unwrap_err();
            assert_eq!(error.kind(), kind, "{id}: {error}");
            assert!(error.message().contains(part), "{id}: {error}");
        }
    }
}
