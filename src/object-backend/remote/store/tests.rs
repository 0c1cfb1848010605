//! The client of a bucket, with a server that answers as a test needs it.

use super::*;
use cleat_backend::Credentials;
use cleat_backend::uri::Options;
use std::io::{Read, Write};
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::sync::mpsc;
use std::thread;
use zeroize::Zeroizing;

use crate::remote::bucket::Provider;

fn home(options: &str) -> RemoteHome {
    let options = Options::parse(&format!("credentials_file=/k&{options}")).unwrap();
    let (bucket, _) = Bucket::parse_volume(Provider::Amazon, "//bucket/a/v", options).unwrap();
    let keys = b"[default]\naws_access_key_id = a\naws_secret_access_key = b\n";
    let credentials =
        CredentialSet::with("/k".into(), Credentials::new(Zeroizing::new(keys.to_vec())));
    RemoteHome::connect(&bucket, &credentials, None).unwrap()
}

/// Answers each request on a connection of its own with an object of 4 bytes. Every eleventh request hangs.
fn serve(listener: &TcpListener) {
    for number in 0.. {
        let Ok((mut stream, _)) = listener.accept() else { return };
        thread::spawn(move || {
            let mut request = [0; 4096];
            let _ = stream.read(&mut request);
            if number % 11 == 10 {
                // Until the client gives up.
                let _ = stream.read(&mut request);
                return;
            }
            let head = "HTTP/1.1 206 Partial Content\r\nConnection: close\r\nContent-Length: 4\r\n\
                 Content-Range: bytes 0-3/4\r\nETag: \"e\"\r\n\
                 Last-Modified: Wed, 25 Nov 2026 00:00:00 GMT\r\n\r\n";
            let _ = stream.write_all(&[head.as_bytes(), b"data"].concat());
        });
    }
}

#[test]
fn a_read_that_hangs_is_sent_once_more() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("endpoint=http://{}", listener.local_addr().unwrap());
    thread::spawn(move || serve(&listener));
    let home = home(&format!("{endpoint}&hedge=20ms"));
    for _ in 0..40 {
        let read = home.0.read("a/v/desc".to_owned(), 0..4);
        assert_eq!(block_until(after(READ_TIMEOUT / 2), read), Some(Ok(b"data".to_vec())));
    }
}

/// Answers as [`serve`] does, and sends the access key of each request.
fn serve_noting(listener: &TcpListener, ids: &mpsc::Sender<String>) {
    for mut stream in listener.incoming().flatten() {
        let mut request = [0; 4096];
        let length = stream.read(&mut request).unwrap_or(0);
        let text = String::from_utf8_lossy(&request[..length]).into_owned();
        let id = text.split_once("Credential=").and_then(|(_, rest)| rest.split_once('/'));
        let _ = ids.send(id.map(|(id, _)| id.to_owned()).unwrap_or_default());
        let _ = stream
            .write_all(b"HTTP/1.1 404 None\r\nConnection: close\r\n\r\n<Code>NoSuchKey</Code>");
    }
}

#[test]
fn a_command_uses_keys_that_have_changed() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("keys");
    let write = |id: &str| {
        let next = directory.path().join("next");
        std::fs::write(&next, format!("aws_access_key_id={id}\naws_secret_access_key=b\n"))
            .unwrap();
        std::fs::set_permissions(&next, PermissionsExt::from_mode(0o600)).unwrap();
        std::fs::rename(&next, &path).unwrap();
    };
    write("first");
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let options = format!(
        "credentials_file={}&endpoint=http://{}",
        path.display(),
        listener.local_addr().unwrap()
    );
    let (sender, ids) = mpsc::channel();
    thread::spawn(move || serve_noting(&listener, &sender));
    let options = Options::parse(&options).unwrap();
    let (bucket, _) = Bucket::parse_volume(Provider::Amazon, "//bucket/a/v", options).unwrap();
    let credentials = CredentialSet::load(&[credential_file(&bucket)]).unwrap();
    let home = RemoteHome::connect(&bucket, &credentials, None).unwrap();
    home.0.follow(Duration::from_millis(5));
    let id = || {
        let read = home.0.read("a/v/desc".to_owned(), 0..4);
        assert_eq!(block_until(after(READ_TIMEOUT), read), Some(Err(StoreError::NotFound)));
        ids.recv().unwrap()
    };
    assert_eq!(id(), "first");
    write("second");
    let until = after(CALL_TIMEOUT);
    while id() != "second" {
        assert!(after(Duration::ZERO) < until, "the first key is still in use");
    }
}

#[test]
fn reads_do_not_wait_for_other_calls() {
    let home = home("endpoint=http://h:80");
    let caller = &home.0;
    let stuck: Vec<Pending<'_, Result<(), StoreError>>> = (0..2 * CHANGES)
        .map(|_| caller.run(|_| std::future::pending::<object_store::Result<()>>()))
        .collect();
    let read = caller.run_within(CALL_TIMEOUT, &caller.reads, |_| async { Ok(7) });
    assert_eq!(block_until(after(CALL_TIMEOUT / 2), read), Some(Ok(7)));
    drop(stuck);
}

/// Answers each put with the status that the name of the object ends with. With 0, the connection ends without an
/// answer, as if the answer of a put that was executed were lost.
fn serve_statuses(listener: &TcpListener) {
    for mut stream in listener.incoming().flatten() {
        let mut request = [0; 4096];
        let length = stream.read(&mut request).unwrap_or(0);
        let text = String::from_utf8_lossy(&request[..length]).into_owned();
        let path = text.split(' ').nth(1).unwrap_or_default();
        let status = path.rsplit('/').next().unwrap_or_default();
        if status != "0" {
            let head = "Connection: close\r\nETag: \"e\"\r\nContent-Length: 0\r\n\r\n";
            let _ = stream.write_all(format!("HTTP/1.1 {status} None\r\n{head}").as_bytes());
        }
    }
}

#[test]
fn each_answer_to_a_put_has_its_meaning() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("&endpoint=http://{}", listener.local_addr().unwrap());
    thread::spawn(move || serve_statuses(&listener));
    let store = home(&endpoint).store("v").unwrap();
    let put = |status: u16| {
        let name = format!("log/{status}");
        block_until(after(CALL_TIMEOUT), store.create(&name, b"data")).unwrap()
    };
    assert_eq!((put(200), put(412)), (Ok(()), Err(StoreError::Exists)));
    // The put may have been executed. What decides is the object that is read afterwards.
    for status in [0, 409, 429, 500, 503] {
        let result = put(status);
        assert!(matches!(result, Err(StoreError::Unclear(_))), "{status}: {result:?}");
    }
    for status in [403, 404, 501] {
        let result = put(status);
        assert!(matches!(result, Err(StoreError::Refused(_))), "{status}: {result:?}");
    }
}

/// Answers each listing with the same names, as a store does that ignores where the listing begins.
fn serve_names(listener: &TcpListener) {
    for mut stream in listener.incoming().flatten() {
        let mut request = [0; 4096];
        let _ = stream.read(&mut request);
        let object = |name: &str| {
            let date = "2026-11-25T00:00:00.000Z";
            format!(
                "<Contents><Key>a/v/log/{name}</Key><Size>1</Size><LastModified>{date}</LastModified></Contents>"
            )
        };
        let objects: String = ["1", "2", "3"].map(object).concat();
        let body = format!("<ListBucketResult>{objects}</ListBucketResult>");
        let head = format!("Connection: close\r\nContent-Length: {}\r\n\r\n", body.len());
        let _ = stream.write_all(format!("HTTP/1.1 200 OK\r\n{head}{body}").as_bytes());
    }
}

#[test]
fn a_listing_ends_if_the_store_ignores_where_it_begins() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("&endpoint=http://{}", listener.local_addr().unwrap());
    thread::spawn(move || serve_names(&listener));
    let store = home(&endpoint).store("v").unwrap();
    let list = |behind: &str| block_until(after(CALL_TIMEOUT), store.list("log/", behind)).unwrap();
    let names = |names: &[&str]| Ok(names.iter().map(|name| format!("log/{name}")).collect());
    assert_eq!(list(""), names(&["1", "2", "3"]));
    assert_eq!(list("log/1"), names(&["2", "3"]));
    assert_eq!(list("log/3"), names(&[]));
}
