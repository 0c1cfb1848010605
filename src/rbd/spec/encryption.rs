//! The options `encryption` and `passphrase_file` of an RBD image.

use std::path::PathBuf;

use cleat_backend::CredentialFile;
use cleat_backend::uri::{Options, invalid, secret_path};
use cleat_core::error::Result;

/// LUKS encryption in the format of `rbd encryption format`.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Encryption {
    /// The encryption of the image, then that of its parent, and so on. The last one also applies to the
    /// rest of the chain of clones. Never empty.
    pub(crate) layers: Vec<Layer>,
}

/// The encryption of one image.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Layer {
    /// The version of LUKS.
    pub(crate) format: Luks,
    /// The absolute path of the file whose content is the passphrase.
    pub(crate) passphrase_file: PathBuf,
}

/// The version of LUKS.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Luks {
    One,
    Two,
    /// The version that the image's header has.
    Any,
}

/// The maximum length of a passphrase, in bytes. `cryptsetup` has the same limit for interactive input.
const MAX_PASSPHRASE: usize = 8192;

/// The maximum number of layers: the longest chain of clones in Ceph's own tests.
const MAX_LAYERS: usize = 16;

impl Encryption {
    /// Removes both options from `options` and parses them. Returns `None` if neither is given.
    ///
    /// # Errors
    /// Returns `InvalidArgument` if one of them is missing or invalid.
    pub(crate) fn take(options: &mut Options) -> Result<Option<Self>> {
        let (formats, files) = (options.take("encryption"), options.take("passphrase_file"));
        let (formats, files) = match (formats, files) {
            (None, None) => return Ok(None),
            (Some(formats), Some(files)) => (formats, files),
            _ => {
                return Err(invalid("encryption and passphrase_file must be given together")
                    .with_repair("write encryption=luks2&passphrase_file=/etc/ceph/…"));
            }
        };
        let formats: Vec<&str> = formats.split(',').collect();
        // With a single format, the name of the file may contain a comma.
        let files: Vec<&str> =
            if formats.len() == 1 { vec![&files] } else { files.split(',').collect() };
        if formats.len() != files.len() || formats.len() > MAX_LAYERS {
            let (formats, files) = (formats.len(), files.len());
            let message = format!("{formats} encryptions and {files} passphrase files are given");
            return Err(invalid(message).with_repair(format!(
                "give the same number of both, at most {MAX_LAYERS}: the image's first, then its \
                 parent's"
            )));
        }
        let layer = |(format, file): (&&str, &&str)| {
            Ok(Layer {
                format: Luks::named(format)?,
                passphrase_file: secret_path(file, "passphrase_file")?,
            })
        };
        let layers = formats.iter().zip(&files).map(layer).collect::<Result<_>>()?;
        Ok(Some(Self { layers }))
    }

    /// Returns the values of both options.
    pub(crate) fn option_values(&self) -> (String, String) {
        let formats: Vec<&str> = self.layers.iter().map(|layer| layer.format.name()).collect();
        let path = |layer: &Layer| layer.passphrase_file.to_string_lossy().into_owned();
        let files: Vec<_> = self.layers.iter().map(path).collect();
        (formats.join(","), files.join(","))
    }

    /// Returns the passphrase files.
    pub(crate) fn files(&self) -> impl Iterator<Item = CredentialFile> {
        self.layers.iter().map(|layer| CredentialFile {
            path: layer.passphrase_file.clone(),
            what: "passphrase",
            option: "passphrase_file",
            max_bytes: MAX_PASSPHRASE,
            is_followed: false,
            source: None,
        })
    }
}

impl Luks {
    fn named(name: &str) -> Result<Self> {
        match name {
            "luks1" => Ok(Self::One),
            "luks2" => Ok(Self::Two),
            "luks" => Ok(Self::Any),
            other => Err(invalid(format!("the encryption {other:?} is unknown"))
                .with_repair("write encryption=luks2, luks1, or luks for either version")),
        }
    }

    /// Returns the value in the option.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::One => "luks1",
            Self::Two => "luks2",
            Self::Any => "luks",
        }
    }
}
