//! What the pods of `deploy/` may do, compared with the list in `docs/pod.md`.

use std::collections::BTreeSet;
use std::path::Path;

use serde_json::{Value, json};

use crate::deploy::build;

/// A privilege, with its pod or its container.
type Privilege = (String, String);

/// Returns what the pods and their containers may do beyond what every pod needs.
fn granted() -> BTreeSet<Privilege> {
    let mut granted = BTreeSet::new();
    for set in build("overlays/all") {
        let pod = &set["spec"]["template"]["spec"];
        if !pod.is_object() {
            continue;
        }
        let name = set["metadata"]["name"].as_str().unwrap();
        for setting in ["hostPID", "hostNetwork", "hostIPC"] {
            if pod[setting] == true {
                granted.insert((name.to_owned(), setting.to_owned()));
            }
        }
        for list in ["initContainers", "containers"] {
            for container in pod[list].as_array().into_iter().flatten() {
                let place = format!("{name}/{}", container["name"].as_str().unwrap());
                let own = [of_context, of_mounts, of_network].map(|of| of(pod, container));
                granted.extend(own.into_iter().flatten().map(|own| (place.clone(), own)));
            }
        }
    }
    granted
}

/// Returns what the security context of a container permits beyond the restricted pod security standard.
fn of_context(pod: &Value, container: &Value) -> Vec<String> {
    let setting = |name: &str| {
        let own = &container["securityContext"][name];
        if own.is_null() { &pod["securityContext"][name] } else { own }
    };
    if setting("privileged") == true {
        return vec!["privileged".to_owned()];
    }
    let user = setting("runAsUser").as_u64();
    let is_user = setting("runAsNonRoot") == true && user.is_some_and(|user| user > 0);
    let capabilities = setting("capabilities");
    let added = capabilities["add"].as_array().into_iter().flatten();
    let rules = [
        ("root", is_user),
        ("privilege escalation", setting("allowPrivilegeEscalation") == false),
        ("writable root filesystem", setting("readOnlyRootFilesystem") == true),
        ("default capabilities", capabilities["drop"] == json!(["ALL"])),
        ("no seccomp profile", setting("seccompProfile")["type"] == "RuntimeDefault"),
    ];
    let broken = rules.iter().filter(|(_, is_restricted)| !is_restricted);
    let broken = broken.map(|(privilege, _)| (*privilege).to_owned());
    broken.chain(added.map(|capability| format!("capability {capability}"))).collect()
}

/// Returns the directories of the node and the Secrets that a container sees.
fn of_mounts(pod: &Value, container: &Value) -> Vec<String> {
    let volumes = pod["volumes"].as_array().unwrap();
    let mounts = container["volumeMounts"].as_array().unwrap().iter();
    let privilege = |mount: &Value| {
        let volume = volumes.iter().find(|volume| volume["name"] == mount["name"]).unwrap();
        if let Some(secret) = volume["secret"]["secretName"].as_str() {
            // kustomize adds a hash to the name.
            return Some(format!("Secret {}", secret.rsplit_once('-').unwrap().0));
        }
        let path = volume["hostPath"]["path"].as_str()?;
        let way = match (&mount["readOnly"], &mount["mountPropagation"]) {
            (Value::Bool(true), _) => ", read-only",
            (_, Value::String(_)) => ", propagated",
            _ => "",
        };
        Some(format!("hostPath {path}{way}"))
    };
    mounts.filter_map(privilege).collect()
}

/// Returns the addresses of the node that a container's probes reach, and the ports of the node that it has.
fn of_network(pod: &Value, container: &Value) -> Vec<String> {
    let probes = ["livenessProbe", "readinessProbe", "startupProbe"].map(|name| &container[name]);
    let hosts = probes.into_iter().filter_map(|probe| probe["httpGet"]["host"].as_str());
    let ports = container["ports"].as_array().into_iter().flatten();
    let of_node = ports.filter_map(|port| match pod["hostNetwork"] == true {
        true => port["containerPort"].as_u64(),
        false => port["hostPort"].as_u64(),
    });
    let hosts = hosts.map(|host| format!("probes of {host}"));
    hosts.chain(of_node.map(|port| format!("port {port} of the node"))).collect()
}

/// Returns the rows of the table in the documentation. Each one has a reason.
fn documented() -> BTreeSet<Privilege> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/pod.md");
    let text = std::fs::read_to_string(path).unwrap();
    let mut found = BTreeSet::new();
    for line in text.lines().filter(|line| line.starts_with("| cleat-")) {
        let cells: Vec<&str> = line.split('|').map(str::trim).collect();
        let [_, places, privilege, reason, _] = cells[..] else { panic!("{line}") };
        assert!(!reason.is_empty(), "{line}");
        for place in places.split(", ") {
            let row = (place.to_owned(), privilege.to_owned());
            assert!(found.insert(row), "twice: {line}");
        }
    }
    found
}

#[test]
fn the_pods_may_do_what_the_page_lists_and_nothing_else() {
    let (granted, documented) = (granted(), documented());
    let unknown: Vec<_> = granted.difference(&documented).collect();
    let unused: Vec<_> = documented.difference(&granted).collect();
    assert!(
        unknown.is_empty() && unused.is_empty(),
        "not listed: {unknown:#?}\nnot granted: {unused:#?}"
    );
}

/// The comparison above finds each kind of privilege.
#[test]
fn a_container_without_restrictions_has_every_privilege() {
    let found = of_context(&json!({}), &json!({}));
    assert_eq!(found.len(), 5, "{found:?}");
    let context =
        json!({ "securityContext": { "capabilities": { "drop": ["ALL"], "add": ["SYS_ADMIN"] } } });
    let found = of_context(&json!({}), &context);
    assert!(found.contains(&"capability \"SYS_ADMIN\"".to_owned()), "{found:?}");
    let ports = json!({ "ports": [{ "containerPort": 1 }] });
    assert_eq!(of_network(&json!({ "hostNetwork": true }), &ports), ["port 1 of the node"]);
}
