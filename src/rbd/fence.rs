//! Who may write to an image, and who was cut off, for administrators: claim, lock, watchers and
//! blocklist beside each other.
//!
//! To cut a client off is to take the image over and to let go of it again: the claim that is left says
//! that whoever had it before has lost it, so that its mapping does not go on, and that everybody may
//! have it. To let one in again is refused as long as anything may be left of it. There is no way
//! around that here: an entry that stays does no harm, since a new client has a new address; and one
//! that goes too early lets an old write land.

use std::time::Instant;

use librbd::{Cluster, Image, Open};
use serde::Deserialize;

use crate::claim::decision::{Occasion, is_same_node};
use crate::claim::header::ImageHeader;
use crate::claim::record::{self, Claim};
use crate::claim::{self, Contest};
use crate::connection::{config, load_library};
use crate::errors::{self, problem};
use crate::spec::RbdSpec;
use crate::timeouts::{answer, within};
use cleat_backend::claimant::Claimant;
use cleat_backend::fence::{Client, Fence, Standing, Target};
use cleat_backend::uri::invalid;
use cleat_core::clock::{Clock, SystemClock};
use cleat_core::error::{Error, ErrorKind, Result};

/// An image, looked at from outside.
pub(crate) struct RbdFence {
    spec: RbdSpec,
    name: String,
}

impl RbdFence {
    pub(crate) fn of(spec: &RbdSpec) -> Result<Self> {
        load_library()?;
        if spec.snapshot.is_some() || spec.shared {
            let message = "a snapshot is written by nobody, and a shared image by everybody";
            return Err(invalid(message).with_repair("name the image itself, without lock=shared"));
        }
        Ok(Self { spec: spec.clone(), name: spec.image_name() })
    }

    /// Calls `work` with the image, and waits for it at most until `deadline`. librbd opens the header of
    /// the image only: no data is read or written, and no content key is needed.
    fn call<T: Send + 'static>(
        &self,
        how: Open,
        deadline: Instant,
        work: impl FnOnce(&Image, &str) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let (spec, name) = (self.spec.clone(), self.name.clone());
        let left = deadline.saturating_duration_since(SystemClock.now());
        within(left, &answer(&self.name), move || {
            let failed = |error| problem(error, &name, &spec);
            let cluster = Cluster::connect(&config(&spec)).map_err(failed)?;
            let pool = cluster.pool(&spec.pool, spec.namespace.as_deref()).map_err(failed)?;
            let done = work(&*pool.open(&spec.image, None, how).map_err(failed)?, &name);
            done.map_err(|error| errors::explained(error, &spec))
        })
    }
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
        if targets.is_empty() { Err(nobody(&self.name, address)) } else { Ok(targets) }
    }

    fn fence(&self, targets: &[Target], claimant: &Claimant, deadline: Instant) -> Result<()> {
        let claimant = claimant.clone();
        let cut: Vec<String> = targets.iter().map(|target| target.client.address.clone()).collect();
        if targets.iter().any(|target| may_write(&target.client)) {
            return self.call(Open::Write, deadline, move |image, name| {
                take(image, name, &claimant, Some(&cut))
            });
        }
        // They have the image open without a claim, or another client has taken over from them.
        self.call(Open::ReadOnly, deadline, move |image, _| {
            cut.iter().try_for_each(|address| claim::cut_off(image.pool().cluster(), address))
        })
    }

    fn unfence(&self, address: &str, here: &Claimant, deadline: Instant) -> Result<bool> {
        if !record::is_address(address) {
            return Err(invalid(format!("{address:?} is no client's address"))
                .with_repair("addresses are written IP:PORT/NONCE; cleat fence ls shows them"));
        }
        let (address, here, spec) = (address.to_owned(), here.clone(), self.spec.clone());
        self.call(Open::ReadOnly, deadline, move |image, name| {
            let clients = clients(image, name)?;
            let claim = claim::of(image, name)?;
            let cut_off = |c: &&Client| c.address == address && c.cut_off_until.is_some();
            if let Err(doubt) = prove_gone(&address, claim.as_ref(), &clients, &here) {
                let message = format!("{address} is not let in again: {}", doubt.message);
                return Err(Error::new(ErrorKind::InUse, message).with_repair(doubt.repair));
            }
            if !clients.iter().any(|client| cut_off(&client)) {
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

/// Takes the image from the clients in `only`, or from whoever has to be cut off, and lets go of it.
pub(crate) fn take(
    image: &Image,
    name: &str,
    claimant: &Claimant,
    only: Option<&[String]>,
) -> Result<()> {
    let (header, occasion) = (&ImageHeader { image, name }, Occasion::Opening);
    let contest = Contest { header, name, claimant, occasion, only };
    let Some(taken) = contest.acquire()? else {
        return Err(Error::new(ErrorKind::Internal, format!("{name} cannot be taken over")));
    };
    claim::release(image, &taken, name)?;
    image.lock_release().map_err(|error| errors::later(error, name))
}

fn clients(image: &Image, name: &str) -> Result<Vec<Client>> {
    let failed = |error| errors::later(error, name);
    let claim = claim::of(image, name)?;
    let mut clients: Vec<Client> = Vec::new();
    if let Some(claim) = &claim {
        let standing = if claim.released { Standing::Released } else { Standing::Held };
        clients.push(known(&claim.client, standing));
        let earlier = claim.cut.iter().rev().map(|client| known(client, Standing::Taken));
        clients.extend(earlier.filter(|client| client.address != claim.client.address));
    }
    for locker in image.lockers().map_err(failed)? {
        entry(&mut clients, &locker.address).holds_lock = true;
    }
    for watcher in image.watchers().map_err(failed)? {
        entry(&mut clients, &watcher.address).watches = true;
    }
    for banned in blocklist(image.pool().cluster(), name)? {
        let listed = clients.iter_mut().find(|client| client.address == banned.addr);
        if let Some(client) = listed {
            client.cut_off_until = Some(banned.until);
        }
    }
    // What was taken over and is no longer cut off is history.
    clients.retain(|c| c.claim != Some(Standing::Taken) || c.cut_off_until.is_some() || c.watches);
    Ok(clients)
}

fn known(client: &record::Client, standing: Standing) -> Client {
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

fn entry<'a>(clients: &'a mut Vec<Client>, address: &str) -> &'a mut Client {
    let known = clients.iter().position(|client| client.address == address);
    let index = known.unwrap_or_else(|| {
        clients.push(Client { address: address.to_owned(), ..Client::default() });
        clients.len() - 1
    });
    &mut clients[index]
}

/// An entry of the monitors' list. Newer ones have others beside these, for ranges.
#[derive(Debug, Deserialize)]
struct Banned {
    addr: String,
    until: String,
}

fn blocklist(cluster: &Cluster, name: &str) -> Result<Vec<Banned>> {
    let ask = |word: &str| {
        cluster.monitor_command(&format!("{{\"prefix\": \"osd {word} ls\", \"format\": \"json\"}}"))
    };
    let text = match ask("blocklist") {
        // Ceph 15 knows it by its older name only.
        Err(error) if error.errno() == Some(libc::EINVAL) => ask("blacklist"),
        other => other,
    };
    entries(&text.map_err(|error| errors::later(error, name))?)
}

fn entries(json: &str) -> Result<Vec<Banned>> {
    // One list after the other: of clients, and of ranges.
    let lists: Result<Vec<Vec<serde_json::Value>>, _> =
        serde_json::Deserializer::from_str(json).into_iter().collect();
    let lists = lists.map_err(|error| {
        let message = "the monitors' blocklist cannot be understood";
        Error::new(ErrorKind::Internal, message).with_source(error)
    })?;
    // What is no client's entry bans nobody that we know.
    let entries = lists.into_iter().flatten();
    Ok(entries.filter_map(|entry| serde_json::from_value(entry).ok()).collect())
}

/// What cutting a client off means, as a sentence.
fn consequence(client: &Client, name: &str) -> String {
    let on = |what: &str, text: &Option<String>| {
        text.as_ref().map(|text| format!(" of the {what} {text}")).unwrap_or_default()
    };
    let (node, mapping) = (on("node", &client.node), on("mapping", &client.mapping_id));
    let lock = if client.holds_lock { "its lock is broken, " } else { "" };
    format!(
        "the client {}{mapping}{node} is cut off from the whole cluster: {lock}what it has not \
         written to {name} is lost, and what is mounted on it there fails",
        client.address
    )
}

fn nobody(name: &str, address: Option<&str>) -> Error {
    match address {
        None => Error::new(ErrorKind::NotFound, format!("nobody may write to {name} now")),
        Some(address) => {
            Error::new(ErrorKind::NotFound, format!("{address} is no client that uses {name}"))
                .with_repair("cleat fence ls shows who does")
        }
    }
}

fn not_removed(error: librbd::Error, address: &str, spec: &RbdSpec) -> Error {
    let kind = errors::kind(&error);
    let failed = Error::new(kind, format!("{address} cannot be taken off the blocklist"));
    let failed = failed.with_source(error);
    if kind != ErrorKind::PermissionDenied {
        return failed;
    }
    let right = ", allow command \"osd blocklist\" with blocklistop=rm";
    failed.with_repair(format!(
        "'profile rbd' may add to the blocklist, not remove from it: use a client that may (id=admin \
         in the volume's options), or let this one: {}",
        errors::caps(spec, None, right)
    ))
}

/// Why a client may not be let in again.
#[derive(Debug)]
struct Doubt {
    message: String,
    repair: String,
}

/// Whether nothing can come from the client `address` any more.
fn prove_gone(
    address: &str,
    claim: Option<&Claim>,
    clients: &[Client],
    here: &Claimant,
) -> Result<(), Doubt> {
    let doubt = |message: String, repair: &str| Err(Doubt { message, repair: repair.to_owned() });
    let seen = clients.iter().find(|client| client.address == address);
    if seen.is_some_and(|client| client.holds_lock || client.watches) {
        let message = "it still has the image open, or the OSDs have not given it up".to_owned();
        return doubt(message, "end it, then wait for about 30 s");
    }
    let unknown = "nothing that is remembered says whose client it was".to_owned();
    let Some(claim) = claim else {
        return doubt(unknown, "leave it there: a new client has a new address");
    };
    if claim.client.address == address {
        if claim.released {
            return Ok(());
        }
        let message = format!("it has the newest claim of the image: {}", claim.client.describe());
        return doubt(message, "map the volume where it is wanted first, or: cleat fence add");
    }
    let Some(client) = claim.cut.iter().find(|client| client.address == address) else {
        return doubt(unknown, "leave it there: a new client has a new address");
    };
    if client.generation == 0 || client.boot_id.is_empty() {
        return doubt(unknown, "leave it there: a new client has a new address");
    }
    if client.boot_id == here.boot_id {
        if client.process.is_some_and(|process| process.has_ended(here.process.as_ref())) {
            return Ok(());
        }
        let pid = client.process.map_or("unknown".to_owned(), |process| process.pid.to_string());
        let message = format!("its process on this node (number {pid}) is not proved gone");
        return doubt(message, "end it, and ask from the pid namespace that it ran in");
    }
    let restarted = |node: &str, machine: &str, boot_id: &str| {
        is_same_node(client, node, machine) && boot_id != client.boot_id && !boot_id.is_empty()
    };
    let later = std::iter::once(&claim.client).chain(&claim.cut);
    let mut later = later.filter(|other| other.generation > client.generation);
    if restarted(&here.node, &here.machine, &here.boot_id)
        || later.any(|c| restarted(&c.node, &c.machine, &c.boot_id))
    {
        return Ok(());
    }
    doubt(
        format!("it is not known that the node {:?} was restarted since", client.node),
        "ask on that node, where it can be seen; or leave it there: a new client has a new address",
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use cleat_backend::claimant::ProcessMark;

    fn claimant(node: &str, boot: &str, pid: u32) -> Claimant {
        let process = ProcessMark::own().map(|own| ProcessMark { pid, ..own });
        let (node, boot_id) = (node.to_owned(), boot.to_owned());
        Claimant { node, boot_id, mapping_id: "m".into(), process, ..Claimant::default() }
    }

    /// Of a client at `A/1`, which `claimant` was, and of one after it at `B/2` on node b.
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

    fn doubt(address: &str, claim: &Claim, here: &Claimant) -> Option<String> {
        prove_gone(address, Some(claim), &[], here).err().map(|doubt| doubt.message)
    }

    #[test]
    fn only_who_is_proved_gone_may_return() {
        let gone = claimant("a", "boot-a", u32::MAX);
        let alive = claimant("a", "boot-a", std::process::id());
        let claim = taken_over(&gone, "b", "boot-b");
        let elsewhere = claimant("b", "boot-b", std::process::id());
        let says = |address: &str, claim: &Claim, here: &Claimant, part: &str| {
            let told = doubt(address, claim, here).unwrap_or_else(|| panic!("let in: {part}"));
            assert!(told.contains(part), "{told}");
        };
        assert_eq!(doubt("A/1", &claim, &alive), None, "its process is gone");
        says("A/1", &taken_over(&alive, "b", "boot-b"), &alive, "not proved gone");
        says("A/1", &claim, &elsewhere, "\"a\" was restarted");
        assert_eq!(doubt("A/1", &claim, &claimant("a", "boot-a2", 1)), None, "restarted");
        let back = taken_over(&alive, "a", "boot-a2");
        assert_eq!(doubt("A/1", &back, &elsewhere), None, "its node has claimed again");
        let nameless = taken_over(&claimant("localhost", "x", u32::MAX), "localhost", "y");
        says("A/1", &nameless, &claimant("localhost", "z", 1), "restarted");
        says("T/3", &claim, &alive, "whose client");
        says("U/4", &claim, &alive, "whose client");
        says("B/2", &claim, &elsewhere, "newest claim");
        assert_eq!(doubt("B/2", &claim.released(), &elsewhere), None, "it has let go");
        assert!(prove_gone("A/1", None, &[], &alive).is_err());
        let open = Client { address: "A/1".into(), watches: true, ..Client::default() };
        assert!(prove_gone("A/1", Some(&claim), &[open], &alive).is_err());
    }

    #[test]
    fn the_blocklist_is_read_as_far_as_it_is_understood() {
        let text = r#"[{"addr":"1.2.3.4:0/5","until":"2031-01-01T00:00:00.0+0000","x":1},
                       {"range":"10.0.0.0/8","until":"never"}, 7][]"#;
        let read = entries(text).unwrap();
        assert_eq!((read.len(), read[0].addr.as_str()), (1, "1.2.3.4:0/5"));
        assert!(entries("listed 0 entries").is_err());
        assert!(entries("[]{").is_err());
    }
}
