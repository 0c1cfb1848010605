//! The daemon's configuration: a TOML file, flags over it, checked as a whole.
//!
//! Every key with its meaning and default stands in `systemd/cleat.toml`, which a test here keeps
//! in step.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Deserialize;

use cleat_backend::uri::parse_size_or_zero;
use cleat_core::error::{Error, ErrorKind, Result};
use cleat_core::policy::{OnOutage, Policy, RateLimits};
use cleat_telemetry::{Format, Log};

/// Where the configuration is looked for when no other place is given. May be absent.
pub const DEFAULT_PATH: &str = "/etc/cleat/cleat.toml";

/// The most connections of one device: each costs a thread, and the kernel 128 tags.
pub const MAX_CONNECTIONS: u32 = 16;

/// The longest wait that may be asked for, in seconds.
pub const MAX_TIMEOUT_S: u32 = 86_400;

/// The longest name of a node: that of a host.
const MAX_NODE_NAME: usize = 253;

/// Of every error in a configuration. `make install` puts the file there.
const SHIPPED: &str = "every key with its default stands in share/doc/cleat/cleat.toml";

/// The longest file, in bytes.
const MAX_FILE: u64 = 1 << 20;

/// Everything that can be configured.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// Sockets; gone after a reboot.
    pub runtime_dir: PathBuf,
    /// The journal; kept.
    pub state_dir: PathBuf,
    /// The control API; `None`: `cleat.sock` in the runtime directory.
    pub socket: Option<PathBuf>,
    /// This node among all that use the same storage; empty: the host's name.
    pub node_name: String,
    /// Whether the end of the daemon is the end of its mappings.
    pub unmap_on_shutdown: bool,
    /// Whether the daemon loads the nbd module when it is missing.
    pub modprobe: bool,
    /// Logs.
    pub log: LogConfig,
    /// For what a call of `map` leaves open.
    pub map: MapConfig,
    /// Bounds.
    pub limits: Limits,
    /// The processes that serve.
    pub workers: WorkersConfig,
    /// The endpoint for Prometheus.
    pub metrics: MetricsConfig,
}

/// Logs.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LogConfig {
    /// Their form.
    pub format: Format,
    /// `error`, `warn`, `info`, `debug`, `trace`, or a filter of tracing.
    pub level: String,
}

/// For what a call of `map` leaves open.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct MapConfig {
    /// Connections per device.
    pub connections: u32,
    /// How long new I/O waits for a worker before it fails. Whole seconds.
    #[serde(deserialize_with = "duration")]
    pub dead_connection_timeout: Duration,
    /// How soon after a repair the kernel repeats what a dead worker left.
    #[serde(deserialize_with = "duration")]
    pub replay_delay: Duration,
    /// What becomes of requests while the backend cannot be reached.
    pub on_outage: OnOutage,
    /// Requests per second; 0: no limit.
    pub iops: u64,
    /// Bytes per second; 0: no limit.
    #[serde(deserialize_with = "size_or_zero")]
    pub bps: u64,
    /// Makes a device quiet for a snapshot in place of freezing its file systems.
    #[serde(deserialize_with = "path_or_none")]
    pub quiesce_hook: Option<PathBuf>,
    /// The longest that a device is kept quiet.
    #[serde(deserialize_with = "duration")]
    pub quiesce_deadline: Duration,
    /// Bound on calls that give none.
    #[serde(deserialize_with = "duration")]
    pub timeout: Duration,
}

/// Bounds.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Limits {
    /// Mappings at one time.
    pub mappings: usize,
}

/// The processes that serve.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct WorkersConfig {
    /// The control group that they are put into; `None`: they stay in the daemon's.
    #[serde(deserialize_with = "path_or_none")]
    pub cgroup: Option<PathBuf>,
    /// Whether the daemon has those that another build has left handed over to its own.
    pub upgrade_at_start: bool,
}

/// The endpoint for Prometheus.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct MetricsConfig {
    /// Where it listens.
    #[serde(deserialize_with = "listen")]
    pub listen: Listen,
    /// Of the unix socket.
    #[serde(deserialize_with = "mode")]
    pub socket_mode: u32,
    /// Whether it may listen beyond this machine.
    pub allow_remote: bool,
}

/// Where the metrics are served.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Listen {
    /// Nowhere.
    Off,
    /// On `metrics.sock` in the runtime directory.
    Unix,
    /// On a TCP port.
    Tcp(SocketAddr),
}

impl Default for MetricsConfig {
    fn default() -> Self {
        Self { listen: Listen::Unix, socket_mode: 0o600, allow_remote: false }
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
            metrics: MetricsConfig::default(),
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
            // With one connection the replay delay can be short; with several, a request that takes
            // longer than the kernel's tick kills a live socket (nbd_xmit_timeout).
            connections: 1,
            dead_connection_timeout: Duration::from_secs(300),
            replay_delay: Duration::from_secs(1),
            on_outage: OnOutage::Queue,
            iops: 0,
            bps: 0,
            quiesce_hook: None,
            quiesce_deadline: Duration::from_secs(30),
            timeout: Duration::from_secs(30),
        }
    }
}

impl MapConfig {
    /// The policy of a mapping that asks for none.
    pub fn policy(&self) -> Policy {
        let limits = RateLimits { iops: self.iops, bytes_per_s: self.bps };
        Policy { outage: self.on_outage, limits }
    }
}

impl Default for Limits {
    fn default() -> Self {
        Self { mappings: 1024 }
    }
}

impl Config {
    /// Reads `path`, or the default place. The default one may be absent, a named one may not.
    ///
    /// # Errors
    /// `InvalidArgument`, with the line and the keys that are valid.
    pub fn load(path: Option<&Path>) -> Result<Self> {
        let place = path.unwrap_or(Path::new(DEFAULT_PATH));
        let failed = |error| {
            Error::from_io(format!("cannot read the configuration {}", place.display()), error)
                .with_repair("make it readable; without --config, none is needed")
        };
        let text = match read(place) {
            Err(error) if path.is_none() && error.kind() == std::io::ErrorKind::NotFound => {
                return Ok(Self::default());
            }
            other => other.map_err(failed)?,
        };
        Self::parse(&text, place)
    }

    /// Parses and checks a configuration; `place` is for messages.
    ///
    /// # Errors
    /// As [`Config::load`].
    pub fn parse(text: &str, place: &Path) -> Result<Self> {
        let config: Self = toml::from_str(text).map_err(|error| {
            let line = error.span().map_or(0, |span| {
                1 + text.as_bytes()[..span.start.min(text.len())]
                    .iter()
                    .filter(|byte| **byte == b'\n')
                    .count()
            });
            // One line: the first is the message, what follows shows the file again.
            let message = error.message().lines().next().unwrap_or_default().to_owned();
            Error::new(
                ErrorKind::InvalidArgument,
                format!("{}, line {line}: {message}", place.display()),
            )
            .with_repair(SHIPPED)
        })?;
        config.check(place)?;
        Ok(config)
    }

    /// The control API's socket.
    pub fn socket(&self) -> PathBuf {
        self.socket.clone().unwrap_or_else(|| self.runtime_dir.join("cleat.sock"))
    }

    /// What is logged, and how.
    pub fn log(&self) -> Log {
        Log { format: self.log.format, filter: self.log.level.clone() }
    }

    /// Checks what no type says. Flags that were put over a file are checked by this again.
    ///
    /// # Errors
    /// `InvalidArgument`, with the key.
    pub fn check(&self, place: &Path) -> Result<()> {
        let invalid = |key: &str, why: String| {
            let message = format!("{}: {key} {why}", place.display());
            Err(Error::new(ErrorKind::InvalidArgument, message).with_repair(SHIPPED))
        };
        for (key, path) in [
            ("runtime_dir", Some(&self.runtime_dir)),
            ("state_dir", Some(&self.state_dir)),
            ("socket", self.socket.as_ref()),
            ("map.quiesce_hook", self.map.quiesce_hook.as_ref()),
            ("workers.cgroup", self.workers.cgroup.as_ref()),
        ] {
            if path.is_some_and(|path| !path.is_absolute()) {
                return invalid(key, "must be an absolute path".to_owned());
            }
        }
        if self.node_name.len() > MAX_NODE_NAME
            || !self.node_name.bytes().all(|byte| byte.is_ascii_graphic())
        {
            let why = format!("must be a word of at most {MAX_NODE_NAME} printable characters");
            return invalid("node_name", why);
        }
        let most = MAX_CONNECTIONS;
        if !(1..=most).contains(&self.map.connections) {
            return invalid("map.connections", format!("must be 1 to {most}"));
        }
        let day = Duration::from_secs(u64::from(MAX_TIMEOUT_S));
        let whole = self.map.dead_connection_timeout.subsec_nanos() == 0;
        if !whole || !(Duration::from_secs(1)..=day).contains(&self.map.dead_connection_timeout) {
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
        let quiet = Duration::from_secs(1)..=Duration::from_secs(300);
        if !quiet.contains(&self.map.quiesce_deadline) {
            return invalid("map.quiesce_deadline", "must be 1s to 5m".to_owned());
        }
        if let Err(error) = self.map.policy().limits.check() {
            return invalid("map.iops or map.bps", format!("is out of range: {}", error.message()));
        }
        if !(1..=65536).contains(&self.limits.mappings) {
            return invalid("limits.mappings", "must be 1 to 65536".to_owned());
        }
        if let Listen::Tcp(address) = self.metrics.listen
            && !address.ip().is_loopback()
            && !self.metrics.allow_remote
        {
            let why = format!(
                "must be a loopback address: {} can be reached from other machines, which see every \
                 volume's name and URI; metrics.allow_remote = true allows it",
                address.ip()
            );
            return invalid("metrics.listen", why);
        }
        Log::check_filter(&self.log.level)
            .or_else(|why| invalid("log.level", format!("is no level or filter: {why}")))
    }
}

fn read(path: &Path) -> std::io::Result<String> {
    use std::io::Read;
    let mut text = String::new();
    std::fs::File::open(path)?.take(MAX_FILE + 1).read_to_string(&mut text)?;
    if text.len() as u64 > MAX_FILE {
        return Err(std::io::Error::other("the file is longer than a configuration may be"));
    }
    Ok(text)
}

/// A duration as people write it: "30s", "5m", "1h 30m".
fn duration<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<Duration, D::Error> {
    let text = String::deserialize(deserializer)?;
    humantime::parse_duration(&text).map_err(|error| {
        serde::de::Error::custom(format!("{text:?} is no duration such as \"30s\": {error}"))
    })
}

/// A size as people write it, "100M"; "0" is none.
fn size_or_zero<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<u64, D::Error> {
    let text = String::deserialize(deserializer)?;
    parse_size_or_zero(&text).map_err(|error| serde::de::Error::custom(error.message()))
}

/// A path; "" is none.
fn path_or_none<'de, D: serde::Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<PathBuf>, D::Error> {
    let path = PathBuf::deserialize(deserializer)?;
    Ok((!path.as_os_str().is_empty()).then_some(path))
}

/// "off", "unix", or an address and a port.
fn listen<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<Listen, D::Error> {
    let text = String::deserialize(deserializer)?;
    match text.as_str() {
        "off" => Ok(Listen::Off),
        "unix" => Ok(Listen::Unix),
        address => address.parse().map(Listen::Tcp).map_err(|_| {
            serde::de::Error::custom(format!(
                "{text:?} is neither \"unix\" nor \"off\" nor an address such as \"127.0.0.1:9599\""
            ))
        }),
    }
}

/// The mode of a file in octal, as chmod takes it: only read and write, which sockets know.
fn mode<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<u32, D::Error> {
    let text = String::deserialize(deserializer)?;
    let mode = u32::from_str_radix(&text, 8).ok().filter(|mode| mode & !0o666 == 0);
    mode.filter(|mode| mode & 0o600 == 0o600).ok_or_else(|| {
        serde::de::Error::custom(format!("{text:?} is no mode such as \"0600\" or \"0660\""))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Config> {
        Config::parse(text, Path::new("cleat.toml"))
    }

    #[test]
    fn the_shipped_file_says_the_defaults_and_every_key() {
        let text = include_str!("../../systemd/cleat.toml");
        assert_eq!(parse(text).unwrap(), Config::default());
        // Every key stands there, commented out, with its default.
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
            "timeout",
            "mappings",
            "cgroup",
            "upgrade_at_start",
            "listen",
            "socket_mode",
            "allow_remote",
        ] {
            assert!(uncommented.lines().any(|l| l.starts_with(&format!("{key} ="))), "{key}");
        }
    }

    #[test]
    fn an_unknown_key_is_named_with_its_line_and_the_valid_ones() {
        let error = parse("modprobe = true\n\n[map]\nconnection = 3\n").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        let text = error.report();
        assert!(text.contains("line 4") && text.contains("`connection`"), "{text}");
        assert!(text.contains("dead_connection_timeout"), "{text}");
    }

    #[test]
    fn wrong_values_are_named() {
        for (text, part) in [
            ("state_dir = \"var\"", "state_dir"),
            ("node_name = \"a b\"", "node_name"),
            ("[map]\nconnections = 0", "map.connections"),
            ("[map]\nconnections = 1000", "map.connections"),
            ("[map]\ntimeout = \"soon\"", "30s"),
            ("[map]\ntimeout = 30", "line 2"),
            ("[map]\ndead_connection_timeout = \"1500ms\"", "whole"),
            ("[map]\nreplay_delay = \"5ms\"", "100ms"),
            ("[map]\non_outage = \"wait\"", "outage"),
            ("[map]\nbps = \"100\"", "map.bps"),
            ("[map]\nbps = \"fast\"", "fast"),
            ("[limits]\nmappings = 0", "limits.mappings"),
            ("[workers]\ncgroup = \"cleat-workers\"", "workers.cgroup"),
            ("[log]\nformat = \"xml\"", "journald"),
            ("[log]\nlevel = \"cleat=loud\"", "log.level"),
            ("[metrics]\nlisten = \"9599\"", "127.0.0.1:9599"),
            ("[metrics]\nlisten = \"0.0.0.0:9599\"", "allow_remote"),
            ("[metrics]\nlisten = \"[2001:db8::1]:9599\"", "loopback"),
            ("[metrics]\nsocket_mode = \"0777\"", "0660"),
            ("[metrics]\nsocket_mode = \"0060\"", "0660"),
            ("modprobe", "line 1"),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.report().contains(part), "{text}: {}", error.report());
            assert_eq!(error.kind(), ErrorKind::InvalidArgument);
            assert!(error.repair().is_some(), "{text}");
        }
    }

    #[test]
    fn metrics_are_served_where_the_file_says() {
        let listen = |text: &str| parse(&format!("[metrics]\n{text}")).unwrap().metrics;
        assert_eq!(listen("listen = \"off\"").listen, Listen::Off);
        let local = Listen::Tcp("[::1]:9599".parse().unwrap());
        assert_eq!(listen("listen = \"[::1]:9599\"").listen, local);
        let anywhere = listen("listen = \"0.0.0.0:9599\"\nallow_remote = true\n");
        assert_eq!(anywhere.listen, Listen::Tcp("0.0.0.0:9599".parse().unwrap()));
        assert_eq!(listen("socket_mode = \"660\"").socket_mode, 0o660);
    }

    #[test]
    fn a_named_file_must_exist() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("none.toml");
        assert_eq!(Config::load(Some(&path)).unwrap_err().kind(), ErrorKind::NotFound);
        std::fs::write(&path, "[map]\ntimeout = \"1m\"\n").unwrap();
        assert_eq!(Config::load(Some(&path)).unwrap().map.timeout, Duration::from_secs(60));
    }
}
