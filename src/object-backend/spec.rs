//! The URI of a volume: its home, and its name there.

use cleat_backend::uri::{Encoded, Options, decode, invalid, shown};
use cleat_core::error::Result;

use crate::home::Home;
use crate::naming::{MAX_NAME, check_name, is_volume_name};

/// A volume.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct VolumeAt {
    /// The place that holds it.
    pub(crate) home: Home,
    /// Its name there.
    pub(crate) name: String,
    /// A snapshot of it. It is read-only.
    pub(crate) snapshot: Option<String>,
}

impl VolumeAt {
    /// Checks the name.
    ///
    /// # Errors
    /// Returns `InvalidArgument` for a name that a volume cannot have.
    pub(crate) fn new(home: Home, name: &str) -> Result<Self> {
        if !is_volume_name(name) {
            return Err(invalid(format!("{:?} cannot be the name of a volume", shown(name)))
                .with_repair(format!(
                    "names have 1 to {MAX_NAME} bytes, begin with a letter or digit, and have no /, \
                     no @ and no control characters"
                )));
        }
        Ok(Self { home, name: name.to_owned(), snapshot: None })
    }

    /// Parses the part of a URI behind the scheme's colon.
    ///
    /// # Errors
    /// Returns `InvalidArgument` with the valid choices.
    pub(crate) fn parse(scheme: &str, location: &str, options: Options) -> Result<Self> {
        let last = location.rfind('/').map_or(0, |at| at + 1);
        let (volume, snapshot) = match location[last..].split_once('@') {
            Some((name, snapshot)) => (&location[..last + name.len()], Some(snapshot)),
            None => (location, None),
        };
        let (home, name) = Home::parse_volume(scheme, volume, options)?;
        let volume = Self::new(home, &name)?;
        let Some(snapshot) = snapshot else { return Ok(volume) };
        let snapshot = String::from_utf8(decode(snapshot)?)
            .map_err(|_| invalid("the name of the snapshot is not UTF-8"))?;
        check_name(&snapshot)?;
        Ok(volume.at(&snapshot))
    }

    /// A snapshot of the volume.
    pub(crate) fn at(&self, snapshot: &str) -> Self {
        Self { snapshot: Some(snapshot.to_owned()), ..self.clone() }
    }

    /// The location in a URI, without the scheme.
    pub(crate) fn location(&self) -> String {
        let volume = self.home.location(Some(&self.name));
        match &self.snapshot {
            Some(snapshot) => format!("{volume}@{}", Encoded(snapshot.as_bytes())),
            None => volume,
        }
    }

    /// The name of the volume with its place, for messages.
    pub(crate) fn shown(&self) -> String {
        let volume = self.home.shown(&self.name);
        match &self.snapshot {
            Some(snapshot) => format!("{volume}@{snapshot}"),
            None => volume,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use cleat_backend::uri::VolumeUri;

    use super::*;

    const ACCESS: &str = "endpoint=http://h:7480&credentials_file=/k";

    fn parse(text: &str) -> Result<String> {
        let (location, options) = text.split_once('?').unwrap_or((text, ""));
        let (scheme, location) = location.split_once(':').expect("the scheme");
        let volume = VolumeAt::parse(scheme, location, Options::parse(options)?)?;
        Ok(VolumeUri::new(Arc::new(volume)).to_string())
    }

    #[test]
    fn a_uri_has_one_spelling() {
        for (text, canonical) in [
            ("s3://b/v", "s3://b/v"),
            ("s3://b/v/", "s3://b/v"),
            ("s3://b/p/q/v%20w", "s3://b/p/q/v%20w"),
            ("s3://b/p@q/v@s%201", "s3://b/p@q/v@s%201"),
        ] {
            let uri = parse(&format!("{text}?{ACCESS}")).unwrap();
            let options = "?endpoint=http://h:7480&credentials_file=/k";
            assert_eq!(uri, format!("{canonical}{options}"));
            assert_eq!(parse(&uri).unwrap(), uri);
        }
        for uri in [
            "s3://b/v",
            "gs://b/v",
            "az://c/v?account=name",
            "s3://b/v?credentials_file=/k",
            "s3://b/v?endpoint=https://h:443&region=eu&credentials_file=/k&ca_file=/c",
            "s3://b/v?credentials_file=/k&hedge=50ms",
            "gs://b/v?credentials_file=/k&key_file=/key",
            "dir:/a/v?key_file=/key",
            "dir:/a/v?key_file=/key&collect_rate=50M&max_space=200",
            "s3://b/v?credentials_file=/k&hedge=50ms&collect_rate=1G",
            "az://c/p/v?endpoint=http://127.0.0.1:10000/name&account=name&credentials_file=/k",
        ] {
            assert_eq!(parse(uri).unwrap(), uri);
        }
        let uri = parse("s3://b/v?region=eu&credentials_file=/k&endpoint=http://[::1]/").unwrap();
        assert_eq!(uri, "s3://b/v?endpoint=http://%5b::1%5d:80&region=eu&credentials_file=/k");
        assert_eq!(parse(&uri).unwrap(), uri);
    }

    #[test]
    fn a_wrong_uri_is_refused_with_a_repair() {
        for (text, part) in [
            ("s3:b/v", "needs a bucket"),
            ("s3://", "needs a bucket"),
            ("s3://b", "name of a volume"),
            ("s3://b//v", "part of a prefix"),
            ("s3://b/.v", "name of a volume"),
            ("s3://b/p/../v", "part of a prefix"),
            ("s3://b!/v", "name of a bucket"),
            ("s3://-b/v", "name of a bucket"),
            ("s3://b/%ff", "not UTF-8"),
            ("s3://b/a%2fb", "name of a volume"),
            ("s3://b/a%40b", "name of a volume"),
            ("s3://b/a@", "name of a snapshot"),
            ("s3://b/a@b@c", "name of a snapshot"),
        ] {
            let error = parse(&format!("{text}?{ACCESS}")).expect_err(text);
            assert!(error.message().contains(part), "{text}: {error}");
        }
        let error = parse("az://c/v?credentials_file=/k").unwrap_err();
        assert!(error.message().contains("the option account"), "{error}");
        for (options, part) in [
            ("endpoint=h:80&credentials_file=/k", "no scheme"),
            ("endpoint=ftp://h&credentials_file=/k", "not an endpoint"),
            ("endpoint=http://h:0&credentials_file=/k", "not an endpoint"),
            ("endpoint=http://h:70000&credentials_file=/k", "not an endpoint"),
            ("endpoint=http://h//path&credentials_file=/k", "not an endpoint"),
            ("endpoint=http://h/pa%20th&credentials_file=/k", "not an endpoint"),
            ("endpoint=http://h/?a&credentials_file=/k", "not an endpoint"),
            ("endpoint=http://[::x]&credentials_file=/k", "not an endpoint"),
            ("endpoint=http://u@h&credentials_file=/k", "not an endpoint"),
            ("endpoint=https://h&credentials_file=/k&ca_file=k", "absolute path"),
            ("credentials_file=/k&account=a", "no option"),
            ("credentials_file=/k&hedge=6s", "1ms to 5s"),
            ("endpoint=http://h&credentials_file=k", "absolute path"),
            ("credentials_file=/k&collect_rate=1000", "at least 1M a second"),
            ("credentials_file=/k&max_space=100", "140 to 1000 percent"),
            ("credentials_file=/k&key_file=k", "key_file needs an absolute path"),
            ("endpoint=http://h&credentials_file=/k&region=a b", "region"),
            ("endpoint=http://h&credentials_file=/k&secret=x", "no option"),
        ] {
            let error = parse(&format!("s3://b/v?{options}")).expect_err(options);
            assert!(error.message().contains(part), "{options}: {error}");
        }
    }
}
