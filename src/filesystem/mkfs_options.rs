//! Options of mkfs programs that a caller may add.
//!
//! The options come from a storage class. None of them can force a format, name another device or file, or
//! change what the program does other than the layout of the file system.

use cleat_core::error::{Error, ErrorKind, Result};

use crate::kind::Kind;

/// The options that a program accepts here.
struct Known {
    /// Options with a value. A name of one letter has one dash, a longer one two.
    with_value: &'static [&'static str],
    without_value: &'static [&'static str],
}

const EXT4: Known = Known {
    with_value: &["b", "C", "E", "g", "G", "i", "I", "J", "L", "m", "N", "O", "T"],
    without_value: &["q"],
};

const XFS: Known = Known {
    with_value: &["b", "d", "i", "l", "L", "m", "n", "r", "s"],
    without_value: &["K", "q"],
};

const BTRFS: Known = Known {
    with_value: &[
        "d",
        "L",
        "m",
        "n",
        "O",
        "R",
        "s",
        "csum",
        "checksum",
        "data",
        "features",
        "label",
        "metadata",
        "nodesize",
        "runtime-features",
        "sectorsize",
    ],
    without_value: &["K", "M", "q", "mixed", "nodiscard", "quiet"],
};

/// Parts of values that name another device or file, or make something other than a file system.
const REFUSED: [&str; 7] = ["device", "file", "journal_dev", "logdev", "name", "offset", "rtdev"];

/// Extended options of mkfs.ext4. `nodiscard`: a new volume has nothing to discard, and a discard of a
/// large one takes minutes. `lazy_itable_init`: the kernel initializes inode tables after the mount.
/// `lazy_journal_init`: the journal, up to 1 GiB, is not overwritten with zeroes; the device contains
/// zeroes, and the checksums of journal blocks depend on the UUID of the file system.
const EXT4_EXTENDED: &str = "nodiscard,lazy_itable_init=1,lazy_journal_init=1";

/// Returns the arguments of the program that makes a `kind`, without the device.
///
/// # Errors
/// Returns `InvalidArgument` for an option that is not permitted, and for a malformed UUID.
pub(crate) fn arguments(kind: Kind, uuid: Option<&str>, extra: &[String]) -> Result<Vec<String>> {
    let options = parse(kind, extra)?;
    let uuid = uuid.map(check_uuid).transpose()?;
    let mut arguments: Vec<String> = Vec::new();
    let mut add = |some: &[&str]| arguments.extend(some.iter().map(ToString::to_string));
    match kind {
        Kind::Ext4 => {
            // No blocks are reserved for root: the volume belongs to an application.
            add(&["-q", "-m", "0"]);
            let theirs = options.iter().filter(|(name, _)| name == "E");
            let extended: Vec<&str> = theirs.filter_map(|(_, value)| value.as_deref()).collect();
            // The program uses only the last -E, and of it the last of contradicting values.
            add(&["-E", &[&[EXT4_EXTENDED], &extended[..]].concat().join(",")]);
            uuid.iter().for_each(|uuid| add(&["-U", uuid]));
        }
        Kind::Xfs => {
            add(&["-q", "-K"]);
            uuid.iter().for_each(|uuid| add(&["-m", &format!("uuid={uuid}")]));
        }
        Kind::Btrfs => {
            add(&["-q", "-K"]);
            uuid.iter().for_each(|uuid| add(&["-U", uuid]));
        }
    }
    let merged = |name: &str| kind == Kind::Ext4 && name == "E";
    for (name, value) in options.iter().filter(|(name, _)| !merged(name)) {
        let dashes = if name.len() == 1 { "-" } else { "--" };
        arguments.push(format!("{dashes}{name}"));
        arguments.extend(value.clone());
    }
    Ok(arguments)
}

/// Parses options such as `-m0`, `-m 0`, `--csum=xxhash` and `--csum xxhash` into names and values.
fn parse(kind: Kind, extra: &[String]) -> Result<Vec<(String, Option<String>)>> {
    let known = match kind {
        Kind::Ext4 => &EXT4,
        Kind::Xfs => &XFS,
        Kind::Btrfs => &BTRFS,
    };
    let mut options = Vec::new();
    let mut words = extra.iter();
    while let Some(word) = words.next() {
        let refused = || refused(kind, word, known);
        let (name, attached) = split(word).ok_or_else(refused)?;
        if known.without_value.contains(&name) && attached.is_none() {
            options.push((name.to_owned(), None));
            continue;
        }
        if !known.with_value.contains(&name) {
            return Err(refused());
        }
        let value = attached.or_else(|| words.next().map(String::as_str)).ok_or_else(refused)?;
        if !is_plain(value) {
            let message =
                format!("the value {value:?} of the mkfs option {word:?} is not permitted");
            return Err(Error::new(ErrorKind::InvalidArgument, message).with_repair(
                "use letters, digits and =,.:_^+- and no option that names a device or a file",
            ));
        }
        options.push((name.to_owned(), Some(value.to_owned())));
    }
    Ok(options)
}

/// Splits an option into its name and the value that is attached to it.
fn split(word: &str) -> Option<(&str, Option<&str>)> {
    if let Some(long) = word.strip_prefix("--") {
        return Some(match long.split_once('=') {
            Some((name, value)) => (name, Some(value)),
            None => (long, None),
        })
        .filter(|(name, _)| name.len() > 1);
    }
    let (name, value) = word.strip_prefix('-')?.split_at_checked(1)?;
    Some((name, Some(value).filter(|value| !value.is_empty())))
}

/// Whether a value consists of permitted characters and names no device or file.
fn is_plain(value: &str) -> bool {
    let is_permitted = |byte: u8| byte.is_ascii_alphanumeric() || b"=,.:_^+-".contains(&byte);
    let keys = || value.split(',').map(|part| part.split('=').next().unwrap_or(part));
    !value.is_empty()
        && !value.starts_with('-')
        && value.bytes().all(is_permitted)
        && !keys().any(|key| REFUSED.contains(&key))
}

fn refused(kind: Kind, word: &str, known: &Known) -> Error {
    let message = format!("the option {word:?} of mkfs.{kind} is not permitted or has no value");
    let names = known.with_value.iter().chain(known.without_value);
    let names: Vec<_> = names
        .map(|name| if name.len() == 1 { format!("-{name}") } else { format!("--{name}") })
        .collect();
    Error::new(ErrorKind::InvalidArgument, message)
        .with_repair(format!("use these options: {}", names.join(" ")))
}

/// Checks that `uuid` has the form 8-4-4-4-12 in hexadecimal digits.
fn check_uuid(uuid: &str) -> Result<&str> {
    let parts: Vec<&str> = uuid.split('-').collect();
    let has_lengths = parts.iter().map(|part| part.len()).eq([8, 4, 4, 4, 12]);
    if has_lengths && parts.concat().bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return Ok(uuid);
    }
    let message = format!("{uuid:?} is not a UUID, such as 01234567-89ab-cdef-0123-456789abcdef");
    Err(Error::new(ErrorKind::InvalidArgument, message))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const UUID: &str = "01234567-89ab-cdef-0123-456789abcdef";

    fn made(kind: Kind, extra: &[&str]) -> Result<String> {
        let extra: Vec<String> = extra.iter().map(ToString::to_string).collect();
        arguments(kind, Some(UUID), &extra).map(|arguments| arguments.join(" "))
    }

    #[test]
    fn defaults_come_first_and_extended_options_are_merged() {
        assert_eq!(
            made(Kind::Ext4, &["-m5", "-Ediscard", "-i", "1024", "-E", "stride=4,stripe_width=8"])
                .unwrap(),
            format!(
                "-q -m 0 -E {EXT4_EXTENDED},discard,stride=4,stripe_width=8 -U {UUID} -m 5 -i 1024"
            )
        );
        assert_eq!(
            made(Kind::Xfs, &["-m", "reflink=0", "-K"]).unwrap(),
            format!("-q -K -m uuid={UUID} -m reflink=0 -K")
        );
        assert_eq!(
            made(Kind::Btrfs, &["--csum=xxhash", "--nodesize", "16k"]).unwrap(),
            format!("-q -K -U {UUID} --csum xxhash --nodesize 16k")
        );
        assert_eq!(arguments(Kind::Xfs, None, &[]).unwrap(), ["-q", "-K"]);
    }

    #[test]
    fn nothing_forces_a_format_or_names_a_file() {
        let refused = [
            (Kind::Ext4, &["-F"][..]),
            (Kind::Ext4, &["-FF"]),
            (Kind::Ext4, &["-qF"]),
            (Kind::Ext4, &["-S"]),
            (Kind::Ext4, &["-n"]),
            (Kind::Ext4, &["-d", "etc"]),
            (Kind::Ext4, &["-J", "device=/dev/sda"]),
            (Kind::Ext4, &["-J", "size=64,device=sda"]),
            (Kind::Ext4, &["-O", "journal_dev"]),
            (Kind::Ext4, &["-E", "offset=4096"]),
            (Kind::Ext4, &["-m"]),
            (Kind::Ext4, &["/dev/sda"]),
            (Kind::Ext4, &["-L", "-F"]),
            (Kind::Ext4, &["--"]),
            (Kind::Ext4, &["-"]),
            (Kind::Ext4, &[""]),
            (Kind::Ext4, &["-ä"]),
            (Kind::Xfs, &["-f"]),
            (Kind::Xfs, &["-Kf"]),
            (Kind::Xfs, &["-d", "file,name=x"]),
            (Kind::Xfs, &["-l", "logdev=/dev/sda"]),
            (Kind::Xfs, &["-p", "proto"]),
            (Kind::Btrfs, &["-f"]),
            (Kind::Btrfs, &["--force"]),
            (Kind::Btrfs, &["--rootdir=etc"]),
            (Kind::Btrfs, &["-n", "16k\n-f"]),
        ];
        for (kind, extra) in refused {
            let error = made(kind, extra).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{kind} {extra:?}");
            assert!(error.repair().is_some());
        }
    }

    #[test]
    fn a_malformed_uuid_is_refused() {
        for bad in ["", "random", "clear", &UUID[1..], &format!("{UUID}0"), &UUID.replace('a', "g")]
        {
            assert!(arguments(Kind::Ext4, Some(bad), &[]).is_err(), "{bad}");
        }
    }

    proptest! {
        /// Whatever is accepted begins with a known option, and no argument can force a format.
        #[test]
        fn accepted_options_never_force(
            extra in proptest::collection::vec("[ -~]{0,6}|-[a-zA-Z][a-z=]{0,3}", 0..4),
        ) {
            for kind in Kind::ALL {
                let Ok(arguments) = arguments(kind, None, &extra) else { continue };
                for argument in arguments {
                    let force = if kind == Kind::Ext4 { "F" } else { "f" };
                    let is_short = argument.starts_with('-') && !argument.starts_with("--");
                    prop_assert!(!(is_short && argument.contains(force)), "{}", argument);
                    prop_assert!(argument != "--force" && !argument.contains('/'));
                }
            }
        }
    }
}
