//! The rules for dependencies: licences, sources and versions. They replace cargo-deny, which takes minutes
//! to compile. Known vulnerabilities are not checked, because that needs a database from the network.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use serde_json::Value;

use crate::none;
use crate::source::root;

/// The licences that are compatible with Apache-2.0 in a binary.
const LICENCES: [&str; 12] = [
    "0BSD",
    "Apache-2.0",
    "Apache-2.0 WITH LLVM-exception",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "BSL-1.0",
    "CC0-1.0",
    "ISC",
    "MIT",
    "MIT-0",
    "Unicode-3.0",
    "Zlib",
];

/// The only permitted source of crates.
const REGISTRY: &str = "registry+https://github.com/rust-lang/crates.io-index";

#[test]
fn every_dependency_has_a_compatible_licence() {
    let wrong = packages().into_iter().filter_map(|package| {
        let licence = package["license"].as_str().unwrap_or("none");
        (!allowed(licence)).then(|| format!("{} is under {licence}", package["name"]))
    });
    none(&wrong.collect::<Vec<_>>());
}

#[test]
fn every_dependency_comes_from_the_registry() {
    let ours = [root().join("ffi"), root().join("src")];
    let wrong = packages().into_iter().filter_map(|package| {
        let manifest = package["manifest_path"].as_str().expect("a path");
        let source = package["source"].as_str().unwrap_or("a path");
        let fine =
            source == REGISTRY || ours.iter().any(|ours| Path::new(manifest).starts_with(ours));
        (!fine).then(|| format!("{} comes from {source}", package["name"]))
    });
    none(&wrong.collect::<Vec<_>>());
}

/// Two versions of one crate increase build time and size, and their types are incompatible.
#[test]
fn no_dependency_comes_in_two_versions_that_we_could_align() {
    let mut versions: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for package in packages() {
        let text = |field: &str| package[field].as_str().expect("a text").to_owned();
        versions.entry(text("name")).or_default().push(text("version"));
    }
    let direct = direct_dependencies();
    let several = versions.iter().filter(|(name, found)| found.len() > 1 && direct.contains(name));
    none(&several.map(|(name, found)| format!("{name}: {}", found.join(", "))).collect::<Vec<_>>());
    let doubled = versions.values().filter(|found| found.len() > 1).count();
    assert!(doubled <= 9, "{doubled} crates come in several versions: {versions:?}");
}

/// The crates below `ffi/` must stay small enough for a review.
#[test]
fn the_crates_below_ffi_have_only_permitted_dependencies() {
    let allowed = [("librbd", &["libc", "librbd-sys", "stable_deref_trait", "thiserror"][..])];
    let allowed = allowed.into_iter().chain([("librbd-sys", &["libc", "thiserror"][..])]);
    let allowed: BTreeMap<_, _> = allowed.collect();
    let metadata = metadata();
    let ours = root().join("ffi");
    let mut wrong = Vec::new();
    let mut seen = 0;
    for package in metadata["packages"].as_array().expect("packages") {
        let manifest = package["manifest_path"].as_str().expect("a path");
        if !manifest.starts_with(ours.to_str().expect("UTF-8")) {
            continue;
        }
        seen += 1;
        let name = package["name"].as_str().expect("a name");
        let dependencies = package["dependencies"].as_array().expect("dependencies").iter();
        for used in dependencies.filter(|dependency| dependency["kind"] != "dev") {
            let used = used["name"].as_str().expect("a name");
            if !allowed.get(name).is_some_and(|list| list.contains(&used)) {
                wrong.push(format!("{name}: depends on {used}"));
            }
        }
    }
    assert_eq!(seen, allowed.len(), "the crates below ffi/");
    none(&wrong);
}

#[test]
fn licence_expressions_are_evaluated() {
    for fine in ["MIT", "MIT OR Apache-2.0", "MIT/Apache-2.0", "(MIT OR GPL-3.0) AND Unicode-3.0"] {
        assert!(allowed(fine), "{fine}");
    }
    assert!(allowed("Apache-2.0 WITH LLVM-exception OR GPL-2.0"));
    for wrong in ["GPL-3.0", "MIT AND GPL-3.0", "none", "", "(MIT OR GPL-3.0) AND AGPL-3.0"] {
        assert!(!allowed(wrong), "{wrong}");
    }
}

/// Whether an SPDX expression is satisfied by licences of the list. AND binds closer than OR.
fn allowed(expression: &str) -> bool {
    let expression = expression.replace('/', " OR ");
    alternatives(&expression, " OR ").iter().any(|alternative| {
        alternatives(alternative, " AND ").iter().all(|term| {
            let term = term.trim();
            match term.strip_prefix('(').and_then(|term| term.strip_suffix(')')) {
                Some(inner) => allowed(inner),
                None => LICENCES.contains(&term),
            }
        })
    })
}

/// Splits at `separator`, but not inside parentheses.
fn alternatives(expression: &str, separator: &str) -> Vec<String> {
    let mut parts = vec![String::new()];
    for piece in expression.split(separator) {
        let last = parts.last_mut().expect("there is one");
        let open = last.matches('(').count() > last.matches(')').count();
        if last.is_empty() {
            last.push_str(piece);
        } else if open {
            last.push_str(separator);
            last.push_str(piece);
        } else {
            parts.push(piece.to_owned());
        }
    }
    parts
}

/// The packages that the binary on Linux needs, build dependencies included. Packages that only tests and
/// benchmarks use are not shipped, so they do not count.
fn packages() -> Vec<Value> {
    let metadata = metadata();
    let nodes = metadata["resolve"]["nodes"].as_array().expect("nodes");
    let root = &metadata["resolve"]["root"];
    let mut used = vec![root];
    let mut next = 0;
    while let Some(id) = used.get(next).copied() {
        let node = nodes.iter().find(|node| &node["id"] == id).expect("a node");
        for dependency in node["deps"].as_array().expect("dependencies") {
            let kinds = dependency["dep_kinds"].as_array().expect("kinds");
            let shipped = kinds.iter().any(|kind| kind["kind"] != "dev");
            if shipped && !used.contains(&&dependency["pkg"]) {
                used.push(&dependency["pkg"]);
            }
        }
        next += 1;
    }
    let packages = metadata["packages"].as_array().expect("packages").iter();
    packages
        .filter(|package| &package["id"] != root && used.contains(&&package["id"]))
        .cloned()
        .collect()
}

/// The dependencies in the manifests of the project's own crates.
fn direct_dependencies() -> Vec<String> {
    let metadata = metadata();
    let packages = metadata["packages"].as_array().expect("packages").iter();
    packages
        .filter(|package| package["source"].is_null())
        .flat_map(|package| package["dependencies"].as_array().expect("dependencies"))
        .map(|dependency| dependency["name"].as_str().expect("a name").to_owned())
        .collect()
}

/// A test program that no suite names would never run in CI.
#[test]
fn every_test_program_is_in_a_suite() {
    let makefile = std::fs::read_to_string(root().join("Makefile")).expect("the Makefile");
    let metadata = metadata();
    let ours = metadata["packages"].as_array().expect("packages").iter();
    let ours = ours.filter(|package| package["source"].is_null());
    let mut wrong = Vec::new();
    for target in ours.flat_map(|package| package["targets"].as_array().expect("targets")) {
        let (name, path) = (&target["name"], target["src_path"].as_str().expect("a path"));
        let name = name.as_str().expect("a name");
        let is_listed = makefile.split_whitespace().any(|word| word == name)
            || path.contains("/ffi/") && makefile.contains("$(wildcard ffi/*/tests/*.rs)");
        if target["kind"][0] == "test" && !is_listed {
            wrong.push(format!("{path}: no suite of the Makefile runs it"));
        }
    }
    none(&wrong);
}

pub(crate) fn metadata() -> Value {
    let output = Command::new(env!("CARGO"))
        .current_dir(root())
        .args(["metadata", "--locked", "--format-version", "1"])
        .args(["--filter-platform", "x86_64-unknown-linux-gnu"])
        .output()
        .expect("cargo runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("cargo writes JSON")
}
