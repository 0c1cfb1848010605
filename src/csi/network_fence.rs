//! CSI-Addons FenceController: cuts off all clients with certain addresses from a cluster, for an operator that knows
//! that the machines there must not write any more.
//!
//! - Fence, Unfence and List are served where the driver has the Controller service, GetFenceClients everywhere.
//! - Each call opens a connection of its own with the client of its secrets. The waiting connections of the controller
//!   are not used, because the fence can be for them.
//! - A fence that contains the address of this process is accepted, as by ceph-csi: after the loss of a site, an operator
//!   fences all of its nodes, also its own one. The monitors still serve a fenced client, so it can end the fence.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

use addons::fence as api;
use api::fence_controller_server::FenceController;
use cleat_backend::Registry;
use cleat_backend::claimant::Claimant;
use cleat_backend::network_fence::{AddressRange, NetworkFenceStore};
use cleat_core::error::{Error, ErrorKind, Result};
use cleat_csi_api::addons;
use cleat_node::csi_config::CsiConfig;
use tokio::time::{Instant, timeout_at};
use tonic::{Request, Response, Status};

use crate::driver::Driver;
use crate::secrets::Secrets;
use crate::source::{cluster, pool_uri};
use crate::threads::Threads;
use crate::{deadline, status};

/// The maximum number of calls at the same time. An operator makes one for each of its objects.
const MAX_THREADS: usize = 4;

/// The maximum number of ranges of a call.
const MAX_RANGES: usize = 256;

/// The shortest prefixes of ranges that can be fenced, for IPv4 and for IPv6. A larger range is more than a site, and
/// probably an error.
const MIN_BITS: (u8, u8) = (16, 48);

/// The maximum length of a parameter's value in bytes.
const MAX_VALUE: usize = 256;

/// The parameters, with their meaning. Errors list them.
const PARAMETERS: [(&str, &str); 2] =
    [("clusterID", "the cluster"), ("pool", "a pool of the cluster that the client may use")];

/// Parameters for other programs, which are accepted and have no effect here.
const FOREIGN_PREFIXES: [&str; 2] = ["csi.storage.k8s.io/", "csiaddons.openshift.io/"];

/// The FenceController service.
#[derive(Clone)]
pub(crate) struct NetworkFence {
    config: Arc<CsiConfig>,
    registry: Registry,
    is_controller: bool,
    threads: Threads,
}

impl NetworkFence {
    /// Creates the service of a driver.
    pub(crate) fn of(driver: &Driver) -> Self {
        let registry = driver.executor.registry();
        Self::new(Arc::clone(&driver.config), registry, driver.controller.is_some())
    }

    fn new(config: Arc<CsiConfig>, registry: Registry, is_controller: bool) -> Self {
        Self { config, registry, is_controller, threads: Threads::new(MAX_THREADS) }
    }

    /// Checks that this process is a controller.
    fn controller(&self) -> Result<(), Status> {
        if self.is_controller {
            return Ok(());
        }
        Err(Status::unimplemented("addresses are fenced by the controller, not by a node"))
    }

    /// Runs `work` with a new connection to the storage of a request.
    async fn call<T: Send + 'static>(
        &self,
        name: &'static str,
        storage: Storage,
        deadline: Instant,
        work: impl FnOnce(&dyn NetworkFenceStore) -> Result<T> + Send + 'static,
    ) -> Result<Response<T>, Status> {
        let this = self.clone();
        let work = move || {
            let uri = this.registry.store(&storage.uri(&this.config)?)?;
            let store = uri.connect_with(&Claimant::default(), storage.secrets.credentials())?;
            let missing = || {
                let message = format!("clients of {uri} cannot be fenced by their addresses");
                Error::new(ErrorKind::Unsupported, message)
            };
            work(store.network_fence().ok_or_else(missing)?)
        };
        let ended = timeout_at(deadline, self.threads.run(deadline, work)).await;
        let result = ended.unwrap_or_else(|_| {
            let message = format!("{name} continues in the background");
            Err(Error::new(ErrorKind::TimedOut, message).with_repair("repeat the call"))
        });
        result.map(Response::new).map_err(|error| {
            tracing::warn!("{name}: {}", error.report());
            status::of(&error)
        })
    }
}

fn checked<T>(result: Result<T>) -> Result<T, Status> {
    result.map_err(|error| status::of(&error))
}

#[tonic::async_trait]
impl FenceController for NetworkFence {
    async fn fence_cluster_network(
        &self,
        request: Request<api::FenceClusterNetworkRequest>,
    ) -> Result<Response<api::FenceClusterNetworkResponse>, Status> {
        self.controller()?;
        let deadline = deadline::of(request.metadata());
        let request = request.into_inner();
        let storage = checked(Storage::of(request.parameters, request.secrets))?;
        let ranges = checked(ranges(&request.cidrs))?;
        self.call("FenceClusterNetwork", storage, deadline, move |store| {
            store.fence(&ranges)?;
            tracing::info!(ranges = shown(&ranges), "fenced all clients with these addresses");
            Ok(api::FenceClusterNetworkResponse {})
        })
        .await
    }

    async fn unfence_cluster_network(
        &self,
        request: Request<api::UnfenceClusterNetworkRequest>,
    ) -> Result<Response<api::UnfenceClusterNetworkResponse>, Status> {
        self.controller()?;
        let deadline = deadline::of(request.metadata());
        let request = request.into_inner();
        let storage = checked(Storage::of(request.parameters, request.secrets))?;
        let ranges = checked(ranges(&request.cidrs))?;
        self.call("UnfenceClusterNetwork", storage, deadline, move |store| {
            store.unfence(&ranges)?;
            tracing::info!(ranges = shown(&ranges), "ended the fence of these addresses");
            Ok(api::UnfenceClusterNetworkResponse {})
        })
        .await
    }

    async fn list_cluster_fence(
        &self,
        request: Request<api::ListClusterFenceRequest>,
    ) -> Result<Response<api::ListClusterFenceResponse>, Status> {
        self.controller()?;
        let deadline = deadline::of(request.metadata());
        let request = request.into_inner();
        let storage = checked(Storage::of(request.parameters, request.secrets))?;
        self.call("ListClusterFence", storage, deadline, |store| {
            Ok(api::ListClusterFenceResponse { cidrs: cidrs(store.fenced()?) })
        })
        .await
    }

    /// The addresses are those of a new connection from this process. The workers of this node connect in the same
    /// network namespace, and so with the same addresses. A new connection also gives an answer while nothing is mapped,
    /// which is when an operator reads it.
    async fn get_fence_clients(
        &self,
        request: Request<api::GetFenceClientsRequest>,
    ) -> Result<Response<api::GetFenceClientsResponse>, Status> {
        let deadline = deadline::of(request.metadata());
        let request = request.into_inner();
        let storage = checked(Storage::of(request.parameters, request.secrets))?;
        self.call("GetFenceClients", storage, deadline, |store| {
            let client = store.client()?;
            let addresses = cidrs(client.addresses.into_iter().map(AddressRange::of));
            let clients = vec![api::ClientDetails { id: client.storage, addresses }];
            Ok(api::GetFenceClientsResponse { clients })
        })
        .await
    }
}

/// The storage of a request, and the client that connects to it.
struct Storage {
    cluster: String,
    pool: Option<String>,
    secrets: Secrets,
}

impl Storage {
    /// Takes the parameters and secrets of a request.
    fn of(
        mut parameters: BTreeMap<String, String>,
        secrets: BTreeMap<String, String>,
    ) -> Result<Self> {
        let secrets = Secrets::take(secrets)?;
        let is_known = |key: &str| {
            PARAMETERS.iter().any(|(known, _)| *known == key)
                || FOREIGN_PREFIXES.iter().any(|prefix| key.starts_with(prefix))
        };
        if !parameters.keys().all(|key| is_known(key)) {
            let known: Vec<String> =
                PARAMETERS.iter().map(|(key, meaning)| format!("{key} ({meaning})")).collect();
            let message =
                format!("a parameter is not known; the parameters are {}", known.join(", "));
            return Err(invalid(message));
        }
        if parameters.values().any(|value| value.len() > MAX_VALUE) {
            return Err(invalid(format!("a parameter is longer than {MAX_VALUE} bytes")));
        }
        parameters.retain(|_, value| !value.is_empty());
        let cluster = parameters
            .remove("clusterID")
            .ok_or_else(|| invalid("the parameter clusterID is missing".to_owned()))?;
        Ok(Self { cluster, pool: parameters.remove("pool"), secrets })
    }

    /// Returns the URI of a store in the cluster. Without a pool in the parameters, it is the first pool of the cluster
    /// in the file of clusters. A namespace is not part of it: its check is a read, which fails for a fenced client.
    fn uri(&self, config: &CsiConfig) -> Result<String> {
        let known = cluster(config, &self.cluster).map_err(|error| match error.kind() {
            ErrorKind::NotFound => {
                invalid(format!("the clusterID {:?} is not known", self.cluster))
                    .with_repair("add it and its monitors to the file that csi.clusters names")
                    .with_source(error)
            }
            _ => error,
        })?;
        if known.store.is_some() {
            let message = format!("{} is an object store, which knows no addresses", self.cluster);
            return Err(Error::new(ErrorKind::Unsupported, message)
                .with_repair("fence the clients of a volume: cleat fence"));
        }
        let listed = known.pools.first().map(|pool| pool.split('/').next().unwrap_or(pool));
        let pool = self.pool.as_deref().or(listed).ok_or_else(|| {
            let message = format!(
                "the parameters name no pool, and {} has no pools of the cluster {}",
                config.clusters.display(),
                self.cluster
            );
            Error::new(ErrorKind::Unsupported, message).with_repair(
                "add \"pools\": [\"POOL\"] to the cluster in the file, or set the parameter pool",
            )
        })?;
        Ok(pool_uri(&known, pool, "", &self.secrets))
    }
}

/// Checks the ranges of a request.
///
/// # Errors
/// Returns `InvalidArgument`, with the reason, for no ranges, too many, duplicates, and ranges that must not be fenced.
fn ranges(cidrs: &[api::Cidr]) -> Result<Vec<AddressRange>> {
    if cidrs.is_empty() || cidrs.len() > MAX_RANGES {
        let message = format!("the request has {} ranges, not 1 to {MAX_RANGES}", cidrs.len());
        return Err(invalid(message));
    }
    let mut ranges = BTreeSet::new();
    for cidr in cidrs {
        let range: AddressRange = cidr.cidr.parse()?;
        check(range)?;
        if !ranges.insert(range) {
            return Err(invalid(format!("the request has the range {range} twice")));
        }
    }
    Ok(ranges.into_iter().collect())
}

/// Refuses ranges that no client has, or that have the clients of more than a site.
fn check(range: AddressRange) -> Result<()> {
    let (first, (v4, v6)) = (range.first(), MIN_BITS);
    let min = if first.is_ipv4() { v4 } else { v6 };
    if range.bits() < min {
        let message = format!("{range} has too many addresses to be fenced");
        return Err(invalid(message)
            .with_repair(format!("name ranges of at most /{v4} (IPv4) or /{v6} (IPv6)")));
    }
    let is_of_no_client = match first {
        IpAddr::V4(first) => first.is_unspecified() || first.is_multicast() || first.is_broadcast(),
        IpAddr::V6(first) => {
            first.is_unspecified() || first.is_multicast() || first.to_ipv4_mapped().is_some()
        }
    };
    if is_of_no_client {
        return Err(invalid(format!("{range} contains no address of a client"))
            .with_repair("name unicast addresses, those of IPv4 as A.B.C.D/BITS"));
    }
    Ok(())
}

fn cidrs(ranges: impl IntoIterator<Item = AddressRange>) -> Vec<api::Cidr> {
    ranges.into_iter().map(|range| api::Cidr { cidr: range.to_string() }).collect()
}

fn shown(ranges: &[AddressRange]) -> String {
    ranges.iter().map(AddressRange::to_string).collect::<Vec<_>>().join(", ")
}

fn invalid(message: String) -> Error {
    Error::new(ErrorKind::InvalidArgument, message)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use tonic::Code;

    use super::*;

    static REGISTRY: Registry = Registry::new(&[cleat_backend::file::BACKEND]);

    fn list(texts: &[&str]) -> Vec<api::Cidr> {
        texts.iter().map(|text| api::Cidr { cidr: (*text).to_owned() }).collect()
    }

    fn map(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
        pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
    }

    fn config(directory: &tempfile::TempDir) -> CsiConfig {
        let clusters = directory.path().join("clusters.json");
        let list = r#"[{"clusterID": "c1", "monitors": ["10.0.0.1:6789"], "pools": ["p/n", "q"],
            "rbd": {"radosNamespace": "tenant"}}, {"clusterID": "c2", "monitors": ["10.0.0.2:6789"]}]"#;
        std::fs::write(&clusters, list).unwrap();
        CsiConfig { clusters, ..CsiConfig::default() }
    }

    #[test]
    fn ranges_are_checked() {
        let texts = |ranges: Vec<AddressRange>| -> Vec<String> {
            ranges.iter().map(AddressRange::to_string).collect()
        };
        let good = ["10.2.0.0/16", "10.1.2.3/32", "127.0.0.2/32", "FD00:1::/48"];
        assert_eq!(
            texts(ranges(&list(&good)).unwrap()),
            ["10.1.2.3/32", "10.2.0.0/16", "127.0.0.2/32", "fd00:1::/48"]
        );
        let many: Vec<String> =
            (0..=MAX_RANGES).map(|i| format!("10.1.{}.{}/32", i >> 8, i & 255)).collect();
        let many: Vec<&str> = many.iter().map(String::as_str).collect();
        assert_eq!(ranges(&list(&many[1..])).unwrap().len(), MAX_RANGES);
        let long = "1".repeat(100_000);
        for (texts, part) in [
            (&[][..], "has 0 ranges, not 1 to 256"),
            (&many, "has 257 ranges"),
            (&["10.1.2.3"], "is not a range"),
            (&[&*long], "longer than"),
            (&["10.1.2.3/24"], "not the first address"),
            (&["0.0.0.0/0"], "too many addresses"),
            (&["10.0.0.0/15"], "too many addresses"),
            (&["::/0"], "too many addresses"),
            (&["fd00::/47"], "too many addresses"),
            (&["0.0.0.0/32"], "no address of a client"),
            (&["::/128"], "no address of a client"),
            (&["224.0.0.1/32"], "no address of a client"),
            (&["ff02::1/128"], "no address of a client"),
            (&["255.255.255.255/32"], "no address of a client"),
            (&["::ffff:10.1.2.3/128"], "no address of a client"),
            (&["10.1.2.3/32", "10.1.2.0/24", "10.1.2.3/32"], "10.1.2.3/32 twice"),
            (&["fd00::7/128", "FD00:0::7/128"], "fd00::7/128 twice"),
        ] {
            let error = ranges(&list(texts)).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
            assert!(error.message().contains(part) && error.message().len() < 200, "{error}");
        }
    }

    proptest! {
        #[test]
        fn accepted_ranges_are_small_and_different(texts in proptest::collection::vec(
            "(10|127|224|0)\\.[0-3]\\.0\\.[0-3]/(16|8|30|32)|[fF][dDfF]00::[0-2]/(48|127|128)", 0..5,
        )) {
            let cidrs: Vec<api::Cidr> = texts.iter().map(|text| api::Cidr { cidr: text.clone() }).collect();
            if let Ok(ranges) = ranges(&cidrs) {
                prop_assert!(ranges.len() == cidrs.len() && !ranges.is_empty());
                prop_assert!(ranges.iter().collect::<BTreeSet<_>>().len() == ranges.len());
                prop_assert!(ranges.iter().all(|range| range.count() <= 1 << 80));
                prop_assert!(ranges.iter().all(|range| !range.first().is_multicast()));
            }
        }
    }

    #[test]
    fn the_pool_is_that_of_the_parameters_or_the_first_of_the_cluster() {
        let directory = tempfile::tempdir().unwrap();
        let config = config(&directory);
        let uri = |pairs: &[(&str, &str)]| Storage::of(map(pairs), map(&[]))?.uri(&config);
        let foreign = ("csiaddons.openshift.io/networkfence-secret-name", "s");
        assert_eq!(
            uri(&[("clusterID", "c1"), foreign]).unwrap(),
            "rbd:p?config.mon_host=10.0.0.1:6789"
        );
        let named = uri(&[("clusterID", "c1"), ("pool", "a b")]).unwrap();
        assert_eq!(named, "rbd:a%20b?config.mon_host=10.0.0.1:6789");
        let long = "x".repeat(MAX_VALUE + 1);
        for (pairs, kind, part) in [
            (&[][..], ErrorKind::InvalidArgument, "clusterID is missing"),
            (&[("clusterID", "")], ErrorKind::InvalidArgument, "clusterID is missing"),
            (&[("clusterID", "c9")], ErrorKind::InvalidArgument, "\"c9\" is not known"),
            (&[("clusterID", &*long)], ErrorKind::InvalidArgument, "longer than 256"),
            (&[("clusterID", "c1"), ("Pool", "p")], ErrorKind::InvalidArgument, "pool (a pool"),
            (&[("clusterID", "c2")], ErrorKind::Unsupported, "no pools of the cluster c2"),
        ] {
            let error = uri(pairs).unwrap_err();
            assert_eq!(error.kind(), kind, "{error}");
            assert!(error.message().contains(part), "{error}");
        }
        let secrets = map(&[("userID", "csi"), ("userKey", "AQ==")]);
        let storage = Storage::of(map(&[("clusterID", "c1")]), secrets).unwrap();
        assert!(storage.uri(&config).unwrap().contains("&id=csi&"));
        let no_key = Storage::of(map(&[("clusterID", "c1")]), map(&[("userID", "csi")]));
        assert_eq!(no_key.err().unwrap().kind(), ErrorKind::InvalidArgument);
    }

    #[tokio::test]
    async fn only_a_controller_fences() {
        let directory = tempfile::tempdir().unwrap();
        let config = Arc::new(config(&directory));
        let fence = |parameters: &[(&str, &str)], cidrs: &[&str]| {
            let (parameters, cidrs) = (map(parameters), list(cidrs));
            Request::new(api::FenceClusterNetworkRequest {
                parameters,
                cidrs,
                ..Default::default()
            })
        };
        let node = NetworkFence::new(Arc::clone(&config), REGISTRY, false);
        let refused = node.fence_cluster_network(fence(&[], &[])).await.unwrap_err();
        assert_eq!(refused.code(), Code::Unimplemented);
        let refused =
            node.unfence_cluster_network(Request::new(Default::default())).await.unwrap_err();
        assert_eq!(refused.code(), Code::Unimplemented);
        let refused = node.list_cluster_fence(Request::new(Default::default())).await.unwrap_err();
        assert_eq!(refused.code(), Code::Unimplemented);
        let refused = node.get_fence_clients(Request::new(Default::default())).await.unwrap_err();
        assert_eq!(refused.code(), Code::InvalidArgument);

        let controller = NetworkFence::new(config, REGISTRY, true);
        for (parameters, cidrs, code) in [
            (&[][..], &["10.1.2.3/32"][..], Code::InvalidArgument),
            (&[("clusterID", "c1")], &[], Code::InvalidArgument),
            (&[("clusterID", "c2")], &["10.1.2.3/32"], Code::FailedPrecondition),
            // The backends of this test have no RBD.
            (&[("clusterID", "c1")], &["10.1.2.3/32"], Code::InvalidArgument),
        ] {
            let refused = controller.fence_cluster_network(fence(parameters, cidrs)).await;
            assert_eq!(refused.unwrap_err().code(), code, "{parameters:?} {cidrs:?}");
        }
    }
}
