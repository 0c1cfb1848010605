//! Fencing for administrators: lists the clients of an image (by claim, lock, watchers and blocklist),
//! fences them and removes them from the blocklist.
//!
//! Fencing takes the image over and releases it again. The claim record that remains shows that the
//! fenced client has lost the image, so that its mapping does not resume, and that any client may claim
//! the image. A client is removed from the blocklist only if it is proved that nothing of it is left; there
//! is no option to force it. An entry that stays does no harm, because a new client has a new address. An
//! entry that is removed too early lets an old write take effect.

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use librbd::{Cluster, Image, Open};
use serde::Deserialize;

use crate::claim::beside::Eviction;
use crate::claim::decision::{Liveness, Purpose};
use crate::claim::header::ImageHeader;
use crate::claim::record::{self, Claim};
use crate::claim::{self, ClaimAttempt, SOON_S};
use crate::clients::KeptClient;
use crate::connection::{config, load_library};
use crate::errors::{self, open_error};
use crate::keyring::ClientKey;
use crate::spec::RbdSpec;
use crate::timeouts::{answer, with_timeout_at};
use cleat_backend::claimant::{Claimant, is_same_node};
use cleat_backend::fence::{Client, Fence, Standing, Target};
use cleat_backend::uri::invalid;
use cleat_core::clock::{Clock, SystemClock};
use cleat_core::error::{Error, ErrorKind, Result};

/// The fencing capability of an image, which is opened for each call.
#[derive(Debug)]
pub(crate) struct RbdFence {
    pub(crate) spec: RbdSpec,
    pub(crate) name: String,
}

impl RbdFence {
    pub(crate) fn new(spec: &RbdSpec) -> Result<Self> {
        load_library()?;
        if spec.snapshot.is_some() || spec.shared {
            let message = "snapshots and images with lock=shared cannot be fenced";
            return Err(invalid(message).with_repair("name the image itself, without lock=shared"));
        }
        Ok(Self { spec: spec.clone(), name: spec.image_name() })
    }

    /// Opens the image and runs `work` with it, at most until `deadline`. librbd only opens the header of
    /// the image: no data is read or written, and no content key is needed.
    pub(crate) fn call<T: Send + 'static>(
        &self,
        how: Open,
        deadline: Instant,
        work: impl FnOnce(&Image, &str) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let (spec, name) = (self.spec.clone(), self.name.clone());
        let left = deadline.saturating_duration_since(SystemClock.now());
        with_timeout_at(&place(&spec), left, &answer(&self.name), move || {
            let failed = |error| open_error(error, &name, &spec);
            let open = |cluster: &Arc<Cluster>| {
                let pool = cluster.pool(&spec.pool, spec.namespace.as_deref()).map_err(failed)?;
                pool.open(&spec.image, None, how).map_err(|error| {
                    let missing = errors::missing_namespace(&error, cluster, &spec);
                    missing.unwrap_or_else(|| failed(error))
                })
            };
            let key = ClientKey::load(&spec)?;
            let (image, client) = KeptClient::with(config(&spec), key, failed, open)?;
            let done = work(&image, &name);
            drop(image);
            if done.is_ok() {
                client.keep();
            }
            done.map_err(|error| errors::with_caps_repair(error, &spec))
        })
    }
}

/// Returns the pool of an image and its cluster.
fn place(spec: &RbdSpec) -> String {
    let conf = spec.conf.as_deref().unwrap_or(Path::new("the default ceph.conf"));
    format!("the pool {} of {}", spec.pool, conf.display())
}

impl Fence for RbdFence {
    fn clients(&self, deadline: Instant) -> Result<Vec<Client>> {
        self.call(Open::ReadOnly, deadline, clients)
    }

    fn targets(&self, address: Option<&str>, deadline: Instant) -> Result<Vec<Target>> {
        let chosen = |client: &Client| match address {
            Some(address) => client.address == address,
            None => may_write(client),
        };
        let targets: Vec<Target> = self
            .clients(deadline)?
            .into_iter()
            .filter(chosen)
            .map(|client| Target { consequence: consequence(&client, &self.name), client })
            .collect();
        if targets.is_empty() { Err(no_client(&self.name, address)) } else { Ok(targets) }
    }

    fn fence(&self, targets: &[Target], claimant: &Claimant, deadline: Instant) -> Result<()> {
        let claimant = claimant.clone();
        let addresses: Vec<String> =
            targets.iter().map(|target| target.client.address.clone()).collect();
        if targets.iter().any(|target| may_write(&target.client)) {
            return self.call(Open::Write, deadline, move |image, name| {
                let claim = claim::of(image, name)?;
                if claim.is_some_and(|claim| claim.active_shared().next().is_some()) {
                    return evict(image, name, &claimant, &addresses);
                }
                take_over_and_release(image, name, &claimant, Some(&addresses))
            });
        }
        // They have the image open without a claim, or another client has taken over from them.
        self.call(Open::ReadOnly, deadline, move |image, _| {
            let cluster = image.pool().cluster();
            let fence = |address: &String| claim::fence_client(cluster, address, Liveness::MayLive);
            addresses.iter().try_for_each(fence)
        })
    }

    fn unfence(&self, address: &str, here: &Claimant, deadline: Instant) -> Result<bool> {
        if !record::is_address(address) {
            return Err(invalid(format!("{address:?} is not the address of a client"))
                .with_repair("write IP:PORT/NONCE; cleat fence ls shows the addresses"));
        }
        let (address, here, spec) = (address.to_owned(), here.clone(), self.spec.clone());
        self.call(Open::ReadOnly, deadline, move |image, name| {
            let clients = clients(image, name)?;
            let claim = claim::of(image, name)?;
            let fenced = |c: &&Client| c.address == address && c.cut_off_until.is_some();
            if let Err(not_proved) = prove_ended(&address, claim.as_ref(), &clients, &here) {
                let message =
                    format!("{address} is not removed from the blocklist: {}", not_proved.message);
                return Err(Error::new(ErrorKind::InUse, message).with_repair(not_proved.repair));
            }
            if !clients.iter().any(|client| fenced(&client)) {
                return Ok(false);
            }
            let removed = image.pool().cluster().blocklist_remove(&address);
            removed.map_err(|error| not_removed(error, &address, &spec))?;
            Ok(true)
        })
    }
}

/// Returns whether a client holds the lock of the image, or its claim.
fn may_write(client: &Client) -> bool {
    client.holds_lock || client.claim == Some(Standing::Held)
}

/// Claims the image, which fences the clients in `only` (with `None`, every client that has to be fenced),
/// and releases it.
pub(crate) fn take_over_and_release(
    image: &Image,
    name: &str,
    claimant: &Claimant,
    only: Option<&[String]>,
) -> Result<()> {
    let (header, purpose) = (&ImageHeader { image, name }, Purpose::Open);
    let attempt = ClaimAttempt { header, name, claimant, purpose, only, clock: &SystemClock };
    let taken = attempt.acquire()?.map_err(|lost| {
        Error::new(ErrorKind::Internal, format!("internal: cannot take over {name}: {lost}"))
    })?;
    claim::release(image, &taken, name)?;
    image.lock_release().map_err(|error| errors::image_error(error, name))
}

/// Fences clients of an image with shared claims, and removes their claims. The other claims stay.
fn evict(image: &Image, name: &str, claimant: &Claimant, addresses: &[String]) -> Result<()> {
    let (header, clock) = (&ImageHeader { image, name }, &SystemClock);
    addresses.iter().try_for_each(|address| {
        // Also one without a claim, for example another tool that has the lock.
        claim::fence_client(image.pool().cluster(), address, Liveness::MayLive)?;
        Eviction { header, name, claimant, address, clock }.run()
    })
}

/// Lists the clients of the image: those of the claims first, then those that were fenced before, and then
/// lock holders and watchers without a claim.
fn clients(image: &Image, name: &str) -> Result<Vec<Client>> {
    let failed = |error| errors::image_error(error, name);
    let claim = claim::of(image, name)?;
    let mut clients: Vec<Client> = Vec::new();
    if let Some(claim) = &claim {
        let standing = |released| if released { Standing::Released } else { Standing::Held };
        let shared = claim.shared.iter();
        clients.extend(shared.map(|known| claimed_client(&known.client, standing(known.released))));
        let alone = claimed_client(&claim.client, standing(claim.released));
        let earlier = claim.cut.iter().rev().map(|client| claimed_client(client, Standing::Taken));
        for client in std::iter::once(alone).chain(earlier) {
            if clients.iter().all(|known| known.address != client.address) {
                clients.push(client);
            }
        }
    }
    for locker in image.lockers().map_err(failed)? {
        entry(&mut clients, &locker.address).holds_lock = true;
    }
    for watcher in image.watchers().map_err(failed)? {
        entry(&mut clients, &watcher.address).watches = true;
    }
    for listed in blocklist(image.pool().cluster(), name)? {
        if let Some(client) = clients.iter_mut().find(|client| client.address == listed.addr) {
            client.cut_off_until = Some(listed.until);
        }
    }
    // A former client that is not on the blocklist any more is not of interest.
    clients.retain(|c| c.claim != Some(Standing::Taken) || c.cut_off_until.is_some() || c.watches);
    Ok(clients)
}

fn claimed_client(client: &record::Client, standing: Standing) -> Client {
    let claimed = client.generation > 0;
    let named = |text: &str| (claimed && !text.is_empty()).then(|| text.to_owned());
    Client {
        address: client.address.clone(),
        node: named(&client.node),
        boot_id: named(&client.boot_id),
        mapping_id: named(&client.mapping_id),
        generation: claimed.then_some(client.generation),
        since_s: claimed.then_some(client.since),
        claim: claimed.then_some(standing),
        ..Client::default()
    }
}

/// Returns the client at `address`, which is added if it is not in the list.
fn entry<'a>(clients: &'a mut Vec<Client>, address: &str) -> &'a mut Client {
    let known = clients.iter().position(|client| client.address == address);
    let index = known.unwrap_or_else(|| {
        clients.push(Client { address: address.to_owned(), ..Client::default() });
        clients.len() - 1
    });
    &mut clients[index]
}

/// An entry of the monitors' blocklist. Newer monitors also list entries of another form, for ranges.
#[derive(Debug, Deserialize)]
pub(crate) struct BlocklistEntry {
    pub(crate) addr: String,
    until: String,
}

impl BlocklistEntry {
    /// Whether the entry is one of a client that has ended: it ends soon, or has ended. `now_s` is in seconds since the Unix
    /// epoch. An entry whose end cannot be read is not.
    pub(crate) fn ends_soon(&self, now_s: u64) -> bool {
        let until = jiff::fmt::strtime::parse("%Y-%m-%dT%H:%M:%S%.f%z", &self.until);
        let until_s = until.and_then(|until| until.to_timestamp()).map(jiff::Timestamp::as_second);
        let soon_s = i64::try_from(now_s).unwrap_or(i64::MAX).saturating_add(SOON_S);
        until_s.is_ok_and(|until_s| until_s <= soon_s)
    }
}

pub(crate) fn blocklist(cluster: &Cluster, name: &str) -> Result<Vec<BlocklistEntry>> {
    let list = |word: &str| {
        cluster.monitor_command(&format!("{{\"prefix\": \"osd {word} ls\", \"format\": \"json\"}}"))
    };
    let text = match list("blocklist") {
        // Ceph 15 knows the command by its older name only.
        Err(error) if error.errno() == Some(libc::EINVAL) => list("blacklist"),
        other => other,
    };
    parse_blocklist(&text.map_err(|error| errors::image_error(error, name))?)
}

fn parse_blocklist(json: &str) -> Result<Vec<BlocklistEntry>> {
    // The text has two lists: first the clients, then the ranges.
    let lists: Result<Vec<Vec<serde_json::Value>>, _> =
        serde_json::Deserializer::from_str(json).into_iter().collect();
    let lists = lists.map_err(|error| {
        let message = "cannot parse the monitors' blocklist";
        Error::new(ErrorKind::Internal, message).with_source(error)
    })?;
    // Entries of any other form are skipped: they do not name a single client.
    let entries = lists.into_iter().flatten();
    Ok(entries.filter_map(|entry| serde_json::from_value(entry).ok()).collect())
}

/// Describes the consequence of fencing a client in a sentence.
fn consequence(client: &Client, name: &str) -> String {
    let on = |what: &str, text: &Option<String>| {
        text.as_ref().map(|text| format!(" of the {what} {text}")).unwrap_or_default()
    };
    let (node, mapping) = (on("node", &client.node), on("mapping", &client.mapping_id));
    let lock = if client.holds_lock { "its lock is broken, " } else { "" };
    format!(
        "the client {}{mapping}{node} is cut off from the whole cluster: {lock}data that it has not \
         yet written to {name} is lost, and file systems on the device there fail",
        client.address
    )
}

fn no_client(name: &str, address: Option<&str>) -> Error {
    match address {
        None => Error::new(ErrorKind::NotFound, format!("no client may write to {name} now")),
        Some(address) => {
            Error::new(ErrorKind::NotFound, format!("no client at {address} uses {name}"))
                .with_repair("cleat fence ls shows the clients")
        }
    }
}

pub(crate) fn not_removed(error: librbd::Error, address: &str, spec: &RbdSpec) -> Error {
    let kind = errors::kind(&error);
    let failed = Error::new(kind, format!("cannot remove {address} from the blocklist"));
    let failed = failed.with_source(error);
    if kind != ErrorKind::PermissionDenied {
        return failed;
    }
    let right = ", allow command \"osd blocklist\" with blocklistop=rm";
    failed.with_repair(format!(
        "'profile rbd' may add to the blocklist, but not remove from it: use a client that may (id=admin \
         in the volume's options), or grant it to this one: {}",
        errors::caps_command(spec, None, right)
    ))
}

/// Why a client may not be removed from the blocklist.
#[derive(Debug)]
struct NotProved {
    message: String,
    repair: String,
}

/// Proves that the client at `address` cannot send requests any more, as seen from the process `here`.
///
/// # Errors
/// Returns what is not proved.
fn prove_ended(
    address: &str,
    claim: Option<&Claim>,
    clients: &[Client],
    here: &Claimant,
) -> Result<(), NotProved> {
    let not_proved =
        |message: String, repair: &str| Err(NotProved { message, repair: repair.to_owned() });
    let seen = clients.iter().find(|client| client.address == address);
    if seen.is_some_and(|client| client.holds_lock || client.watches) {
        let message = "it still has the image open, or its watch has not expired".to_owned();
        return not_proved(message, "end it, then wait for about 30 s");
    }
    let unknown = "no record says whose client it was".to_owned();
    let Some(claim) = claim else { return not_proved(unknown, KEEP_ENTRY) };
    if let Some(shared) = claim.shared.iter().find(|shared| shared.client.address == address) {
        if shared.released {
            return Ok(());
        }
        let message = format!("it has a claim of the image: {}", shared.client.describe());
        return not_proved(message, "use cleat fence add, which removes the claim");
    }
    if claim.client.address == address {
        if claim.released {
            return Ok(());
        }
        let message = format!("it has the newest claim of the image: {}", claim.client.describe());
        return not_proved(
            message,
            "map the volume where it is needed first, or use cleat fence add",
        );
    }
    let Some(client) = claim.cut.iter().find(|client| client.address == address) else {
        return not_proved(unknown, KEEP_ENTRY);
    };
    if client.generation == 0 || client.boot_id.is_empty() {
        return not_proved(unknown, KEEP_ENTRY);
    }
    if client.boot_id == here.boot_id {
        if client.process.is_some_and(|process| process.has_ended(here.process.as_ref())) {
            return Ok(());
        }
        let pid = client.process.map_or("unknown".to_owned(), |process| process.pid.to_string());
        let message = format!("its process on this node (pid {pid}) is not proved to have ended");
        let repair = "end it, and repeat the command in the pid namespace that it ran in";
        return not_proved(message, repair);
    }
    let restarted = |node: &str, machine: &str, boot_id: &str| {
        is_same_node((&client.node, &client.machine), (node, machine))
            && boot_id != client.boot_id
            && !boot_id.is_empty()
    };
    let later = std::iter::once(&claim.client).chain(&claim.cut);
    let mut later = later.filter(|other| other.generation > client.generation);
    if restarted(&here.node, &here.machine, &here.boot_id)
        || later.any(|c| restarted(&c.node, &c.machine, &c.boot_id))
    {
        return Ok(());
    }
    not_proved(
        format!("it is not known whether the node {:?} was restarted since", client.node),
        "repeat the command on that node, or keep the entry: a new client has a new address",
    )
}

/// The hint where no proof is possible.
const KEEP_ENTRY: &str = "keep the entry: a new client has a new address";

#[cfg(test)]
mod tests {
    use super::*;
    use cleat_backend::claimant::ProcessMark;

    fn claimant(node: &str, boot: &str, pid: u32) -> Claimant {
        let process = ProcessMark::own().map(|own| ProcessMark { pid, ..own });
        let (node, boot_id) = (node.to_owned(), boot.to_owned());
        Claimant { node, boot_id, mapping_id: "m".into(), process, ..Claimant::default() }
    }

    /// The claim of a client at `B/2` on `node`, which has fenced the client of `from` at `A/1` and a
    /// client of another tool at `T/3`.
    fn taken_over(from: &Claimant, node: &str, boot: &str) -> Claim {
        let first = Claim::after(None, "id".into(), from, "A/1".into(), 0, &[]);
        let next = claimant(node, boot, 1);
        Claim::after(
            Some(&first),
            "id".into(),
            &next,
            "B/2".into(),
            0,
            &["A/1".into(), "T/3".into()],
        )
    }

    fn not_proved(address: &str, claim: &Claim, here: &Claimant) -> Option<String> {
        prove_ended(address, Some(claim), &[], here).err().map(|not_proved| not_proved.message)
    }

    #[test]
    fn only_a_client_that_is_proved_to_have_ended_is_removed_from_the_blocklist() {
        let ended = claimant("a", "boot-a", u32::MAX);
        let alive = claimant("a", "boot-a", std::process::id());
        let claim = taken_over(&ended, "b", "boot-b");
        let elsewhere = claimant("b", "boot-b", std::process::id());
        let says = |address: &str, claim: &Claim, here: &Claimant, part: &str| {
            let message =
                not_proved(address, claim, here).unwrap_or_else(|| panic!("proved: {part}"));
            assert!(message.contains(part), "{message}");
        };
        assert_eq!(not_proved("A/1", &claim, &alive), None, "its process has ended");
        says("A/1", &taken_over(&alive, "b", "boot-b"), &alive, "not proved to have ended");
        says("A/1", &claim, &elsewhere, "\"a\" was restarted");
        assert_eq!(not_proved("A/1", &claim, &claimant("a", "boot-a2", 1)), None, "restarted");
        let back = taken_over(&alive, "a", "boot-a2");
        assert_eq!(not_proved("A/1", &back, &elsewhere), None, "its node has claimed again");
        let nameless = taken_over(&claimant("localhost", "x", u32::MAX), "localhost", "y");
        says("A/1", &nameless, &claimant("localhost", "z", 1), "restarted");
        says("T/3", &claim, &alive, "whose client");
        says("U/4", &claim, &alive, "whose client");
        says("B/2", &claim, &elsewhere, "newest claim");
        assert_eq!(
            not_proved("B/2", &claim.released(), &elsewhere),
            None,
            "it has released its claim"
        );
        assert!(prove_ended("A/1", None, &[], &alive).is_err());
        let open = Client { address: "A/1".into(), watches: true, ..Client::default() };
        assert!(prove_ended("A/1", Some(&claim), &[open], &alive).is_err());
    }

    #[test]
    fn unknown_entries_of_the_blocklist_are_skipped() {
        let text = r#"[{"addr":"1.2.3.4:0/5","until":"2031-01-01T00:00:00.0+0000","x":1},
                       {"range":"10.0.0.0/8","until":"never"}, 7][]"#;
        let read = parse_blocklist(text).unwrap();
        assert_eq!((read.len(), read[0].addr.as_str()), (1, "1.2.3.4:0/5"));
        assert!(parse_blocklist("listed 0 entries").is_err());
        assert!(parse_blocklist("[]{").is_err());
    }

    #[test]
    fn entries_of_ended_clients_are_told_by_their_end() {
        let ends_soon = |until: &str, now: &str| {
            let now_s = now.parse::<jiff::Timestamp>().unwrap().as_second().cast_unsigned();
            BlocklistEntry { addr: "1.2.3.4:0/5".into(), until: until.into() }.ends_soon(now_s)
        };
        let now = "2031-01-01T10:00:00Z";
        assert!(ends_soon("2031-01-01T11:00:00.123456+0000", now), "an hour");
        assert!(ends_soon("2031-01-01T12:00:00.0+0100", now), "an hour, in another time zone");
        assert!(!ends_soon("2031-01-02T10:00:00.000000+0000", now), "a day");
        assert!(!ends_soon("2036-01-01T10:00:00.000000+0000", now));
        assert!(!ends_soon("never", now));
    }
}
