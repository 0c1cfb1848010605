//! Tests of the URIs of images, pools and namespaces.

use proptest::prelude::*;

use cleat_backend::Registry;
use cleat_backend::uri::{MAX_NAME as MAX_DEFAULT_NAME, StoreUri, VolumeUri};

use super::*;

const REGISTRY: Registry = Registry::new(&[crate::BACKEND]);

fn uri(text: &str) -> VolumeUri {
    REGISTRY.volume(text).unwrap_or_else(|error| panic!("{text}: {}", error.report()))
}

fn spec(text: &str) -> RbdSpec {
    let (location, options) = text.split_once('?').unwrap_or((text, ""));
    let location = location.strip_prefix("rbd:").expect("the scheme");
    RbdSpec::parse(location, Options::parse(options).expect("options")).expect(text)
}

fn store(text: &str) -> StoreUri {
    REGISTRY.store(text).unwrap_or_else(|error| panic!("{text}: {}", error.report()))
}

#[test]
fn uris_have_a_canonical_form_and_a_default_name() {
    for (given, canonical, name) in [
        ("rbd:p/i", "rbd:p/i", "rbd-p-i"),
        ("rbd:p/n/i", "rbd:p/n/i", "rbd-p-n-i"),
        ("rbd:p/i?lock=exclusive", "rbd:p/i", "rbd-p-i"),
        ("rbd:p/i?lock=shared", "rbd:p/i?lock=shared", "rbd-p-i"),
        ("rbd:p%2dq/i?id=x&conf=/a%20b", "rbd:p-q/i?conf=/a%20b&id=x", "rbd-p-q-i"),
        (
            "rbd:p/i?trim=true&passphrase_file=/k&encryption=luks2&id=x",
            "rbd:p/i?id=x&encryption=luks2&passphrase_file=/k&trim=true",
            "rbd-p-i",
        ),
        (
            "rbd:p/i?passphrase_file=/k,/l&encryption=luks2,luks",
            "rbd:p/i?encryption=luks2,luks&passphrase_file=/k,/l",
            "rbd-p-i",
        ),
        (
            "rbd:p/i?encryption=luks1&passphrase_file=/k%2c,l",
            "rbd:p/i?encryption=luks1&passphrase_file=/k,,l",
            "rbd-p-i",
        ),
        ("rbd:p/i?trim=true", "rbd:p/i", "rbd-p-i"),
        ("rbd:p/i?trim=false", "rbd:p/i?trim=false", "rbd-p-i"),
        (
            "rbd:p/i?config.rbd-cache=false&config.a=%26",
            "rbd:p/i?config.a=%26&config.rbd_cache=false",
            "rbd-p-i",
        ),
    ] {
        assert_eq!(uri(given).to_string(), canonical);
        assert_eq!(uri(given).default_name(), name);
    }
    let snapshot = uri("rbd:p/n/i@s?keyring=/k");
    assert_eq!(snapshot.to_string(), "rbd:p/n/i@s?keyring=/k");
    assert_ne!(snapshot.default_name(), uri("rbd:p/n/i_s").default_name());
}

#[test]
fn errors_name_the_cause_and_a_repair() {
    for (given, cause, repair) in [
        ("rbd:image", "needs a pool", "rbd:POOL/IMAGE"),
        ("rbd:a/b/c/d", "needs a pool", "NAMESPACE"),
        ("rbd:/i", "pool's name is empty", "rbd:POOL/IMAGE"),
        ("rbd:p/", "image's name is empty", "rbd:POOL/IMAGE"),
        ("rbd:p//i", "namespace's name is empty", "rbd:POOL"),
        ("rbd:p/i@", "snapshot's name is empty", "SNAPSHOT"),
        ("rbd:p/i@a@b", "snapshot", "without"),
        ("rbd:p/a%2fb", "cannot be the image's name", "without /"),
        ("rbd:p/%ff", "not UTF-8", ""),
        ("rbd:p/i?conf=ceph.conf", "absolute path", "/etc/ceph"),
        ("rbd:p/i?id=client.x", "without \"client.\"", "id=x"),
        ("rbd:p/i?id=", "not a valid client name", ""),
        ("rbd:p/i?lock=none", "exclusive or shared", ""),
        ("rbd:p/i?config.key=AQ", "secret", "keyring="),
        ("rbd:p/i?encryption=luks2", "given together", "passphrase_file=/"),
        ("rbd:p/i?passphrase_file=/k", "given together", "encryption=luks2"),
        ("rbd:p/i?encryption=aes&passphrase_file=/k", "unknown", "luks1"),
        ("rbd:p/i?encryption=luks2,luks1&passphrase_file=/k", "1 passphrase files", "same number"),
        ("rbd:p/i?encryption=luks2,luks1&passphrase_file=/k,l", "absolute path", ""),
        ("rbd:p/i?encryption=luks2&passphrase_file=k", "absolute path", "passphrase_file=/"),
        ("rbd:p/i?trim=perhaps", "trim", ""),
        ("rbd:p/i?config.A=1", "not an option of Ceph", ""),
        ("rbd:p/i?config.rbd-cache=true", "config.rbd_cache=true would", "remove config.rbd_cache"),
        ("rbd:p/i?config.rbd_cache_policy=writeback", "hold acknowledged writes", "remove"),
        ("rbd:p/i?config.a-b=1&config.a_b=2", "twice", ""),
        ("rbd:p/i?direct=true", "\"direct\"", "config.OPTION"),
    ] {
        let error = REGISTRY.volume(given).expect_err(given);
        assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{given}");
        assert!(error.message().contains(cause), "{given}: {}", error.message());
        assert!(error.repair().unwrap_or("").contains(repair), "{given}: {:?}", error.repair());
    }
}

proptest! {
    #[test]
    fn any_valid_name_survives_a_round_trip(
        names in prop::collection::vec("[^/@\0]{1,40}", 2..4),
        snapshot in prop::option::of("[^/@\0]{1,40}"),
        conf in prop::option::of("/[^\0]{0,40}"),
    ) {
        prop_assume!(names.iter().chain(&snapshot).all(|name| name.len() <= MAX_NAME));
        let (last, first) = names.split_last().expect("two at least");
        let original = RbdSpec {
            pool: first[0].clone(),
            namespace: first.get(1).cloned(),
            image: last.clone(),
            snapshot,
            conf: conf.map(PathBuf::from),
            id: None,
            keyring: None,
            encryption: None,
            trim: true,
            shared: false,
            config: BTreeMap::from([("rbd_op_threads".to_owned(), "a&b=c%".to_owned())]),
        };
        let uri = VolumeUri::new(std::sync::Arc::new(original.clone()));
        prop_assert_eq!(&spec(&uri.to_string()), &original);
        prop_assert!(uri.default_name().len() <= MAX_DEFAULT_NAME);
    }
}

#[test]
fn an_image_has_a_store_and_the_store_returns_the_image() {
    for (volume, shown, name, snapshot) in
        [("rbd:p/i", "rbd:p", "i", None), ("rbd:p/n/i@s?id=x", "rbd:p/n?id=x", "i", Some("s"))]
    {
        let (found, its_name, its_snapshot) = uri(volume).store_location().expect(volume);
        assert_eq!(found.to_string(), shown);
        assert_eq!((&*its_name, its_snapshot.as_deref()), (name, snapshot), "{volume}");
        let back = found.volume(name, snapshot).expect(volume);
        assert_eq!(back.to_string(), volume);
    }
    assert_eq!(store("rbd:p/n?id=x"), uri("rbd:p/n/i?id=x").store_location().expect("an image").0);
}

#[test]
fn invalid_stores_and_names_are_rejected() {
    for (text, cause) in [
        ("rbd:", "pool's name is empty"),
        ("rbd:a/b/c", "needs a pool"),
        ("rbd:p?direct=true", "\"direct\""),
        ("mem:1G", "does not name a store"),
    ] {
        let error = REGISTRY.store(text).expect_err(text);
        assert!(error.message().contains(cause), "{text}: {}", error.message());
    }
    for name in ["", "a/b", "..", "a\0"] {
        assert_eq!(store("rbd:p").volume(name, None).is_err(), name != "..", "{name:?}");
    }
    assert!(store("rbd:p").volume("i", Some("a@b")).is_err());
    let error = uri("rbd:p/i").snapshot_location().expect_err("no snapshot");
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    assert!(error.repair().unwrap_or("").contains("@SNAPSHOT"), "{error}");
}

#[test]
fn the_options_of_one_volume_apply_to_both() {
    let reached = |this: &str, other: &str| store(this).with_access_of(&store(other));
    assert_eq!(reached("rbd:p", "rbd:q?id=x").expect("as q"), store("rbd:p?id=x"));
    assert_eq!(reached("rbd:p?id=x", "rbd:q").expect("as itself"), store("rbd:p?id=x"));
    assert_eq!(reached("rbd:p?id=x", "rbd:q?id=x").expect("alike"), store("rbd:p?id=x"));
    assert!(reached("rbd:p?id=x", "rbd:q?id=y").is_err());
    let files = Registry::new(&[cleat_backend::file::BACKEND]).store("file:/var").expect("files");
    assert!(store("rbd:p").with_access_of(&files).is_err());
}
