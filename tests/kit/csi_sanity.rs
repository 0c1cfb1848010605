//! The report of csi-sanity, the tests of CSI drivers that the Kubernetes project publishes.

use std::path::{Path, PathBuf};

use serde_json::Value;

/// The program.
pub const PROGRAM: &str = "csi-sanity";

/// The directory of the Go module that pins the program.
const MODULE: &str = "tests/csi-sanity";

/// The program's package.
const PACKAGE: &str = "github.com/kubernetes-csi/csi-test/v5/cmd/csi-sanity";

/// The number of specs of version 5.6.0. One of them is pending by its authors.
const SPECS: usize = 103;

/// The number of volumes that a node should be able to have: one of the specs publishes one more.
pub const ATTACH_LIMIT: usize = 8;

/// The option with which all specs run.
pub const ATTACH_LIMIT_OPTION: &str = "--csi.testnodevolumeattachlimit";

/// Parts of the names of the specs that are skipped over files, which have no group snapshots.
const GROUPS: [&str; 2] = ["GroupController", "VolumeGroupSnapshot"];

/// The beginning of the names of the specs of the Node service.
const NODE: &str = "Node Service";

/// The specs that a run executes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Chosen {
    /// All of them.
    All,
    /// Those of the Node service, which need a kernel.
    Node,
    /// Those of the other services.
    Others,
}

impl Chosen {
    /// Returns the option of the program.
    pub fn option(self) -> String {
        match self {
            Self::All => "--ginkgo.focus=.".to_owned(),
            Self::Node => format!("--ginkgo.focus={}", NODE.replace(' ', ".")),
            Self::Others => format!("--ginkgo.skip={}", NODE.replace(' ', ".")),
        }
    }

    fn contains(self, spec: &Spec) -> bool {
        match self {
            Self::All => true,
            Self::Node => spec.name.contains(NODE),
            Self::Others => !spec.name.contains(NODE),
        }
    }
}

/// Builds the program once, and returns its path.
pub fn program() -> PathBuf {
    crate::go::build(MODULE, &[PACKAGE]).join(PROGRAM)
}

/// Reads the JSON report of a run. Checks that each spec that was chosen has passed, except those of group snapshots
/// if the storage has none, and prints their numbers after `what`.
pub fn check(report: &Path, what: &str, chosen: Chosen, has_groups: bool) {
    let report = std::fs::read(report).expect("the report");
    let report: Value = serde_json::from_slice(&report).expect("the report is JSON");
    let all: Vec<Spec> = report[0]["SpecReports"]
        .as_array()
        .expect("the specs")
        .iter()
        .filter(|spec| spec["LeafNodeType"] == "It")
        .map(Spec::of)
        .collect();
    assert_eq!(all.len(), SPECS);
    let specs: Vec<&Spec> = all.iter().filter(|spec| chosen.contains(spec)).collect();
    let count = |state| specs.iter().filter(|spec| spec.state == state).count();
    let (passed, skipped, pending) = (count("passed"), count("skipped"), count("pending"));
    println!("figures: csi-sanity {what}: {passed} passed, {skipped} skipped, {pending} pending");
    for spec in specs.iter().filter(|spec| spec.state == "skipped") {
        println!("figures: skipped: {}: {}", spec.name, spec.failure);
    }
    let is_expected = |spec: &&&Spec| match &*spec.state {
        "passed" => true,
        "pending" => pending == 1,
        "skipped" => !has_groups && GROUPS.iter().any(|part| spec.name.contains(part)),
        _ => false,
    };
    let wrong: Vec<&&Spec> = specs.iter().filter(|spec| !is_expected(spec)).collect();
    assert!(wrong.is_empty(), "{wrong:#?}");
    assert!(passed > 20, "{passed} specs have passed");
}

/// What the report says about a spec.
#[derive(Debug)]
struct Spec {
    name: String,
    state: String,
    /// Why it failed or was skipped.
    failure: String,
}

impl Spec {
    fn of(report: &Value) -> Self {
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let containers = report["ContainerHierarchyTexts"].as_array().into_iter().flatten();
        let names = containers.chain([&report["LeafNodeText"]]).map(text);
        Self {
            name: names.collect::<Vec<_>>().join(" "),
            state: text(&report["State"]),
            failure: text(&report["Failure"]["Message"]),
        }
    }
}
