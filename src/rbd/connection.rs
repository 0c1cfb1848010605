//! Loads, configures and connects librbd.

use std::sync::Arc;
use std::time::Duration;

use cleat_core::error::{Error, ErrorKind, Result};

use crate::cache;
use crate::claim::{BLOCKLIST_OPTION, BLOCKLIST_S};
use crate::errors::{missing_namespace, open_error};
use crate::keyring::ClientKey;
use crate::spec::RbdSpec;

/// The timeout for answers of the monitors, when connecting and later.
const MONITOR_TIMEOUT: Duration = Duration::from_secs(10);

/// Options for a served image. With them, the connection's thread passes requests to the messenger
/// itself; otherwise the library wakes one of its threads for each request. The connection's thread must
/// not block, so the library's limits on requests in flight are off. The connection has its own limits.
const INLINE: [(&str, &str); 3] = [
    ("rbd_non_blocking_aio", "false"),
    ("objecter_inflight_ops", "0"),
    ("objecter_inflight_op_bytes", "0"),
];

/// Loads the libraries and returns librbd's version. Must run before the process is confined, while the
/// files of the libraries can be read. Starts no thread.
///
/// # Errors
/// Returns `Unsupported` if a library is missing or lacks a function.
pub(crate) fn load_library() -> Result<(i32, i32, i32)> {
    librbd::load().map_err(|error| {
        Error::new(ErrorKind::Unsupported, "this machine cannot open RBD images")
            .with_repair(error.repair())
            .with_source(error)
    })
}

/// Connects to the cluster and opens the image. Blocks without a limit.
pub(crate) fn open_library(
    spec: &RbdSpec,
    key: Option<&ClientKey>,
    read_only: bool,
    is_granted: bool,
) -> Result<Arc<librbd::Image>> {
    let failed = |error| open_error(error, &spec.image_name(), spec);
    // The library's own lines are part of the log of the process that serves the image.
    let config =
        librbd::Config { defaults: defaults(spec, is_granted), quiet: false, ..config(spec) };
    let cluster = connect(&config, key).map_err(failed)?;
    let pool = cluster.pool(&spec.pool, spec.namespace.as_deref()).map_err(failed)?;
    let how = if read_only { librbd::Open::ReadOnly } else { librbd::Open::Write };
    pool.open(&spec.image, spec.snapshot.as_deref(), how)
        .map_err(|error| missing_namespace(&error, &cluster, spec).unwrap_or_else(|| failed(error)))
}

/// Connects to a cluster with `key`; `None`: with the key in the keyring of the configuration.
pub(crate) fn connect(
    config: &librbd::Config,
    key: Option<&ClientKey>,
) -> librbd::Result<Arc<librbd::Cluster>> {
    match key {
        Some(key) => librbd::Cluster::connect_with_key(config, key.text(), key.is_aes256k()),
        None => librbd::Cluster::connect(config),
    }
}

/// Returns the configuration with which librbd connects to the cluster of `spec`, without the key. The library
/// writes nothing to stderr, where a command prints its error, as JSON if requested.
pub(crate) fn config(spec: &RbdSpec) -> librbd::Config {
    librbd::Config {
        conf: spec.conf.clone(),
        id: spec.id.clone(),
        keyring: None,
        defaults: owned(&cache::OFF).collect(),
        overrides: spec.config.clone().into_iter().collect(),
        monitor_timeout: MONITOR_TIMEOUT,
        quiet: true,
    }
}

/// Options for an image that is granted to several writers. librbd breaks the lock of a writer that does not watch the
/// image any more. It must not put it on the blocklist: only the controller decides that, and an entry of librbd, of
/// one hour, would replace an entry of the controller. The lock does not protect the data of such an image. librbd's
/// object map has locks of its own. The second name is that of Ceph 15.
const KEEP_OWNERS: [(&str, &str); 2] =
    [("rbd_blocklist_on_break_lock", "false"), ("rbd_blacklist_on_break_lock", "false")];

/// Options for a served image, as far as the loaded library knows them.
fn defaults(spec: &RbdSpec, is_granted: bool) -> Vec<(String, String)> {
    let mut defaults: Vec<_> = owned(&cache::OFF).collect();
    if !spec.shared {
        defaults.push((BLOCKLIST_OPTION.to_owned(), BLOCKLIST_S.to_string()));
    } else if is_granted {
        defaults.extend(owned(&KEEP_OWNERS));
    }
    // These work only together.
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
    fn the_volumes_options_override_the_defaults() {
        let spec = |text: &str| {
            let (location, options) = text.split_once('?').unwrap_or((text, ""));
            RbdSpec::parse(location, Options::parse(options).unwrap()).unwrap()
        };
        let plain = config(&spec("p/i"));
        assert_eq!((plain.defaults, plain.overrides), (list(&cache::OFF), Vec::new()));
        assert!(plain.quiet);
        let own = config(&spec("p/i?config.rbd_op_threads=2&id=x"));
        assert_eq!(own.overrides, list(&[("rbd_op_threads", "2")]));
        assert_eq!(own.id.as_deref(), Some("x"));
        assert_eq!(spec("p/n/i@s").image_name(), "p/n/i@s");
        // The connection's thread may start requests only if the library has no limit of its own.
        let inline = defaults(&spec("p/i?lock=shared"), false);
        assert_eq!(inline, [list(&cache::OFF), list(&INLINE)].concat());
        let granted = defaults(&spec("p/i?lock=shared"), true);
        assert_eq!(granted, [list(&cache::OFF), list(&KEEP_OWNERS), list(&INLINE)].concat());
        let bounded = defaults(&spec("p/i?lock=shared&config.objecter_inflight_ops=9"), false);
        assert_eq!(bounded, list(&cache::OFF));
        assert!(defaults(&spec("p/i"), true).ends_with(&list(&INLINE)));
    }
}
