//! `cleat volume export` and `import`: between files, objects and images.

use std::path::Path;
use std::process::Command;

use serde_json::json;
use tempfile::TempDir;

use crate::volumes::fixture::{MIB, User, changed, json, uri, volume};

/// Writes two ranges of a volume that only the ranges of a test have, and leaves holes around them.
fn fill(uri: &str) {
    let user = User::of(uri);
    assert!(user.does("write -P 0x41 1M 64k"));
    assert!(user.does("write -P 0x42 5M 4k"));
}

/// Returns whether a file has the content of [`fill`], and `size` bytes.
fn is_filled(file: &Path, format: &str, size: u64) -> bool {
    let patterns = ["-P 0 0 1M", "-P 0x41 1M 64k", "-P 0x42 5M 4k", "-P 0 6M 1M"];
    let mut command = Command::new("qemu-io");
    command.args(["-r", "-f", format]).arg(file);
    patterns.iter().for_each(|pattern| {
        command.args(["-c", &format!("read {pattern}")]);
    });
    let read = command.args(["-c", "length"]).output().expect("qemu-io runs");
    let printed = String::from_utf8_lossy(&read.stdout).into_owned();
    let length = printed.lines().last().unwrap_or_default().to_owned();
    read.status.success()
        && !printed.contains("verification failed")
        && [format!("{} MiB", size / MIB), size.to_string()].contains(&length)
}

#[test]
fn volumes_are_copied_to_files_and_from_files_to_volumes_of_other_kinds() {
    let directory = TempDir::new().expect("a directory");
    let path = |name: &str| directory.path().join(name);
    let text = |name: &str| path(name).to_str().expect("UTF-8").to_owned();
    let objects = format!("dir:{}", directory.path().display());
    let source = format!("{objects}/data");
    assert!(changed(&["create", &source, "8M"]));
    fill(&source);
    assert!(changed(&["snapshot", "create", &format!("{source}@s")]));
    {
        let user = User::of(&source);
        assert!(user.does("write -P 0x7 0 8M"), "the snapshot does not change");
    }
    let exported = json(&["export", &format!("{source}@s"), &text("s.qcow2")]);
    assert_eq!(exported["size_bytes"], 8 * MIB);
    assert!(is_filled(&path("s.qcow2"), "qcow2", 8 * MIB));
    assert!(path("s.qcow2").metadata().expect("a file").len() < MIB, "holes have no space");
    let image = uri("imported");
    assert_eq!(json(&["import", &text("s.qcow2"), &image])["size_bytes"], 8 * MIB);
    assert_eq!(json(&["info", &image])["size_bytes"], 8 * MIB);
    assert_eq!(volume(&["export", &image, &text("raw.img")]).code, 0);
    assert!(is_filled(&path("raw.img"), "raw", 8 * MIB));
    assert_eq!(json(&["info", &image])["locks"], json!([]), "the image was released");

    // The rest of a larger volume stays.
    let copy = format!("{objects}/copy");
    assert!(changed(&["create", &copy, "16M"]));
    {
        let user = User::of(&copy);
        assert!(user.does("write -P 0x7 0 16M"));
    }
    let taken = volume(&["import", &text("raw.img"), &copy]);
    assert!(taken.error(4).contains("--overwrite"), "{taken:?}");
    assert_eq!(volume(&["import", &text("raw.img"), &copy, "--overwrite"]).code, 0);
    {
        let user = User::of(&copy);
        assert!(user.does("read -P 0x41 1M 64k") && user.does("read -P 0 0 1M"));
        assert!(user.does("read -P 0x7 8M 8M"));
    }
    let small = format!("{objects}/small");
    assert!(changed(&["create", &small, "1M"]));
    let too_large = volume(&["import", &text("raw.img"), &small, "--overwrite"]);
    assert!(too_large.error(2).contains("cleat volume resize"), "{too_large:?}");
    let names: Vec<_> =
        std::fs::read_dir(directory.path()).expect("a directory").flatten().collect();
    assert!(!names.iter().any(|entry| entry.file_name().to_string_lossy().ends_with(".part")));
}

#[test]
fn copies_are_refused_before_anything_is_changed() {
    let directory = TempDir::new().expect("a directory");
    let text = |name: &str| directory.path().join(name).to_str().expect("UTF-8").to_owned();
    let source = format!("dir:{}/data", directory.path().display());
    assert!(changed(&["create", &source, "1M"]));
    std::fs::write(text("there"), "content").expect("a file");
    let exists = volume(&["export", &source, &text("there")]);
    assert!(exists.error(4).contains("the file exists"), "{exists:?}");
    assert_eq!(std::fs::read_to_string(text("there")).expect("a file"), "content");
    let none = volume(&["export", &format!("{source}-none"), &text("none.img")]);
    assert!(none.error(3).contains("-none"), "{none:?}");
    let pipe = volume(&["export", &source, "-"]);
    assert!(pipe.error(2).contains("./-"), "{pipe:?}");
    let nowhere = volume(&["export", &source, &text("no/such/directory.img")]);
    assert!(nowhere.error(3).contains("directory.img.part"), "{nowhere:?}");
    let target = format!("{source}-new");
    let missing = volume(&["import", &text("missing.img"), &target]);
    assert!(missing.error(3).contains("missing.img"), "{missing:?}");
    let other = volume(&["import", &text("there"), &target, "--format", "qcow2"]);
    assert!(other.error(2).contains("cannot be used as a qcow2 file"), "{other:?}");

    // A file that its author has made to show a file of the reader.
    let create =
        ["create", "-q", "-f", "qcow2", "-F", "raw", "-b", &text("there"), &text("evil.qcow2")];
    assert!(Command::new("qemu-img").args(create).status().expect("qemu-img runs").success());
    let evil = volume(&["import", &text("evil.qcow2"), &target]);
    assert!(evil.error(2).contains("it refers to the file"), "{evil:?}");
    assert_eq!(volume(&["info", &target]).code, 3, "no volume was created");
    let held = User::of(&source);
    let in_use = volume(&["import", &text("there"), &source, "--overwrite"]);
    assert!(in_use.error(5).contains("claimed"), "{in_use:?}");
    drop(held);
    let without = Command::new(env!("CARGO_BIN_EXE_cleat"))
        .args(["volume", "export", &source, &text("a.img")])
        .env("PATH", "/nonexistent")
        .output()
        .expect("cleat starts");
    assert_eq!(without.status.code(), Some(8));
    assert!(String::from_utf8_lossy(&without.stderr).contains("apt install qemu-utils"));
}
