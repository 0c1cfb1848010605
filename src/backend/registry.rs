//! The list of backends. The composition makes it and passes it to all code that parses a URI.

use std::sync::Arc;
use std::time::Duration;

use cleat_core::error::{Error, ErrorKind, Result};

use crate::spec::{Backend, Nested, StoreParser, StoreSpec, VolumeSpec};
use crate::uri::{MAX_URI, Options, StoreUri, VolumeUri, invalid, shown};

/// The backends of a program.
#[derive(Clone, Copy)]
pub struct Registry {
    backends: &'static [&'static dyn Backend],
}

impl Registry {
    /// Makes a registry of `backends`; each has a scheme of its own.
    pub const fn new(backends: &'static [&'static dyn Backend]) -> Self {
        Self { backends }
    }

    /// Returns the backends in the order of registration.
    pub fn backends(&self) -> impl Iterator<Item = &'static dyn Backend> {
        self.backends.iter().copied()
    }

    /// Parses the URI of a volume. Does no I/O.
    ///
    /// # Errors
    /// Returns `InvalidArgument` with the valid choices as the repair, and `Unsupported` for volumes that
    /// this build cannot serve.
    pub fn volume(&self, text: &str) -> Result<VolumeUri> {
        if text.len() > MAX_URI {
            return Err(invalid(format!("the volume URI is longer than {MAX_URI} bytes")));
        }
        let (location, options) = text.split_once('?').unwrap_or((text, ""));
        self.parse(location, Options::parse(options)?).map(VolumeUri::new)
    }

    /// Parses the URI of a store. Does no I/O.
    ///
    /// # Errors
    /// Returns `InvalidArgument` with the valid choices as the repair, and `Unsupported` for stores that this
    /// build cannot reach.
    pub fn store(&self, text: &str) -> Result<StoreUri> {
        if text.len() > MAX_URI {
            return Err(invalid(format!("the URI is longer than {MAX_URI} bytes")));
        }
        let (location, options) = text.split_once('?').unwrap_or((text, ""));
        let options = Options::parse(options)?;
        let found = location
            .split_once(':')
            .and_then(|(scheme, location)| Some((self.backend(scheme)?.stores()?, location)));
        let Some((parser, location)) = found else {
            let forms = self.backends().filter_map(|backend| backend.stores());
            let forms = forms.flat_map(|parser| parser.forms().iter().copied());
            return Err(invalid(format!("{:?} does not name a store of volumes", shown(text)))
                .with_repair(format!("write {}", alternatives(forms))));
        };
        parser.parse_store(location, options).map(StoreUri::new)
    }

    /// Returns the longest [`VolumeSpec::extra_open_time`] of any volume.
    pub fn max_extra_open_time(&self) -> Duration {
        self.backends().map(|backend| backend.max_extra_open_time()).max().unwrap_or_default()
    }

    fn backend(&self, scheme: &str) -> Option<&'static dyn Backend> {
        self.backends().find(|backend| backend.scheme() == scheme)
    }

    fn parse(&self, text: &str, options: Options) -> Result<Arc<dyn VolumeSpec>> {
        let Some((scheme, location)) = text.split_once(':') else {
            let error = invalid(format!("the volume {:?} has no scheme", shown(text)));
            return Err(if text.starts_with('/') {
                let example = shown(text);
                error.with_repair(format!("write file:{example} for a file or a block device"))
            } else {
                error.with_repair(self.examples())
            });
        };
        let Some(backend) = self.backend(scheme) else {
            return Err(invalid(format!("the volume scheme {:?} is unknown", shown(scheme)))
                .with_repair(self.examples()));
        };
        backend.parse(location, options, &|text, options| self.parse(text, options))
    }

    fn examples(&self) -> String {
        let examples = self.backends().flat_map(|backend| backend.examples().iter().copied());
        format!("volumes are written as {}", alternatives(examples))
    }
}

/// Joins texts as `a, b or c`.
fn alternatives<'a>(texts: impl Iterator<Item = &'a str>) -> String {
    let texts: Vec<&str> = texts.collect();
    match &*texts {
        [first @ .., last] if !first.is_empty() => format!("{} or {last}", first.join(", ")),
        other => other.join(""),
    }
}

/// A scheme whose volumes this build cannot serve. The URIs of its volumes and stores are refused with the reason.
#[derive(Debug)]
pub struct Unavailable {
    /// The scheme.
    pub scheme: &'static str,
    /// Why the volumes cannot be served.
    pub message: &'static str,
    /// What the user can do.
    pub repair: &'static str,
}

impl Backend for Unavailable {
    fn scheme(&self) -> &'static str {
        self.scheme
    }

    fn parse(&self, _: &str, _: Options, _: Nested<'_>) -> Result<Arc<dyn VolumeSpec>> {
        Err(self.error())
    }

    fn stores(&self) -> Option<&dyn StoreParser> {
        Some(self)
    }
}

impl StoreParser for Unavailable {
    fn forms(&self) -> &'static [&'static str] {
        &[]
    }

    fn parse_store(&self, _: &str, _: Options) -> Result<Arc<dyn StoreSpec>> {
        Err(self.error())
    }
}

impl Unavailable {
    fn error(&self) -> Error {
        let message = format!("{}: volumes {}", self.scheme, self.message);
        Error::new(ErrorKind::Unsupported, message).with_repair(self.repair)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn volumes_and_stores_of_an_unavailable_scheme_are_refused_with_the_reason() {
        let registry =
            Registry::new(&[&Unavailable { scheme: "tape", message: "are slow", repair: "wait" }]);
        let volume = registry.volume("tape:a?b=c").expect_err("it is unavailable");
        let store = registry.store("tape:a").expect_err("it is unavailable");
        for error in [volume, store] {
            assert_eq!(error.kind(), ErrorKind::Unsupported);
            assert_eq!((error.message(), error.repair()), ("tape: volumes are slow", Some("wait")));
        }
    }
}
