//! The claim record in the image's metadata under [`KEY`]: JSON that every client with write access to the
//! image can change, so it is validated like any other input. New versions only add fields. Unknown
//! fields are ignored when reading and are lost with the next claim.

use serde::{Deserialize, Serialize};

use cleat_backend::claimant::{Claimant, ProcessMark};
use cleat_core::error::{Error, ErrorKind, Result};
use cleat_grants::object::{Generation, Mode};
use cleat_grants::record::{Claim as GrantClaim, Record, Refusal, Seal};

/// The metadata key.
pub(crate) const KEY: &str = "cleat.claim";

/// The metadata key of an announcement: the record that a client will write under [`KEY`] once it holds
/// the lock.
pub(crate) const ANNOUNCED: &str = "cleat.claim.next";

/// The version of a record without grants.
const VERSION: u32 = 1;

/// The version of a record with grants: a build that does not know them would claim a sealed image.
const VERSION_GRANTS: u32 = 2;

/// The maximum number of seals in the record. The controller removes old ones (`Record::seal`).
const MAX_SEALS: usize = 128;

/// The maximum length of a record, in bytes.
const MAX_RECORD: usize = 64 << 10;

/// The maximum length of a text in the record, in bytes.
const MAX_TEXT: usize = 256;

/// The maximum number of fenced clients in the record. `cleat fence clear` needs them to decide whether a
/// client may be removed from the blocklist.
const MAX_CUT: usize = 16;

/// The claim of an image: the client that writes to it, or wrote to it last.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Claim {
    version: u32,
    /// The image's id. Clones and copies inherit the metadata, and the id shows that the claim is not
    /// theirs.
    image: String,
    #[serde(flatten)]
    pub(crate) client: Client,
    /// Whether the client has released the claim. It then has no request in flight.
    #[serde(default)]
    pub(crate) released: bool,
    /// The clients that were fenced before, oldest first.
    #[serde(default)]
    pub(crate) cut: Vec<Client>,
    /// What the grants of the volume have left.
    #[serde(default, skip_serializing_if = "Grants::is_empty")]
    grants: Grants,
}

/// The part of the record of a granted volume ([`Record`]) that outlives a claim.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
struct Grants {
    generation: Generation,
    lowest: Generation,
    seals: Vec<Seal>,
}

impl Grants {
    fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// A client of the cluster, with the node and the mapping that it wrote for.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Client {
    pub(crate) node: String,
    /// The hash of the node's machine id (`cleat_sys::host::machine_id_hash`), or an empty text. It
    /// distinguishes nodes with the same name.
    pub(crate) machine: String,
    pub(crate) boot_id: String,
    pub(crate) mapping_id: String,
    pub(crate) process: Option<ProcessMark>,
    /// The number of the claim, which increases by one with every claim of the image. 0 for a client
    /// that made no claim.
    pub(crate) generation: u64,
    /// The client's address in the cluster (`IP:PORT/NONCE`), which is also the key of the blocklist.
    pub(crate) address: String,
    /// When the image was claimed, in seconds since the Unix epoch.
    pub(crate) since: u64,
    /// The generation of the grant with which the client has claimed; 0 for a client without one.
    #[serde(skip_serializing_if = "is_zero")]
    pub(crate) grant: u64,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes references")]
fn is_zero(number: &u64) -> bool {
    *number == 0
}

impl Claim {
    /// Parses the metadata `text` of the image with the id `id`. `name` is the image's name in error
    /// messages. Returns `None` for no text, and for the claim of another image that this one is a copy
    /// of.
    ///
    /// # Errors
    /// Returns `Internal` for text that is not a claim, and `Unsupported` for a newer version.
    pub(crate) fn read(text: Option<&str>, id: &str, name: &str) -> Result<Option<Self>> {
        let Some(text) = text else { return Ok(None) };
        let wrong = |kind, why: &str| {
            let message = format!("the claim of {name} (image metadata {KEY}) {why}");
            Error::new(kind, message).with_repair(format!(
                "check whether a client uses the image (rbd status {name}); if none does: rbd \
                 image-meta remove {name} {KEY}"
            ))
        };
        let garbage = |why: &str| wrong(ErrorKind::Internal, why);
        if text.len() > MAX_RECORD {
            return Err(garbage("is too long"));
        }
        let mut claim: Self = serde_json::from_str(text)
            .map_err(|error| garbage("is not valid JSON for a claim").with_source(error))?;
        if claim.version > VERSION_GRANTS {
            return Err(wrong(ErrorKind::Unsupported, "was written by a newer version of cleat"));
        }
        claim.cut.drain(..claim.cut.len().saturating_sub(MAX_CUT));
        let clients = || std::iter::once(&claim.client).chain(&claim.cut);
        if claim.client.generation == u64::MAX
            || !clients().all(Client::is_valid)
            || !claim.grants.is_valid()
        {
            return Err(garbage("has invalid values"));
        }
        Ok((claim.image == id).then_some(claim))
    }

    /// Makes the claim of `claimant` that follows `last`. `fenced` are the addresses of the clients that
    /// were fenced for it, and `since` is the time in seconds since the Unix epoch.
    pub(crate) fn after(
        last: Option<&Self>,
        image: String,
        claimant: &Claimant,
        address: String,
        since: u64,
        fenced: &[String],
    ) -> Self {
        let mut known = last.map_or_else(Vec::new, |last| last.cut.clone());
        for address in fenced {
            let named = last.map(|last| &last.client).filter(|client| client.address == *address);
            let unnamed = || Client { address: address.clone(), since, ..Client::default() };
            known.retain(|client| client.address != *address);
            known.push(named.cloned().unwrap_or_else(unnamed));
        }
        known.drain(..known.len().saturating_sub(MAX_CUT));
        let client = Client {
            node: claimant.node.clone(),
            machine: claimant.machine.clone(),
            boot_id: claimant.boot_id.clone(),
            mapping_id: claimant.mapping_id.clone(),
            process: claimant.process,
            // Cannot overflow: `read` rejects the maximum.
            generation: last.map_or(0, |last| last.client.generation) + 1,
            address,
            since,
            grant: claimant.grant.unwrap_or_default(),
        };
        let mut grants = last.map_or_else(Grants::default, |last| last.grants.clone());
        // As `Record::admit_claim`, for one writer.
        grants.generation = grants.generation.max(Generation(client.grant));
        grants.lowest = grants.lowest.max(Generation(client.grant));
        let version = if grants.is_empty() { VERSION } else { VERSION_GRANTS };
        Self { version, image, client, released: false, cut: known, grants }
    }

    /// Returns the record of the volume. `listed` are the addresses on the blocklist: a seal names a client only
    /// if it is there.
    pub(crate) fn record(&self, listed: &[String]) -> Record {
        let mut record = self.record_as_written();
        for seal in &mut record.seals {
            seal.client.take_if(|client| !listed.contains(client));
        }
        record
    }

    /// Returns the record of the volume. Clients that its seals name may have been removed from the blocklist.
    pub(crate) fn record_as_written(&self) -> Record {
        let Grants { generation, lowest, seals } = self.grants.clone();
        let claims = if self.released {
            Vec::new()
        } else {
            let Client { node, grant, address, .. } = self.client.clone();
            let generation = Generation(grant);
            vec![GrantClaim { node, generation, client: address, mode: Mode::ReadWrite }]
        };
        Record { generation, lowest, claims, seals }
    }

    /// Returns why a claim with the grant of `claimant` is not admitted. A client of another node is not a reason:
    /// [`decide`](super::decision::decide) is stricter about it.
    pub(crate) fn refusal(&self, claimant: &Claimant) -> Option<Refusal> {
        let (record, grant) = (self.record_as_written(), Generation(claimant.grant?));
        let refusal = record.refusal(&claimant.node, grant, Mode::ReadWrite);
        refusal.filter(Refusal::is_final)
    }

    /// Returns the claim as released, with the generations and seals of `record`.
    pub(crate) fn sealed(self, record: &Record) -> Self {
        let Record { generation, lowest, seals, .. } = record.clone();
        let grants = Grants { generation, lowest, seals };
        Self { version: VERSION_GRANTS, released: true, grants, ..self }
    }

    /// Adds what `announced` says about fenced clients that had announced a claim and not written it.
    pub(crate) fn with_details(mut self, announced: Option<&Self>) -> Self {
        let known = || announced.iter().flat_map(|a| std::iter::once(&a.client).chain(&a.cut));
        for client in self.cut.iter_mut().filter(|client| client.generation == 0) {
            if let Some(found) = known().find(|known| known.address == client.address) {
                client.clone_from(found);
            }
        }
        self
    }

    /// Returns the JSON text of the record.
    pub(crate) fn text(&self) -> Result<String> {
        serde_json::to_string(self).map_err(|error| {
            Error::new(ErrorKind::Internal, "cannot write a claim as JSON").with_source(error)
        })
    }

    /// Returns the claim marked as released.
    pub(crate) fn released(&self) -> Self {
        Self { released: true, ..self.clone() }
    }

    /// Returns whether both are the same claim, released or not.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        self.client == other.client
    }
}

impl Grants {
    fn is_valid(&self) -> bool {
        let seals = &self.seals;
        let is_valid =
            |seal: &Seal| is_plain(&seal.node) && seal.client.as_deref().is_none_or(is_address);
        // The next generation is one higher.
        let is_bounded = self.generation.0 < u64::MAX && self.lowest.0 < u64::MAX;
        is_bounded && seals.len() <= MAX_SEALS && seals.iter().all(is_valid)
    }
}

fn is_plain(text: &str) -> bool {
    text.len() <= MAX_TEXT && !text.chars().any(char::is_control)
}

impl Client {
    fn is_valid(&self) -> bool {
        let texts = [&self.node, &self.machine, &self.boot_id, &self.mapping_id];
        texts.into_iter().all(|text| is_plain(text)) && is_address(&self.address)
    }

    /// Describes the client for messages: its node, mapping, address and the time of its claim.
    pub(crate) fn describe(&self) -> String {
        let named = |what: &str, name: &str| match name {
            "" => format!("an unnamed {what}"),
            name => format!("the {what} {name}"),
        };
        let (node, mapping) = (named("node", &self.node), named("mapping", &self.mapping_id));
        let since = std::time::UNIX_EPOCH.checked_add(std::time::Duration::from_secs(self.since));
        let since = since.filter(|_| self.since <= LAST_SECOND);
        let since = since.map_or_else(
            || "an unknown time".to_owned(),
            |since| humantime::format_rfc3339_seconds(since).to_string(),
        );
        format!("{node} ({mapping}, client {}, since {since})", self.address)
    }
}

/// The last second of the year 9999, the latest time that `humantime` can format.
const LAST_SECOND: u64 = 253_402_300_799;

/// Returns whether `text` can be the address of one client (`IP:PORT/NONCE`), so that it may be put into a
/// command for the monitors. An entry of the blocklist with port 0 and nonce 0 stands for every client of the
/// host (`OSDMap::is_blocklisted`), and no client has the nonce 0.
pub(crate) fn is_address(text: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"[]:.".contains(&byte);
    let Some((host, nonce)) = text.split_once('/') else { return false };
    let one_client = nonce.bytes().all(|byte| byte.is_ascii_digit())
        && nonce.parse().is_ok_and(|nonce: u64| nonce != 0);
    text.len() <= MAX_TEXT && host.contains(':') && host.bytes().all(plain) && one_client
}

#[cfg(test)]
mod tests {
    use cleat_grants::record::Target;
    use proptest::prelude::*;

    use super::*;

    fn claimant() -> Claimant {
        Claimant {
            node: "n1".into(),
            boot_id: "b1".into(),
            mapping_id: "m1".into(),
            process: ProcessMark::own(),
            ..Claimant::default()
        }
    }

    fn claim() -> Claim {
        Claim::after(None, "id".into(), &claimant(), "10.0.0.1:0/7".into(), 1_700_000_000, &[])
    }

    fn read(text: &str) -> Result<Option<Claim>> {
        Claim::read(Some(text), "id", "p/i")
    }

    #[test]
    fn a_claim_survives_a_round_trip_and_unknown_fields_are_ignored() {
        let mut claim = claim();
        claim.cut.push(Client { address: "1.2.3.4:0/5".into(), ..Client::default() });
        let text = claim.text().unwrap();
        assert_eq!(read(&text).unwrap(), Some(claim.clone()));
        assert_eq!(Claim::read(Some(&text), "another", "p/i").unwrap(), None);
        assert_eq!(Claim::read(None, "id", "p/i").unwrap(), None);
        let newer = text.replacen('{', r#"{"colour":["blue"],"#, 1);
        assert_eq!(read(&newer).unwrap(), Some(claim));
    }

    #[test]
    fn an_invalid_claim_is_an_error_with_a_repair() {
        let good = claim().text().unwrap();
        let many = r#"{"address":"1.2.3.4:0/5"},"#.repeat(10_000);
        for (text, kind) in [
            (String::new(), ErrorKind::Internal),
            ("null".into(), ErrorKind::Internal),
            ("[]".into(), ErrorKind::Internal),
            (good[..good.len() - 1].into(), ErrorKind::Internal),
            (good.replace("\"n1\"", "7"), ErrorKind::Internal),
            (good.replace("n1", &"n".repeat(300)), ErrorKind::Internal),
            (good.replace("n1", "n\\u001b[2J"), ErrorKind::Internal),
            (good.replace("10.0.0.1:0/7", "10.0.0.1\\\" x/"), ErrorKind::Internal),
            (good.replace("10.0.0.1:0/7", ""), ErrorKind::Internal),
            (good.replace("\"generation\":1", "\"generation\":-1"), ErrorKind::Internal),
            (
                good.replace("\"generation\":1", "\"generation\":18446744073709551615"),
                ErrorKind::Internal,
            ),
            (good.replace("\"version\":1", "\"version\":3"), ErrorKind::Unsupported),
            (good.replace("\"cut\":[", &format!("\"cut\":[{many}")), ErrorKind::Internal),
        ] {
            let error = read(&text).expect_err(&text);
            assert_eq!(error.kind(), kind, "{text}");
            assert!(error.repair().unwrap().contains("image-meta remove p/i"), "{error:?}");
        }
    }

    /// Returns a claim with a grant and a seal.
    fn granted() -> Claim {
        let (node, client) = ("n2".to_owned(), Some("10.0.0.2:0/8".to_owned()));
        let seal = Seal { generation: Generation(2), node, client };
        let (generation, lowest) = (Generation(3), Generation(3));
        let record = Record { generation, lowest, seals: vec![seal], ..Record::default() };
        claim().sealed(&record)
    }

    /// A build that does not know grants must not claim such an image.
    #[test]
    fn only_a_claim_with_grants_has_the_newer_version() {
        let text = claim().text().unwrap();
        assert!(text.contains(r#""version":1"#) && !text.contains("grant"), "{text}");
        let granted = granted();
        let text = granted.text().unwrap();
        assert!(text.contains(r#""version":2"#), "{text}");
        assert_eq!(read(&text).unwrap(), Some(granted.clone()));
        let claimant = Claimant { grant: Some(3), ..claimant() };
        for last in [None, Some(&granted)] {
            let next = Claim::after(last, "id".into(), &claimant, "10.0.0.1:0/8".into(), 0, &[]);
            let text = next.text().unwrap();
            assert!(text.contains(r#""version":2"#) && text.contains(r#""grant":3"#), "{text}");
            assert_eq!(read(&text).unwrap(), Some(next));
        }
    }

    #[test]
    fn invalid_grants_are_an_error() {
        let good = granted();
        let mut cases = vec![good.clone(); 6];
        cases[0].grants.generation = Generation(u64::MAX);
        cases[1].grants.lowest = Generation(u64::MAX);
        cases[2].grants.seals[0].node = "n\n".to_owned();
        cases[3].grants.seals[0].client = Some("10.0.0.2:0/0".to_owned());
        cases[4].grants.seals = vec![good.grants.seals[0].clone(); MAX_SEALS + 1];
        cases[5].cut.push(Client { address: "10.0.0.0/8".into(), ..Client::default() });
        for case in cases {
            let error = read(&case.text().unwrap()).expect_err("read");
            assert!(error.message().contains("invalid values"), "{error:?}");
        }
        let mut largest = good;
        largest.grants.generation = Generation(u64::MAX - 1);
        largest.grants.lowest = Generation(u64::MAX - 1);
        largest.grants.seals = vec![largest.grants.seals[0].clone(); MAX_SEALS];
        largest.grants.seals[0].client = None;
        assert_eq!(read(&largest.text().unwrap()).unwrap(), Some(largest));
    }

    /// Nodes that never return leave clients on the blocklist.
    #[test]
    fn a_volume_whose_nodes_are_lost_again_and_again_keeps_a_readable_claim() {
        let mut claim = claim();
        for generation in 1..1000 {
            let (node, generation) = (format!("node-{generation}"), Generation(generation));
            let target = Target { node, generation, mode: Mode::ReadWrite };
            let client = Some(format!("[fd00:1234:5678:9abc:def0:1234:5678:9abc]:0/{generation}"));
            let sealed = claim.record_as_written().seal(&target, client);
            claim = claim.sealed(&sealed);
        }
        let text = claim.text().unwrap();
        assert_eq!(read(&text).unwrap(), Some(claim));
    }

    #[test]
    fn texts_are_read_up_to_their_limits() {
        let padded = |length: usize| {
            let text = claim().text().unwrap();
            format!("{text}{}", " ".repeat(length - text.len()))
        };
        assert!(read(&padded(MAX_RECORD)).is_ok());
        let error = read(&padded(MAX_RECORD + 1)).unwrap_err();
        assert!(error.message().contains("too long"), "{error:?}");
        let named = |length| {
            let mut claim = claim();
            claim.client.node = "n".repeat(length);
            read(&claim.text().unwrap())
        };
        assert!(named(MAX_TEXT).is_ok());
        assert!(named(MAX_TEXT + 1).is_err());
        let address = |length: usize| format!("{}:0/7", "1".repeat(length - 4));
        assert!(is_address(&address(MAX_TEXT)));
        assert!(!is_address(&address(MAX_TEXT + 1)));
    }

    /// A client that had announced a claim and not written it.
    #[test]
    fn a_fenced_client_without_a_claim_is_described_by_its_announcement() {
        let cut = ["10.0.0.8:0/1".to_owned(), "10.0.0.9:0/1".to_owned()];
        let after = |last: Option<&Claim>, address: &str, cut: &[String]| {
            Claim::after(last, "id".into(), &claimant(), address.into(), 0, cut)
        };
        // The announcement of the first one, which was about to fence the second one.
        let earlier = after(None, &cut[1], &[]);
        let announced = after(Some(&earlier), &cut[0], &cut[1..]);
        let next = after(None, "10.0.0.1:0/7", &cut).with_details(Some(&announced));
        assert_eq!(next.cut, [announced.client.clone(), earlier.client.clone()]);
        // What the client has written itself is not replaced.
        let mut other = announced.clone();
        other.cut[0].node = "another".to_owned();
        let known = after(Some(&earlier), "10.0.0.1:0/7", &cut[1..]).with_details(Some(&other));
        assert_eq!(known.cut, [earlier.client]);
    }

    #[test]
    fn a_claim_stays_the_same_when_it_is_released() {
        let (first, of_first) = (claim(), claim().released());
        let next =
            Claim::after(Some(&first), "id".into(), &claimant(), "10.0.0.1:0/7".into(), 0, &[]);
        assert!(of_first.released && first.is_same(&of_first) && !first.is_same(&next));
    }

    #[test]
    fn an_address_stands_for_one_client() {
        for address in ["10.0.0.1:0/7", "[fd00::1]:6800/4294967295"] {
            assert!(is_address(address), "{address}");
        }
        for other in [
            "10.0.0.1:0/0",
            "10.0.0.1:0/00",
            "10.0.0.1:6800/0",
            "10.0.0.1:0/",
            "10.0.0.1:0",
            "10.0.0.0/8",
            "10.0.0.1/7",
            "10.0.0.1: 0/7",
            "10.0.0.1:0/7/0",
            "10.0.0.1:0/+7",
            "10.0.0.1:0/-1",
            ":/0",
            "",
        ] {
            assert!(!is_address(other), "{other}");
        }
    }

    #[test]
    fn fenced_clients_are_recorded_with_the_details_of_their_claims() {
        let first = claim();
        let cut = ["10.0.0.1:0/7".to_owned(), "10.0.0.9:0/1".to_owned()];
        let address = "10.0.0.2:0/8".to_owned();
        let mut next =
            Claim::after(Some(&first), "id".into(), &claimant(), address.clone(), 1, &cut);
        assert_eq!(next.client.generation, 2);
        assert_eq!(next.cut[0], first.client);
        assert_eq!((next.cut[1].generation, next.cut[1].node.as_str()), (0, ""));
        for nonce in 0..40 {
            let cut = [format!("10.0.0.3:0/{nonce}"), cut[0].clone()];
            next = Claim::after(Some(&next), "id".into(), &claimant(), address.clone(), 1, &cut);
        }
        assert_eq!(next.cut.len(), MAX_CUT);
        let again = next.cut.iter().filter(|client| client.address == cut[0]).count();
        assert_eq!((again, next.cut.last().unwrap().address.as_str()), (1, cut[0].as_str()));
        assert!(next.text().unwrap().len() < MAX_RECORD);
    }

    #[test]
    fn a_client_is_described_even_if_its_time_is_invalid() {
        let description = claim().client.describe();
        for part in ["node n1", "mapping m1", "10.0.0.1:0/7", "2023-11-14T22:13:20Z"] {
            assert!(description.contains(part), "{description}");
        }
        let odd = Client { since: u64::MAX, ..Client::default() };
        for part in ["an unnamed node", "an unnamed mapping", "since an unknown time"] {
            assert!(odd.describe().contains(part), "{}", odd.describe());
        }
        let last = Client { since: LAST_SECOND, ..Client::default() };
        assert!(last.describe().contains("since 9999-12-31T23:59:59Z"), "{}", last.describe());
    }

    proptest! {
        #[test]
        fn reading_and_describing_never_panics(text in ".{0,200}", since: u64) {
            let _ = read(&text);
            let mut odd = claim();
            odd.client.since = since;
            odd.client.node = text;
            if let Ok(Some(read)) = read(&odd.text().unwrap()) {
                read.client.describe();
            }
        }
    }
}
