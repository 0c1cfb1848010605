//! The calls of CSI and CSI-Addons, from the descriptors of their services.

use std::fmt::Write as _;
use std::sync::LazyLock;

use prost_reflect::{DescriptorPool, DynamicMessage, FieldDescriptor, Kind, MessageDescriptor};
use prost_reflect::{MethodDescriptor, Value};
use serde::Serialize;
use tonic::codegen::http::uri::PathAndQuery;

use crate::cli::output::{self, Format};
use cleat_core::error::{Error, ErrorKind, Result};

static POOL: LazyLock<DescriptorPool> = LazyLock::new(|| {
    DescriptorPool::decode(cleat_csi_api::DESCRIPTORS).expect("the compiler has written them")
});

/// The package of kubelet's registration, whose calls are not for drivers.
const REGISTRATION: &str = "pluginregistration";

/// How deep messages in messages are filled in an example.
const MAX_DEPTH: u32 = 4;

/// One call in the list.
#[derive(Serialize)]
struct Entry {
    service: String,
    call: String,
}

/// Prints the calls.
pub(super) fn list(format: Option<Format>) -> Result<()> {
    let entries = all().map(|call| Entry {
        service: call.parent_service().full_name().to_owned(),
        call: call.name().to_owned(),
    });
    let entries: Vec<Entry> = entries.collect();
    if format == Some(Format::Json) {
        return output::json(&entries);
    }
    let mut text = String::new();
    for Entry { service, call } in &entries {
        let _ = writeln!(text, "{call:<34} {service}");
    }
    output::text(&text)
}

/// Returns the call with this name, in any case, or with `SERVICE/CALL`.
///
/// # Errors
/// Returns `InvalidArgument` if there is none, or several.
pub(super) fn find(name: &str) -> Result<MethodDescriptor> {
    let (service, call) = name.rsplit_once('/').map_or((None, name), |(s, c)| (Some(s), c));
    let wanted = |found: &MethodDescriptor| {
        found.name().eq_ignore_ascii_case(call)
            && service.is_none_or(|name| found.parent_service().full_name() == name)
    };
    let mut found: Vec<MethodDescriptor> = all().filter(wanted).collect();
    let invalid = |message: String| Error::new(ErrorKind::InvalidArgument, message);
    match found.len() {
        1 => Ok(found.remove(0)),
        0 => {
            Err(invalid(format!("there is no call {name:?}"))
                .with_repair("cleat csi lists the calls"))
        }
        _ => {
            let names = found
                .iter()
                .map(|call| format!("{}/{}", call.parent_service().full_name(), call.name()));
            Err(invalid(format!("several services have the call {name}"))
                .with_repair(format!("write {}", names.collect::<Vec<_>>().join(" or "))))
        }
    }
}

/// Returns the path of a call in gRPC.
pub(super) fn path(call: &MethodDescriptor) -> PathAndQuery {
    let path = format!("/{}/{}", call.parent_service().full_name(), call.name());
    PathAndQuery::try_from(path)
        .expect("names of Protocol Buffers are letters, digits, '.' and '_'")
}

/// Returns an example of a message: each field has its default value, each list one element, and of the fields that
/// exclude each other there is the first.
pub(super) fn template(message: MessageDescriptor) -> DynamicMessage {
    filled(message, MAX_DEPTH)
}

fn filled(message: MessageDescriptor, depth: u32) -> DynamicMessage {
    let mut filled_message = DynamicMessage::new(message.clone());
    for field in message.fields() {
        let is_other = field.containing_oneof().is_some_and(|oneof| {
            oneof.fields().next().is_some_and(|first| first.number() != field.number())
        });
        if depth > 0
            && !is_other
            && let Some(value) = example(&field, depth)
        {
            filled_message.set_field(&field, value);
        }
    }
    filled_message
}

/// Returns an example of a field, or `None` if its default value is one.
fn example(field: &FieldDescriptor, depth: u32) -> Option<Value> {
    let value = match field.kind() {
        Kind::Message(_) if field.is_map() => return None,
        Kind::Message(inner) => Value::Message(filled(inner, depth - 1)),
        kind if field.is_list() => Value::default_value(&kind),
        _ => return None,
    };
    Some(if field.is_list() { Value::List(vec![value]) } else { value })
}

/// The calls with one request and one answer.
fn all() -> impl Iterator<Item = MethodDescriptor> {
    let services = POOL.services().filter(|service| service.package_name() != REGISTRATION);
    let calls = services.flat_map(|service| service.methods().collect::<Vec<_>>());
    calls.filter(|call| !call.is_server_streaming() && !call.is_client_streaming())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_are_found_by_their_names() {
        assert_eq!(path(&find("nodestagevolume").unwrap()), "/csi.v1.Node/NodeStageVolume");
        assert_eq!(path(&find("csi.v1.Identity/Probe").unwrap()), "/csi.v1.Identity/Probe");
        let error = find("Probe").unwrap_err();
        assert!(error.repair().unwrap().contains("csi.v1.Identity/Probe"), "{error}");
        assert!(find("Prob").unwrap_err().repair().unwrap().contains("cleat csi"));
        assert!(find("GetInfo").is_err(), "a call of the registration");
        assert!(all().count() > 40);
    }

    #[test]
    fn the_example_of_each_request_is_a_request() {
        for call in all() {
            let json = super::super::json(&template(call.input())).unwrap();
            let request = super::super::request(call.input(), Some(&json.to_string()));
            request.unwrap_or_else(|error| panic!("{}: {error}", call.full_name()));
        }
        let create = template(find("CreateVolume").unwrap().input());
        let json = super::super::json(&create).unwrap();
        assert_eq!(json["volumeCapabilities"][0]["accessMode"]["mode"], "UNKNOWN");
    }
}
