//! The Helm chart in `deploy/helm`: compared with the kustomizations and with what the program prints, and on a real API
//! server.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::Command;

use cleat_grants::object::Generation;
use cleat_kube::crd;
use cleat_kube::rights::{self, Extra};
use cleat_node::config::{Config, Listen};
use k8s_openapi::api::core::v1::PersistentVolume;
use serde_json::{Value, json};

use crate::cluster::installed::{DRIVER, snapshot_definitions};
use crate::cluster::objects::{apply, check, find};
use crate::control_plane::{ControlPlane, NAMESPACE};
use crate::deploy::{
    DIRECTORIES, build, build_own, check_arguments, check_references, controller, daemon,
    documents, tool,
};
use crate::fixture::{Controller, World, finalizer, run_on};
use crate::monitoring;

const CHART: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/deploy/helm/cleat");

/// The values that give the objects of `deploy/overlays/rbd`.
pub(crate) const RBD: &str =
    concat!(env!("CARGO_MANIFEST_DIR"), "/deploy/helm/cleat/values-rbd.yaml");

/// The values that give the objects of `deploy/overlays/object`.
const OBJECT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/deploy/helm/cleat/values-object.yaml");

/// The values that give the objects of `deploy/overlays/all`.
const ALL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/deploy/helm/cleat/values-all.yaml");

/// The values that give the objects of the component `secrets`.
pub(crate) const SECRETS: &str =
    "secrets.read[0].namespace=rook-ceph,secrets.read[0].names[0]=rook-csi-rbd-provisioner";

/// Runs helm, and returns what it prints, or its errors. Its files are in `home`.
fn helm(home: &Path, arguments: &[&str]) -> Result<String, String> {
    let mut command = Command::new(tool("helm"));
    command.args(["--namespace", NAMESPACE]).args(arguments).env("HOME", home);
    command.env("KUBECONFIG", home.join("kubeconfig"));
    for name in ["HELM_CACHE_HOME", "HELM_CONFIG_HOME", "HELM_DATA_HOME"] {
        command.env(name, home.join("helm"));
    }
    let output = command.output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    if output.status.success() { Ok(text(output.stdout)) } else { Err(text(output.stderr)) }
}

/// Renders the chart with the Namespace.
pub(crate) fn render(arguments: &[&str]) -> Result<Vec<Value>, String> {
    let home = tempfile::tempdir().unwrap();
    let template = ["template", "cleat", CHART, "--set", "namespace.create=true"];
    let text = helm(home.path(), &[&template, arguments].concat())?;
    let objects: Vec<Value> = serde_saphyr::from_multiple(&text).unwrap();
    Ok(objects.into_iter().filter(|object| !object.is_null()).collect())
}

/// Returns objects by kind, namespace and name.
fn by_name(objects: Vec<Value>) -> BTreeMap<String, Value> {
    let mut all = BTreeMap::new();
    for object in objects {
        let metadata = &object["metadata"];
        let name = format!("{} {} {}", object["kind"], metadata["namespace"], metadata["name"]);
        assert!(all.insert(name.clone(), object).is_none(), "there are two of {name}");
    }
    all
}

/// Removes the suffix that kustomize adds to the names of the objects that it generates: ten characters.
fn without_suffixes(objects: &[Value]) -> Vec<Value> {
    let mut text = Value::from(objects).to_string();
    let is_generated = |object: &&Value| {
        let (kind, name) = (&object["kind"], object["metadata"]["name"].as_str().unwrap());
        (kind == "ConfigMap" || kind == "Secret")
            && name.rsplit_once('-').is_some_and(|(_, suffix)| suffix.len() == 10)
    };
    for object in objects.iter().filter(is_generated) {
        let name = object["metadata"]["name"].as_str().unwrap();
        text = text.replace(name, name.rsplit_once('-').unwrap().0);
    }
    serde_json::from_str(&text).unwrap()
}

/// Removes what only the chart has: the CRD is kept, and a hash in the pods of the nodes stands for kustomize's suffix.
fn without_annotations(objects: &mut [Value]) {
    for object in objects {
        let (metadata, annotation) = match object["kind"].as_str().unwrap() {
            "CustomResourceDefinition" => (&mut object["metadata"], "helm.sh/resource-policy"),
            "DaemonSet" if object["metadata"]["name"] == "cleat-node" => {
                (&mut object["spec"]["template"]["metadata"], "cleat.csi.storage/config")
            }
            _ => continue,
        };
        let annotations = metadata.as_object_mut().unwrap().remove("annotations").unwrap();
        let names: Vec<&String> = annotations.as_object().unwrap().keys().collect();
        assert_eq!(names, [annotation]);
    }
}

/// Removes the configuration from its ConfigMap, and returns it as the daemon reads it.
fn take_config(objects: &mut BTreeMap<String, Value>) -> Config {
    let is_config = |object: &&mut Value| !object["data"]["cleat.toml"].is_null();
    let map = objects.values_mut().find(is_config).unwrap();
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), map["data"]["cleat.toml"].take().as_str().unwrap()).unwrap();
    Config::load(Some(file.path())).unwrap()
}

fn check_equal(mut chart: Vec<Value>, kustomization: &[Value]) {
    without_annotations(&mut chart);
    let mut kustomization = without_suffixes(kustomization);
    // The values of a release are no place for keys.
    kustomization.retain(|object| object["kind"] != "Secret");
    let (mut chart, mut kustomization) = (by_name(chart), by_name(kustomization));
    assert_eq!(take_config(&mut chart), take_config(&mut kustomization));
    assert_eq!(chart.keys().collect::<Vec<_>>(), kustomization.keys().collect::<Vec<_>>());
    for (name, object) in &kustomization {
        assert_eq!(&chart[name], object, "{name}: left is the chart, right the kustomization");
    }
}

#[test]
fn chart_and_kustomizations_have_the_same_objects() {
    check_equal(render(&[]).unwrap(), &build("base"));
    check_equal(render(&["--values", RBD]).unwrap(), &build("overlays/rbd"));
    check_equal(render(&["--values", OBJECT]).unwrap(), &build("overlays/object"));
    let remediation = render(&["--set", "remediation.enabled=true"]).unwrap();
    check_equal(remediation, &build("overlays/remediation"));
    let monitoring = render(&["--set", "monitoring.enabled=true"]).unwrap();
    check_equal(monitoring, &build("overlays/monitoring"));
    check_equal(render(&["--values", ALL]).unwrap(), &build("overlays/all"));
    let own = json!({ "resources": ["../overlays/rbd"], "components": ["../components/secrets"] });
    let own = build_own(&own);
    check_references(&own);
    check_equal(render(&["--values", RBD, "--set", SECRETS]).unwrap(), &own);
}

#[test]
fn the_chart_has_what_the_program_prints() {
    let read = |name: &str| std::fs::read_to_string(Path::new(CHART).join(name)).unwrap();
    let repair = "run: cleat controller --print-crd > deploy/helm/cleat/files/volumegrants.yaml";
    assert!(read("files/volumegrants.yaml") == crd::yaml(), "{repair}");
    let printed = rights::yaml("{{ .Release.Namespace }}", Extra::default()).unwrap();
    let repair = "run: cleat controller --print-rights '{{ .Release.Namespace }}' > deploy/helm/cleat/templates/rights.yaml";
    assert!(read("templates/rights.yaml") == printed, "{repair}");

    let usual = by_name(render(&[]).unwrap());
    for (value, printed) in [
        ("controller.attachDetach=true", rights::attach_detach(NAMESPACE).to_vec()),
        ("remediation.enabled=true", rights::remediation(NAMESPACE)),
    ] {
        let mut objects = by_name(render(&["--set", value]).unwrap());
        objects.retain(|name, _| !usual.contains_key(name));
        assert_eq!(objects, by_name(printed), "{value}");
    }
}

#[test]
fn wrong_values_are_refused_with_the_place_and_the_cause() {
    for (values, message) in [
        ("nodes=1", "at '': additional properties 'nodes' not allowed"),
        ("controller.replica=3", "at '/controller': additional properties 'replica' not allowed"),
        ("controller.replicas=0", "at '/controller/replicas': minimum: got 0, want 1"),
        ("remediation.timeout=14", "at '/remediation/timeout': minimum: got 14, want 15"),
        ("controller.replicas=many", "at '/controller/replicas': got string, want integer"),
        ("node.config.csi.grants=false", "at '/node/config/csi': additional properties 'grants'"),
        ("monitoring.enabled=true,monitoring.interval=often", "at '/monitoring/interval'"),
        ("volumeAttributesClasses.slow.iops=1", "additional properties 'iops' not allowed"),
        ("directories.fast=mnt", "at '/directories/fast': 'mnt' does not match pattern"),
        ("grants=false,controller.attachDetach=true", "needs a controller: set grants=true"),
        ("grants=false,remediation.enabled=true", "needs a controller: set grants=true"),
        (
            "controller.replicas=1,controller.podDisruptionBudget.enabled=true",
            "set controller.replicas=2",
        ),
        ("controller.replicas=1,remediation.enabled=true", "set controller.replicas=2"),
        ("storageClasses.fast.volumeBindingMode=Immediate", "set images.enabled=true"),
    ] {
        let refused = render(&["--set", values]).unwrap_err();
        assert!(refused.contains(message), "{values}: {refused}");
    }
    // The controller has a role for events there.
    let refused = render(&["--namespace", "default"]).unwrap_err();
    assert!(refused.contains("--namespace cleat-system"), "{refused}");
    let home = tempfile::tempdir().unwrap();
    let report = helm(home.path(), &["lint", "--strict", CHART, "--values", RBD]).unwrap();
    assert!(report.contains("0 chart(s) failed"), "{report}");
}

/// Checks that each value that the schema permits is in `values.yaml`, with its default.
fn check_defaults(schema: &Value, values: &Value, path: &str) {
    for (name, part) in schema["properties"].as_object().into_iter().flatten() {
        let path = format!("{path}.{name}");
        // Helm gives global values to all charts, and the daemon has its own defaults.
        if ![".global", ".node.config"].contains(&&*path) {
            assert!(!values[name].is_null(), "values.yaml has no {path}");
            check_defaults(part, &values[name], &path);
        }
    }
}

#[test]
fn each_value_of_the_schema_has_a_default() {
    let schema = std::fs::read(Path::new(CHART).join("values.schema.json")).unwrap();
    let values = documents(&Path::new(CHART).join("values.yaml"));
    check_defaults(&serde_json::from_slice(&schema).unwrap(), &values[0], "");
}

/// Returns the keys of `systemd/cleat.toml`, which has all of them, each as TABLE.KEY.
fn keys_of_the_daemon() -> BTreeSet<String> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("systemd/cleat.toml");
    let text = std::fs::read_to_string(path).unwrap();
    let mut table = "";
    let mut keys = BTreeSet::new();
    for line in text.lines() {
        if let Some(name) = line.strip_prefix('[') {
            table = name.trim_end_matches(']');
        } else if let Some((key, _)) =
            line.strip_prefix('#').and_then(|line| line.split_once(" = "))
            && key.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_')
        {
            keys.insert(format!("{table}.{key}"));
        }
    }
    keys
}

/// `node.config` takes each key of the daemon that the chart does not write itself.
#[test]
fn the_configuration_of_the_daemon_is_complete_in_the_schema() {
    let of_chart = |key: &str| {
        let (table, name) = key.split_once('.').unwrap();
        let own = ["log.level", "workers.cgroup", "workers.upgrade_at_start"];
        // The pod decides about what is outside of all tables: directories, sockets, the name of the node.
        table.is_empty()
            || table == "metrics"
            || (table == "csi" && name != "force_revoked_after")
            || own.contains(&key)
    };
    let mut wanted = keys_of_the_daemon();
    assert!(wanted.len() > 30, "{wanted:?}");
    wanted.retain(|key| !of_chart(key));
    let schema = std::fs::read(Path::new(CHART).join("values.schema.json")).unwrap();
    let schema: Value = serde_json::from_slice(&schema).unwrap();
    let tables = &schema["properties"]["node"]["properties"]["config"]["properties"];
    let keys = tables.as_object().unwrap().iter().flat_map(|(table, schema)| {
        let keys = schema["properties"].as_object().unwrap().keys();
        keys.map(move |key| format!("{table}.{key}"))
    });
    assert_eq!(keys.collect::<BTreeSet<_>>(), wanted);
}

/// Values that differ from the defaults, in all parts of the chart.
fn all_values() -> Value {
    let toleration = json!({ "key": "dedicated", "operator": "Exists" });
    json!({
        "image": { "repository": "registry.test/cleat", "tag": "1.2.3", "pullPolicy": "Always" },
        "imagePullSecrets": ["registry"],
        "kubeletDirectory": "/data/kubelet",
        "directories": { "fast": "/mnt/fast" },
        "secrets": { "read": [{ "namespace": "default" }] },
        "ceph": { "secretName": "ceph", "controllerSecretName": "ceph-of-controller" },
        "storageClasses": {
            "cleat-local": null,
            "fast": { "parameters": { "directory": "fast" }, "isDefault": true, "reclaimPolicy": "Retain",
                      "mountOptions": ["noatime"] },
        },
        "volumeSnapshotClasses": { "cleat": { "deletionPolicy": "Retain", "parameters": { "a": "b" } } },
        "controller": {
            "attachDetach": true, "logLevel": "debug", "extraArgs": ["--release-timeout=60"], "port": 9000,
            "tolerations": [toleration], "podDisruptionBudget": { "enabled": true },
            "networkPolicy": { "enabled": false },
        },
        "node": {
            "logLevel": "debug", "metricsPort": 9001, "maxUnavailable": "10%", "priorityClassName": "",
            "config": {
                "map": { "connections": 2 }, "limits": { "mappings": 65_536 },
                "cache": { "directory": "/var/lib/cleat/cache", "volume_bytes": "64M", "bucket_bytes": "128M" },
            },
        },
        "remediation": { "enabled": true, "timeout": 20, "limit": 3, "dryRun": true },
        "provisioner": { "extraArgs": ["--v=5"] },
        "snapshotter": { "enabled": true },
        "images": {
            "enabled": true, "replicas": 3, "tolerations": [toleration],
            "provisioner": { "extraArgs": ["--v=5"] },
            "csiAddons": { "enabled": true, "managerNamespace": "addons", "extraArgs": ["--v=5"] },
        },
        "volumeAttributesClasses": { "slow": { "parameters": { "iops": "10" } } },
        "monitoring": { "enabled": true, "interval": "10s", "labels": { "release": "prometheus" } },
    })
}

/// Renders the chart with [`all_values`], and checks that its parts fit.
fn render_all() -> Vec<Value> {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), all_values().to_string()).unwrap();
    let objects = render(&["--values", file.path().to_str().unwrap()]).unwrap();
    check_references(&objects);
    check_arguments(&controller(&objects));
    let pod = &daemon(&objects)["spec"]["template"]["spec"];
    let init = json!(["mkdir", "-p", "/mnt/fast", "/var/lib/cleat/volumes"]);
    assert_eq!(pod["initContainers"][0]["command"], init);
    assert_eq!(pod["containers"][0]["image"], "registry.test/cleat:1.2.3");
    let text = pod.to_string();
    for path in ["/data/kubelet", "/mnt/fast"] {
        assert!(text.contains(&format!("\"path\":\"{path}\"")), "{path} in {text}");
    }
    for sidecars in ["cleat-files", "cleat-images"] {
        let set = objects.iter().find(|object| {
            object["metadata"]["name"] == sidecars && object["spec"]["template"].is_object()
        });
        let volume = &set.unwrap()["spec"]["template"]["spec"]["volumes"][0]["hostPath"]["path"];
        assert_eq!(volume, "/data/kubelet/plugins/cleat.csi.storage", "{sidecars}");
    }
    for probe in ["livenessProbe", "readinessProbe"] {
        assert_eq!(pod["containers"][0][probe]["httpGet"]["port"], 9001);
    }
    let config = take_config(&mut by_name(objects.clone()));
    assert_eq!(config.metrics.listen, Listen::Tcp("[::]:9001".parse().unwrap()));
    assert_eq!(config.csi.socket(), Path::new("/data/kubelet/plugins/cleat.csi.storage/csi.sock"));
    assert_eq!(config.csi.directories["fast"], Path::new("/mnt/fast"));
    assert_eq!((config.log.level.as_str(), config.map.connections), ("debug", 2));
    assert_eq!(config.limits.mappings, 65_536);
    assert_eq!(config.cache.directory.as_deref(), Some(Path::new("/var/lib/cleat/cache")));
    objects
}

/// Without grants, the claims of images protect them: there is no controller, and nothing is attached.
#[test]
fn without_grants_there_is_no_controller() {
    let objects = render(&["--set", "grants=false"]).unwrap();
    assert!(objects.iter().all(|object| object["kind"] != "Deployment"));
    let driver = objects.iter().find(|object| object["kind"] == "CSIDriver").unwrap();
    assert_eq!(driver["spec"]["attachRequired"], false);
    assert!(!take_config(&mut by_name(objects)).csi.grants);
}

/// Returns a directory with the newest chart in the history that differs from this one.
fn previous_chart() -> tempfile::TempDir {
    const PATH: &str = "deploy/helm/cleat";
    let git = |arguments: &[&str]| {
        let mut command = Command::new("git");
        command.args(arguments).current_dir(env!("CARGO_MANIFEST_DIR"));
        command.output().unwrap()
    };
    let commits = git(&["log", "--format=%H", "--", PATH]).stdout;
    let commits = String::from_utf8(commits).unwrap();
    let differs = |commit: &&str| !git(&["diff", "--quiet", commit, "--", PATH]).status.success();
    let previous = commits.lines().find(differs).expect("the history has an earlier chart");
    let archive = git(&["archive", "--format=tar", previous, PATH]);
    assert!(archive.status.success(), "{}", String::from_utf8_lossy(&archive.stderr));
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("chart.tar");
    std::fs::write(&file, archive.stdout).unwrap();
    let unpacked =
        Command::new("tar").arg("-xf").arg(file).arg("-C").arg(directory.path()).status();
    assert!(unpacked.unwrap().success());
    directory
}

/// A volume that a pod on a node uses: attached by a real controller, with the rights that the release gives it.
struct Used {
    volume: String,
    attachment: String,
    node: String,
    generation: Generation,
}

const HANDLE: &str = "shared/v";

impl Used {
    async fn start(world: &World) -> Self {
        let node = world.node("a").await;
        let volume = world.volume("used", HANDLE).await;
        let attachment = world.attach(&volume, &node).await;
        let generation = world.attached(&attachment).await;
        world.mount(HANDLE, &node, generation).await;
        Self { volume, attachment, node, generation }
    }

    /// Asserts that nothing has changed for the node that uses the volume.
    async fn check(&self, world: &World) {
        let grant = world.grant(HANDLE).await.unwrap();
        assert_eq!(grant.metadata.deletion_timestamp, None);
        let grant = grant.stored().grant;
        let holder = grant.holder(&self.node).unwrap();
        assert_eq!((holder.generation, holder.revoked), (self.generation, false));
        let volume = world.all::<PersistentVolume>().get(&self.volume).await.unwrap();
        assert_eq!(volume.metadata.deletion_timestamp, None);
        let attachment = world.attachment(&self.attachment).await.unwrap();
        assert_eq!(attachment.metadata.deletion_timestamp, None);
        assert!(attachment.status.is_some_and(|status| status.attached));
        for finalizers in [volume.metadata.finalizers, attachment.metadata.finalizers] {
            assert!(finalizers.unwrap_or_default().contains(&finalizer(DRIVER)));
        }
    }

    /// Ends the use.
    async fn end(&self, world: &World) {
        world.detach(&self.attachment).await;
        world.revoked(HANDLE, &self.node).await;
        world.release(HANDLE, &self.node, self.generation).await;
        world.gone(&self.attachment).await;
    }
}

/// Starts a controller with the rights that the release gives it.
async fn start_controller(world: &World) -> Controller {
    world.plane.make_controller_kubeconfig(NAMESPACE, "controller").await;
    world.controller()
}

/// Installs the chart before this one, and this one over it, while a volume is in use.
async fn upgrade(world: &World, usual: &[Value]) -> Used {
    let home = world.plane.directory();
    let previous = previous_chart();
    let previous = previous.path().join("deploy/helm/cleat");
    helm(home, &["install", "cleat", previous.to_str().unwrap()]).unwrap();
    let controller = start_controller(world).await;
    let used = Used::start(world).await;
    helm(home, &["upgrade", "cleat", CHART]).unwrap();
    for object in usual {
        assert!(find(&world.client, object).await.is_some(), "{object} does not exist");
    }
    used.check(world).await;
    // The same controller still has its rights.
    let volume = world.volume("other", "shared/other").await;
    let attachment = world.attach(&volume, &world.node("b").await).await;
    world.attached(&attachment).await;
    controller.stop().await;
    used
}

#[test]
fn a_release_is_upgraded_changed_and_removed_while_a_volume_is_in_use() {
    run_on(ControlPlane::empty(), async |world: World| {
        let world = World { driver: DRIVER.to_owned(), ..world };
        let home = world.plane.directory();
        let usual = render(&[]).unwrap();
        let namespace = usual.iter().find(|object| object["kind"] == "Namespace").unwrap();
        let definitions = [snapshot_definitions(), monitoring::definitions()].concat();
        for object in definitions.iter().chain([namespace]) {
            apply(&world.client, object).await.unwrap();
        }
        let overlays = DIRECTORIES.map(build).concat();
        for object in render_all().iter().chain(&overlays) {
            check(&world.client, object).await.unwrap_or_else(|error| panic!("{object}: {error}"));
        }

        let used = upgrade(&world, &usual).await;
        let of_kind = |kind: &str| usual.iter().find(|object| object["kind"] == kind).unwrap();
        let (definition, set) = (of_kind("CustomResourceDefinition"), daemon(&usual));
        let template =
            async || find(&world.client, set).await.unwrap().data["spec"]["template"].clone();
        let before = template().await;
        let values = "controller.replicas=3,node.config.map.connections=2";
        helm(home, &["upgrade", "cleat", CHART, "--set", values]).unwrap();
        let deployment = find(&world.client, of_kind("Deployment")).await.unwrap();
        assert_eq!(deployment.data["spec"]["replicas"], 3);
        assert_ne!(template().await, before, "the changed configuration replaces no pod");

        let report = helm(home, &["uninstall", "cleat"]).unwrap();
        assert!(report.contains("kept due to the resource policy"), "{report}");
        for object in &usual {
            let is_kept = [definition, namespace].contains(&object);
            assert_eq!(find(&world.client, object).await.is_some(), is_kept, "{object}");
        }
        used.check(&world).await;
        // A new release takes the definition over, and its controller continues with the volume.
        helm(home, &["install", "cleat", CHART]).unwrap();
        let controller = start_controller(&world).await;
        used.check(&world).await;
        used.end(&world).await;
        controller.stop().await;
    });
}
