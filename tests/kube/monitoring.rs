//! Alerts and dashboard in `deploy/components/monitoring`: compared with what daemon and controller export, and evaluated
//! by Prometheus' own parser and engine.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Stdio};

use serde::Deserialize;
use serde_json::{Value, json};
use test_kit::node::Machine;

use crate::deploy::documents;
use crate::fixture::{World, eventually, run};

const ROOT: &str = env!("CARGO_MANIFEST_DIR");

/// The labels that Prometheus adds to each metric.
const ADDED: [&str; 2] = ["job", "node"];

/// For each alert: series after which its expression has a result, with one value each 30 s.
const SITUATIONS: [(&str, &str); 25] = [
    ("CleatControllerMissing", "cleat_controller_leader 0x60"),
    (
        "CleatControllerSyncsFail",
        r#"cleat_controller_syncs_total{object="g",result="failed"} 0+1x60"#,
    ),
    ("CleatControllerQueueGrows", "cleat_controller_queue 150x60"),
    ("CleatNodeFenced", "cleat_controller_fences_total 0x50 1x9"),
    ("CleatNodeLost", r#"cleat_controller_nodes{state="lost"} 1x60"#),
    ("CleatRemediationRefused", r#"cleat_controller_nodes{state="refused"} 3x60"#),
    ("CleatVolumeWaits", "cleat_controller_oldest_wait_seconds 301x60"),
    ("CleatClaimUnknown", r#"cleat_controller_unknown_claims{node="known"} 1x60"#),
    ("CleatNodeDown", r#"up{job="storage/cleat-node",node="a"} 0x60"#),
    ("CleatServiceProblem", "cleat_service_problems 1x60"),
    ("CleatStateDirectoryNotWritable", "cleat_state_directory_writable 0x60"),
    ("CleatKernelUnreachable", "cleat_kernel_reachable 0x60"),
    ("CleatKernelCallsStuck", "cleat_kernel_calls_stuck 2x60"),
    ("CleatOrphanDevices", "cleat_orphan_devices 1x60"),
    ("CleatFindings", "cleat_findings 1x60"),
    ("CleatLogLinesDropped", "cleat_log_lines_dropped_total 0x40 5x19"),
    ("CleatVolumeSyncFailed", r#"cleat_volume_sync_failed{volume="v"} 1x60"#),
    ("CleatVolumeReplaced", r#"cleat_volume_replaced{volume="v"} 1x60"#),
    ("CleatVolumeFenced", r#"cleat_volume_fenced{volume="v"} 1x60"#),
    ("CleatVolumeFailed", r#"cleat_volume_state{volume="v",state="failed"} 1x60"#),
    ("CleatVolumeNotReady", r#"cleat_volume_state{volume="v",state="recovering"} 1x60"#),
    ("CleatVolumeOutage", r#"cleat_volume_outage_seconds{volume="v"} 0x50 30+30x8"#),
    ("CleatVolumeBlocked", r#"cleat_volume_oldest_request_seconds{volume="v"} 0x50 30+30x8"#),
    ("CleatVolumeErrors", r#"cleat_volume_errors_total{volume="v",kind="broken"} 0+1x60"#),
    ("CleatWorkerRestarts", r#"cleat_volume_worker_starts_total{volume="v"} 1x30 2+1x29"#),
];

#[derive(Debug, Deserialize)]
struct Answer {
    #[serde(default)]
    errors: Option<Vec<String>>,
    metrics: BTreeMap<String, Option<Vec<String>>>,
    labels: BTreeMap<String, Option<Vec<String>>>,
    /// The alerts that fire, without regard to `for`.
    firing: Option<Vec<Option<Vec<String>>>>,
    /// The queries without a result.
    empty: Option<Vec<Option<Vec<String>>>>,
}

/// Asks Prometheus' own code.
fn ask(rules: &Value, queries: &[String], cases: &[Vec<String>]) -> Answer {
    let program = test_kit::go::build("tests/kube/promql", &[]).join("promql");
    let mut process =
        Command::new(program).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let question = json!({ "rules": rules.to_string(), "queries": queries, "cases": cases });
    process.stdin.take().unwrap().write_all(question.to_string().as_bytes()).unwrap();
    let output = process.wait_with_output().unwrap();
    assert!(output.status.success(), "the messages are above");
    serde_json::from_slice(&output.stdout).unwrap()
}

fn component(name: &str) -> std::path::PathBuf {
    Path::new(ROOT).join("deploy/components/monitoring").join(name)
}

/// The groups of alerts, as Prometheus reads them.
fn rules() -> Value {
    documents(&component("rules.yaml"))[0]["spec"].clone()
}

fn alerts() -> Vec<Value> {
    let groups = rules()["groups"].as_array().unwrap().clone();
    groups.iter().flat_map(|group| group["rules"].as_array().unwrap().clone()).collect()
}

/// The queries of the dashboard, with values for Grafana's variables.
fn queries() -> Vec<String> {
    let text = std::fs::read(component("dashboard.json")).unwrap();
    let dashboard: Value = serde_json::from_slice(&text).unwrap();
    let panels = dashboard["panels"].as_array().unwrap();
    let targets = panels.iter().flat_map(|panel| panel["targets"].as_array().unwrap());
    let expressions = targets.map(|target| target["expr"].as_str().unwrap());
    let variables = dashboard["templating"]["list"].as_array().unwrap().iter();
    let lists = variables.filter_map(|variable| variable["query"]["query"].as_str());
    let lists = lists.map(|list| {
        let inside = list.strip_prefix("label_values(").and_then(|rest| rest.strip_suffix(')'));
        let (selector, label) = inside.unwrap().rsplit_once(", ").unwrap();
        format!("group by ({label}) ({selector})")
    });
    let all: Vec<String> = expressions.map(str::to_owned).chain(lists).collect();
    let filled = all.iter().map(|text| text.replace("$__rate_interval", "5m"));
    let filled = filled.map(|text| text.replace("$node", ".*").replace("$volume", ".*"));
    let filled: Vec<String> = filled.collect();
    assert!(filled.len() > 20 && filled.iter().all(|text| !text.contains('$')), "{filled:?}");
    filled
}

/// Returns the metrics of a daemon with a volume that has served requests.
fn of_daemon() -> String {
    let machine = Machine::new();
    let supervisor = machine.start();
    let mapping = supervisor.map("v", &machine.volume("v")).unwrap();
    let index = test_kit::node::index_of(&mapping);
    machine.kernel.write(index, 0, &[7; 4096]).unwrap();
    let path = machine.config.runtime_dir.join("metrics.sock");
    let mut stream = UnixStream::connect(path).unwrap();
    let accept = "Accept: application/openmetrics-text; version=1.0.0";
    let request = format!("GET /metrics HTTP/1.1\r\nHost: cleat\r\n{accept}\r\n\r\n");
    stream.write_all(request.as_bytes()).unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    supervisor.unmap("v").unwrap();
    text
}

/// Returns the metrics of a controller that leads, and has attached a volume.
async fn of_controller(world: &World) -> String {
    let controller = world.controller();
    let volume = world.volume("v", "shared/v").await;
    let attachment = world.attach(&volume, &world.node("a").await).await;
    world.attached(&attachment).await;
    let text = eventually("the leader has an empty queue", async || {
        Some(controller.metrics()).filter(|text| text.contains("cleat_controller_queue 0\n"))
    })
    .await;
    controller.stop().await;
    text
}

/// Returns the names of the metrics whose types a text has.
fn names(text: &str) -> impl Iterator<Item = String> {
    text.lines().filter_map(|line| line.strip_prefix("# TYPE ")).flat_map(|line| {
        let (name, kind) = line.split_once(' ').unwrap();
        let suffixes: &[&str] = match kind {
            "counter" => &["_total"],
            "info" => &["_info"],
            "histogram" => &["_bucket", "_sum", "_count"],
            _ => &[""],
        };
        suffixes.iter().map(|suffix| format!("{name}{suffix}")).collect::<Vec<_>>()
    })
}

/// Returns the samples of a text.
fn samples(text: &str) -> impl Iterator<Item = &str> {
    text.lines().filter(|line| line.starts_with("cleat_"))
}

/// Returns the names of the labels of a sample.
fn labels(sample: &str) -> Vec<&str> {
    let inside = sample.split_once('{').and_then(|(_, rest)| rest.rsplit_once('}'));
    let parts = inside.map(|(inside, _)| inside.split("=\"")).into_iter().flatten();
    // What precedes `="` is a name, after the value of the label before it.
    parts.filter_map(|part| part.rsplit(',').next()).collect()
}

#[test]
fn alerts_and_dashboard_use_metrics_that_exist_and_are_silent_while_all_is_well() {
    run(async |world: World| {
        let of_daemon = tokio::task::spawn_blocking(of_daemon).await.unwrap();
        let text = of_daemon + &of_controller(&world).await;
        // What only exists after an error.
        let text = text + "cleat_volume_errors_total{volume=\"v\",kind=\"broken\"} 0\n";
        let known: BTreeSet<String> = names(&text).chain(["up".to_owned()]).collect();
        let known_labels: BTreeSet<&str> = samples(&text).flat_map(labels).chain(ADDED).collect();
        let constant = |sample: &str| format!("{sample}x60");
        let up = r#"up{job="cleat-system/cleat-node",node="a"} 1x60"#.to_owned();
        let well: Vec<String> = samples(&text).map(constant).chain([up]).collect();
        let answer = ask(&rules(), &queries(), &[well]);
        assert_eq!(answer.errors.unwrap_or_default(), Vec::<String>::new());
        for (query, metrics) in &answer.metrics {
            for metric in metrics.iter().flatten() {
                assert!(known.contains(metric), "{query}: {metric} does not exist: {known:?}");
            }
        }
        for (query, labels) in &answer.labels {
            for label in labels.iter().flatten() {
                assert!(known_labels.contains(&**label), "{query}: no metric has {label}");
            }
        }
        assert_eq!(answer.firing, Some(vec![None]));
        assert_eq!(answer.empty, Some(vec![None]), "queries without a result");
    });
}

#[test]
fn each_alert_fires_in_its_situation_and_no_other_one_does() {
    let leads = "cleat_controller_leader 1x60";
    let cases = SITUATIONS.map(|(alert, series)| {
        let others = (alert != "CleatControllerMissing").then_some(leads);
        others.into_iter().chain([series]).map(str::to_owned).collect()
    });
    let answer = ask(&rules(), &[], &cases);
    let expected: Vec<_> =
        SITUATIONS.iter().map(|(alert, _)| Some(vec![(*alert).to_owned()])).collect();
    assert_eq!(answer.firing.unwrap(), expected);
    let tested: BTreeSet<&str> = SITUATIONS.iter().map(|(alert, _)| *alert).collect();
    let alerts = alerts();
    let known: BTreeSet<&str> = alerts.iter().map(|rule| rule["alert"].as_str().unwrap()).collect();
    assert_eq!(known, tested);
    // The check finds mistakes.
    let wrong =
        json!({ "groups": [{ "name": "g", "rules": [{ "alert": "A", "expr": "rate(a)" }] }] });
    assert!(ask(&wrong, &["sum by a".to_owned()], &[]).errors.unwrap().len() >= 2);
}

/// Each alert says what has happened and what to do, and has a section on the page that it names.
#[test]
fn each_alert_has_a_section_in_the_runbooks_and_the_chart_has_the_same_files() {
    let page = std::fs::read_to_string(Path::new(ROOT).join("docs/runbooks.md")).unwrap();
    let sections: BTreeSet<&str> =
        page.lines().filter_map(|line| line.strip_prefix("### ")).collect();
    let alerts = alerts();
    let names: BTreeSet<&str> = alerts.iter().map(|rule| rule["alert"].as_str().unwrap()).collect();
    assert_eq!(names, sections);
    for alert in &alerts {
        let (name, annotations) = (alert["alert"].as_str().unwrap(), &alert["annotations"]);
        let section = format!("docs/runbooks.md#{}", name.to_lowercase());
        assert_eq!(annotations["runbook"], section);
        for text in ["summary", "action"] {
            assert!(annotations[text].as_str().is_some_and(|text| text.len() > 20), "{name}");
        }
        let severity = alert["labels"]["severity"].as_str().unwrap();
        assert!(["info", "warning", "critical"].contains(&severity), "{name}: {severity}");
    }
    for name in ["rules.yaml", "dashboard.json"] {
        let copy = Path::new(ROOT).join("deploy/helm/cleat/files").join(name);
        let repair = format!("run: cp deploy/components/monitoring/{name} deploy/helm/cleat/files");
        assert!(
            std::fs::read(component(name)).unwrap() == std::fs::read(copy).unwrap(),
            "{repair}"
        );
    }
}

/// Returns the custom resource definitions of the Prometheus operator that `deploy/` uses, from its module.
pub(crate) fn definitions() -> Vec<Value> {
    let module = "github.com/prometheus-operator/prometheus-operator";
    let directory = test_kit::go::module("tests/kube/prometheus-operator", module);
    let directory = directory.join("example/prometheus-operator-crd");
    let file = |kind| directory.join(format!("monitoring.coreos.com_{kind}.yaml"));
    ["podmonitors", "prometheusrules"].iter().flat_map(|kind| documents(&file(kind))).collect()
}
