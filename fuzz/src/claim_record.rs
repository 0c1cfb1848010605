//! Claims of RBD images, which every client with write access to the image can change.

use serde_json::Value;

use cleat_rbd::reprint_claim;

const IMAGE: &str = "10226b8b4567";

/// The maximum length of a text in a claim, in bytes.
const TEXT_MAX: usize = 256;

/// The maximum number of fenced clients in a claim.
const CUT_MAX: usize = 16;

/// Checks that a claim that is accepted is bounded, that its addresses can be passed to the cluster's
/// monitors, and that it is printed as a claim which is accepted and printed in the same way.
pub(crate) fn check(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let Ok(Some(printed)) = reprint_claim(text, IMAGE) else { return };
    let again = reprint_claim(&printed, IMAGE);
    let again = again.unwrap_or_else(|error| panic!("{}: {printed}", error.report()));
    assert_eq!(again.as_deref(), Some(printed.as_str()), "the printed form is not final");
    let claim: Value = serde_json::from_str(&printed).expect("it was printed as JSON");
    let cut = claim["cut"].as_array().expect("a claim has a list of clients");
    assert!(cut.len() <= CUT_MAX, "{} clients", cut.len());
    for client in std::iter::once(&claim).chain(cut) {
        for field in ["node", "machine", "boot_id", "mapping_id"] {
            let text = client[field].as_str().expect("it is a text");
            assert!(text.len() <= TEXT_MAX && !text.chars().any(char::is_control), "{text:?}");
        }
        let address = client["address"].as_str().expect("a client has an address");
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"[]:./".contains(&byte);
        assert!(address.len() <= TEXT_MAX && address.bytes().all(plain), "{address:?}");
    }
    assert_ne!(claim["generation"], u64::MAX);
}
