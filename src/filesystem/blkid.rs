//! Asks blkid(8) which signatures a device has.

use std::path::Path;

use cleat_core::error::{ErrorKind, Result};
use tokio::time::Instant;

use crate::call::{Call, Ended};
use crate::tools::BLKID;

/// A file system that blkid has found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Found {
    /// The type, as mount(8) names it.
    pub kind: String,
    /// The UUID. Some file systems have a shorter serial number instead, or none.
    pub uuid: Option<String>,
    /// The label, if the file system has one.
    pub label: Option<String>,
}

/// The result of a probe.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Signature {
    /// No signature was found.
    None,
    /// The signature of one file system.
    Filesystem(Found),
    /// The signature of something that is not a file system, as blkid names it.
    Other(String),
    /// Something that blkid cannot name; the text describes it.
    Unclear(String),
}

/// The exit code of blkid if it found nothing, or could not open the device (blkid(8), EXIT STATUS).
const NOTHING: i32 = 2;
/// The exit code of blkid if it found several signatures that contradict each other.
const AMBIVALENT: i32 = 8;

/// Probes the device itself, without the cache of blkid, for file systems, RAID members, encrypted volumes,
/// other formats and partition tables.
///
/// # Errors
/// Returns the errors of [`Call::run`], and `Internal` if blkid fails. A device that cannot be opened or
/// read is mostly reported as one without a signature, so the caller must read it, too.
pub(crate) async fn probe(device: &Path, deadline: Instant) -> Result<Signature> {
    let call = Call::new(BLKID, device).args(["-p", "-o", "export"]).arg(device);
    signature(&call.run(deadline).await?)
}

fn signature(ended: &Ended) -> Result<Signature> {
    match ended.code() {
        Some(0) => Ok(parse(&ended.stdout)),
        Some(NOTHING) if ended.stderr.trim().is_empty() => Ok(Signature::None),
        Some(AMBIVALENT) => Ok(Signature::Unclear("several signatures".to_owned())),
        _ => Err(ended.failure(ErrorKind::Internal)),
    }
}

/// Parses the format `export`: lines `NAME=value`, with backslashes before special characters.
fn parse(text: &str) -> Signature {
    let value = |name: &str| {
        let mut values = text.lines().filter_map(|line| line.strip_prefix(name)?.strip_prefix('='));
        values.next().map(unescape).filter(|value| !value.is_empty())
    };
    if let Some(kind) = value("TYPE") {
        let is_filesystem = value("USAGE").as_deref() == Some("filesystem");
        // blkid counts ZFS as a file system, but a member of a pool cannot be mounted.
        if is_filesystem && !kind.ends_with("_member") {
            return Signature::Filesystem(Found {
                kind,
                uuid: value("UUID"),
                label: value("LABEL"),
            });
        }
        return Signature::Other(kind);
    }
    if let Some(table) = value("PTTYPE") {
        return Signature::Other(format!("partition table {table}"));
    }
    // For a partition, blkid describes its entry in the table, which says nothing of the content.
    let is_entry = |line: &str| line.starts_with("PART_ENTRY_") || line.starts_with("DEVNAME=");
    let mut others = text.lines().filter(|line| !line.trim().is_empty() && !is_entry(line));
    match others.next() {
        Some(line) => Signature::Unclear(format!("a signature without a type ({line})")),
        None => Signature::None,
    }
}

fn unescape(value: &str) -> String {
    let mut characters = value.chars();
    let mut plain = String::with_capacity(value.len());
    while let Some(character) = characters.next() {
        let character = if character == '\\' { characters.next() } else { Some(character) };
        plain.extend(character);
    }
    plain
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_file_system_is_parsed() {
        let text = "DEVNAME=/dev/nbd0\nLABEL=my\\ \\$lab\\\\el\nUUID=11-22\nVERSION=1.0\n\
                    BLOCK_SIZE=1024\nTYPE=ext4\nUSAGE=filesystem\n";
        let found = Found {
            kind: "ext4".to_owned(),
            uuid: Some("11-22".to_owned()),
            label: Some("my $lab\\el".to_owned()),
        };
        assert_eq!(parse(text), Signature::Filesystem(found));
    }

    #[test]
    fn other_content_is_named() {
        let other = |text: &str| match parse(text) {
            Signature::Other(name) => name,
            other => panic!("{other:?}"),
        };
        assert_eq!(other("UUID=1\nTYPE=crypto_LUKS\nUSAGE=crypto\n"), "crypto_LUKS");
        assert_eq!(other("TYPE=swap\nUSAGE=other\n"), "swap");
        assert_eq!(other("TYPE=zfs_member\nUSAGE=filesystem\n"), "zfs_member");
        assert_eq!(other("DEVNAME=/dev/nbd0\nPTUUID=1\nPTTYPE=gpt\n"), "partition table gpt");
        // A type without a known usage is not taken for a file system.
        assert_eq!(other("TYPE=ext4\n"), "ext4");
    }

    #[test]
    fn the_entry_of_a_partition_is_no_content() {
        let entry = "DEVNAME=/dev/nbd0p1\nPART_ENTRY_SCHEME=gpt\nPART_ENTRY_NUMBER=1\n";
        assert_eq!(parse(entry), Signature::None);
        let nameless = parse("DEVNAME=/dev/nbd0\nUSAGE=raid\n");
        assert!(matches!(nameless, Signature::Unclear(_)), "{nameless:?}");
    }

    #[test]
    fn exit_codes_are_interpreted() {
        let of = |code, output: &str, errors: &str| signature(&Ended::of(code, output, errors));
        assert_eq!(of(0, "TYPE=swap\n", "").unwrap(), Signature::Other("swap".to_owned()));
        assert_eq!(of(2, "", "").unwrap(), Signature::None);
        // Several signatures are never nothing, whatever is printed.
        assert!(matches!(of(8, "", "ambivalent result").unwrap(), Signature::Unclear(_)));
        for (code, errors) in
            [(2, "error: /dev/nbd0: Input/output error"), (1, ""), (4, ""), (139, "")]
        {
            assert_eq!(of(code, "", errors).unwrap_err().kind(), ErrorKind::Internal, "{code}");
        }
    }

    proptest! {
        #[test]
        fn no_output_makes_the_parser_panic(text in "[\\PC\\n=\\\\]{0,200}") {
            parse(&text);
        }

        #[test]
        fn a_type_is_never_taken_for_nothing(
            before in "([A-Z]{1,8}=[a-z\\\\ ]{0,8}\n){0,5}",
            kind in "[a-z]{1,9}",
        ) {
            let found = parse(&format!("{before}TYPE={kind}\n"));
            prop_assert_ne!(found, Signature::None);
        }
    }
}
