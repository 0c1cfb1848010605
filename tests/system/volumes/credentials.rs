//! The keys of a bucket that no option of the URI names.

use test_kit::minio;

use crate::volumes::fixture::{Run, volume_with};

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
