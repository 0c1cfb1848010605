//! `cleat volume` on files, and the commands that files do not support.

use serde_json::json;
use tempfile::TempDir;

use crate::volumes::fixture::{MIB, User, changed, json, volume};

fn directory() -> (TempDir, impl Fn(&str) -> String) {
    let directory = TempDir::new().expect("a directory");
    let path = directory.path().to_owned();
    (directory, move |name: &str| format!("file:{}/{name}", path.display()))
}

#[test]
fn files_are_created_listed_resized_and_removed() {
    let (directory, uri) = directory();
    let image = uri("a.img");
    assert!(changed(&["create", &image, "8M"]));
    assert!(!changed(&["create", &image, "8M"]));
    assert_eq!(directory.path().join("a.img").metadata().expect("the file exists").len(), 8 * MIB);
    let other = volume(&["create", &image, "16M"]);
    assert!(other.error(4).contains("size of 8M, not 16M"), "{other:?}");

    let info = json(&["info", &image]);
    assert_eq!((&info["name"], &info["uri"]), (&json!("a.img"), &json!(image)));
    assert_eq!((&info["size_bytes"], &info["used_bytes"]), (&json!(8 * MIB), &json!(0)));
    assert_eq!((&info["locks"], &info["features"]), (&json!([]), &json!([])));
    assert!(changed(&["create", &uri("b.img"), "1M"]));
    let place = uri("");
    assert_eq!(volume(&["list", &place]).stdout, "a.img\nb.img\n");
    let listing = json(&["list", &place, "--limit", "1"]);
    assert_eq!(listing["next"], "a.img");
    assert_eq!(listing["volumes"][0]["size_bytes"], 8 * MIB);

    // A file in use can grow, but it cannot be shrunk or removed.
    let user = User::of(&image);
    let lock = json(&["info", &image])["locks"][0]["client"].clone();
    assert!(lock.as_str().is_some_and(|client| client.contains("cleat")), "{lock}");
    assert!(changed(&["resize", &image, "32M"]));
    assert!(!changed(&["resize", &image, "32M"]));
    for words in [&["resize", &image, "1M", "--shrink"][..], &["remove", &image, "--now"]] {
        let held = volume(words);
        assert!(held.error(5).contains("is being written by process"), "{held:?}");
    }
    drop(user);
    let smaller = volume(&["resize", &image, "1M"]);
    assert!(smaller.error(2).contains("--shrink"), "{smaller:?}");
    assert!(changed(&["resize", &image, "1M", "--shrink"]));

    let trash = volume(&["remove", &image]);
    assert!(trash.error(8).contains("--now"), "{trash:?}");
    assert!(changed(&["remove", &image, "--now"]));
    assert!(!changed(&["remove", &image, "--now"]));
    assert!(!changed(&["remove", &image]), "the file does not exist any more");
    assert_eq!(volume(&["list", &place]).stdout, "b.img\n");
}

#[test]
fn commands_that_files_do_not_support_are_refused() {
    let (directory, uri) = directory();
    let image = uri("a.img");
    assert!(changed(&["create", &image, "8M"]));
    let place = uri("");
    let cases: [(&[&str], i32, &str); 9] = [
        (&["snapshot", "create", &image], 8, "file volume cannot name a snapshot"),
        (&["clone", &image, &uri("b.img")], 8, "file volume cannot name a snapshot"),
        (&["trash", "list", &place], 8, "no trash"),
        (&["trash", "restore", &image], 8, "no trash"),
        (&["trash", "purge", &place], 8, "no trash"),
        (&["create", &uri("b.img"), "8M", "--object-size", "4M"], 8, "no features, objects"),
        (&["create", &uri("no/b.img"), "8M"], 3, "No such file"),
        (&["resize", &uri("none.img"), "8M"], 3, "does not exist"),
        (&["list", &image], 2, "is not a directory"),
    ];
    for (words, code, cause) in cases {
        let run = volume(words);
        assert!(run.error(code).contains(cause), "{words:?}: {run:?}");
    }
    let sized = format!("{}?create=1G", uri("b.img"));
    let two = volume(&["create", &sized, "1M"]);
    assert!(two.error(2).contains("the size is 1M, but the URI has create=1G"), "{two:?}");
    assert!(!directory.path().join("b.img").exists());
    assert!(changed(&["create", &sized.replace("1G", "1M"), "1M"]));
    std::os::unix::fs::symlink("a.img", directory.path().join("link")).expect("a link");
    let link = volume(&["remove", &uri("link"), "--now"]);
    assert!(link.error(2).contains("symbolic link"), "{link:?}");
    let device = volume(&["remove", "file:/dev/null", "--now"]);
    assert!(device.error(2).contains("special file"), "{device:?}");
}
