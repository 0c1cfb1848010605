//! What is removed, and what comes back.

use serde_json::{Value, json};
use test_kit::ceph::{POOL, shared};

use crate::volumes::fixture::{User, changed, json, listed, options, rbd, run_rbd, uri, volume};

/// A namespace of its own, whose trash nobody else fills.
struct Space(&'static str);

impl Space {
    fn new(name: &'static str) -> Self {
        run_rbd(shared(), &["namespace", "create", &format!("{POOL}/{name}")]);
        Self(name)
    }

    fn place(&self) -> String {
        format!("rbd:{POOL}/{}?{}", self.0, options())
    }

    fn image(&self, name: &str) -> String {
        format!("rbd:{POOL}/{}/{name}?{}", self.0, options())
    }

    /// As `rbd` lists it.
    fn trash(&self) -> Vec<Value> {
        let all = rbd(&["trash", "ls", "--all", &format!("{POOL}/{}", self.0)]);
        all.as_array().expect("a list").clone()
    }
}

#[test]
fn what_is_removed_can_be_brought_back() {
    let space = Space::new("regret");
    let image = space.image("dear");
    assert!(changed(&["create", &image, "8M"]));
    let id = json(&["info", &image])["id"].clone();
    let removed = json(&["remove", &image, "--keep", "1h"]);
    assert_eq!((&removed["changed"], &removed["trash"]["id"]), (&json!(true), &id));
    let at = |key: &str| removed["trash"][key].as_i64().expect("a time");
    assert_eq!(at("kept_until_s") - at("removed_at_s"), 3600);
    assert_eq!(removed["trash"]["name"], "dear");
    let theirs = space.trash();
    assert_eq!((theirs.len(), &theirs[0]["id"]), (1, &id));
    assert_eq!(json(&["trash", "list", &space.place()])["trash"], json!([removed["trash"]]));
    assert!(!changed(&["remove", &image]), "it is gone");

    assert!(changed(&["trash", "restore", &image]));
    assert!(!changed(&["trash", "restore", &image]), "it is back");
    assert_eq!(json(&["info", &image])["id"], id);
    assert_eq!(space.trash(), Vec::<Value>::new());
    let never = volume(&["trash", "restore", &space.image("never")]);
    assert!(never.error(3).contains("no never in the trash"), "{never:?}");
}

#[test]
fn several_of_one_name_are_told_apart() {
    let space = Space::new("names");
    let image = space.image("same");
    let mut ids = Vec::new();
    for _ in 0..2 {
        assert!(changed(&["create", &image, "8M"]));
        ids.push(json(&["remove", &image])["trash"]["id"].as_str().expect("an id").to_owned());
    }
    let unclear = volume(&["trash", "restore", &image]);
    for id in &ids {
        assert!(unclear.error(2).contains(&**id), "{unclear:?}");
    }
    assert!(changed(&["trash", "restore", &image, "--id", &ids[0]]));
    assert!(!changed(&["trash", "restore", &image, "--id", &ids[0]]));
    let taken = volume(&["trash", "restore", &image, "--id", &ids[1]]);
    assert!(taken.error(4).contains("--name"), "{taken:?}");
    assert!(changed(&["trash", "restore", &image, "--id", &ids[1], "--name", "other"]));
    assert_eq!(json(&["info", &space.image("other")])["id"], *ids[1]);
}

#[test]
fn the_trash_is_emptied_of_what_has_been_kept_long_enough() {
    let space = Space::new("waste");
    for (name, keep) in [("soon", "0s"), ("late", "1d"), ("never", "1d")] {
        assert!(changed(&["create", &space.image(name), "8M"]));
        assert!(changed(&["remove", &space.image(name), "--keep", keep]));
    }
    let names = |list: &Value| {
        let entries = list.as_array().expect("a list").iter();
        entries.map(|e| e["name"].as_str().expect("a name").to_owned()).collect::<Vec<_>>()
    };
    let purged = json(&["trash", "purge", &space.place()]);
    assert_eq!(names(&purged["removed"]), ["soon"]);
    assert_eq!(names(&purged["waiting"]).len(), 2);
    assert_eq!(purged["failed"], json!([]));
    let late = purged["waiting"][0]["id"].as_str().expect("an id").to_owned();
    let forced = json(&["trash", "purge", &space.place(), &late, "--force"]);
    assert_eq!(names(&forced["removed"]).len(), 1);
    let unknown = volume(&["trash", "purge", &space.place(), &late]);
    assert!(unknown.error(3).contains(&late), "{unknown:?}");

    // One that has snapshots stays, and does not keep the others. rbd puts it there, we do not.
    assert!(changed(&["create", &space.image("full"), "8M"]));
    assert!(changed(&["snapshot", "create", &space.image("full@s")]));
    run_rbd(shared(), &["trash", "mv", &format!("{POOL}/waste/full")]);
    let part = volume(&["trash", "purge", &space.place(), "--force", "-o", "json"]);
    assert_eq!(part.code, 5, "{part:?}");
    let part = part.json();
    assert_eq!(
        (names(&part["removed"]).len(), names(&part["failed"])),
        (1, vec!["full".to_owned()])
    );
    assert_eq!(part["failed"][0]["kind"], "in_use");
    assert!(part["failed"][0]["message"].as_str().expect("text").contains("snapshots"), "{part}");
    assert_eq!(space.trash().len(), 1);
    let told = volume(&["trash", "purge", &space.place()]);
    assert!(told.stderr.contains("(full) cannot be deleted: it has snapshots"), "{told:?}");
}

#[test]
fn what_is_claimed_is_not_purged_untold() {
    let space = Space::new("owned");
    let (claimed, free) = (space.image("claimed"), space.image("free"));
    for image in [&claimed, &free] {
        assert!(changed(&["create", image, "8M"]));
    }
    let user = User::of(&claimed);
    let mut claim = json(&["info", &claimed])["claim"].clone();
    drop(user);
    for (key, value) in [("node", "node-7"), ("boot_id", "another"), ("process", "")] {
        claim[key] = if value.is_empty() { Value::Null } else { json!(value) };
    }
    let image = format!("{POOL}/owned/claimed");
    run_rbd(shared(), &["image-meta", "set", &image, "cleat.claim", &claim.to_string()]);
    let refused = volume(&["remove", &claimed, "--keep", "0s"]);
    assert!(refused.error(5).contains("claimed by the node node-7"), "{refused:?}");
    // rbd puts it there, and what lies there already is not taken from under a claim either.
    run_rbd(shared(), &["trash", "mv", &image]);
    assert!(changed(&["remove", &free, "--keep", "0s"]));
    let part = volume(&["trash", "purge", &space.place(), "-o", "json"]);
    assert_eq!(part.code, 5, "{part:?}");
    let part = part.json();
    assert_eq!((&part["removed"][0]["name"], &part["waiting"]), (&json!("free"), &json!([])));
    let [kept] = &part["failed"].as_array().expect("a list")[..] else { panic!("{part}") };
    assert_eq!((&kept["name"], &kept["kind"]), (&json!("claimed"), &json!("in_use")));
    assert!(kept["repair"].as_str().expect("one").contains("--take-over"), "{kept}");
    let told = volume(&["trash", "purge", &space.place(), "--force"]);
    for part in ["(claimed) cannot be deleted: ", "claimed by the node node-7", "--take-over"] {
        assert!(told.stderr.contains(part), "{part}: {told:?}");
    }
    assert_eq!(space.trash().len(), 1);
    let purged = json(&["trash", "purge", &space.place(), "--take-over"]);
    assert_eq!(purged["removed"][0]["name"], "claimed");
    assert_eq!(space.trash(), Vec::<Value>::new());
}

#[test]
fn what_is_deleted_at_once_is_gone() {
    let image = uri("brief");
    assert!(changed(&["create", &image, "8M"]));
    let user = User::of(&image);
    for words in [&["remove", &image][..], &["remove", &image, "--now"]] {
        let held = volume(words);
        assert!(held.error(5).contains("is in use by "), "{held:?}");
    }
    drop(user);
    assert!(changed(&["snapshot", "create", &uri("brief@s")]));
    let kept = volume(&["remove", &image, "--now"]);
    assert!(kept.error(5).contains("has the snapshots s"), "{kept:?}");
    assert!(changed(&["snapshot", "remove", &uri("brief@s")]));
    assert!(changed(&["remove", &image, "--now"]));
    assert!(!changed(&["remove", &image, "--now"]));
    assert!(!listed().contains(&"brief".to_owned()));
    let trash = rbd(&["trash", "ls", "--all", POOL]);
    assert!(!trash.to_string().contains("brief"), "{trash}");
}

#[test]
fn what_was_made_in_part_is_told_and_can_be_removed() {
    // What a creation leaves that is cut off after its first step.
    shared().rados(&["-p", POOL, "put", "rbd_id.torn", "/dev/null"]).expect("it is put");
    let torn = volume(&["create", &uri("torn"), "8M"]);
    assert_eq!(torn.code, 4, "{torn:?}");
    assert!(torn.stderr.contains("remove --now"), "{torn:?}");
    let removed = volume(&["remove", "--now", &uri("torn")]);
    assert_eq!(removed.code, 0, "{removed:?}");
    assert!(changed(&["create", &uri("torn"), "8M"]));
}

#[test]
fn a_mirrored_image_is_removed_where_it_is_the_primary_one() {
    let mirrored = |name: &str| {
        assert!(changed(&["create", &uri(name), "8M"]));
        run_rbd(shared(), &["mirror", "image", "enable", &format!("{POOL}/{name}"), "snapshot"]);
        uri(name)
    };
    run_rbd(shared(), &["mirror", "pool", "enable", POOL, "image"]);
    for (name, how) in [("mirrored", "--keep=1h"), ("mirrored-now", "--now")] {
        let image = mirrored(name);
        assert_eq!(json(&["snapshot", "list", &image])["snapshots"][0]["kind"], "mirror");
        assert!(changed(&["remove", &image, how]), "{name}");
        assert!(!listed().contains(&name.to_owned()));
    }
    let copy = mirrored("mirrored-copy");
    run_rbd(shared(), &["mirror", "image", "demote", &format!("{POOL}/mirrored-copy")]);
    for words in [
        &["remove", &copy][..],
        &["remove", &copy, "--now"],
        &["resize", &copy, "16M"],
        &["snapshot", "create", &uri("mirrored-copy@s")],
    ] {
        let run = volume(words);
        assert!(run.error(7).contains("rbd mirror image promote"), "{words:?}: {run:?}");
    }
}
