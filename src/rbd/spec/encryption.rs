//! How an RBD image's content is encrypted, as the options `encryption` and `passphrase_file` say it.

use std::path::{Path, PathBuf};

use cleat_backend::uri::{Options, absolute_path, invalid};
use cleat_core::error::Result;

/// LUKS, as `rbd encryption format` makes it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Encryption {
    /// The image's own; then that of the image it was cloned from, and so on. The last one is good for
    /// the rest of the chain, too. Never empty.
    pub(crate) layers: Vec<Layer>,
}

/// The encryption of one image.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Layer {
    /// Which.
    pub(crate) format: Luks,
    /// Absolute; the content of the file is the passphrase.
    pub(crate) passphrase_file: PathBuf,
}

/// The version of LUKS.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Luks {
    One,
    Two,
    /// Whichever the image has.
    Any,
}

/// The longest chain of clones that Ceph's own tests know.
const MAX_LAYERS: usize = 16;

impl Encryption {
    /// Takes both options.
    pub(crate) fn take(options: &mut Options) -> Result<Option<Self>> {
        let (formats, files) = (options.take("encryption"), options.take("passphrase_file"));
        let (formats, files) = match (formats, files) {
            (None, None) => return Ok(None),
            (Some(formats), Some(files)) => (formats, files),
            _ => {
                return Err(invalid("encryption and passphrase_file go together")
                    .with_repair("write encryption=luks2&passphrase_file=/etc/ceph/…"));
            }
        };
        let formats: Vec<&str> = formats.split(',').collect();
        // A single file may have a comma in its name.
        let files: Vec<&str> =
            if formats.len() == 1 { vec![&files] } else { files.split(',').collect() };
        if formats.len() != files.len() || formats.len() > MAX_LAYERS {
            let (formats, files) = (formats.len(), files.len());
            let message = format!("{formats} encryptions and {files} files with passphrases");
            return Err(invalid(message).with_repair(format!(
                "give as many of both, at most {MAX_LAYERS}: the image's first, then its parent's"
            )));
        }
        let layer = |(format, file): (&&str, &&str)| {
            Ok(Layer {
                format: Luks::named(format)?,
                passphrase_file: absolute_path(file, "passphrase_file")?,
            })
        };
        let layers = formats.iter().zip(&files).map(layer).collect::<Result<_>>()?;
        Ok(Some(Self { layers }))
    }

    /// As they are written.
    pub(crate) fn option_values(&self) -> (String, String) {
        let formats: Vec<&str> = self.layers.iter().map(|layer| layer.format.name()).collect();
        let files: Vec<_> = self.files().map(Path::to_string_lossy).collect();
        (formats.join(","), files.join(","))
    }

    /// The files with the passphrases.
    pub(crate) fn files(&self) -> impl Iterator<Item = &Path> {
        self.layers.iter().map(|layer| &*layer.passphrase_file)
    }
}

impl Luks {
    fn named(name: &str) -> Result<Self> {
        match name {
            "luks1" => Ok(Self::One),
            "luks2" => Ok(Self::Two),
            "luks" => Ok(Self::Any),
            other => Err(invalid(format!("the encryption {other:?} is unknown"))
                .with_repair("write encryption=luks2, luks1, or luks for whichever it is")),
        }
    }

    /// As it is written.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::One => "luks1",
            Self::Two => "luks2",
            Self::Any => "luks",
        }
    }
}
