//! The wire format of `cleat-csi-api`, compared with the Go bindings that the authors of CSI, kubelet and
//! CSI-Addons publish. The Go half is in the same directory: it compares the descriptors, sends each message,
//! filled in many ways, and checks that it comes back equal after this half has decoded and encoded it.

mod messages;

use std::collections::BTreeSet;
use std::fmt::Debug;
use std::io::{Read, Write};
use std::process::{Command, Stdio};

use messages::MESSAGES;
use prost::Message;

/// Decodes a message and encodes it again. The error says what is wrong with it.
type Exchange = fn(&[u8]) -> Result<Vec<u8>, String>;

/// The beginning of every value that the Go half puts into a field for secrets.
const SECRET: &str = "SECRET-";

#[test]
fn every_message_is_exchanged_with_the_published_bindings() {
    let seen = exchange_all("go.mod", &[]);
    let unused = MESSAGES.iter().filter(|(name, _)| !seen.contains(*name)).collect::<Vec<_>>();
    assert!(unused.is_empty(), "the published bindings do not have {unused:?}");
}

/// CSI 1.13 removed a message and kept everything else of 1.12.
#[test]
fn every_message_of_csi_1_12_is_understood() {
    let seen = exchange_all("go-1.12.mod", &["-1.12"]);
    assert!(seen.contains("csi.v1.NodeStageVolumeRequest"), "{seen:?}");
    assert!(!seen.contains("csi.v1.NodeGetVolumeHealthRequest"), "this is not 1.12: {seen:?}");
}

#[test]
fn a_message_with_the_wrong_bytes_is_refused() {
    // Field 1, the volume's id, as a number.
    let error = exchange::<cleat_csi_api::csi::v1::DeleteVolumeRequest>(&[8, 1]);
    assert!(error.is_err(), "{error:?}");
}

/// Runs the Go half, built with the versions of `modules`, and returns the names of the messages that it has
/// sent. Fails unless every one comes back equal.
fn exchange_all(modules: &str, arguments: &[&str]) -> BTreeSet<String> {
    let built = test_kit::go::build("tests/csi-wire", &[&format!("-modfile={modules}")]);
    let mut peer = Command::new(built.join("csi-wire"))
        .args(["-descriptors", concat!(env!("OUT_DIR"), "/descriptors.bin")])
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the Go half starts");
    let mut requests = peer.stdout.take().expect("it is piped");
    let mut answers = peer.stdin.take().expect("it is piped");
    let mut seen = BTreeSet::new();
    let mut errors = Vec::new();
    // At the end of the stream the Go half has failed, and its exit status and output say why.
    while let Some(name) = part(&mut requests).filter(|name| !name.is_empty()) {
        let name = String::from_utf8(name).expect("names are UTF-8");
        let bytes = part(&mut requests).expect("the bytes follow the name");
        let found = MESSAGES.iter().find(|(known, _)| *known == name);
        let answer = found.ok_or("missing in MESSAGES".to_owned()).and_then(|(_, run)| run(&bytes));
        let answer = answer.unwrap_or_else(|error| {
            errors.push(format!("{name}: {error}"));
            Vec::new()
        });
        let length = u32::try_from(answer.len()).expect("a message is small");
        answers.write_all(&length.to_be_bytes()).expect("the Go half reads");
        answers.write_all(&answer).expect("the Go half reads");
        seen.insert(name);
    }
    drop(answers);
    let output = peer.wait_with_output().expect("the Go half ends");
    let differences = String::from_utf8_lossy(&output.stderr);
    assert!(errors.is_empty() && output.status.success(), "{errors:#?}\n{differences}");
    seen
}

fn exchange<M: Message + Default + Debug + PartialEq>(bytes: &[u8]) -> Result<Vec<u8>, String> {
    let message = M::decode(bytes).map_err(|error| error.to_string())?;
    let shown = format!("{message:?}");
    if shown.contains(SECRET) {
        return Err(format!("a secret would be logged: {shown}"));
    }
    Ok(message.encode_to_vec())
}

/// Reads a part of a frame: 4 bytes with its length, big endian, and its bytes. `None` at the end.
fn part(from: &mut impl Read) -> Option<Vec<u8>> {
    let mut length = [0; 4];
    from.read_exact(&mut length).ok()?;
    let length = u32::from_be_bytes(length);
    assert!(length < 1 << 20, "a part of {length} bytes");
    let mut bytes = vec![0; usize::try_from(length).expect("32 bits fit")];
    from.read_exact(&mut bytes).ok()?;
    Some(bytes)
}
