//! Checks of mount options that a caller passes on.
//!
//! The options come from a storage class or a volume. mount(8) interprets some options itself, before the
//! kernel sees the others: it sets up loop devices, starts helpers, reads files. And some options of file
//! systems name further devices. Neither is permitted. The kernel checks all other options.

use cleat_core::error::{Error, ErrorKind, Result};

/// Options that mount(8) interprets (mount(8), libmount's optmap.c), that change which operation is meant, or
/// that name other devices or files.
const REFUSED: [&str; 40] = [
    // They turn the mount into another operation.
    "bind",
    "rbind",
    "move",
    "remount",
    "shared",
    "rshared",
    "slave",
    "rslave",
    "private",
    "rprivate",
    "unbindable",
    "runbindable",
    // They set up loop devices or start helpers.
    "loop",
    "offset",
    "sizelimit",
    "encryption",
    "keybits",
    "helper",
    "uhelper",
    "pfd",
    // They let users unmount.
    "user",
    "users",
    "owner",
    "group",
    // They name other devices, files or file systems.
    "journal_dev",
    "journal_path",
    "logdev",
    "rtdev",
    "device",
    "usrquota_file",
    "usrjquota",
    "grpjquota",
    "lowerdir",
    "upperdir",
    "workdir",
    "source",
    "src",
    "test_dummy_encryption",
    // `MountSpec::read_only` decides about these.
    "ro",
    "rw",
];

/// SELinux contexts, whose values may contain commas within quotes.
const CONTEXTS: [&str; 4] = ["context", "fscontext", "defcontext", "rootcontext"];

/// Checks each option. An option has the form `name` or `name=value`.
///
/// # Errors
/// Returns `InvalidArgument` for an option that contains more than one, has characters that mount(8)
/// interprets, or is not permitted.
pub(crate) fn check_options(options: &[String]) -> Result<()> {
    options.iter().try_for_each(|option| check_option(option))
}

fn check_option(option: &str) -> Result<()> {
    let (name, value) = match option.split_once('=') {
        Some((name, value)) => (name, Some(value)),
        None => (option, None),
    };
    let in_name = |byte: u8| byte.is_ascii_alphanumeric() || b"_-.".contains(&byte);
    let is_quoted = CONTEXTS.contains(&name);
    if name.is_empty()
        || !name.bytes().all(in_name)
        || !value.is_none_or(|value| is_plain(value, is_quoted))
    {
        let message = format!("the mount option {option:?} is not of the form name or name=value");
        return Err(Error::new(ErrorKind::InvalidArgument, message).with_repair(
            "give each option as an entry of its own, without spaces, quotes and commas; the value of \
             context= may have commas within double quotes",
        ));
    }
    let is_of_userspace =
        name.to_ascii_lowercase().starts_with("x-") || name.starts_with("verity.");
    if is_of_userspace || REFUSED.contains(&name) {
        let message = format!("the mount option {option:?} is not permitted");
        return Err(Error::new(ErrorKind::InvalidArgument, message)
            .with_repair(format!("remove {name} from the mount options of the volume")));
    }
    Ok(())
}

/// Whether a value has only characters that mount(8) passes on as they are.
fn is_plain(value: &str, may_be_quoted: bool) -> bool {
    let is_inside = |byte: u8| byte.is_ascii_graphic() && !b"\"'\\,".contains(&byte);
    let quoted = value.strip_prefix('"').and_then(|value| value.strip_suffix('"'));
    match quoted.filter(|_| may_be_quoted) {
        Some(quoted) => quoted.bytes().all(|byte| is_inside(byte) || byte == b','),
        None => value.bytes().all(is_inside),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn usual_options_are_accepted() {
        let options = [
            "noatime",
            "discard",
            "nouuid",
            "errors=remount-ro",
            "data=ordered",
            "commit=30",
            "subvol=/data",
            "compress=zstd:3",
            "context=system_u:object_r:container_file_t:s0",
            "context=\"system_u:object_r:container_file_t:s0:c127,c456\"",
            "_netdev",
        ];
        check_options(&options.map(str::to_owned)).unwrap();
    }

    #[test]
    fn tricks_are_refused() {
        let refused = [
            "",
            "=",
            "=x",
            "noatime,remount",
            "noatime\nremount",
            "noatime remount",
            "errors=a,loop",
            "errors=\"a,loop\"",
            "context=\"a\",loop,x=\"b\"",
            "context=\"a",
            "data='x'",
            "data=\\054loop",
            "remount",
            "bind",
            "loop",
            "loop=/dev/loop3",
            "offset=4096",
            "helper=evil",
            "X-mount.subdir=x",
            "x-systemd.automount",
            "verity.hashdevice=/dev/sda",
            "device=/dev/sda",
            "journal_path=/dev/sda",
            "logdev=/dev/sda",
            "ro",
            "rw",
        ];
        for option in refused {
            let error = check_options(&[option.to_owned()]).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{option:?}");
            assert!(error.repair().is_some() && !error.message().contains('\n'), "{error}");
        }
    }

    proptest! {
        /// An accepted option stays one option when mount(8) splits the list at commas outside of quotes.
        #[test]
        fn an_accepted_option_is_a_single_one(option in "(context=)?[ -~\n]{0,12}") {
            if check_option(&option).is_ok() {
                let mut is_quoted = false;
                let parts = option.split(|c| {
                    is_quoted ^= c == '"';
                    c == ',' && !is_quoted
                });
                prop_assert_eq!(parts.count(), 1);
                prop_assert!(!is_quoted && !option.contains(char::is_whitespace));
            }
        }
    }
}
