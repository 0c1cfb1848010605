//! Common operations on images, each compared with the output of `rbd`.

use serde_json::json;
use test_kit::ceph::{POOL, shared};

use crate::volumes::fixture::{
    MIB, User, changed, json, listed, options, options_of, place, rbd, run_rbd, uri, volume,
};

fn info(name: &str) -> serde_json::Value {
    rbd(&["info", &format!("{POOL}/{name}")])
}

#[test]
fn an_image_is_created_once_with_the_given_properties() {
    let uri = uri("made");
    let words = ["create", &uri, "1G", "--features", "fast-diff,layering", "--object-size", "1M"];
    let words = [&words[..], &["--stripe-unit", "64K", "--stripe-count", "4"]].concat();
    assert!(changed(&words));
    let theirs = info("made");
    assert_eq!(theirs["size"], 1024 * MIB);
    assert_eq!((&theirs["object_size"], &theirs["stripe_count"]), (&json!(MIB), &json!(4)));
    assert_eq!(theirs["stripe_unit"], 65536);
    let features = json!(["layering", "striping", "exclusive-lock", "object-map", "fast-diff"]);
    assert_eq!(theirs["features"], features);

    assert!(!changed(&words), "the image exists");
    let again = volume(&["create", &uri, "1G"]);
    assert_eq!((again.code, &*again.stdout), (0, ""));
    assert!(again.stderr.contains("already exists"), "{again:?}");
    let other = volume(&["create", &uri, "2G", "--object-size", "4M", "--data-pool", "rbd"]);
    for difference in ["size of 1G, not 2G", "objects of 1M, not 4M", "data pool none, not rbd"] {
        assert!(other.error(4).contains(difference), "{other:?}");
    }

    let mine = json(&["info", &uri]);
    assert_eq!((&mine["name"], &mine["uri"]), (&json!("made"), &json!(canonical("made"))));
    assert_eq!((&mine["id"], &mine["features"]), (&theirs["id"], &features));
    assert_eq!(
        (&mine["objects"], &mine["object_prefix"]),
        (&json!(1024), &theirs["block_name_prefix"])
    );
    assert_eq!((&mine["size_bytes"], &mine["used_bytes"]), (&json!(1024 * MIB), &json!(0)));
    for nothing in ["parent", "claim", "data_pool", "compression", "encryption"] {
        assert_eq!(mine[nothing], json!(null), "{nothing}");
    }
    for empty in ["snapshots", "clones", "watchers", "locks", "flags"] {
        assert_eq!(mine[empty], json!([]), "{empty}");
    }
    assert_eq!(
        mine.as_object().expect("an object").len(),
        22,
        "a new field must be added to the manual: {mine}"
    );
}

#[test]
fn data_is_stored_in_the_data_pool() {
    shared().make_pool("elsewhere");
    let admin = options_of(shared(), "admin");
    let uri = format!("rbd:{POOL}/split?{admin}");
    assert!(changed(&["create", &uri, "1G", "--data-pool", "elsewhere"]));
    assert_eq!(info("split")["data_pool"], "elsewhere");
    assert_eq!(json(&["info", &uri])["data_pool"], "elsewhere");
    assert!(!changed(&["create", &uri, "1G", "--data-pool", "elsewhere"]));
    let nowhere = volume(&["create", &format!("rbd:{POOL}/x?{admin}"), "1G", "--data-pool", "no"]);
    assert!(nowhere.error(3).contains("ceph osd pool ls"), "{nowhere:?}");
}

#[test]
fn the_used_bytes_are_those_that_rbd_reports() {
    let uri = uri("used");
    assert!(changed(&["create", &uri, "64M"]));
    let image = format!("{POOL}/used");
    let bench = ["bench", "--io-type", "write", "--io-size", "4K", "--io-total", "12K"];
    run_rbd(shared(), &[&bench[..], &["--io-pattern", "seq", &image]].concat());
    let theirs = rbd(&["du", &image])["images"][0]["used_size"].clone();
    assert_ne!(theirs, 0);
    assert_eq!(json(&["info", &uri])["used_bytes"], theirs);
    // Without `fast-diff` the used bytes are unknown: to count them would read the state of every object.
    run_rbd(shared(), &["feature", "disable", &image, "fast-diff"]);
    assert_eq!(json(&["info", &uri])["used_bytes"], json!(null));
}

#[test]
fn a_volume_in_use_can_grow_and_not_shrink() {
    let uri = uri("volume-resized");
    assert!(changed(&["create", &uri, "64M"]));
    let user = User::of(&uri);
    assert!(changed(&["resize", &uri, "128M"]));
    assert_eq!(info("volume-resized")["size"], 128 * MIB);
    assert!(!changed(&["resize", &uri, "128M"]));
    let smaller = volume(&["resize", &uri, "32M"]);
    assert!(smaller.error(2).contains("--shrink"), "{smaller:?}");
    let held = volume(&["resize", &uri, "32M", "--shrink"]);
    assert!(held.error(5).contains("is in use by "), "{held:?}");
    drop(user);
    assert!(changed(&["resize", &uri, "32M", "--shrink"]));
    assert_eq!(info("volume-resized")["size"], 32 * MIB);
}

#[test]
fn snapshots_of_a_volume_in_use_are_created_and_removed() {
    let (whole, monday) = (uri("kept"), uri("kept@monday"));
    assert!(changed(&["create", &whole, "64M"]));
    let user = User::of(&whole);
    assert!(changed(&["snapshot", "create", &monday]));
    assert!(!changed(&["snapshot", "create", &monday]));
    assert!(changed(&["snapshot", "protect", &monday]));
    assert!(!changed(&["snapshot", "protect", &monday]));
    let theirs = rbd(&["snap", "ls", &format!("{POOL}/kept")]);
    assert_eq!((&theirs[0]["name"], &theirs[0]["protected"]), (&json!("monday"), &json!("true")));
    let mine = json(&["snapshot", "list", &whole])["snapshots"].clone();
    assert_eq!((&mine[0]["id"], &mine[0]["protected"]), (&theirs[0]["id"], &json!(true)));
    assert_eq!((&mine[0]["size_bytes"], &mine[0]["kind"]), (&json!(64 * MIB), &json!("user")));
    assert_eq!(mine.as_array().map(Vec::len), Some(1));
    let shown = volume(&["snapshot", "list", &whole]);
    assert!(shown.stdout.starts_with("ID  NAME "), "{shown:?}");
    assert_eq!(json(&["info", &monday])["size_bytes"], 64 * MIB);

    let kept = volume(&["snapshot", "remove", &monday]);
    assert!(kept.error(5).contains("snapshot unprotect"), "{kept:?}");
    let refused = volume(&["snapshot", "rollback", &monday]);
    assert!(refused.error(5).contains("is in use by "), "{refused:?}");
    drop(user);
    assert!(changed(&["snapshot", "rollback", &monday]));
    assert!(changed(&["snapshot", "unprotect", &monday]));
    assert!(!changed(&["snapshot", "unprotect", &monday]));
    assert!(changed(&["snapshot", "remove", &monday]));
    assert!(!changed(&["snapshot", "remove", &monday]));
    assert_eq!(rbd(&["snap", "ls", &format!("{POOL}/kept")]), json!([]));
}

#[test]
fn a_rollback_restores_the_content() {
    let (whole, before) = (uri("content"), uri("content@before"));
    assert!(changed(&["create", &whole, "8M"]));
    let image = format!("{POOL}/content");
    let write = |pattern: &str| {
        let bench = ["bench", "--io-type", "write", "--io-size", "4K", "--io-total", "1M"];
        run_rbd(shared(), &[&bench[..], &["--io-pattern", pattern, &image]].concat());
        sum(&image)
    };
    let old = write("seq");
    assert!(changed(&["snapshot", "create", &before]));
    let image_grown = ["resize", &whole, "16M"];
    assert!(changed(&image_grown));
    assert_ne!(write("rand"), old);
    assert!(changed(&["snapshot", "rollback", &before]));
    assert_eq!(sum(&image), old);
}

#[test]
fn clones_in_both_formats_are_created_and_flattened() {
    let (whole, snapshot) = (uri("parent"), uri("parent@s"));
    assert!(changed(&["create", &whole, "16M"]));
    assert!(changed(&["snapshot", "create", &snapshot]));
    // The clone's URI inherits the options of the parent's URI.
    let (two, one) = (format!("rbd:{POOL}/clone2"), format!("rbd:{POOL}/clone1"));
    assert!(changed(&["clone", &snapshot, &two]));
    assert!(!changed(&["clone", &snapshot, &two]));
    let unprotected = volume(&["clone", &snapshot, &one, "--clone-format", "1"]);
    assert!(unprotected.error(2).contains("snapshot protect"), "{unprotected:?}");
    assert!(changed(&["snapshot", "protect", &snapshot]));
    assert!(changed(&["clone", &snapshot, &one, "--clone-format", "1"]));
    let id = info("parent")["id"].clone();
    for name in ["clone1", "clone2"] {
        let theirs = info(name)["parent"].clone();
        assert_eq!((&theirs["image"], &theirs["snapshot"]), (&json!("parent"), &json!("s")));
        let mine = json(&["info", &uri(name)])["parent"].clone();
        let expected = json!({
            "name": format!("{POOL}/parent@s"), "image_id": id, "in_trash": false,
            "overlap_bytes": 16 * MIB
        });
        assert_eq!(mine, expected);
    }
    let admin = format!("rbd:{POOL}/parent?{}", options_of(shared(), "admin"));
    let clones = json(&["info", &admin])["clones"].clone();
    assert_eq!(clones, json!([format!("{POOL}/clone1"), format!("{POOL}/clone2")]));

    let needed = volume(&["snapshot", "unprotect", &snapshot]);
    assert!(needed.error(5).contains(&format!("{POOL}/clone1")), "{needed:?}");
    let kept = volume(&["remove", &whole]);
    assert!(kept.error(5).contains("snapshots s, and the clones"), "{kept:?}");
    assert!(changed(&["flatten", &uri("clone1")]));
    assert!(!changed(&["flatten", &uri("clone1")]));
    assert_eq!(info("clone1")["parent"], json!(null));
    assert!(changed(&["snapshot", "unprotect", &snapshot]));
    // The other clone still needs the snapshot, so Ceph keeps it in the trash namespace.
    assert!(changed(&["snapshot", "remove", &snapshot]));
    let left = json(&["snapshot", "list", &whole])["snapshots"].clone();
    assert_eq!((&left[0]["name"], &left[0]["kind"]), (&json!("s"), &json!("trash")));
    let user = User::of(&uri("clone2"));
    assert!(changed(&["flatten", &uri("clone2")]), "a flatten of a volume in use");
    drop(user);
    assert_eq!(json(&["snapshot", "list", &whole])["snapshots"], json!([]));
    assert_eq!(info("clone2")["parent"], json!(null));
}

#[test]
fn a_parent_in_the_trash_is_shown_with_its_former_name() {
    run_rbd(shared(), &["namespace", "create", &format!("{POOL}/thrift")]);
    let image = |name: &str| format!("rbd:{POOL}/thrift/{name}?{}", options());
    let (whole, snapshot, clone) = (image("thrown"), image("thrown@s"), image("clone"));
    assert!(changed(&["create", &whole, "8M"]));
    assert!(changed(&["snapshot", "create", &snapshot]));
    assert!(changed(&["clone", &snapshot, &clone]));
    let id = json(&["info", &whole])["id"].as_str().expect("an id").to_owned();
    // Only `rbd` moves an image with snapshots to the trash; cleat does not.
    run_rbd(shared(), &["trash", "mv", &format!("{POOL}/thrift/thrown")]);
    assert!(changed(&["create", &whole, "16M"]), "another image with that name");
    let parent = json(&["info", &clone])["parent"].clone();
    assert_eq!(
        (&parent["name"], &parent["image_id"]),
        (&json!(format!("{POOL}/thrift/thrown@s")), &json!(id))
    );
    assert_eq!(parent["in_trash"], true);
    let shown = format!("{POOL}/thrift/thrown@s (in the trash, {id})");
    let run = volume(&["info", &clone]);
    assert!(run.stdout.contains(&format!("{shown}, 8.0 MiB")), "{run:?}");
    let listing = json(&["list", &place("/thrift"), "--long"])["volumes"].clone();
    assert_eq!((&listing[0]["name"], &listing[0]["parent"]), (&json!("clone"), &json!(shown)));
    assert!(changed(&["snapshot", "create", &snapshot]));
    let other = volume(&["clone", &snapshot, &clone]);
    assert!(
        other.error(4).contains("the parent"),
        "the parent must be reported as different: {other:?}"
    );
}

#[test]
fn namespaces_separate_images() {
    run_rbd(shared(), &["namespace", "create", &format!("{POOL}/inner")]);
    let inside = format!("rbd:{POOL}/inner/image?{}", options());
    assert!(changed(&["create", &inside, "8M"]));
    let names = |place: &str| {
        let listing = json(&["list", place])["volumes"].clone();
        let entries = listing.as_array().expect("a list").iter();
        entries.map(|e| e["name"].as_str().expect("a name").to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(names(&place("/inner")), ["image"]);
    assert!(!names(&place("")).contains(&"image".to_owned()));
    let missing = volume(&["list", &place("/missing")]);
    assert!(missing.error(3).contains("no namespace missing"), "{missing:?}");
    // A clone outside the namespace, of a snapshot in it.
    let snapshot = format!("rbd:{POOL}/inner/image@s?{}", options());
    assert!(changed(&["snapshot", "create", &snapshot]));
    assert!(changed(&["clone", &snapshot, &uri("from-inner")]));
    let parent = json(&["info", &uri("from-inner")])["parent"]["name"].clone();
    assert_eq!(parent, format!("{POOL}/inner/image@s"));
}

#[test]
fn a_list_has_pages_and_details() {
    run_rbd(shared(), &["namespace", "create", &format!("{POOL}/paged")]);
    let place = place("/paged");
    let image = |name: &str| format!("rbd:{POOL}/paged/{name}?{}", options());
    for name in ["b", "c", "a"] {
        assert!(changed(&["create", &image(name), "8M"]));
    }
    assert!(changed(&["snapshot", "create", &image("b@s")]));
    assert!(changed(&["clone", &image("b@s"), &image("d")]));
    let user = User::of(&image("c"));
    assert_eq!(volume(&["list", &place]).stdout, "a\nb\nc\nd\n");
    let first = volume(&["list", &place, "--limit", "2"]);
    assert_eq!(first.stdout, "a\nb\n");
    assert!(first.stderr.contains("--after 'b'"), "{first:?}");
    let page = json(&["list", &place, "--limit", "2", "--after", "b", "--long"]);
    assert_eq!(page["next"], json!(null));
    let [c, d] = &page["volumes"].as_array().expect("a list")[..] else { panic!("{page}") };
    assert_eq!((&c["name"], &c["watchers"], &c["parent"]), (&json!("c"), &json!(1), &json!(null)));
    assert_eq!((&d["size_bytes"], &d["snapshots"]), (&json!(8 * MIB), &json!(0)));
    assert_eq!(d["parent"], format!("{POOL}/paged/b@s"));
    assert_eq!(d["id"], rbd(&["info", &format!("{POOL}/paged/d")])["id"]);
    let plain = json(&["list", &place]);
    assert_eq!(plain["volumes"][0]["size_bytes"], json!(null), "without --long no image is opened");
    assert_eq!(volume(&["list", &place, "-o", "wide"]).stdout.lines().count(), 5);
    drop(user);
}

#[test]
fn an_image_that_cannot_be_opened_does_not_hide_the_others() {
    run_rbd(shared(), &["namespace", "create", &format!("{POOL}/torn")]);
    let place = place("/torn");
    let image = |name: &str| format!("rbd:{POOL}/torn/{name}?{}", options());
    for name in ["a", "b", "c"] {
        assert!(changed(&["create", &image(name), "8M"]));
    }
    let rados = |words: &[&str]| {
        shared().rados(&[&["-p", POOL, "-N", "torn"], words].concat()).expect("the rados command");
    };
    let id = json(&["info", &image("b")])["id"].as_str().expect("an id").to_owned();
    rados(&["rm", &format!("rbd_header.{id}")]);
    let run = volume(&["list", &place, "--long", "-o", "json"]);
    assert_eq!(run.code, 3, "{run:?}");
    let listing = run.json();
    let [a, b, c] = &listing["volumes"].as_array().expect("a list")[..] else { panic!("{run:?}") };
    for whole in [a, c] {
        assert_eq!((&whole["size_bytes"], &whole["error"]), (&json!(8 * MIB), &json!(null)));
    }
    assert_eq!((&b["name"], &b["id"]), (&json!("b"), &json!(id)));
    assert_eq!((&b["size_bytes"], &b["error"]["kind"]), (&json!(null), &json!("not_found")));
    let text = volume(&["list", &place, "--long"]);
    assert_eq!((text.code, text.stdout.lines().count()), (3, 4), "{text:?}");
    assert!(text.stderr.contains("cannot read b: its header or its parent is missing"), "{text:?}");
    assert!(text.stderr.contains("cleat volume remove --now 'rbd:volumes/torn/b?"), "{text:?}");
    assert_eq!(volume(&["list", &place]).code, 0, "a list of names opens no image");
    // The recommended command repairs it.
    assert!(changed(&["remove", "--now", &image("b")]));
    assert_eq!(json(&["list", &place, "--long"])["volumes"].as_array().map(Vec::len), Some(2));

    // Another kind of damage: a header that librbd cannot parse.
    let id = json(&["info", &image("c")])["id"].as_str().expect("an id").to_owned();
    rados(&["setomapval", &format!("rbd_header.{id}"), "size", "x"]);
    let run = volume(&["list", &place, "--long", "-o", "json"]);
    assert_ne!(run.code, 0, "{run:?}");
    assert_eq!(run.json()["volumes"][0]["error"], json!(null));
    assert_eq!(run.json()["volumes"][1]["name"], "c");
    assert_ne!(run.json()["volumes"][1]["error"], json!(null));
}

#[test]
fn a_claim_is_shown_with_its_node() {
    let uri = uri("claimed");
    assert!(changed(&["create", &uri, "8M"]));
    let user = User::of(&uri);
    let watcher = json(&["info", &uri])["watchers"][0].clone();
    let status = rbd(&["status", &format!("{POOL}/claimed")])["watchers"][0].clone();
    assert_eq!(watcher["address"], status["address"]);
    assert_eq!(watcher["client"], format!("client.{}", status["client"]));
    let lock = json(&["info", &uri])["locks"][0].clone();
    assert_eq!((&lock["address"], &lock["client"]), (&watcher["address"], &watcher["client"]));

    let mut claim = json(&["info", &uri])["claim"].clone();
    assert_eq!(claim["address"], watcher["address"]);
    let image = format!("{POOL}/claimed");
    claim["node"] = json!("node-7");
    run_rbd(shared(), &["image-meta", "set", &image, "cleat.claim", &claim.to_string()]);
    assert_eq!(json(&["info", &uri])["claim"], claim);
    let refused = volume(&["remove", &uri]);
    assert!(refused.error(5).contains("the node node-7"), "{refused:?}");
    run_rbd(shared(), &["image-meta", "set", &image, "cleat.claim", "nonsense"]);
    assert_eq!(json(&["info", &uri])["claim"], "nonsense");
    let refused = volume(&["remove", &uri]);
    let client = watcher["client"].as_str().expect("a name");
    assert!(refused.error(5).contains(&format!("is in use by {client} at ")), "{refused:?}");
    drop(user);
    assert!(listed().contains(&"claimed".to_owned()));
}

/// Returns the canonical URI, with sorted options.
fn canonical(name: &str) -> String {
    let (conf, keyring) = (shared().conf(), shared().keyring("volumes"));
    format!("rbd:{POOL}/{name}?conf={}&id=volumes&keyring={}", conf.display(), keyring.display())
}

fn sum(image: &str) -> String {
    use std::process::Command;
    let conf = shared().conf();
    let script = format!(
        "rbd --id admin --conf {} export --no-progress {image} - | head -c 8388608 | sha256sum",
        conf.display()
    );
    let output = Command::new("bash").args(["-o", "pipefail", "-c", &script]).output();
    let output = output.expect("bash starts");
    String::from_utf8(output.stdout).expect("UTF-8")
}
