//! Messages between supervisor and worker, of this build or another one.

use serde::Serialize;
use serde::de::DeserializeOwned;

use cleat_worker::protocol::{FromWorker, MAX_PACKET, ToWorker};

/// Checks, for both directions, that a message that parses is printed as one that parses to the same
/// message. A worker that was taken over must not crash the supervisor with a message.
pub(crate) fn check(data: &[u8]) {
    let packet = &data[..data.len().min(MAX_PACKET)];
    round_trip::<ToWorker>(packet);
    round_trip::<FromWorker>(packet);
}

fn round_trip<T: DeserializeOwned + Serialize + PartialEq + std::fmt::Debug>(packet: &[u8]) {
    let Ok(message) = serde_json::from_slice::<T>(packet) else { return };
    let printed = serde_json::to_vec(&message).expect("a message can be printed");
    let again: T = serde_json::from_slice(&printed).unwrap_or_else(|error| {
        panic!("{error}: {}", String::from_utf8_lossy(&printed));
    });
    assert_eq!(again, message);
}
