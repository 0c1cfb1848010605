//! `cleat volume fsck --repair` on volumes in a directory.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use tempfile::TempDir;

use crate::volumes::fixture::{Run, User, changed, json, spawn, volume};

/// The blocks of 64 KiB after which there is a checkpoint.
const BLOCKS: u64 = 300;

/// A volume in a directory of its own.
struct Volume {
    uri: String,
    directory: TempDir,
}

impl Volume {
    /// Creates a volume with the words of `cleat volume create`, and a key file if it is encrypted.
    fn new(options: &[&str], is_encrypted: bool) -> Self {
        let directory = TempDir::new().expect("a directory");
        let mut uri = format!("dir:{}/v", directory.path().display());
        if is_encrypted {
            let key = directory.path().join("key");
            std::fs::write(&key, [7; 32]).expect("a key file");
            uri.push_str(&format!("?key_file={}", key.display()));
        }
        assert!(changed(&[&["create", &uri, "32M"], options].concat()));
        Self { uri, directory }
    }

    fn objects(&self) -> PathBuf {
        self.directory.path().join("v/objects")
    }

    /// Writes so much that the worker writes a checkpoint. All slots of the log stay, but for the first one, because
    /// all their data is needed.
    fn write_until_checkpoint(&self) {
        let user = User::of(&self.uri);
        let write = |number: u64| format!("write -f -P 0x41 {}k 64k", number * 64);
        assert!(user.does_all(&(0..BLOCKS).map(write).collect::<Vec<_>>()));
        let deadline = Instant::now() + Duration::from_secs(60);
        while self.of_kind("ckpt").is_empty() {
            assert!(Instant::now() < deadline, "no checkpoint");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn has_what_was_written(&self) -> bool {
        let user = User::of(&self.uri);
        let rest = format!("read -P 0 {}k 1M", BLOCKS * 64);
        user.does_all(&[format!("read -P 0x41 0 {}k", BLOCKS * 64), rest])
    }

    /// Two sessions that write. What the second one has deleted is there again, as if the deletions were late.
    fn write_twice(&self) {
        {
            let user = User::of(&self.uri);
            assert!(user.does("write -P 0x41 0 64k") && user.does("write -P 0x42 1M 64k"));
        }
        let saved = self.directory.path().join("saved");
        copy(&self.objects(), &saved);
        {
            let user = User::of(&self.uri);
            assert!(user.does("write -P 0x43 4M 4k"));
        }
        copy(&saved, &self.objects());
    }

    fn has_content(&self) -> bool {
        let user = User::of(&self.uri);
        ["0x41 0 64k", "0x42 1M 64k", "0x43 4M 4k", "0 6M 1M"]
            .iter()
            .all(|range| user.does(&format!("read -P {range}")))
    }

    /// The names of the objects of a kind, and their paths.
    fn of_kind(&self, kind: &str) -> Vec<(String, PathBuf)> {
        let mut found = Vec::new();
        for epoch in entries(&self.objects().join(kind)) {
            for path in entries(&epoch) {
                let name = path.strip_prefix(self.objects()).expect("it is below");
                found.push((name.to_str().expect("UTF-8").to_owned(), path.clone()));
            }
        }
        found.sort();
        found
    }

    fn repair(&self) -> Run {
        volume(&["fsck", "--repair", &self.uri])
    }

    /// Everything in the directory of the objects.
    fn listing(&self) -> String {
        let all = Command::new("find").arg(self.objects()).args(["-type", "f"]).output();
        let all = String::from_utf8(all.expect("find runs").stdout).expect("UTF-8");
        let mut names: Vec<&str> = all.lines().collect();
        names.sort_unstable();
        names.join("\n")
    }
}

fn entries(path: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(path).into_iter().flatten();
    entries.map(|entry| entry.expect("an entry").path()).collect()
}

/// Copies files that do not exist in the target.
fn copy(from: &Path, to: &Path) {
    let from = format!("{}/.", from.display());
    std::fs::create_dir_all(to).expect("a directory");
    let copied = Command::new("cp").args(["-r", "-n", "-p", &from]).arg(to).status();
    let copied = copied.expect("cp runs");
    // Some versions of cp report files that were skipped.
    assert!(copied.code().is_some_and(|code| code <= 1), "{copied}");
}

/// Flips the last bit of a file.
fn damage(path: &Path) {
    let mut bytes = std::fs::read(path).expect("a file");
    *bytes.last_mut().expect("a byte") ^= 1;
    std::fs::write(path, bytes).expect("the file is writable");
}

#[test]
fn a_lost_checkpoint_is_rebuilt_and_what_is_unnamed_is_deleted() {
    for (options, is_encrypted) in [(&[][..], false), (&["--compression", "lz4"][..], true)] {
        let damaged = Volume::new(options, is_encrypted);
        damaged.write_until_checkpoint();
        let (name, path) = damaged.of_kind("ckpt").pop().expect("a checkpoint");
        std::fs::remove_file(path).expect("the checkpoint");
        let check = volume(&["fsck", &damaged.uri]);
        assert!(check.error(1).contains("fsck --repair"), "{check:?}");

        let before = damaged.listing();
        let plan = volume(&["fsck", "--repair", "--dry-run", &damaged.uri, "-o", "json"]);
        assert_eq!(plan.code, 1, "{plan:?}");
        let plan = plan.json();
        assert_eq!((&plan["dry_run"], &plan["defects"]), (&true.into(), &serde_json::json!([])));
        let problem = plan["repairs"][0]["problem"].as_str().expect("a text");
        assert!(problem.contains(&name), "{plan}");
        let shown = volume(&["fsck", "--repair", "--dry-run", &damaged.uri]);
        assert!(shown.stdout.contains("would be repaired from "), "{shown:?}");
        assert_eq!(damaged.listing(), before, "a dry run changes nothing");

        let run = damaged.repair();
        assert_eq!(run.code, 0, "{run:?}");
        assert!(run.stdout.contains(&format!("{name} is lost")), "{run:?}");
        assert!(run.stdout.contains("1 repaired, ") && run.stdout.contains("no defect"), "{run:?}");
        let again = json(&["fsck", "--repair", &damaged.uri]);
        assert_eq!(
            (&again["repairs"], &again["deleted_objects"]),
            (&serde_json::json!([]), &0.into())
        );
        assert_eq!(volume(&["scrub", &damaged.uri]).code, 0);
        assert!(damaged.has_what_was_written());
    }
}

#[test]
fn objects_that_nothing_refers_to_are_deleted_by_name() {
    let damaged = Volume::new(&[], false);
    damaged.write_twice();
    let plan = json(&["fsck", "--repair", "--dry-run", &damaged.uri]);
    assert!(plan["deleted_objects"].as_u64() > Some(0), "{plan}");
    assert_eq!(plan["repairs"], serde_json::json!([]));
    let check = json(&["fsck", &damaged.uri]);
    let unreferenced = &check["unreferenced"];
    assert_eq!(
        (&unreferenced["names"], &unreferenced["objects"]),
        (&plan["deleted"], &plan["deleted_objects"])
    );
    let shown = volume(&["fsck", &damaged.uri]);
    assert!(shown.code == 0 && shown.stdout.contains(": nothing refers to it"), "{shown:?}");
    {
        let _user = User::of(&damaged.uri);
        let check = json(&["fsck", &damaged.uri]);
        assert_eq!(check["unreferenced"], serde_json::Value::Null, "a client has it open");
    }
    let plan = json(&["fsck", "--repair", "--dry-run", &damaged.uri]);
    let done = json(&["fsck", "--repair", &damaged.uri]);
    assert_eq!(done["deleted"], plan["deleted"]);
    for name in done["deleted"].as_array().expect("names") {
        let path = damaged.objects().join(name.as_str().expect("a name"));
        assert!(!path.exists(), "{name}");
    }
    assert_eq!(json(&["fsck", "--repair", &damaged.uri])["deleted_objects"], 0);
    assert_eq!(json(&["fsck", &damaged.uri])["unreferenced"]["objects"], 0);
    assert!(damaged.has_content());
}

/// What cannot be repaired is named, with the ranges, and nothing is changed.
#[test]
fn lost_data_and_missing_history_are_reported_and_stay() {
    let damaged = Volume::new(&[], false);
    {
        let user = User::of(&damaged.uri);
        assert!(user.does("write -P 0x41 0 64k") && user.does("write -P 0x42 1M 64k"));
    }
    let (name, path) = damaged.of_kind("log").remove(1);
    std::fs::write(&path, &std::fs::read(&path).expect("a file")[..4096]).expect("the file");
    let before = damaged.listing();
    let run = damaged.repair();
    assert_eq!(run.code, 1, "{run:?}");
    assert!(run.stdout.contains(&format!("65536 bytes at 0 cannot be read: {name}")), "{run:?}");
    assert!(run.stdout.contains("0 repaired, 0 deleted; 1 defect"), "{run:?}");
    std::fs::remove_file(&path).expect("the file");
    let run = damaged.repair();
    assert_eq!(run.code, 1, "{run:?}");
    assert!(run.stdout.contains(&format!("not repaired: {name} is lost")), "{run:?}");
    assert!(run.stdout.contains("lack writes"), "{run:?}");
    let missing = format!("{}\n", path.display());
    assert_eq!(damaged.listing(), format!("{before}\n").replace(&missing, "").trim_end());
}

#[test]
fn a_repair_is_refused_before_anything_is_changed() {
    let damaged = Volume::new(&[], true);
    damaged.write_twice();
    let before = damaged.listing();
    let without = volume(&["fsck", "--dry-run", &damaged.uri]);
    assert_eq!(without.code, 2, "{without:?}");
    assert!(without.stderr.contains("--repair"), "{without:?}");
    let snapshot = damaged.uri.replace("/v?", "/v@s?");
    let of_snapshot = volume(&["fsck", "--repair", &snapshot]);
    assert!(of_snapshot.error(2).contains("omit the @"), "{of_snapshot:?}");
    let missing = damaged.uri.replace("/v?", "/none?");
    assert!(volume(&["fsck", "--repair", &missing]).error(3).contains("none"));
    let locked = damaged.uri.split('?').next().expect("a path");
    assert!(volume(&["fsck", "--repair", locked]).error(2).contains("key_file="));
    let file = format!("file:{}/disk.img", damaged.directory.path().display());
    assert!(changed(&["create", &file, "1M"]));
    assert!(volume(&["fsck", "--repair", &file]).error(8).contains("have no check"));
    assert_eq!(damaged.listing(), before);

    let user = User::of(&damaged.uri);
    for words in
        [&["fsck", "--repair", &damaged.uri][..], &["fsck", "--repair", "--dry-run", &damaged.uri]]
    {
        let held = volume(words);
        assert!(held.error(5).contains("is claimed by"), "{held:?}");
        assert!(held.error(5).contains("cleat fence add"), "{held:?}");
    }
    assert!(user.writes(), "the client continues");
    // A client that has died holds nothing.
    user.die();
    assert_eq!(damaged.repair().code, 0);
}

/// A repair is killed anywhere, and the next one completes it.
#[test]
fn a_repair_that_is_killed_is_completed_by_the_next_one() {
    let damaged = Volume::new(&[], false);
    damaged.write_until_checkpoint();
    let (_, path) = damaged.of_kind("ckpt").pop().expect("a checkpoint");
    damage(&path);
    for round in 0..20 {
        let mut process = spawn(&["fsck", "--repair", &damaged.uri]);
        std::thread::sleep(Duration::from_millis(2 * round));
        process.kill().expect("the process is a child");
        process.wait().expect("the process is a child");
    }
    let run = damaged.repair();
    assert_eq!(run.code, 0, "{run:?}");
    let again = json(&["fsck", "--repair", &damaged.uri]);
    assert_eq!((&again["repairs"], &again["deleted_objects"]), (&serde_json::json!([]), &0.into()));
    assert!(damaged.has_what_was_written());
}
