//! `Debug` for the messages that carry secrets: it prints the keys of the secrets and none of their values.

use std::collections::BTreeMap;
use std::fmt;

/// Prints the keys of a map of secrets.
pub(crate) struct Keys<'a>(pub(crate) &'a BTreeMap<String, String>);

impl fmt::Debug for Keys<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.0.keys()).finish()
    }
}

include!(concat!(env!("OUT_DIR"), "/debug.rs"));

#[cfg(test)]
mod tests {
    use crate::csi::v1::NodeStageVolumeRequest;

    #[test]
    fn debug_prints_the_keys_of_secrets_without_their_values() {
        let request = NodeStageVolumeRequest {
            volume_id: "a-volume".to_owned(),
            secrets: [("userKey".to_owned(), "AQB-secret".to_owned())].into(),
            ..NodeStageVolumeRequest::default()
        };
        let shown = format!("{request:?}");
        assert!(shown.contains("a-volume"), "{shown}");
        assert!(shown.contains(r#"secrets: {"userKey"}"#), "{shown}");
        assert!(!shown.contains("AQB-secret"), "{shown}");
    }
}
