//! Tests of the URI grammar, with the backends of this crate.

use proptest::prelude::*;

use super::*;
use crate::Registry;

/// The backends of this crate.
#[cfg(feature = "fault")]
const REGISTRY: Registry =
    Registry::new(&[crate::mem::BACKEND, crate::file::BACKEND, crate::fault::BACKEND]);
#[cfg(not(feature = "fault"))]
const REGISTRY: Registry = Registry::new(&[crate::mem::BACKEND, crate::file::BACKEND]);

fn uri(text: &str) -> VolumeUri {
    REGISTRY.volume(text).unwrap_or_else(|error| panic!("{text}: {}", error.report()))
}

fn refused(text: &str) -> Error {
    REGISTRY.volume(text).expect_err(text)
}

fn store(text: &str) -> StoreUri {
    REGISTRY.store(text).unwrap_or_else(|error| panic!("{text}: {}", error.report()))
}

#[test]
fn canonical_forms() {
    for (given, canonical) in [
        ("mem:1024M", "mem:1G"),
        ("mem:1536Mi", "mem:1536M"),
        ("mem:4097", "mem:4097"),
        ("file:/var//lib/./a.img/", "file:/var/lib/a.img"),
        ("file:///dev/sdb?direct=false", "file:/dev/sdb"),
        ("file:/a%3fb%20c?create=1024&direct=true", "file:/a%3fb%20c?direct=true&create=1K"),
        ("file:/ä", "file:/%c3%a4"),
    ] {
        assert_eq!(uri(given).to_string(), canonical, "{given}");
    }
}

#[test]
fn errors_name_the_cause_and_the_choice() {
    for (given, kind, cause, repair) in [
        ("/dev/sdb", ErrorKind::InvalidArgument, "no scheme", "file:/dev/sdb"),
        ("disk", ErrorKind::InvalidArgument, "no scheme", "mem:1G"),
        ("nfs:/x", ErrorKind::InvalidArgument, "\"nfs\" is unknown", "mem:1G"),
        ("file:a.img", ErrorKind::InvalidArgument, "absolute", "whole path"),
        ("file:/a?drect=true", ErrorKind::InvalidArgument, "\"drect\"", "direct, create"),
        ("file:/a?direct=true&direct=true", ErrorKind::InvalidArgument, "twice", ""),
        ("file:/a?direct=yes", ErrorKind::InvalidArgument, "true or false", ""),
        ("file:/a?direct", ErrorKind::InvalidArgument, "has no value", ""),
        ("file:/a%0", ErrorKind::InvalidArgument, "%", "%25"),
        ("file:/a%00", ErrorKind::InvalidArgument, "zero byte", ""),
        ("file:/", ErrorKind::InvalidArgument, "names no file", ""),
        ("mem:1G?direct=true", ErrorKind::InvalidArgument, "\"direct\"", "no options"),
        ("mem:", ErrorKind::InvalidArgument, "size", "1G"),
        ("mem:0", ErrorKind::InvalidArgument, "zero", ""),
        ("mem:1GB", ErrorKind::InvalidArgument, "1GB", "1024"),
        ("mem:99E", ErrorKind::InvalidArgument, "largest", ""),
    ] {
        let error = refused(given);
        assert_eq!(error.kind(), kind, "{given}");
        assert!(error.message().contains(cause), "{given}: {}", error.message());
        assert!(error.repair().unwrap_or("").contains(repair), "{given}: {:?}", error.repair());
    }
    assert!(refused(&format!("file:/{}", "a".repeat(MAX_URI))).message().contains("4096"));
}

#[test]
fn default_names() {
    assert_eq!(uri("file:/var/lib/a.img").default_name(), "file-var-lib-a.img");
    assert_eq!(uri("file:/var/lib/a.img?direct=true").default_name(), "file-var-lib-a.img");
    assert_eq!(uri("mem:1G").default_name(), "mem-1G");
    let (a, b) = (uri("file:/a b").default_name(), uri("file:/a+b").default_name());
    assert_ne!(a, b);
}

#[cfg(feature = "fault")]
#[test]
fn faults_wrap_a_volume() {
    let text = "fault:file:/a?direct=true&fault.latency=10ms";
    assert_eq!(uri(text).to_string(), text);
    assert_eq!(uri(text).default_name(), "fault-file-a");
    assert!(refused("fault:fault:mem:1G").message().contains("another fault:"));
    assert!(refused("fault:mem:1G?latency=1s").message().contains("has no option \"latency\""));
    assert!(refused("fault:mem:1G?fault.latency=x").message().contains("latency is a time"));
}

proptest! {
    #[test]
    fn no_text_panics_and_what_parses_is_canonical(text in "(mem|file|fault|rbd):.{0,60}") {
        if let Ok(parsed) = REGISTRY.volume(&text) {
            prop_assert_eq!(uri(&parsed.to_string()), parsed);
        }
    }
}

#[test]
fn files_are_found_in_their_directories_and_back() {
    for (volume, shown, name) in
        [("file:/var/a%20b/c.img", "file:/var/a%20b", "c.img"), ("file:/c.img", "file:/", "c.img")]
    {
        let (found, its_name, snapshot) = uri(volume).store_location().expect(volume);
        assert_eq!((found.to_string().as_str(), &*its_name, snapshot), (shown, name, None));
        assert_eq!(found.volume(name, None).expect(volume).to_string(), volume);
    }
    assert_eq!(store("file:/var/lib/"), uri("file:/var/lib/a").store_location().expect("a file").0);
}

#[test]
fn invalid_stores_and_names_are_refused() {
    for (text, cause) in [
        ("file:var", "file: needs an absolute path"),
        ("file:/var?direct=true", "\"direct\""),
        ("mem:1G", "does not name a store"),
        ("/var", "does not name a store"),
    ] {
        let error = REGISTRY.store(text).expect_err(text);
        assert!(error.message().contains(cause), "{text}: {}", error.message());
    }
    for name in ["", "a/b", "..", "a\0"] {
        assert!(store("file:/var").volume(name, None).is_err(), "{name:?}");
    }
    let error = store("file:/var").volume("a", Some("s")).expect_err("no snapshots");
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    let error = uri("file:/var/a").snapshot_location().expect_err("no snapshots");
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    let error = uri("mem:1G").store_location().expect_err("not in a store");
    assert_eq!(error.kind(), ErrorKind::Unsupported);
}
