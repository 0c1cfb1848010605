//! The rights of the controller and of the agents of nodes, as objects for `kubectl apply`: roles with exactly what
//! they use, and a policy that permits a node to change its own status entries only.

use serde_json::{Value, json};

use crate::crd;
use crate::events::EVENTS;
use crate::grant::{GROUP, PLURAL};
use crate::nodes::LEASES;

/// The service account of the agents of nodes.
pub const NODE_ACCOUNT: &str = "cleat-node";

/// The service account of the controller.
pub const CONTROLLER_ACCOUNT: &str = "cleat-controller";

/// The claim of a pod's token that names its node.
const NODE_CLAIM: &str = "authentication.kubernetes.io/node-name";

/// The cluster role of the attach/detach loop.
const ATTACH_DETACH: &str = "cleat-controller-attach-detach";

/// Returns the objects as YAML documents. `namespace` is that of the pods. `attach_detach` adds the rights of the
/// attach/detach loop.
pub fn yaml(namespace: &str, attach_detach: bool) -> String {
    let mut objects = objects(namespace);
    if attach_detach {
        objects.extend(self::attach_detach(namespace));
    }
    let documents: Vec<String> = objects.iter().map(crd::to_yaml).collect();
    documents.join("---\n")
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
    for (role_namespace, rules) in controller_roles(namespace) {
        let role = json!({ "rules": [rules] });
        objects.push(rbac("Role", CONTROLLER_ACCOUNT, Some(role_namespace), role));
        let bound = binding("Role", CONTROLLER_ACCOUNT, namespace);
        objects.push(rbac("RoleBinding", CONTROLLER_ACCOUNT, Some(role_namespace), bound));
    }
    objects.extend(policy(namespace));
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
    let mut bound = binding("ClusterRole", CONTROLLER_ACCOUNT, namespace);
    bound["roleRef"]["name"] = json!(ATTACH_DETACH);
    [
        rbac("ClusterRole", ATTACH_DETACH, None, json!({ "rules": rules })),
        rbac("ClusterRoleBinding", ATTACH_DETACH, None, bound),
    ]
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
        rule("", &["nodes"], &watch),
        rule(storage, &["csinodes"], &watch),
    ])
}

/// Returns the rights of the controller in single namespaces.
fn controller_roles(namespace: &str) -> [(&str, Value); 3] {
    let leases = |verbs| rule("coordination.k8s.io", &["leases"], verbs);
    [
        // The Lease of the leader.
        (namespace, leases(&["get", "create", "update"])),
        // Those of the nodes, only with --lease-timeout.
        (LEASES, leases(&["list", "watch"])),
        (EVENTS, rule("events.k8s.io", &["events"], &["create", "patch"])),
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
    let account = format!("system:serviceaccount:{namespace}:{NODE_ACCOUNT}");
    let resources = [PLURAL.to_owned(), format!("{PLURAL}/*")];
    let rules = json!([{
        "apiGroups": [GROUP], "apiVersions": ["*"], "resources": resources,
        "operations": ["CREATE", "UPDATE", "DELETE"],
    }]);
    let variable = |name: &str, expression: &str| json!({ "name": name, "expression": expression });
    let claim = format!("request.userInfo.?extra[?'{NODE_CLAIM}'][?0].orValue('')");
    let others = |object: &str| {
        format!("{object}.?status.?nodes.orValue([]).filter(entry, entry.node != variables.node)")
    };
    let same = |field: &str| {
        format!("object.?status.?{field}.orValue([]) == oldObject.?status.?{field}.orValue([])")
    };
    let check = |expression: String, message: &str| json!({ "expression": expression, "message": message, "reason": "Forbidden" });
    let is_status = "request.operation == 'UPDATE' && request.?subResource.orValue('') == 'status'";
    let otherwise = |expression: String| format!("!({is_status}) || ({expression})");
    let validations = [
        check(is_status.to_owned(), "a node may only update the status of a grant"),
        check("variables.node != ''".to_owned(), "the token names no node: use that of a pod"),
        check(
            otherwise("variables.others == variables.oldOthers".to_owned()),
            "a node may only change its own entry in status.nodes",
        ),
        check(otherwise(same("fences")), "a node may not change status.fences"),
        check(otherwise(same("waiting")), "a node may not change status.waiting"),
    ];
    let is_node = format!("request.userInfo.username == '{account}'");
    let api = "admissionregistration.k8s.io/v1";
    let old = "request.operation == 'UPDATE' ? ";
    let spec = json!({ "spec": {
        "failurePolicy": "Fail",
        "matchConstraints": { "resourceRules": rules },
        "matchConditions": [variable("is-a-node", &is_node)],
        "variables": [
            variable("node", &claim),
            variable("others", &format!("{old}{} : []", others("object"))),
            variable("oldOthers", &format!("{old}{} : []", others("oldObject"))),
        ],
        "validations": validations,
    } });
    let bound = json!({ "spec": { "policyName": name, "validationActions": ["Deny"] } });
    [
        object(api, "ValidatingAdmissionPolicy", name, None, spec),
        object(api, "ValidatingAdmissionPolicyBinding", name, None, bound),
    ]
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
        assert!(committed == yaml("cleat-system", false), "{COMMITTED} differs; {repair}");
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
