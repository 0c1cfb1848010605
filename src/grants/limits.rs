//! The maximum sizes of what the object contains. An object of etcd has at most 1.5 MiB. If a node could fill it, no
//! write of the controller would succeed any more, and the volume could not move. The largest object that the schema
//! permits has less than 1 MiB; a test of the schema checks this.

/// The maximum number of holders of one volume. A larger number is refused.
pub const MAX_HOLDERS: usize = 64;

/// The maximum number of entries of nodes: of as many holders, and of as many nodes as the controller keeps without need.
pub const MAX_ENTRIES: usize = 128;

/// The maximum number of conditions of a node: one for each signal.
pub const MAX_CONDITIONS: usize = 3;

/// The maximum number of fenced nodes that have not cleaned up.
pub const MAX_FENCES: usize = 96;

/// The maximum number of pods that a holder names.
pub const MAX_PODS: usize = 16;

/// The maximum length of the name of a node, in characters as all lengths: that of Kubernetes.
pub const MAX_NODE: usize = 253;

/// The maximum length of the UID of a pod.
pub const MAX_UID: usize = 64;

/// The maximum length of a text for programs.
pub const MAX_REASON: usize = 64;

/// The maximum length of the identity of a client.
pub const MAX_CLIENT: usize = 256;

/// The maximum length of the path of a device.
pub const MAX_DEVICE_PATH: usize = 256;

/// The maximum length of a text for readers.
pub const MAX_MESSAGE: usize = 512;

/// The characters of the names of nodes.
pub const NAME: &str = "^[-.a-z0-9]*$";

/// The characters of UIDs and of texts for programs.
pub const WORD: &str = "^[-_A-Za-z0-9]*$";

/// The characters of all other texts: those of ASCII, without the three for which Go writes six.
pub const TEXT: &str = "^[ -%'-;=?-~]*$";

/// Returns the beginning of a text in the form of the schema: at most `max` characters. Those that are not permitted
/// become question marks.
pub fn text(text: &str, max: usize) -> String {
    let permitted = |c| match c {
        '&' | '<' | '>' => '?',
        ' '..='~' => c,
        _ => '?',
    };
    text.chars().map(permitted).take(max).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_is_cut_at_a_character() {
        assert_eq!(text("node a: \"x\"", 100), "node a: \"x\"");
        assert_eq!(text("äöü", 2), "??");
        assert_eq!(text("a\n<&>\u{7f}é😀~", 100), "a???????~");
        assert_eq!(text(&"é".repeat(MAX_MESSAGE + 1), MAX_MESSAGE).len(), MAX_MESSAGE);
    }
}
