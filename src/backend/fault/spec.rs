//! The registration and the URI of volumes with faults: `fault:URI?fault.KEY=VALUE…`.

use std::sync::Arc;
use std::time::Duration;

use cleat_core::error::Result;

use super::{FaultImage, PREFIX, Plan};
use crate::confinement::Confinement;
use crate::credentials::CredentialFile;
use crate::fence::Fence;
use crate::spec::{Backend, Nested, OpenOptions, VisibleSize, VolumeSpec};
use crate::uri::{Options, invalid};
use crate::{HandoverFiles, Image};

/// The registration of volumes with injected faults.
pub const BACKEND: &dyn Backend = &Faults;

#[derive(Debug)]
struct Faults;

impl Backend for Faults {
    fn scheme(&self) -> &'static str {
        "fault"
    }

    fn parse(
        &self,
        location: &str,
        mut options: Options,
        nested: Nested<'_>,
    ) -> Result<Arc<dyn VolumeSpec>> {
        let plan = Plan::parse(options.split_prefix(PREFIX))?;
        if location.starts_with("fault:") {
            return Err(invalid("fault: cannot wrap another fault: volume"));
        }
        Ok(Arc::new(FaultSpec { inner: nested(location, options)?, plan }))
    }
}

/// A volume with injected faults.
#[derive(Debug)]
struct FaultSpec {
    /// The wrapped volume; never a `fault:` volume.
    inner: Arc<dyn VolumeSpec>,
    /// The initial faults.
    plan: Plan,
}

impl FaultSpec {
    fn wrap(&self, inner: Arc<dyn Image>) -> Arc<dyn Image> {
        Arc::new(FaultImage::wrap(inner, self.plan.clone()))
    }
}

impl VolumeSpec for FaultSpec {
    fn scheme(&self) -> &'static str {
        "fault"
    }

    fn location(&self) -> String {
        format!("{}:{}", self.inner.scheme(), self.inner.location())
    }

    fn options(&self) -> Vec<(String, String)> {
        let mut options = self.inner.options();
        let faults = self.plan.options().into_iter();
        options.extend(faults.map(|(key, value)| (format!("{PREFIX}{key}"), value)));
        options
    }

    fn open(&self, options: &OpenOptions) -> Result<Arc<dyn Image>> {
        self.inner.open(options).map(|inner| self.wrap(inner))
    }

    fn open_successor(
        &self,
        options: &OpenOptions,
        files: HandoverFiles,
    ) -> Result<Arc<dyn Image>> {
        self.inner.open_successor(options, files).map(|inner| self.wrap(inner))
    }

    fn prepare(&self) -> Result<()> {
        self.inner.prepare()
    }

    fn credential_files(&self) -> Vec<CredentialFile> {
        self.inner.credential_files()
    }

    /// As the wrapped volume: the timer thread starts with the first queue, after the open.
    fn confinement(&self) -> Confinement {
        self.inner.confinement()
    }

    fn warning(&self) -> Option<String> {
        self.inner.warning()
    }

    fn extra_open_time(&self) -> Duration {
        self.inner.extra_open_time()
    }

    fn without_content_key(&self) -> Option<Arc<dyn VolumeSpec>> {
        let inner = self.inner.without_content_key()?;
        Some(Arc::new(Self { inner, plan: self.plan.clone() }))
    }

    fn visible_size(&self) -> VisibleSize {
        self.inner.visible_size()
    }

    fn claim_outlives_process(&self) -> bool {
        self.inner.claim_outlives_process()
    }

    fn fence(&self) -> Result<Option<Box<dyn Fence>>> {
        self.inner.fence()
    }
}
