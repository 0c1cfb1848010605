//! The client of a bucket, with its credentials.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use object_store::aws::AmazonS3Builder;
use object_store::azure::MicrosoftAzureBuilder;
use object_store::gcp::GoogleCloudStorageBuilder;
use object_store::{ObjectStore, RetryConfig};

use cleat_backend::CredentialSet;
use cleat_backend::uri::invalid;
use cleat_core::error::{Error, Result};

use super::bucket::{Bucket, Provider};
use super::http::Connector;
use super::keys::Keys;

/// The maximum length of a file with certificates, in bytes.
const MAX_ROOTS: u64 = 4 << 20;

/// Makes the client of a bucket. Sends nothing.
///
/// # Errors
/// Returns `InvalidArgument` for malformed credentials or certificates, without any content of them.
pub(super) fn client(bucket: &Bucket, credentials: &CredentialSet) -> Result<Arc<dyn ObjectStore>> {
    let file = credentials.get(&bucket.credential_file().path)?;
    let content = file.bytes();
    let connector = Connector::new(&roots(bucket)?)?;
    match bucket.provider {
        Provider::Amazon => amazon(bucket, &Keys::parse(content)?, connector),
        Provider::Google => google(bucket, text(content)?, connector),
        Provider::Azure => azure(bucket, text(content)?.trim(), connector),
    }
}

fn amazon(bucket: &Bucket, keys: &Keys, connector: Connector) -> Result<Arc<dyn ObjectStore>> {
    let mut builder = AmazonS3Builder::new()
        .with_bucket_name(&bucket.bucket)
        .with_region(&bucket.region)
        .with_endpoint(bucket.address().url())
        .with_allow_http(true)
        .with_virtual_hosted_style_request(false)
        .with_disable_bulk_delete(true)
        .with_access_key_id(&keys.id)
        .with_secret_access_key(&**keys.secret)
        .with_retry(no_retry())
        .with_http_connector(connector);
    if let Some(token) = &keys.token {
        builder = builder.with_token(&***token);
    }
    built(builder.build(), "write the section [default] with the keys")
}

fn google(bucket: &Bucket, key: &str, connector: Connector) -> Result<Arc<dyn ObjectStore>> {
    let mut builder = GoogleCloudStorageBuilder::new()
        .with_bucket_name(&bucket.bucket)
        .with_service_account_key(key)
        .with_retry(no_retry())
        .with_http_connector(connector);
    if bucket.endpoint.is_some() {
        builder = builder.with_base_url(&bucket.address().url());
    }
    built(builder.build(), "write the key of a service account, as JSON")
}

fn azure(bucket: &Bucket, key: &str, connector: Connector) -> Result<Arc<dyn ObjectStore>> {
    let builder = MicrosoftAzureBuilder::new()
        .with_account(&bucket.account)
        .with_container_name(&bucket.bucket)
        .with_access_key(key)
        .with_endpoint(bucket.address().url())
        .with_allow_http(true)
        .with_retry(no_retry())
        .with_http_connector(connector);
    built(builder.build(), "write the access key of the storage account, in base64")
}

/// The error of a builder may contain a part of the credentials, so it is not passed on.
fn built<S: ObjectStore>(
    client: object_store::Result<S>,
    repair: &str,
) -> Result<Arc<dyn ObjectStore>> {
    let malformed = |_| invalid("the file of credentials_file= is malformed").with_repair(repair);
    client.map(|client| Arc::new(client) as Arc<dyn ObjectStore>).map_err(malformed)
}

fn text(content: &[u8]) -> Result<&str> {
    std::str::from_utf8(content)
        .map_err(|_| invalid("the file of credentials_file= is malformed: it is not UTF-8"))
}

/// The engine repeats: it has to know which puts may still be executed.
fn no_retry() -> RetryConfig {
    RetryConfig { max_retries: 0, retry_timeout: Duration::ZERO, ..RetryConfig::default() }
}

/// Returns the certificates that a client of the bucket trusts; empty without TLS.
fn roots(bucket: &Bucket) -> Result<Vec<u8>> {
    let Some(path) = bucket.roots_file() else {
        return match bucket.address().is_secure {
            false => Ok(Vec::new()),
            true => Err(invalid("this machine has no file of trusted certificates")
                .with_repair("install the package ca-certificates, or name a file with ca_file=")),
        };
    };
    read_bounded(&path).map_err(|error| {
        Error::from_io(format!("cannot read the certificates in {}", path.display()), error)
    })
}

fn read_bounded(path: &Path) -> io::Result<Vec<u8>> {
    let mut content = Vec::new();
    File::open(path)?.take(MAX_ROOTS + 1).read_to_end(&mut content)?;
    if content.len() as u64 > MAX_ROOTS {
        return Err(io::Error::other(format!("the file is longer than {MAX_ROOTS} bytes")));
    }
    Ok(content)
}
