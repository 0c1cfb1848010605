//! The keys of a bucket that no option of the URI names.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::{Duration, Instant};

use test_kit::minio;

use crate::volumes::fixture::{Run, User, volume_with};

/// Runs `cleat volume` without a metadata service, and with these variables.
fn volume(words: &[&str], variables: &[(&str, &str)]) -> Run {
    volume_with(words, &[variables, &[("AWS_EC2_METADATA_DISABLED", "true")]].concat())
}

#[test]
fn keys_come_from_the_environment_or_from_the_shared_file() {
    let minio = minio::shared();
    let (bucket, endpoint) = (minio::BUCKET, minio.endpoint());
    let uri = format!("s3://{bucket}/chain-{}/v?endpoint=http://{endpoint}", std::process::id());
    let home = tempfile::tempdir().unwrap();
    let home = ("HOME", home.path().to_str().unwrap());

    let none = volume(&["create", &uri, "8M"], &[home]);
    let error = none.error(3);
    for part in
        ["AWS_ACCESS_KEY_ID is not set", "credentials does not exist", "systemctl edit cleat"]
    {
        assert!(error.contains(part), "{none:?}");
    }
    let file = minio.credentials();
    let file = ("AWS_SHARED_CREDENTIALS_FILE", file.to_str().unwrap());
    let created = volume(&["create", &uri, "8M"], &[home, file]);
    assert_eq!(created.code, 0, "{created:?}");

    let content = std::fs::read_to_string(minio.credentials()).unwrap();
    let value = |name: &str| {
        let line = content.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(" = "));
        line.expect("the key").to_owned()
    };
    let (id, secret) = (value("aws_access_key_id"), value("aws_secret_access_key"));
    let keys =
        [home, ("AWS_ACCESS_KEY_ID", id.as_str()), ("AWS_SECRET_ACCESS_KEY", secret.as_str())];
    let shown = volume(&["info", &uri], &keys);
    assert_eq!(shown.code, 0, "{shown:?}");
    assert!(!format!("{shown:?}").contains(&secret));

    // The variables have precedence, and the message names them.
    let wrong =
        [home, file, ("AWS_ACCESS_KEY_ID", id.as_str()), ("AWS_SECRET_ACCESS_KEY", "wrong")];
    let refused = volume(&["info", &uri], &wrong);
    let why = "the secret key from the environment is not that of the access key";
    assert!(refused.code != 0 && refused.stderr.contains(why), "{refused:?}");
    let removed = volume(&["remove", &uri, "--now"], &keys);
    assert_eq!(removed.code, 0, "{removed:?}");
}

fn replace(path: &Path, content: &str) {
    let next = path.with_extension("next");
    std::fs::write(&next, content).unwrap();
    std::fs::set_permissions(&next, PermissionsExt::from_mode(0o600)).unwrap();
    std::fs::rename(&next, path).unwrap();
}

fn wait_for(server: &User, part: &str) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !server.log().contains(part) {
        assert!(Instant::now() < deadline, "{part:?} is missing: {}", server.log());
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// A server without a supervisor reads its keys itself, also while `cleat volume import` uses it.
#[test]
fn a_server_uses_keys_that_are_replaced_in_the_file() {
    let minio = minio::shared();
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("keys");
    let keys = std::fs::read_to_string(minio.credentials()).unwrap();
    replace(&file, &keys);
    let (bucket, endpoint) = (minio::BUCKET, minio.endpoint());
    let place = format!("s3://{bucket}/serve-{}", std::process::id());
    let uri = format!("{place}/v?endpoint=http://{endpoint}&credentials_file={}", file.display());
    let created = volume(&["create", &uri, "8M"], &[]);
    assert_eq!(created.code, 0, "{created:?}");
    let server = User::of(&uri);
    assert!(server.does_all(&["write 0 4k", "flush"]));
    let wrong = keys.replace("secret_access_key = ", "secret_access_key = wrong");
    assert_ne!(wrong, keys);
    replace(&file, &wrong);
    std::thread::scope(|scope| {
        // A flush waits until the store accepts the keys.
        scope.spawn(|| {
            while !server.log().contains("answers again") {
                assert!(server.does_all(&["write 0 4k", "flush"]), "{}", server.log());
            }
        });
        wait_for(&server, "is not that of the access key");
        replace(&file, "[default]\n");
        wait_for(&server, "the present credentials stay in use");
        replace(&file, &keys);
        wait_for(&server, "answers again");
    });
    drop(server);
    let removed = volume(&["remove", &uri, "--now"], &[]);
    assert_eq!(removed.code, 0, "{removed:?}");
}
