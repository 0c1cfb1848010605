//! Fencing by address with the blocklist of the monitors. The OSDs refuse the requests of clients on it; the monitors
//! serve them. So a client that is fenced itself can still end the fencing. An OSD refuses them from the map with the entry
//! on. The monitors send it at once, and an OSD waits for it before it serves a client that has this map already: for such
//! a client, a write of a fenced client was executed before, or never will be.
//!
//! Later releases of Ceph 16 and 17, and all since, have ranges in the blocklist. Other monitors get a command for each
//! address, `IP:0/0`, which stands for all clients there. They must never get the command for a range: they would take
//! `10.1.2.0/24` for the one client with port 0 and nonce 24, and report success. So the monitors are asked which commands
//! they know, as the program `ceph` does.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use librbd::Cluster;
use serde::Deserialize;
use serde_json::{Value, json};

use super::{RbdStore, answer, pool_error, with_timeout};
use crate::errors;
use crate::spec::RbdSpec;
use cleat_backend::network_fence::{AddressRange, NetworkClient, NetworkFenceStore};
use cleat_core::error::{Error, ErrorKind, Result};

/// How long a fence lasts in seconds: five years, as with ceph-csi. Each entry of the blocklist has an end.
const EXPIRE_S: f64 = 157_680_000.0;

/// The maximum number of addresses of a call where the blocklist has no ranges.
const MAX_ADDRESSES: u128 = 256;

/// The maximum number of commands in flight. The monitors need up to a second for a change of the blocklist, and make
/// changes that arrive meanwhile together.
const IN_FLIGHT: usize = 32;

/// The timeout of a call.
const TIMEOUT: Duration = Duration::from_secs(60);

impl NetworkFenceStore for RbdStore {
    fn fence(&self, ranges: &[AddressRange]) -> Result<()> {
        let ranges = ranges.to_vec();
        self.with_cluster(move |cluster, spec| {
            blocklist(cluster, spec)?.fence(&ranges)?;
            cluster.wait_for_latest_map().map_err(|error| pool_error(error, spec))
        })
    }

    fn unfence(&self, ranges: &[AddressRange]) -> Result<()> {
        let ranges = ranges.to_vec();
        self.with_cluster(move |cluster, spec| {
            blocklist(cluster, spec)?.unfence(&ranges)?;
            cluster.wait_for_latest_map().map_err(|error| pool_error(error, spec))
        })
    }

    fn fenced(&self) -> Result<Vec<AddressRange>> {
        self.with_cluster(|cluster, spec| {
            let entries = blocklist(cluster, spec)?.entries()?;
            let ranges: BTreeSet<AddressRange> = entries.into_iter().map(Entry::range).collect();
            Ok(ranges.into_iter().collect())
        })
    }

    fn client(&self) -> Result<NetworkClient> {
        self.with_cluster(|cluster, spec| {
            let storage = cluster.fsid().map_err(|error| pool_error(error, spec))?;
            let text = cluster.addresses().map_err(|error| pool_error(error, spec))?;
            let addresses: BTreeSet<IpAddr> = client_addresses(&text).collect();
            if addresses.is_empty() {
                let message = format!("cannot read an address of this client from {text:?}");
                return Err(Error::new(ErrorKind::Internal, message));
            }
            Ok(NetworkClient { storage, addresses: addresses.into_iter().collect() })
        })
    }
}

impl RbdStore {
    fn with_cluster<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Cluster, &RbdSpec) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let store = self.clone();
        with_timeout(TIMEOUT, &answer(self.spec.pool()), move || {
            work(store.pool.cluster(), store.spec.client())
        })
    }
}

/// The monitors' blocklist. `run` executes a command of the monitors, given as JSON, and returns its output.
struct Blocklist<R> {
    run: R,
    /// The name of the command: `blocklist`, or `blacklist` before Ceph 16.
    word: &'static str,
    has_ranges: bool,
}

/// An entry of the blocklist that stands for all clients with certain addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Entry {
    Range(AddressRange),
    Address(IpAddr),
}

/// Returns the blocklist of a cluster.
fn blocklist<'a>(
    cluster: &'a Cluster,
    spec: &'a RbdSpec,
) -> Result<Blocklist<impl Fn(&str) -> Result<String> + Sync + 'a>> {
    Blocklist::new(move |json: &str| {
        cluster.monitor_command(json).map_err(|error| refused(error, spec))
    })
}

fn refused(error: librbd::Error, spec: &RbdSpec) -> Error {
    let kind = errors::kind(&error);
    let repair = match kind {
        ErrorKind::PermissionDenied => Some(format!(
            "'profile rbd' may add to the blocklist, but not remove from it. Name another client in the \
             secret, or grant it to this one: {}",
            errors::caps_command(spec, None, ", allow command \"osd blocklist\"")
        )),
        _ => errors::repair(&error, spec),
    };
    let failed =
        Error::new(kind, "a command for the monitors' blocklist failed").with_source(error);
    match repair {
        Some(repair) => failed.with_repair(repair),
        None => failed,
    }
}

impl<R: Fn(&str) -> Result<String> + Sync> Blocklist<R> {
    /// Asks the monitors which commands they have.
    fn new(run: R) -> Result<Self> {
        let descriptions = run(&json!({"prefix": "get_command_descriptions"}).to_string())?;
        let (word, has_ranges) = commands(&descriptions)?;
        Ok(Self { run, word, has_ranges })
    }

    fn fence(&self, ranges: &[AddressRange]) -> Result<()> {
        let entries: BTreeSet<Entry> = if self.has_ranges {
            ranges.iter().copied().map(Entry::Range).collect()
        } else {
            check_count(ranges)?;
            ranges.iter().flat_map(AddressRange::addresses).map(Entry::Address).collect()
        };
        self.change("add", entries)
    }

    /// Also removes the addresses of a range that was fenced before the monitors had ranges.
    fn unfence(&self, ranges: &[AddressRange]) -> Result<()> {
        let listed = self.entries()?;
        let is_single = |range: &&AddressRange| {
            range.count() <= MAX_ADDRESSES && !listed.contains(&Entry::Range(**range))
        };
        let single: Vec<&AddressRange> = ranges.iter().filter(is_single).collect();
        let is_meant = |entry: &Entry| match entry {
            Entry::Address(address) => single.iter().any(|range| range.contains(*address)),
            Entry::Range(_) => false,
        };
        let mut entries: BTreeSet<Entry> = listed.iter().copied().filter(is_meant).collect();
        if self.has_ranges {
            entries.extend(ranges.iter().copied().map(Entry::Range));
        }
        self.change("rm", entries)
    }

    /// Adds or removes entries. Both can be repeated.
    fn change(&self, operation: &str, entries: BTreeSet<Entry>) -> Result<()> {
        let commands: Vec<String> =
            entries.into_iter().map(|entry| entry.command(operation, self.word)).collect();
        for_each(&commands, |command| (self.run)(command).map(drop))
    }

    /// Reads the entries that stand for more than one client.
    fn entries(&self) -> Result<BTreeSet<Entry>> {
        let command = json!({"prefix": format!("osd {} ls", self.word), "format": "json"});
        listed(&(self.run)(&command.to_string())?)
    }
}

impl Entry {
    fn range(self) -> AddressRange {
        match self {
            Self::Range(range) => range,
            Self::Address(address) => AddressRange::of(address),
        }
    }

    /// Returns the command that adds or removes this entry. The monitors accept no integer as the expiry.
    fn command(self, operation: &str, word: &str) -> String {
        let address = match self {
            Self::Range(range) => range.to_string(),
            Self::Address(address) => format!("{}/0", SocketAddr::new(address, 0)),
        };
        let operation_key = format!("{word}op");
        let mut command =
            json!({"prefix": format!("osd {word}"), operation_key: operation, "addr": address});
        if matches!(self, Self::Range(_)) {
            command["range"] = "range".into();
        }
        if operation == "add" {
            command["expire"] = EXPIRE_S.into();
        }
        command.to_string()
    }
}

fn check_count(ranges: &[AddressRange]) -> Result<()> {
    let count = ranges.iter().map(AddressRange::count).fold(0, u128::saturating_add);
    if count <= MAX_ADDRESSES {
        return Ok(());
    }
    let message = format!(
        "the ranges have {count} addresses; the monitors of this cluster have no ranges in the blocklist, \
         and a call can fence at most {MAX_ADDRESSES} single addresses there"
    );
    Err(Error::new(ErrorKind::Unsupported, message).with_repair(
        "name the addresses of the clients only, or upgrade the cluster (Ceph 16.2.15 has ranges)",
    ))
}

/// Runs `work` for each item, for some at the same time, and returns the first error.
fn for_each<T: Sync>(items: &[T], work: impl Fn(&T) -> Result<()> + Sync) -> Result<()> {
    let next = AtomicUsize::new(0);
    let run = || -> Result<()> {
        while let Some(item) = items.get(next.fetch_add(1, Ordering::Relaxed)) {
            work(item)?;
        }
        Ok(())
    };
    thread::scope(|scope| {
        let count = items.len().min(IN_FLIGHT);
        let threads: Vec<_> =
            (0..count).map(|_| thread::Builder::new().spawn_scoped(scope, run)).collect();
        threads.into_iter().try_for_each(|thread| {
            let thread = thread
                .map_err(|error| Error::from_io("cannot start a thread for the monitors", error))?;
            thread.join().unwrap_or_else(|_| {
                Err(Error::new(ErrorKind::Internal, "internal: a command of the monitors panicked"))
            })
        })
    })
}

/// A command of the monitors: words, and objects that describe its arguments.
#[derive(Debug, Deserialize)]
struct Description {
    sig: Vec<Value>,
}

/// Returns the name of the blocklist's command in the list of commands, and whether it knows ranges.
fn commands(descriptions: &str) -> Result<(&'static str, bool)> {
    let known: BTreeMap<String, Description> = serde_json::from_str(descriptions)
        .map_err(|error| unexpected("list of their commands", error))?;
    for word in ["blocklist", "blacklist"] {
        let is_meant = |known: &&Description| match &*known.sig {
            [first, second, Value::Object(_), ..] => *first == "osd" && *second == word,
            _ => false,
        };
        if let Some(found) = known.values().find(is_meant) {
            return Ok((word, found.sig.iter().any(|argument| argument["name"] == "range")));
        }
    }
    let message = "the monitors of this cluster have no command for the blocklist";
    Err(Error::new(ErrorKind::Unsupported, message))
}

/// An entry of one of the two lists of the blocklist.
#[derive(Debug, Deserialize)]
struct ListedEntry {
    #[serde(alias = "range")]
    addr: String,
}

/// Parses the blocklist: a list of clients and, from monitors with ranges, a list of ranges after it. Entries of single clients are
/// left out.
fn listed(text: &str) -> Result<BTreeSet<Entry>> {
    let lists: Result<Vec<Vec<ListedEntry>>, _> =
        serde_json::Deserializer::from_str(text).into_iter().collect();
    let mut lists = lists.map_err(|error| unexpected("blocklist", error))?.into_iter();
    let (clients, ranges) = (lists.next().unwrap_or_default(), lists.flatten());
    let clients = clients.iter().filter_map(|entry| {
        let (address, nonce) = client_address(&entry.addr)?;
        (address.port() == 0 && nonce == 0).then_some(Entry::Address(address.ip()))
    });
    let ranges = ranges.filter_map(|entry| {
        let range = listed_range(&entry.addr);
        if range.is_none() {
            tracing::warn!(range = entry.addr, "cannot read a range of the monitors' blocklist");
        }
        range.map(Entry::Range)
    });
    Ok(clients.chain(ranges).collect())
}

/// Parses a range as the monitors write it: the address of a client with the number of bits as its nonce.
fn listed_range(text: &str) -> Option<AddressRange> {
    let text = text.strip_prefix("cidr:").unwrap_or(text);
    let (address, bits) = client_address(text)?;
    AddressRange::new(address.ip(), u8::try_from(bits).ok()?).ok()
}

/// Parses `[v1:|v2:]IP:PORT/NONCE`, with an IPv6 address in brackets.
fn client_address(text: &str) -> Option<(SocketAddr, u64)> {
    let text =
        ["v1:", "v2:", "any:"].iter().find_map(|kind| text.strip_prefix(kind)).unwrap_or(text);
    let (address, nonce) = text.rsplit_once('/')?;
    Some((address.parse().ok()?, nonce.parse().ok()?))
}

/// Returns the addresses in the text of librados: one address, or several as `[v2:ADDRESS,v1:ADDRESS]`.
fn client_addresses(text: &str) -> impl Iterator<Item = IpAddr> {
    let list = text.strip_prefix("[v").and_then(|_| text.strip_prefix('[')?.strip_suffix(']'));
    let addresses = list.unwrap_or(text).split(',');
    addresses.filter_map(|one| client_address(one).map(|(address, _)| address.ip()))
}

fn unexpected(what: &str, error: serde_json::Error) -> Error {
    let message = format!("cannot read the monitors' {what}");
    Error::new(ErrorKind::Internal, message).with_source(error)
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    /// Monitors with a blocklist, which answer as those of a version of Ceph do.
    struct Monitors {
        /// The word of their command, and whether it knows ranges.
        version: (&'static str, bool),
        /// The texts of addresses and ranges.
        lists: Mutex<(BTreeSet<String>, BTreeSet<String>)>,
        /// The commands that change the list.
        changes: Mutex<Vec<Value>>,
    }

    impl Monitors {
        fn new(word: &'static str, has_ranges: bool) -> Self {
            Self { version: (word, has_ranges), lists: Mutex::default(), changes: Mutex::default() }
        }

        fn run(&self, json: &str) -> Result<String> {
            let (word, has_ranges) = self.version;
            let command: Value = serde_json::from_str(json).unwrap();
            let prefix = command["prefix"].as_str().unwrap();
            let mut lists = self.lists.lock().unwrap();
            if prefix == "get_command_descriptions" {
                return Ok(descriptions(word, has_ranges));
            }
            if prefix == format!("osd {word} ls") {
                let of = |key: &str, list: &BTreeSet<String>| {
                    let entries = list.iter().map(|text| json!({key: text, "until": "2031-01-01"}));
                    Value::Array(entries.collect()).to_string()
                };
                let ranges = if has_ranges { of("range", &lists.1) } else { String::new() };
                return Ok(format!("\n{}{ranges}", of("addr", &lists.0)));
            }
            assert_eq!(prefix, format!("osd {word}"));
            let mut address = command["addr"].as_str().unwrap().to_owned();
            let list = match command.get("range") {
                Some(_) => {
                    assert!(has_ranges, "{command}");
                    let (first, bits) = address.rsplit_once('/').unwrap();
                    address = format!("{}/{bits}", SocketAddr::new(first.parse().unwrap(), 0));
                    &mut lists.1
                }
                None => &mut lists.0,
            };
            if command[format!("{word}op")] == "add" {
                assert!(command["expire"].is_f64(), "{command}");
                list.insert(address);
            } else {
                list.remove(&address);
            }
            self.changes.lock().unwrap().push(command);
            Ok(String::new())
        }

        fn blocklist(&self) -> Blocklist<impl Fn(&str) -> Result<String> + Sync + '_> {
            Blocklist::new(|json: &str| self.run(json)).unwrap()
        }

        fn fenced(&self) -> Vec<String> {
            let entries = self.blocklist().entries().unwrap();
            let ranges: BTreeSet<AddressRange> = entries.into_iter().map(Entry::range).collect();
            ranges.iter().map(AddressRange::to_string).collect()
        }
    }

    fn descriptions(word: &str, has_ranges: bool) -> String {
        let mut sig = vec![json!("osd"), json!(word)];
        sig.extend(has_ranges.then(|| json!({"name": "range", "req": "false"})));
        sig.push(json!({"name": format!("{word}op"), "strings": "add|rm"}));
        json!({
            "cmd000": {"sig": ["osd", word, "ls"], "help": "show"},
            "cmd001": {"sig": sig, "help": "add or remove"},
            "cmd002": {"sig": ["osd", "df", {"name": "range"}], "help": ""},
        })
        .to_string()
    }

    fn ranges(texts: &[&str]) -> Vec<AddressRange> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    #[test]
    fn the_commands_of_both_forms() {
        let range = Entry::Range("fd00::/64".parse().unwrap());
        let address = |text: &str| Entry::Address(text.parse().unwrap());
        for (command, expected) in [
            (
                range.command("add", "blocklist"),
                r#"{"addr":"fd00::/64","blocklistop":"add","expire":157680000.0,"prefix":"osd blocklist","range":"range"}"#,
            ),
            (
                range.command("rm", "blocklist"),
                r#"{"addr":"fd00::/64","blocklistop":"rm","prefix":"osd blocklist","range":"range"}"#,
            ),
            (
                address("10.1.2.3").command("add", "blacklist"),
                r#"{"addr":"10.1.2.3:0/0","blacklistop":"add","expire":157680000.0,"prefix":"osd blacklist"}"#,
            ),
            (
                address("fd00::7").command("rm", "blocklist"),
                r#"{"addr":"[fd00::7]:0/0","blocklistop":"rm","prefix":"osd blocklist"}"#,
            ),
        ] {
            assert_eq!(command, expected);
        }
    }

    #[test]
    fn a_fence_is_a_range_where_the_monitors_know_ranges() {
        let monitors = Monitors::new("blocklist", true);
        let wanted = ["10.1.0.0/16", "10.9.0.7/32", "fd00::/64"];
        for _ in 0..2 {
            monitors.blocklist().fence(&ranges(&wanted)).unwrap();
            assert_eq!(monitors.fenced(), wanted);
        }
        let changes = monitors.changes.lock().unwrap().clone();
        assert_eq!(changes.len(), 6);
        assert!(changes.iter().all(|command| command["range"] == "range"), "{changes:?}");
        for _ in 0..2 {
            monitors.blocklist().unfence(&ranges(&wanted[..2])).unwrap();
            assert_eq!(monitors.fenced(), ["fd00::/64"]);
        }
    }

    #[test]
    fn a_fence_is_single_addresses_where_the_monitors_know_no_ranges() {
        for word in ["blocklist", "blacklist"] {
            let monitors = Monitors::new(word, false);
            monitors.run(&Entry::Address([10, 1, 2, 9].into()).command("add", word)).unwrap();
            let wanted = ranges(&["10.1.2.0/30", "fd00::6/127"]);
            for _ in 0..2 {
                monitors.blocklist().fence(&wanted).unwrap();
                let expected = ["10.1.2.0", "10.1.2.1", "10.1.2.2", "10.1.2.3", "10.1.2.9"];
                let mut expected = expected.map(|address| format!("{address}/32")).to_vec();
                expected.extend(["fd00::6/128", "fd00::7/128"].map(str::to_owned));
                assert_eq!(monitors.fenced(), expected);
            }
            for _ in 0..2 {
                monitors.blocklist().unfence(&wanted).unwrap();
                assert_eq!(monitors.fenced(), ["10.1.2.9/32"]);
            }
        }
    }

    #[test]
    fn single_addresses_have_a_limit() {
        let monitors = Monitors::new("blocklist", false);
        monitors.blocklist().fence(&ranges(&["10.1.2.0/24"])).unwrap();
        assert_eq!(monitors.fenced().len(), 256);
        for texts in
            [&["10.1.2.0/24", "10.1.3.0/32"][..], &["10.1.0.0/16"], &["fd00::/48"], &["::/0"]]
        {
            let error = monitors.blocklist().fence(&ranges(texts)).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Unsupported);
            assert!(error.message().contains("at most 256"), "{error}");
        }
        // A larger range cannot have been fenced here, so nothing of it is removed.
        monitors.blocklist().unfence(&ranges(&["10.1.0.0/16"])).unwrap();
        assert_eq!(monitors.fenced().len(), 256);
    }

    #[test]
    fn single_addresses_are_removed_after_an_upgrade_unless_the_range_is_fenced() {
        let mut monitors = Monitors::new("blocklist", false);
        let both = ranges(&["10.1.2.0/31", "10.1.3.0/31"]);
        monitors.blocklist().fence(&both).unwrap();
        monitors.version.1 = true;
        monitors.blocklist().fence(&both[..1]).unwrap();
        monitors.blocklist().unfence(&both).unwrap();
        assert_eq!(monitors.fenced(), ["10.1.2.0/32", "10.1.2.1/32"]);
        monitors.blocklist().unfence(&both[..1]).unwrap();
        assert!(monitors.fenced().is_empty());
    }

    #[test]
    fn single_clients_are_no_entries() {
        let text = r#"[{"addr":"10.1.2.3:0/4711","until":"x"},{"addr":"10.1.2.3:6800/0","until":"x"},
            {"addr":"10.1.2.4:0/0","until":"x"},{"addr":"[fd00::7]:0/0","until":"x"},{"addr":"-","until":"x"}]
            [{"range":"192.168.1.0:0/24","until":"x"},{"range":"cidr:[fd00::]:0/64","until":"x"},
            {"range":"192.168.1.0:0/99","until":"x"}]"#;
        let found: Vec<String> =
            listed(text).unwrap().into_iter().map(|entry| entry.range().to_string()).collect();
        assert_eq!(found, ["192.168.1.0/24", "fd00::/64", "10.1.2.4/32", "fd00::7/128"]);
        assert!(listed("\n[]\n").unwrap().is_empty());
        assert!(listed("{").is_err());
    }

    #[test]
    fn addresses_of_a_client() {
        for (text, expected) in [
            ("10.1.2.3:0/4711", &["10.1.2.3"][..]),
            ("v2:10.1.2.3:0/4711", &["10.1.2.3"]),
            ("[v2:10.1.2.3:0/47,v1:10.1.2.4:0/11]", &["10.1.2.3", "10.1.2.4"]),
            ("[fd00::7]:0/4711", &["fd00::7"]),
            ("-", &[]),
        ] {
            let found: Vec<String> = client_addresses(text).map(|one| one.to_string()).collect();
            assert_eq!(found, expected, "{text}");
        }
    }

    #[test]
    fn monitors_without_the_command() {
        assert_eq!(commands(&descriptions("blocklist", true)).unwrap(), ("blocklist", true));
        assert_eq!(commands(&descriptions("blocklist", false)).unwrap(), ("blocklist", false));
        assert_eq!(commands("{}").unwrap_err().kind(), ErrorKind::Unsupported);
        assert_eq!(commands("[1]").unwrap_err().kind(), ErrorKind::Internal);
    }
}
