//! Removal into the trash, restore and purge.

use serde_json::{Value, json};
use test_kit::ceph::{POOL, shared};

use crate::volumes::fixture::{User, changed, json, listed, options, rbd, run_rbd, uri, volume};

/// A namespace that only one test uses, with a trash of its own.
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

    /// Returns the trash as `rbd` lists it.
    fn trash(&self) -> Vec<Value> {
        let all = rbd(&["trash", "ls", "--all", &format!("{POOL}/{}", self.0)]);
        all.as_array().expect("a list").clone()
    }
}

#[test]
fn a_removed_volume_can_be_restored() {
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
    assert!(!changed(&["remove", &image]), "the volume is in the trash");

    assert!(changed(&["trash", "restore", &image]));
    assert!(!changed(&["trash", "restore", &image]), "the volume is restored");
    assert_eq!(json(&["info", &image])["id"], id);
    assert_eq!(space.trash(), Vec::<Value>::new());
    let never = volume(&["trash", "restore", &space.image("never")]);
    assert!(never.error(3).contains("no never in the trash"), "{never:?}");
}

#[test]
fn trash_entries_with_the_same_name_are_selected_by_id() {
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
fn a_purge_removes_entries_whose_keep_time_has_passed() {
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

    // A volume with snapshots stays, and the others are purged. `rbd` moves such a volume to the
    // trash; cleat does not.
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
    let run = volume(&["trash", "purge", &space.place()]);
    assert!(run.stderr.contains("(full): it has snapshots"), "{run:?}");
}

#[test]
fn a_claimed_volume_is_purged_only_with_take_over() {
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
    // `rbd` moves the claimed volume to the trash. There, too, it is not deleted.
    run_rbd(shared(), &["trash", "mv", &image]);
    assert!(changed(&["remove", &free, "--keep", "0s"]));
    let part = volume(&["trash", "purge", &space.place(), "-o", "json"]);
    assert_eq!(part.code, 5, "{part:?}");
    let part = part.json();
    assert_eq!((&part["removed"][0]["name"], &part["waiting"]), (&json!("free"), &json!([])));
    let [kept] = &part["failed"].as_array().expect("a list")[..] else { panic!("{part}") };
    assert_eq!((&kept["name"], &kept["kind"]), (&json!("claimed"), &json!("in_use")));
    assert!(kept["repair"].as_str().expect("a repair hint").contains("--take-over"), "{kept}");
    let run = volume(&["trash", "purge", &space.place(), "--force"]);
    for part in ["(claimed): ", "claimed by the node node-7", "--take-over"] {
        assert!(run.stderr.contains(part), "{part}: {run:?}");
    }
    assert_eq!(space.trash().len(), 1);
    let purged = json(&["trash", "purge", &space.place(), "--take-over"]);
    assert_eq!(purged["removed"][0]["name"], "claimed");
    assert_eq!(space.trash(), Vec::<Value>::new());
}

#[test]
fn remove_now_deletes_a_volume_without_users_and_snapshots() {
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
fn a_partly_created_volume_is_reported_and_can_be_removed() {
    // The state after a creation that was interrupted after its first step.
    shared()
        .rados(&["-p", POOL, "put", "rbd_id.torn", "/dev/null"])
        .expect("the object is written");
    let torn = volume(&["create", &uri("torn"), "8M"]);
    assert_eq!(torn.code, 4, "{torn:?}");
    assert!(torn.stderr.contains("remove --now"), "{torn:?}");
    let removed = volume(&["remove", "--now", &uri("torn")]);
    assert_eq!(removed.code, 0, "{removed:?}");
    assert!(changed(&["create", &uri("torn"), "8M"]));
}

#[test]
fn a_mirrored_image_is_removed_only_where_it_is_primary() {
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
