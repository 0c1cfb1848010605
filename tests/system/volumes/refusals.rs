//! Wrong input, missing rights, pools and clusters: each is reported with a repair hint, in time.

use std::time::{Duration, Instant};

use test_kit::ceph::{Cluster, ID, POOL, shared};

use crate::volumes::fixture::{User, changed, options, options_of, uri, volume};

#[test]
fn each_wrong_input_has_a_message_of_its_own() {
    let (image, snapshot) = (uri("nothing"), uri("nothing@s"));
    let nowhere = format!("rbd:nowhere/i?{}", options());
    let cases: [(&[&str], i32, &str); 24] = [
        (&["create", &image], 2, "<SIZE>"),
        (&["create", &image, "0"], 2, "must be greater than zero"),
        (&["create", &image, "10X"], 2, "\"10X\" is not a size"),
        (&["create", "rbd:volumes", "1G"], 2, "needs a pool and an image"),
        (&["create", &snapshot, "1G"], 2, "is a snapshot"),
        (&["create", &image, "1G", "--features", "speed"], 2, "\"speed\" is not a feature"),
        (&["create", &image, "1G", "--features", "striping"], 2, "use --stripe-unit"),
        (&["create", &image, "1G", "--object-size", "5000"], 2, "power of two"),
        (&["create", &image, "1G", "--stripe-unit", "4K"], 2, "--stripe-count"),
        (&["create", &image, "1G", "--data-pool", "nope"], 3, "check that the pool nope exists"),
        (
            &["create", &image, "1G", "--stripe-unit", "8M", "--stripe-count", "2"],
            2,
            "also give the object size",
        ),
        (&["create", &image, "4E"], 2, "at most 256,000,000 objects"),
        (&["create", "mem:1G", "1G"], 8, "mem volumes are not kept in a store"),
        (&["create", &nowhere, "1G"], 3, "cannot reach the pool nowhere"),
        (&["remove", &image, "--keep", "7"], 2, "time unit needed"),
        (&["remove", &image, "--keep", "1h", "--now"], 2, "cannot be used with"),
        (&["resize", &image, "1G"], 3, "cannot open the RBD image volumes/nothing"),
        (&["info", &snapshot], 3, "the snapshot s of the image nothing"),
        (&["list", "mem:1G"], 2, "does not name a store of volumes"),
        (&["list", "rbd:volumes", "--limit", "0"], 2, "0 is not in 1.."),
        (&["snapshot", "create", &image], 2, "names no snapshot"),
        (&["snapshot", "rollback", &snapshot], 3, "volumes/nothing@s"),
        (&["clone", &snapshot, &uri("clone")], 3, "no snapshot volumes/nothing@s to be cloned"),
        (&["clone", &snapshot, "rbd:volumes/c?id=other"], 2, "options of the two volumes differ"),
    ];
    let mut messages = Vec::new();
    for (words, code, cause) in cases {
        let run = volume(words);
        let message = run.error(code);
        assert!(message.contains(cause), "{words:?}: {message}");
        messages.push(message.to_owned());
    }
    messages.sort();
    messages.dedup();
    assert_eq!(messages.len(), cases.len(), "two inputs have the same message");
}

#[test]
fn with_json_output_errors_are_json_too() {
    let run = volume(&["info", &uri("missing"), "-o", "json"]);
    assert_eq!((run.code, &*run.stdout), (3, ""));
    let error: serde_json::Value = serde_json::from_str(&run.stderr).expect("JSON");
    assert_eq!(error["error"]["kind"], "not_found");
    assert_eq!(error["error"]["exit_code"], 3);
}

/// librados has lines of its own about a key, a configuration file or an option that it cannot use.
#[test]
fn with_json_output_stderr_has_nothing_else() {
    let cluster = shared();
    let conf = cluster.conf();
    let conf = conf.display();
    let place = |options: String| format!("rbd:{POOL}?{options}");
    let cases = [
        place(format!("conf={conf}&id=stranger")),
        place("conf=/no/such/ceph.conf".to_owned()),
        place(format!("conf={conf}&config.no_such_option=1")),
        place(format!("conf={conf}&config.rados_osd_op_timeout=soon")),
    ];
    for place in cases {
        let run = volume(&["list", &place, "-o", "json"]);
        assert_ne!(run.code, 0, "{place}: {run:?}");
        let error: Result<serde_json::Value, _> = serde_json::from_str(&run.stderr);
        assert!(error.is_ok_and(|error| error["error"].is_object()), "{place}: {run:?}");
    }
}

#[test]
fn missing_rights_are_reported_with_the_command_that_grants_them() {
    let cluster = shared();
    cluster.ceph(&[
        "auth",
        "get-or-create",
        "client.reader",
        "mon",
        "profile rbd",
        "osd",
        "profile rbd-read-only pool=volumes",
        "-o",
        &cluster.keyring("reader").display().to_string(),
    ]);
    assert!(changed(&["create", &uri("guarded"), "8M"]));
    let reader = |name: &str| format!("rbd:{POOL}/{name}?{}", options_of(cluster, "reader"));
    assert_eq!(volume(&["info", &reader("guarded")]).code, 0, "reading is allowed");
    let writes: [&[&str]; 6] = [
        &["create", &reader("new"), "8M"],
        &["resize", &reader("guarded"), "16M"],
        &["remove", &reader("guarded")],
        &["remove", &reader("guarded"), "--now"],
        &["snapshot", "create", &reader("guarded@s")],
        &["clone", &reader("guarded@s"), &reader("clone")],
    ];
    for words in &writes[..5] {
        let run = volume(words);
        assert!(run.error(7).contains("ceph auth caps client.reader"), "{words:?}: {run:?}");
    }
    assert!(changed(&["snapshot", "create", &uri("guarded@s")]));
    let run = volume(writes[5]);
    assert!(run.error(7).contains("ceph auth caps client.reader"), "{run:?}");
    // The recommended command grants the missing rights.
    cluster.grant(&run.stderr).expect("the message recommends a command");
    assert!(changed(writes[5]));
    assert!(changed(&["resize", &reader("guarded"), "16M"]));

    // A client without a keyring, and a client without rights on the pool.
    let stranger = format!("rbd:{POOL}?conf={}&id=stranger", cluster.conf().display());
    assert!([3, 7].contains(&volume(&["list", &stranger]).code));
    cluster.make_pool("private");
    let run = volume(&["list", &format!("rbd:private?{}", options())]);
    assert!(run.error(7).contains("profile rbd pool=private"), "{run:?}");
    the_recommended_command_covers_namespaces_and_data_pools();
    // Without the profile's right to search all pools for clones, the clones are reported as unknown.
    let caps = ["mon", "profile rbd", "osd", "allow rwx pool=volumes"];
    let keyring = cluster.keyring("narrow").display().to_string();
    let get = ["auth", "get-or-create", "client.narrow"];
    cluster.ceph(&[&get[..], &caps, &["-o", &keyring]].concat());
    let narrow = format!("rbd:{POOL}/guarded?{}", options_of(cluster, "narrow"));
    let info = volume(&["info", &narrow, "-o", "json"]).json();
    assert_eq!(info["clones"], serde_json::json!(null));
    assert!(volume(&["info", &narrow]).stdout.contains("all pools"));
}

fn the_recommended_command_covers_namespaces_and_data_pools() {
    let cluster = shared();
    cluster.rbd(&["namespace", "create", &format!("{POOL}/tenant")]).expect("the namespace is new");
    cluster.make_pool("elsewhere");
    let keyring = cluster.keyring("tenant").display().to_string();
    let caps = ["mon", "profile rbd", "osd", "profile rbd pool=private"];
    let get = ["auth", "get-or-create", "client.tenant"];
    cluster.ceph(&[&get[..], &caps, &["-o", &keyring]].concat());
    let options = options_of(cluster, "tenant");
    let image = format!("rbd:{POOL}/tenant/i?{options}");
    let create = ["create", &image, "8M", "--data-pool", "elsewhere"];
    let run = volume(&create);
    for part in ["pool=volumes namespace=tenant", "profile rbd pool=elsewhere"] {
        assert!(run.error(7).contains(part), "{part}: {run:?}");
    }
    cluster.grant(&run.stderr).expect("the message recommends a command");
    assert!(changed(&create));
    let outside = volume(&["create", &format!("rbd:{POOL}/outside?{options}"), "8M"]);
    assert!(outside.error(7).contains("pool=volumes'"), "{outside:?}");
}

#[test]
fn missing_rights_on_the_data_pool_are_reported() {
    let cluster = shared();
    cluster.make_pool("apart");
    let admin = |name: &str| format!("rbd:{POOL}/{name}?{}", options_of(cluster, "admin"));
    assert!(changed(&["create", &admin("apart"), "8M", "--data-pool", "apart"]));
    assert!(User::of(&admin("apart")).writes(), "the administrator has the rights");
    assert!(changed(&["snapshot", "create", &admin("apart@s")]));
    assert!(changed(&["clone", &admin("apart@s"), &admin("from-apart")]));

    let keyring = cluster.keyring("halfway").display().to_string();
    let caps = |data: &str| format!("profile rbd pool={POOL}{data}");
    let get = ["auth", "get-or-create", "client.halfway", "mon", "profile rbd", "osd"];
    cluster.ceph(&[&get[..], &[&caps(""), "-o", &keyring]].concat());
    let halfway = |name: &str| format!("rbd:{POOL}/{name}?{}", options_of(cluster, "halfway"));
    let names_the_pool = |complaint: &str| {
        for part in ["may not use the pool apart", "the data of volumes/apart", "pool=apart'"] {
            assert!(complaint.contains(part), "{part}: {complaint}");
        }
    };
    names_the_pool(&User::try_of(&halfway("apart")).expect_err("the client has no rights"));
    names_the_pool(
        &User::try_of(&halfway("apart@s")).expect_err("the client has no right to read"),
    );
    // The parent of a clone is accessed only when data is read.
    let mut clone = User::of(&halfway("from-apart"));
    assert!(!clone.does("read 0 4k") && !clone.does("read 0 4k"));
    let printed = clone.end();
    assert_eq!(
        printed.matches("may not use a pool with data of the image").count(),
        1,
        "{printed}"
    );
    assert!(printed.contains("ceph auth caps client.halfway"), "{printed}");

    let set = ["auth", "caps", "client.halfway", "mon", "profile rbd", "osd"];
    cluster.ceph(&[&set[..], &[&caps(", profile rbd-read-only pool=apart")]].concat());
    names_the_pool(&User::try_of(&halfway("apart")).expect_err("the client has no right to write"));
    assert!(User::of(&halfway("apart@s")).does("read 0 4k"));
    let message = User::try_of(&halfway("apart")).expect_err("the client has no right to write");
    cluster.grant(&message).expect("the message recommends a command");
    assert!(User::of(&halfway("apart")).writes());
}

#[test]
fn commands_time_out_when_the_cluster_does_not_answer() {
    let begun = Instant::now();
    let unreachable = format!("{}&config.mon_host=v2:127.0.0.1:9/0", options());
    let run = volume(&["list", &format!("rbd:{POOL}?{unreachable}")]);
    assert!(run.error(10).contains("monitors can be reached"), "{run:?}");
    let unreached = begun.elapsed();

    // The monitor answers, the OSD does not.
    let cluster = Cluster::start();
    let image = format!("rbd:{POOL}/i?{}", options_of(&cluster, ID));
    assert!(changed(&["create", &image, "8M"]));
    cluster.tell("pause osd");
    let begun = Instant::now();
    let run = volume(&["snapshot", "protect", &image.replace("/i?", "/i@s?")]);
    assert!(run.error(10).contains("may still take effect"), "{run:?}");
    let hung = begun.elapsed();
    cluster.tell("resume osd");
    println!("no monitor: {unreached:?}; an OSD that hangs: {hung:?}");
    // The bound is far above the time limits, and shows that the commands end.
    assert!(unreached.max(hung) < Duration::from_secs(200));
    assert_eq!(volume(&["info", &image]).code, 0);
}
