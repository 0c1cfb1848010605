//! The URI of a bucket and of a volume in it: `s3://BUCKET/[PREFIX/]VOLUME?endpoint=…&credentials_file=…`, and the same
//! with `gs:` and `az:`.

use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use cleat_backend::uri::{Encoded, Options, absolute_path, decode, invalid, secret_path, shown};
use cleat_backend::{Address, Network};
use cleat_core::error::{Error, Result};

use super::hedge::{self, HEDGE};
use crate::collector::{COLLECT_RATE, Collector, MAX_SPACE};
use crate::connection::Access;
use crate::naming::{KEY_FILE, is_name};
use crate::nonce;

/// The region of stores that have none.
const REGION: &str = "us-east-1";

/// The maximum length of the names of a bucket, a region and a host, in bytes.
const MAX_NAME: usize = 255;

/// The maximum length of the prefix, in bytes. Keys of a store have at most 1024.
const MAX_PREFIX: usize = 600;

/// The port of HTTPS.
const HTTPS: u16 = 443;

/// The files in which distributions have the certificates of public authorities.
const SYSTEM_ROOTS: [&str; 3] = [
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
];

/// The kind of an object store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Provider {
    /// Amazon S3, or a store with its API.
    Amazon,
    /// Google Cloud Storage.
    Google,
    /// Azure Blob Storage.
    Azure,
}

impl Provider {
    /// Returns the provider of a URI's scheme.
    pub(crate) fn of(scheme: &str) -> Option<Self> {
        let all = [Self::Amazon, Self::Google, Self::Azure];
        all.into_iter().find(|provider| provider.scheme() == scheme)
    }

    pub(crate) const fn scheme(self) -> &'static str {
        match self {
            Self::Amazon => "s3",
            Self::Google => "gs",
            Self::Azure => "az",
        }
    }

    /// Returns the options of its URIs.
    fn options(self) -> &'static [&'static str] {
        match self {
            Self::Amazon => &[
                "endpoint",
                "region",
                "credentials_file",
                "ca_file",
                HEDGE,
                KEY_FILE,
                COLLECT_RATE,
                MAX_SPACE,
            ],
            Self::Google => &[
                "endpoint",
                "credentials_file",
                "ca_file",
                HEDGE,
                KEY_FILE,
                COLLECT_RATE,
                MAX_SPACE,
            ],
            Self::Azure => &[
                "endpoint",
                "account",
                "credentials_file",
                "ca_file",
                HEDGE,
                KEY_FILE,
                COLLECT_RATE,
                MAX_SPACE,
            ],
        }
    }
}

/// The address of a store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Endpoint {
    /// Whether it is used with TLS.
    pub(crate) is_secure: bool,
    /// A name or an address; an IPv6 address is in brackets.
    pub(super) host: String,
    port: u16,
    /// The path before the bucket; empty, or it begins with a slash.
    path: String,
}

/// A bucket, or a part of it, and how it is accessed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Bucket {
    pub(crate) provider: Provider,
    pub(crate) bucket: String,
    /// Begins the keys of all volumes; it is empty or ends with `/`.
    pub(crate) prefix: String,
    /// The address; `None` for that of the provider.
    pub(crate) endpoint: Option<Endpoint>,
    /// Of Amazon.
    pub(crate) region: String,
    /// The storage account, of Azure.
    pub(crate) account: String,
    /// The certificates to trust; `None` for those of the distribution.
    pub(crate) ca_file: Option<PathBuf>,
    /// The file with the keys; `None`: the usual sources have them.
    pub(crate) credentials_file: Option<PathBuf>,
    /// The time after which a read is sent once more.
    pub(crate) hedge: Option<Duration>,
    /// The key file of encrypted volumes.
    pub(crate) key_file: Option<PathBuf>,
    pub(crate) collector: Collector,
}

impl Bucket {
    /// Parses the part of a store's URI behind the colon.
    ///
    /// # Errors
    /// Returns `InvalidArgument` with the valid choices.
    pub(crate) fn parse(provider: Provider, location: &str, options: Options) -> Result<Self> {
        Self::with(provider, &parts(provider, location)?, options)
    }

    /// Parses the part of a volume's URI behind the colon. Returns the name of the volume, too.
    ///
    /// # Errors
    /// Returns `InvalidArgument` with the valid choices.
    pub(crate) fn parse_volume(
        provider: Provider,
        location: &str,
        options: Options,
    ) -> Result<(Self, String)> {
        let mut parts = parts(provider, location)?;
        let name = parts.pop().filter(|_| !parts.is_empty());
        let name = name.ok_or_else(|| form(provider, "a bucket and the name of a volume in it"))?;
        Ok((Self::with(provider, &parts, options)?, name))
    }

    fn with(provider: Provider, parts: &[String], mut options: Options) -> Result<Self> {
        let scheme = provider.scheme();
        let (bucket, prefix) = parts.split_first().ok_or_else(|| form(provider, "a bucket"))?;
        if !is_label(bucket) || !bucket.starts_with(|c: char| c.is_ascii_alphanumeric()) {
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
                invalid(format!("{scheme}: needs the option {key}"))
                    .with_repair(format!("add {key}={example} to the URI"))
            })
        };
        let file = options.take("credentials_file");
        let mut region = String::new();
        if provider == Provider::Amazon {
            region = options.take("region").unwrap_or_else(|| REGION.to_owned());
            if !is_label(&region) {
                return Err(invalid(format!("{:?} cannot be a region", shown(&region))));
            }
        }
        let mut account = String::new();
        if provider == Provider::Azure {
            account = needed(&mut options, "account", "NAME")?;
            if !is_label(&account) {
                return Err(invalid(format!("{:?} cannot be an account", shown(&account))));
            }
        }
        let endpoint = options.take("endpoint");
        let ca_file = options.take("ca_file");
        let key_file = options.take(KEY_FILE);
        let hedge = options.take(HEDGE);
        let collector = Collector::take(&mut options)?;
        options.finish(&format!("{scheme}:"), provider.options())?;
        Ok(Self {
            provider,
            bucket: bucket.clone(),
            prefix,
            endpoint: endpoint.map(|text| Endpoint::parse(&text)).transpose()?,
            region,
            account,
            ca_file: ca_file.map(|file| absolute_path(&file, "ca_file")).transpose()?,
            credentials_file: file
                .map(|file| absolute_path(&file, "credentials_file"))
                .transpose()?,
            hedge: hedge.map(|text| hedge::parse(&text)).transpose()?,
            key_file: key_file.map(|file| secret_path(&file, KEY_FILE)).transpose()?,
            collector,
        })
    }

    /// Returns the address of the store.
    pub(crate) fn address(&self) -> Endpoint {
        let host = match self.provider {
            Provider::Amazon => format!("s3.{}.amazonaws.com", self.region),
            Provider::Google => "storage.googleapis.com".to_owned(),
            Provider::Azure => format!("{}.blob.core.windows.net", self.account),
        };
        let of_provider = || Endpoint { is_secure: true, host, port: HTTPS, path: String::new() };
        self.endpoint.clone().unwrap_or_else(of_provider)
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
        let text = |text: &String| Some(text.clone()).filter(|text| !text.is_empty());
        let path = |path: &PathBuf| path.to_string_lossy().into_owned();
        let all = [
            ("endpoint", self.endpoint.as_ref().map(Endpoint::url)),
            ("region", text(&self.region).filter(|region| region != REGION)),
            ("account", text(&self.account)),
            ("credentials_file", self.credentials_file.as_ref().map(path)),
            ("ca_file", self.ca_file.as_ref().map(path)),
            (HEDGE, self.hedge.map(|delay| format!("{}ms", delay.as_millis()))),
            (KEY_FILE, self.key_file.as_ref().map(path)),
        ];
        let all = all.into_iter().chain(self.collector.options());
        let given = all.filter_map(|(key, value)| Some((key.to_owned(), value?)));
        given.collect()
    }

    /// Returns a text that is the same for all volumes of the bucket that are accessed with the same credentials.
    pub(crate) fn trust(&self) -> String {
        let own =
            Self { hedge: None, key_file: None, collector: Collector::default(), ..self.clone() };
        let options = own.options().into_iter().map(|(key, value)| format!("\0{key}={value}"));
        let scheme = self.provider.scheme();
        format!("{scheme}://{}{}", self.bucket, options.collect::<String>())
    }

    /// Returns a volume's name with its place, for messages.
    pub(crate) fn shown(&self, name: &str) -> String {
        format!("{}://{}/{}{name}", self.provider.scheme(), self.bucket, self.prefix)
    }

    /// Returns the file with the certificates that a client trusts; `None` if the distribution has none.
    pub(crate) fn trusted_file(&self) -> Option<PathBuf> {
        let system = || SYSTEM_ROOTS.iter().map(PathBuf::from).find(|path| path.exists());
        self.ca_file.clone().or_else(system)
    }

    /// Returns what a process needs that serves a volume: connections to the store, and the certificates to trust.
    pub(crate) fn access(&self) -> Access {
        let Endpoint { is_secure, host, port, .. } = self.address();
        let host = host.trim_matches(['[', ']']).to_owned();
        Access {
            paths: vec![nonce::DEVICE.into()],
            copies: self.trusted_file().filter(|_| is_secure).into_iter().collect(),
            writable: Vec::new(),
            network: Network::Connector(Address { host, port }),
        }
    }
}

impl Endpoint {
    pub(super) fn parse(text: &str) -> Result<Self> {
        let wrong = || {
            invalid(format!("{:?} is not an endpoint", shown(text)))
                .with_repair("write endpoint=https://HOST:PORT")
        };
        let (scheme, rest) = text.split_once("://").ok_or_else(|| {
            invalid(format!("the endpoint {:?} has no scheme", shown(text)))
                .with_repair("write endpoint=https://HOST:PORT")
        })?;
        let is_secure = match scheme {
            "https" => true,
            "http" => false,
            _ => return Err(wrong()),
        };
        let (authority, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
        let path = path.strip_suffix('/').unwrap_or(path);
        let is_bracketed = authority.ends_with(']');
        let (host, port) = match authority.rsplit_once(':').filter(|_| !is_bracketed) {
            Some((host, port)) => (host, port.parse().ok().filter(|port| *port > 0)),
            None => (authority, Some(if is_secure { HTTPS } else { 80 })),
        };
        let v6 = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
        let is_v6 = v6.is_some_and(|host| host.parse::<std::net::Ipv6Addr>().is_ok());
        let is_path = path.is_empty() || path[1..].split('/').all(is_label);
        match port {
            Some(port) if is_path && (is_label(host) || is_v6) => {
                Ok(Self { is_secure, host: host.to_ascii_lowercase(), port, path: path.to_owned() })
            }
            _ => Err(wrong()),
        }
    }

    /// Whether connections to the address never leave this node.
    pub(super) fn is_on_this_node(&self) -> bool {
        let address = self.host.trim_matches(['[', ']']).parse::<IpAddr>();
        address.map_or(self.host == "localhost", |address| address.is_loopback())
    }

    /// Returns the address for messages.
    pub(crate) fn shown(&self) -> String {
        format!("{}:{}", self.host, self.port)
    }

    pub(crate) fn url(&self) -> String {
        let scheme = if self.is_secure { "https" } else { "http" };
        format!("{scheme}://{}:{}{}", self.host, self.port, self.path)
    }
}

/// Returns whether a text can be a host, a region or an account.
pub(super) fn is_label(text: &str) -> bool {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || ".-_".contains(c);
    !text.is_empty() && text.len() <= MAX_NAME && text.chars().all(is_plain)
}

/// Splits `//BUCKET/…` into its parts.
fn parts(provider: Provider, location: &str) -> Result<Vec<String>> {
    let inside = location.strip_prefix("//").ok_or_else(|| form(provider, "a bucket"))?;
    let inside = inside.strip_suffix('/').unwrap_or(inside);
    let part = |part: &str| {
        let text = String::from_utf8(decode(part)?);
        text.map_err(|_| invalid(format!("{:?} is not UTF-8", shown(part))))
    };
    inside.split('/').map(part).collect()
}

fn form(provider: Provider, needed: &str) -> Error {
    let scheme = provider.scheme();
    invalid(format!("{scheme}: needs {needed}"))
        .with_repair(format!("write {scheme}://BUCKET/VOLUME"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_loopback_addresses_are_on_this_node() {
        let is_here = |url: &str| Endpoint::parse(url).unwrap().is_on_this_node();
        for url in
            ["http://127.0.0.1:9000", "http://127.3.2.1", "http://[::1]:80", "http://LocalHost"]
        {
            assert!(is_here(url), "{url}");
        }
        for url in [
            "http://10.0.0.1:9000",
            "http://[::2]:80",
            "http://localhost.example",
            "http://127.store",
        ] {
            assert!(!is_here(url), "{url}");
        }
    }
}
