//! MinIO, a store with the S3 API, as a process on loopback. It is built from its Go module at the first start.

use std::fs;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;

use crate::temp::on_disk;
use crate::wait::wait_until;

/// The bucket of the store.
pub const BUCKET: &str = "volumes";

/// The access key and the secret key of the administrator.
const KEYS: [&str; 2] = ["administrator", "not-a-secret-of-anything"];

/// A running MinIO. It ends with the test program.
#[derive(Debug)]
pub struct Minio {
    directory: PathBuf,
    endpoint: String,
    _process: Child,
}

/// Returns the MinIO that the tests of this process share.
pub fn shared() -> &'static Minio {
    static SHARED: OnceLock<Minio> = OnceLock::new();
    SHARED.get_or_init(Minio::start)
}

impl Minio {
    /// The address `HOST:PORT`.
    pub fn endpoint(&self) -> &str {
        &self.endpoint
    }

    /// The path of the file with the keys.
    pub fn credentials(&self) -> PathBuf {
        self.directory.join("credentials")
    }

    fn start() -> Self {
        let program = crate::go::minio();
        let directory = on_disk().join("minio");
        // On the only drive of a server, a directory is a bucket.
        fs::create_dir_all(directory.join("data").join(BUCKET)).unwrap();
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let endpoint = format!("127.0.0.1:{port}");
        let [user, password] = KEYS;
        let log = fs::File::create(directory.join("log")).unwrap();
        let process = Command::new(program.join("minio"))
            .args(["server", "--address", &endpoint, "--quiet"])
            .arg(directory.join("data"))
            .envs([("MINIO_ROOT_USER", user), ("MINIO_ROOT_PASSWORD", password)])
            .envs([("MINIO_BROWSER", "off"), ("MINIO_UPDATE", "off")])
            .env("HOME", &directory)
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .spawn()
            .unwrap();
        let keys =
            format!("[default]\naws_access_key_id = {user}\naws_secret_access_key = {password}\n");
        let minio = Self { directory, endpoint, _process: process };
        fs::write(minio.credentials(), keys).unwrap();
        wait_until("MinIO serves", || minio.is_ready());
        minio
    }

    fn is_ready(&self) -> bool {
        let mut answer = String::new();
        let asked = TcpStream::connect(&self.endpoint).and_then(|mut stream| {
            stream.write_all(
                b"GET /minio/health/ready HTTP/1.1\r\nHost: minio\r\nConnection: close\r\n\r\n",
            )?;
            stream.read_to_string(&mut answer)
        });
        asked.is_ok() && answer.lines().next().is_some_and(|status| status.contains(" 200 "))
    }
}
