//! How librbd is loaded, configured and connected.

use std::sync::Arc;
use std::time::Duration;

use cleat_core::error::{Error, ErrorKind, Result};

use crate::cache;
use crate::claim::{CUT_OFF_OPTION, CUT_OFF_S};
use crate::errors::problem;
use crate::spec::RbdSpec;

/// How long a monitor may take to answer, at the start and later.
const MONITOR_TIMEOUT: Duration = Duration::from_secs(10);

/// As these, for an image that is served: the connection's own thread hands requests to the messenger,
/// where the library would wake a thread of its own for each. It must not wait, as the library does at
/// its own bounds on what is under way: a connection's bounds are in their place.
const INLINE: [(&str, &str); 3] = [
    ("rbd_non_blocking_aio", "false"),
    ("objecter_inflight_ops", "0"),
    ("objecter_inflight_op_bytes", "0"),
];

/// Loads the libraries while their files can be read, and returns librbd's version. Starts no thread.
///
/// # Errors
/// `Unsupported` when a library is missing or lacks a function.
pub(crate) fn load_library() -> Result<(i32, i32, i32)> {
    librbd::load().map_err(|error| {
        Error::new(ErrorKind::Unsupported, "this machine cannot open RBD images")
            .with_repair(error.repair())
            .with_source(error)
    })
}

/// Connects and opens, within no limit.
pub(crate) fn open_library(spec: &RbdSpec, read_only: bool) -> Result<Arc<librbd::Image>> {
    let failed = |error| problem(error, &spec.image_name(), spec);
    let config = librbd::Config { defaults: defaults(spec), ..config(spec) };
    let cluster = librbd::Cluster::connect(&config).map_err(failed)?;
    let pool = cluster.pool(&spec.pool, spec.namespace.as_deref()).map_err(failed)?;
    let how = if read_only { librbd::Open::ReadOnly } else { librbd::Open::Write };
    pool.open(&spec.image, spec.snapshot.as_deref(), how).map_err(failed)
}

/// Returns how librbd connects to the cluster of `spec`.
pub(crate) fn config(spec: &RbdSpec) -> librbd::Config {
    librbd::Config {
        conf: spec.conf.clone(),
        id: spec.id.clone(),
        keyring: spec.keyring.clone(),
        defaults: owned(&cache::OFF).collect(),
        overrides: spec.config.clone().into_iter().collect(),
        monitor_timeout: MONITOR_TIMEOUT,
    }
}

/// What holds for an image that is served, where the library knows it.
fn defaults(spec: &RbdSpec) -> Vec<(String, String)> {
    let mut defaults: Vec<_> = owned(&cache::OFF).collect();
    if !spec.shared {
        defaults.push((CUT_OFF_OPTION.to_owned(), CUT_OFF_S.to_string()));
    }
    // Together, or not at all.
    if !INLINE.iter().any(|(key, _)| spec.config.contains_key(*key)) {
        defaults.extend(owned(&INLINE));
    }
    defaults
}

fn owned(options: &[(&str, &str)]) -> impl Iterator<Item = (String, String)> {
    options.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned()))
}

#[cfg(test)]
mod tests {
    use cleat_backend::uri::Options;

    use super::*;

    fn list(options: &[(&str, &str)]) -> Vec<(String, String)> {
        options.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn the_volumes_options_go_before_the_defaults() {
        let spec = |text: &str| {
            let (location, options) = text.split_once('?').unwrap_or((text, ""));
            RbdSpec::parse(location, Options::parse(options).unwrap()).unwrap()
        };
        let plain = config(&spec("p/i"));
        assert_eq!((plain.defaults, plain.overrides), (list(&cache::OFF), Vec::new()));
        let own = config(&spec("p/i?config.rbd_op_threads=2&id=x"));
        assert_eq!(own.overrides, list(&[("rbd_op_threads", "2")]));
        assert_eq!(own.id.as_deref(), Some("x"));
        assert_eq!(spec("p/n/i@s").image_name(), "p/n/i@s");
        // Without a bound of the library's a thread of ours may begin requests, with one it may not.
        let inline = defaults(&spec("p/i?lock=shared"));
        assert_eq!(inline, [list(&cache::OFF), list(&INLINE)].concat());
        let bounded = defaults(&spec("p/i?lock=shared&config.objecter_inflight_ops=9"));
        assert_eq!(bounded, list(&cache::OFF));
        assert!(defaults(&spec("p/i")).ends_with(&list(&INLINE)));
    }
}
