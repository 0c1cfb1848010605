//! Mappings that were requested without a name.

use tonic::Code;

use test_kit::node::{Machine, assert_code, repair};

#[test]
fn the_derived_name_of_a_volume_does_not_depend_on_its_options() {
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
    // Under another name it is still the same volume, and the claim refuses a second writer.
    assert_code(supervisor.map("other", &uri), Code::FailedPrecondition, "is being written by");
    assert_eq!(supervisor.list(), std::slice::from_ref(&mapping));
    // A URI without options matches any options; a URI with options matches only the same options.
    let unknown = supervisor.get(&format!("{uri}?direct=true"));
    assert_code(unknown, Code::NotFound, "no mapping has the name, URI or device");
    assert_eq!(supervisor.get(&uri).unwrap(), mapping);
    assert!(supervisor.unmap(&uri).unwrap());
    machine.assert_clean();
}

/// Earlier builds derived the name from the options, too, and journals have such names.
#[test]
fn a_name_that_the_user_chose_is_not_taken_for_a_derived_one() {
    let machine = Machine::new();
    let supervisor = machine.start();
    let own = supervisor.map("own", "mem:2M").unwrap();
    assert_ne!(supervisor.map("", "mem:2M").unwrap().name, own.name);
    for mapping in supervisor.list() {
        supervisor.unmap(&mapping.name).unwrap();
    }
    machine.assert_clean();
}
