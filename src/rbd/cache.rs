//! Ensures that librbd's caches are off or write through.
//!
//! A write-back or write-around cache keeps acknowledged data in the memory of the worker or on its node.
//! The data is lost when the worker is killed, and a later FLUSH succeeds nevertheless. The options here
//! override Ceph's configuration file and the monitors' configuration, but not the options that a pool
//! or an image stores in its metadata. Those are checked after the image was opened.

use cleat_backend::uri::invalid;
use cleat_core::error::{Error, ErrorKind, Result};

/// Options of Ceph that prevent every cache from holding writes back, even if a pool or an image enables
/// the cache.
pub(crate) const OFF: [(&str, &str); 4] = [
    ("rbd_cache", "false"),
    ("rbd_cache_policy", "writethrough"),
    ("rbd_cache_max_dirty", "0"),
    ("rbd_persistent_cache_mode", "disabled"),
];

/// Rejects an option of a volume that would let a cache hold writes back.
pub(crate) fn check_option(key: &str, value: &str) -> Result<()> {
    match OFF.iter().find(|(option, _)| *option == key) {
        Some((_, off)) if value != *off => {
            let message = format!(
                "config.{key}={value} would let librbd hold acknowledged writes back; they are lost \
                 if the worker is killed"
            );
            Err(invalid(message).with_repair(format!(
                "remove config.{key}: cleat opens images without a write-back cache"
            )))
        }
        _ => Ok(()),
    }
}

/// Rejects an image whose effective configuration, as librbd reports it, lets a cache hold writes back.
/// An unknown value is treated like one that does.
pub(crate) fn check_off(config: &[(String, String)], name: &str) -> Result<()> {
    let value = |name: &str| {
        config.iter().find(|(key, _)| key == name).map_or("", |(_, value)| value.as_str())
    };
    let held_back = value("rbd_cache") != "false"
        && value("rbd_cache_policy") != "writethrough"
        && value("rbd_cache_max_dirty") != "0";
    let persistent = !["", "disabled"].contains(&value("rbd_persistent_cache_mode"));
    let option = match (held_back, persistent) {
        (false, false) => return Ok(()),
        (true, _) => "rbd_cache",
        (false, true) => "rbd_persistent_cache_mode",
    };
    let message = format!(
        "the stored configuration of {name} or of its pool ({option}) lets librbd hold acknowledged \
         writes back; they are lost if the worker is killed"
    );
    let pool = name.split('/').next().unwrap_or(name);
    Err(Error::new(ErrorKind::Unsupported, message).with_repair(format!(
        "remove the options: rbd config image ls {name}, rbd config image rm {name} rbd_cache_policy; \
         for the pool: rbd config pool ls {pool}, rbd config pool rm {pool} rbd_cache_policy"
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_cache_without_write_back_is_accepted() {
        let off = ("rbd_cache", "false");
        let on = ("rbd_cache", "true");
        for (list, accepted) in [
            (&[off][..], true),
            (&[off, ("rbd_persistent_cache_mode", "disabled")], true),
            (&[off, ("rbd_persistent_cache_mode", "ssd")], false),
            (&[on, ("rbd_cache_policy", "writethrough")], true),
            (&[on, ("rbd_cache_max_dirty", "0")], true),
            (&[on, ("rbd_cache_policy", "writearound"), ("rbd_cache_max_dirty", "1")], false),
            (&[on], false),
            (&[], false),
        ] {
            let options: Vec<_> =
                list.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
            assert_eq!(check_off(&options, "p/i").is_ok(), accepted, "{list:?}");
        }
    }

    #[test]
    fn options_of_a_volume_cannot_enable_write_back() {
        for (key, value, accepted) in [
            ("rbd_cache", "false", true),
            ("rbd_cache", "true", false),
            ("rbd_cache_policy", "writethrough", true),
            ("rbd_cache_policy", "writeback", false),
            ("rbd_cache_policy", "writearound", false),
            ("rbd_cache_max_dirty", "1", false),
            ("rbd_persistent_cache_mode", "ssd", false),
            ("rbd_cache_size", "1", true),
            ("rbd_op_threads", "1", true),
        ] {
            assert_eq!(check_option(key, value).is_ok(), accepted, "{key}={value}");
        }
    }
}
