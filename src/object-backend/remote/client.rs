//! The client of a bucket, with its credentials.

use std::sync::Arc;

use object_store::ObjectStore;
use object_store::aws::AmazonS3Builder;
use object_store::azure::MicrosoftAzureBuilder;
use object_store::gcp::GoogleCloudStorageBuilder;

use cleat_backend::CredentialSet;
use cleat_backend::connector::Connector;
use cleat_backend::uri::invalid;
use cleat_core::error::Result;

use super::bucket::{Bucket, Provider};
use super::certificates::read_roots;
use super::credentials::credential_file;
use super::http::{Http, no_retry};
use super::keys::Keys;
use super::origin::Origin;

/// The client of a bucket.
#[derive(Clone)]
pub(super) struct Client {
    pub(super) store: Arc<dyn ObjectStore>,
    /// Where its keys come from.
    pub(super) origin: Origin,
}

/// Makes the client of a bucket. Sends nothing.
///
/// # Errors
/// Returns `InvalidArgument` for malformed credentials or certificates, without any content of them.
pub(super) fn client(
    bucket: &Bucket,
    credentials: &CredentialSet,
    connector: Option<Arc<Connector>>,
) -> Result<Client> {
    let file = credentials.get(&credential_file(bucket).path)?;
    let content = file.bytes();
    let http = Http::new(&roots(bucket)?, connector)?;
    let has_file = bucket.credentials_file.is_some();
    let mut origin = if has_file { Origin::File } else { Origin::Environment };
    let store = match bucket.provider {
        Provider::Amazon => {
            let keys = Keys::parse(content)?;
            origin = keys.origin.filter(|_| !has_file).unwrap_or(origin);
            amazon(bucket, &keys, http)
        }
        Provider::Google => google(bucket, text(content)?, http),
        Provider::Azure => azure(bucket, text(content)?.trim(), http),
    };
    Ok(Client { store: store?, origin })
}

fn amazon(bucket: &Bucket, keys: &Keys, http: Http) -> Result<Arc<dyn ObjectStore>> {
    let address = bucket.address();
    let mut builder = AmazonS3Builder::new()
        .with_bucket_name(&bucket.bucket)
        .with_region(&bucket.region)
        .with_endpoint(address.url())
        // TLS protects the data of a put, and nobody else reads or changes what stays on this node. The SHA-256 of the
        // data would take time here and at the store.
        .with_unsigned_payload(address.is_secure || address.is_on_this_node())
        .with_allow_http(true)
        .with_virtual_hosted_style_request(false)
        .with_disable_bulk_delete(true)
        .with_access_key_id(&keys.id)
        .with_secret_access_key(&**keys.secret)
        .with_retry(no_retry())
        .with_http_connector(http);
    if let Some(token) = &keys.token {
        builder = builder.with_token(&***token);
    }
    built(builder.build(), "write the section [default] with the keys")
}

fn google(bucket: &Bucket, key: &str, http: Http) -> Result<Arc<dyn ObjectStore>> {
    let mut builder = GoogleCloudStorageBuilder::new()
        .with_bucket_name(&bucket.bucket)
        .with_service_account_key(key)
        .with_retry(no_retry())
        .with_http_connector(http);
    if bucket.endpoint.is_some() {
        builder = builder.with_base_url(&bucket.address().url());
    }
    built(builder.build(), "write the key of a service account, as JSON")
}

fn azure(bucket: &Bucket, key: &str, http: Http) -> Result<Arc<dyn ObjectStore>> {
    let builder = MicrosoftAzureBuilder::new()
        .with_account(&bucket.account)
        .with_container_name(&bucket.bucket)
        .with_access_key(key)
        .with_endpoint(bucket.address().url())
        .with_allow_http(true)
        .with_retry(no_retry())
        .with_http_connector(http);
    built(builder.build(), "write the access key of the storage account, in base64")
}

/// The error of a builder may contain a part of the credentials, so it is not passed on.
fn built<S: ObjectStore>(
    client: object_store::Result<S>,
    repair: &str,
) -> Result<Arc<dyn ObjectStore>> {
    let malformed = |_| invalid("the credentials of the store are malformed").with_repair(repair);
    client.map(|client| Arc::new(client) as Arc<dyn ObjectStore>).map_err(malformed)
}

fn text(content: &[u8]) -> Result<&str> {
    std::str::from_utf8(content)
        .map_err(|_| invalid("the credentials of the store are malformed: they are not UTF-8"))
}

/// Returns the certificates that a client of the bucket trusts; empty without TLS.
fn roots(bucket: &Bucket) -> Result<Vec<u8>> {
    if bucket.address().is_secure { read_roots(bucket.trusted_file()) } else { Ok(Vec::new()) }
}
