//! The URI of a bucket and of a volume in it: `s3://BUCKET/[PREFIX/]VOLUME?endpoint=…&region=…&credentials_file=…`.

use std::path::PathBuf;

use cleat_backend::uri::{Encoded, Options, absolute_path, decode, invalid, shown};
use cleat_backend::{CredentialFile, Network};
use cleat_core::error::{Error, ErrorKind, Result};

use super::MAX_BYTES;
use crate::connection::Access;
use crate::naming::is_name;
use crate::nonce;

pub(crate) const SCHEME: &str = "s3";

/// The region of stores that have none.
const REGION: &str = "us-east-1";

/// The maximum length of the names of a bucket, a region and a host, in bytes.
const MAX_NAME: usize = 255;

/// The maximum length of the prefix, in bytes. Keys of a store have at most 1024.
const MAX_PREFIX: usize = 600;

/// The options of the URI.
const OPTIONS: [&str; 3] = ["endpoint", "region", "credentials_file"];

/// The address of a store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Endpoint {
    /// A name or an address; an IPv6 address is in brackets.
    pub(crate) host: String,
    pub(crate) port: u16,
}

/// A bucket, or a part of it, and how it is accessed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Bucket {
    pub(crate) bucket: String,
    /// Begins the keys of all volumes; it is empty or ends with `/`.
    pub(crate) prefix: String,
    pub(crate) endpoint: Endpoint,
    pub(crate) region: String,
    credentials_file: PathBuf,
}

impl Bucket {
    /// Parses the part of a store's URI behind the colon.
    ///
    /// # Errors
    /// Returns `InvalidArgument` with the valid choices.
    pub(crate) fn parse(location: &str, options: Options) -> Result<Self> {
        Self::with(&parts(location)?, options)
    }

    /// Parses the part of a volume's URI behind the colon. Returns the name of the volume, too.
    ///
    /// # Errors
    /// Returns `InvalidArgument` with the valid choices.
    pub(crate) fn parse_volume(location: &str, options: Options) -> Result<(Self, String)> {
        let mut parts = parts(location)?;
        let name = parts.pop().filter(|_| !parts.is_empty());
        let name = name.ok_or_else(|| form("s3: needs a bucket and the name of a volume in it"))?;
        Ok((Self::with(&parts, options)?, name))
    }

    fn with(parts: &[String], mut options: Options) -> Result<Self> {
        let (bucket, prefix) = parts.split_first().ok_or_else(|| form("s3: needs a bucket"))?;
        let plain = |c: char| c.is_ascii_alphanumeric() || ".-_".contains(c);
        if bucket.len() > MAX_NAME
            || !bucket.starts_with(char::is_alphanumeric)
            || !bucket.chars().all(plain)
        {
            return Err(invalid(format!("{:?} cannot be the name of a bucket", shown(bucket)))
                .with_repair("buckets have letters, digits, dots, hyphens and underscores"));
        }
        if let Some(part) = prefix.iter().find(|part| !is_name(part)) {
            return Err(invalid(format!("{:?} cannot be a part of a prefix", shown(part))));
        }
        let prefix: String = prefix.iter().map(|part| format!("{part}/")).collect();
        if prefix.len() > MAX_PREFIX {
            return Err(invalid(format!("the prefix is longer than {MAX_PREFIX} bytes")));
        }
        let needed = |options: &mut Options, key: &str, example: &str| {
            options.take(key).ok_or_else(|| {
                invalid(format!("s3: needs the option {key}"))
                    .with_repair(format!("add {key}={example} to the URI"))
            })
        };
        let endpoint = needed(&mut options, "endpoint", "http://HOST:PORT")?;
        let file = needed(&mut options, "credentials_file", "/etc/cleat/s3-credentials")?;
        let region = options.take("region").unwrap_or_else(|| REGION.to_owned());
        options.finish("s3:", &OPTIONS)?;
        if region.is_empty() || region.len() > MAX_NAME || !region.chars().all(plain) {
            return Err(invalid(format!("{:?} cannot be a region", shown(&region))));
        }
        Ok(Self {
            bucket: bucket.clone(),
            prefix,
            endpoint: Endpoint::parse(&endpoint)?,
            region,
            credentials_file: absolute_path(&file, "credentials_file")?,
        })
    }

    /// Returns the location of the bucket, or of a volume in it.
    pub(crate) fn location(&self, name: Option<&str>) -> String {
        let encoded = |text: &str| Encoded(text.as_bytes()).to_string();
        let inside = format!("{}{}", self.prefix, name.unwrap_or_default());
        let inside = inside.trim_end_matches('/');
        let separator = if inside.is_empty() { "" } else { "/" };
        format!("//{}{separator}{}", self.bucket, encoded(inside))
    }

    pub(crate) fn options(&self) -> Vec<(String, String)> {
        let region = (self.region != REGION).then(|| self.region.clone());
        let all = [
            ("endpoint", Some(format!("http://{}:{}", self.endpoint.host, self.endpoint.port))),
            ("region", region),
            ("credentials_file", Some(self.credentials_file.to_string_lossy().into_owned())),
        ];
        let given = all.into_iter().filter_map(|(key, value)| Some((key.to_owned(), value?)));
        given.collect()
    }

    /// Returns a volume's name with its place, for messages.
    pub(crate) fn shown(&self, name: &str) -> String {
        format!("s3://{}/{}{name}", self.bucket, self.prefix)
    }

    pub(crate) fn credential_file(&self) -> CredentialFile {
        CredentialFile {
            path: self.credentials_file.clone(),
            what: "credentials",
            option: "credentials_file",
            max_bytes: MAX_BYTES,
        }
    }

    /// Returns what a process needs that serves a volume: the port of the store, and the files with which the C
    /// library resolves names.
    pub(crate) fn access(&self) -> Access {
        let names = [
            "/etc/hosts",
            "/etc/host.conf",
            "/etc/resolv.conf",
            "/etc/nsswitch.conf",
            "/etc/gai.conf",
            "/etc/services",
        ];
        let existing = |paths: &[&str]| -> Vec<PathBuf> {
            paths.iter().map(PathBuf::from).filter(|path| path.exists()).collect()
        };
        Access {
            paths: existing(&[nonce::DEVICE, "/run/systemd/resolve"]),
            copies: existing(&names),
            writable: Vec::new(),
            // A long answer of a name server comes over TCP.
            network: Network::Ports(vec![self.endpoint.port, 53]),
        }
    }
}

impl Endpoint {
    fn parse(text: &str) -> Result<Self> {
        let example = "write endpoint=http://HOST:PORT";
        let Some((scheme, rest)) = text.split_once("://") else {
            return Err(invalid(format!("the endpoint {:?} has no scheme", shown(text)))
                .with_repair(example));
        };
        if scheme == "https" {
            let message = "the endpoint of an s3: volume cannot be https://: this build has no TLS";
            return Err(Error::new(ErrorKind::Unsupported, message).with_repair(
                "run a proxy on this node that adds TLS (haproxy, stunnel, nginx), and name it: \
                 endpoint=http://127.0.0.1:PORT",
            ));
        }
        let authority = rest.strip_suffix('/').unwrap_or(rest);
        let is_bracketed = authority.ends_with(']');
        let (host, port) = match authority.rsplit_once(':').filter(|_| !is_bracketed) {
            Some((host, port)) => (host, port.parse().ok().filter(|port| *port > 0)),
            None => (authority, Some(80)),
        };
        let plain = |c: char| c.is_ascii_alphanumeric() || ".-_".contains(c);
        let is_name = !host.is_empty() && host.len() <= MAX_NAME && host.chars().all(plain);
        let v6 = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
        let is_v6 = v6.is_some_and(|host| host.parse::<std::net::Ipv6Addr>().is_ok());
        match port {
            Some(port) if scheme == "http" && (is_name || is_v6) => {
                Ok(Self { host: host.to_ascii_lowercase(), port })
            }
            _ => Err(invalid(format!("{:?} is not an endpoint", shown(text))).with_repair(example)),
        }
    }

    /// The value of the field `Host`.
    pub(crate) fn authority(&self) -> String {
        match self.port {
            80 => self.host.clone(),
            port => format!("{}:{port}", self.host),
        }
    }
}

/// Splits `//BUCKET/…` into its parts.
fn parts(location: &str) -> Result<Vec<String>> {
    let inside = location.strip_prefix("//").ok_or_else(|| form("s3: needs a bucket"))?;
    let inside = inside.strip_suffix('/').unwrap_or(inside);
    let part = |part: &str| {
        let text = String::from_utf8(decode(part)?);
        text.map_err(|_| invalid(format!("{:?} is not UTF-8", shown(part))))
    };
    inside.split('/').map(part).collect()
}

fn form(message: &str) -> Error {
    invalid(message)
        .with_repair("write s3://BUCKET/VOLUME?endpoint=http://HOST:PORT&credentials_file=/PATH")
}
