//! The registration of the volumes and stores of objects: `dir:`, `s3:`, `gs:` and `az:`.

use std::any::Any;
use std::sync::Arc;

use cleat_backend::claimant::Claimant;
use cleat_backend::fence::Fence;
use cleat_backend::store::Store;
use cleat_backend::uri::{Options, invalid};
use cleat_backend::{
    Backend, CacheUse, Confinement, CredentialFile, CredentialSet, HandoverFiles, Image, Nested,
    OpenOptions, StoreParser, StoreSpec, Stored, VolumeSpec,
};
use cleat_core::error::Result;
use cleat_grants::storage::Fencing;

use crate::connection::Access;
use crate::fence::ObjectFence;
use crate::granted::GrantRecord;
use crate::home::{Home, directory};
use crate::image::{ObjectImage, TAIL_BYTES};
use crate::manage::ObjectStore;
use crate::naming::check_name;
use crate::remote::Provider;
use crate::spec::VolumeAt;

/// The registration of volumes in a directory.
pub const DIRECTORY: &dyn Backend = &Objects {
    scheme: directory::SCHEME,
    examples: &["dir:/var/lib/volumes/a"],
    forms: &["dir:/DIRECTORY"],
};

/// The registration of volumes on Amazon S3, and on stores with its API.
pub const AMAZON: &dyn Backend = &Objects {
    scheme: Provider::Amazon.scheme(),
    examples: &["s3://bucket/volume?endpoint=https://store:9000&credentials_file=/etc/cleat/s3"],
    forms: &["s3://BUCKET", "s3://BUCKET/PREFIX"],
};

/// The registration of volumes on Google Cloud Storage.
pub const GOOGLE: &dyn Backend = &Objects {
    scheme: Provider::Google.scheme(),
    examples: &["gs://bucket/volume?credentials_file=/etc/cleat/service-account.json"],
    forms: &["gs://BUCKET", "gs://BUCKET/PREFIX"],
};

/// The registration of volumes on Azure Blob Storage.
pub const AZURE: &dyn Backend = &Objects {
    scheme: Provider::Azure.scheme(),
    examples: &["az://container/volume?account=name&credentials_file=/etc/cleat/azure-key"],
    forms: &["az://CONTAINER", "az://CONTAINER/PREFIX"],
};

#[derive(Debug)]
struct Objects {
    scheme: &'static str,
    examples: &'static [&'static str],
    forms: &'static [&'static str],
}

impl Backend for Objects {
    fn scheme(&self) -> &'static str {
        self.scheme
    }

    fn examples(&self) -> &'static [&'static str] {
        self.examples
    }

    fn parse(
        &self,
        location: &str,
        options: Options,
        _nested: Nested<'_>,
    ) -> Result<Arc<dyn VolumeSpec>> {
        Ok(Arc::new(VolumeAt::parse(self.scheme, location, options)?))
    }

    fn stores(&self) -> Option<&dyn StoreParser> {
        Some(self)
    }
}

impl StoreParser for Objects {
    fn forms(&self) -> &'static [&'static str] {
        self.forms
    }

    fn parse_store(&self, location: &str, options: Options) -> Result<Arc<dyn StoreSpec>> {
        Ok(Arc::new(Home::parse(self.scheme, location, options)?))
    }
}

impl VolumeSpec for VolumeAt {
    fn scheme(&self) -> &'static str {
        self.home.scheme()
    }

    fn location(&self) -> String {
        self.location()
    }

    fn options(&self) -> Vec<(String, String)> {
        self.home.options()
    }

    fn open(&self, options: &OpenOptions) -> Result<Arc<dyn Image>> {
        Ok(Arc::new(ObjectImage::open(self, &self.complete(options)?)?))
    }

    /// Needs no files: the predecessor releases the claim, and the successor claims the volume.
    fn open_successor(
        &self,
        options: &OpenOptions,
        _files: HandoverFiles,
    ) -> Result<Arc<dyn Image>> {
        Ok(Arc::new(ObjectImage::open_successor(self, &self.complete(options)?)?))
    }

    fn credential_files(&self) -> Vec<CredentialFile> {
        self.home.credential_files()
    }

    fn confinement(&self) -> Confinement {
        let Access { paths, copies, writable, network } = self.home.access(&self.name);
        Confinement::BeforeOpen { paths, copies, writable, network }
    }

    fn tail_bytes(&self) -> u64 {
        TAIL_BYTES
    }

    fn cache(&self) -> CacheUse {
        self.home.cache()
    }

    fn fence(&self) -> Result<Option<Box<dyn Fence>>> {
        Ok(Some(Box::new(ObjectFence(self.clone()))))
    }

    fn grant_record(&self) -> Result<Option<Arc<dyn Fencing>>> {
        Ok(Some(Arc::new(GrantRecord(self.clone()))))
    }

    fn stored(&self) -> Result<Option<Stored>> {
        let (store, name) = (Arc::new(self.home.clone()), self.name.clone());
        Ok(Some(Stored { store, name, snapshot: self.snapshot.clone() }))
    }
}

impl VolumeAt {
    /// Reads the credentials that are missing.
    fn complete(&self, options: &OpenOptions) -> Result<OpenOptions> {
        let mut options = options.clone();
        options.credentials.complete(&self.home.credential_files())?;
        Ok(options)
    }
}

impl StoreSpec for Home {
    fn scheme(&self) -> &'static str {
        self.scheme()
    }

    fn location(&self) -> String {
        self.location(None)
    }

    fn options(&self) -> Vec<(String, String)> {
        self.options()
    }

    fn volume(&self, name: &str, snapshot: Option<&str>) -> Result<Arc<dyn VolumeSpec>> {
        let volume = VolumeAt::new(self.clone(), name)?;
        let Some(snapshot) = snapshot else { return Ok(Arc::new(volume)) };
        check_name(snapshot)?;
        Ok(Arc::new(volume.at(snapshot)))
    }

    fn snapshot_form(&self) -> Option<&'static str> {
        Some(match self {
            Self::Directory(_) => "dir:/DIRECTORY/VOLUME@SNAPSHOT",
            Self::Bucket(_) => "s3://BUCKET/VOLUME@SNAPSHOT?endpoint=…",
        })
    }

    fn connect(&self, claimant: &Claimant, credentials: CredentialSet) -> Result<Box<dyn Store>> {
        Ok(Box::new(ObjectStore::connect(self, claimant, credentials)?))
    }

    fn with_access_of(&self, other: &dyn StoreSpec) -> Result<Arc<dyn StoreSpec>> {
        let other: &dyn Any = other;
        match other.downcast_ref::<Self>() {
            Some(other) => Ok(Arc::new(self.with_access_of(other)?)),
            None => Err(invalid("the two volumes have different kinds of stores")),
        }
    }
}
