//! The crates: which may depend on which, what a worker links, and no import cycle inside a crate.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use crate::dependencies::metadata;
use crate::modules::Crate;
use crate::none;
use crate::source::files;

/// Which crates of the project each crate may depend on. The root package, `cleat`, may use all.
const ROOMS: &[(&str, &[&str])] = &[
    ("core", &[]),
    ("api", &[]),
    ("csi-api", &[]),
    ("object", &[]),
    ("sys", &["core"]),
    ("nbd", &["core"]),
    ("telemetry", &["core"]),
    ("statistics", &["core", "sys"]),
    ("backend", &["core", "grants", "sys"]),
    ("rbd", &["backend", "core", "grants", "sys"]),
    ("object-backend", &["backend", "core", "grants", "object", "sys"]),
    ("export", &["backend", "core", "nbd", "statistics", "sys"]),
    ("worker-protocol", &["backend", "core", "sys"]),
    (
        "worker",
        &["backend", "core", "export", "nbd", "statistics", "sys", "telemetry", "worker-protocol"],
    ),
    ("kernel", &["core", "sys"]),
    ("filesystem", &["core", "kernel", "sys"]),
    ("grants", &["core"]),
    ("kube", &["core", "grants"]),
    (
        "node",
        &["api", "backend", "core", "kernel", "statistics", "sys", "telemetry", "worker-protocol"],
    ),
    ("csi", &["backend", "core", "csi-api", "filesystem", "kernel", "node", "statistics", "sys"]),
    (
        "fuzz",
        &["backend", "core", "kernel", "nbd", "node", "object", "object-backend", "rbd", "worker"],
    ),
];

/// Packages that a worker must not link: it has no async runtime, no control API and no Kubernetes client.
const NOT_IN_A_WORKER: &[&str] = &["tokio", "tonic", "prost", "hyper", "kube", "clap", "udev"];

/// Packages that the supervisor must not link: the data path runs only in workers.
const NOT_IN_A_SUPERVISOR: &[&str] = &[
    "cleat-export",
    "cleat-nbd",
    "cleat-object",
    "cleat-object-backend",
    "cleat-worker",
    "cleat-rbd",
];

#[test]
fn crates_have_only_the_permitted_dependencies_on_each_other() {
    let metadata = metadata();
    let mut wrong = Vec::new();
    let mut seen = 0;
    for package in metadata["packages"].as_array().expect("packages") {
        let Some(room) = text(package, "name").strip_prefix("cleat-") else { continue };
        seen += 1;
        let Some((_, allowed)) = ROOMS.iter().find(|(name, _)| *name == room) else {
            wrong.push(format!("{room} is missing in ROOMS"));
            continue;
        };
        for used in package["dependencies"].as_array().expect("dependencies") {
            let used_room = text(used, "name").strip_prefix("cleat-");
            let is_normal = used["kind"].is_null();
            if let Some(used) = used_room.filter(|used| is_normal && !allowed.contains(used)) {
                wrong.push(format!("{room} may not depend on {used}"));
            }
        }
    }
    assert_eq!(seen, ROOMS.len(), "every crate of ROOMS exists");
    none(&wrong);
}

#[test]
fn a_worker_links_no_runtime_and_no_control_api() {
    let metadata = metadata();
    let linked = linked_by("cleat-worker", &metadata);
    assert!(linked.contains("io-uring"), "the dependency graph is incomplete: {linked:?}");
    let wrong = NOT_IN_A_WORKER.iter().filter(|name| linked.contains(**name));
    none(&wrong.map(|name| format!("cleat-worker links {name}")).collect::<Vec<_>>());
}

#[test]
fn the_supervisor_links_no_data_path() {
    let linked = linked_by("cleat-node", &metadata());
    let wrong = NOT_IN_A_SUPERVISOR.iter().filter(|name| linked.contains(**name));
    none(&wrong.map(|name| format!("cleat-node links {name}")).collect::<Vec<_>>());
}

#[test]
fn no_files_of_a_crate_import_each_other_in_a_circle() {
    let files = files();
    let mut wrong = Vec::new();
    for manifest in files.iter().filter(|file| file.path.ends_with("Cargo.toml")) {
        let Some(root) = Crate::root_of(&manifest.path, &files) else { continue };
        let krate = Crate::read(&root, &files);
        wrong.extend(krate.circles().into_iter().map(|circle| circle.join(" <-> ")));
    }
    none(&wrong);
}

/// The names of all packages that `package` links, itself included, without those that only its tests or
/// build scripts use.
fn linked_by(package: &str, metadata: &Value) -> BTreeSet<String> {
    let names: BTreeMap<&str, &str> = array(metadata, "packages")
        .map(|package| (text(package, "id"), text(package, "name")))
        .collect();
    let nodes: BTreeMap<&str, &Value> =
        array(&metadata["resolve"], "nodes").map(|node| (text(node, "id"), node)).collect();
    let first = names.iter().find(|(_, name)| **name == package).map(|(id, _)| *id);
    let mut waiting = vec![first.expect("the package exists")];
    let mut linked = BTreeSet::new();
    while let Some(id) = waiting.pop() {
        if !linked.insert(names[id].to_owned()) {
            continue;
        }
        for used in array(nodes[id], "deps") {
            let is_normal = array(used, "dep_kinds").any(|kind| kind["kind"].is_null());
            if is_normal {
                waiting.push(text(used, "pkg"));
            }
        }
    }
    linked
}

fn array<'a>(value: &'a Value, field: &str) -> impl Iterator<Item = &'a Value> {
    value[field].as_array().expect("an array").iter()
}

fn text<'a>(value: &'a Value, field: &str) -> &'a str {
    value[field].as_str().expect("a text")
}
