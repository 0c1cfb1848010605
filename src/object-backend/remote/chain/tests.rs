//! The order of the sources, with an environment of the test, and services on loopback.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::thread;

use super::*;

use super::super::keys::Keys;

type Variables = Arc<Mutex<BTreeMap<&'static str, String>>>;

/// Answers a request line and its headers with a status and a body.
type Answering = Arc<dyn Fn(&str) -> (u16, String) + Send + Sync>;

/// A chain of a test, with its variables.
struct Scene {
    directory: tempfile::TempDir,
    variables: Variables,
    chain: Chain,
}

impl Scene {
    /// Makes a chain without any variable but a home directory, and without a metadata service. Each `find` asks.
    fn new() -> Self {
        Self::of(Provider::Amazon)
    }

    fn of(provider: Provider) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let variables = Variables::default();
        let seen = Arc::clone(&variables);
        let place = Place { provider, region: "eu-west-1".into(), trusted: None };
        let environment = move |name: &str| seen.lock().unwrap().get(name).cloned();
        let chain = Chain::new(place, Box::new(environment), Duration::ZERO);
        let scene = Self { directory, variables, chain };
        scene.set("HOME", &scene.directory.path().display().to_string());
        scene.set("AWS_EC2_METADATA_DISABLED", "true");
        scene
    }

    fn set(&self, name: &'static str, value: &str) {
        self.variables.lock().unwrap().insert(name, value.to_owned());
    }

    fn unset(&self, name: &str) {
        self.variables.lock().unwrap().remove(name);
    }

    /// Writes a file that only its owner may read, and returns its path.
    fn file(&self, name: &str, content: &str) -> String {
        let path = self.directory.path().join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, content).unwrap();
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o600)).unwrap();
        path.display().to_string()
    }

    /// Sets up the exchange of a token at `endpoint`.
    fn with_web_identity(&self, endpoint: &str) {
        let token = self.file("token", "a-token-of-kubernetes");
        self.set("AWS_WEB_IDENTITY_TOKEN_FILE", &token);
        self.set("AWS_ROLE_ARN", "arn:aws:iam::1:role/volumes");
        self.set("AWS_ENDPOINT_URL_STS", endpoint);
    }

    fn keys(&self) -> Keys {
        Keys::parse(self.chain.find().unwrap().secret.bytes()).unwrap()
    }

    fn found(&self) -> (String, Option<Origin>) {
        let keys = self.keys();
        (keys.id, keys.origin)
    }

    /// Checks that there are no keys, and that the error has all parts and no secret.
    fn refused(&self, kind: ErrorKind, parts: &[&str]) {
        let error = self.chain.find().expect_err("there are no keys");
        let text = format!("{}; {}", error.report(), error.repair().expect("a repair"));
        assert_eq!(error.kind(), kind, "{text}");
        for part in parts {
            assert!(text.contains(part), "{part:?} is not in: {text}");
        }
        assert!(!text.contains("hidden"), "{text}");
    }
}

/// Serves on loopback until the test ends. Returns the address.
fn serve(answering: Answering) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let mut request = Vec::new();
            let mut bytes = [0; 4096];
            while !request.ends_with(b"\r\n\r\n") {
                match stream.read(&mut bytes) {
                    Ok(0) | Err(_) => break,
                    Ok(count) => request.extend_from_slice(&bytes[..count]),
                }
            }
            let (status, body) = answering(&String::from_utf8_lossy(&request));
            let length = body.len();
            let head = format!(
                "HTTP/1.1 {status} S\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n"
            );
            let _ = stream.write_all(&[head, body].concat().into_bytes());
        }
    });
    address
}

/// The numbers of the calls that a service has answered.
type Calls = Arc<AtomicU64>;

/// Serves STS: the keys have the number of the call, and expire at `expiration`.
fn sts(calls: &Calls, expiration: &'static str) -> String {
    let calls = Arc::clone(calls);
    serve(Arc::new(move |request| {
        let parts = ["POST ", "Action=AssumeRoleWithWebIdentity", "WebIdentityToken=a-token"];
        assert!(parts.iter().all(|part| request.contains(part)), "{request}");
        let number = calls.fetch_add(1, Ordering::SeqCst) + 1;
        let keys = format!(
            "<AccessKeyId>sts{number}</AccessKeyId><SecretAccessKey>hidden</SecretAccessKey>\
             <SessionToken>hidden-too</SessionToken><Expiration>{expiration}</Expiration>"
        );
        let answer = format!(
            "<AssumeRoleWithWebIdentityResponse><AssumeRoleWithWebIdentityResult><Credentials>{keys}\
             </Credentials></AssumeRoleWithWebIdentityResult></AssumeRoleWithWebIdentityResponse>"
        );
        (200, answer)
    }))
}

fn json(id: &str) -> String {
    format!(
        "{{\"AccessKeyId\":\"{id}\",\"SecretAccessKey\":\"hidden\",\"Token\":\"hidden-too\",\
         \"Expiration\":\"2099-01-01T00:00:00Z\"}}"
    )
}

/// Serves the metadata of an instance, in version 2 of its protocol.
fn metadata() -> String {
    serve(Arc::new(|request| {
        let has_token = request.to_ascii_lowercase().contains("x-aws-ec2-metadata-token: session");
        match request.split(' ').take(2).collect::<Vec<_>>()[..] {
            ["PUT", "/latest/api/token"] => (200, "session".to_owned()),
            ["GET", "/latest/meta-data/iam/security-credentials/"] if has_token => {
                (200, "role-a".to_owned())
            }
            ["GET", "/latest/meta-data/iam/security-credentials/role-a"] if has_token => {
                (200, json("instance"))
            }
            _ => (401, String::new()),
        }
    }))
}

#[test]
fn the_first_source_that_is_set_up_has_the_keys() {
    let scene = Scene::new();
    scene.refused(
        ErrorKind::NotFound,
        &[
            "AWS_ACCESS_KEY_ID is not set; AWS_WEB_IDENTITY_TOKEN_FILE is not set; ",
            ".aws/credentials does not exist; neither AWS_CONTAINER_",
            "AWS_EC2_METADATA_DISABLED is true",
            "credentials_file=/PATH",
        ],
    );
    // Each of them precedes the one before.
    scene.unset("AWS_EC2_METADATA_DISABLED");
    scene.set("AWS_EC2_METADATA_SERVICE_ENDPOINT", &metadata());
    assert_eq!(scene.found(), ("instance".into(), Some(Origin::Instance)));
    let container = serve(Arc::new(|request| {
        let is_sent = request.contains("GET /v1/credentials ") && request.contains("a-pod-token");
        if is_sent { (200, json("container")) } else { (400, String::new()) }
    }));
    scene.set("AWS_CONTAINER_CREDENTIALS_FULL_URI", &format!("{container}/v1/credentials"));
    scene.set("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", &scene.file("pod", "a-pod-token"));
    assert_eq!(scene.found(), ("container".into(), Some(Origin::Container)));
    let section = |profile: &str| {
        format!("[{profile}]\naws_access_key_id = {profile}\naws_secret_access_key = hidden\n")
    };
    scene.file(".aws/credentials", &section("default"));
    assert_eq!(scene.found(), ("default".into(), Some(Origin::SharedFile)));
    let other = scene.file("other", &[section("default"), section("volumes")].concat());
    scene.set("AWS_SHARED_CREDENTIALS_FILE", &other);
    scene.set("AWS_PROFILE", "volumes");
    assert_eq!(scene.found(), ("volumes".into(), Some(Origin::SharedFile)));
    scene.with_web_identity(&sts(&Calls::default(), "2099-01-01T00:00:00Z"));
    assert_eq!(scene.found(), ("sts1".into(), Some(Origin::WebIdentity)));
    scene.set("AWS_ACCESS_KEY_ID", "variable");
    scene.set("AWS_SECRET_ACCESS_KEY", "hidden");
    scene.set("AWS_SESSION_TOKEN", "token");
    assert_eq!(scene.found(), ("variable".into(), Some(Origin::Environment)));
    assert_eq!(scene.keys().token.unwrap().as_str(), "token");
}

#[test]
fn temporary_keys_are_replaced_before_they_expire_and_otherwise_kept() {
    let calls = Calls::default();
    let scene = Scene::new();
    scene.with_web_identity(&sts(&calls, "2099-01-01T00:00:00Z"));
    let first = scene.chain.find().unwrap();
    let second = scene.chain.find().unwrap();
    assert_eq!((first.version, first.secret.bytes()), (second.version, second.secret.bytes()));
    assert_eq!(calls.load(Ordering::SeqCst), 1);
    // Keys that have expired are replaced each time.
    let expired = Calls::default();
    scene.set("AWS_ENDPOINT_URL_STS", &sts(&expired, "2020-01-01T00:00:00Z"));
    let third = scene.chain.find().unwrap();
    assert_eq!(third.version, second.version, "the same keys of another service");
    assert_eq!(scene.found().0, "sts2");
    let fourth = scene.chain.find().unwrap();
    assert!(third.version < fourth.version);
    assert_eq!(expired.load(Ordering::SeqCst), 3);
}

#[test]
fn a_service_is_not_asked_again_at_once() {
    let calls = Calls::default();
    let mut scene = Scene::new();
    scene.chain.recheck = Duration::from_secs(3600);
    scene.with_web_identity(&sts(&calls, "2020-01-01T00:00:00Z"));
    for _ in 0..3 {
        assert_eq!(scene.found().0, "sts1");
    }
    assert_eq!(calls.load(Ordering::SeqCst), 1);
}

#[test]
fn the_last_keys_stay_in_use_while_the_service_fails() {
    let calls = Calls::default();
    let count = Arc::clone(&calls);
    let scene = Scene::new();
    scene.unset("AWS_EC2_METADATA_DISABLED");
    let first = json("first").replace("2099", "2020");
    let endpoint = serve(Arc::new(move |_| match count.fetch_add(1, Ordering::SeqCst) {
        0 => (200, "session".to_owned()),
        1 => (200, "role".to_owned()),
        2 => (200, first.clone()),
        _ => (500, "hidden".to_owned()),
    }));
    scene.set("AWS_EC2_METADATA_SERVICE_ENDPOINT", &endpoint);
    let before = scene.chain.find().unwrap();
    let after = scene.chain.find().unwrap();
    assert!(calls.load(Ordering::SeqCst) > 3, "the service was asked again");
    assert_eq!((before.version, before.secret.bytes()), (after.version, after.secret.bytes()));
}

#[test]
fn a_refusal_of_a_service_names_its_cause_and_no_other_source_is_tried() {
    let answer = Arc::new(Mutex::new((200, String::new())));
    let given = Arc::clone(&answer);
    let scene = Scene::new();
    scene.with_web_identity(&serve(Arc::new(move |_| given.lock().unwrap().clone())));
    scene.file(".aws/credentials", "[default]\naws_access_key_id=a\naws_secret_access_key=b\n");
    let error = |code: &str| format!("<Error><Code>{code}</Code><Message>m</Message></Error>");
    for (status, body, kind, part) in [
        (400, error("ExpiredTokenException"), ErrorKind::PermissionDenied, "/token has expired"),
        (403, error("AccessDenied"), ErrorKind::PermissionDenied, "permit the role arn:aws:iam::1"),
        (400, error("InvalidIdentityToken"), ErrorKind::PermissionDenied, "/token is refused"),
        (503, error("Busy"), ErrorKind::Unavailable, "HTTP 503, Busy"),
        (200, "\"hidden\"".to_owned(), ErrorKind::Unavailable, "its answer has no keys"),
        (200, "<a>hidden</a>".to_owned(), ErrorKind::Unavailable, "its answer has no keys"),
    ] {
        *answer.lock().unwrap() = (status, body);
        scene.refused(kind, &[part, "the keys from the role of AWS_ROLE_ARN at http://127.0.0.1:"]);
    }
    // Longer than any answer with keys.
    *answer.lock().unwrap() = (200, " ".repeat(1 << 20));
    scene.refused(ErrorKind::Unavailable, &["its answer has no keys"]);
    std::fs::remove_file(scene.directory.path().join("token")).unwrap();
    scene.refused(ErrorKind::NotFound, &["/token", "AWS_WEB_IDENTITY_TOKEN_FILE=PATH"]);
}

#[test]
fn a_metadata_service_without_a_role_is_the_last_reason() {
    let scene = Scene::new();
    scene.unset("AWS_EC2_METADATA_DISABLED");
    let without = serve(Arc::new(|request| {
        if request.starts_with("PUT") { (200, "session".to_owned()) } else { (404, String::new()) }
    }));
    scene.set("AWS_EC2_METADATA_SERVICE_ENDPOINT", &without);
    scene.refused(
        ErrorKind::NotFound,
        &["AWS_ACCESS_KEY_ID is not set", "the instance has no role"],
    );
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let closed = format!("http://{}", listener.local_addr().unwrap());
    drop(listener);
    scene.set("AWS_EC2_METADATA_SERVICE_ENDPOINT", &closed);
    scene.refused(
        ErrorKind::NotFound,
        &["refused", "the role of the instance at http://127.0.0.1:"],
    );
}

#[test]
fn a_source_that_is_set_up_by_half_is_an_error() {
    let cases: [(&[(&'static str, &str)], &str); 9] = [
        (&[("AWS_ACCESS_KEY_ID", "hidden")], "but AWS_SECRET_ACCESS_KEY is not"),
        (&[("AWS_SECRET_ACCESS_KEY", "hidden")], "but AWS_ACCESS_KEY_ID is not"),
        (
            &[("AWS_ACCESS_KEY_ID", "hid den"), ("AWS_SECRET_ACCESS_KEY", "b")],
            "other characters than visible ASCII",
        ),
        (&[("AWS_WEB_IDENTITY_TOKEN_FILE", "/t")], "but AWS_ROLE_ARN is not"),
        (&[("AWS_SHARED_CREDENTIALS_FILE", "relative")], "no absolute path"),
        (&[("AWS_SHARED_CREDENTIALS_FILE", "/none/file")], "/none/file"),
        (&[("AWS_CONTAINER_CREDENTIALS_FULL_URI", "http://h/")], "without TLS"),
        (&[("AWS_CONTAINER_CREDENTIALS_FULL_URI", "https://h/")], "TOKEN_FILE is not"),
        (&[("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "@other")], "cannot be"),
    ];
    for (variables, part) in cases {
        let scene = Scene::new();
        for (name, value) in variables {
            scene.set(name, value);
        }
        let error = scene.chain.find().expect_err(part);
        assert!(error.report().contains(part), "{part}: {}", error.report());
        assert!(!error.report().contains("hid"), "{}", error.report());
    }
    let scene = Scene::new();
    scene.file(".aws/credentials", "[default]\nregion = x\n");
    scene.refused(ErrorKind::NotFound, &["the section [default] of "]);
    scene.set("AWS_PROFILE", "volumes");
    scene.refused(ErrorKind::InvalidArgument, &["[volumes]", "has no keys", "credential_process"]);
}

#[test]
fn google_and_azure_have_a_variable() {
    let scene = Scene::of(Provider::Google);
    scene.refused(ErrorKind::NotFound, &["GOOGLE_APPLICATION_CREDENTIALS is not set"]);
    let path = scene.file("account.json", "{}");
    scene.set("GOOGLE_APPLICATION_CREDENTIALS", &path);
    assert_eq!(scene.chain.find().unwrap().secret.bytes(), b"{}");
    let scene = Scene::of(Provider::Azure);
    scene
        .refused(ErrorKind::NotFound, &["neither AZURE_STORAGE_ACCOUNT_KEY nor AZURE_STORAGE_KEY"]);
    scene.set("AZURE_STORAGE_KEY", "a2V5");
    assert_eq!(scene.chain.find().unwrap().secret.bytes(), b"a2V5");
}
