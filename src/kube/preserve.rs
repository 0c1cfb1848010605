//! Writes what has changed, and leaves everything else as the API server has it.
//!
//! Reading an object loses what this build does not know: fields and reasons of a newer build, entries that cannot be
//! read, fractions of seconds. A write replaces the whole object. If it were made from what was read, it would remove all
//! of this; and the policy for nodes would refuse it, because entries of other nodes would change.

use serde_json::{Map, Value};

/// Applies the difference between `before`, which was read from `stored`, and `after` to `stored`.
pub(crate) fn apply(stored: &mut Value, before: &Value, after: &Value) {
    apply_field("", stored, before, after);
}

fn apply_field(name: &str, stored: &mut Value, before: &Value, after: &Value) {
    if before == after {
        return;
    }
    match (before, after, stored) {
        (Value::Object(before), Value::Object(after), Value::Object(stored)) => {
            apply_fields(stored, before, after);
        }
        (Value::Array(before), Value::Array(after), Value::Array(stored))
            if !keys(name).is_empty() =>
        {
            apply_elements(keys(name), stored, before, after);
        }
        (_, _, stored) => *stored = after.clone(),
    }
}

fn apply_fields(
    stored: &mut Map<String, Value>,
    before: &Map<String, Value>,
    after: &Map<String, Value>,
) {
    stored.retain(|name, _| after.contains_key(name) || !before.contains_key(name));
    for (name, after) in after {
        match (before.get(name), stored.get_mut(name)) {
            (Some(before), Some(stored)) => apply_field(name, stored, before, after),
            // A default, which is not stored.
            (Some(before), None) if before == after => {}
            (_, _) => {
                stored.insert(name.clone(), after.clone());
            }
        }
    }
}

/// Applies the difference to a list whose elements have keys. Its order stays, because the policy compares it.
fn apply_elements(keys: &[&str], stored: &mut Vec<Value>, before: &[Value], after: &[Value]) {
    let is_same = |a: &Value, b: &Value| keys.iter().all(|key| a.get(key) == b.get(key));
    let find = |list: &[Value], known: &Value| list.iter().position(|other| is_same(other, known));
    stored.retain(|known| find(after, known).is_some() || find(before, known).is_none());
    for element in after {
        match (find(before, element), find(stored, element)) {
            (Some(before_at), Some(at)) => {
                apply_field("", &mut stored[at], &before[before_at], element);
            }
            // This build could not read it.
            (None, Some(at)) => stored[at] = element.clone(),
            (_, None) => stored.push(element.clone()),
        }
    }
}

/// Returns the keys of the elements of a list in a grant, as its definition has them. None: it is replaced as a whole.
fn keys(list: &str) -> &'static [&'static str] {
    match list {
        "holders" | "nodes" => &["node"],
        "fences" => &["node", "generation"],
        "conditions" => &["type"],
        _ => &[],
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn applied(mut stored: Value, before: &Value, after: &Value) -> Value {
        apply(&mut stored, before, after);
        stored
    }

    #[test]
    fn what_was_not_changed_stays_as_it_is_stored() {
        let condition = json!({ "type": "C", "status": "True", "reason": "Other", "message": "" });
        let entry = |node: &str| json!({ "node": node, "intents": 1, "conditions": [condition] });
        let before = json!({ "nodes": [entry("a"), entry("b")] });
        let newer = json!({ "type": "C", "status": "True", "reason": "Invented", "x": 1 });
        let foreign = json!({ "node": "a", "y": 2, "conditions": [newer, { "type": "D" }] });
        let own = json!({ "node": "b", "intents": 1, "conditions": [newer] });
        let stored =
            json!({ "z": 3, "nodes": [{ "node": "c", "generation": 1e19 }, foreign, own] });
        assert_eq!(applied(stored.clone(), &before, &before), stored);

        let mut after = before.clone();
        after["nodes"][1]["intents"] = json!(2);
        after["nodes"][1]["conditions"][0]["status"] = json!("False");
        // As the agent does, at another place of the list.
        after["nodes"].as_array_mut().unwrap().rotate_left(1);
        let mut expected = stored.clone();
        expected["nodes"][2]["intents"] = json!(2);
        expected["nodes"][2]["conditions"][0]["status"] = json!("False");
        assert_eq!(applied(stored, &before, &after), expected);
    }

    #[test]
    fn elements_come_and_go_by_their_keys() {
        let fence = |node: &str, generation: u64| json!({ "node": node, "generation": generation });
        let stored = json!({ "fences": [fence("a", 1), fence("a", 2), fence("b", 1)] });
        let before = stored.clone();
        let after = json!({ "fences": [fence("b", 1), fence("a", 2), fence("c", 4)] });
        let expected = json!({ "fences": [fence("a", 2), fence("b", 1), fence("c", 4)] });
        assert_eq!(applied(stored.clone(), &before, &after), expected);
        // The last one, and the first one.
        assert_eq!(applied(stored, &before, &json!({})), json!({}));
        let after = json!({ "fences": [fence("a", 1)] });
        assert_eq!(applied(json!({}), &json!({}), &after), after);
        // One that could not be read.
        let stored = json!({ "nodes": [{ "node": "a", "generation": -1 }] });
        let after = json!({ "nodes": [{ "node": "a", "generation": 1 }] });
        assert_eq!(applied(stored, &json!({}), &after), after);
    }

    #[test]
    fn fields_come_and_go_and_other_lists_are_replaced() {
        let stored = json!({ "a": 1, "b": 2, "x": 0, "waiting": [1, 2], "podUIDs": ["u"] });
        let before = json!({ "a": 1, "b": 2, "c": "", "waiting": [1, 2], "podUIDs": ["u"] });
        let after = json!({ "a": 3, "c": "", "waiting": [2], "podUIDs": ["u"] });
        let expected = json!({ "a": 3, "x": 0, "waiting": [2], "podUIDs": ["u"] });
        assert_eq!(applied(stored, &before, &after), expected);
    }
}
