//! The daemon's configuration: a TOML file, whose values flags of the command line override.
//!
//! `systemd/cleat.toml` lists every key with its meaning and default. A test here compares it with the
//! code.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Deserialize;

use crate::cache_config::CacheConfig;
use crate::config_values::{duration, path_or_none, size_or_zero};
use crate::csi_config::CsiConfig;
use crate::workers::UserRange;
use cleat_core::error::{Error, ErrorKind, Result};
use cleat_core::policy::{BusyPoll, OnOutage, Policy, RateLimits};
use cleat_telemetry::{Format, Log};
use cleat_worker_protocol::isolation::layer;

/// The path of the configuration file if no other is given. This file may be absent.
pub const DEFAULT_PATH: &str = "/etc/cleat/cleat.toml";

/// The maximum number of connections of one device. Each takes a thread of the worker, and 128 tags in the
/// kernel.
pub const MAX_CONNECTIONS: u32 = cleat_worker_protocol::protocol::MAX_CONNECTIONS;

/// The longest timeout that a call or an option may set, in seconds.
pub const MAX_TIMEOUT_S: u32 = 86_400;

/// The maximum length of a node's name, in bytes: that of a host name.
const MAX_NODE_NAME: usize = 253;

/// The hint of every configuration error. `make install` installs the file there.
const HINT: &str = "see share/doc/cleat/cleat.toml for all keys and their defaults";

/// The maximum size of the file, in bytes.
const MAX_FILE: u64 = 1 << 20;

/// The configuration of the daemon.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// The directory of sockets, which does not survive a reboot.
    pub runtime_dir: PathBuf,
    /// The directory of the journal, which survives a reboot.
    pub state_dir: PathBuf,
    /// The socket of the control API; `None`: `cleat.sock` in the runtime directory.
    pub socket: Option<PathBuf>,
    /// The name of this node, unique among the nodes that use the same storage; empty: the host name.
    pub node_name: String,
    /// Whether the daemon unmaps all volumes when it is stopped.
    pub unmap_on_shutdown: bool,
    /// Whether the daemon loads the nbd module when it is missing.
    pub modprobe: bool,
    /// Logging.
    pub log: LogConfig,
    /// Defaults of mappings.
    pub map: MapConfig,
    /// Limits.
    pub limits: Limits,
    /// Worker processes.
    pub workers: WorkersConfig,
    /// The local cache of volumes.
    pub cache: CacheConfig,
    /// The metrics endpoint.
    pub metrics: MetricsConfig,
    /// The CSI driver.
    pub csi: CsiConfig,
}

/// The `log` section: logging.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LogConfig {
    /// The format of the log.
    pub format: Format,
    /// `error`, `warn`, `info`, `debug`, `trace`, or a filter in the syntax of tracing-subscriber.
    pub level: String,
}

/// The `map` section: the defaults of options that a call of `map` does not set.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct MapConfig {
    /// Connections per device.
    pub connections: u32,
    /// How long new I/O waits for a worker before it fails. Whole seconds.
    #[serde(deserialize_with = "duration")]
    pub dead_connection_timeout: Duration,
    /// How long after a reconnect the kernel repeats the requests of the dead worker. Zero: the kernel's
    /// default of 30 s.
    #[serde(deserialize_with = "duration")]
    pub replay_delay: Duration,
    /// What happens to requests while the backend is unreachable.
    pub on_outage: OnOutage,
    /// Requests per second; 0: no limit.
    pub iops: u64,
    /// Bytes per second; 0: no limit.
    #[serde(deserialize_with = "size_or_zero")]
    pub bps: u64,
    /// Whether connections poll before they sleep.
    pub busy_poll: BusyPoll,
    /// The program that quiesces a device for a snapshot; `None`: the daemon freezes its file systems.
    #[serde(deserialize_with = "path_or_none")]
    pub quiesce_hook: Option<PathBuf>,
    /// The maximum duration of a quiesce.
    #[serde(deserialize_with = "duration")]
    pub quiesce_deadline: Duration,
    /// The timeout of calls that set none.
    #[serde(deserialize_with = "duration")]
    pub timeout: Duration,
}

/// The `limits` section.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Limits {
    /// The maximum number of mappings.
    pub mappings: usize,
}

/// The `workers` section: worker processes.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct WorkersConfig {
    /// The users and groups of workers; each worker has one of its own.
    #[serde(deserialize_with = "users")]
    pub users: UserRange,
    /// The layers of the confinement without which a worker may start.
    pub allow_missing: Vec<String>,
    /// The control group of workers; `None`: the daemon's.
    #[serde(deserialize_with = "path_or_none")]
    pub cgroup: Option<PathBuf>,
    /// Whether the daemon upgrades workers of another build when it starts.
    pub upgrade_at_start: bool,
}

/// The `metrics` section: the endpoint for Prometheus.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct MetricsConfig {
    /// The address of the endpoint.
    #[serde(deserialize_with = "listen")]
    pub listen: Listen,
    /// The mode of the unix socket.
    #[serde(deserialize_with = "mode")]
    pub socket_mode: u32,
    /// Whether the address may be reachable from other machines.
    pub allow_remote: bool,
}

/// The address of the metrics endpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Listen {
    /// There is no endpoint.
    Off,
    /// The unix socket `metrics.sock` in the runtime directory.
    Unix,
    /// An IP address and a TCP port.
    Tcp(SocketAddr),
}

impl Default for MetricsConfig {
    fn default() -> Self {
        Self { listen: Listen::Unix, socket_mode: 0o600, allow_remote: false }
    }
}

impl MetricsConfig {
    /// Checks the address. Returns what is wrong with it.
    fn check(&self) -> Result<(), String> {
        let Listen::Tcp(address) = self.listen else { return Ok(()) };
        if address.ip().is_loopback() || self.allow_remote {
            return Ok(());
        }
        Err(format!(
            "must be a loopback address: {} is reachable from other machines, which could read the \
             name and the URI of every volume; to allow that, set metrics.allow_remote = true",
            address.ip()
        ))
    }
}

impl Default for Config {
    fn default() -> Self {
        Self {
            runtime_dir: PathBuf::from("/run/cleat"),
            state_dir: PathBuf::from("/var/lib/cleat"),
            socket: None,
            node_name: String::new(),
            unmap_on_shutdown: false,
            modprobe: true,
            log: LogConfig::default(),
            map: MapConfig::default(),
            limits: Limits::default(),
            workers: WorkersConfig::default(),
            cache: CacheConfig::default(),
            metrics: MetricsConfig::default(),
            csi: CsiConfig::default(),
        }
    }
}

impl Default for LogConfig {
    fn default() -> Self {
        Self { format: Format::Auto, level: "info".to_owned() }
    }
}

impl Default for MapConfig {
    fn default() -> Self {
        Self {
            // With one connection the replay delay can be short. With several, the kernel drops a live socket
            // if a request takes longer than the delay (nbd_xmit_timeout).
            connections: 1,
            dead_connection_timeout: Duration::from_secs(300),
            replay_delay: Duration::from_secs(1),
            on_outage: OnOutage::Queue,
            iops: 0,
            bps: 0,
            busy_poll: BusyPoll::Auto,
            quiesce_hook: None,
            quiesce_deadline: Duration::from_secs(30),
            timeout: Duration::from_secs(30),
        }
    }
}

impl MapConfig {
    /// Returns the policy of a mapping that does not set one.
    pub fn policy(&self) -> Policy {
        let limits = RateLimits { iops: self.iops, bytes_per_s: self.bps };
        Policy { outage: self.on_outage, limits, busy_poll: self.busy_poll }
    }
}

impl WorkersConfig {
    /// Returns the first entry of `allow_missing` that is not a layer.
    fn unknown_layer(&self) -> Option<&String> {
        self.allow_missing.iter().find(|name| !layer::ALL.contains(&name.as_str()))
    }
}

impl Default for Limits {
    fn default() -> Self {
        Self { mappings: 1024 }
    }
}

impl Config {
    /// Reads the file `path`, or [`DEFAULT_PATH`] if it is `None`. Only the latter may be absent.
    ///
    /// # Errors
    /// Returns `InvalidArgument`, with the line and the valid keys, if the content is invalid, and an error
    /// if the file cannot be read.
    pub fn load(path: Option<&Path>) -> Result<Self> {
        let file = path.unwrap_or(Path::new(DEFAULT_PATH));
        let failed = |error| {
            Error::from_io(format!("cannot read the configuration {}", file.display()), error)
                .with_repair("make the file readable; without --config, no file is needed")
        };
        let text = match read(file) {
            Err(error) if path.is_none() && error.kind() == std::io::ErrorKind::NotFound => {
                return Ok(Self::default());
            }
            other => other.map_err(failed)?,
        };
        Self::parse(&text, file)
    }

    /// Parses and checks a configuration. `file` is its name in error messages.
    ///
    /// # Errors
    /// As [`Config::load`].
    pub fn parse(text: &str, file: &Path) -> Result<Self> {
        let config: Self = toml::from_str(text).map_err(|error| {
            let line = error.span().map_or(0, |span| {
                1 + text.as_bytes()[..span.start.min(text.len())]
                    .iter()
                    .filter(|byte| **byte == b'\n')
                    .count()
            });
            // The first line is the message; the others repeat the file's text.
            let message = error.message().lines().next().unwrap_or_default().to_owned();
            Error::new(
                ErrorKind::InvalidArgument,
                format!("{}, line {line}: {message}", file.display()),
            )
            .with_repair(HINT)
        })?;
        config.check(file)?;
        Ok(config)
    }

    /// Returns the path of the control API's socket.
    pub fn socket(&self) -> PathBuf {
        self.socket.clone().unwrap_or_else(|| self.runtime_dir.join("cleat.sock"))
    }

    /// Returns the directory of the control sockets of workers.
    pub(crate) fn workers_dir(&self) -> PathBuf {
        self.runtime_dir.join("workers")
    }

    /// Returns the format and the filter of the log.
    pub fn log(&self) -> Log {
        Log { format: self.log.format, filter: self.log.level.clone() }
    }

    /// Checks the ranges of all values. Must be called again after flags have changed values. `file` is the
    /// name of the configuration in error messages.
    ///
    /// # Errors
    /// Returns `InvalidArgument`, with the key, if a value is out of range.
    pub fn check(&self, file: &Path) -> Result<()> {
        let invalid = |key: &str, why: String| {
            let message = format!("{}: {key} {why}", file.display());
            Err(Error::new(ErrorKind::InvalidArgument, message).with_repair(HINT))
        };
        for (key, path) in [
            ("runtime_dir", Some(&self.runtime_dir)),
            ("state_dir", Some(&self.state_dir)),
            ("socket", self.socket.as_ref()),
            ("map.quiesce_hook", self.map.quiesce_hook.as_ref()),
            ("workers.cgroup", self.workers.cgroup.as_ref()),
            ("cache.directory", self.cache.directory.as_ref()),
        ] {
            if path.is_some_and(|path| !path.is_absolute()) {
                return invalid(key, "must be an absolute path".to_owned());
            }
        }
        if self.node_name.len() > MAX_NODE_NAME
            || !self.node_name.bytes().all(|byte| byte.is_ascii_graphic())
        {
            let why = format!(
                "must be at most {MAX_NODE_NAME} printable ASCII characters without spaces"
            );
            return invalid("node_name", why);
        }
        if !(1..=MAX_CONNECTIONS).contains(&self.map.connections) {
            return invalid("map.connections", format!("must be 1 to {MAX_CONNECTIONS}"));
        }
        let day = Duration::from_secs(u64::from(MAX_TIMEOUT_S));
        let whole_seconds = self.map.dead_connection_timeout.subsec_nanos() == 0;
        if !whole_seconds
            || !(Duration::from_secs(1)..=day).contains(&self.map.dead_connection_timeout)
        {
            let why = "must be a whole number of seconds, at least 1s and at most a day";
            return invalid("map.dead_connection_timeout", why.to_owned());
        }
        let delays = Duration::from_millis(100)..=Duration::from_secs(30);
        if !self.map.replay_delay.is_zero() && !delays.contains(&self.map.replay_delay) {
            let why = "must be 100ms to 30s, or 0s for the kernel's default";
            return invalid("map.replay_delay", why.to_owned());
        }
        if !(Duration::from_secs(1)..=day).contains(&self.map.timeout) {
            return invalid("map.timeout", "must be at least 1s and at most a day".to_owned());
        }
        let quiesce_times = Duration::from_secs(1)..=Duration::from_secs(300);
        if !quiesce_times.contains(&self.map.quiesce_deadline) {
            return invalid("map.quiesce_deadline", "must be 1s to 5m".to_owned());
        }
        if let Err(error) = self.map.policy().limits.check() {
            return invalid("map.iops or map.bps", format!("is out of range: {}", error.message()));
        }
        if let Some(name) = self.workers.unknown_layer() {
            let why = format!("contains {name:?}; the layers are {}", layer::ALL.join(", "));
            return invalid("workers.allow_missing", why);
        }
        if !(1..=65536).contains(&self.limits.mappings) {
            return invalid("limits.mappings", "must be 1 to 65536".to_owned());
        }
        if let Err((key, why)) = self.cache.check() {
            return invalid(key, why);
        }
        if let Err(why) = self.metrics.check() {
            return invalid("metrics.listen", why);
        }
        if let Err((key, why)) = self.csi.check() {
            return invalid(&key, why);
        }
        Log::check_filter(&self.log.level)
            .or_else(|why| invalid("log.level", format!("is not a level or a filter: {why}")))
    }
}

fn read(path: &Path) -> std::io::Result<String> {
    use std::io::Read;
    let mut text = String::new();
    std::fs::File::open(path)?.take(MAX_FILE + 1).read_to_string(&mut text)?;
    if text.len() as u64 > MAX_FILE {
        return Err(std::io::Error::other(format!("it is longer than {MAX_FILE} bytes")));
    }
    Ok(text)
}

/// Reads a range of users such as "2100000000-2100065535".
fn users<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<UserRange, D::Error> {
    String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
}

/// Reads "off", "unix", or an IP address and a port.
fn listen<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<Listen, D::Error> {
    let text = String::deserialize(deserializer)?;
    match text.as_str() {
        "off" => Ok(Listen::Off),
        "unix" => Ok(Listen::Unix),
        address => address.parse().map(Listen::Tcp).map_err(|_| {
            serde::de::Error::custom(format!(
                "{text:?} is not \"unix\", \"off\" or an address such as \"127.0.0.1:9599\""
            ))
        }),
    }
}

/// Reads the mode of a socket in octal. It may contain only read and write permissions, and must contain
/// both for the owner.
fn mode<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<u32, D::Error> {
    let text = String::deserialize(deserializer)?;
    let mode = u32::from_str_radix(&text, 8).ok().filter(|mode| mode & !0o666 == 0);
    mode.filter(|mode| mode & 0o600 == 0o600).ok_or_else(|| {
        serde::de::Error::custom(format!("{text:?} is not a mode such as \"0600\" or \"0660\""))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Config> {
        Config::parse(text, Path::new("cleat.toml"))
    }

    #[test]
    fn the_shipped_file_lists_every_key_with_its_default() {
        let text = include_str!("../../systemd/cleat.toml");
        assert_eq!(parse(text).unwrap(), Config::default());
        // The file contains every key, commented out, with its default.
        let uncommented: String = text
            .lines()
            .map(|line| line.strip_prefix("#").filter(|rest| !rest.starts_with([' ', '#'])))
            .zip(text.lines())
            .map(|(key, line)| format!("{}\n", key.unwrap_or(line)))
            .collect();
        let shown = parse(&uncommented).unwrap();
        let default = Config::default();
        let socket = Some(default.socket());
        assert_eq!(shown, Config { socket, ..default });
        for key in [
            "runtime_dir",
            "state_dir",
            "socket",
            "node_name",
            "unmap_on_shutdown",
            "modprobe",
            "format",
            "level",
            "connections",
            "dead_connection_timeout",
            "replay_delay",
            "on_outage",
            "iops",
            "bps",
            "busy_poll",
            "timeout",
            "mappings",
            "users",
            "allow_missing",
            "cgroup",
            "upgrade_at_start",
            "directory",
            "volume_bytes",
            "bucket_bytes",
            "listen",
            "socket_mode",
            "allow_remote",
        ] {
            assert!(uncommented.lines().any(|l| l.starts_with(&format!("{key} ="))), "{key}");
        }
    }

    #[test]
    fn the_error_for_an_unknown_key_has_the_line_and_the_valid_keys() {
        let error = parse("modprobe = true\n\n[map]\nconnection = 3\n").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        let text = error.report();
        assert!(text.contains("line 4") && text.contains("`connection`"), "{text}");
        assert!(text.contains("dead_connection_timeout"), "{text}");
    }

    #[test]
    fn invalid_values_are_errors_that_name_the_key() {
        for (text, part) in [
            ("state_dir = \"var\"", "state_dir must be an absolute path"),
            ("node_name = \"a b\"", "node_name must be at most"),
            ("[map]\nconnections = 0", "map.connections must be 1 to 16"),
            ("[map]\nconnections = 1000", "map.connections must be 1 to 16"),
            ("[map]\ntimeout = \"soon\"", "30s"),
            ("[map]\ntimeout = 30", "line 2"),
            ("[map]\ndead_connection_timeout = \"1500ms\"", "must be a whole number of seconds"),
            ("[map]\nreplay_delay = \"5ms\"", "map.replay_delay must be 100ms to 30s"),
            ("[map]\non_outage = \"wait\"", "\"wait\" is not an outage policy"),
            ("[map]\nbps = \"100\"", "map.bps is out of range"),
            ("[map]\nbps = \"fast\"", "\"fast\" is not a size"),
            ("[map]\nbusy_poll = \"on\"", "auto"),
            ("[limits]\nmappings = 0", "limits.mappings must be 1 to 65536"),
            ("[cache]\nvolume_bytes = \"1M\"", "cache.volume_bytes must be 32M to 64G"),
            ("[cache]\nbucket_bytes = \"65G\"", "cache.bucket_bytes must be 32M to 64G"),
            ("[cache]\ndirectory = \"c\"", "cache.directory must be an absolute path"),
            ("[workers]\nusers = \"0-100\"", "2100000000"),
            ("[workers]\nallow_missing = [\"all\"]", "empty-root"),
            ("[workers]\ncgroup = \"cleat-workers\"", "workers.cgroup must be an absolute path"),
            ("[log]\nformat = \"xml\"", "journald"),
            ("[log]\nlevel = \"cleat=loud\"", "log.level is not a level or a filter"),
            ("[metrics]\nlisten = \"9599\"", "\"9599\" is not \"unix\", \"off\" or an address"),
            ("[metrics]\nlisten = \"0.0.0.0:9599\"", "allow_remote"),
            ("[metrics]\nlisten = \"[2001:db8::1]:9599\"", "loopback"),
            ("[metrics]\nsocket_mode = \"0777\"", "\"0777\" is not a mode"),
            ("[metrics]\nsocket_mode = \"0060\"", "\"0060\" is not a mode"),
            ("modprobe", "line 1"),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.report().contains(part), "{text}: {}", error.report());
            assert_eq!(error.kind(), ErrorKind::InvalidArgument);
            assert!(error.repair().is_some(), "{text}");
        }
    }

    #[test]
    fn the_metrics_section_sets_address_and_mode() {
        let listen = |text: &str| parse(&format!("[metrics]\n{text}")).unwrap().metrics;
        assert_eq!(listen("listen = \"off\"").listen, Listen::Off);
        let local = Listen::Tcp("[::1]:9599".parse().unwrap());
        assert_eq!(listen("listen = \"[::1]:9599\"").listen, local);
        let anywhere = listen("listen = \"0.0.0.0:9599\"\nallow_remote = true\n");
        assert_eq!(anywhere.listen, Listen::Tcp("0.0.0.0:9599".parse().unwrap()));
        assert_eq!(listen("socket_mode = \"660\"").socket_mode, 0o660);
    }

    #[test]
    fn a_file_given_by_name_must_exist() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("none.toml");
        assert_eq!(Config::load(Some(&path)).unwrap_err().kind(), ErrorKind::NotFound);
        std::fs::write(&path, "[map]\ntimeout = \"1m\"\n").unwrap();
        assert_eq!(Config::load(Some(&path)).unwrap().map.timeout, Duration::from_secs(60));
    }
}
