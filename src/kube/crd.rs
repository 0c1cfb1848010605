//! The custom resource definition of grants, generated from the types of `cleat_grants`.

use schemars::JsonSchema;
use schemars::generate::SchemaSettings;
use serde_json::{Map, Value, json};

use cleat_grants::limits::{MAX_CONDITIONS, MAX_ENTRIES, MAX_FENCES, MAX_HOLDERS};
use cleat_grants::object::{GrantSpec, GrantStatus};

use crate::grant::{GROUP, KIND, MAX_WAITING, PLURAL, VERSION, Waiting};

/// Returns the definition as YAML, for `kubectl apply`.
pub fn yaml() -> String {
    to_yaml(&definition())
}

/// Returns an object as YAML.
pub(crate) fn to_yaml(object: &Value) -> String {
    let mut text = String::new();
    write_yaml(object, 0, &mut text);
    text
}

/// Returns the definition.
pub fn definition() -> Value {
    let mut spec = schema::<GrantSpec>();
    list_map(&mut spec["properties"]["holders"], &["node"], MAX_HOLDERS);
    let mut status = schema::<GrantStatus>();
    let properties = &mut status["properties"];
    list_map(&mut properties["nodes"], &["node"], MAX_ENTRIES);
    let conditions = &mut properties["nodes"]["items"]["properties"]["conditions"];
    list_map(conditions, &["type"], MAX_CONDITIONS);
    list_map(&mut properties["fences"], &["node", "generation"], MAX_FENCES);
    properties["waiting"] = json!({
        "type": "array",
        "description": "What the volume waits for, for users: no decision depends on it.",
        "items": schema::<Waiting>(),
        "maxItems": MAX_WAITING,
        "x-kubernetes-list-type": "atomic",
    });
    let description = "Says which nodes may use a volume, and what is true on them.";
    let schema = json!({
        "type": "object",
        "description": description,
        "required": ["spec"],
        "properties": {
            "apiVersion": { "type": "string" },
            "kind": { "type": "string" },
            "metadata": { "type": "object" },
            "spec": spec,
            "status": status,
        },
    });
    json!({
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": { "name": format!("{PLURAL}.{GROUP}") },
        "spec": {
            "group": GROUP,
            "scope": "Cluster",
            "names": {
                "kind": KIND, "listKind": format!("{KIND}List"), "plural": PLURAL,
                "singular": KIND.to_lowercase(), "shortNames": ["grant", "grants"],
            },
            "versions": [{
                "name": VERSION,
                "served": true,
                "storage": true,
                "subresources": { "status": {} },
                "additionalPrinterColumns": columns(),
                "schema": { "openAPIV3Schema": schema },
            }],
        },
    })
}

/// The columns of `kubectl get`: the holder, since when, what the volume waits for, what to do, and the other holders.
fn columns() -> Value {
    let others = r".metadata.annotations.cleat\.csi\.storage/other-holders";
    let mut columns = vec![
        column(
            "Holder",
            "string",
            ".spec.holders[0].node",
            "The first node that may use the volume",
        ),
        column("Since", "date", ".spec.holders[0].since", "Since the grant or its revocation"),
        column("Revoked", "boolean", ".spec.holders[0].revoked", "Whether it must end its use"),
        column("Waits for", "string", ".status.waiting[0].message", "What has to happen"),
        column("To do", "string", ".status.waiting[0].action", "What an administrator can do"),
        column("Others", "string", others, "The other nodes that may use the volume"),
    ];
    let volume = r".metadata.annotations.cleat\.csi\.storage/volume";
    let wide = [
        column("Mode", "string", ".spec.holders[0].mode", "How the holder may use the volume"),
        column("Generation", "integer", ".spec.generation", "The last generation given out"),
        column("Device", "string", ".status.nodes[0].devicePath", "The device on the first node"),
        column("Volume", "string", volume, "The CSI volume handle"),
    ];
    columns.extend(wide.into_iter().map(|mut column| {
        column["priority"] = json!(1);
        column
    }));
    Value::Array(columns)
}

fn column(name: &str, kind: &str, path: &str, description: &str) -> Value {
    json!({ "name": name, "type": kind, "jsonPath": path, "description": description })
}

/// Makes a list a map with the keys `keys`, so that two writers of different entries do not conflict in an apply,
/// and bounds it.
fn list_map(list: &mut Value, keys: &[&str], max: usize) {
    list["x-kubernetes-list-type"] = json!("map");
    list["x-kubernetes-list-map-keys"] = json!(keys);
    list["maxItems"] = json!(max);
}

/// Returns the schema of a type in the form that the API server accepts.
fn schema<T: JsonSchema>() -> Value {
    let settings = SchemaSettings::openapi3().with(|settings| settings.inline_subschemas = true);
    let mut schema = settings.into_generator().into_root_schema_for::<T>().to_value();
    make_structural(&mut schema);
    schema
}

/// Rewrites what the structural schemas of Kubernetes do not have: references to other dialects, titles, lists
/// of constants, formats without a sign, and nullable types (cleat leaves absent fields out).
fn make_structural(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            for unknown in ["$schema", "title", "nullable", "default"] {
                if !fields.get(unknown).is_some_and(Value::is_object) {
                    fields.remove(unknown);
                }
            }
            if fields.get("format").is_some_and(|format| format == "uint64") {
                fields.insert("format".to_owned(), json!("int64"));
            }
            if let Some(Value::Array(constants)) = fields.remove("oneOf") {
                one_of_constants(fields, &constants);
            }
            fields.values_mut().for_each(make_structural);
        }
        Value::Array(items) => items.iter_mut().for_each(make_structural),
        _ => {}
    }
    // One line for each description: line breaks of the source have no meaning.
    if let Some(Value::String(text)) = value.get_mut("description") {
        *text = text.split_whitespace().collect::<Vec<_>>().join(" ").replace(['[', ']', '`'], "");
    }
}

fn one_of_constants(fields: &mut Map<String, Value>, constants: &[Value]) {
    let mut names = Vec::new();
    for constant in constants {
        names.extend(constant["enum"].as_array().cloned().unwrap_or_default());
        names.extend(constant.get("const").cloned());
    }
    fields.insert("type".to_owned(), json!("string"));
    fields.insert("enum".to_owned(), Value::Array(names));
}

/// Writes JSON as YAML in block style.
fn write_yaml(value: &Value, indent: usize, out: &mut String) {
    let space = "  ".repeat(indent);
    match value {
        Value::Object(fields) if !fields.is_empty() => {
            for (name, value) in fields {
                out.push_str(&space);
                out.push_str(&scalar(&json!(name)));
                out.push(':');
                write_child(value, indent + 1, out);
            }
        }
        Value::Array(items) if !items.is_empty() => {
            for item in items {
                let mut text = String::new();
                write_child(item, indent + 1, &mut text);
                // The first line of an item follows its dash.
                let text = text.trim_start_matches('\n').trim_start();
                out.push_str(&format!("{space}- {text}"));
            }
        }
        value => {
            out.push_str(&format!("{space}{}\n", scalar(value)));
        }
    }
}

fn write_child(value: &Value, indent: usize, out: &mut String) {
    let is_block = match value {
        Value::Object(fields) => !fields.is_empty(),
        Value::Array(items) => !items.is_empty(),
        _ => false,
    };
    if is_block {
        out.push('\n');
        write_yaml(value, indent, out);
    } else {
        out.push_str(&format!(" {}\n", scalar(value)));
    }
}

/// Writes a scalar. A text that YAML could read as something else is quoted as in JSON.
fn scalar(value: &Value) -> String {
    const WORDS: [&str; 8] = ["true", "false", "yes", "no", "on", "off", "null", "y"];
    let Value::String(text) = value else { return value.to_string() };
    let is_word = |c: char| c.is_ascii_alphanumeric() || "-_./$".contains(c);
    let is_plain = text.starts_with(|c: char| c.is_ascii_alphabetic() || c == '.' || c == '$')
        && text.chars().all(is_word)
        && !WORDS.contains(&&*text.to_lowercase());
    if is_plain { text.clone() } else { value.to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::grant;
    use cleat_grants::limits;

    const COMMITTED: &str =
        concat!(env!("CARGO_MANIFEST_DIR"), "/../../deploy/base/volumegrants.yaml");

    #[test]
    fn the_committed_definition_is_the_one_of_the_code() {
        let committed = std::fs::read_to_string(COMMITTED).unwrap_or_default();
        let repair = "run: cleat controller --print-crd > deploy/base/volumegrants.yaml";
        assert!(committed == yaml(), "{COMMITTED} differs; {repair}");
    }

    #[test]
    fn every_field_of_a_grant_is_in_the_schema() {
        let schema = &definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"];
        let holder = &schema["properties"]["spec"]["properties"]["holders"]["items"];
        for field in ["node", "mode", "generation", "revoked", "since", "podUIDs"] {
            assert!(holder["properties"][field].is_object(), "{field}: {holder}");
        }
        assert_eq!(holder["properties"]["mode"]["enum"][0], "ReadWrite");
        let entry = &schema["properties"]["status"]["properties"]["nodes"]["items"]["properties"];
        for field in ["node", "generation", "intents", "client", "devicePath", "conditions"] {
            assert!(entry[field].is_object(), "{field}: {entry}");
        }
        assert_eq!(entry["client"]["type"], "string");
        assert_eq!(entry["generation"]["format"], "int64");
        // A newer build may have a reason that this one does not know.
        let condition = &entry["conditions"]["items"]["properties"];
        assert_eq!(condition["reason"]["type"], "string");
        assert_eq!(condition["reason"]["enum"], Value::Null);
    }

    /// Returns the size of the largest JSON that a schema permits.
    fn largest(schema: &Value) -> usize {
        let number = |field: &str| {
            let limit = schema[field].as_u64();
            usize::try_from(limit.unwrap_or_else(|| panic!("no {field}: {schema}"))).unwrap()
        };
        let sum = |(name, schema): (&String, &Value)| name.len() + 4 + largest(schema);
        match schema["type"].as_str().unwrap() {
            "boolean" => 5,
            "integer" => 20,
            "array" => 2 + number("maxItems") * (1 + largest(&schema["items"])),
            "object" => {
                2 + schema["properties"].as_object().unwrap().iter().map(sum).sum::<usize>()
            }
            "string" => match (&schema["enum"], schema["pattern"].as_str()) {
                (Value::Array(texts), _) => {
                    texts.iter().map(|text| text.to_string().len()).max().unwrap()
                }
                // Any character can be one that JSON writes with six.
                (_, None) => 2 + 6 * number("maxLength"),
                // Quotation marks and backslashes.
                (_, Some(limits::TEXT)) => 2 + 2 * number("maxLength"),
                (_, Some(pattern)) => {
                    let is_time = pattern.contains("T(");
                    assert!(
                        [limits::NAME, limits::WORD].contains(&pattern) || is_time,
                        "{pattern}"
                    );
                    2 + number("maxLength")
                }
            },
            other => panic!("{other}"),
        }
    }

    #[test]
    fn the_largest_grant_has_less_than_1_mib() {
        let schema = &definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"];
        let of = |field: &str| largest(&schema["properties"][field]);
        // The labels of nodes, and the names of the other holders in an annotation.
        let labels = (MAX_HOLDERS + MAX_FENCES) * (grant::node_label(&"n".repeat(253)).len() + 6);
        let others = MAX_HOLDERS * (limits::MAX_NODE + ", (revoked)".len());
        let all = of("spec") + of("status") + labels + others;
        assert!(all < 1 << 20, "{all} bytes");
        assert!(all > 900_000, "{all} bytes: the bounds of lists could be higher");
    }

    #[test]
    fn yaml_quotes_what_it_would_read_as_something_else() {
        let mut text = String::new();
        let value = json!({"a": ["x y", {"b": true, "c": "true"}], "d": {}, "e": [[1, "1"]]});
        write_yaml(&value, 0, &mut text);
        let expected =
            "a:\n  - \"x y\"\n  - b: true\n    c: \"true\"\nd: {}\ne:\n  - - 1\n    - \"1\"\n";
        assert_eq!(text, expected);
    }
}
