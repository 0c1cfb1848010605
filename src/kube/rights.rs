//! The rights of the controller and of the agents of nodes, as objects for `kubectl apply`: roles with exactly what
//! they use, and a policy that permits a node to change its own status entries only.

use cleat_core::error::{Error, ErrorKind, Result};
use serde_json::{Value, json};

use crate::crd;
use crate::events::EVENTS;
use crate::grant::{GROUP, PLURAL};
use crate::heartbeat;
use crate::nodes::LEASES;

/// The service account of the agents of nodes.
pub const NODE_ACCOUNT: &str = "cleat-node";

/// The service account of the controller.
pub const CONTROLLER_ACCOUNT: &str = "cleat-controller";

/// The claim of a pod's token that names its node.
const NODE_CLAIM: &str = "authentication.kubernetes.io/node-name";

/// The cluster role of the attach/detach loop.
const ATTACH_DETACH: &str = "cleat-controller-attach-detach";

/// The roles of node remediation.
const REMEDIATION: &str = "cleat-controller-remediation";

/// What a controller does beside its usual work.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Extra {
    /// It attaches and detaches as pods need it.
    pub attach_detach: bool,
    /// It takes volumes and pods from lost nodes.
    pub remediation: bool,
}

/// Returns the objects as YAML documents. `namespace` is that of the pods.
///
/// # Errors
/// Returns `InvalidArgument` for a namespace in which the controller has other rights, too: two roles would have the
/// same name there.
pub fn yaml(namespace: &str, extra: Extra) -> Result<String> {
    if [EVENTS, LEASES].contains(&namespace) {
        let message = format!("the controller cannot be in the namespace {namespace}");
        return Err(Error::new(ErrorKind::InvalidArgument, message)
            .with_repair("use a namespace of its own, such as cleat-system"));
    }
    let mut objects = objects(namespace);
    if extra.attach_detach {
        objects.extend(attach_detach(namespace));
    }
    if extra.remediation {
        objects.extend(remediation(namespace));
    }
    let documents: Vec<String> = objects.iter().map(crd::to_yaml).collect();
    Ok(documents.join("---\n"))
}

/// Returns the objects: service accounts, roles, bindings, and the policy.
pub fn objects(namespace: &str) -> Vec<Value> {
    let mut objects = Vec::new();
    let accounts = [
        (CONTROLLER_ACCOUNT, controller_rules()),
        (NODE_ACCOUNT, json!([grants_of_nodes(), status(&["update"])])),
    ];
    for (account, rules) in accounts {
        objects.push(object("v1", "ServiceAccount", account, Some(namespace), json!({})));
        objects.push(rbac("ClusterRole", account, None, json!({ "rules": rules })));
        objects.push(rbac(
            "ClusterRoleBinding",
            account,
            None,
            binding("ClusterRole", account, namespace),
        ));
    }
    for (account, role_namespace, rules) in roles(namespace) {
        let role = json!({ "rules": [rules] });
        objects.push(rbac("Role", account, Some(role_namespace), role));
        let bound = binding("Role", account, namespace);
        objects.push(rbac("RoleBinding", account, Some(role_namespace), bound));
    }
    objects.extend(policy(namespace));
    objects.extend(lease_policy(namespace));
    objects
}

/// Returns the rights that the controller needs for the attach/detach loop, in addition.
pub fn attach_detach(namespace: &str) -> [Value; 2] {
    let watch = ["list", "watch"];
    let rules = json!([
        rule("", &["pods", "persistentvolumeclaims"], &watch),
        rule("storage.k8s.io", &["volumeattachments"], &["create", "delete"]),
        rule("storage.k8s.io", &["csidrivers"], &["get"]),
        // Those about pods are in their namespaces.
        rule("events.k8s.io", &["events"], &["create", "patch"]),
    ]);
    [
        rbac("ClusterRole", ATTACH_DETACH, None, json!({ "rules": rules })),
        rbac(
            "ClusterRoleBinding",
            ATTACH_DETACH,
            None,
            extra_binding("ClusterRole", ATTACH_DETACH, namespace),
        ),
    ]
}

/// Returns the rights that the controller needs for node remediation, in addition.
pub fn remediation(namespace: &str) -> Vec<Value> {
    let cluster = json!([
        rule("", &["nodes"], &["get", "patch"]),
        rule("", &["pods"], &["list", "delete"]),
        rule("", &["pods/status"], &["patch"]),
    ]);
    let leases = |verbs| json!({ "rules": [rule("coordination.k8s.io", &["leases"], verbs)] });
    let mut objects = vec![
        rbac("ClusterRole", REMEDIATION, None, json!({ "rules": cluster })),
        rbac(
            "ClusterRoleBinding",
            REMEDIATION,
            None,
            extra_binding("ClusterRole", REMEDIATION, namespace),
        ),
    ];
    // Those of the kubelets, and those of the agents.
    for (of, verbs) in [(LEASES, &["get"][..]), (namespace, &["list", "watch"])] {
        let bound = extra_binding("Role", REMEDIATION, namespace);
        objects.push(rbac("Role", REMEDIATION, Some(of), leases(verbs)));
        objects.push(rbac("RoleBinding", REMEDIATION, Some(of), bound));
    }
    objects
}

/// Binds a role with a name of its own to the account of the controller.
fn extra_binding(kind: &str, role: &str, namespace: &str) -> Value {
    let mut bound = binding(kind, CONTROLLER_ACCOUNT, namespace);
    bound["roleRef"]["name"] = json!(role);
    bound
}

fn controller_rules() -> Value {
    let all = ["get", "list", "watch", "create", "update", "patch", "delete"];
    let watch = ["list", "watch"];
    let storage = "storage.k8s.io";
    json!([
        rule(GROUP, &[PLURAL], &all),
        status(&["update"]),
        rule(storage, &["volumeattachments"], &["get", "list", "watch", "patch"]),
        rule(storage, &["volumeattachments/status"], &["patch"]),
        rule("", &["persistentvolumes"], &["get", "list", "watch", "patch"]),
        // A node is read again before it is fenced.
        rule("", &["nodes"], &["get", "list", "watch"]),
        rule(storage, &["csinodes"], &watch),
    ])
}

/// Returns the rights in single namespaces, each with its account.
fn roles(namespace: &str) -> [(&'static str, &str, Value); 4] {
    let leases = |verbs| rule("coordination.k8s.io", &["leases"], verbs);
    let events = rule("events.k8s.io", &["events"], &["create", "patch"]);
    [
        // The Lease of the leader.
        (CONTROLLER_ACCOUNT, namespace, leases(&["get", "create", "update"])),
        // Those of the kubelets, only with --lease-timeout and --remediate.
        (CONTROLLER_ACCOUNT, LEASES, leases(&["list", "watch"])),
        (CONTROLLER_ACCOUNT, EVENTS, events),
        // That of the agent.
        (NODE_ACCOUNT, namespace, leases(&["get", "update"])),
    ]
}

fn grants_of_nodes() -> Value {
    rule(GROUP, &[PLURAL], &["get", "list", "watch"])
}

fn status(verbs: &[&str]) -> Value {
    rule(GROUP, &[&format!("{PLURAL}/status")], verbs)
}

fn rule(group: &str, resources: &[&str], verbs: &[&str]) -> Value {
    json!({ "apiGroups": [group], "resources": resources, "verbs": verbs })
}

/// The policy: the token of a node's pod names the node, and everything but the entry of that node must stay. RBAC
/// cannot say that, because it knows no fields.
fn policy(namespace: &str) -> [Value; 2] {
    let name = "cleat-node-writes-its-own-status";
    let resources = [PLURAL.to_owned(), format!("{PLURAL}/*")];
    let rules = json!([{
        "apiGroups": [GROUP], "apiVersions": ["*"], "resources": resources,
        "operations": ["CREATE", "UPDATE", "DELETE"],
    }]);
    let others = |object: &str| {
        format!("{object}.?status.?nodes.orValue([]).filter(entry, entry.node != variables.node)")
    };
    let same = |field: &str| {
        format!("object.?status.?{field}.orValue([]) == oldObject.?status.?{field}.orValue([])")
    };
    let is_in = |object: &str, part: &str, list: &str| {
        format!("{object}.?{part}.?{list}.orValue([]).exists(known, known.node == variables.node)")
    };
    // A node that was asked for the volume holds it, or was fenced. One with an entry may correct it.
    let named = [("spec", "holders"), ("status", "fences"), ("status", "nodes")]
        .map(|(part, list)| is_in("oldObject", part, list))
        .join(" || ");
    let is_status = "request.operation == 'UPDATE' && request.?subResource.orValue('') == 'status'";
    let otherwise = |expression: String| format!("!({is_status}) || ({expression})");
    let validations = [
        check(is_status.to_owned(), "a node may only update the status of a grant"),
        check("variables.node != ''".to_owned(), "the token names no node: use that of a pod"),
        check(
            otherwise(format!("!({}) || {named}", is_in("object", "status", "nodes"))),
            "a node may only write an entry in a grant that names it",
        ),
        check(
            otherwise("variables.others == variables.oldOthers".to_owned()),
            "a node may only change its own entry in status.nodes",
        ),
        check(otherwise(same("fences")), "a node may not change status.fences"),
        check(otherwise(same("waiting")), "a node may not change status.waiting"),
    ];
    let old = "request.operation == 'UPDATE' ? ";
    let variables = [
        variable("node", &node_of_token()),
        variable("others", &format!("{old}{} : []", others("object"))),
        variable("oldOthers", &format!("{old}{} : []", others("oldObject"))),
    ];
    policy_of_nodes(name, namespace, &rules, &variables, &validations)
}

/// The policy for the Leases of agents: a node may renew its own, and those of others and of the leader must stay.
fn lease_policy(namespace: &str) -> [Value; 2] {
    let rules = json!([{
        "apiGroups": ["coordination.k8s.io"], "apiVersions": ["*"], "resources": ["leases"],
        "operations": ["CREATE", "UPDATE", "DELETE"],
    }]);
    let own = format!(
        "request.operation == 'UPDATE' && {} != '' && request.name == '{}' + {}",
        node_of_token(),
        heartbeat::name_of(""),
        node_of_token()
    );
    let validations = [check(own, "a node may only renew its own Lease")];
    policy_of_nodes("cleat-node-renews-its-own-lease", namespace, &rules, &[], &validations)
}

/// Returns a policy for the requests of nodes with its binding.
fn policy_of_nodes(
    name: &str,
    namespace: &str,
    rules: &Value,
    variables: &[Value],
    validations: &[Value],
) -> [Value; 2] {
    let account = format!("system:serviceaccount:{namespace}:{NODE_ACCOUNT}");
    let is_node = format!("request.userInfo.username == '{account}'");
    let api = "admissionregistration.k8s.io/v1";
    let spec = json!({ "spec": {
        "failurePolicy": "Fail",
        "matchConstraints": { "resourceRules": rules },
        "matchConditions": [variable("is-a-node", &is_node)],
        "variables": variables,
        "validations": validations,
    } });
    let bound = json!({ "spec": { "policyName": name, "validationActions": ["Deny"] } });
    [
        object(api, "ValidatingAdmissionPolicy", name, None, spec),
        object(api, "ValidatingAdmissionPolicyBinding", name, None, bound),
    ]
}

/// The expression for the node that the token of a request names; empty if it names none.
fn node_of_token() -> String {
    format!("request.userInfo.?extra[?'{NODE_CLAIM}'][?0].orValue('')")
}

fn variable(name: &str, expression: &str) -> Value {
    json!({ "name": name, "expression": expression })
}

fn check(expression: String, message: &str) -> Value {
    json!({ "expression": expression, "message": message, "reason": "Forbidden" })
}

fn binding(kind: &str, account: &str, namespace: &str) -> Value {
    json!({
        "roleRef": { "apiGroup": "rbac.authorization.k8s.io", "kind": kind, "name": account },
        "subjects": [{ "kind": "ServiceAccount", "name": account, "namespace": namespace }],
    })
}

fn rbac(kind: &str, name: &str, namespace: Option<&str>, body: Value) -> Value {
    object("rbac.authorization.k8s.io/v1", kind, name, namespace, body)
}

fn object(api: &str, kind: &str, name: &str, namespace: Option<&str>, body: Value) -> Value {
    let mut object = body;
    object["apiVersion"] = json!(api);
    object["kind"] = json!(kind);
    object["metadata"] = json!({ "name": name });
    if let Some(namespace) = namespace {
        object["metadata"]["namespace"] = json!(namespace);
    }
    object
}

#[cfg(test)]
mod tests {
    use super::*;

    const COMMITTED: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../deploy/base/rights.yaml");

    #[test]
    fn the_committed_rights_are_those_of_the_code() {
        let committed = std::fs::read_to_string(COMMITTED).unwrap_or_default();
        let repair = "run: cleat controller --print-rights cleat-system > deploy/base/rights.yaml";
        assert!(
            committed == yaml("cleat-system", Extra::default()).unwrap(),
            "{COMMITTED} differs; {repair}"
        );
    }

    #[test]
    fn no_two_objects_have_one_name() {
        for taken in ["default", "kube-node-lease"] {
            assert!(yaml(taken, Extra::default()).is_err(), "{taken}");
        }
        let text = yaml("n", Extra { attach_detach: true, remediation: true }).unwrap();
        let mut names: Vec<String> = objects("n")
            .into_iter()
            .chain(attach_detach("n"))
            .chain(remediation("n"))
            .map(|object| format!("{} {}", object["kind"], object["metadata"]))
            .collect();
        let all = names.len();
        assert_eq!(text.matches("\nkind: ").count(), all);
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), all);
    }

    #[test]
    fn a_node_may_read_grants_and_update_their_status_only() {
        let objects = objects("n");
        let role = objects.iter().find(|known| {
            known["kind"] == "ClusterRole" && known["metadata"]["name"] == NODE_ACCOUNT
        });
        let rules = role.unwrap()["rules"].as_array().unwrap().clone();
        let verbs: Vec<&Value> = rules.iter().map(|rule| &rule["verbs"]).collect();
        assert_eq!(verbs, [&json!(["get", "list", "watch"]), &json!(["update"])]);
        assert_eq!(rules[1]["resources"], json!(["volumegrants/status"]));
    }
}
