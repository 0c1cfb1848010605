//! Mappings whose users gave no name.

use tonic::Code;

use test_kit::node::{Machine, assert_code, repair};

#[test]
fn a_volume_has_one_name_whatever_its_options() {
    let machine = Machine::new();
    let supervisor = machine.start();
    let uri = machine.volume("a");
    let mapping = supervisor.map("", &format!("{uri}?direct=false")).unwrap();
    assert_eq!(supervisor.map("", &format!("{uri}?direct=false")).unwrap(), mapping);
    for (options, has, lacks) in
        [("", "direct=false", "none"), ("?direct=true", "direct=false", "direct=true")]
    {
        let refused = supervisor.map("", &format!("{uri}{options}"));
        assert!(repair(refused.as_ref().unwrap_err()).contains("unmap it first"));
        assert_code(refused.clone(), Code::AlreadyExists, &mapping.name);
        assert_code(refused.clone(), Code::AlreadyExists, has);
        assert_code(refused, Code::AlreadyExists, lacks);
    }
    // A name of its own makes it no other volume: the claim keeps the second writer out.
    assert_code(supervisor.map("other", &uri), Code::FailedPrecondition, "");
    assert_eq!(supervisor.list(), std::slice::from_ref(&mapping));
    // Who means the volume means this mapping; who names options means those.
    assert_code(supervisor.get(&format!("{uri}?direct=true")), Code::NotFound, "");
    assert_eq!(supervisor.get(&uri).unwrap(), mapping);
    assert!(supervisor.unmap(&uri).unwrap());
    machine.assert_clean();
}

/// Earlier builds took the options into the name, and journals have such names.
#[test]
fn names_that_an_earlier_build_gave_are_kept() {
    let machine = Machine::new();
    let supervisor = machine.start();
    // FNV-1a of the whole, as such a build wrote it.
    let (uri, name) = ("mem:1M?", "mem-1M-52b4c18b");
    let mapping = supervisor.map(name, uri).unwrap();
    assert_eq!(supervisor.map("", uri).unwrap(), mapping);
    supervisor.crash();
    let supervisor = machine.start();
    assert_eq!(supervisor.map("", uri).unwrap().mapping_id, mapping.mapping_id);
    // Another name of the user's own is not taken for a derived one.
    let own = supervisor.map("own", "mem:2M").unwrap();
    assert_ne!(supervisor.map("", "mem:2M").unwrap().name, own.name);
    for mapping in supervisor.list() {
        supervisor.unmap(&mapping.name).unwrap();
    }
    machine.assert_clean();
}
